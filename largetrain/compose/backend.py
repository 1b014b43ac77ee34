"""From a resolved run, its model and its data to the backend that trains it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from largetrain.compose.model import Say, make_model, make_task, treat_batch_norms
from largetrain.compose.stages import make_stages
from largetrain.config.layout import Layout
from largetrain.config.resolved import Resolved
from largetrain.config.schedule_rules import updates_of
from largetrain.config.vision_schema import ClassificationRun, SegmentationRun
from largetrain.data.build import DataBundle
from largetrain.engine.ddp import DdpBackend
from largetrain.engine.deepspeed import DeepSpeedBackend
from largetrain.engine.ema import Ema
from largetrain.engine.pipeline import PipelineBackend
from largetrain.engine.pipeline_module import Stage
from largetrain.errors import ConfigError, on_every_rank
from largetrain.optim.groups import groups_report, parameter_groups
from largetrain.optim.schedules import schedule_factor
from largetrain.parallel.axes import Axes
from largetrain.train.state import seed_rank

AnyBackend = DdpBackend | DeepSpeedBackend | PipelineBackend


@on_every_rank()
def make_backend(
    resolved: Resolved, data: DataBundle, device: torch.device, axes: Axes, local_world_size: int, say: Say
) -> tuple[AnyBackend, Resolved]:
    """Model and engine; weights come from the run's seed on every rank, dropout from a stream of the rank's own.

    Returns:
        the backend, and the run with its backend settled.

    Raises:
        ConfigError: model, data and engine JSON do not fit together; the same on all ranks.
    """
    model, resolved = make_model(resolved, data.info, axes, say)
    run = resolved.run
    if model is not None:
        treat_batch_norms(model, resolved, _images_shape(run), axes, local_world_size, say)
    task = make_task(resolved, data.info)
    factor = None
    if run.schedule is not None:
        factor = schedule_factor(run.schedule, data.info.total_steps, data.info.steps_per_epoch)
        warmup = updates_of(run.schedule.warmup, data.info.steps_per_epoch)
        if warmup >= data.info.total_steps:
            say(f"note: the warm-up of {warmup} updates is not shorter than the run of {data.info.total_steps}")
    backend: AnyBackend
    if resolved.backend == "pipeline":
        _check_vision_keys(run, resolved.backend)
        staged, cut = make_stages(resolved, model, data, axes, device, say)
        grouping = partial(stage_groups, resolved, axes, say)
        backend = PipelineBackend(staged, cut, task, resolved.engine, device, grouping, factor, axes)
        seed_rank(run.seed, dropout_stream(resolved.layout, dist.get_rank()))
        return backend, resolved
    assert model is not None
    groups = parameter_groups(model, run.parameters)
    for line in groups_report(groups):
        say(line)
    if resolved.backend == "ddp":
        vision = run.model if isinstance(run, ClassificationRun | SegmentationRun) else None
        backend = DdpBackend(
            model,
            task,
            resolved.engine,
            device,
            groups,
            factor,
            ema=_ema(resolved, data),
            compiled=vision is not None and vision.compile,
            channels_last=vision is not None and vision.channels_last,
            allow_unused=vision is not None and vision.allow_unused_parameters,
        )
    else:
        _check_vision_keys(run, "deepspeed")
        backend = DeepSpeedBackend(model, task, resolved.engine, device, groups, factor, axes)
    seed_rank(run.seed, dropout_stream(resolved.layout, dist.get_rank()))
    return backend, resolved


def dropout_stream(layout: Layout, rank: int) -> int:
    """Which stream of random numbers a rank draws dropout from: tensor ranks share one, all others have their own."""
    return rank // layout.tensor


def stage_groups(resolved: Resolved, axes: Axes, say: Say, stage: Stage) -> list[dict[str, Any]]:
    """Parameter groups of one pipeline stage; a collective over the stages.

    Raises:
        ConfigError: a prefix fits nothing in any stage, or a stage has nothing to train.
    """
    named = stage.named_parameters()
    found = [list(named)] * axes.stages.size
    if axes.stages.size > 1:
        dist.all_gather_object(found, list(named), group=axes.stages.group)
    all_names = [name for names in found for name in names]
    part = torch.nn.ModuleList(stage.layers.values())
    groups = parameter_groups(part, resolved.run.parameters, {p: name for name, p in named.items()}, all_names)
    for line in groups_report(groups):
        say(f"stage {stage.place.stage}: {line}")
    return groups


def _check_vision_keys(run: Any, backend: str) -> None:
    """Refuse what the backend would ignore.

    Raises:
        ConfigError: one line for each key.
    """
    keys = ("compile", "channels_last", "allow_unused_parameters")
    given = [key for key in keys if getattr(run.model, key, False)]
    if given:
        text = f"belongs to backend ddp, and this model runs on {backend}; remove it, or write backend: ddp."
        raise ConfigError(f"model.{key}: {text}" for key in given)


def _images_shape(run: Any) -> list[int] | None:
    if isinstance(run, ClassificationRun | SegmentationRun):
        return [3, run.data.image_size, run.data.image_size]
    return None


def _ema(resolved: Resolved, data: DataBundle) -> Callable[[torch.nn.Module], Ema] | None:
    ema = resolved.run.ema
    if ema is None:
        return None
    warmup_steps = updates_of(ema.warmup_epochs, data.info.steps_per_epoch)
    return lambda model: Ema(model, ema.decay, ema.every_steps, warmup_steps)
