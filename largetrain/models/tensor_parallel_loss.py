"""The output head and the next-token loss with the vocabulary divided over the tensor-parallel ranks.

Each rank makes the logits of its own tokens of the vocabulary, chunk by chunk as in `models/loss`; the largest logit,
the sum of exponentials and the target's logit are reduced, three fp32 numbers per token, and the full logits are
never gathered (Shoeybi et al. 2019, section 3).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.models.loss import IGNORED, accumulation_dtype, in_autocast_dtype
from largetrain.parallel.axes import Axis
from largetrain.parallel.shards import Shard


def _own(labels: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Index of each label among this rank's tokens, 0 where it is another rank's or none, and where it is this rank's.

    What is no token at all keeps an index out of range, so that looking it up fails.
    """
    local = labels - shard.start
    own = (local >= 0) & (local < shard.size)
    others = (labels >= 0) & (labels < shard.shape[0]) & ~own
    return local.masked_fill((labels == IGNORED) | others, 0), own


def _losses(logits: Tensor, labels: Tensor, shard: Shard, axis: Axis) -> tuple[Tensor, Tensor]:
    """Loss sum of one chunk, and log of the sum of exponentials [tokens]; both equal on all ranks of the axis.

    Args:
        logits: [tokens, own part of the vocabulary]; reduced in fp32.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    largest = wide.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
    local, own = _own(labels, shard)
    picked = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1) - largest
    # a choice, not a product with the mask: 0 x inf would be NaN
    sums = torch.stack([(wide - largest.unsqueeze(-1)).exp_().sum(-1), picked.where(own, 0.0)])
    dist.all_reduce(sums, group=axis.group)
    log_sum = sums[0].log()
    return (log_sum - sums[1]).where(labels != IGNORED, 0.0).sum(), largest + log_sum


def _grad_logits(logits: Tensor, labels: Tensor, normalizers: Tensor, shard: Shard, grad_loss: Tensor) -> Tensor:
    """Give (softmax - one_hot) x grad_loss of this rank's part, zero where ignored, rounded once."""
    local, own = _own(labels, shard)
    grad = (logits.to(normalizers.dtype) - normalizers.unsqueeze(-1)).exp_()
    grad.scatter_add_(-1, local.unsqueeze(-1), -own.to(grad.dtype).unsqueeze(-1))
    return grad.mul_(grad_loss).masked_fill_((labels == IGNORED).unsqueeze(-1), 0.0).to(logits.dtype)


class _LinearCrossEntropySum(torch.autograd.Function):
    """As in `models/loss`, over a part of the vocabulary; the gradient of `hidden` is this rank's summand."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, shard: Shard, axis: Axis):
        dtype = accumulation_dtype(hidden.dtype)
        loss_sum = torch.zeros((), dtype=dtype, device=hidden.device)
        normalizers = torch.empty(hidden.shape[:1], dtype=dtype, device=hidden.device)
        logits = None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = hidden[rows] @ weight.t()
            chunk_sum, normalizers[rows] = _losses(logits, labels[rows], shard, axis)
            loss_sum += chunk_sum
        ctx.chunk_tokens, ctx.shard = chunk_tokens, shard
        kept = [logits] if hidden.shape[0] <= chunk_tokens and logits is not None else []
        # the parameter itself, for ZeRO-3 (see models/loss)
        ctx.save_for_backward(hidden, weight, labels, normalizers, *kept)
        return loss_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss: Tensor):
        hidden, weight, labels, normalizers, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if needs_weight else None
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            logits = kept[0] if kept else hidden[rows] @ weight.t()
            grad_logits = _grad_logits(logits, labels[rows], normalizers[rows], ctx.shard, grad_loss)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def divided_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, shard: Shard, axis: Axis
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` where each rank has a part of the rows of the head's weight.

    Args:
        hidden: [..., width], equal on all ranks of the axis; its gradient is this rank's summand of the whole one.
        weight: [own part of the vocabulary, width].
        labels: [...] int64, indices in the whole vocabulary; -100 is masked.
        shard: which rows of the whole weight these are.

    Returns:
        loss_sum (0-d fp32, nats) and token_count (0-d int64), equal on all ranks to the bit.

    Raises:
        ValueError: `labels` has not the leading dims of `hidden`.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match hidden {tuple(hidden.shape)} up to its last dim")
    hidden, weight = in_autocast_dtype(hidden, weight)
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss_sum = _LinearCrossEntropySum.apply(flat, weight, labels.reshape(-1), chunk_tokens, shard, axis)
    return loss_sum, (labels != IGNORED).sum()
