"""Token files: one flat array of ids per split, with document offsets and checksums.

A split is two files: `<split>.bin`, little-endian ids of the narrowest sufficient type, and `<split>.offsets`,
int64 starts of the documents and, last, the number of tokens. Sizes and checksums are in the manifest of the
cache entry.
"""

import io
import os
import zlib
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from largetrain.errors import ConfigError

BLOCK_BYTES = 4 << 20
FULL_CHECK_BYTES = 512 << 20
SAMPLED_BLOCKS = 64


class DamagedError(Exception):
    """A cache file is not what its manifest says; it must be built again."""


@dataclass(frozen=True)
class Split:
    """What a manifest records of one split; `text_bytes` counts UTF-8 bytes without end-of-text tokens."""

    documents: int
    tokens: int
    text_bytes: int
    max_id: int
    dtype: str
    checksums: list[int]
    offset_checksums: list[int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Split":
        """Read what `to_json` wrote.

        Raises:
            DamagedError: keys or types differ.
        """
        numbers = ("documents", "tokens", "text_bytes", "max_id")
        try:
            split = cls(**value)
            whole = all(type(getattr(split, name)) is int for name in numbers)
            whole = whole and all(type(crc) is int for crc in [*split.checksums, *split.offset_checksums])
        except TypeError as error:
            raise DamagedError(f"manifest: {error}") from error
        if not whole or split.dtype not in ("<u2", "<u4"):
            raise DamagedError("manifest: wrong types")
        return split


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest of uint16 and uint32 that holds every id below vocab_size."""
    if not 1 <= vocab_size <= 1 << 32:
        raise ConfigError(f"data.tokenizer: a vocabulary of {vocab_size} ids is out of range (1 to 2**32).")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class SplitWriter:
    """Writes the documents of one split into `folder`.

    Raises:
        ConfigError: an id is outside the vocabulary (a plain cast would wrap it around).
    """

    def __init__(self, folder: Path, name: str, vocab_size: int):
        self.vocab_size, self.dtype = vocab_size, token_dtype(vocab_size)
        self.tokens = self.text_bytes = 0
        self.max_id = -1
        self._offsets = array("q", [0])
        self._path, self._offsets_path = split_paths(folder, name)
        self._raw = self._path.open("xb", buffering=0)
        self._file = io.BufferedWriter(self._raw, buffer_size=1 << 20)

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document: ids, any integer type [tokens], made from so many bytes of text."""
        if ids.size:
            highest = int(ids.max())
            if highest >= self.vocab_size or int(ids.min()) < 0:
                raise ConfigError(
                    f"data.tokenizer: it produced ids {int(ids.min())}..{highest}, but its vocabulary is 0.."
                    f"{self.vocab_size - 1}. Its file is inconsistent."
                )
            self.max_id = max(self.max_id, highest)
        self._file.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        self.tokens += int(ids.size)
        self.text_bytes += text_bytes
        self._offsets.append(self.tokens)

    def finish(self) -> Split:
        """Bring everything to the disk and return what the manifest records."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with self._offsets_path.open("xb") as file:
            file.write(np.array(self._offsets, dtype="<i8").data)
            file.flush()
            os.fsync(file.fileno())
        return Split(
            documents=len(self._offsets) - 1,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            max_id=self.max_id,
            dtype=self.dtype.str,
            checksums=_checksums(self._path),
            offset_checksums=_checksums(self._offsets_path),
        )

    def abandon(self) -> None:
        """Close without finishing; what cannot be flushed any more is lost on purpose."""
        self._raw.close()


def split_paths(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of ids and of document offsets."""
    return folder / f"{name}.bin", folder / f"{name}.offsets"


def _checksums(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def verify(folder: Path, name: str, split: Split, vocab_size: int) -> None:
    """Compare a split's files with its manifest: sizes, checksums and highest id.

    Files up to 512 MiB are read whole; of larger ones the first, the last and 62 blocks between, so that a start
    stays fast.

    Raises:
        DamagedError: anything differs.
    """
    if split.max_id >= vocab_size:
        raise DamagedError(f"{name}: highest id {split.max_id}, vocabulary {vocab_size}")
    ids_path, offsets_path = split_paths(folder, name)
    _verify_file(ids_path, split.tokens * np.dtype(split.dtype).itemsize, split.checksums)
    _verify_file(offsets_path, (split.documents + 1) * 8, split.offset_checksums)


def _verify_file(path: Path, size: int, checksums: list[int]) -> None:
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedError(f"{path.name}: {found} bytes instead of {size}")
        if len(checksums) != -(-size // BLOCK_BYTES):
            raise DamagedError(f"{path.name}: {len(checksums)} checksums for {size} bytes")
        blocks = range(len(checksums))
        picked = blocks if size <= FULL_CHECK_BYTES else np.linspace(0, len(checksums) - 1, SAMPLED_BLOCKS).astype(int)
        with path.open("rb") as file:
            for block in picked:
                file.seek(int(block) * BLOCK_BYTES)
                if zlib.crc32(file.read(BLOCK_BYTES)) != checksums[block]:
                    raise DamagedError(f"{path.name}: checksum of block {block} differs")
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error


def map_tokens(folder: Path, name: str, split: Split) -> np.ndarray:
    """Return the ids of a split, memory-mapped and read-only, [tokens]."""
    if not split.tokens:  # an empty file cannot be mapped
        return np.empty(0, dtype=split.dtype)
    return np.memmap(split_paths(folder, name)[0], dtype=split.dtype, mode="r", shape=(split.tokens,))


def read_offsets(folder: Path, name: str, split: Split) -> np.ndarray:
    """Return the document offsets of a split, int64 [documents + 1]."""
    return np.fromfile(split_paths(folder, name)[1], dtype="<i8", count=split.documents + 1)
