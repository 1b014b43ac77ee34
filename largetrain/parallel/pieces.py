"""What a rank holds of a run's tensors: contiguous ranges of flattened ones, whoever else holds the rest.

Checkpoints are written and read in these pieces, so that they do not depend on how many ranks, which ZeRO stage or
which backend wrote them. Keys:

- `model/NAME`: weights (fp32 masters where the engine keeps them) and buffers, NAME as in the model's `state_dict`;
- `optimizer/KIND/NAME`: what the optimizer keeps for parameter NAME, such as `exp_avg`;
- `ema/NAME`: the moving average of NAME.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from largetrain.parallel.columns import Columns


@dataclass(frozen=True)
class Piece:
    """A range of one flattened tensor."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """First element of the range in the flattened whole tensor, or in the flattened interval of its columns."""
    values: Tensor
    """1-d, any dtype and device; the live storage, so it has to be copied before the next update changes it."""
    columns: Columns | None = None
    """The part of the whole tensor that a tensor-parallel rank holds; None: all of it."""


@dataclass
class Snapshot:
    """What one rank writes of a run; the pieces of all ranks together cover every tensor once."""

    pieces: list[Piece]
    shared: dict[str, Any] = field(default_factory=dict)
    """Plain JSON types, equal on all ranks."""
    own: dict[str, Any] = field(default_factory=dict)
    """Tensors and plain types of this rank alone, which only the same rank of the same layout can use."""
    before_change: Callable[[Callable[[], Any]], None] | None = None
    """Has what it is given called before the next update changes the pieces; None: they have to be copied at once."""


class Pieces(Protocol):
    """Reads back what the ranks wrote, in whatever ranges the reader needs."""

    shared: dict[str, Any]
    """As in `Snapshot`."""

    def keys(self) -> Sequence[str]:
        """All keys, sorted."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def read(self, key: str, start: int = 0, stop: int | None = None, columns: Columns | None = None) -> Tensor:
        """Elements start..stop of the flattened tensor, or of the flattened interval of its columns; 1-d on the CPU.

        In the dtype that was written, whatever columns the ranks had that wrote it.

        Raises:
            KeyError: there is no such key.
        """

    def own(self, rank: int) -> dict[str, Any]:
        """What rank `rank` wrote for itself; empty when there was no such rank."""


def columns_of(read: Callable[[int, int], Tensor], columns: Columns, start: int, stop: int) -> Tensor:
    """Elements start..stop of the flattened interval of columns, from what reads ranges of the whole tensor.

    Args:
        read: elements from..to of the flattened whole tensor, 1-d.
    """
    if start >= stop:
        return read(0, 0)
    top, bottom = start // columns.count, -(-stop // columns.count)
    rows = read(top * columns.width, bottom * columns.width).view(bottom - top, columns.width)
    begin = start - top * columns.count
    return rows[:, columns.first : columns.last].reshape(-1)[begin : begin + stop - start]


def share_out(pieces: Sequence[Piece], rank: int, world_size: int) -> list[Piece]:
    """This rank's part of pieces that every rank holds alike: about equally many bytes each, whole pieces.

    The same answer on every rank without communication: largest first, to the rank that has least so far.
    """
    loads = [0] * world_size
    own: list[int] = []
    by_size = sorted(range(len(pieces)), key=lambda i: (-pieces[i].values.nbytes, i))
    for index in by_size:
        target = loads.index(min(loads))
        loads[target] += pieces[index].values.nbytes
        if target == rank:
            own.append(index)
    return [pieces[index] for index in sorted(own)]
