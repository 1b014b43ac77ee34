"""Linear layers divided over the tensor-parallel ranks (Shoeybi et al. 2019), and which rank has which heads.

Initial weights are those of the undivided layer: every rank draws the whole matrix and keeps its slice, so that a run
starts from the same weights on any layout. On one rank each layer is the plain one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from largetrain.models.layers import Linear
from largetrain.models.loss import in_autocast_dtype
from largetrain.parallel.axes import Axes, Axis
from largetrain.parallel.regions import enter, gradient_summed, leave, start_gather, used_on_parts


class Gathered:
    """What layers with divided outputs take under sequence parallelism: the whole sequence, kept as this rank's part.

    The backward pass gathers it once more, for all layers that took it, while the first of them computes something
    else (Korthikanti et al. 2022, section 4.2.2). Kept whole, it would be most of what a layer keeps.
    """

    def __init__(self, part: Tensor, axes: Axes):
        self.part, self.whole = part, enter(part, axes)
        self._again = _Again(axes.tensor)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear of the whole sequence [batch, seq_len, in_features]."""
        whole, part, weight, *given = in_autocast_dtype(
            self.whole, self.part, weight, *([] if bias is None else [bias])
        )
        return _LinearOfGathered.apply(whole, part, weight, given[0] if given else None, self._again)


def entered(x: Tensor, axes: Axes) -> "Tensor | Gathered":
    """What lies between tensor-parallel layers, as `ColumnLinear` takes it."""
    if axes.sequence_parallel and axes.tensor.size > 1:
        return Gathered(x, axes)
    return enter(x, axes)


class _Again:
    """The second gathering, shared by the layers that took one input."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.users = 0
        """Layers that will need it."""
        self._left = 0
        self._finish: Callable[[], Tensor] | None = None
        self._whole: Tensor | None = None

    def start(self, part: Tensor) -> None:
        if self._left == 0:
            self._left, self._finish = self.users, start_gather(part, self.axis)

    def finish(self) -> Tensor:
        if self._finish is not None:
            self._whole, self._finish = self._finish(), None
        whole = self._whole
        assert whole is not None
        self._left -= 1
        if self._left == 0:
            self._whole = None
        return whole


class _LinearOfGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, again: _Again) -> Tensor:
        ctx.again = again
        again.users += ctx.needs_input_grad[2]
        ctx.save_for_backward(part, weight)  # the weight itself, which ZeRO-3 frees and gathers again
        return F.linear(whole, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        part, weight = ctx.saved_tensors
        needs_whole, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight:
            ctx.again.start(part)
        grad_whole = grad @ weight if needs_whole else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        grad_weight = grad.flatten(0, -2).t() @ ctx.again.finish().flatten(0, -2) if needs_weight else None
        return grad_whole, None, grad_weight, grad_bias, None


class ColumnLinear(Linear):
    """Its outputs are divided: takes what `entered` gives, gives this rank's features [..., out_features / ranks]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float, axes: Axes):
        super().__init__(in_features, out_features, bias=bias, std=std, axes=axes, divided=0)

    def forward(self, x: Tensor | Gathered) -> Tensor:
        """x [..., in_features] of the whole sequence -> [..., out_features / ranks]."""
        return x.linear(self.weight, self.bias) if isinstance(x, Gathered) else super().forward(x)


class RowLinear(Linear):
    """Its inputs are divided: takes this rank's features, gives the ranks' sum as `leave` does, with the bias once."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float, axes: Axes):
        super().__init__(in_features, out_features, bias=bias, std=std, axes=axes, divided=1)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features / ranks] -> [..., out_features]."""
        if self.axes.tensor.size == 1:
            return super().forward(x)
        total = leave(F.linear(x, self.weight), self.axes)
        (bias,) = used_on_parts(self.axes, self.bias)
        return total if bias is None else total + bias


class SharedLinear(Linear):
    """Every tensor rank holds it whole and computes the outputs first..last, those that it needs.

    Under ZeRO-3 the gathered weight is kept until the backward pass: it is small, else it would have been divided.
    """

    def __init__(self, in_features: int, out_features: int, first: int, last: int, **arguments):
        super().__init__(in_features, out_features, **arguments)
        self.rows = slice(first, last)

    def forward(self, x: Tensor | Gathered) -> Tensor:
        """x [..., in_features] of the whole sequence -> [..., last - first]."""
        weight, bias = gradient_summed(self.axes.tensor, self.weight, self.bias)
        rows = weight[self.rows], None if bias is None else bias[self.rows]
        return x.linear(*rows) if isinstance(x, Gathered) else F.linear(x, *rows)


@dataclass(frozen=True)
class HeadShare:
    """The heads that one of several ranks computes: as many query heads each, and the key/value heads these look at."""

    query: int
    """Query heads of this rank."""
    first: int
    """First key/value head that it needs."""
    count: int
    """Key/value heads that it needs."""
    of_query: tuple[int, ...]
    """For each of its query heads, which of these key/value heads."""

    @property
    def grouped(self) -> bool:
        """Query heads share key/value heads in groups of one size, in order, as attention kernels take them."""
        group = self.query // self.count
        return self.of_query == tuple(head // group for head in range(self.query))


def head_share(heads: int, kv_heads: int, axis_rank: int, axis_size: int) -> HeadShare:
    """Share out `heads` query heads in order; heads % axis_size must be 0, kv_heads may be anything."""
    assert heads % axis_size == 0, (heads, axis_size)
    own = heads // axis_size
    looked_at = [head * kv_heads // heads for head in range(axis_rank * own, (axis_rank + 1) * own)]
    first = looked_at[0]
    return HeadShare(own, first, looked_at[-1] - first + 1, tuple(head - first for head in looked_at))


def key_value_linear(in_features: int, kv_heads: int, head_dim: int, share: HeadShare, **arguments) -> Linear:
    """The projection to key or value heads: divided where whole heads divide over the tensor ranks, else shared."""
    axes: Axes = arguments["axes"]
    if kv_heads % axes.tensor.size == 0:
        return ColumnLinear(in_features, kv_heads * head_dim, **arguments)
    rows = share.first * head_dim, (share.first + share.count) * head_dim
    return SharedLinear(in_features, kv_heads * head_dim, *rows, **arguments)
