"""`largetrain train`: resolve the configuration, build the run, train."""

import gc
from collections.abc import Sequence

from largetrain.cli.arguments import load_from_args, train_parser
from largetrain.config.resolved import Resolved
from largetrain.config.world import World, launch_world
from largetrain.errors import EXIT_DONE


def run(argv: Sequence[str]) -> int:
    """Train; torch and deepspeed are imported only once the configuration is known to be right.

    Raises:
        ConfigError: the user's files, flags, data or checkpoint are wrong; nothing heavy has begun.
        DivergedError: see `callbacks.periodic.Guard`.
    """
    options = train_parser("largetrain train").parse_args(argv)
    world = launch_world()
    resolved = load_from_args(options, world)
    if options.dry_run:
        if world.rank == 0:
            from largetrain.cli.config import readable

            print(readable(resolved), end="")
        return EXIT_DONE
    return _train(resolved, world, options.resume, options.verbose)


def _train(resolved: Resolved, world: World, resume: str | None, verbose: bool) -> int:
    from largetrain.build import build

    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    built = build(resolved, world, resume=resume, verbose=verbose, say=say)
    state = built.trainer.fit()
    say(f"done: {state.step} updates, {state.tokens:,} tokens; results in {built.output}")
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
