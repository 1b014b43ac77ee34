"""The whole run: data, backend, loop, callbacks; and an evaluation without a loop."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largetrain.callbacks.base import Callback
from largetrain.callbacks.periodic import Checkpointing, Guard, Writing
from largetrain.callbacks.preemption import Preemption
from largetrain.checkpoint.manager import CheckpointManager
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.resume import SAME_WEIGHTS, check_fit, decide_start
from largetrain.checkpoint.retention import Retention
from largetrain.compose.backend import AnyBackend, make_backend
from largetrain.compose.checkpoints import (
    about_bytes,
    begin_with,
    check_within_reach,
    facts_of,
    owes_evaluation,
    starting_state,
    take_up,
)
from largetrain.compose.model import Say
from largetrain.compose.placement import placement_report
from largetrain.compose.watching import evaluation_of, every_steps, make_best, make_evaluation, make_recorder
from largetrain.config.load import World
from largetrain.config.resolved import Resolved
from largetrain.data.build import DataBundle, build_data
from largetrain.data.loader import NoStream, TrainStream
from largetrain.engine.environment import limit_timeouts, prepare
from largetrain.engine.signals import StopRequests, time_limit
from largetrain.errors import ConfigError
from largetrain.parallel.agreement import StepAgreement
from largetrain.parallel.axes import Axes, make_axes
from largetrain.parallel.pieces import Snapshot
from largetrain.train.state import random_state
from largetrain.train.trainer import Stream, Trainer


@dataclass(frozen=True)
class Run:
    """Everything that `train` needs: the loop, where it writes, and the configuration with nothing left open."""

    trainer: Trainer
    output: Path
    resolved: Resolved


def build(
    resolved: Resolved,
    world: World,
    *,
    resume: str | None,
    verbose: bool,
    say: Say,
    requests: StopRequests | None = None,
) -> Run:
    """Compose a run on this rank; collective: every rank calls it.

    Args:
        resume: None, "auto" or a path.
        say: prints a line on rank 0 and nothing elsewhere.
        requests: signals that stop the run with a checkpoint.

    Raises:
        ConfigError: data, output folder or checkpoint do not fit; the same on all ranks.
        AlreadyComplete: there is nothing left to do.
    """
    run = resolved.run
    device = _join(resolved, world, verbose)
    axes = make_axes(resolved.layout)
    place = resolved.layout.place(world.rank)
    start = decide_start(run.name, run.output, resume)  # before the data, which may take long to prepare
    data, resolved = _data(resolved, world, say)
    # what may refuse a checkpoint comes before the model, as far as it is known without it
    owed = owes_evaluation(start, resolved, data)
    state = starting_state(start, data.info.total_steps, run.guard.max_skipped_in_a_row, owed)
    _announce(resolved, data, start.messages, start.output, say)
    _announce_places(resolved, say)
    backend, resolved = _backend(resolved, data, device, axes, world, say)
    facts = facts_of(resolved, data, backend)
    for line in check_fit(start, facts):
        say(line)
    take_up(start, facts, backend, resolved, device, world, say)
    recorder, terminal = make_recorder(resolved, data, backend, device, world, start)
    tell = terminal.say if terminal is not None else say
    wanted = run.checkpoints
    manager = CheckpointManager(
        start.output / "checkpoints",
        Retention(wanted.keep_last, wanted.keep_every_steps, tuple(wanted.milestones)),
        run_id=start.run_id,
        asynchronous=wanted.asynchronous,
        tell=tell,
        resumed=start.checkpoint,
    )

    def snapshot() -> Snapshot:
        taken = backend.snapshot()
        taken.own["random"] = random_state(device)
        return taken

    def save(wait: bool = False) -> Path:
        recorder.flush()  # a run killed after this checkpoint must not lack rows before it
        told = {**facts, "run_id": start.run_id, "state": state.to_dict()}
        return manager.save(state.step, told, snapshot, wait=wait)

    every = every_steps(wanted, data)
    on_the_way = bool(every or wanted.milestones or wanted.every_minutes or wanted.best)
    if on_the_way or wanted.at_end:
        check_within_reach(resolved)
        manager.check_room(about_bytes(backend, resolved), reserve=on_the_way)
    best = make_best(resolved, data, backend, state, save, manager.mark_best, tell)
    agreement = StepAgreement(run.runtime.timeout_s)
    checkpointing = Checkpointing(
        save,
        every,
        wanted.at_end,
        milestones=wanted.milestones,
        every_minutes=wanted.every_minutes,
        agreement=agreement,
    )
    sources = [time_limit(run.max_minutes), checkpointing.flags, *([requests.flags] if requests is not None else [])]
    preemption = Preemption(agreement, sources, lambda: save(wait=True), requests)
    callbacks: list[Callback] = [
        Writing(manager),
        recorder,
        Guard(run.guard.max_skipped_in_a_row, partial(save, wait=True), tell),
        # before the evaluation, which may fail over a file that training never reads
        checkpointing,
        preemption,
        # the mark of the best comes before the row, by which a resumed run knows that this evaluation is done with
        *make_evaluation(resolved, data, backend, world, [*best, recorder], owed, preemption),
    ]
    if world.rank == 0:
        _write_config(start.output, resolved, world)
    stream: Stream = NoStream()
    if place.stage in (0, resolved.layout.stages - 1):
        stream = TrainStream(
            data.train,
            data.order,
            resolved.batch,
            place.data,
            consumed_samples=state.consumed_samples,
            workers=run.data.workers,
            updates=data.info.total_steps - state.step,
            pin_memory=device.type == "cuda",
        )
    trainer = Trainer(backend, stream, state, data.info.total_steps, resolved.batch.global_batch, callbacks)
    return Run(trainer, start.output, resolved)


def evaluate(resolved: Resolved, world: World, *, resume: str | None, verbose: bool, say: Say) -> dict[str, float]:
    """Evaluate a checkpoint, or pretrained weights, on the validation data; collective, writes nothing.

    Args:
        resume: "auto", "best", a path, or None for the model as it is built or `init_from` fills it.

    Raises:
        ConfigError: there is no validation data, nothing worth evaluating, or the checkpoint does not fit.
    """
    run = resolved.run
    if resume is None and run.init_from is None and not getattr(run.model, "pretrained", False):
        raise ConfigError(
            "--evaluate: the model has random weights; add --resume [auto|best|PATH], or write init_from or "
            "model.pretrained",
            on_all_ranks=True,
        )
    device = _join(resolved, world, verbose)
    axes = make_axes(resolved.layout)
    start = decide_start(run.name, run.output, resume, writes=False)
    data, resolved = _data(resolved, world, say)
    if data.validation is None:
        raise ConfigError(
            "--evaluate: the data have no validation split; name one (data.validation)", on_all_ranks=True
        )
    backend, resolved = _backend(resolved, data, device, axes, world, say)
    if start.checkpoint is not None:
        check_fit(start, facts_of(resolved, data, backend), SAME_WEIGHTS)
        say(f"evaluating {start.checkpoint}")
        backend.load_weights(open_checkpoint(start.checkpoint))
    elif run.init_from is not None:
        begin_with(run.init_from, run.init_missing, backend, say)
    return backend.evaluate(evaluation_of(resolved, data, world)())


def _join(resolved: Resolved, world: World, verbose: bool) -> torch.device:
    run = resolved.run
    assert isinstance(run.runtime.threads, int), "threads are resolved"
    torch.set_num_threads(run.runtime.threads)
    return prepare(
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=world.world_size,
        timeout_s=run.runtime.timeout_s,
        verbose=verbose,
    )


def _data(resolved: Resolved, world: World, say: Say) -> tuple[DataBundle, Resolved]:
    """The data, agreed upon by all ranks, and the run with its length."""
    data = build_data(
        resolved, is_writer=world.rank == 0, progress=lambda share, what: say(f"data: {what} ({share:.0%})")
    )
    _agree_on_data(data)
    return data, resolved.with_steps(data.info.total_steps)


def _backend(
    resolved: Resolved, data: DataBundle, device: torch.device, axes: Axes, world: World, say: Say
) -> tuple[AnyBackend, Resolved]:
    known = len(resolved.notes)
    backend, resolved = make_backend(resolved, data, device, axes, world.local_world_size, say)
    limit_timeouts(resolved.run.runtime.timeout_s)
    for note in (*resolved.notes[known:], *backend.notes):
        say(f"note: {note}")
    return backend, resolved


def _agree_on_data(data: DataBundle) -> None:
    """All ranks must see the same samples: each takes its share of one order.

    Raises:
        ConfigError: on all ranks, when they do not.
    """
    sizes = (len(data.train), len(data.validation) if data.validation is not None else 0, data.info.total_steps)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (data.info.fingerprint, *sizes))
    other = next((rank for rank, theirs in enumerate(seen) if theirs != seen[0]), None)
    if other is not None:
        words = "content {}, {} training samples, {} validation samples, {} updates"
        raise ConfigError(
            f"data: ranks see different data. Rank 0: {words.format(*seen[0])}; rank {other}: "
            f"{words.format(*seen[other])}. Give every host the same files; a data.target must give every rank the "
            f"whole dataset, which is then shared out",
            on_all_ranks=True,
        )


def _announce_places(resolved: Resolved, say: Say) -> None:
    if resolved.layout.ranks_per_replica == 1:
        return
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, platform.node())
    for line in placement_report(resolved.layout, hosts):
        say(line)


def _announce(resolved: Resolved, data: DataBundle, messages: Sequence[str], output: Path, say: Say) -> None:
    for line in (*resolved.notes, *data.info.report, *messages):
        say(line)
    if resolved.decoder is not None:
        spec = resolved.decoder
        say(
            f"model: {spec.style} decoder, {spec.parameter_count():,} parameters, "
            f"{spec.flops_per_token() / 1e6:,.1f} MFLOP per trained token"
        )
    say(f"output: {output}")


def _write_config(output: Path, resolved: Resolved, world: World) -> None:
    content = json.loads(resolved.to_json())
    content["world"] = {"world_size": world.world_size, "source": world.source}
    (output / "config.json").write_text(json.dumps(content, indent=2) + "\n")
