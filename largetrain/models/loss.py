"""The output head and the next-token loss, without the full logits.

Logits are the largest tensor of a language model: 4096 tokens of Llama 3 are 1 GB in bf16 and 2.1 GB in fp32,
and the plain computation holds several fp32 copies. Here tokens go through the head in chunks. With more than
one chunk the logits are computed again in the backward pass, so that only one chunk exists at any time; with a
single chunk they are kept, in their own dtype, which costs no more memory and saves the second product.

Considered instead (torch 2.14, DeepSpeed 0.19): `torch.nn.functional.linear_cross_entropy` returns the loss in the
dtype of its input, so that a sum in bf16 keeps three digits; it also computes gradients in the forward pass, before
the loss scale is known. DeepSpeed's `chunked_cross_entropy` is exact but starts from the full logits.
"""

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position without a target."""


class _LinearCrossEntropySum(torch.autograd.Function):
    """Sum over tokens of the cross entropy of softmax(hidden @ weight.T), by chunks of tokens."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        loss_sum = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        logits = None
        for start in range(0, hidden.shape[0], chunk_tokens):
            logits = hidden[start : start + chunk_tokens] @ weight.t()
            loss_sum += _loss_sum(logits, labels[start : start + chunk_tokens])
        ctx.chunk_tokens = chunk_tokens
        ctx.kept_logits = hidden.shape[0] <= chunk_tokens and logits is not None
        # The parameter itself is saved, not a view of it: ZeRO-3 frees its storage after this forward and gathers
        # it again before the backward.
        ctx.save_for_backward(hidden, weight, labels, *([logits] if ctx.kept_logits else []))
        return loss_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, labels, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in fp32, as they would inside one large product.
        grad_weight = None
        if needs_weight:
            grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            logits = kept[0] if kept else hidden[rows] @ weight.t()
            grad_logits = _grad_logits(logits, labels[rows], grad_loss)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which losses of such logits are reduced: fp32, and fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the loss of one chunk: logits [tokens, vocab], labels [tokens]; reduced in fp32."""
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=accumulation_dtype(logits.dtype))
    valid = labels != IGNORED
    picked = log_probabilities.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    # A choice, not a product with the mask: 0 x inf would make an ignored token's overflow a NaN.
    return -picked.where(valid, 0.0).sum()


def _grad_logits(logits: Tensor, labels: Tensor, grad_loss: Tensor) -> Tensor:
    """Give (softmax - one_hot) x grad_loss of one chunk, zero where ignored, rounded once to the logits' dtype."""
    valid = (labels != IGNORED).unsqueeze(-1)
    grad = torch.softmax(logits, dim=-1, dtype=accumulation_dtype(logits.dtype))
    minus_one = torch.full((1, 1), -1.0, dtype=grad.dtype, device=grad.device).expand(grad.shape[0], 1)
    grad.scatter_add_(-1, labels.unsqueeze(-1).where(valid, 0), minus_one)
    return grad.mul_(grad_loss).masked_fill_(~valid, 0.0).to(logits.dtype)


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast would cast them for a product, where it is on: backward runs outside it, so it is settled before."""
    device_type = tensors[0].device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return tuple(tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors)
    return tensors


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum the loss of a bias-free output head and count its targets, holding one chunk of logits at a time.

    Equals `F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")`: products in the dtype of
    `hidden`, softmax and sums in fp32 (fp64 for fp64). Has no second derivative.

    Args:
        hidden: [..., width], any float dtype.
        weight: [vocab, width], same dtype.
        labels: [...] int64; -100 is masked.
        chunk_tokens: tokens whose logits exist at once.

    Returns:
        loss_sum (0-d fp32, nats) and token_count (0-d int64). Without a target both are 0, and so are the gradients.

    Raises:
        ValueError: `labels` has not the leading dims of `hidden`.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match hidden {tuple(hidden.shape)} up to its last dim")
    hidden, weight = in_autocast_dtype(hidden, weight)
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss_sum = _LinearCrossEntropySum.apply(flat, weight, labels.reshape(-1), chunk_tokens)
    return loss_sum, (labels != IGNORED).sum()


class _CrossEntropySum(torch.autograd.Function):
    """Sum over tokens of the cross entropy of given logits; fp32 copies exist for one chunk at a time."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        loss_sum = torch.zeros((), dtype=accumulation_dtype(logits.dtype), device=logits.device)
        for chunk, chunk_labels in zip(logits.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
            loss_sum += _loss_sum(chunk, chunk_labels)
        ctx.chunk_tokens = chunk_tokens
        ctx.save_for_backward(logits, labels)
        return loss_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            grad[rows] = _grad_logits(logits[rows], labels[rows], grad_loss)
        return grad, None, None


def token_loss(logits: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum the next-token loss of logits that a model returned, and count the tokens behind it.

    Args:
        logits: [..., vocab], any float dtype; reduced in fp32 (fp64 for fp64). Has no second derivative.
        labels: [...] int64, already shifted; -100 is masked.
        chunk_tokens: tokens whose logits are held in fp32 at once.

    Returns:
        loss_sum (0-d fp32, nats) and token_count (0-d int64). Without a target both are 0, and so are the gradients.

    Raises:
        ValueError: the leading dims differ.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)} up to the vocabulary")
    loss_sum = _CrossEntropySum.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), chunk_tokens)
    return loss_sum, (labels != IGNORED).sum()
