"""Weights out of a checkpoint: for `transformers`, as safetensors, or as a bare state_dict of PyTorch."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largetrain.checkpoint.files import (
    Planned,
    appearing,
    check_free,
    check_room,
    write_bytes,
    write_safetensors,
)
from largetrain.checkpoint.hf import config_of, decoder_shapes, spec_of, to_theirs
from largetrain.checkpoint.sources import MODEL, Entry, Source
from largetrain.config.decoder_spec import DecoderSpec
from largetrain.errors import ConfigError
from largetrain.models.state_dicts import some

FORMATS = ("hf", "safetensors", "torch")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_SHARD_BYTES = 5 * 10**9
KEY = "export"
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_WRITTEN = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Export:
    """What was written."""

    path: Path
    tensors: int
    bytes: int
    files: int


def export(
    source: Source,
    target: Path,
    kind: str,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: Path | None = None,
    force: bool = False,
) -> Export:
    """Write the weights of `source`.

    Args:
        target: a folder; for `safetensors` also a file *.safetensors, for `torch` a file.
        kind: one of `FORMATS`.
        dtype: of floating-point tensors; None: as they are kept (fp32 masters).
        shard_bytes: largest file of tensors; a single tensor may be larger.
        tokenizer: a tokenizer.json to put beside a model of `hf`.
        force: replace what an earlier export wrote there.

    Raises:
        ConfigError: the model cannot be written so, or the place is taken or full.
    """
    state = {key.removeprefix(MODEL): entry for key, entry in source.entries.items()}
    tied: dict[str, str] = source.shared.get("tied") or {}
    config: dict[str, Any] | None = None
    if kind == "hf":
        spec = decoder_of(source)
        config = config_of(spec, dtype or _common_dtype(state))
        state = to_theirs(_exactly(state, spec, source.where), spec)
    elif kind == "safetensors":
        state = {name: entry for name, entry in state.items() if name not in tied}
    single = kind == "torch" or (kind == "safetensors" and target.suffix == ".safetensors")
    check_free(target, KEY, force, _is_file if single else _is_export)
    planned = [_converted(name, entry, dtype) for name, entry in state.items()]
    size = sum(tensor.bytes for tensor in planned)
    check_room(target, size + (1 << 20), KEY)
    metadata = {"format": "pt", **({"tied": json.dumps(tied)} if tied and kind == "safetensors" else {})}
    with appearing(target, KEY) as partial:
        if kind == "torch":
            _save_torch(partial, planned, tied)
        elif single:
            write_safetensors(partial, planned, metadata)
        else:
            partial.mkdir()
            shards = _write_shards(partial, planned, metadata, shard_bytes)
            if config is not None:
                write_bytes(partial / "config.json", json.dumps(config, indent=2).encode() + b"\n")
                _copy_tokenizer(tokenizer, partial)
            return Export(target, len(planned), size, shards)
    return Export(target, len(planned), size, 1)


def decoder_of(source: Source) -> DecoderSpec:
    """Sizes of the built-in decoder that the weights are of.

    Raises:
        ConfigError: they are of another model.
    """
    model = source.facts.get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"{KEY} --format hf: {source.where} does not say which model it is of; use another format.")
    if model.get("target") is not None or "style" not in model:
        what = model.get("target") or model.get("name") or "another model"
        raise ConfigError(
            f"{KEY} --format hf: writes the built-in decoder alone, and {source.where} is of {what}; --format "
            f"safetensors or torch writes any model."
        )
    return spec_of(model)


def parse_size(written: str) -> int:
    """Bytes of "5GB", "200MB", "1GiB" or a number.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", written.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {written}: a size such as 5GB, 200MB or 1GiB is needed.")
    return size


def _common_dtype(state: Mapping[str, Entry]) -> torch.dtype:
    """Of the floating-point tensors: the widest."""
    found = torch.float16
    kinds = [entry.dtype for entry in state.values() if entry.dtype.is_floating_point]
    for kind in kinds:
        found = kind if kind == kinds[0] else torch.promote_types(found, kind)
    return found if kinds else torch.float32


def _exactly(state: Mapping[str, Entry], spec: DecoderSpec, where: str) -> dict[str, Entry]:
    """The decoder's own tensors, once each."""
    shapes = decoder_shapes(spec)
    wrong = [name for name, shape in shapes.items() if name not in state or state[name].shape != shape]
    if wrong:
        raise ConfigError(f"{KEY} --format hf: {where} lacks {some(wrong)} in the shape that its model section says.")
    return {name: state[name] for name in shapes}


def _converted(name: str, entry: Entry, dtype: torch.dtype | None) -> Planned:
    if dtype is None or dtype == entry.dtype or not entry.dtype.is_floating_point:
        return Planned(name, entry.shape, entry.dtype, entry.read)

    def read(start: int, stop: int) -> Tensor:
        values = entry.read(start, stop)
        cast = values.to(dtype)
        if not torch.equal(torch.isfinite(cast), torch.isfinite(values)):
            raise ConfigError(f"{KEY} --dtype: {name} has values beyond {dtype}; use bf16 or fp32.")
        return cast

    return Planned(name, entry.shape, dtype, read)


def _write_shards(folder: Path, planned: Sequence[Planned], metadata: dict[str, str], shard_bytes: int) -> int:
    """model.safetensors, or shards and their index; returns the number of files."""
    shards: list[list[Planned]] = [[]]
    for tensor in planned:
        if shards[-1] and sum(held.bytes for held in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0], metadata)
        return 1
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, metadata)
    index = {
        "metadata": {"total_size": sum(tensor.bytes for tensor in planned)},
        "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    write_bytes(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")
    return len(shards)


def _save_torch(path: Path, planned: Sequence[Planned], tied: Mapping[str, str]) -> None:
    """A state_dict in which tied names share one tensor, as they do in the model."""
    # copies: a view of a mapped file would be saved with all of the file
    state = {
        tensor.name: tensor.read(0, tensor.count).reshape(tensor.shape).clone()
        for tensor in planned
        if tensor.name not in tied
    }
    state.update({alias: state[name] for alias, name in tied.items() if name in state})
    with open(path, "xb") as file:
        torch.save({tensor.name: state[tensor.name] for tensor in planned}, file)


def _copy_tokenizer(tokenizer: Path | None, folder: Path) -> None:
    """tokenizer.json, and what lies beside it of the same."""
    if tokenizer is None:
        return
    for name in TOKENIZER_FILES:
        found = tokenizer if name == TOKENIZER_FILES[0] else tokenizer.with_name(name)
        if found.is_file():
            shutil.copyfile(found, folder / name)


def _is_file(path: Path) -> bool:
    return path.is_file()


def _is_export(path: Path) -> bool:
    """Whether a folder holds nothing but what an export writes."""
    return path.is_dir() and all(
        _WRITTEN.fullmatch(found.name) and found.is_file() and not found.is_symlink() for found in path.iterdir()
    )
