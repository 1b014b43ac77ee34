"""Reading checkpoints in whatever ranges are asked for, from whichever ranks' files hold them."""

import json
from bisect import bisect_right
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from largetrain.checkpoint.manifest import PIECES_NAME, Manifest, damaged, first_line, own_name, read_manifest
from largetrain.checkpoint.staging import DTYPES, PLACE
from largetrain.checkpoint.verify import facts_of, problem_of
from largetrain.errors import CheckpointError

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class _Source:
    """Where a range of a tensor is."""

    start: int
    length: int
    file: str
    name: str


@dataclass
class _Entry:
    """One tensor, put together from its pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[_Source]


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
        shared = self.facts.get("shared", {})
        if not isinstance(shared, dict):
            raise damaged(folder / "run.json", "is not what was written (shared is no JSON object)")
        self.shared: dict[str, Any] = shared
        self._open: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        for name in sorted(filter(PIECES_NAME.fullmatch, manifest.files)):
            self._index(name)
        for key, entry in self._entries.items():
            self._check(key, entry)

    @property
    def step(self) -> int:
        """Updates done."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return self.manifest.world_size

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return sorted(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._entries[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """As it was written."""
        return self._entries[key].dtype

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements start..stop of the flattened tensor, 1-d on the CPU, as they were written.

        Raises:
            KeyError: there is no such key.
            CheckpointError: the file cannot be read; named.
        """
        entry = self._entries[key]
        size = prod(entry.shape)
        stop = size if stop is None else stop
        assert 0 <= start <= stop <= size, (key, start, stop, entry.shape)
        values = torch.empty(stop - start, dtype=entry.dtype)
        first = max(0, bisect_right(entry.sources, start, key=lambda source: source.start) - 1)
        for source in entry.sources[first:]:
            begin, end = max(start, source.start), min(stop, source.start + source.length)
            if source.start >= stop:
                break
            if begin < end:
                part = self._tensor(source).reshape(-1)[begin - source.start : end - source.start]
                values[begin - start : end - start] = part
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

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError, RuntimeError) as error:
                raise damaged(self.folder / name, f"cannot be read ({first_line(error)})") from error
        return self._open[name]

    def _tensor(self, source: _Source) -> Tensor:
        """A view of the mapped file: what is not used is not read."""
        try:
            tensor: Tensor = self._file(source.file).get_tensor(source.name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise damaged(self.folder / source.file, f"cannot be read ({first_line(error)})") from error
        return tensor

    def _index(self, file: str) -> None:
        """Enter the tensors of one rank's file."""
        path = self.folder / file
        opened = self._file(file)
        shapes = _shapes_of(path, opened.metadata() or {})
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            part = opened.get_slice(name)
            dtype = TORCH_DTYPES.get(part.get_dtype())
            if dtype is None:
                raise damaged(path, f"holds {name!r} of type {part.get_dtype()}, which no checkpoint has")
            key, _, start = name.rpartition(PLACE)
            shape = tuple(part.get_shape())
            source = _Source(0, prod(shape), file, name)
            if key in shapes and start.isdecimal() and len(shape) == 1:
                source, shape = _Source(int(start), shape[0], file, name), shapes[key]
            else:
                key = name
            entry = self._entries.setdefault(key, _Entry(shape, dtype, []))
            if (entry.shape, entry.dtype) != (shape, dtype):
                raise damaged(path, f"disagrees with other files on shape or type of {key!r}")
            entry.sources.append(source)

    def _check(self, key: str, entry: _Entry) -> None:
        """See that the pieces of a tensor lie one after another, from its start to its end."""
        entry.sources.sort(key=lambda source: source.start)
        end = 0
        for source in entry.sources:
            if source.start != end:
                what = "is missing between this file and" if source.start > end else "is there twice, in this file and"
                raise damaged(self.folder / source.file, f"does not fit: a part of {key!r} {what} others")
            end += source.length
        if end != prod(entry.shape):
            last = self.folder / entry.sources[-1].file
            raise damaged(last, f"and the others hold {end} elements of {key!r}, which has {prod(entry.shape)}")


def _shapes_of(path: Path, metadata: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Whole shapes of the tensors of which a file has a part."""
    try:
        shapes = json.loads(metadata.get("shapes", "{}"))
        whole = {key: tuple(shape) for key, shape in shapes.items()}
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise damaged(path, "cannot be read (the shapes of its partial tensors)") from error
    if not all(type(dim) is int and 0 <= dim < 2**48 for shape in whole.values() for dim in shape):
        raise damaged(path, "cannot be read (the shapes of its partial tensors)")
    return whole
