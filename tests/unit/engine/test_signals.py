"""What signals do to a process, each time to a real one; none of them imports torch."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from largetrain.engine import signals
from largetrain.engine.signals import Stop, StopRequests, process_age_s, time_limit

ROOT = Path(__file__).parents[3]
SOON_S = 0.3  # for the thread that takes signals
PROGRAM = """
import os, signal, sys, time
from largetrain.engine import signals
signals.SECOND_S = {second_s}
requests = signals.take_signals()
{body}
"""
BEGUN = "requests.begin(); print('ready', flush=True); time.sleep({for_s}); print(repr(requests.flags()))"


def start(body, second_s=60.0, **options):
    program = PROGRAM.format(second_s=second_s, body=textwrap.dedent(body))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def end(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_before_there_is_anything_to_save_the_first_one_ends_the_process(number):
    process = start("print('ready', flush=True); time.sleep(60)")
    process.send_signal(number)
    told = f"largetrain: stopped by {number.name} before the first update: nothing to save\n"
    assert end(process) == (128 + number, "", told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_afterwards_it_is_remembered_and_its_repetition_passed_over(number):
    process = start(BEGUN.format(for_s=1.0))
    for _ in range(3):  # as launchers and terminals send it together
        process.send_signal(number)
        time.sleep(0.05)
    code, out, err = end(process)
    assert (code, out) == (0, f"{Stop[number.name]!r}\n")
    assert err.startswith(f"largetrain: {number.name}: this update is finished and saved, then the run stops;")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGTERM, signal.SIGINT, True),
        (signal.SIGUSR1, signal.SIGUSR1, True),
        (signal.SIGUSR1, signal.SIGTERM, False),  # SLURM's warning, and then its order
    ],
)
def test_a_second_one_of_its_kind_ends_the_process_at_once(first, second, ends):
    process = start(BEGUN.format(for_s=1.5), second_s=SOON_S)
    for number in (first, second):
        process.send_signal(number)
        time.sleep(2 * SOON_S)
    code, out, err = end(process)
    assert code == (128 + second if ends else 0)
    assert (f"{second.name} once more: stopped at once" in err) == ends
    assert out == ("" if ends else f"{Stop[first.name] | Stop[second.name]!r}\n")


def test_a_second_one_ends_a_process_whose_main_thread_is_stuck_outside_of_python():
    """As in a collective that waits for a rank that is gone; Python's handlers do not run there."""
    body = """
        import ctypes
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        requests.begin()
        libc.pthread_mutex_lock(mutex)
        print("ready", flush=True)
        libc.pthread_mutex_lock(mutex)
    """
    process = start(body, second_s=SOON_S)
    process.send_signal(signal.SIGTERM)
    time.sleep(2 * SOON_S)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def test_at_the_end_of_a_run_the_first_one_changes_nothing():
    process = start(f"requests.begin(); requests.end(); print('ready', flush=True); time.sleep({2 * SOON_S})")
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, "", "")


def test_while_python_takes_itself_down_none_counts():
    """What is registered first is called last."""
    program = """
import atexit, os, signal
from largetrain.engine import signals
atexit.register(lambda: print(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN))
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
signals.take_signals()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_what_is_ignored_stays_ignored():
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}  # as nohup does
    process = start("print('ready', flush=True); time.sleep(0.6)", **ignoring)
    process.send_signal(signal.SIGHUP)
    assert end(process) == (0, "", "")


def test_a_forked_child_has_the_usual_handlers_and_does_not_tell_its_parent():
    body = f"""
        requests.begin()
        child = os.fork()
        if child == 0:
            print("ready", flush=True)
            time.sleep(60)
        time.sleep({SOON_S})
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
        time.sleep({SOON_S})
        print(os.waitstatus_to_exitcode(status), requests.flags())
    """
    assert end(start(body)) == (0, "-15 0\n", "")


def test_the_end_at_once_takes_processes_along():
    body = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"])
        time.sleep(60)
    """
    process = start(body)
    grandchildren = signals.descendants(process.pid)
    assert len(grandchildren) == 1
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143
    deadline = time.monotonic() + 10
    while Path(f"/proc/{grandchildren[0]}").exists() and time.monotonic() < deadline:
        if (Path(f"/proc/{grandchildren[0]}/stat").read_text().rpartition(")")[2].split()[0]) == "Z":
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{grandchildren[0]}").exists()


def test_outside_of_the_main_thread_nothing_is_changed():
    import threading

    before = signal.getsignal(signal.SIGTERM)
    found = []
    thread = threading.Thread(target=lambda: found.append(signals.take_signals()))
    thread.start()
    thread.join()
    assert isinstance(found[0], StopRequests) and found[0].flags() == 0
    assert signal.getsignal(signal.SIGTERM) is before


RANK = """
import sys, time
from largetrain.engine.signals import StopRequests
requests = StopRequests()
print(len(requests._launcher.above), flush=True)
end = time.monotonic() + 60
while not requests.flags() and time.monotonic() < end:
    time.sleep(0.01)
print(requests.flags(), flush=True)
"""
LAUNCHERS = {  # the one below prints its number and becomes the rank's parent
    "deepspeed": (
        "import subprocess, sys; subprocess.run([sys.executable, '-u', 'deepspeed.launcher.launch', {rank!r}])"
    ),
    "deepspeed.launcher.launch": (
        "import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, sys.argv[1]])"
    ),
    "torchrun": (
        "import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, {rank!r}])"
    ),
    "train_all": (
        "import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, {rank!r}])"
    ),
}


@pytest.mark.parametrize(
    ("starter", "watched", "killed"),
    [("deepspeed", 2, "upper"), ("deepspeed", 2, "lower"), ("torchrun", 1, "upper"), ("train_all", 0, "upper")],
)
def test_the_death_of_a_launcher_is_noticed_and_that_of_others_is_not(tmp_path, starter, watched, killed):
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    for name, program in LAUNCHERS.items():
        (tmp_path / name).write_text(program.format(rank=str(rank)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, starter], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    lower = int(process.stdout.readline())
    assert process.stdout.readline() == f"{watched}\n"
    rank_id = signals.descendants(process.pid)[-1]
    os.kill(process.pid if killed == "upper" else lower, signal.SIGKILL)
    if watched:
        assert process.stdout.readline() == f"{int(Stop.LAUNCHER)}\n"
    else:
        time.sleep(SOON_S)
        os.kill(rank_id, signal.SIGKILL)
        assert process.stdout.readline() == ""
    process.stdout.close()
    process.wait(timeout=10)


def test_the_time_limit_counts_from_the_start_of_the_process():
    program = "import time; time.sleep(0.5); from largetrain.engine.signals import *; print(process_age_s())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) < 20
    assert time_limit(None, lambda: 1e9)() == 0
    assert time_limit(2.0, lambda: 119.9)() == 0
    assert time_limit(2.0, lambda: 120.0)() == Stop.TIME
    assert time_limit(process_age_s() / 60 + 1)() == 0
