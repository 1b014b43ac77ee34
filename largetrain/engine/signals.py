"""What asks a rank to stop: signals, a time limit, a launcher that is no longer there.

Standard library only, so that signals can be taken before torch is imported.

Python runs signal handlers in the main thread, between two of its own steps: never while that thread waits in a
collective for a rank that is gone. So a thread of its own takes the signals here, and a second one always stops the
process.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from enum import IntFlag
from pathlib import Path
from types import FrameType

PROC = Path("/proc")
SECOND_S = 3.0
"""A signal so soon after the first is the same request, passed on once more by a launcher or sent to a whole group."""
_IMPORTED = time.monotonic()


class Stop(IntFlag):
    """Why a run is to stop; ranks exchange these bits."""

    SIGTERM = 1
    SIGUSR1 = 2
    SIGINT = 4
    TIME = 8
    """`--max-minutes` is over."""
    LAUNCHER = 16
    """The process that started this rank has died."""
    SIGHUP = 32
    """The terminal was closed."""
    NOT_A_STOP = 64
    """First bit that is free for other questions."""


FLAGS = {number: Stop[number.name] for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}


class StopRequests:
    """The signals that this process was sent, and the launcher that it lost.

    Before `begin` there is nothing to save, and the first one ends the process with 128 + its number. After that the
    first one is only remembered; one of the same kind at least `SECOND_S` later ends the process. SIGUSR1, which batch
    systems send as a warning ahead of SIGTERM, is a kind of its own; the others are one.

    Args:
        speaks: tell on standard error what a signal will lead to; one rank should.
    """

    def __init__(self, speaks: bool = True):
        self.asked = Stop(0)
        self._launcher = LauncherWatch()
        self._speaks, self._begun, self._ended = speaks, False, False
        self._first_at: dict[bool, float] = {}

    def flags(self) -> int:
        """What was asked for so far, and whether the launcher is gone."""
        return self.asked | self._launcher.flags()

    def begin(self) -> None:
        """From now on there is something to save, and somebody who looks at `flags`."""
        self._begun = True

    def end(self) -> None:
        """Nobody looks any more: all is saved, and the process is about to end by itself."""
        self._ended = True

    def take(self, number: int) -> None:
        """One signal has arrived; called in the thread that waits for them."""
        name = signal.Signals(number).name
        if not self._begun:
            self._leave(number, f"stopped by {name} before the first update: nothing to save")
        now = time.monotonic()
        if now - self._first_at.setdefault(number == signal.SIGUSR1, now) >= SECOND_S:
            self._leave(number, f"{name} once more: stopped at once")
        if not self.asked and not self._ended:
            self._tell(f"{name}: this update is finished and saved, then the run stops; once more stops it at once")
        self.asked |= FLAGS[signal.Signals(number)]

    def _tell(self, line: str) -> None:
        if self._speaks:
            os.write(2, f"largetrain: {line}\n".encode())  # a thread must not wait for sys.stderr's lock

    def _leave(self, number: int, why: str) -> None:
        self._tell(why)
        for process_id in descendants(os.getpid()):
            try:
                os.kill(process_id, signal.SIGTERM)
            except OSError:
                continue  # it has just ended
        os._exit(128 + number)  # the main thread may be anywhere


_requests: StopRequests | None = None


def take_signals(speaks: bool = True) -> StopRequests:
    """Let this process's signals go to the `StopRequests` returned, from now until it ends.

    Signals that are ignored stay ignored (nohup, background jobs of a shell). Outside of the main thread, where
    Python sets no handlers, everything stays as it is.
    """
    global _requests
    first, _requests = _requests is None, StopRequests(speaks)
    if threading.current_thread() is not threading.main_thread():
        return _requests
    if first:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=_leave_to_default)
        atexit.register(_pass_over)
    for number in FLAGS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _noted)
    return _requests


def _noted(number: int, frame: FrameType | None) -> None:
    """The number is in the pipe already."""


def _watch(reader: int) -> None:
    while numbers := os.read(reader, 64):
        for number in numbers:
            if number in list(FLAGS) and _requests is not None:
                _requests.take(number)


def _leave_to_default() -> None:
    """A forked child has no thread that waits, and must not write to its parent's pipe."""
    signal.set_wakeup_fd(-1)
    for number in FLAGS:
        if signal.getsignal(number) is _noted:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _pass_over() -> None:
    """Called last: Python is about to put the system's handlers back, which would kill a process that has all done."""
    for number in FLAGS:
        if signal.getsignal(number) is _noted:
            signal.signal(number, signal.SIG_IGN)


def time_limit(max_minutes: float | None, age_s: Callable[[], float] | None = None) -> Callable[[], int]:
    """The flags of a limit on the time since this process started; None: no limit."""
    age = age_s or process_age_s

    def flags() -> int:
        return Stop.TIME if max_minutes is not None and age() >= 60 * max_minutes else 0

    return flags


def process_age_s() -> float:
    """Seconds since this process started; where the system does not tell, since this module was imported."""
    try:
        started = int(_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return time.monotonic() - _IMPORTED


class LauncherWatch:
    """Notices when a launcher above this rank dies: `deepspeed` and the process between, or torchrun.

    Killed by force, they leave their ranks training on, and whatever comes after starts the run once more.
    """

    def __init__(self) -> None:
        self.above = _launchers_above(os.getpid())
        """The processes to watch, nearest first; none without a launcher."""

    def flags(self) -> int:
        """`Stop.LAUNCHER` once one of them is gone. Takes a few microseconds."""
        process_id = os.getpid()
        for parent in self.above:
            if parent_of(process_id) != parent:
                return Stop.LAUNCHER
            process_id = parent
        return 0


def _launchers_above(process_id: int) -> list[int]:
    """Ancestors up to the topmost launcher among them; a shell in between belongs to it, one above it does not."""
    chain: list[int] = []
    launchers = 0
    while (process_id := parent_of(process_id)) > 1:
        chain.append(process_id)
        if _is_launcher(process_id):
            launchers = len(chain)
    return chain[:launchers]


def _is_launcher(process_id: int) -> bool:
    try:
        words = (PROC / str(process_id) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:5]
    except OSError:
        return False
    if "python" not in os.path.basename(words[0]):
        return False
    modules = ("deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run")
    commands = ("deepspeed", "deepspeed.pt", "ds", "torchrun")
    return any(word in modules or os.path.basename(word) in commands for word in words[1:])


def parent_of(process_id: int) -> int:
    """Its parent's number; 0 when there is no such process."""
    if process_id == os.getpid():
        return os.getppid()
    try:
        return int(_stat(process_id)[1])
    except OSError:
        return 0


def descendants(process_id: int) -> list[int]:
    """Processes started by it, directly or not; none where there is no /proc."""
    if not PROC.is_dir():
        return []
    parents = {int(entry.name): parent_of(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit()}
    found, known = [], {process_id}
    while new := [child for child, parent in parents.items() if parent in known and child not in known]:
        known.update(new)
        found += new
    return found


def _stat(process_id: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold blanks: state, parent, ..."""
    descriptor = os.open(f"/proc/{process_id}/stat", os.O_RDONLY)  # looked at in every update
    try:
        return os.read(descriptor, 4096).decode(errors="replace").rpartition(")")[2].split()
    finally:
        os.close(descriptor)
