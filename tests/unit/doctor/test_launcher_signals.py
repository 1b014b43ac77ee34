"""What the launcher hook makes of signals, in small stand-ins for the launcher's processes and their ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from largetrain.doctor import launcher_hook as hook

ROOT = Path(__file__).parents[3]
LAUNCHER = """
import signal, subprocess, sys, time
from largetrain.doctor import launcher_hook as hook
hook.SECOND_S, hook.FORCE_S, hook.STRAGGLER_S = 0.3, 0.3, 0.6
hook.relay_signals({module!r})

def sigkill_handler(number, frame):  # DeepSpeed's, which answers 1
    sys.exit(1)

if {module!r} == hook.LAUNCH:
    signal.signal(signal.SIGTERM, sigkill_handler)
    signal.signal(signal.SIGINT, sigkill_handler)
ranks = [subprocess.Popen([sys.executable, "-c", program, "largetrain"]) for program in {ranks!r}]
time.sleep(0.2)
print("ready", flush=True)
for rank in ranks:
    rank.wait()
sys.exit(next((rank.returncode for rank in ranks if rank.returncode), 0))
"""
SAVES = """
import os, signal, sys, time
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    os.write(1, (signal.Signals(number).name + "\\n").encode())
    time.sleep({save_s})
    sys.exit({code})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, save)
os.write(1, b"rank\\n")
time.sleep(60)
"""


def start(ranks, module=hook.LAUNCH, **variables):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(module=module, ranks=ranks)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert sorted(process.stdout.readline() for _ in range(len(ranks) + 1)) == ["rank\n"] * len(ranks) + ["ready\n"]
    return process


def end(process):
    out = process.communicate(timeout=30)[0]
    return process.returncode, out.split()


@pytest.mark.parametrize("module", [hook.LAUNCH, hook.RUNNER])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75), (signal.SIGHUP, 75)]
)
def test_all_ranks_get_the_signal_at_once_and_their_code_is_the_answer(module, number, code):
    ranks = [SAVES.format(save_s=0.5, code=code)] * 2
    process = start(ranks, module)
    begin = time.monotonic()
    process.send_signal(number)
    assert end(process) == (code, [number.name, number.name])
    assert time.monotonic() - begin < 5


def test_a_signal_that_comes_on_two_ways_is_passed_on_once():
    """Ctrl-C reaches every process of a terminal's group, and once more from the process above."""
    process = start([SAVES.format(save_s=0.6, code=130)])
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.03)
    assert end(process) == (130, ["SIGINT"])


def test_a_second_signal_ends_ranks_that_do_not_end_themselves():
    process = start([SAVES.format(save_s=60, code=75)] * 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end(process) == (137, ["SIGTERM", "SIGTERM"])


@pytest.mark.parametrize(("first", "code"), [(75, 75), (1, 1)])
def test_ranks_that_outlive_another_by_far_are_ended(first, code):
    process = start([SAVES.format(save_s=0, code=first), SAVES.format(save_s=60, code=75)])
    process.send_signal(signal.SIGTERM)
    assert end(process) == (code, ["SIGTERM", "SIGTERM"])


@pytest.mark.parametrize("written", ["0.5", "half a minute"])
def test_the_grace_period(written):
    process = start([SAVES.format(save_s=1.5, code=75)], LARGETRAIN_GRACE_S=written)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == (137 if written == "0.5" else 75)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_there_are_ranks(number):
    program = "from largetrain.doctor import launcher_hook as hook; hook.relay_signals(hook.LAUNCH); print('ready'); "
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", program + "import time; time.sleep(60)"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert end(process) == (128 + number, [])


@pytest.mark.parametrize("code", [0, 3])
def test_after_the_ranks(code):
    """What they have answered holds, also while Python takes itself down."""
    program = f"""
import atexit, os, signal, subprocess, sys
from largetrain.doctor import launcher_hook as hook
if sys.argv[1] == "late":
    atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), sys.stdout.write("past")))
hook.relay_signals(hook.LAUNCH)
code = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit({code})", "largetrain"]).wait()
if sys.argv[1] == "soon":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""
    for moment, told in (("soon", ""), ("late", "past")):
        words = [sys.executable, "-c", program, moment]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, told, "")


def test_a_killed_process_below_is_no_success():
    """DeepSpeed's `deepspeed` answers 0 then."""
    program = """
import subprocess, sys
from largetrain.doctor import launcher_hook as hook
hook.relay_signals(hook.RUNNER)
subprocess.Popen([sys.executable, "-c", sys.argv[1], {name!r}]).wait()
"""
    killed = "import os; os.kill(os.getpid(), 9)"
    codes = [
        subprocess.run([sys.executable, "-c", program.format(name=name), killed], cwd=ROOT, check=False).returncode
        for name in ("largetrain", "another program")
    ]
    assert codes == [137, 0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--num_gpus 2 --module largetrain --steps 1", True),
        ("--num_gpus=2 --mod largetrain", True),
        ("--world_info=abc --master_port=1 --module --save_pid 17 --log_level=warning largetrain --x", True),
        ("--module another", False),
        ("--module another largetrain", False),
        ("largetrain", False),
        ("train.py --module largetrain", False),
        ("--num_gpus 2 --module", False),
        ("", False),
    ],
)
def test_whose_launch_it_is(arguments, expected):
    assert hook.starts_largetrain(arguments.split()) == expected


INSTALL = """
import signal, sys
from largetrain.doctor import launcher_hook as hook
hook.KNOWN_LAUNCHERS = hook.KNOWN_LAUNCHERS if {known} else {{}}
sys.argv, sys.orig_argv = ["-m", *{arguments!r}.split()], ["python", "-u", "-m", {module!r}]
hook.install()
hook.install()
relays = [isinstance(signal.getsignal(number), hook.Relay) for number in hook.RELAYED]
print(*relays)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "known", "relayed"),
    [
        (hook.LAUNCH, "--world_info=a --module --log_level=info largetrain", True, True),
        (hook.RUNNER, "--num_gpus 2 -m largetrain", True, True),
        (hook.RUNNER, "--num_gpus 2 -m largetrain", False, False),
        (hook.RUNNER, "--num_gpus 2 -m another", True, False),
        (hook.LAUNCH, "--world_info=a --module another", True, False),
        (hook.LAUNCH, "--world_info=a train.py", True, False),
    ],
)
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_only_launches_of_largetrain_by_a_known_launcher_are_touched(module, arguments, known, relayed, accelerator):
    program = INSTALL.format(module=module, arguments=arguments, known=known)
    environment = {**os.environ, "DS_ACCELERATOR": accelerator}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == ([str(relayed)] * 4, "")
