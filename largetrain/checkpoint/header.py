"""The headers of a checkpoint's safetensors files: what lies where. No torch.

Read by ourselves and not by the library, since it maps files into memory: reading a range straight to where it is
needed is faster, and a file that is cut short meanwhile is an error instead of the end of the process.
"""

import json
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from largetrain.checkpoint.manifest import damaged, first_line, parsed_json, regular_size
from largetrain.parallel.columns import Columns

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
PLACE = "@"  # between the key of a partial tensor and where the piece starts
# "10": from element 10 of the flattened tensor; "10[4:8/16]": from element 10 of its flattened columns 4 to 8 of 16
START = re.compile(r"(\d{1,19})(?:\[(\d{1,19}):(\d{1,19})/(\d{1,19})\])?", re.ASCII)
LARGEST_HEADER_BYTES = 100_000_000  # as in the library
LARGEST_DIM = 2**48
ALIGNMENT = 4096
"""Bytes: data begin at a multiple, so that they can go from memory to disk without the page cache."""


@dataclass(frozen=True)
class Stored:
    """A piece of a tensor in a file."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    """As safetensors calls it."""
    start: int
    """First element of the piece in the flattened whole tensor, or in its flattened columns."""
    count: int
    """Elements of the piece."""
    offset: int
    """Of its first byte in the file."""
    columns: Columns | None = None
    """Some columns of at least two rows; None: the piece is a range of the whole tensor."""

    @property
    def name(self) -> str:
        """In the header of its file."""
        if self.columns is not None:
            return f"{self.key}{PLACE}{self.start}[{self.columns.first}:{self.columns.last}/{self.columns.width}]"
        return self.key if self.count == prod(self.shape) else f"{self.key}{PLACE}{self.start}"


def header(pieces: list[Stored]) -> bytes:
    """The beginning of a file whose data are these pieces one after another; `ALIGNMENT` bytes or a multiple long.

    Raises:
        ValueError: two pieces have the same place.
    """
    entries: dict[str, Any] = {}
    partial: dict[str, list[int]] = {}
    offset = 0
    for piece in pieces:
        name, whole = piece.name, piece.name == piece.key
        if name in entries:
            raise ValueError(f"{name} is there twice")
        if not whole:
            partial[piece.key] = list(piece.shape)
        end = offset + piece.count * ITEM_BYTES[piece.dtype]
        shape = list(piece.shape) if whole else [piece.count]
        entries[name] = {"dtype": piece.dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    metadata = {"format": "pt", "shapes": json.dumps(partial)}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> list[Stored]:
    """The pieces of a file.

    Raises:
        CheckpointError: it is not a file that `header` began.
    """
    try:
        size = regular_size(path)
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if length > min(size - 8, LARGEST_HEADER_BYTES):
                raise damaged(path, "is not a safetensors file: it ends before its header does")
            content = parsed_json(path, file.read(length))
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    if not isinstance(content, dict):
        raise damaged(path, "is not a safetensors file: its header is no JSON object")
    shapes = _whole_shapes(path, content.pop("__metadata__", {}))
    begin = 8 + length
    return [_stored(path, name, entry, shapes, begin, size) for name, entry in content.items()]


def _whole_shapes(path: Path, metadata: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of which a file has a part only."""
    text = metadata.get("shapes", "{}") if isinstance(metadata, dict) else None
    shapes = parsed_json(path, text.encode(errors="replace")) if isinstance(text, str) else None
    if not isinstance(shapes, dict):
        raise damaged(path, "lacks the shapes of its tensors")
    return {key: _dims(path, key, shape) for key, shape in shapes.items()}


def _dims(path: Path, name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim < LARGEST_DIM for dim in shape):
        raise damaged(path, f"gives no shape of {name[:80]!r}")
    if prod(shape) >= LARGEST_DIM:
        raise damaged(path, f"gives {name[:80]!r} a shape beyond any tensor")
    return tuple(shape)


def _stored(
    path: Path, name: str, entry: Any, shapes: dict[str, tuple[int, ...]], begin: int, file_bytes: int
) -> Stored:
    """One entry, checked."""
    if not isinstance(entry, dict):
        raise damaged(path, f"says nothing of {name[:80]!r}")
    dtype, shape = entry.get("dtype"), _dims(path, name, entry.get("shape"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise damaged(path, f"holds {name[:80]!r} of a type that no checkpoint has ({str(dtype)[:20]!r})")
    try:
        first, last = entry["data_offsets"]
        right = type(first) is type(last) is int and first >= 0 and begin + last <= file_bytes
        right = right and last - first == prod(shape) * ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"does not say where {name[:80]!r} is ({first_line(error)})") from error
    if not right:
        raise damaged(path, f"says that {name[:80]!r} is where it cannot be")
    key, _, place = name.rpartition(PLACE)
    found = START.fullmatch(place)
    if key not in shapes or len(shape) != 1 or found is None:
        return Stored(name, shape, dtype, 0, prod(shape), begin + first)
    columns = None if found[2] is None else _columns(path, name, shapes[key], found, shape[0])
    return Stored(key, shapes[key], dtype, int(found[1]), shape[0], begin + first, columns)


def _columns(path: Path, name: str, shape: tuple[int, ...], found: re.Match[str], count: int) -> Columns:
    """The columns that an entry of `count` elements is of, checked: some of those of a slice along one dim."""
    start, first, last, width = (int(number) for number in found.groups())
    columns = Columns(width, first, last)
    widths = {prod(shape[dim:]) for dim in range(1, len(shape))}
    right = 0 <= first < last <= width and width in widths and columns.count < width < prod(shape)
    if not right or start + count > columns.numel(shape):
        raise damaged(path, f"gives {name[:80]!r} columns that a tensor of shape {list(shape)} has not")
    return columns
