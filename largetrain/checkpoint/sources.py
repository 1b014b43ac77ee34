"""Tensors by name from files that are not our checkpoints, read when they are asked for, as `Pieces`."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from largetrain.errors import ConfigError
from largetrain.models.state_dicts import prefix_of, some
from largetrain.parallel.columns import Columns
from largetrain.parallel.pieces import columns_of

MODEL, EMA = "model/", "ema/"
INDEX_ENDING = ".safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    """Elements start..stop of the flattened tensor, 1-d, on the CPU, of `dtype`."""
    read_columns: Callable[[int, int, Columns], Tensor] | None = None
    """The same of its flattened columns; None: they are taken out of whole rows."""

    @property
    def count(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def whole(self) -> Tensor:
        """All of it, in its shape."""
        return self.read(0, self.count).view(self.shape)


@dataclass
class Source:
    """Tensors of any origin, as `parallel.pieces.Pieces`: keys are `model/NAME`."""

    entries: dict[str, Entry]
    where: str
    """Words for a person: the file or folder that it was read from."""
    shared: dict[str, Any] = field(default_factory=dict)
    """`tied`: further name -> name under which a tensor is kept."""
    facts: dict[str, Any] = field(default_factory=dict)
    """As in a checkpoint; `model` is the section of the run YAML where it is known."""

    def keys(self) -> Sequence[str]:
        """All keys, sorted."""
        return sorted(self.entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.entries[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """What `read` gives."""
        return self.entries[key].dtype

    def read(self, key: str, start: int = 0, stop: int | None = None, columns: Columns | None = None) -> Tensor:
        """Elements start..stop of the flattened tensor, or of its flattened columns."""
        entry = self.entries[key]
        if columns is None:
            return entry.read(start, entry.count if stop is None else stop)
        stop = columns.numel(entry.shape) if stop is None else stop
        if entry.read_columns is not None:
            return entry.read_columns(start, stop, columns)
        return columns_of(entry.read, columns, start, stop)

    def own(self, rank: int) -> dict[str, Any]:
        """Nothing: weights belong to no rank."""
        return {}


def of_names(state: Mapping[str, Entry], where: str, facts: dict[str, Any] | None = None) -> Source:
    """Weights by their names in the model."""
    return Source({MODEL + name: entry for name, entry in state.items()}, where, facts=facts or {})


def in_memory(tensor: Tensor) -> Entry:
    """An entry for a tensor that is at hand, or mapped from a file."""
    return computed(tuple(tensor.shape), tensor.dtype, tensor.detach)


def computed(shape: tuple[int, ...], dtype: torch.dtype, whole: Callable[[], Tensor]) -> Entry:
    """An entry whose tensor is made anew each time that it is asked for."""
    return Entry(shape, dtype, lambda start, stop: whole().reshape(-1)[start:stop])


def in_parts(parts: Sequence[Tensor], shape: tuple[int, ...], start: int = 0) -> Entry:
    """An entry that lies in 1-d tensors, one after the other, from element `start` of them."""
    return Entry(shape, parts[0].dtype, lambda low, high: range_of(parts, start + low, start + high))


def range_of(parts: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Elements start..stop of 1-d tensors, one after the other."""
    found, offset = [], 0
    for part in parts:
        low, high = max(start - offset, 0), min(stop - offset, part.numel())
        if low < high:
            found.append(part[low:high])
        offset += part.numel()
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if found else parts[0][:0]


def without_prefixes(state: Mapping[str, Entry]) -> dict[str, Entry]:
    """Take off what wrappers put before every name, as often as it is there."""
    found = dict(state)
    while (prefix := prefix_of(list(found))) is not None:
        found = {name.removeprefix(prefix): entry for name, entry in found.items()}
    return found


def safetensors_entries(path: Path, key: str) -> dict[str, Entry]:
    """Tensors of one safetensors file, mapped.

    Raises:
        ConfigError: it cannot be read as one; `key` says where the path was written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(path, framework="pt")
        return {name: in_memory(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{key}: {path} cannot be read as safetensors ({error}); write or copy it anew.") from error


def safetensors_metadata(path: Path) -> dict[str, Any]:
    """What the header of a safetensors file of ours says beside the tensors: `tied` (see `Source.shared`)."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        written = (opened.metadata() or {}).get("tied", "{}")
    try:
        tied = json.loads(written)
    except ValueError:
        return {}
    return {"tied": tied} if isinstance(tied, dict) else {}


def index_of(folder: Path, key: str) -> Path | None:
    """The index of a folder's sharded safetensors; None when there is none.

    Raises:
        ConfigError: there are several.
    """
    found = sorted(folder.glob(f"*{INDEX_ENDING}"))
    if len(found) > 1:
        raise ConfigError(f"{key}: {folder} has {len(found)} indices ({', '.join(p.name for p in found)}); name one.")
    return found[0] if found else None


def sharded_entries(index: Path, key: str, read: Callable[[Path, str], Mapping[str, Entry]]) -> dict[str, Entry]:
    """Tensors of the files that an index names.

    Args:
        read: gives the tensors of one file.

    Raises:
        ConfigError: the index is none, or a file lies elsewhere, is missing, or lacks what the index says.
    """
    entries: dict[str, Entry] = {}
    for file, names in shards_of(index, key).items():
        held = read(index.parent / file, key)
        if absent := [name for name in names if name not in held]:
            raise ConfigError(
                f"{key}: {index.parent / file} lacks {some(absent)}, which {index.name} says it holds; copy it anew."
            )
        entries.update({name: held[name] for name in names})
    return entries


def shards_of(index: Path, key: str) -> dict[str, list[str]]:
    """File -> names of its tensors, from an index as Hugging Face writes it ({"weight_map": {name: file}}).

    Raises:
        ConfigError: it is none, or names a file outside its folder or one that is missing.
    """
    content = read_json(index, key)
    mapping = content.get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(file, str) for file in mapping.values()):
        raise ConfigError(f'{key}: {index} is no index: it has no "weight_map" of names to files.')
    files: dict[str, list[str]] = {}
    for name, file in mapping.items():
        if not is_plain_name(file):
            raise ConfigError(f"{key}: {index} names {file!r}, which is not a file beside it; refused.")
        files.setdefault(file, []).append(name)
    if absent := [file for file in files if not (index.parent / file).is_file()]:
        raise ConfigError(f"{key}: {index.parent / absent[0]} is missing, which {index.name} names; copy it too.")
    return files


def read_json(path: Path, key: str) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: it is missing or holds anything else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error}); copy it anew.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path} holds no JSON object; copy it anew.")
    return content


def is_plain_name(name: str) -> bool:
    """Whether `name` is the name of a file or folder and not a path that leads elsewhere."""
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and "\0" not in name and "\\" not in name
