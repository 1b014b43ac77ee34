"""What tools write: safetensors streamed tensor by tensor, in files and folders that appear whole or not at all."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from largetrain.checkpoint.manifest import FileRecord
from largetrain.checkpoint.space import in_words
from largetrain.checkpoint.staging import DTYPES
from largetrain.checkpoint.writer import sync
from largetrain.errors import ConfigError

CHUNK_BYTES = 32 << 20
"""Of a tensor, held at once."""


@dataclass(frozen=True)
class Planned:
    """A tensor of a file to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    """Elements start..stop of it, 1-d, of `dtype`."""

    @property
    def count(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Of the data."""
        return self.count * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str]) -> FileRecord:
    """Write and sync a new safetensors file, a few MiB in memory at once.

    Raises:
        OSError: it cannot be written.
        ConfigError: a tensor's dtype is none of the format's.
    """
    ordered = aligned(tensors)
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.bytes
        dtype = dtype_name(tensor.name, tensor.dtype)
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_stream(path, struct.pack("<Q", len(text)) + text, ordered)


def aligned(tensors: Sequence[Planned]) -> list[Planned]:
    """Largest elements first, so that every tensor begins at a multiple of its element's size."""
    return sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """What safetensors calls the dtype of tensor `name`.

    Raises:
        ConfigError: it has no place in our files.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"{name} is of type {dtype}, which has no place in a file of safetensors here.")
    return DTYPES[dtype]


def write_stream(path: Path, header: bytes, tensors: Sequence[Planned]) -> FileRecord:
    """Write and sync a new file: a header, then the data of the tensors.

    Raises:
        OSError: it cannot be written.
    """
    return _write(path, _parts(header, tensors))


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write and sync a new small file."""
    return _write(path, [memoryview(content)])


def _parts(header: bytes, tensors: Iterable[Planned]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        step = max(1, CHUNK_BYTES // tensor.dtype.itemsize)
        for start in range(0, tensor.count, step):
            values = tensor.read(start, min(start + step, tensor.count))
            assert values.dtype == tensor.dtype, (tensor.name, values.dtype, tensor.dtype)
            yield memoryview(values.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write(path: Path, parts: Iterable[memoryview]) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def check_free(target: Path, key: str, force: bool, ours: Callable[[Path], bool]) -> None:
    """Refuse a target that would overwrite something, or that cannot be made.

    Args:
        ours: whether an existing file or folder is what such a command writes, so that --force may replace it.

    Raises:
        ConfigError: it does.
    """
    parent = target.absolute().parent
    if target.name in ("", "..") or not parent.is_dir():
        raise ConfigError(f"{key} {target}: there is no folder {parent}; make it, or name another place.")
    if not os.path.lexists(target):
        return
    if not force:
        raise ConfigError(f"{key} {target}: is there already; name another place, or add --force to replace it.")
    if target.is_symlink() or not ours(target):
        raise ConfigError(f"{key} {target}: holds other things than this command writes; name another place.")


def check_room(target: Path, needed: int, key: str) -> None:
    """Refuse what does not fit on the disk.

    Raises:
        ConfigError: there is less room than `needed` bytes.
    """
    free = shutil.disk_usage(target.absolute().parent).free
    if free < needed:
        raise ConfigError(f"{key} {target}: needs {in_words(needed)}, and the disk has {in_words(free)}; make room.")


@contextmanager
def appearing(target: Path, key: str) -> Iterator[Path]:
    """Give a path beside `target` to write to, which becomes `target` by a rename when the block ends well.

    What was there before goes only then; on a failure it stays, and what was written is removed.

    Raises:
        ConfigError: the disk is full, or the place cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        yield partial
        if partial.is_dir():
            for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
                sync(folder)
        _replace(partial, target)
        sync(target.absolute().parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{key} {target}: cannot be written ({reason}); name another place, or make room.") from error
    finally:
        _remove(partial)


def _replace(partial: Path, target: Path) -> None:
    if not target.is_dir():
        partial.rename(target)
        return
    aside = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    target.rename(aside)
    partial.rename(target)
    shutil.rmtree(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
