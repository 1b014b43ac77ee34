"""Signals in loader processes.

Terminals, SLURM, torchrun and DeepSpeed's launcher send a signal to every process of a job at once. A rank then
finishes its update and saves, for which it needs its loader processes: they end when it says so, or when it is gone.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Start loader processes inside: signals wait, there until `leave_signals_to_parent`, here until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*IGNORED, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Called in a loader process: while the parent is there, only its own SIGTERM ends this one."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # blocked in every thread, so that it comes with its sender to the one that waits for it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_await_parent, args=(os.getppid(),), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def _await_parent(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent and os.getppid() == parent:
        pass
    os._exit(0)
