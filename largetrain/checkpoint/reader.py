"""Reading checkpoints in whatever ranges are asked for, from whichever ranks' files hold them."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from largetrain.checkpoint.header import ITEM_BYTES, Stored, read_header
from largetrain.checkpoint.manifest import PIECES_NAME, Manifest, damaged, first_line, own_name, read_manifest
from largetrain.checkpoint.staging import DTYPES
from largetrain.checkpoint.verify import facts_of, problem_of
from largetrain.errors import CheckpointError

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
CHUNK_BYTES = 4 << 20
THREADS = 4
MOST_OPEN = 64  # files at a time: a process may have a thousand


@dataclass
class _Tensor:
    """One tensor, put together from its pieces, each with the name of its file."""

    shape: tuple[int, ...]
    dtype: str
    sources: list[tuple[Stored, str]]


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

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements start..stop of the flattened tensor, 1-d on the CPU, as they were written.

        Raises:
            KeyError: there is no such key.
            CheckpointError: a file cannot be read; named.
        """
        tensor = self._tensors[key]
        size = prod(tensor.shape)
        stop = size if stop is None else stop
        assert 0 <= start <= stop <= size, (key, start, stop, tensor.shape)
        values = torch.empty(stop - start, dtype=TORCH_DTYPES[tensor.dtype])
        target = values.view(torch.uint8).numpy().data
        item = ITEM_BYTES[tensor.dtype]
        first = bisect_right(tensor.sources, start, key=lambda source: source[0].start) - 1
        for piece, file in tensor.sources[max(0, first) :]:
            begin, end = max(start, piece.start), min(stop, piece.start + piece.count)
            if begin < end:
                place = target[(begin - start) * item : (end - start) * item]
                self._read_into(place, file, piece.offset + (begin - piece.start) * item)
            if end == stop:
                break
        return values

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

    def _read_into(self, place: memoryview, file: str, offset: int) -> None:
        path = self.folder / file

        def read(begin: int) -> None:
            rest, position = place[begin : begin + CHUNK_BYTES], offset + begin
            while rest:
                count = os.preadv(opened.fileno(), [rest], position)
                if not count:
                    raise damaged(path, "is shorter than it was written")
                rest, position = rest[count:], position + count

        try:
            opened = self._opened(file)
            if len(place) <= CHUNK_BYTES:
                read(0)
            else:  # new memory is slow to touch, and a network's file system slow to answer: several at a time
                with ThreadPoolExecutor(THREADS) as pool:
                    list(pool.map(read, range(0, len(place), CHUNK_BYTES)))
        except OSError as error:
            raise damaged(path, f"cannot be read ({error.strerror})") from error

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
            tensor.sources.append((piece, file))

    def _check(self, key: str, tensor: _Tensor) -> None:
        """See that the pieces of a tensor lie one after another, from its start to its end."""
        tensor.sources.sort(key=lambda source: source[0].start)
        end = 0
        for piece, file in tensor.sources:
            if piece.start != end:
                what = "is missing between this file and" if piece.start > end else "is there twice, in this file and"
                raise damaged(self.folder / file, f"does not fit: a part of {key[:80]!r} {what} others")
            end += piece.count
        if end != prod(tensor.shape):
            last = self.folder / tensor.sources[-1][1]
            raise damaged(last, f"and others hold {end} elements of {key[:80]!r}, which has {prod(tensor.shape)}")
