"""One start of a run: agents on all hosts, then the ranks, until the last of them is gone.

Nothing is started before every host has answered, agrees with the others, and reaches the first one's port. From then
on the first failure, of a rank, of an agent or of the network, ends all ranks within seconds.
"""

import contextlib
import os
import queue
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from largetrain.errors import ConfigError
from largetrain.hosts import agreement
from largetrain.hosts.console import Console, say
from largetrain.hosts.hostfile import Host
from largetrain.hosts.job import Job
from largetrain.hosts.links import Event, Events, Heartbeat, Link
from largetrain.hosts.messages import LOST_S, Message
from largetrain.hosts.outcome import AGREED, Outcome, RankEnd, decide
from largetrain.hosts.ssh import agent_command, agent_variables, fault

READY_LIMIT_S = 20.0
REACHED_LIMIT_S = 10.0
FAILED_WAIT_S = 4.0  # for the last words of the others, once a rank has failed
LOST_WAIT_S = 1.0
AGREED_WAIT_S = 30.0  # once a rank has ended as all do
SECOND_S = 3.0  # a signal so soon after another is the same one
FORCE_S = 3.0  # after a second signal
LEAVE_S = 8.0  # for agents to go after their ranks
GRACE_S = 600.0
RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupted(Exception):
    """A signal came before there were ranks."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Unreachable(Exception):
    """Hosts without an agent; `faults` says of each why."""

    def __init__(self, faults: dict[str, str], ready: "list[Link] | None" = None):
        super().__init__("; ".join(faults.values()))
        self.faults = faults
        self.ready = ready or []


@dataclass(frozen=True)
class Part:
    """One host's ranks among all that others start."""

    hosts: Sequence[Host]
    node: int

    @property
    def first_rank(self) -> int:
        """Of this host."""
        return sum(host.slots for host in self.hosts[: self.node])


@dataclass
class Wishes:
    """How the ranks are to meet."""

    address: str | None = None
    port: int | None = None
    carrier: str = "ssh"
    """What starts the agents, see `ssh.agent_command`."""
    part: "Part | None" = None
    """Only this host's ranks of a larger run; the address and the port are given then."""
    grace_s: float = GRACE_S
    """For the ranks to save after a signal."""


def catch_signals(events: Events) -> Callable[[], None]:
    """Let signals to this process become events; returns what undoes it."""
    before = {number: signal.getsignal(number) for number in (*RELAYED, signal.SIGTSTP)}
    for number in RELAYED:
        if before[number] != signal.SIG_IGN:  # nohup, or a shell's job in the background
            signal.signal(number, lambda number, _: events.put(Event(signal=number)))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a launcher that stands still looks dead to the agents

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo


@dataclass
class Attempt:
    """One start; `connect`, then `run`, and `close` in any case."""

    job: Job
    hosts: Sequence[Host]
    wishes: Wishes
    events: Events
    links: list[Link] = field(default_factory=list)
    facts: dict[str, Message] = field(default_factory=dict)
    """Of each host, by its name."""

    def connect(self) -> None:
        """Start the agents, and hear of every host what it is.

        Raises:
            Unreachable: hosts that did not answer; the others are told to go.
            ConfigError: hosts that cannot do their part, or differ from each other.
            Interrupted: by a signal.
        """
        variables = agent_variables(self.job.number, secrets.token_hex(4), self.job.environment)
        carrier = self.wishes.carrier
        for host in self.hosts:
            command = agent_command(carrier, host, self.job.python, variables)
            here = {**os.environ, **(variables if carrier == "local" else {})}
            try:
                self.links.append(Link(host, command, here, self.events))
            except FileNotFoundError:
                raise ConfigError(f"{command[0]}: not found on this machine; install it.") from None
        self._beat = Heartbeat(self.links)
        for link in self.links:
            link.send("job", **self.job.message(link.host, self.hosts[0], self.wishes.port), lost_s=LOST_S)
        self.facts = self._gather("ready", self.links, READY_LIMIT_S)
        agreement.check_hosts(self.hosts, self.facts)

    def run(self, console: Console, on_start: Callable[[], None] = lambda: None) -> Outcome:
        """Start the ranks and wait for their ends.

        Raises:
            Unreachable, ConfigError: the first host cannot be reached where the ranks are to meet.
            Interrupted: by a signal, before they have started.
        """
        address, port = self._meeting_place()
        part = self.wishes.part
        everyone = list(part.hosts if part else self.hosts)
        first_rank = part.first_rank if part else 0
        for node, link in enumerate(self.links, start=part.node if part else 0):
            peer = address if node else agreement.address_of_second(everyone, self.facts)
            link.send(
                "start",
                first_rank=first_rank,
                ranks=sum(host.slots for host in everyone),
                address=address,
                port=port,
                peer=peer if len(everyone) > 1 else None,
                node=node,
                nodes=len(everyone),
            )
            first_rank += link.host.slots
        on_start()
        return _Watch(self, console).outcome()

    def names(self) -> list[str]:
        """Host of each rank of the whole run, in order; of each torchrun where these start the ranks."""
        everyone = self.wishes.part.hosts if self.wishes.part else self.hosts
        return [host.name for host in everyone for _ in range(1 if self.job.torchrun else host.slots)]

    def close(self) -> None:
        """End all connections; agents that still have ranks kill them."""
        if self.links:
            self._beat.stop()
        for link in self.links:
            link.send("stop", grace_s=0)
        deadline = time.monotonic() + LEAVE_S
        for link in self.links:
            link.close(max(0.1, deadline - time.monotonic()))

    def _meeting_place(self) -> tuple[str, int]:
        """Address and port of rank 0, which every other host has shown to reach."""
        first, *others = self.links
        if self.wishes.part:
            assert self.wishes.address is not None and self.wishes.port is not None
            return self.wishes.address, self.wishes.port
        address = self.wishes.address or agreement.meeting_address(self.hosts, self.facts)
        port = self.wishes.port or self.facts[first.host.name]["port"]
        if not others:
            return address, port
        first.send("listen", port=port)
        heard = self._gather("listening", [first], REACHED_LIMIT_S)
        if problem := heard[first.host.name]["problem"]:
            raise ConfigError(f"{first.host.name}: port {port} cannot be used ({problem}); choose with --master-port.")
        for link in others:
            link.send("reach", address=address, port=port)
        answers = self._gather("reached", others, REACHED_LIMIT_S)
        problems = [
            f"{name}: cannot reach {first.host.name} at {address} port {port} ({answer['problem']}), where the ranks "
            f"are to meet: a firewall, or the address of another network; choose with --master-addr, --master-port."
            for name, answer in answers.items()
            if answer["problem"]
        ]
        if problems:
            raise ConfigError(problems)
        return address, port

    def _gather(self, kind: str, links: Sequence[Link], limit_s: float) -> dict[str, Message]:
        """One message of a kind from each host.

        Raises:
            Unreachable: not all have sent it in time.
            Interrupted: by a signal.
        """
        heard: dict[str, Message] = {}
        faults: dict[str, str] = {}
        python, carrier = self.job.python, self.wishes.carrier
        deadline = time.monotonic() + limit_s
        while len(heard) + len(faults) < len(links) and (left := deadline - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                break
            if event.signal is not None:
                raise Interrupted(event.signal)
            if event.link not in self.links or event.link is None:
                continue  # of an earlier start
            name = event.link.host.name
            if event.message is None:
                faults[name] = fault(event.link.host, event.link.process.returncode, event.link.said, python, carrier)
            elif event.message["kind"] == kind:
                heard[name] = event.message
        for link in links:
            if link.host.name not in (*heard, *faults):
                said = f" ({link.said.splitlines()[-1]})" if link.said else ""
                faults[link.host.name] = f"{link.host.name}: no answer within {limit_s:.0f} s{said}"
        if faults:
            raise Unreachable(faults, [link for link in links if link.host.name in heard])
        return heard


class _Watch:
    """The time in which ranks run."""

    def __init__(self, attempt: Attempt, console: Console):
        self.links, self.events, self.console = attempt.links, attempt.events, console
        self.grace_s, self.host_of = attempt.wishes.grace_s, attempt.names()
        self.ranks = sum(1 if attempt.job.torchrun else host.slots for host in attempt.hosts)
        self.ends: list[RankEnd] = []
        self.open = list(self.links)
        self.lost: list[str] = []
        self.steps: list[int] = []
        self.signals: dict[bool, float] = {}
        self.asked: int | None = None
        self.kill_at: float | None = None
        self.killed = False

    def outcome(self) -> Outcome:
        """Wait for the end of everything."""
        while self.open:
            with contextlib.suppress(queue.Empty):
                self._take(self.events.get(timeout=0.25))
            self._look_around()
        found = decide(self.ends, self.lost, self.ranks, self.asked is not None)
        if self.asked is not None and found.code == 1 and self.killed:
            found = replace(found, code=128 + self.asked)
        step = max(self.steps, default=None)
        words = tuple(self.console.last_words(found.rank)) if found.rank is not None else ()
        return replace(found, step=step, last_words=words)

    def _take(self, event: Event) -> None:
        if event.signal is not None:
            self._pass_on(event.signal)
        elif event.link is None or event.link not in self.open:
            return
        elif event.message is None:
            self._lose(event.link, "its agent went away")
        elif event.message["kind"] == "output":
            self.console.take(event.message["rank"], event.message["text"])
        elif event.message["kind"] == "ended":
            self._note(event.message["rank"], event.message["code"])
        elif event.message["kind"] == "over":
            self.open.remove(event.link)
            if event.message["step"] is not None:
                self.steps.append(event.message["step"])

    def _note(self, rank: int, code: int) -> None:
        if self.killed:
            return
        words = self.console.last_words(rank)
        end = RankEnd(rank, self.host_of[rank], code, bool(words) and words[0].startswith("Traceback"))
        self.ends.append(end)
        self._kill_in(AGREED_WAIT_S if code in AGREED else FAILED_WAIT_S)

    def _lose(self, link: Link, why: str) -> None:
        self.open.remove(link)
        self.lost.append(link.host.name)
        said = f": {link.said.splitlines()[-1]}" if link.said else ""
        say(f"{link.host.name} is lost: {why}{said}")
        self._kill_in(LOST_WAIT_S)

    def _look_around(self) -> None:
        now = time.monotonic()
        for link in list(self.open):
            if now - link.heard_at > LOST_S:
                link.drop()
                self._lose(link, f"no sign of life for {LOST_S:.0f} s")
        if self.kill_at is not None and now >= self.kill_at and not self.killed:
            self.killed = True
            for link in self.links:
                link.send("stop", grace_s=0)

    def _kill_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)

    def _pass_on(self, number: int) -> None:
        """A signal to this launcher means what it means to a rank: save and stop; once more, stop at once."""
        now = time.monotonic()
        warning = number == signal.SIGUSR1  # after which SIGTERM is no second signal
        seen, first_at = warning in self.signals, self.signals.setdefault(warning, now)
        if seen and now - first_at < SECOND_S:
            return
        self.asked = self.asked or number
        for link in self.links:
            link.send("signal", number=signal.SIGTERM if number == signal.SIGHUP else number)
        if self.grace_s and not seen:
            self._kill_in(self.grace_s)
        elif seen:
            self._kill_in(FORCE_S)
