"""Starting a run again after a rank, a host or the network failed, from its newest checkpoint."""

import json
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largetrain.errors import EXIT_INTERNAL, ConfigError
from largetrain.hosts.attempt import Attempt, Interrupted, Unreachable, Wishes
from largetrain.hosts.console import Console, say
from largetrain.hosts.hostfile import Host
from largetrain.hosts.job import Job
from largetrain.hosts.links import Events
from largetrain.hosts.outcome import Outcome

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
IDLE_STARTS = 3
"""So many starts in a row without a new checkpoint end the run: it fails at the same place each time."""
RETRY_S = 3.0
JobFor = Callable[[Sequence[Host], bool, bool], Job]


@dataclass(frozen=True)
class Policy:
    """When to start again, and with how many hosts."""

    max_restarts: int = 0
    min_hosts: int | None = None
    """None: always all of them."""
    host_wait_s: float = 30.0
    """How long to wait for hosts that stay away, before going on with fewer."""


@dataclass
class Supervisor:
    """The launches of one run, the first and those after failures.

    Args:
        job_for: the job on some of the hosts; is told whether it is a restart, and whether a checkpoint was written
            since the first start. Raises ConfigError when the run cannot be kept the same on them.
        logs: folder of the ranks' output and of `launch.jsonl`.
    """

    hosts: Sequence[Host]
    policy: Policy
    wishes: Wishes
    job_for: JobFor
    logs: Path
    events: Events
    quiet: bool = False
    starts: int = 0
    earlier: int = 0
    """Starts by earlier launches into the same folder of logs."""
    step: int | None = None
    """Updates at the newest checkpoint, as far as it was heard."""
    first_step: int | None = None
    """The same when the first start began."""
    reason: str = ""
    began: float = field(default_factory=time.monotonic)

    def run(self) -> Outcome:
        """Until the run is done, or has failed for good.

        Raises:
            ConfigError, Unreachable: at the first start: hosts or arguments are wrong.
            Interrupted: by a signal between two starts.
        """
        idle = 0
        while True:
            before = self.step
            outcome = self._start()
            idle = 0 if self.step != before else idle + 1
            self._log("ended", code=outcome.code, reason=outcome.reason, step=self.step)
            if not outcome.is_worth_a_restart or self.policy.max_restarts == 0:
                return outcome
            if self.starts > self.policy.max_restarts:
                say(f"{outcome.reason}; no restart is left of {self.policy.max_restarts}")
                return outcome
            if idle >= IDLE_STARTS:
                say(f"{outcome.reason}; {idle} starts in a row made no new checkpoint: not started again")
                return outcome
            self.reason = outcome.reason
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, idle - 1))
            say(f"{outcome.reason}; restart {self.starts} of {self.policy.max_restarts} in {pause_s:.0f} s")
            self._wait(pause_s)

    def _start(self) -> Outcome:
        again = self.starts > 0
        if not again:
            numbers = [path.name.removeprefix("start-") for path in self.logs.glob("start-*")]
            self.earlier = max((int(number) for number in numbers if number.isdigit()), default=0)
        self.starts += 1
        try:
            attempt = self._connected(again)
        except (Unreachable, ConfigError) as error:
            if not again:
                raise
            return Outcome(EXIT_INTERNAL, str(error))
        try:
            console = Console(self.logs / f"start-{self.earlier + self.starts}", attempt.names(), self.quiet)
            outcome = attempt.run(console, on_start=lambda: self._tell_start(attempt, again))
            console.close()
        except Unreachable as error:
            if not again:
                raise
            outcome = Outcome(EXIT_INTERNAL, str(error))
        finally:
            attempt.close()
        if outcome.step is not None:
            self.step = outcome.step
        return outcome

    def _connected(self, again: bool) -> Attempt:
        """Agents on all hosts, or after a while on as many as there are, if they are enough."""
        least = self.policy.min_hosts or len(self.hosts)
        give_up_at = time.monotonic() + (self.policy.host_wait_s if again else 0)
        hosts = list(self.hosts)
        while True:
            saved = self._saved()
            attempt = Attempt(self.job_for(hosts, again, saved), hosts, self.wishes, self.events)
            try:
                attempt.connect()
            except Unreachable as error:
                attempt.close()
                there = [host for host in hosts if host.name not in error.faults]
                if len(there) < least:
                    raise
                for fault in error.faults.values():
                    say(fault)
                if time.monotonic() >= give_up_at:
                    hosts = self._fewer(there, least)
                else:
                    self._wait(RETRY_S)
                    hosts = list(self.hosts)
                continue
            except BaseException:
                attempt.close()
                raise
            steps = [found["step"] for found in attempt.facts.values() if found["step"] is not None]
            self.step = max(steps, default=self.step)
            if not again:
                self.first_step = self.step
            elif self._saved() != saved:  # a host that was lost did not say that it had saved
                attempt.close()
                continue
            return attempt

    def _saved(self) -> bool:
        return self.step != self.first_step

    def _fewer(self, there: list[Host], least: int) -> list[Host]:
        """As many of these hosts as the run can be kept the same on.

        Raises:
            ConfigError: none will do; why the first choice does not.
        """
        refusal: ConfigError | None = None
        for number in range(len(there), least - 1, -1):
            try:
                self.job_for(there[:number], True, self._saved())
            except ConfigError as error:
                refusal = refusal or error
                continue
            say(f"going on with {number} of {len(self.hosts)} hosts: {', '.join(host.name for host in there[:number])}")
            return there[:number]
        assert refusal is not None
        raise refusal

    def _tell_start(self, attempt: Attempt, again: bool) -> None:
        ranks = sum(host.slots for host in attempt.hosts)
        names = ", ".join(host.name for host in attempt.hosts)
        saved = [found["saved_s"] for found in attempt.facts.values() if found["saved_s"] is not None]
        if not again:
            self._log("start", hosts=names, ranks=ranks)
            return
        lost_s = min(saved) if saved else time.monotonic() - self.began
        since = f"update {self.step}, saved {lost_s:.0f} s ago" if saved else "the beginning, nothing was saved"
        say(f"restart {self.starts - 1}: {ranks} ranks on {names}, from {since}")
        self._log("restart", hosts=names, ranks=ranks, reason=self.reason, step=self.step, lost_s=round(lost_s, 1))

    def _log(self, what: str, **fields: Any) -> None:
        """A line of launch.jsonl."""
        self.logs.mkdir(parents=True, exist_ok=True)
        row = {"time": round(time.time(), 1), "event": what, "start": self.earlier + self.starts, **fields}
        with (self.logs / "launch.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _wait(self, seconds: float) -> None:
        """Wait, but for a signal.

        Raises:
            Interrupted: there was one.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                return
            if event.signal is not None:
                raise Interrupted(event.signal)
