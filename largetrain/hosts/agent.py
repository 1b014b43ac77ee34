"""The run's process on each host: `python -m largetrain.hosts.agent`, started by `largetrain launch`, mostly by ssh.

It reads messages from standard input and writes messages to standard output (`hosts/messages`): says what host this
is, starts the ranks, hands on their output and their ends, passes signals on. When the launcher is gone, by the end
of the input or by its silence, the ranks are asked to save, and are killed a little later; when this process is
killed, the kernel kills them. It ends when they have ended, and leaves no process of theirs.
"""

import contextlib
import hashlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largetrain.checkpoint.folder import pointed_at, step_of
from largetrain.hosts import facts, processes
from largetrain.hosts.environment import rank_variables, threads
from largetrain.hosts.messages import ALIVE_EVERY_S, LOST_S, Lines, Message, encode

TICK_S = 0.5
GONE_GRACE_S = 30.0  # the launcher has died: the ranks can still save together
SILENT_GRACE_S = 4.0  # the network is gone: they cannot, and wait for each other in vain
PIPE_LIMIT_S = 1.0  # for the last words of a rank in a pipe that a process of its own still holds
HELD_BACK_BYTES = 4_000_000  # output that the launcher has not taken; beyond that the ranks wait
LONGEST_LINE_BYTES = 65536
CLEAN_LIMIT_S = 5.0
REACH_LIMIT_S = 5.0
RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass
class Rank:
    """One rank on this host."""

    number: int
    process: "subprocess.Popen[bytes]"
    code: int | None = None
    ended_at: float = 0.0
    open: bool = True
    text: bytes = field(default=b"")
    """The beginning of a line whose end has not come yet."""


class Agent:
    """One run on one host, from the first message to the end of its ranks."""

    def __init__(self) -> None:
        self.select = selectors.DefaultSelector()
        self.lines = Lines()
        self.unsent = b""
        self.job: Message = {}
        self.folder = ""
        self.ranks: list[Rank] = []
        self.listener: Any = None
        self.lost = self.finished = False
        self.heard_at = self.alive_at = time.monotonic()
        self.kill_at: float | None = None

    def run(self) -> int:
        """Serve until all is over; returns the exit code of this process."""
        processes.adopt_orphans()
        wake = self._take_signals()
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self.select.register(0, selectors.EVENT_READ, self._receive)
        self.select.register(wake, selectors.EVENT_READ, lambda: self._signalled(os.read(wake, 512)))
        try:
            while not self.finished or (self.unsent and not self.lost):
                for key, _ in self.select.select(TICK_S if not self.unsent else 0.02):
                    key.data()
                self._look_around()
        finally:
            for rank in self.ranks:
                processes.kill_group(rank.process.pid)
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)
        return 0

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message; it may wait in memory until the pipe takes it."""
        if self.lost:
            return
        self.unsent += encode(kind, **fields)
        self._flush()

    # what arrives

    def _receive(self) -> None:
        received = os.read(0, 1 << 20)
        if not received:
            self.select.unregister(0)
            self._lose("the launcher has ended", GONE_GRACE_S)
            return
        self.heard_at = time.monotonic()
        for message in self.lines.feed(received):
            if isinstance(message, dict):
                self._obey(message)

    def _obey(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "job":
            self._take_job(message)
        elif kind == "listen":
            self._listen(message)
        elif kind == "reach":
            problem = facts.reach_problem(message["address"], message["port"], REACH_LIMIT_S)
            self.say("reached", problem=problem)
        elif kind == "start":
            self._start(message)
        elif kind == "signal":
            self._pass_on(message["number"])
        elif kind == "stop":
            self._stop(message["grace_s"])

    def _take_job(self, job: Message) -> None:
        self.job = job
        problems = []
        for process_id in processes.left_over(job["job"], os.environ.get(processes.START, "")):
            processes.send(process_id, signal.SIGKILL)
        try:
            os.chdir(job["folder"])
        except OSError as error:
            problems.append(
                f"the working folder {job['folder']} cannot be entered here ({facts.reason(error)}): all hosts need "
                f"the same paths"
            )
        try:
            self._write_files()
        except OSError as error:
            problems.append(f"{tempfile.gettempdir()} cannot be written ({facts.reason(error)}), set TMPDIR")
        gpus = facts.gpu_count()
        wanted = job["devices"] or range(job["slots"])
        if gpus and max(wanted) >= gpus:
            problems.append(f"the hostfile asks for {job['slots']} ranks here, and there are {gpus} GPUs")
        port = job["port"]
        if port is not None and (problem := facts.port_problem(port)):
            problems.append(
                f"port {port} cannot be used ({problem}): another program has it; choose with --master-port"
            )
        self.say(
            "ready",
            problems=problems,
            port=(port or facts.free_port()) if job["first"] else None,
            step=self._step(),
            saved_s=self._saved_s(),
            **facts.host_facts(job["resolve"]),
        )

    def _write_files(self) -> None:
        """The configuration as the launcher read it, so that no host reads another one."""
        prefix = f"largetrain-{self.job['job']}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)  # by an agent that was killed
        self.folder = tempfile.mkdtemp(prefix=prefix)
        for name, file in self.job["files"].items():
            path = Path(self.folder, name, file["name"])
            path.parent.mkdir()
            path.write_text(file["text"], encoding="utf-8")
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            assert found == file["sha256"], (name, found)

    def _step(self) -> int | None:
        """Updates done at the newest checkpoint of the run's output folder, as this host sees it."""
        latest = pointed_at(Path(self.job["output"], "checkpoints", "latest"))
        return step_of(latest) if latest is not None else None

    def _saved_s(self) -> float | None:
        """Seconds since that checkpoint was written."""
        pointer = Path(self.job["output"], "checkpoints", "latest")
        return time.time() - pointer.stat().st_mtime if pointer.is_file() else None

    def _listen(self, message: Message) -> None:
        """Hold the port where the ranks will meet, until they start."""
        problem = None
        try:
            self.listener = facts.listener(message["port"])
        except OSError as error:
            problem = facts.reason(error)
        self.say("listening", problem=problem)

    def _start(self, message: Message) -> None:
        if self.listener is not None:
            self.listener.close()
        job = self.job
        environment = {**os.environ, **job["environment"], "PYTHONUNBUFFERED": "1"}
        if "PYTHONSAFEPATH" not in job["environment"]:
            environment.pop("PYTHONSAFEPATH", None)  # was meant for this process
        environment.setdefault("OMP_NUM_THREADS", threads(len(os.sched_getaffinity(0)), job["slots"]))
        if message["peer"] and (interface := facts.interface_towards(message["peer"])):
            # what gloo would take is the address of the host's own name, which may be 127.0.1.1
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        if job["devices"]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job["devices"]))
        words = [
            str(Path(self.folder, word["file"], word["name"])) if isinstance(word, dict) else word
            for word in job["command"]
        ]
        if job["torchrun"]:
            self._start_rank(message["node"], [*_torchrun(message, job["slots"]), *words], environment)
            return
        for local_rank in range(job["slots"]):
            own = rank_variables(
                rank=message["first_rank"] + local_rank,
                local_rank=local_rank,
                ranks=message["ranks"],
                local_ranks=job["slots"],
                address=message["address"],
                port=message["port"],
            )
            self._start_rank(message["first_rank"] + local_rank, words, {**environment, **own})

    def _start_rank(self, number: int, words: list[str], environment: dict[str, str]) -> None:
        process = processes.start(words, environment, os.getcwd())
        rank = Rank(number, process)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.select.register(process.stdout, selectors.EVENT_READ, lambda: self._read(rank))
        self.ranks.append(rank)

    # the ranks

    def _read(self, rank: Rank) -> None:
        """Hand on what a rank has written, whole lines at a time, unless the launcher does not keep up."""
        if len(self.unsent) > HELD_BACK_BYTES and not self.lost:
            time.sleep(0.01)
            return
        assert rank.process.stdout is not None
        try:
            received = os.read(rank.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        rank.text += received
        whole, newline, rest = rank.text.rpartition(b"\n")
        if not received or len(rest) > LONGEST_LINE_BYTES:
            whole, newline, rest = rank.text, b"", b""
        rank.text = rest
        if whole or newline:
            self.say("output", rank=rank.number, text=(whole + newline).decode(errors="replace"))
        if not received:
            self._close(rank)

    def _close(self, rank: Rank) -> None:
        if rank.open:
            rank.open = False
            self.select.unregister(rank.process.stdout)  # type: ignore[arg-type]

    def _reap(self) -> None:
        """Take note of processes that have ended: ranks, and what they left to this process."""
        while True:
            try:
                process_id, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process_id == 0:
                return
            for rank in self.ranks:
                if rank.process.pid == process_id:
                    rank.code = rank.process.returncode = os.waitstatus_to_exitcode(status)
                    rank.ended_at = time.monotonic()
                    processes.kill_group(process_id)  # its loader processes

    def _look_around(self) -> None:
        """What is done after every event, and twice a second without any."""
        self._reap()
        now = time.monotonic()
        if now - self.alive_at >= ALIVE_EVERY_S:
            self.alive_at = now
            self.say("alive")
        self._flush()
        if not self.lost and now - self.heard_at > self.job.get("lost_s", LOST_S):
            self._lose("the launcher is silent", SILENT_GRACE_S)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            for rank in self._running():
                processes.kill_group(rank.process.pid)
        for rank in self.ranks:
            if rank.code is not None and rank.open and now - rank.ended_at > PIPE_LIMIT_S:
                self._close(rank)
            if rank.code is not None and not rank.open and rank.ended_at:
                rank.ended_at = 0.0
                self.say("ended", rank=rank.number, code=rank.code)
        if self.ranks and not self.finished and all(rank.code is not None and not rank.open for rank in self.ranks):
            self.finished = True
            self.say("over", left=self._clean(), step=self._step())

    def _clean(self) -> int:
        """Kill what the ranks have left behind; returns how many that were."""
        left = processes.descendants(os.getpid())
        deadline = time.monotonic() + CLEAN_LIMIT_S
        while (remaining := processes.descendants(os.getpid())) and time.monotonic() < deadline:
            for process_id in remaining:
                processes.send(process_id, signal.SIGKILL)
            time.sleep(0.02)
            self._reap()
        return len(left)

    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    # the end

    def _pass_on(self, number: int) -> None:
        for rank in self._running():
            processes.send(rank.process.pid, number)

    def _stop(self, grace_s: float) -> None:
        """Ask the ranks to end, and see to it after `grace_s`."""
        if not self.ranks:
            self.finished = True
            return
        if grace_s > 0:
            self._pass_on(signal.SIGTERM)
        at = time.monotonic() + grace_s
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)

    def _lose(self, why: str, grace_s: float) -> None:
        if not self.lost:
            with contextlib.suppress(OSError):  # nobody may read it any more
                os.write(2, f"largetrain agent: {why}\n".encode())
        self.lost, self.unsent = True, b""
        self._stop(grace_s)

    def _flush(self) -> None:
        while self.unsent and not self.lost:
            try:
                self.unsent = self.unsent[os.write(1, self.unsent) :]
            except BlockingIOError:
                return
            except OSError:
                self._lose("the launcher has gone", GONE_GRACE_S)

    def _take_signals(self) -> int:
        """A pipe with the numbers of the signals that this process is sent."""
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*RELAYED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the connection is watched otherwise
        return reader

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in RELAYED:
                self._pass_on(number)


def _torchrun(message: Message, slots: int) -> list[str]:
    """The command line of this host's torchrun, but for what it starts; restarts are the launcher's."""
    own = {
        "nnodes": message["nodes"],
        "node-rank": message["node"],
        "nproc-per-node": slots,
        "master-addr": message["address"],
        "master-port": message["port"],
        "max-restarts": 0,
    }
    return [sys.executable, "-m", "torch.distributed.run", *(f"--{flag}={value}" for flag, value in own.items())]


if __name__ == "__main__":
    sys.exit(Agent().run())
