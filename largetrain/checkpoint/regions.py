"""Rows of bytes from a file to their places in memory, where both may leave gaps between the rows."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from largetrain.parallel.columns import Rectangle, common

CHUNK_BYTES = 4 << 20
"""Read at once."""
LARGEST_GAP_BYTES = 256 << 10
"""Between rows, that is read along with them: another call costs more, on a network's file system at least."""
Copy = Callable[[int], None]
"""Reads from a file's descriptor."""


@dataclass(frozen=True)
class Region:
    """Rows of a tensor, counted in elements."""

    rows: int
    count: int
    """Of each row."""
    there: int
    """First element in the piece of the file."""
    stride_there: int
    """From row to row."""
    here: int
    """First element in memory."""
    stride_here: int


def region_of(stored: Rectangle, wanted: Rectangle) -> Region | None:
    """What a rectangle of a file has of one that is wanted; None: nothing."""
    found = common(stored, wanted)
    if found is None:
        return None
    top, bottom, left, right = found
    rows, count = bottom - top, right - left
    there, here = stored.place(top, left), wanted.place(top, left)
    if rows == 1 or count == stored.stride == wanted.stride:  # without gaps
        return Region(1, rows * count, there, rows * count, here, rows * count)
    return Region(rows, count, there, stored.stride, here, wanted.stride)


def copies_of(region: Region, values: Tensor, offset: int) -> Iterator[Copy]:
    """Copies of a few MiB each, which may run at the same time.

    Args:
        values: 1-d; `region.here` counts in it.
        offset: of the piece's first byte in its file.

    Each raises:
        EOFError: the file ends before.
        OSError: it cannot be read.
    """
    item = values.element_size()
    begin = offset + region.there * item
    if (region.stride_there - region.count) * item > LARGEST_GAP_BYTES or region.rows == 1 or _is_long(region, item):
        for row in range(region.rows):
            here = region.here + row * region.stride_here
            yield from _straight(values[here : here + region.count], begin + row * region.stride_there * item)
        return
    band = max(1, CHUNK_BYTES // (region.stride_there * item))
    for row in range(0, region.rows, band):
        yield _strided(region, values, min(band, region.rows - row), row, begin + row * region.stride_there * item)


def _is_long(region: Region, item: int) -> bool:
    return region.count * item > CHUNK_BYTES // 2


def _straight(target: Tensor, begin: int) -> Iterator[Copy]:
    """Bytes that lie together in the file go to where they are wanted, without a copy between."""
    place = target.view(torch.uint8).numpy().data
    for start in range(0, len(place), CHUNK_BYTES):
        part, position = place[start : start + CHUNK_BYTES], begin + start
        yield lambda descriptor, part=part, position=position: _read(descriptor, part, position)  # type: ignore[misc]


def _strided(region: Region, values: Tensor, rows: int, first: int, position: int) -> Copy:
    """Some rows are read with what lies between them, and copied without."""

    def copy(descriptor: int) -> None:
        held = torch.empty((rows - 1) * region.stride_there + region.count, dtype=values.dtype)
        _read(descriptor, held.view(torch.uint8).numpy().data, position)
        shape, here = (rows, region.count), region.here + first * region.stride_here
        values.as_strided(shape, (region.stride_here, 1), here).copy_(held.as_strided(shape, (region.stride_there, 1)))

    return copy


def _read(descriptor: int, place: memoryview, position: int) -> None:
    while place:
        count = os.preadv(descriptor, [place], position)
        if not count:
            raise EOFError
        place, position = place[count:], position + count
