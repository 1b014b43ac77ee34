"""Linear layers divided over the tensor-parallel ranks (Shoeybi et al. 2019), and which rank has which heads.

Initial weights are those of the undivided layer: every rank draws the whole matrix and keeps its slice, so that a run
starts from the same weights on any layout. On one rank each layer is the plain one.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from largetrain.models.layers import Linear
from largetrain.parallel.axes import Axes
from largetrain.parallel.regions import gradient_summed, leave, used_on_parts


class ColumnLinear(Linear):
    """Its outputs are divided: takes what `enter` gives, gives this rank's features [..., out_features / ranks]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float, axes: Axes):
        super().__init__(in_features, out_features, bias=bias, std=std, axes=axes, divided=0)


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

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., last - first]."""
        weight, bias = gradient_summed(self.axes.tensor, self.weight, self.bias)
        return F.linear(x, weight[self.rows], None if bias is None else bias[self.rows])


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
