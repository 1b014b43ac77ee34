"""Which part of a whole parameter a tensor-parallel rank holds, written on the parameter itself."""

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from largetrain.parallel.columns import Columns


@dataclass(frozen=True)
class Shard:
    """Indices start..start + size along `dim` of a tensor of shape `shape`."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    start: int
    size: int

    @property
    def columns(self) -> Columns:
        """The same as an interval of columns."""
        inner = prod(self.shape[self.dim + 1 :])
        return Columns(self.shape[self.dim] * inner, self.start * inner, (self.start + self.size) * inner)


def mark(parameter: Tensor, shard: Shard) -> None:
    """Write on a parameter that it is a part of a whole one.

    DeepSpeed's two names for the same make it count the part in the gradient norm on every rank; what bears no mark
    is replicated, and counted on tensor rank 0 alone.
    """
    marked: Any = parameter
    marked.shard = shard
    marked.model_parallel = True
    marked.tensor_model_parallel = True


def shard_of(parameter: Tensor) -> Shard | None:
    """What `mark` wrote; None for a parameter that is whole."""
    return getattr(parameter, "shard", None)


def even_part(size: int, axis_rank: int, axis_size: int) -> tuple[int, int]:
    """Start and length of one rank's part of `size` indices, as even as whole numbers allow; the first get more."""
    share, rest = divmod(size, axis_size)
    return axis_rank * share + min(axis_rank, rest), share + (axis_rank < rest)
