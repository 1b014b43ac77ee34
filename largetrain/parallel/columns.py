"""Intervals of columns: how a slice of a tensor along any dim lies in it when it is flattened. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Columns:
    """A tensor seen as [rows, width], of which columns first..last are meant; `Piece` and `Pieces.read` count in them.

    A slice of dim d of a tensor of any shape is such an interval, with the dims before d as rows and the dims after d
    inside the columns. A slice of dim 0 has one row.
    """

    width: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """Columns meant."""
        return self.last - self.first

    def numel(self, shape: Sequence[int]) -> int:
        """Elements of the interval in all rows of a tensor of this shape."""
        return prod(shape) // self.width * self.count if self.width else 0


def plainly(shape: Sequence[int], start: int, columns: Columns | None) -> tuple[int, Columns | None]:
    """First element and columns of the same range, without columns where it is a range of the whole tensor as well.

    It is where the columns are all there are, and where there is one row.
    """
    if columns is None or columns.count == columns.width:
        return start, None
    return (columns.first + start, None) if columns.width == prod(shape) else (start, columns)


@dataclass(frozen=True)
class Rectangle:
    """Rows top..bottom and columns left..right of a tensor, in some memory or file that holds them row by row."""

    top: int
    bottom: int
    left: int
    right: int
    offset: int
    """Elements before its first one there."""
    stride: int
    """Elements from row to row there."""

    def place(self, row: int, column: int) -> int:
        """Elements before this one there."""
        return self.offset + (row - self.top) * self.stride + column - self.left


def rectangles(start: int, stop: int, left: int, right: int) -> list[Rectangle]:
    """Elements start..stop of the flattened columns left..right: whole rows, with ragged ones before and after them.

    Offsets count from element `start`.
    """
    stride = right - left
    if start >= stop:
        return []
    (first, inside), (last, beyond) = divmod(start, stride), divmod(stop, stride)
    if first == last:
        return [Rectangle(first, first + 1, left + inside, left + beyond, 0, stride)]
    found = []
    if inside:
        found.append(Rectangle(first, first + 1, left + inside, right, 0, stride))
        first += 1
    if first < last:
        found.append(Rectangle(first, last, left, right, first * stride - start, stride))
    if beyond:
        found.append(Rectangle(last, last + 1, left, left + beyond, last * stride - start, stride))
    return found


def common(one: Rectangle, other: Rectangle) -> tuple[int, int, int, int] | None:
    """Top, bottom, left and right of what two rectangles share; None: nothing."""
    top, bottom = max(one.top, other.top), min(one.bottom, other.bottom)
    left, right = max(one.left, other.left), min(one.right, other.right)
    return (top, bottom, left, right) if top < bottom and left < right else None
