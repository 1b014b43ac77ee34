"""Whether the pieces of a tensor cover it once: no element is missing, none is there twice. No torch."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import prod

from largetrain.checkpoint.header import Stored
from largetrain.parallel.columns import Rectangle, rectangles

Source = tuple[Stored, str]
"""A piece and the name of its file."""
MISSING = "does not fit: a part of {} is missing between this file and others"
TWICE = "does not fit: a part of {} is there twice, in this file and others"


def fault_in(key: str, shape: tuple[int, ...], width: int | None, sources: Sequence[Source]) -> tuple[str, str] | None:
    """What is wrong with the pieces of one tensor, sorted by start: a file's name, and words that follow it.

    Args:
        width: of the columns of those pieces that are of some columns; None: there are none.
    """
    said = repr(key[:80])
    return _in_line(said, prod(shape), sources) if width is None else _in_grid(said, prod(shape), width, sources)


def _in_line(key: str, size: int, sources: Sequence[Source]) -> tuple[str, str] | None:
    """Ranges have to lie one after another, from the start to the end."""
    end = 0
    for piece, file in sources:
        if piece.start != end:
            return file, (MISSING if piece.start > end else TWICE).format(key)
        end += piece.count
    if end != size:
        return sources[-1][1], f"and others hold {end} elements of {key}, which has {size}"
    return None


def _in_grid(key: str, size: int, width: int, sources: Sequence[Source]) -> tuple[str, str] | None:
    """Rectangles have to fill every row: seen from top to bottom, those that are open lie side by side in each row."""
    edges: list[tuple[int, bool, int, int, str]] = []  # row, whether one begins there, its columns, its file
    for piece, file in sources:
        for part in rectangles_of(piece, width):
            edges += [(part.top, True, part.left, part.right, file), (part.bottom, False, part.left, part.right, file)]
    edges.sort()  # at a row, those that end come first
    rows, row, covered, spans = size // width, 0, 0, list[tuple[int, int]]()
    for edge, begins, left, right, file in edges:
        if edge > row and covered != width:
            return file, MISSING.format(key)
        row = edge
        if not begins:
            spans.pop(bisect_left(spans, (left, right)))
            covered -= right - left
            continue
        at = bisect_left(spans, (left, right))
        if (at and spans[at - 1][1] > left) or (at < len(spans) and spans[at][0] < right):
            return file, TWICE.format(key)
        insort(spans, (left, right))
        covered += right - left
    return None if row == rows else (sources[-1][1], MISSING.format(key))


def rectangles_of(piece: Stored, width: int) -> list[Rectangle]:
    """Where a piece lies in its tensor seen with rows of this width; offsets count from its first element."""
    left, right = (0, width) if piece.columns is None else (piece.columns.first, piece.columns.last)
    return rectangles(piece.start, piece.start + piece.count, left, right)
