"""Real launches to one of whose processes a signal is sent at some moment."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cli.test_launches import MARK, ROOT, command, marked

POLL_S = 0.005
LEAVE_S = 20.0  # for processes that outlive the launcher: ranks whose launcher was killed still save


@dataclass(frozen=True)
class Shot:
    """A signal to a process.

    Args:
        target: runner (what was started), launch (DeepSpeed's process between), rank0, rank1, ...; the runner in the
            place of one that is not there.
        after: text that the output has to hold first.
        delay_s: from then, or from the start.
    """

    target: str
    number: signal.Signals = signal.SIGTERM
    after: str = ""
    delay_s: float = 0.0


@dataclass
class Ended:
    """A launch that is over."""

    code: int
    lines: list[str]
    shot_s: float | None
    """When the signal was sent, since the start; None: the launch was over before."""
    wall_s: float
    left: list[int] = field(default_factory=list)
    """Processes that had to be killed: they outlived the launcher by far, or the time limit."""

    @property
    def output(self) -> str:
        return "".join(self.lines)


def launch(
    folder: Path, launcher: str, arguments: Sequence[str], shot: Shot | None = None, limit_s: float = 120.0
) -> Ended:
    """Start `launcher ... largetrain ARGUMENTS` on two ranks of one thread each, and wait for all its processes."""
    words, port = command(launcher)
    mark = uuid.uuid4().hex
    variables = {MARK: mark, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port)}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        [*words, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()
    shot_s = None
    seen_at = None if shot is not None and shot.after else began
    while process.poll() is None and time.monotonic() - began < limit_s:
        if shot is not None and shot_s is None:
            if seen_at is None and any(shot.after in line for line in list(lines)):
                seen_at = time.monotonic()
            if seen_at is not None and time.monotonic() - seen_at >= shot.delay_s:
                shot_s = time.monotonic() - began
                _send(shot, mark, process.pid)
        time.sleep(POLL_S)
    deadline = time.monotonic() + (LEAVE_S if process.poll() is not None else 0)
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in (signal.SIGABRT, signal.SIGKILL):  # the first makes Python print where every thread is
        for process_id in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)
        time.sleep(1 if left else 0)
    code = process.wait(timeout=30)
    reader.join(timeout=30)
    process.stdout.close()
    return Ended(code, lines, shot_s, time.monotonic() - began, left)


def _send(shot: Shot, mark: str, runner: int) -> None:
    for process_id in (*_find(shot.target, mark), runner):
        try:
            os.kill(process_id, shot.number)
        except ProcessLookupError:
            continue
        return


def _find(target: str, mark: str) -> list[int]:
    """The process of that name among those of a launch, if it is there."""
    found: list[tuple[int, int]] = []
    for process_id in marked(mark):
        try:
            folder = Path("/proc", str(process_id))
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        if target == "launch" and b"deepspeed.launcher.launch" in words:
            return [process_id]
        if b"largetrain" in words[:5] and b"RANK=" + target.removeprefix("rank").encode() in variables:
            found.append((process_id, parent))
    ranks = {process_id for process_id, _ in found}
    return [process_id for process_id, parent in found if parent not in ranks]  # not its loader processes
