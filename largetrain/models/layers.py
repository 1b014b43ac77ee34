"""Layers of the decoder that draw their own initial weights.

Each module initialises its parameters inside its own constructor and uses them only inside its own forward.
ZeRO-3 relies on both: it shards a module's parameters as soon as its constructor returns (a later `apply(init)`
would meet empty tensors), and gathers them around its forward.

With tensor-parallel ranks each holds its slice of what the whole layer would have drawn, so that a run starts from the
same weights on any layout; on one rank every layer is the plain one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from largetrain.models.loss import linear_cross_entropy
from largetrain.models.tensor_parallel_loss import divided_cross_entropy
from largetrain.parallel.axes import Axes, Axis
from largetrain.parallel.regions import enter, gathered_last, leave, used_on_parts
from largetrain.parallel.shards import Shard, even_part, mark
from largetrain.parallel.streams import own_stream

ALONE = Axes()


def draw_normal_(weight: Tensor, std: float, shard: Shard | None = None) -> None:
    """Fill `weight` in place from N(0, std) by torch's current generator, drawn in fp32 and rounded once.

    So a model built in half precision (`zero.Init` does) starts from the rounded weights of the fp32 model.

    Args:
        shard: the part that `weight` is of a larger one, whose values it gets.
    """
    shape = weight.shape if shard is None else shard.shape
    with torch.no_grad():
        # in two steps: within zero.Init torch.empty gives half precision whatever it is asked for
        whole = torch.empty(shape, device=weight.device).to(torch.float32).normal_(0.0, std)
        weight.copy_(whole if shard is None else whole.narrow(shard.dim, shard.start, shard.size))


def shard_of_shape(shape: tuple[int, ...], dim: int, axis: Axis) -> Shard | None:
    """This rank's part of a parameter; None on an axis of one rank."""
    return Shard(shape, dim, *even_part(shape[dim], axis.rank, axis.size)) if axis.size > 1 else None


class Linear(nn.Linear):
    """A linear layer with weights from N(0, std) and zero biases, or this rank's part of one.

    Args:
        divided: dim of the weight [out_features, in_features] that is divided over the tensor ranks; None: all of it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        axes: Axes = ALONE,
        divided: int | None = None,
    ):
        self.std, self.axes = std, axes  # read by reset_parameters, which the parent's constructor calls
        whole = (out_features, in_features)
        self.shard = None if divided is None else shard_of_shape(whole, divided, axes.tensor)
        local = list(whole)
        if self.shard is not None:
            local[self.shard.dim] = self.shard.size
        super().__init__(local[1], local[0], bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weights, zero the biases, mark what is a part."""
        draw_normal_(self.weight, self.std, self.shard)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.shard is None:
            return
        mark(self.weight, self.shard)
        if self.bias is not None and self.shard.dim == 0:
            mark(self.bias, Shard(self.shard.shape[:1], 0, self.shard.start, self.shard.size))


class TokenEmbedding(nn.Embedding):
    """The token table, from N(0, std); of several tensor ranks each holds the rows of its part of the vocabulary."""

    def __init__(self, vocab_size: int, width: int, *, std: float, axes: Axes = ALONE):
        self.std, self.axes, self.vocab_size = std, axes, vocab_size
        self.shard = shard_of_shape((vocab_size, width), 0, axes.tensor)
        super().__init__(vocab_size if self.shard is None else self.shard.size, width)

    def reset_parameters(self) -> None:
        """Draw the table."""
        draw_normal_(self.weight, self.std, self.shard)
        if self.shard is not None:
            mark(self.weight, self.shard)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up [batch, seq_len] int64; [batch, seq_len, width], under sequence parallelism this rank's part of it.

        Raises:
            IndexError: an id is not in the vocabulary (on a GPU a device-side assertion).
        """
        if self.shard is None:
            return super().forward(input_ids)
        local = input_ids - self.shard.start
        elsewhere = (local < 0) | (local >= self.shard.size)
        known = (input_ids >= 0) & (input_ids < self.vocab_size)
        found = F.embedding(local.masked_fill(elsewhere & known, 0), self.weight)
        return leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.axes)


class LearnedPositions(nn.Module):
    """Adds a learned vector to each position; weights from N(0, std)."""

    def __init__(self, seq_len: int, width: int, *, std: float, axes: Axes = ALONE):
        super().__init__()
        self.axes = axes
        self.weight = nn.Parameter(torch.empty(seq_len, width))
        draw_normal_(self.weight, std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the positions of this rank's part of the sequence: hidden [batch, seq_len, width], same shape out."""
        part = self.axes.tensor if self.axes.sequence_parallel else self.axes.sequence
        (weight,) = used_on_parts(self.axes, self.weight)
        return hidden + weight.narrow(0, part.rank * hidden.shape[1], hidden.shape[1])


class PartLayerNorm(nn.LayerNorm):
    """LayerNorm of this tensor rank's part of the sequence."""

    def __init__(self, width: int, *, eps: float, axes: Axes):
        super().__init__(width, eps=eps)
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq_len / ranks, width], same shape out."""
        weight, bias = used_on_parts(self.axes, self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class PartRMSNorm(nn.RMSNorm):
    """RMSNorm of this tensor rank's part of the sequence."""

    def __init__(self, width: int, *, eps: float, axes: Axes):
        super().__init__(width, eps=eps)
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq_len / ranks, width], same shape out."""
        (weight,) = used_on_parts(self.axes, self.weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class Dropout(nn.Dropout):
    """Dropout between tensor-parallel layers: alike on all tensor ranks, or each for its part of the sequence."""

    def __init__(self, p: float, axes: Axes):
        super().__init__(p)
        self.part_of = axes.tensor if axes.sequence_parallel else Axis()

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        if not self.training or self.p == 0 or self.part_of.size == 1:
            return super().forward(x)
        with own_stream(self.part_of, x.device):
            return super().forward(x)


class Head(nn.Module):
    """The output projection, and with labels the loss: bias-free, its own weight or the token embedding's.

    The loss is computed in here, and not by a function that takes the weight, so that ZeRO-3 has the weight gathered
    whenever a chunk of logits is made.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        std: float,
        chunk_tokens: int,
        tied: Tensor | None = None,
        axes: Axes = ALONE,
    ):
        super().__init__()
        self.chunk_tokens, self.axes = chunk_tokens, axes
        self.shard = shard_of_shape((vocab_size, width), 0, axes.tensor)
        self.sizes = [even_part(vocab_size, rank, axes.tensor.size)[1] for rank in range(axes.tensor.size)]
        if tied is not None:
            self.weight = tied
            return
        self.weight = nn.Parameter(torch.empty(self.sizes[axes.tensor.rank], width))
        draw_normal_(self.weight, std, self.shard)
        if self.shard is not None:
            mark(self.weight, self.shard)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Give logits [..., vocab] in the dtype of `hidden`, or with labels loss_sum and token_count."""
        hidden, axis = enter(hidden, self.axes), self.axes.tensor
        if labels is None:
            return gathered_last(F.linear(hidden, self.weight), axis, self.sizes)
        if self.shard is None:
            return linear_cross_entropy(hidden, self.weight, labels, self.chunk_tokens)
        return divided_cross_entropy(hidden, self.weight, labels, self.chunk_tokens, self.shard, axis)
