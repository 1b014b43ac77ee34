"""What a person needs to hear of exceptions that come from below: one line with the cause and the way out."""

import errno
import re

from largetrain.config.resolved import Resolved
from largetrain.config.world import World
from largetrain.engine.signals import FLAGS, Stop
from largetrain.errors import ConfigError, LargetrainError

LONE_VALUE = "Expected more than 1 value per channel when training"  # torch.nn.functional.batch_norm
# how gloo, and parallel/channel, word that the other end is gone
PEER_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|batch-norm group \(process \d+\) has ended")
# torch's allocators, on a CPU and on a GPU, with the size that was asked for
NO_MEMORY = re.compile(
    r"can't allocate memory: you tried to allocate (?P<cpu>\d+) bytes|"
    r"out of memory(\. Tried to allocate (?P<gpu>[\d.]+ \w+))?|Cannot allocate memory",
    re.IGNORECASE,
)


class PeerLostError(LargetrainError):
    """Another rank ended in the middle of a collective; what ended it is in that rank's own output.

    All but the culprit raise it and one line is enough: rank 0's, and rank 1's in case that rank 0 is the culprit.
    """

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.on_all_ranks = rank != 1


class StoppedError(LargetrainError):
    """Signals ended another rank before all had agreed to save: nothing was saved but earlier checkpoints."""

    def __init__(self, asked: Stop):
        number = next(number for number, flag in FLAGS.items() if flag & asked)
        super().__init__(f"stopped by {number.name} without saving; --resume auto goes on from the last checkpoint")
        self.exit_code = 128 + number


class NoMemoryError(LargetrainError):
    """The model, its optimizer or the activations do not fit; raised by the ranks that met it."""


def explained(error: Exception, resolved: Resolved, world: World, asked: Stop) -> LargetrainError | None:
    """The error that tells what to do, for one that is understood; None for any other.

    Args:
        asked: signals that this process was sent.
    """
    text = str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return LargetrainError(f"{error}. Free space, then go on from the last checkpoint with --resume")
    if isinstance(error, MemoryError) or (isinstance(error, OSError | RuntimeError) and NO_MEMORY.search(text)):
        return NoMemoryError(_memory_advice(text, resolved, world))
    if isinstance(error, ValueError) and LONE_VALUE in text:
        return ConfigError(
            f"train_micro_batch_size_per_gpu: {resolved.batch.micro_batch} leaves a batch norm one value per channel, "
            f"and it does not train on that ({error}). Give more images or larger ones, share statistics between "
            f"several ranks (sync_batch_norm: on), or keep those of the weights (model.freeze_batch_norm: true).",
            on_all_ranks=True,
        )
    if isinstance(error, RuntimeError) and world.world_size > 1 and PEER_LOST.search(text):
        if asked:  # the signal reached the other one too soon or twice
            return StoppedError(asked)
        return PeerLostError(
            f"this rank stops because another one has ended, whose message or traceback tells why ({error})",
            world.rank,
        )
    return None


def _memory_advice(text: str, resolved: Resolved, world: World) -> str:
    found = NO_MEMORY.search(text)
    size = ""
    if found is not None and found["cpu"]:
        size = f" (another {int(found['cpu']) / 2**20:,.0f} MiB were asked for)"
    elif found is not None and found["gpu"]:
        size = f" (another {found['gpu']} were asked for)"
    ways = "; ".join(_ways_out(resolved))
    return f"rank {world.rank} of {world.world_size} has no memory left{size}. What makes a rank need less: {ways}"


def _ways_out(resolved: Resolved) -> list[str]:
    """What of the configuration takes memory and could take less, each with its key; nearest to the plain run first."""
    run, zero = resolved.run, resolved.engine.get("zero_optimization", {})
    ways = []
    if resolved.batch.micro_batch > 1:
        ways.append(
            f"train_micro_batch_size_per_gpu below {resolved.batch.micro_batch}, with more gradient_accumulation_steps"
        )
    if resolved.decoder is not None and not resolved.decoder.activation_checkpointing:
        ways.append("model.activation_checkpointing: true")
    if not any(resolved.engine.get(key, {}).get("enabled") for key in ("bf16", "fp16")):
        ways.append("bf16.enabled: true")
    if resolved.backend == "deepspeed":
        stage = int(zero.get("stage", 0))
        if stage < 3:
            ways.append(f"zero_optimization.stage above {stage}, over several ranks")
        if not zero.get("offload_optimizer"):
            ways.append('zero_optimization.offload_optimizer: {"device": "cpu"}, where a GPU is what is full')
    if resolved.decoder is not None:
        more = (
            ("parallel.tensor_parallel", run.parallel.tensor_parallel),
            (
                "parallel.pipeline_stages",
                run.parallel.pipeline_stages,
            ),
        )
        ways += [f"{key} above {degree}, over more ranks" for key, degree in more]
    elif resolved.backend == "pipeline":
        ways.append(f"parallel.pipeline_stages above {run.parallel.pipeline_stages}, over more ranks")
    return ways or ["a smaller model"]
