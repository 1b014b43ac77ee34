"""The composition root: from a resolved run to the objects that run it. The only file that knows all parts."""

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largetrain import __version__
from largetrain.callbacks.base import Callback
from largetrain.callbacks.periodic import Checkpointing, Evaluation, Guard
from largetrain.callbacks.recorder import Recorder, Sink
from largetrain.callbacks.sinks import MetricsFile, TensorBoard, Terminal
from largetrain.checkpoint.manager import CheckpointManager, read_facts, read_rng
from largetrain.checkpoint.resume import Start, decide_start
from largetrain.config.load import World
from largetrain.config.resolved import Resolved
from largetrain.data.build import DataBundle, build_data
from largetrain.data.loader import TrainStream, evaluation_batches
from largetrain.engine import deepspeed as deepspeed_backend
from largetrain.engine.environment import limit_timeouts, prepare
from largetrain.engine.peak import peak_flops
from largetrain.errors import ConfigError
from largetrain.models.build import build_model
from largetrain.tasks.language_modeling import LanguageModeling
from largetrain.train.state import TrainState, random_state, restore_random_state, seed_rank
from largetrain.train.trainer import Trainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """Everything that `train` needs: the loop, where it writes, and the configuration with nothing left open."""

    trainer: Trainer
    output: Path
    resolved: Resolved


def build(resolved: Resolved, world: World, *, resume: str | None, verbose: bool, say: Say) -> Run:
    """Compose a run on this rank; collective: every rank calls it.

    Args:
        resume: None, "auto" or a path.
        say: prints a line on rank 0 and nothing elsewhere.

    Raises:
        ConfigError: data, output folder or checkpoint do not fit; the same on all ranks.
    """
    run = resolved.run
    assert isinstance(run.runtime.threads, int), "threads are resolved"
    torch.set_num_threads(run.runtime.threads)
    data = build_data(
        resolved, is_writer=world.rank == 0, progress=lambda share, what: say(f"data: {what} ({share:.0%})")
    )
    resolved = resolved.with_steps(data.info.total_steps)
    device = prepare(
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=world.world_size,
        timeout_s=run.runtime.timeout_s,
        verbose=verbose,
    )
    facts = _facts(resolved, data)
    start = decide_start(run.name, run.output, resume, facts)
    _announce(resolved, data, start, say)
    backend = _backend(resolved, data, device)
    limit_timeouts(run.runtime.timeout_s)
    for note in backend.notes:
        say(f"note: {note}")
    state = _restore(start, backend, world.rank, device)
    total_steps = data.info.total_steps
    if state.step >= total_steps:
        raise ConfigError(
            f"--resume {start.checkpoint}: the run is complete, {state.step} of {total_steps} updates are done. "
            f"Ask for more with --steps"
        )
    stream = TrainStream(
        data.train,
        data.order,
        resolved.batch,
        world.rank,
        consumed_samples=state.consumed_samples,
        workers=run.data.workers,
        updates=total_steps - state.step,
        pin_memory=device.type == "cuda",
    )
    manager = CheckpointManager(start.output / "checkpoints", run.checkpoints.keep_last, backend.save)

    def save() -> Path:
        return manager.save(state.step, {**facts, "state": state.to_dict()}, random_state(device))

    callbacks = _callbacks(resolved, data, backend, device, world, start, save, say)
    if world.rank == 0:
        _write_config(start.output, resolved, world)
    trainer = Trainer(backend, stream, state, total_steps, resolved.batch.global_batch, callbacks)
    return Run(trainer, start.output, resolved)


def _backend(resolved: Resolved, data: DataBundle, device: torch.device) -> deepspeed_backend.DeepSpeedBackend:
    """Model and engine; weights come from the run's seed on every rank, dropout from a stream of the rank's own."""
    torch.manual_seed(resolved.run.seed)
    with deepspeed_backend.sharded_construction(resolved.engine):
        model = build_model(resolved)
    task = LanguageModeling(resolved.run.model.loss_chunk_tokens, data.info.bytes_per_token)
    backend = deepspeed_backend.DeepSpeedBackend(model, task, resolved.engine, device)
    seed_rank(resolved.run.seed, dist.get_rank())
    return backend


def _facts(resolved: Resolved, data: DataBundle) -> dict[str, Any]:
    """What a checkpoint says of its run beside the counters; compared on resume."""
    return {
        "format": 1,
        "world_size": dist.get_world_size(),
        "zero_stage": deepspeed_backend.stage_of(resolved.engine),
        "dtype": str(deepspeed_backend.dtype_of(resolved.engine)).removeprefix("torch."),
        "batch": [
            resolved.batch.micro_batch,
            resolved.batch.gradient_accumulation_steps,
            resolved.batch.global_batch,
        ],
        "seed": resolved.run.seed,
        "model": resolved.run.model.model_dump(mode="json"),
        "data": data.info.fingerprint or resolved.run.data.model_dump(mode="json"),
        "versions": {"largetrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _restore(start: Start, backend: deepspeed_backend.DeepSpeedBackend, rank: int, device: torch.device) -> TrainState:
    if start.checkpoint is None:
        return TrainState()
    backend.load(start.checkpoint)
    restore_random_state(read_rng(start.checkpoint, rank), device)
    return TrainState(**read_facts(start.checkpoint)["state"])


def _callbacks(
    resolved: Resolved,
    data: DataBundle,
    backend: deepspeed_backend.DeepSpeedBackend,
    device: torch.device,
    world: World,
    start: Start,
    save: Callable[[], Path],
    say: Say,
) -> list[Callback]:
    run = resolved.run
    sinks: list[Sink] = []
    if world.rank == 0:
        sinks = [MetricsFile(start.output / "metrics.jsonl"), Terminal(data.info.total_steps)]
        if run.logging.tensorboard:
            sinks.append(TensorBoard(start.output / "tensorboard"))
    peak = run.logging.peak_tflops * 1e12 if run.logging.peak_tflops else peak_flops(device, backend.dtype)
    flops = resolved.decoder.flops_per_token() if resolved.decoder else None
    recorder = Recorder(sinks, run.logging.every_steps, float(resolved.engine["gradient_clipping"]), flops, peak)
    callbacks: list[Callback] = [recorder, Guard(run.guard.max_skipped_in_a_row, save, say)]
    if data.validation is not None:
        evaluation = run.evaluation

        def batches() -> Any:
            return evaluation_batches(
                data.validation,
                resolved.batch.micro_batch,
                world.world_size,
                world.rank,
                max_samples=evaluation.max_samples,
                workers=run.data.workers,
            )

        callbacks.append(Evaluation(backend, batches, evaluation.every_steps, evaluation.at_end, [recorder]))
    callbacks.append(Checkpointing(save, run.checkpoints.every_steps, run.checkpoints.at_end))
    return callbacks


def _announce(resolved: Resolved, data: DataBundle, start: Start, say: Say) -> None:
    for line in (*resolved.notes, *data.info.report, *start.messages):
        say(line)
    if resolved.decoder is not None:
        spec = resolved.decoder
        say(
            f"model: {spec.style} decoder, {spec.parameter_count():,} parameters, "
            f"{spec.flops_per_token() / 1e6:,.1f} MFLOP per trained token"
        )
    say(f"output: {start.output}")


def _write_config(output: Path, resolved: Resolved, world: World) -> None:
    content = json.loads(resolved.to_json())
    content["world"] = {"world_size": world.world_size, "source": world.source}
    (output / "config.json").write_text(json.dumps(content, indent=2) + "\n")
