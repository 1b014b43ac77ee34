"""Real launches, as a person types them: exit codes, what is printed and how often, and that nothing is left behind.

Few, for each starts an interpreter per rank; what can be tested on forked ranks is in tests/distributed.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.tiny_run import write_inputs

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MARK = "LARGETRAIN_TEST_MARK"
LIMIT_S = 150  # on a busy machine; seconds on an idle one
FAILING_MODEL = '''
import os

import torch
from torch import nn


class Failing(nn.Module):
    """Trains, until one rank raises in its third forward pass while the other waits for it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(257, 257)
        self.calls = 0

    def forward(self, input_ids, labels):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 3:
            raise ValueError("the model of rank 1 has had enough")
        logits = self.table(input_ids).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, torch.tensor(labels.numel())


class Samples(torch.utils.data.Dataset):
    def __init__(self, split):
        self.size = 64

    def __len__(self):
        return self.size

    def __getitem__(self, sample):
        tokens = torch.arange(sample, sample + 17)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}
'''


@dataclass
class Launch:
    """An ended launch."""

    code: int
    output: str
    left: list[int]  # processes that outlived it
    shared_memory: set[str]  # files that it left in /dev/shm
    end_s: float | None  # from the last line of a run, or from Ctrl-C, to the end of the launcher

    def count(self, text: str) -> int:
        return self.output.count(text)


def command(launcher, ranks=2):
    """The words in front of largetrain's own arguments, and the port of its rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = sys.executable
    words = {
        "deepspeed": [BIN / "deepspeed", "--num_gpus", ranks, "--master_port", port, "--module", "largetrain"],
        "torchrun": [
            "-m",
            "torch.distributed.run",
            "--master-port",
            port,
            "--nproc-per-node",
            ranks,
            "-m",
            "largetrain",
        ],
        "python": ["-m", "largetrain"],
    }
    return [python, *map(str, words[launcher])], port


def launch(folder, launcher, *arguments, interrupt_at=None, env=None):
    """Run to the end; `interrupt_at`: press Ctrl-C when the output holds this text."""
    words, port = command(launcher)
    mark = uuid.uuid4().hex
    variables = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port), **(env or {})}
    if env is None:
        variables.pop("OMP_NUM_THREADS", None)
    process = subprocess.Popen(
        [*words, *arguments],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # ends what hangs, so that reading its output ends too
    watchdog = threading.Timer(LIMIT_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in marked(mark)])
    watchdog.start()
    lines, ending_at, interrupted = [], None, False
    for line in process.stdout:
        lines.append(line)
        if line.startswith("done:"):
            ending_at = time.monotonic()
        if interrupt_at is not None and not interrupted and interrupt_at in line:
            interrupted, ending_at = True, time.monotonic()
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the foreground group
    code = process.wait(timeout=30)
    ended = time.monotonic()
    watchdog.cancel()
    left = marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    output = "".join(lines)
    sys.stdout.write(output)
    leaked = {path.name for path in Path("/dev/shm").glob(f"*_{port}_*")}
    return Launch(code, output, left, leaked, None if ending_at is None else ended - ending_at)


def marked(mark):
    """Processes that carry the mark of a launch in their environment, zombies aside."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended, or is another user's
    return found


@pytest.fixture
def folder(tmp_path):
    write_inputs(
        tmp_path,
        {"zero_optimization": {"stage": 2}},
        {"logging": {"every_steps": 1, "tensorboard": True}, "checkpoints": {"at_end": True}},
    )
    (tmp_path / "failing.py").write_text(FAILING_MODEL)
    return tmp_path


RUN = ["--ds_config", "engine.json", "--config", "run.json", "--output", "out"]
FAILING = ["--set", "model={target: 'failing:Failing', vocab_size: 257}", "data={target: 'failing:Samples'}"]


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_two_ranks_train_and_leave_nothing_behind(folder, launcher):
    result = launch(folder, launcher, *RUN, "--steps", "3")
    assert result.code == 0
    assert result.left == []
    assert result.shared_memory == set()
    for line in ("step 1/3  loss", "step 3/3  loss", "done: 3 updates", "next: tensorboard"):
        assert result.count(line) == 1
    assert "\r" not in result.output  # plain lines
    assert "Traceback" not in result.output
    assert result.count("deepspeed/runtime") == result.count("[config.py") == 0  # its own chatter is off
    steps = [json.loads(line)["step"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert (folder / "out" / "checkpoints" / "step-00000003" / "manifest.json").exists()
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["batch"]["world_size"] == 2
    threads = config["run"]["runtime"]["threads"]
    assert result.count(f"runtime.threads = {threads} (auto: ") == 1
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2)
    assert result.end_s < 30  # with a launcher that looks once a second; 2-3 s on an idle machine


def test_a_mistake_is_printed_once_and_exits_2(folder):
    result = launch(folder, "deepspeed", *RUN, "--set", "gradient_acumulation_steps=4", "steps=-1")
    assert result.code == 2
    assert result.count("largetrain: 2 mistakes:") == 1
    assert result.count("gradient_acumulation_steps is a key of neither file. Did you mean") == 1
    assert result.count("steps: must be greater than 0, got -1") == 1
    assert "Traceback" not in result.output
    assert result.left == []
    assert not (folder / "out").exists()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_rank_that_raises_ends_all(folder, launcher):
    started = time.monotonic()
    result = launch(folder, launcher, *RUN, *FAILING, "--steps", "1000")
    assert result.code != 0
    assert result.left == []
    assert result.shared_memory == set()
    assert "ValueError: the model of rank 1 has had enough" in result.output
    assert 'failing.py", line' in result.output
    # the other rank, if it is not ended first, says in one line why it stops: no traceback buries the one that matters
    assert result.count("largetrain: this rank stops because another one has ended") <= 1
    assert result.count("[rank0]: Traceback") == 0
    assert "done:" not in result.output
    assert time.monotonic() - started < LIMIT_S
    rows = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1]  # accumulation 2: the third pass is in update 2


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "python"])
def test_ctrl_c_saves_and_ends_everything(folder, launcher):
    """130, as shells have it; torchrun answers 1."""
    sets = ["--set", "data.workers=1"]  # a loader process gets the signal, too, before it is needed once more
    result = launch(folder, launcher, *RUN, *sets, "--steps", "100000", interrupt_at="step 2/100000")
    assert result.left == []
    assert result.shared_memory == set()
    assert result.code == {"python": 130, "deepspeed": 130, "torchrun": 1}[launcher]
    assert result.end_s < 45  # the launchers wait for their ranks; 2-4 s on an idle machine
    [checkpoint] = (folder / "out" / "checkpoints").glob("step-*")
    step = int(checkpoint.name[-8:])
    assert result.count(f"largetrain: stopped after update {step} (interrupted); saved in ") == 1
    if launcher != "torchrun":
        assert "Traceback" not in result.output


def test_one_process_without_a_launcher_and_with_deepspeeds_own_words(folder):
    result = launch(folder, "python", *RUN, "--steps", "2", "--verbose", env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.code == 0
    assert result.count("done: 2 updates") == 1
    assert "[INFO]" in result.output
    assert "runtime.threads = 1 (auto: OMP_NUM_THREADS)" in result.output
    assert re.search(r"step 2/2  loss \d", result.output)
