"""Cells of `parallel.Cell` on the pipeline backend."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.compose.stages import make_stages
from largetrain.config.resolved import Resolved
from largetrain.engine.pipeline import PipelineBackend
from largetrain.parallel.axes import Axis
from largetrain.parallel.shards import shard_of
from largetrain.tasks.language_modeling import LanguageModeling


def pipeline_backend(resolved: Resolved, join: Callable[..., Any], task: Any = None) -> PipelineBackend:
    """The backend on this rank; collective."""
    axes, device = join(resolved)
    run = resolved.run.model_copy(update={"seed": 0})
    from dataclasses import replace

    resolved = replace(resolved, run=run)
    staged, cut = make_stages(resolved, None, None, axes, device, lambda line: None)
    task = task or LanguageModeling(resolved.run.model.loss_chunk_tokens)
    return PipelineBackend(staged, cut, task, resolved.engine, device, axes=axes)


def gathered_weights(backend: PipelineBackend) -> tuple[dict[str, Tensor], bool]:
    """fp32 weights of the whole model by name on every rank, and whether replicas and tied copies are equal."""
    from deepspeed.utils import safe_get_full_fp32_param

    equal, mine = True, {}
    for name, parameter in backend._state.named.items():
        own = parameter.detach() if backend._state.stage == 0 else safe_get_full_fp32_param(parameter)
        parts = _gathered(own.clone(), backend.axes.tensor)
        shard = shard_of(parameter)
        mine[name] = parts[0] if shard is None else torch.cat(parts, dim=shard.dim)
        equal = equal and (shard is not None or all(torch.equal(part, parts[0]) for part in parts))
    weights: dict[str, Tensor] = {}
    for theirs in _gathered(mine, backend.axes.stages):
        equal = equal and all(torch.equal(weights[name], theirs[name]) for name in weights.keys() & theirs.keys())
        weights = {**theirs, **weights}
    return weights, equal


def _gathered(value: Any, axis: Axis) -> list[Any]:
    found = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(found, value, group=axis.group)
    return found
