"""Stops a run with a checkpoint when it is asked to: by a signal, a time limit, or the death of its launcher."""

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from largetrain.callbacks.base import Callback, Moment
from largetrain.engine.signals import Stop, StopRequests
from largetrain.errors import EXIT_INTERRUPTED, PreemptedError
from largetrain.parallel.agreement import StepAgreement

STOPS = Stop.NOT_A_STOP - 1
REASONS = {
    Stop.SIGINT: "interrupted",
    Stop.SIGTERM: "SIGTERM",
    Stop.SIGUSR1: "SIGUSR1",
    Stop.SIGHUP: "SIGHUP",
    Stop.TIME: "--max-minutes is over",
    Stop.LAUNCHER: "the launcher has died",
}


class InterruptedRunError(PreemptedError):
    """Stopped by Ctrl-C, which nobody wants to be started again by itself."""

    exit_code = EXIT_INTERRUPTED


class Abandoned(Exception):
    """An evaluation was given up on all ranks, at the same batch, because the run is to stop."""


class Preemption(Callback):
    """Asks all ranks after every update, and within evaluations before every batch, whether one of them is to stop.

    Args:
        agreement: the collective.
        sources: each gives flags of this rank: `Stop`, or higher bits, which stay in `agreement.last`.
        save: writes a checkpoint, or finds the one of this step, and returns its folder once it is on the disk.
        requests: is told when a signal has something to save, and when it no longer has.
    """

    def __init__(
        self,
        agreement: StepAgreement,
        sources: Sequence[Callable[[], int]],
        save: Callable[[], Path],
        requests: StopRequests | None = None,
    ):
        self.agreement, self.sources, self.save, self.requests = agreement, sources, save, requests

    def on_start(self, step: int) -> None:
        if self.requests is not None:
            self.requests.begin()

    def on_step(self, moment: Moment) -> None:
        if self._asked() and not moment.last:  # what is left of the last one, an evaluation, asks by itself
            self.stop(moment.step)

    def on_end(self, step: int) -> None:
        if self.requests is not None:
            self.requests.end()

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an evaluation, equally many on all ranks.

        Raises:
            Abandoned: on all ranks at the same batch; `stop` is to be called then.
        """
        try:
            for batch in batches:
                if self._asked():
                    raise Abandoned
                yield batch
        finally:
            if isinstance(batches, Generator):
                batches.close()  # ends the loader's processes

    def stop(self, step: int) -> None:
        """Save and stop; all ranks call it together.

        Raises:
            PreemptedError: always, unless the checkpoint could not be written (CheckpointError).
        """
        folder = self.save()
        asked = self.agreement.last & STOPS
        reason = ", ".join(words for flag, words in REASONS.items() if flag & asked)
        kind = InterruptedRunError if asked & Stop.SIGINT else PreemptedError
        if self.requests is not None:
            self.requests.end()
        raise kind(
            f"stopped after update {step} ({reason}); saved in {folder}. Go on: the same command with --resume auto"
        )

    def _asked(self) -> bool:
        flags = 0
        for source in self.sources:
            flags |= source()
        return bool(self.agreement.union(flags) & STOPS)
