"""`largetrain train`: resolve the configuration, build the run, train."""

import errno
import gc
import re
from argparse import Namespace
from collections.abc import Callable, Sequence

from largetrain.cli.arguments import load_from_args, train_parser
from largetrain.config.resolved import Resolved
from largetrain.config.world import World, launch_world
from largetrain.engine.signals import FLAGS, Stop, StopRequests, take_signals
from largetrain.errors import EXIT_DONE, ConfigError, LargetrainError, PreemptedError

LONE_VALUE = "Expected more than 1 value per channel when training"  # torch.nn.functional.batch_norm
# how gloo, and parallel/channel, word that the other end is gone
PEER_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|batch-norm group \(process \d+\) has ended")


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


def run(argv: Sequence[str]) -> int:
    """Train; torch and deepspeed are imported only once the configuration is known to be right.

    Raises:
        ConfigError: the user's files, flags, data or checkpoint are wrong; as a rule nothing heavy has begun.
        DivergedError: see `callbacks.periodic.Guard`.
        PeerLostError: another rank ended while this one waited for it.
        PreemptedError: the run was asked to stop, and has saved.

    SIGTERM, SIGUSR1 and SIGINT: see `engine.signals.StopRequests`; an evaluation alone never has anything to save.
    """
    options = train_parser("largetrain train").parse_args(argv)
    world = launch_world()
    resolved = load_from_args(options, world)
    if options.dry_run:
        if world.rank == 0:
            from largetrain.cli.config import readable

            print(readable(resolved), end="")
        return EXIT_DONE
    requests = take_signals(speaks=world.rank == 0)
    job = _evaluate if options.evaluate else _train
    try:
        return job(resolved, world, options, requests)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise LargetrainError(f"{error}. Free space, then go on from the last checkpoint with --resume") from error
    except ValueError as error:
        if LONE_VALUE not in str(error):
            raise
        raise ConfigError(
            f"train_micro_batch_size_per_gpu: {resolved.batch.micro_batch} leaves a batch norm one value per channel, "
            f"and it does not train on that ({error}). Give more images or larger ones, share statistics between "
            f"several ranks (sync_batch_norm: on), or keep those of the weights (model.freeze_batch_norm: true).",
            on_all_ranks=True,
        ) from error
    except RuntimeError as error:
        if world.world_size == 1 or not PEER_LOST.search(str(error)):
            raise
        if requests.asked:  # the signal reached the other one too soon or twice
            raise StoppedError(requests.asked) from error
        raise PeerLostError(
            f"this rank stops because another one has ended, whose message or traceback tells why ({error})",
            world.rank,
        ) from error


def _evaluate(resolved: Resolved, world: World, options: Namespace, requests: StopRequests) -> int:
    from largetrain.compose import evaluate

    say = _printer(world)
    figures = evaluate(resolved, world, resume=options.resume, verbose=options.verbose, say=say)
    for name, value in figures.items():
        say(f"{name}: {value:.6g}")
    _leave()
    return EXIT_DONE


def _printer(world: World) -> Callable[[str], None]:
    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    return say


def _train(resolved: Resolved, world: World, options: Namespace, requests: StopRequests) -> int:
    from largetrain.compose import build

    say = _printer(world)
    built = build(resolved, world, resume=options.resume, verbose=options.verbose, say=say, requests=requests)
    try:
        state = built.trainer.fit()
    except PreemptedError:
        _leave()
        raise
    unit = built.trainer.backend.task.unit
    say(f"done: {state.step} updates, {state.tokens:,} {unit}; results in {built.output}")
    say(f"next: tensorboard --logdir {built.output}   |   go on: add --resume --output {built.output} --steps N")
    _leave()
    return EXIT_DONE


def _leave() -> None:
    """Leave the process group together; only on the path that every rank reaches."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    # Python's last collection would walk the million objects of torch and deepspeed: 2 of the 2.5 s that the process
    # took to end after its last line
    gc.freeze()
