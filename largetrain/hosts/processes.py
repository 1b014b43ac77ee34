"""Processes of one run on this host: started so that none outlives its agent, and ended without touching others."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MARK = "LARGETRAIN_JOB"
"""Environment variable of every process of a run: the run's own number."""
START = "LARGETRAIN_START"
"""The same of one of its starts."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """From now on a process whose parent dies becomes this one's child, so that none can slip away."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start(words: Sequence[str], environment: Mapping[str, str], folder: str) -> "subprocess.Popen[bytes]":
    """Start a rank in a session of its own, which the kernel kills when this process dies.

    Its output comes through one pipe, in the order in which it was written.
    """
    return subprocess.Popen(
        words,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509  # the agent has no threads
    )


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored by the agent, and a rank would inherit that
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(128 + signal.SIGKILL)

    return prepare


def send(process_id: int, number: int) -> None:
    """A signal to a process, which may have ended meanwhile."""
    try:
        os.kill(process_id, number)
    except ProcessLookupError:
        return


def kill_group(leader: int) -> None:
    """Kill what is left of the session of a rank."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def descendants(process_id: int) -> list[int]:
    """Processes started by it, directly or not."""
    parents = _parents()
    found: list[int] = []
    known = {process_id}
    while new := [child for child, above in parents.items() if above in known and child not in known]:
        known.update(new)
        found += new
    return found


def left_over(job: str, start: str) -> list[int]:
    """Processes on this host of that run's other starts: cut off from a launcher that went on without them."""
    found = []
    for process_id in _parents():
        variables = _environment(process_id)
        if f"{MARK}={job}".encode() in variables and f"{START}={start}".encode() not in variables:
            found.append(process_id)
    return found


def _environment(process_id: int) -> list[bytes]:
    try:
        return Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # another user's, or it has just ended


def _parents() -> dict[int, int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(
                Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            )
        except OSError:
            continue  # it has just ended
    return parents
