"""What is measured of a run: the recorder and its sinks, evaluations, the best checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from largetrain.callbacks.base import Callback
from largetrain.callbacks.periodic import Best, Evaluation
from largetrain.callbacks.preemption import Preemption
from largetrain.callbacks.recorder import Recorder, Sink
from largetrain.callbacks.sinks import MetricsFile, TensorBoard, Terminal
from largetrain.checkpoint.resume import Start
from largetrain.compose.backend import AnyBackend
from largetrain.compose.model import Say
from largetrain.config.load import World
from largetrain.config.resolved import Resolved
from largetrain.config.schedule_rules import updates_of
from largetrain.config.schema import CheckpointsConfig, EvaluationConfig
from largetrain.data.build import DataBundle
from largetrain.data.loader import evaluation_batches
from largetrain.engine.base import MicroBatch
from largetrain.engine.ddp import EMA_PREFIX
from largetrain.engine.peak import peak_flops
from largetrain.errors import ConfigError
from largetrain.train.state import TrainState

SMALLER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")


def make_recorder(
    resolved: Resolved,
    data: DataBundle,
    backend: AnyBackend,
    device: torch.device,
    world: World,
    start: Start,
) -> tuple[Recorder, Terminal | None]:
    """The recorder of this rank, and on rank 0 the terminal among its sinks."""
    logging = resolved.run.logging
    sinks: list[Sink] = []
    terminal = None
    if world.rank == 0:
        terminal = Terminal(data.info.total_steps)
        sinks = [MetricsFile(start.output / "metrics.jsonl"), terminal]
        if logging.tensorboard:
            sinks.append(TensorBoard(start.output / "tensorboard"))
    peak = logging.peak_tflops * 1e12 if logging.peak_tflops else peak_flops(device, backend.dtype)
    flops = resolved.decoder.flops_per_token() if resolved.decoder else None
    clip = float(resolved.engine["gradient_clipping"])
    samples = resolved.batch.global_batch
    return Recorder(sinks, logging.every_steps, clip, flops, peak, backend.task.unit, samples), terminal


def evaluation_of(resolved: Resolved, data: DataBundle, world: World) -> Callable[[], Iterator[MicroBatch]]:
    def batches() -> Iterator[MicroBatch]:
        return evaluation_batches(
            data.validation,
            resolved.batch.micro_batch,
            resolved.layout.data,
            resolved.layout.place(world.rank).data,
            max_samples=resolved.run.evaluation.max_samples,
            workers=resolved.run.data.workers,
        )

    return batches


def make_evaluation(
    resolved: Resolved,
    data: DataBundle,
    backend: AnyBackend,
    world: World,
    listeners: Sequence[Callback],
    owed: bool,
    preemption: Preemption,
) -> list[Callback]:
    if data.validation is None:
        return []
    batches = evaluation_of(resolved, data, world)
    wanted = resolved.run.evaluation
    every = every_steps(wanted, data)
    return [Evaluation(backend, batches, every, wanted.at_end, listeners, owed=owed, preemption=preemption)]


def every_steps(section: EvaluationConfig | CheckpointsConfig, data: DataBundle) -> int:
    """Updates between two; 0: only at the end."""
    if section.every_epochs is None:
        return section.every_steps
    return max(1, updates_of(section.every_epochs, data.info.steps_per_epoch))


def make_best(
    resolved: Resolved,
    data: DataBundle,
    backend: AnyBackend,
    state: TrainState,
    save: Callable[[], Path],
    mark: Callable[[Path, dict[str, Any]], None],
    tell: Say,
) -> list[Callback]:
    """The callback that keeps the best checkpoint, if one is wanted.

    Raises:
        ConfigError: the figure is none of the evaluation's.
    """
    figure = resolved.run.checkpoints.best
    if figure is None:
        return []
    if data.validation is None:
        raise ConfigError(
            f"checkpoints.best: {figure} is a figure of the evaluation, and there is no validation data",
            on_all_ranks=True,
        )
    prefixes = ["", EMA_PREFIX] if resolved.run.ema is not None else [""]
    known = [prefix + name for prefix in prefixes for name in backend.task.figures()]
    if figure not in known:
        raise ConfigError(
            f"checkpoints.best: the evaluation gives no {figure!r}; it gives {', '.join(known)}. Name one of them",
            on_all_ranks=True,
        )
    every = every_steps(resolved.run.evaluation, data)
    if not resolved.run.evaluation.at_end and not 0 < every <= data.info.total_steps:
        tell("note: checkpoints.best has no effect: this run is never evaluated (evaluation.every_epochs, at_end)")
    smaller = figure.removeprefix(EMA_PREFIX) in SMALLER_IS_BETTER
    return [Best(figure, smaller, state, save, lambda checkpoint: mark(checkpoint, state.best), tell)]
