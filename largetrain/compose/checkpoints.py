"""What a checkpoint says of its run, and what a run takes up from it."""

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from largetrain import __version__
from largetrain.callbacks.periodic import is_due
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.resume import Start, same_layout
from largetrain.checkpoint.weights import match_report, weights_together
from largetrain.compose.backend import AnyBackend, dropout_stream
from largetrain.compose.model import Say
from largetrain.compose.watching import every_steps
from largetrain.config.ddp_keys import precision_of_ddp
from largetrain.config.load import World
from largetrain.config.resolved import Resolved
from largetrain.config.schema import ParallelConfig
from largetrain.data.build import DataBundle
from largetrain.engine.deepspeed import dtype_of, offload_of, stage_of
from largetrain.engine.held import OPTIMIZER
from largetrain.engine.pipeline import PipelineBackend
from largetrain.errors import EXIT_DONE, ConfigError, LargetrainError, on_every_rank
from largetrain.train.state import TrainState, restore_random_state, seed_rank

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


# of the parallel section: what decides where tensors lie, and who draws which random numbers
DEGREES = ("tensor_parallel", "pipeline_stages", "sequence_parallel", "ulysses")


class AlreadyComplete(LargetrainError):
    """The run that was to be resumed has no update left; not a failure, so that a job script may resume blindly."""

    exit_code = EXIT_DONE
    on_all_ranks = True


def take_up(
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
            begin_with(run.init_from, run.init_missing, backend, say)
        return
    pieces = open_checkpoint(start.checkpoint)
    backend.restore(pieces, same_layout(start, facts))
    assert start.saved is not None
    alone = ParallelConfig().model_dump()  # what checkpoints from before there was such a section say nothing of
    same = all(start.saved.get(key, alone[key]) == facts[key] for key in DEGREES)
    if same and start.saved["world_size"] == world.world_size:
        restore_random_state(pieces.own(world.rank)["random"], device)
    else:
        say("resume: every rank begins a new stream of random numbers (dropout), there are others now")
        seed_rank(run.seed, dropout_stream(resolved.layout, world.rank), start.saved["state"]["step"])


def check_within_reach(resolved: Resolved) -> None:
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


def about_bytes(backend: AnyBackend, resolved: Resolved) -> int:
    """What this rank will write of each checkpoint; a fresh optimizer has no state yet."""
    pieces = backend.snapshot().pieces
    now = sum(piece.values.nbytes for piece in pieces)
    if any(piece.key.startswith(OPTIMIZER) for piece in pieces):
        return now
    return now * (1 + MOMENTS.get(str(resolved.engine["optimizer"]["type"]).lower(), 2))


@on_every_rank()
def begin_with(path: str, allowed_missing: Sequence[str], backend: AnyBackend, say: Say) -> None:
    """Fill the model from `init_from`.

    Raises:
        ConfigError: there are no weights, or they are another model's.
    """
    source = weights_together(path)
    report = match_report(backend.shapes(), source, tuple(allowed_missing))
    for line in report.lines:
        say(f"init_from: {line}")
    backend.load_weights(source, report.names)


def facts_of(resolved: Resolved, data: DataBundle, backend: AnyBackend) -> dict[str, Any]:
    """What a checkpoint says of its run beside the counters; compared on resume (`checkpoint/resume`)."""
    engine, batch = resolved.engine, resolved.batch
    on_ddp = resolved.backend == "ddp"
    dtype = PRECISIONS[precision_of_ddp(engine)] if on_ddp else str(dtype_of(engine)).removeprefix("torch.")
    return {
        "backend": resolved.backend,
        "world_size": dist.get_world_size(),
        **{key: resolved.run.parallel.model_dump()[key] for key in DEGREES},
        # where layers lie; with partition: time another start may measure another cut
        "stage_bounds": backend.bounds if isinstance(backend, PipelineBackend) else [],
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
        "groups": {key: parameters[key] for key in GROUPING} if resolved.backend != "ddp" else None,
        # what only says how it is computed may change
        "model": resolved.run.model.model_dump(mode="json", exclude=HOW_COMPUTED),
        "classes": list(data.info.classes),
        "data": data.info.fingerprint or resolved.run.data.model_dump(mode="json", exclude={"workers", "cache"}),
        "versions": {"largetrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def owes_evaluation(start: Start, resolved: Resolved, data: DataBundle) -> bool:
    """Whether the run was stopped before the evaluation that follows the checkpoint's update was finished."""
    if start.saved is None or start.evaluated or data.validation is None:
        return False
    step, wanted = start.saved["state"]["step"], resolved.run.evaluation
    return is_due(step, every_steps(wanted, data), wanted.at_end and step == data.info.total_steps)


def starting_state(start: Start, total_steps: int, max_skipped: int, owes_evaluation: bool) -> TrainState:
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
