"""Weights to begin with, from whatever holds them, and a strict report on how they fit a model.

Nothing that is read here runs code: our checkpoints and safetensors hold none, and files of torch.save are read with
torch's restricted unpickler.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largetrain.checkpoint.deepspeed_files import deepspeed_folder, deepspeed_weights
from largetrain.checkpoint.hf import EMBEDDING, HEAD, is_hf_folder, read_hf_folder
from largetrain.checkpoint.locate import checkpoint_at, existing, is_checkpoint
from largetrain.checkpoint.restricted import read_torch_file
from largetrain.checkpoint.sources import (
    EMA,
    INDEX_ENDING,
    MODEL,
    Entry,
    Source,
    in_memory,
    index_of,
    of_names,
    safetensors_entries,
    safetensors_metadata,
    sharded_entries,
    shards_of,
    without_prefixes,
)
from largetrain.checkpoint.together import led_by_first
from largetrain.checkpoint.verify import Check, contents_problem_of, problem_of
from largetrain.config.prefixes import fits
from largetrain.errors import CheckpointError, ConfigError
from largetrain.models.state_dicts import COUNTER, some, tensors_of
from largetrain.parallel.pieces import Pieces

KINDS = (
    "a checkpoint or run of largetrain, a .safetensors file, a file of torch.save, a folder of sharded safetensors, a "
    "Hugging Face GPT-2 or Llama, or a checkpoint of DeepSpeed"
)
NAMES_SHOWN = 8


def weights_from(
    path: str, key: str = "init_from", *, ema: bool = False, trust: bool = False, contents: bool = True
) -> Source:
    """Weights and buffers of a model by name, none of them read yet; keys are `model/NAME`.

    Args:
        path: one of `KINDS`. A run means its newest complete checkpoint, RUN/best its best one.
        key: where the path was written, for messages.
        ema: the moving average of the weights in the place of the weights (our checkpoints alone).
        trust: unpickle DeepSpeed's files whatever is in them, which may run code of their author.
        contents: of a checkpoint of ours, compare the SHA-256 of every file first.

    Raises:
        ConfigError: it is none of these, damaged, or holds what could run code.
    """
    given = existing(path, key)
    ours = ours_at(path, key, contents_problem_of if contents else problem_of)
    if ours is not None:
        try:
            return _of_checkpoint(ours, key, ema)
        except CheckpointError as error:
            raise ConfigError(f"{key}: {error}.") from error
    if ema:
        raise ConfigError(f"{key}: {given} is no checkpoint of largetrain, and holds no moving average.")
    return _of_file(given, key) if given.is_file() else _of_folder(given, key, trust)


def weights_together(path: str, key: str = "init_from") -> Source:
    """As `weights_from`, with a checkpoint of ours read and hashed by all ranks together. A collective.

    Raises:
        ConfigError: on all ranks: it cannot be used.
    """
    ours = led_by_first(lambda check: ours_at(path, key, check))
    return weights_from(path if ours is None else str(ours), key, contents=False)


def ours_at(path: str, key: str, check: Check) -> Path | None:
    """The checkpoint of ours that a source of weights means; None where it means something else.

    Args:
        check: as for `checkpoint_at`.

    Raises:
        ConfigError: there is nothing, or a checkpoint of ours that is not whole.
    """
    given = existing(path, key)
    try:
        return checkpoint_at(given, key, check)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}.") from error
    except ConfigError as error:
        raise _with_way_out(error, given) from error


def _with_way_out(error: ConfigError, given: Path) -> ConfigError:
    """An earlier format of ours held DeepSpeed's own files, which can be read."""
    if is_checkpoint(given) and deepspeed_folder(given) is not None:
        hint = "DeepSpeed's files in it can be read: `largetrain checkpoint import` makes weights of them."
        return ConfigError([f"{problem} {hint}" for problem in error.problems])
    return error


def _of_checkpoint(checkpoint: Path, key: str, ema: bool) -> Source:
    from largetrain.checkpoint.reader import open_checkpoint

    reader = open_checkpoint(checkpoint)
    prefix = EMA if ema else MODEL

    def entry(stored: str) -> Entry:
        read = partial(reader.read, stored)
        return Entry(tuple(reader.shape(stored)), reader.dtype(stored), read, read)

    keys = reader.keys()
    state = {stored.removeprefix(prefix): entry(stored) for stored in keys if stored.startswith(prefix)}
    if not state:
        what = "no moving average (ema); export without --ema" if ema else "no weights"
        raise ConfigError(f"{key}: {checkpoint} holds {what}.")
    source = of_names(state, str(checkpoint), dict(reader.facts))
    tied = reader.shared.get("tied")
    return _tied(source, tied if isinstance(tied, dict) else {})


def _of_file(path: Path, key: str) -> Source:
    if path.name.endswith(INDEX_ENDING):
        state = without_prefixes(sharded_entries(path, key, safetensors_entries))
        first = path.parent / min(shards_of(path, key))
        return _tied(of_names(state, str(path)), safetensors_metadata(first).get("tied", {}))
    if path.suffix == ".safetensors":
        state = without_prefixes(safetensors_entries(path, key))
        if not state:
            raise ConfigError(f"{key}: {path} holds no tensors.")
        return _tied(of_names(state, str(path)), safetensors_metadata(path).get("tied", {}))
    way_out = "Save the weights alone: torch.save(model.state_dict(), path)."
    if path.name.endswith("_model_states.pt"):
        way_out = "It is one of DeepSpeed's: give the folder that it lies in."
    return of_names(plain_state(read_torch_file(path, key, way_out=way_out), str(path), key), str(path))


def _of_folder(path: Path, key: str, trust: bool) -> Source:
    if is_hf_folder(path):
        section, state = read_hf_folder(path, key)
        return tied_source(of_names(state, str(path), {"model": section}), section)
    if (folder := deepspeed_folder(path)) is not None:
        return deepspeed_weights(folder, key, trust=trust)
    index = index_of(path, key)
    single = sorted(path.glob("*.safetensors"))
    if index is not None or len(single) == 1:
        return _of_file(index or single[0], key)
    what = "is empty" if not any(path.iterdir()) else "holds nothing that is known"
    raise ConfigError(f"{key}: {path} {what}; give {KINDS}.")


def plain_state(held: Any, where: str, key: str) -> dict[str, Entry]:
    """Name -> tensor of what a file of torch.save holds, names as the bare model has them.

    Raises:
        ConfigError: it holds anything else.
    """
    tensors = tensors_of(held, where, key)
    return without_prefixes({str(name): in_memory(t) for name, t in tensors.items() if name != COUNTER})


def tied_source(source: Source, section: Mapping[str, Any]) -> Source:
    """A decoder's weights, with what its `model` section says of the tie."""
    return _tied(source, {HEAD: EMBEDDING} if section["tie_embeddings"] else {})


def _tied(source: Source, tied: Mapping[str, str]) -> Source:
    """Also offer the further names of tied tensors, for a model in which they are tensors of their own."""
    names = {alias: name for alias, name in tied.items() if MODEL + name in source.entries}
    aliases = {MODEL + alias: source.entries[MODEL + name] for alias, name in names.items()}
    return replace(source, entries={**aliases, **source.entries}, shared={**source.shared, "tied": names})


@dataclass(frozen=True)
class Match:
    """How weights fit a model."""

    lines: list[str]
    """For a person: what is loaded, and what is not."""
    names: list[str]
    """Names of the model's tensors that are to be taken from the source."""


def match_report(
    wanted: Mapping[str, Sequence[int]], source: Pieces, allowed_missing: Collection[str] = (), key: str = "init_from"
) -> Match:
    """Compare a model's tensors with those of a source, strictly.

    Args:
        wanted: name -> shape of the model's weights and buffers, tied ones under one of their names.
        allowed_missing: prefixes (whole dotted parts) of names that may be missing or have another shape, and keep
            their initial values.
        key: where the source was named, for messages.

    Raises:
        ConfigError: any other difference, or none of the names is the model's.
    """
    where = getattr(source, "where", "the weights")
    keys = source.keys()
    there = {stored.removeprefix(MODEL): stored for stored in keys if stored.startswith(MODEL)}
    names = [name for name in wanted if name in there]
    if not names:
        raise ConfigError(
            f"{key}: {where}: none of its {len(there)} names is one of the model's; it has {some(sorted(there))}, the "
            f"model {some(list(wanted))}."
        )

    def allowed(name: str) -> bool:
        return any(fits(prefix, name) for prefix in allowed_missing)

    missing = [name for name in wanted if name not in there]
    reshaped = [name for name in names if tuple(source.shape(there[name])) != tuple(wanted[name])]
    extra = [name for name in there if name not in wanted and not _is_tied(name, names, source)]
    problems = _problems(where, key, wanted, source, [n for n in missing if not allowed(n)], reshaped, extra, allowed)
    if problems:
        raise ConfigError(problems)
    kept = missing + reshaped
    loaded = [name for name in names if name not in set(reshaped)]
    values = sum(torch.Size(wanted[name]).numel() for name in loaded)
    lines = [f"loaded {len(loaded)} of {len(wanted)} tensors, {values:,} values, from {where}"]
    if kept:
        lines.append(f"kept as initialised (init_missing): {some(kept, NAMES_SHOWN)}")
    if extra:
        lines.append(f"left out, of a part that is replaced (init_missing): {some(extra, NAMES_SHOWN)}")
    return Match(lines, loaded)


def _problems(
    where: str,
    key: str,
    wanted: Mapping[str, Sequence[int]],
    source: Pieces,
    missing: list[str],
    reshaped: list[str],
    extra: list[str],
    allowed: Callable[[str], bool],
) -> list[str]:
    advice = "Take the weights of this very model, or name parts that may differ in init_missing."
    shapes = [
        f"{name} ({list(source.shape(MODEL + name))} there, {list(wanted[name])} here)"
        for name in reshaped
        if not allowed(name)
    ]
    unexpected = [name for name in extra if not allowed(name)]
    found = [
        (f"lacks {len(missing)} of the model's tensors", missing),
        (f"has {len(unexpected)} tensors that the model has not", unexpected),
        (f"has {len(shapes)} tensors of another shape", shapes),
    ]
    return [f"{key}: {where} {what}: {some(names, NAMES_SHOWN)}. {advice}" for what, names in found if names]


def _is_tied(name: str, loaded: Sequence[str], source: Pieces) -> bool:
    """Whether a tensor that the model does not ask for is one that it asks for under another name."""
    tied = source.shared.get("tied") or {}
    if name in tied and tied[name] in loaded:
        return True
    shape, stored = tuple(source.shape(MODEL + name)), MODEL + name
    alike = [other for other in loaded if tuple(source.shape(MODEL + other)) == shape]
    return bool(alike) and len(shape) > 1 and any(_equal(source, stored, MODEL + other) for other in alike)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 1-d tensors of one dtype and size hold the same bits (not-a-number included)."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _equal(source: Pieces, first: str, second: str) -> bool:
    """Bit for bit; a look at the first elements comes before the rest is read."""
    for stop in (1024, None):
        one, other = source.read(first, 0, stop), source.read(second, 0, stop)
        if one.dtype != other.dtype or not same_bits(one, other):
            return False
    return True
