"""Loader processes outlive signals that are meant for their rank, and end with it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from largetrain.data.loader import TrainStream
from largetrain.data.order import SampleOrder
from tests.unit.data.helpers import Numbers, batch_of


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def stream():
    made = TrainStream(Numbers(64), SampleOrder(64, 1, 1), batch_of(), 0, workers=1, start_method="fork")
    yield made
    made.close()


def test_signals_of_others_are_passed_over(stream):
    worker = int(next(stream)["pid"])
    assert worker != os.getpid()
    for name in ("TERM", "INT", "USR1", "HUP"):
        subprocess.run(["kill", f"-{name}", str(worker)], check=True)
    time.sleep(0.3)
    later = [int(next(stream)["pid"]) for _ in range(8)]  # more than were prefetched
    assert later == [worker] * 8


def test_the_parent_ends_it(stream):
    worker = int(next(stream)["pid"])
    os.kill(worker, signal.SIGTERM)
    assert wait_until(lambda: not running(worker))


ORPHAN = """
import os, signal, threading, time
from largetrain.data.loader import TrainStream
from largetrain.data.order import SampleOrder
from largetrain.engine.signals import descendants
from tests.unit.data.helpers import Hangs, batch_of

stream = TrainStream(Hangs(), SampleOrder(8, 1, 1), batch_of(), 0, workers=1, start_method="fork")
threading.Thread(target=lambda: next(stream), daemon=True).start()
time.sleep(2)
print(descendants(os.getpid())[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_without_its_parent_anybody_ends_it():
    """A dataset that hangs would keep the process for ever: it never looks whether its parent is there."""
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.wait(timeout=20)
    assert running(worker)
    os.kill(worker, signal.SIGTERM)
    assert wait_until(lambda: not running(worker))
    parent.stdout.close()


def test_signals_wait_while_processes_start(stream, monkeypatch):
    """One that comes before the new process is set up would end it; here it comes through afterwards."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        plain = type(stream._loader).__iter__

        def starting(loader):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == []
            return plain(loader)

        monkeypatch.setattr(type(stream._loader), "__iter__", starting)
        next(stream)
        assert seen == [signal.SIGUSR1]
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    finally:
        signal.signal(signal.SIGUSR1, before)
