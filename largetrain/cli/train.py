"""`largetrain train`: resolve the configuration, build the run, train."""

import gc
from argparse import Namespace
from collections.abc import Callable, Sequence

from largetrain.cli.arguments import load_from_args, train_parser
from largetrain.cli.failures import explained
from largetrain.config.resolved import Resolved
from largetrain.config.world import World, launch_world
from largetrain.engine.signals import StopRequests, take_signals
from largetrain.errors import EXIT_DONE, PreemptedError


def run(argv: Sequence[str]) -> int:
    """Train; torch and deepspeed are imported only once the configuration is known to be right.

    Raises:
        ConfigError: the user's files, flags, data or checkpoint are wrong; as a rule nothing heavy has begun.
        DivergedError: see `callbacks.periodic.Guard`.
        NoMemoryError, PeerLostError: see `cli.failures`.
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
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        told = explained(error, resolved, world, requests.asked)
        if told is None:
            raise
        raise told from error


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
