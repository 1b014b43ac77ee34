"""How two checkpoints differ: facts, and tensors bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from largetrain.checkpoint.reader import CheckpointReader
from largetrain.checkpoint.weights import same_bits

CHUNK_VALUES = 1 << 24


@dataclass(frozen=True)
class Change:
    """A tensor that both have, with other values."""

    key: str
    count: int
    """Elements whose bits differ."""
    of: int
    largest: float
    """Largest absolute difference; not-a-number on one side alone counts as infinite."""


@dataclass
class Differences:
    """Everything that differs."""

    missing: dict[str, str] = field(default_factory=dict)
    """Key -> which of the two lacks it ("A" or "B")."""
    reshaped: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key -> dtype and shape in A and in B."""
    changed: list[Change] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    """Ranks whose own state (random generators) differs."""
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    compared: int = 0
    """Tensors that both have."""

    @property
    def same_tensors(self) -> bool:
        """Whether both hold the same tensors, bit for bit."""
        return not (self.missing or self.reshaped or self.changed)


def compare(first: CheckpointReader, second: CheckpointReader) -> Differences:
    """Compare two checkpoints, a few tens of MB in memory at once.

    Raises:
        CheckpointError: a file cannot be read.
    """
    found = Differences(facts=_facts(first.facts, second.facts))
    ours, theirs = set(first.keys()), set(second.keys())
    found.missing = {key: "A" if key in theirs else "B" for key in sorted(ours ^ theirs)}
    for key in sorted(ours & theirs):
        found.compared += 1
        kinds = _kind(first, key), _kind(second, key)
        if kinds[0] != kinds[1]:
            found.reshaped[key] = kinds
        elif (change := _change(first, second, key)) is not None:
            found.changed.append(change)
    ranks = range(max(first.world_size, second.world_size))
    found.own = [rank for rank in ranks if not _alike(first.own(rank), second.own(rank))]
    return found


def _kind(reader: CheckpointReader, key: str) -> str:
    return f"{str(reader.dtype(key)).removeprefix('torch.')} {list(reader.shape(key))}"


def _change(first: CheckpointReader, second: CheckpointReader, key: str) -> Change | None:
    total = torch.Size(first.shape(key)).numel()
    count, largest = 0, 0.0
    for start in range(0, total, CHUNK_VALUES):
        stop = min(start + CHUNK_VALUES, total)
        one, other = first.read(key, start, stop), second.read(key, start, stop)
        if same_bits(one, other):
            continue
        width = one.dtype.itemsize
        bits = [values.contiguous().view(torch.uint8).view(-1, width) for values in (one, other)]
        differs = (bits[0] != bits[1]).any(dim=1)
        count += int(differs.sum())
        largest = max(largest, _distance(one[differs], other[differs]))
    return Change(key, count, total, largest) if count else None


def _distance(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference of values that differ in their bits; 0.0 for 0 and -0, or two kinds of nan."""
    a, b = one.double(), other.double()
    both_nan = a.isnan() & b.isnan()
    apart = (a - b).abs()
    apart = torch.where(both_nan | (a == b), 0.0, torch.where(apart.isnan(), torch.inf, apart))
    return float(apart.max())


def _facts(first: Mapping[str, Any], second: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> both values, of each fact that differs."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*first, *second}):
        one, other = first.get(name), second.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found.update(_facts(one, other, f"{path}{name}."))
        elif one != other:
            found[f"{path}{name}"] = one, other
    return found


def _alike(one: Any, other: Any) -> bool:
    """Equal, through dicts and lists, with tensors bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and same_bits(one.reshape(-1), other.reshape(-1))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and bool(one == other)
