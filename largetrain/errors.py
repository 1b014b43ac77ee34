"""Errors that end a run, and the exit code of each.

`ConfigError` is the user's mistake and prints as one clear message; every other
class is something that happened to a correct run.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_DONE = 0
EXIT_INTERNAL = 1
EXIT_MISTAKE = 2
EXIT_DIVERGED = 3
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved, start again with --resume auto
EXIT_INTERRUPTED = 130


class LargetrainError(Exception):
    """Base of the errors that `main` turns into one message and an exit code."""

    exit_code = EXIT_INTERNAL
    on_all_ranks = False
    """Raised by every rank together, so that rank 0 alone prints it; else the rank that it hit prints it."""


class ConfigError(LargetrainError):
    """The user's input is wrong: the message names the file, the key and the way out.

    Several mistakes may be reported together; `problems` holds one line for each.
    """

    exit_code = EXIT_MISTAKE

    def __init__(self, problems: str | Iterable[str], *, on_all_ranks: bool = False):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.on_all_ranks = on_all_ranks
        super().__init__("\n".join(self.problems))


@contextmanager
def on_every_rank() -> Iterator[None]:
    """Mark errors raised within (or by a function it decorates) as found by all ranks alike, so that one prints."""
    try:
        yield
    except LargetrainError as error:
        error.on_all_ranks = True
        raise


class DivergedError(LargetrainError):
    """Too many updates in a row were skipped for non-finite loss or gradients."""

    exit_code = EXIT_DIVERGED
    on_all_ranks = True


class PreemptedError(LargetrainError):
    """The run was asked to stop, has written a checkpoint and wants to be started again with `--resume auto`."""

    exit_code = EXIT_PREEMPTED
    on_all_ranks = True


class CheckpointError(LargetrainError):
    """A checkpoint could not be written or read; raised on all ranks together, earlier checkpoints are intact."""

    on_all_ranks = True
