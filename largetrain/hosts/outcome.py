"""How a start of the run ended, and who ended it: the first rank or host to fail, not those that it took along."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from largetrain.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_MISTAKE, EXIT_PREEMPTED

STOPPED = (EXIT_PREEMPTED, EXIT_INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
AGREED = (EXIT_DONE, EXIT_MISTAKE, EXIT_DIVERGED, *STOPPED)
"""Exit codes with which all ranks end, each by itself."""


@dataclass(frozen=True)
class RankEnd:
    """One rank's end, in the order in which the launcher heard of them."""

    rank: int
    host: str
    code: int
    """Exit code; negative: the signal that killed it."""
    explained: bool = False
    """It ended with a traceback."""

    @property
    def exit_code(self) -> int:
        """As shells tell it."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def is_consequence(self) -> bool:
        """Perhaps only because another rank had ended: exit code 1 and no traceback."""
        return self.code == EXIT_INTERNAL and not self.explained

    def words(self) -> str:
        """For a message."""
        if self.code >= 0:
            return f"rank {self.rank} on {self.host} ended with exit code {self.code}"
        name = signal.Signals(-self.code).name if -self.code in list(signal.Signals) else f"signal {-self.code}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"rank {self.rank} on {self.host} was killed by {name}{hint}"


@dataclass(frozen=True)
class Outcome:
    """One start of the run."""

    code: int
    reason: str = ""
    rank: int | None = None
    """The first to fail."""
    lost: tuple[str, ...] = ()
    """Hosts that did not answer any more."""
    asked: bool = False
    """The launcher was signalled."""
    step: int | None = None
    """Updates at the newest checkpoint, as far as it was heard."""
    last_words: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_worth_a_restart(self) -> bool:
        """Whether another start could go better."""
        return not self.asked and self.code not in AGREED


def decide(ends: Sequence[RankEnd], lost: Sequence[str], ranks: int, asked: bool) -> Outcome:
    """The outcome of a start whose ranks are gone.

    Args:
        ends: those that ended before the launcher began to kill.
        lost: hosts whose agents went away before their ranks' ends were heard.
    """
    failed = [end for end in ends if end.code != 0]
    if lost:  # what other ranks say then, tracebacks included, is that the connection broke
        culprit = next((end for end in failed if end.code in AGREED), None)
    else:
        culprit = next((end for end in failed if not end.is_consequence), failed[0] if failed else None)
    if culprit is not None:
        return Outcome(culprit.exit_code, culprit.words(), culprit.rank, tuple(lost), asked)
    if lost:
        return Outcome(EXIT_INTERNAL, f"{', '.join(lost)}: lost", None, tuple(lost), asked)
    if len(ends) < ranks:
        missing = ranks - len(ends)
        return Outcome(EXIT_INTERNAL, f"{missing} of {ranks} ranks did not end in time and were killed", asked=asked)
    return Outcome(EXIT_DONE, asked=asked)
