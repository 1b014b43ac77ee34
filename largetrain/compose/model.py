"""From a resolved run to its task and model: what the model is decides the backend, and how batch norms are treated."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from largetrain.config.resolved import Resolved
from largetrain.config.schema import LanguageRun
from largetrain.config.vision_schema import ClassificationRun, SegmentationRun
from largetrain.data.build import DataInfo
from largetrain.engine import deepspeed as deepspeed_backend
from largetrain.errors import ConfigError
from largetrain.models.batch_norm import LayerCounts, batch_norm_report, batch_norm_sites, count_layers, wants_sync
from largetrain.models.build import build_model
from largetrain.parallel.axes import Axes
from largetrain.parallel.groups import batch_norm_group
from largetrain.tasks.base import Task
from largetrain.tasks.classification import Classification
from largetrain.tasks.language_modeling import LanguageModeling
from largetrain.tasks.segmentation import Segmentation

CONVOLUTIONAL = 0.5
"""Share of the parameters in convolutions from which a model counts as a conv net."""
Say = Callable[[str], None]


def num_classes(resolved: Resolved, info: DataInfo) -> int:
    """Outputs of an image model: as written, or the classes of the data.

    Raises:
        ConfigError: neither is known, or fewer outputs than classes.
    """
    run = resolved.run
    assert isinstance(run, ClassificationRun | SegmentationRun)
    written = run.model.num_classes
    if written == "auto" and not info.classes:
        raise ConfigError(
            'model.num_classes: "auto" needs data that know their classes, and data.target has no attribute '
            "`classes`; write the number.",
            on_all_ranks=True,
        )
    if isinstance(written, int) and written < len(info.classes):
        raise ConfigError(
            f'model.num_classes: {written} is less than the {len(info.classes)} classes of the data; write "auto".'
        )
    return written if isinstance(written, int) else len(info.classes)


def make_task(resolved: Resolved, info: DataInfo) -> Task:
    """The task of the run."""
    run = resolved.run
    if isinstance(run, ClassificationRun):
        return Classification(num_classes(resolved, info), run.loss.label_smoothing)
    if isinstance(run, SegmentationRun):
        outputs = num_classes(resolved, info)
        names = [*info.classes, *(f"class_{index}" for index in range(len(info.classes), outputs))]
        return Segmentation(names, run.loss.aux_weight, run.loss.class_weights)
    assert isinstance(run, LanguageRun) and isinstance(run.model.loss_chunk_tokens, int), "auto is resolved"
    return LanguageModeling(run.model.loss_chunk_tokens, info.bytes_per_token)


def make_model(resolved: Resolved, info: DataInfo, axes: Axes, say: Say) -> tuple[nn.Module | None, Resolved]:
    """Build the model and settle what runs it; weights come from the run's seed on every rank.

    Returns:
        the model, born sharded where ZeRO-3 runs it, or None for the decoder in stages, of which no rank builds all;
        and the run with its backend.

    Raises:
        ConfigError: model and backend contradict each other, or the engine JSON does not fit the backend.
    """

    def construct() -> nn.Module:
        torch.manual_seed(resolved.run.seed)
        if isinstance(resolved.run, LanguageRun):
            return build_model(resolved, axes)
        from largetrain.models.vision import build_vision_model  # here: a run on text does not import torchvision

        assert isinstance(resolved.run, ClassificationRun | SegmentationRun)
        return build_vision_model(resolved.run, num_classes(resolved, info), say)

    if resolved.decoder is not None and resolved.backend == "pipeline":
        return None, resolved
    if resolved.decoder is not None and resolved.backend == "deepspeed":
        with deepspeed_backend.sharded_construction(resolved.engine, axes):
            return construct(), resolved
    model = construct()
    counts = count_layers(model)
    backend, reason = choose_backend(resolved, counts)
    resolved = resolved.with_backend(backend)
    say(f"backend: {backend} ({reason}: {counts.reason})")
    sharded = backend == "deepspeed" and deepspeed_backend.stage_of(resolved.engine) == 3
    # torchvision's models set weights of their parts from outside, which are empty by then where they are born sharded
    if sharded and isinstance(resolved.run, LanguageRun):
        del model
        with deepspeed_backend.sharded_construction(resolved.engine, axes):
            model = construct()
    return model, resolved


def choose_backend(resolved: Resolved, counts: LayerCounts) -> tuple[str, str]:
    """The backend and why.

    Raises:
        ConfigError: what was asked for would train the model wrongly.
    """
    run, asked = resolved.run, resolved.run.backend
    if resolved.backend == "pipeline":
        backend, reason = "pipeline", "parallel.pipeline_stages" if asked == "auto" else "asked for"
    elif asked == "auto":
        conv_net = counts.live_batch_norms > 0 or counts.convolution_share >= CONVOLUTIONAL
        backend, reason = ("ddp" if conv_net else "deepspeed"), "auto"
    else:
        backend, reason = asked, "asked for"
    if backend == "deepspeed" and counts.live_batch_norms > 0:
        half = deepspeed_backend.dtype_of(resolved.engine) != torch.float32
        synced = run.sync_batch_norm in ("on", True) or dist.get_world_size() == 1
        if half or not synced:
            raise ConfigError(
                f"backend: deepspeed does not keep the running statistics of {counts.live_batch_norms} batch-norm "
                f"layers equal over ranks nor in fp32. Write backend: ddp (or auto), or freeze them "
                f"(model.freeze_batch_norm: true), or write sync_batch_norm: on with an engine JSON in fp32."
            )
    if backend == "pipeline" and counts.live_batch_norms > 0:
        half = deepspeed_backend.dtype_of(resolved.engine) != torch.float32
        if half or (run.sync_batch_norm in ("off", False) and resolved.layout.data > 1):
            raise ConfigError(
                f"backend: pipeline keeps the running statistics of {counts.live_batch_norms} batch-norm layers in "
                f"fp32 and shared by the data-parallel ranks. Write an engine JSON in fp32 and sync_batch_norm: auto, "
                f"or freeze them (model.freeze_batch_norm: true)."
            )
    if backend == "deepspeed" and run.ema is not None:
        raise ConfigError(
            f"ema: is kept by backend ddp alone, and this model runs on deepspeed ({reason}: {counts.reason}); "
            f"write backend: ddp, or remove it."
        )
    if run.sync_batch_norm in ("on", True) and counts.live_batch_norms == 0:
        raise ConfigError("sync_batch_norm: on, but the model has no batch norm that is trained; remove it.")
    return backend, reason


def treat_batch_norms(
    model: nn.Module, resolved: Resolved, images_shape: Any, axes: Axes, local_world_size: int, say: Say
) -> None:
    """Synchronise batch norms where that is asked for or wanted, in place, and report on them.

    Args:
        axes: this rank's groups; the stages of a pipeline have statistics over their data-parallel ranks.
        images_shape: of one sample, [C, H, W]; None when it is not known.
    """
    run, batch, world_size = resolved.run, resolved.batch, resolved.layout.data
    if count_layers(model).live_batch_norms == 0:
        return
    sites = batch_norm_sites(model, [2, *images_shape]) if images_shape is not None else None
    dense = isinstance(run, SegmentationRun)
    if run.sync_batch_norm == "auto" and resolved.backend == "pipeline":
        sync, why = world_size > 1, "auto: stages share their statistics"
    elif run.sync_batch_norm == "auto":
        sync, why = wants_sync(sites, batch.micro_batch, world_size, dense)
        why = f"auto: {why}"
    else:
        sync, why = run.sync_batch_norm in ("on", True), "asked for"
    sharing = 1
    if sync and world_size > 1:
        if resolved.layout.stages > 1:
            group, sharing = axes.data.group, axes.data.size
        else:
            group = batch_norm_group(run.sync_batch_norm_ranks, local_world_size)
            sharing = dist.get_world_size(group)
        # here: it brings torch's compiler along, which a run on text is spared
        from largetrain.parallel.sync_batch_norm import convert_sync_batch_norm

        convert_sync_batch_norm(model, group)
    say(f"sync_batch_norm: {'on' if sync else 'off'} ({why})")
    for line in batch_norm_report(
        sites, sharing, batch.micro_batch, batch.gradient_accumulation_steps, sync and world_size > 1, world_size
    ):
        say(line)
