"""Reading checkpoints in whatever ranges are asked for, from whichever ranks' files hold them."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from largetrain.checkpoint.coverage import fault_in, rectangles_of
from largetrain.checkpoint.header import ITEM_BYTES, Stored, read_header
from largetrain.checkpoint.manifest import PIECES_NAME, Manifest, damaged, first_line, own_name, read_manifest
from largetrain.checkpoint.regions import CHUNK_BYTES, Region, copies_of, region_of
from largetrain.checkpoint.staging import DTYPES
from largetrain.checkpoint.verify import facts_of, problem_of
from largetrain.errors import CheckpointError
from largetrain.parallel.columns import Columns, plainly, rectangles
from largetrain.parallel.pieces import columns_of

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
THREADS = 4
MOST_OPEN = 64  # files at a time: a process may have a thousand


@dataclass
class _Tensor:
    """One tensor, put together from its pieces, each with the name of its file."""

    shape: tuple[int, ...]
    dtype: str
    sources: list[tuple[Stored, str]]
    width: int | None = None
    """Of the columns of those pieces that are of some columns; None: there are none."""


def open_checkpoint(folder: Path) -> "CheckpointReader":
    """Open a checkpoint for reading; every tensor of it is whole, as far as the files' headers tell.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or a file of it is not what was written; named.
    """
    if problem := problem_of(folder):
        error = CheckpointError(problem)
        error.on_all_ranks = False
        raise error
    return CheckpointReader(folder, read_manifest(folder))


class CheckpointReader:
    """The `Pieces` of a checkpoint folder."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.facts = facts_of(folder)
        """`run.json`, with what an evaluation found afterwards."""
        self.shared: dict[str, Any] = self.facts["shared"]
        self._open: dict[str, BinaryIO] = {}
        self._tensors: dict[str, _Tensor] = {}
        for name in sorted(filter(PIECES_NAME.fullmatch, manifest.files)):
            self._index(name)
        for key, tensor in self._tensors.items():
            self._check(key, tensor)

    @property
    def step(self) -> int:
        """Updates done."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return self.manifest.world_size

    def keys(self) -> Sequence[str]:
        """All keys, sorted."""
        return sorted(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._tensors[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """As it was written."""
        return TORCH_DTYPES[self._tensors[key].dtype]

    def read(self, key: str, start: int = 0, stop: int | None = None, columns: Columns | None = None) -> Tensor:
        """Elements start..stop of the flattened tensor, or of its flattened columns; 1-d on the CPU, as written.

        Raises:
            KeyError: there is no such key.
            CheckpointError: a file cannot be read; named.
        """
        tensor = self._tensors[key]
        size = prod(tensor.shape) if columns is None else columns.numel(tensor.shape)
        stop = size if stop is None else stop
        assert 0 <= start <= stop <= size, (key, start, stop, columns, tensor.shape)
        count = stop - start
        start, columns = plainly(tensor.shape, start, columns)
        stop = start + count
        if columns is not None and tensor.width not in (None, columns.width):  # cut along another dim
            return _in_bands(lambda low, high: self.read(key, low, high), columns, start, stop, tensor.dtype)
        values = torch.empty(count, dtype=TORCH_DTYPES[tensor.dtype])
        if columns is None and tensor.width is None:
            self._read_line(values, tensor, start, stop)
        elif count:
            self._read_grid(values, tensor, start, stop, columns)
        return values

    def _read_line(self, values: Tensor, tensor: _Tensor, start: int, stop: int) -> None:
        """A range of a tensor that lies in ranges."""
        first = bisect_right(tensor.sources, start, key=lambda source: source[0].start) - 1
        for piece, file in tensor.sources[max(0, first) :]:
            begin, end = max(start, piece.start), min(stop, piece.start + piece.count)
            if begin < end:
                shared = Region(1, end - begin, begin - piece.start, end - begin, begin - start, end - begin)
                self._read_regions(values, [shared], piece, file)
            if end == stop:
                break

    def _read_grid(self, values: Tensor, tensor: _Tensor, start: int, stop: int, columns: Columns | None) -> None:
        """Where columns are asked for, or stored, or both."""
        width = tensor.width if columns is None else columns.width
        assert width is not None
        left, right = (0, width) if columns is None else (columns.first, columns.last)
        wanted = rectangles(start, stop, left, right)
        for piece, file in tensor.sources:
            parts = rectangles_of(piece, width)
            if regions := [found for part in parts for each in wanted if (found := region_of(part, each))]:
                self._read_regions(values, regions, piece, file)

    def _read_regions(self, values: Tensor, regions: list[Region], piece: Stored, file: str) -> None:
        """Bring parts of a piece to their places; several at a time.

        New memory is slow to touch, and a network's file system slow to answer.
        """
        path = self.folder / file
        try:
            descriptor = self._opened(file).fileno()
            copies = [copy for region in regions for copy in copies_of(region, values, piece.offset)]
            if len(copies) == 1 or values.nbytes <= CHUNK_BYTES:
                for copy in copies:
                    copy(descriptor)
                return
            list(self._threads.map(lambda copy: copy(descriptor), copies))
        except EOFError as error:
            raise damaged(path, "is shorter than it was written") from error
        except OSError as error:
            raise damaged(path, f"cannot be read ({error.strerror})") from error

    def own(self, rank: int) -> dict[str, Any]:
        """What rank `rank` wrote for itself; empty when there was no such rank. Nothing but tensors and plain types.

        Raises:
            CheckpointError: the file cannot be read, or holds other objects.
        """
        name = own_name(rank)
        if name not in self.manifest.files:
            return {}
        try:
            own = torch.load(self.folder / name, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged archives raise whatever their readers met
            raise damaged(self.folder / name, f"cannot be read ({first_line(error)})") from error
        if not isinstance(own, dict):
            raise damaged(self.folder / name, "is not what was written (no table)")
        return own

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "read")

    def _opened(self, file: str) -> BinaryIO:
        if file not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[file] = open(self.folder / file, "rb", buffering=0)  # noqa: SIM115 (open while it is read from)
        return self._open[file]

    def _index(self, file: str) -> None:
        """Enter the tensors of one rank's file."""
        path = self.folder / file
        for piece in read_header(path):
            tensor = self._tensors.setdefault(piece.key, _Tensor(piece.shape, piece.dtype, []))
            if (tensor.shape, tensor.dtype) != (piece.shape, piece.dtype):
                raise damaged(path, f"and other files disagree on shape or type of {piece.key[:80]!r}")
            if piece.columns is not None:
                if tensor.width not in (None, piece.columns.width):
                    raise damaged(path, f"and other files disagree on how {piece.key[:80]!r} is cut")
                tensor.width = piece.columns.width
            tensor.sources.append((piece, file))

    def _check(self, key: str, tensor: _Tensor) -> None:
        """See that the pieces of a tensor cover it once."""
        tensor.sources.sort(key=lambda source: source[0].start)
        if found := fault_in(key, tensor.shape, tensor.width, tensor.sources):
            raise damaged(self.folder / found[0], found[1])


def _in_bands(read: Callable[[int, int], Tensor], columns: Columns, start: int, stop: int, dtype: str) -> Tensor:
    """Columns out of whole rows, a few MiB of these at once."""
    band = max(1, CHUNK_BYTES // (columns.width * ITEM_BYTES[dtype])) * columns.count
    cuts = [start, *range((start // band + 1) * band, stop, band), stop]
    return torch.cat([columns_of(read, columns, low, high) for low, high in pairwise(cuts)])
