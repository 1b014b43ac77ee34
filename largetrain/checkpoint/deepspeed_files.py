"""Weights from a checkpoint that DeepSpeed wrote by itself, ZeRO 0 to 3, without running DeepSpeed or its pickles.

The fp32 masters lie in the ranks' optimizer files, flat and cut; how, is what DeepSpeed's own `zero_to_fp32` knows:

- stages 1 and 2: the ranks' partitions of a parameter group, one after the other, are its parameters in the order of
  `param_shapes`, then padding;
- stage 3: each rank holds ceil(n / ranks) elements of every parameter, in the order of `param_shapes`, in one or
  several flat tensors; the last rank's end is padding;
- stage 0: the model file holds the weights whole, in the precision of training.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largetrain.checkpoint.restricted import read_torch_file
from largetrain.checkpoint.sources import (
    Entry,
    Source,
    in_memory,
    in_parts,
    is_plain_name,
    of_names,
    range_of,
    without_prefixes,
)
from largetrain.errors import ConfigError
from largetrain.models.state_dicts import some

OPTIMIZER_FILES = "*_optim_states.pt"
WAY_OUT = "Only if you trust whoever wrote it: `largetrain checkpoint import --trust`."
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_RANK = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")


def deepspeed_folder(path: Path) -> Path | None:
    """The folder with DeepSpeed's files: `path`, or the one that its `latest` names; None when there is none."""
    if any(path.glob("*mp_rank_*_model_states.pt")):
        return path
    pointer = path / "latest"
    if pointer.is_file():
        tag = pointer.read_text(errors="replace").strip()
        if is_plain_name(tag) and any((path / tag).glob("*mp_rank_*_model_states.pt")):
            return path / tag
    return None


def deepspeed_weights(folder: Path, key: str, *, trust: bool = False) -> Source:
    """The model's weights and buffers, fp32 where DeepSpeed kept fp32 masters.

    Args:
        folder: of `deepspeed_folder`.
        key: where it was asked for, for messages.
        trust: unpickle anything, which may run code of the files' author.

    Raises:
        ConfigError: a file is missing, damaged or hostile, or the model was cut in ways that are not read here.
    """
    reader = _Reader(folder, key, trust)
    models = reader.model_files()
    optimizers = reader.optimizer_files()
    first = reader.load(models[0])
    module = _section(first, "module", models[0], key)
    stage = reader.stage(optimizers[0]) if optimizers else 0
    if stage == 0:
        state = {name: in_memory(tensor) for name, tensor in module.items() if isinstance(tensor, Tensor)}
        return of_names(without_prefixes(state), str(folder))
    partitions = reader.partitions(optimizers, stage)
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in _groups(first, models[0], key)]
    if stage <= 2:
        # whole weights lie in the model file too, in the precision of training: all that there is of frozen ones
        state = {name: in_memory(tensor) for name, tensor in module.items() if isinstance(tensor, Tensor)}
        state.update(_from_groups(shapes, partitions, reader.paddings, folder, key))
    else:
        merged = {name: shape for group in shapes for name, shape in group.items()}
        state = _from_slices(merged, partitions, folder, key)
    state.update(_buffers(first, module))
    state.update(_frozen(first, models, stage, reader))
    for alias, name in (first.get("shared_params") or {}).items():
        if name in state:
            state[alias] = state[name]
    return of_names(without_prefixes(state), str(folder))


class _Reader:
    """Finds and opens the files of one checkpoint."""

    def __init__(self, folder: Path, key: str, trust: bool):
        self.folder, self.key, self.trust = folder, key, trust
        self.paddings: Sequence[Sequence[int]] | None = None

    def load(self, path: Path) -> dict[str, Any]:
        """One file as a dict."""
        held = read_torch_file(path, self.key, stand_ins=True, trust=self.trust, way_out=WAY_OUT)
        if not isinstance(held, dict):
            raise ConfigError(f"{self.key}: {path} holds a {type(held).__name__}, not what DeepSpeed writes.")
        return held

    def model_files(self) -> list[Path]:
        """One file per rank under ZeRO-3, else one."""
        found = {path: match for path in self.folder.iterdir() if (match := _MODEL_RANK.search(path.name))}
        cut = {int(match[2]) for match in found.values()}
        if cut != {0}:
            self._refuse(f"is cut over {len(cut)} model-parallel ranks")
        if any(self.folder.glob("layer_*-model_states.pt")):
            self._refuse("is of a pipeline")
        if any(self.folder.glob("*expert*_model_states.pt")):
            self._refuse("has experts")
        return sorted(found, key=lambda path: int(found[path][1] or 0))

    def _refuse(self, what: str) -> None:
        raise ConfigError(
            f"{self.key}: the model in {self.folder} {what}, which is not read; let the program that wrote it save a "
            f"plain state_dict, and give that."
        )

    def optimizer_files(self) -> list[Path]:
        """One per rank, in their order; empty under stage 0."""
        found = {path: match for path in self.folder.glob(OPTIMIZER_FILES) if (match := _RANK.search(path.name))}
        files = sorted(found, key=lambda path: int(found[path][1]))
        ranks = [int(found[path][1]) for path in files]
        if ranks != list(range(len(ranks))):
            gap = next(rank for rank, there in enumerate(ranks) if rank != there)
            raise ConfigError(
                f"{self.key}: {self.folder} lacks the optimizer file of rank {gap}; copy it from its host."
            )
        return files

    def partitions(self, files: Sequence[Path], stage: int) -> list[list[Tensor]]:
        """The flat fp32 tensors of each rank: by parameter group, or under stage 3 by sub-group."""
        name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        found = []
        for path in files:
            state = self._state(path)
            if state.get("zero_stage") != stage:
                raise ConfigError(f"{self.key}: {path} is of ZeRO stage {state.get('zero_stage')}, others of {stage}.")
            count = state.get("partition_count")
            ranks = max(count) if isinstance(count, list) and count else count
            if ranks != len(files):
                raise ConfigError(
                    f"{self.key}: {self.folder} has {len(files)} optimizer files, {ranks} ranks wrote it; copy all of "
                    f"them, and no others."
                )
            groups = state.get(name)
            if not isinstance(groups, list) or not all(isinstance(flat, Tensor) for flat in groups):
                raise ConfigError(f"{self.key}: {path} holds no {name}; DeepSpeed 0.10 to 0.19 is read.")
            found.append([flat.reshape(-1) for flat in groups])
            if path == files[0]:
                self.paddings = state.get("param_alignment_paddings")
        # at stages 1 and 2 the padding of the last rank is left out
        sizes = [[flat.numel() for flat in groups] for groups in found]
        if any(len(one) != len(sizes[0]) or (stage == 3 and one != sizes[0]) for one in sizes):
            raise ConfigError(f"{self.key}: the ranks of {self.folder} hold parts of different sizes; copy it anew.")
        return found

    def stage(self, path: Path) -> int:
        """ZeRO stage that an optimizer file is of."""
        stage = self._state(path).get("zero_stage")
        if stage not in (1, 2, 3):
            raise ConfigError(f"{self.key}: {path} is of ZeRO stage {stage}; 0 to 3 are read.")
        return int(stage)

    def _state(self, path: Path) -> dict[str, Any]:
        return _section(self.load(path), "optimizer_state_dict", path, self.key)


def _section(held: Mapping[str, Any], name: str, path: Path, key: str) -> dict[str, Any]:
    section = held.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"{key}: {path} holds no {name}; it is not what DeepSpeed's save_checkpoint writes.")
    return section


def _groups(model: Mapping[str, Any], path: Path, key: str) -> list[Mapping[str, torch.Size]]:
    groups = model.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ConfigError(f"{key}: {path} holds no param_shapes; DeepSpeed 0.10 to 0.19 is read.")
    return groups


def _from_groups(
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    partitions: Sequence[Sequence[Tensor]],
    paddings: Sequence[Sequence[int]] | None,
    folder: Path,
    key: str,
) -> dict[str, Entry]:
    """Stages 1 and 2: parameters one after the other over the ranks' partitions of their group."""
    state: dict[str, Entry] = {}
    if len(shapes) != len(partitions[0]):
        raise ConfigError(f"{key}: {folder}: {len(shapes)} parameter groups, optimizer state of {len(partitions[0])}.")
    for index, group in enumerate(shapes):
        flats, start = [rank[index] for rank in partitions], 0
        for place, (name, shape) in enumerate(group.items()):
            count = math.prod(shape)
            state[name] = in_parts(flats, shape, start)
            start += count + (paddings[index][place] if paddings is not None else 0)
        # behind the last parameter comes padding up to a multiple of 2 x ranks
        held, unit = sum(flat.numel() for flat in flats), 2 * len(flats)
        if not start <= held < start + 2 * unit:
            raise ConfigError(f"{key}: {folder}: group {index} holds {held} elements, its parameters take {start}.")
    return state


def _from_slices(
    shapes: Mapping[str, tuple[int, ...]], partitions: Sequence[Sequence[Tensor]], folder: Path, key: str
) -> dict[str, Entry]:
    """Stage 3: an equal slice of every parameter on every rank."""
    state: dict[str, Entry] = {}
    start, ranks = 0, len(partitions)
    for name, shape in shapes.items():
        count = math.prod(shape)
        share = math.ceil(count / ranks)
        slices = [range_of(flats, start, start + share) for flats in partitions]  # views of mapped files
        state[name] = in_parts(slices, shape)
        start += share
    held = sum(flat.numel() for flat in partitions[0])
    if start != held:
        raise ConfigError(f"{key}: {folder}: a rank holds {held} elements, its shares of the parameters take {start}.")
    return state


def _buffers(model: Mapping[str, Any], module: Mapping[str, Any]) -> dict[str, Entry]:
    """Buffers; those that were cast to half precision with the model go back to fp32."""
    found = {}
    for name in model.get("buffer_names") or ():
        tensor = module.get(name)
        if isinstance(tensor, Tensor):
            found[name] = in_memory(tensor.float() if tensor.is_floating_point() else tensor)
    return found


def _frozen(first: Mapping[str, Any], models: Sequence[Path], stage: int, reader: _Reader) -> dict[str, Entry]:
    """Parameters that were not trained, in their own precision; under stage 3 every rank's file has a slice."""
    shapes = first.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    held = [first, *(reader.load(path) for path in models[1:])] if stage == 3 else [first]
    fragments = [model.get("frozen_param_fragments") or {} for model in held]
    if absent := [name for name in shapes if any(name not in part for part in fragments)]:
        raise ConfigError(f"{reader.key}: {reader.folder} lacks the frozen parameters {some(absent)}; copy it anew.")
    state = {}
    for name, shape in shapes.items():
        parts = [part[name].reshape(-1) for part in fragments]
        if sum(part.numel() for part in parts) < math.prod(shape):
            raise ConfigError(f"{reader.key}: {reader.folder} holds a part of the frozen {name} alone; copy it anew.")
        state[name] = in_parts(parts, tuple(shape))
    return state
