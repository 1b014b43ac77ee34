"""The whole run: data, backend, loop, callbacks; and an evaluation without a loop."""

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largetrain import __version__
from largetrain.callbacks.base import Callback, Moment
from largetrain.callbacks.periodic import Best, Checkpointing, Evaluation, Guard, is_due
from largetrain.callbacks.preemption import Preemption
from largetrain.callbacks.recorder import Recorder, Sink
from largetrain.callbacks.sinks import MetricsFile, TensorBoard, Terminal
from largetrain.checkpoint.manager import CheckpointManager
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.resume import SAME_WEIGHTS, Start, check_fit, decide_start, same_layout
from largetrain.checkpoint.retention import Retention
from largetrain.checkpoint.weights import match_report, weights_from
from largetrain.compose.backend import AnyBackend, make_backend
from largetrain.compose.model import Say
from largetrain.config.ddp_keys import precision_of_ddp
from largetrain.config.load import World
from largetrain.config.resolved import Resolved
from largetrain.config.schedule_rules import updates_of
from largetrain.config.schema import CheckpointsConfig, EvaluationConfig
from largetrain.data.build import DataBundle, build_data
from largetrain.data.loader import TrainStream, evaluation_batches
from largetrain.engine.base import MicroBatch
from largetrain.engine.ddp import EMA_PREFIX
from largetrain.engine.deepspeed import dtype_of, offload_of, stage_of
from largetrain.engine.environment import limit_timeouts, prepare
from largetrain.engine.held import OPTIMIZER
from largetrain.engine.peak import peak_flops
from largetrain.engine.signals import StopRequests, time_limit
from largetrain.errors import EXIT_DONE, ConfigError, LargetrainError, on_every_rank
from largetrain.parallel.agreement import StepAgreement
from largetrain.parallel.pieces import Snapshot
from largetrain.train.state import TrainState, random_state, restore_random_state, seed_rank
from largetrain.train.trainer import Trainer

# keys of the model section that do not change what it computes
HOW_COMPUTED = {
    *("activation_checkpointing", "loss_chunk_tokens", "compile", "channels_last", "allow_unused_parameters"),
    *("pretrained", "pretrained_backbone"),
}
# keys of the parameters section that sort parameters into groups
GROUPING = ("lr_factors", "norm_weight_decay", "bias_weight_decay")
PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# tensors of the size of the weights that an optimizer keeps, where they are not Adam's two
MOMENTS = {"sgd": 1, "lion": 1, "adagrad": 1, "muon": 1, "adafactor": 0, "rprop": 2, "rmsprop": 1}
SMALLER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")


class AlreadyComplete(LargetrainError):
    """The run that was to be resumed has no update left; not a failure, so that a job script may resume blindly."""

    exit_code = EXIT_DONE
    on_all_ranks = True


@dataclass(frozen=True)
class Run:
    """Everything that `train` needs: the loop, where it writes, and the configuration with nothing left open."""

    trainer: Trainer
    output: Path
    resolved: Resolved


class _Writing(Callback):
    """What goes on in the background between checkpoints."""

    def __init__(self, manager: CheckpointManager):
        self.manager = manager

    def on_step(self, moment: Moment) -> None:
        self.manager.poll()

    def on_end(self, step: int) -> None:
        self.manager.finish()
        self.manager.close()

    def on_failure(self, step: int) -> None:
        self.manager.close()


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
    start = decide_start(run.name, run.output, resume)  # before the data, which may take long to prepare
    data, resolved = _data(resolved, world, say)
    # what may refuse a checkpoint comes before the model, as far as it is known without it
    owed = _owes_evaluation(start, resolved, data)
    state = _state(start, data.info.total_steps, run.guard.max_skipped_in_a_row, owed)
    _announce(resolved, data, start.messages, start.output, say)
    backend, resolved = _backend(resolved, data, device, world, say)
    facts = _facts(resolved, data)
    for line in check_fit(start, facts):
        say(line)
    _take_up(start, facts, backend, resolved, device, world, say)
    recorder, terminal = _recorder(resolved, data, backend, device, world, start)
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

    every = _every(wanted, data)
    if every or wanted.at_end or wanted.milestones or wanted.every_minutes or wanted.best:
        _check_within_reach(resolved)
        manager.check_room(_about_bytes(backend, resolved))
    best = _best(resolved, data, backend, state, save, manager.mark_best, tell)
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
        _Writing(manager),
        recorder,
        Guard(run.guard.max_skipped_in_a_row, partial(save, wait=True), tell),
        # before the evaluation, which may fail over a file that training never reads
        checkpointing,
        preemption,
        # the mark of the best comes before the row, by which a resumed run knows that this evaluation is done with
        *_evaluation(resolved, data, backend, world, [*best, recorder], owed, preemption),
    ]
    if world.rank == 0:
        _write_config(start.output, resolved, world)
    stream = TrainStream(
        data.train,
        data.order,
        resolved.batch,
        world.rank,
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
    start = decide_start(run.name, run.output, resume, writes=False)
    data, resolved = _data(resolved, world, say)
    if data.validation is None:
        raise ConfigError(
            "--evaluate: the data have no validation split; name one (data.validation)", on_all_ranks=True
        )
    backend, resolved = _backend(resolved, data, device, world, say)
    if start.checkpoint is not None:
        check_fit(start, _facts(resolved, data), SAME_WEIGHTS)
        say(f"evaluating {start.checkpoint}")
        backend.load_weights(open_checkpoint(start.checkpoint))
    elif run.init_from is not None:
        _begin_with(run.init_from, run.init_missing, backend, say)
    return backend.evaluate(_evaluation_batches(resolved, data, world)())


def _take_up(
    start: Start,
    facts: dict[str, Any],
    backend: AnyBackend,
    resolved: Resolved,
    device: torch.device,
    world: World,
    say: Say,
) -> None:
    """Go on from the checkpoint, or begin with given weights."""
    run = resolved.run
    if start.checkpoint is None:
        if run.init_from is not None:
            _begin_with(run.init_from, run.init_missing, backend, say)
        return
    pieces = open_checkpoint(start.checkpoint)
    backend.restore(pieces, same_layout(start, facts))
    assert start.saved is not None
    if start.saved["world_size"] == world.world_size:
        restore_random_state(pieces.own(world.rank)["random"], device)
    else:
        say("resume: every rank begins a new stream of random numbers (dropout), there are others now")
        seed_rank(run.seed, world.rank, start.saved["state"]["step"])


def _check_within_reach(resolved: Resolved) -> None:
    """Refuse state that a checkpoint would miss.

    Raises:
        ConfigError: the optimizer's state lies on an NVMe disk, where DeepSpeed alone finds it.
    """
    if resolved.backend == "deepspeed" and offload_of(resolved.engine).get("optimizer") == "nvme":
        raise ConfigError(
            "zero_optimization.offload_optimizer.device: nvme keeps the optimizer's state out of reach of checkpoints; "
            "write cpu, or turn checkpoints off (checkpoints.at_end: false, no every_steps).",
            on_all_ranks=True,
        )


def _about_bytes(backend: AnyBackend, resolved: Resolved) -> int:
    """What this rank will write of each checkpoint; a fresh optimizer has no state yet."""
    pieces = backend.snapshot().pieces
    now = sum(piece.values.nbytes for piece in pieces)
    if any(piece.key.startswith(OPTIMIZER) for piece in pieces):
        return now
    return now * (1 + MOMENTS.get(str(resolved.engine["optimizer"]["type"]).lower(), 2))


@on_every_rank()
def _begin_with(path: str, allowed_missing: Sequence[str], backend: AnyBackend, say: Say) -> None:
    """Fill the model from `init_from`.

    Raises:
        ConfigError: there are no weights, or they are another model's.
    """
    source = weights_from(path)
    report = match_report(backend.shapes(), source, tuple(allowed_missing))
    for line in report.lines:
        say(f"init_from: {line}")
    backend.load_weights(source, report.names)


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
    resolved: Resolved, data: DataBundle, device: torch.device, world: World, say: Say
) -> tuple[AnyBackend, Resolved]:
    known = len(resolved.notes)
    backend, resolved = make_backend(resolved, data, device, world.local_world_size, say)
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


def _facts(resolved: Resolved, data: DataBundle) -> dict[str, Any]:
    """What a checkpoint says of its run beside the counters; compared on resume (`checkpoint/resume`)."""
    engine, batch = resolved.engine, resolved.batch
    on_ddp = resolved.backend == "ddp"
    dtype = PRECISIONS[precision_of_ddp(engine)] if on_ddp else str(dtype_of(engine)).removeprefix("torch.")
    return {
        "backend": resolved.backend,
        "world_size": dist.get_world_size(),
        "zero_stage": 0 if on_ddp else stage_of(engine),
        "offload": {} if on_ddp else offload_of(engine),
        "dtype": dtype,
        "micro_batch": batch.micro_batch,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "global_batch": batch.global_batch,
        "optimizer_type": engine["optimizer"]["type"],
        "optimizer": engine["optimizer"].get("params", {}),
        "scheduler": engine.get("scheduler", {}),
        "seed": resolved.run.seed,
        **{key: resolved.run.model_dump(mode="json")[key] for key in ("schedule", "ema")},
        "parameters": (parameters := resolved.run.parameters.model_dump(mode="json")),
        # the order in which ZeRO lays parameters out
        "groups": {key: parameters[key] for key in GROUPING} if resolved.backend == "deepspeed" else None,
        # what only says how it is computed may change
        "model": resolved.run.model.model_dump(mode="json", exclude=HOW_COMPUTED),
        "classes": list(data.info.classes),
        "data": data.info.fingerprint or resolved.run.data.model_dump(mode="json", exclude={"workers", "cache"}),
        "versions": {"largetrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _owes_evaluation(start: Start, resolved: Resolved, data: DataBundle) -> bool:
    """Whether the run was stopped before the evaluation that follows the checkpoint's update was finished."""
    if start.saved is None or start.evaluated or data.validation is None:
        return False
    step, wanted = start.saved["state"]["step"], resolved.run.evaluation
    return is_due(step, _every(wanted, data), wanted.at_end and step == data.info.total_steps)


def _state(start: Start, total_steps: int, max_skipped: int, owes_evaluation: bool) -> TrainState:
    """Counters to begin with.

    Raises:
        AlreadyComplete: all updates are done.
        ConfigError: more are done than asked for.
    """
    if start.saved is None:
        return TrainState()
    state = TrainState(**start.saved["state"])
    if state.step == total_steps and not owes_evaluation:
        raise AlreadyComplete(
            f"the run in {start.output} is complete: all {total_steps} updates are done. Go on with a larger --steps"
        )
    if state.step > total_steps:
        raise ConfigError(
            f"--resume {start.checkpoint}: {state.step} updates are done, more than the {total_steps} asked for. "
            f"Give a larger --steps, or an earlier checkpoint",
            on_all_ranks=True,
        )
    if state.skipped_in_a_row >= max_skipped:
        state.skipped_in_a_row = 0  # the guard had stopped it; whoever goes on gets as many tries again
    return state


def _recorder(
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


def _evaluation_batches(resolved: Resolved, data: DataBundle, world: World) -> Callable[[], Iterator[MicroBatch]]:
    def batches() -> Iterator[MicroBatch]:
        return evaluation_batches(
            data.validation,
            resolved.batch.micro_batch,
            world.world_size,
            world.rank,
            max_samples=resolved.run.evaluation.max_samples,
            workers=resolved.run.data.workers,
        )

    return batches


def _evaluation(
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
    batches = _evaluation_batches(resolved, data, world)
    wanted = resolved.run.evaluation
    every = _every(wanted, data)
    return [Evaluation(backend, batches, every, wanted.at_end, listeners, owed=owed, preemption=preemption)]


def _every(section: EvaluationConfig | CheckpointsConfig, data: DataBundle) -> int:
    """Updates between two; 0: only at the end."""
    if section.every_epochs is None:
        return section.every_steps
    return max(1, updates_of(section.every_epochs, data.info.steps_per_epoch))


def _best(
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
    every = _every(resolved.run.evaluation, data)
    if not resolved.run.evaluation.at_end and not 0 < every <= data.info.total_steps:
        tell("note: checkpoints.best has no effect: this run is never evaluated (evaluation.every_epochs, at_end)")
    smaller = figure.removeprefix(EMA_PREFIX) in SMALLER_IS_BETTER
    return [Best(figure, smaller, state, save, lambda checkpoint: mark(checkpoint, state.best), tell)]


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
