"""A model that one rank cannot hold: it fails plainly on one, and trains on several under the same limit.

`python -m tests.sweeps.memory_limit` measures the address space of a tiny run, allows every process that and two thirds
of what the large model needs beside it (`ulimit -v`), and starts the same configuration on 1, 2 and 4 ranks: divided
by tensor parallelism, by pipeline stages, and by both.

Exit code 0: one rank ended with the line that names what takes less, all others trained, with equal losses.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from largetrain.config.load import load
from tests.distributed.tiny_run import write_inputs
from tests.ranks import CPU_ONLY, ONE_THREAD

LARGE = {"style": "llama", "layers": 6, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn_hidden": 2752, "seq_len": 16}
TINY = {**LARGE, "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn_hidden": 64}
BYTES_PER_PARAMETER = 20  # fp32: weight, gradient, its copy in the bucket, Adam's two moments
SHARE = 2 / 3  # of what the large model needs: more than half of it, so that two ranks have room
CASES = {
    "one rank": (1, ()),
    "tensor 2": (2, ("parallel.tensor_parallel=2",)),
    "stages 2": (2, ("parallel.pipeline_stages=2",)),
    "tensor 4": (4, ("parallel.tensor_parallel=4",)),
    "tensor 2 x stages 2": (4, ("parallel.tensor_parallel=2", "parallel.pipeline_stages=2")),
}
LINE = "has no memory left"
LOSS = re.compile(r"step 2/2 +loss ([\d.]+)")


@dataclass
class Ended:
    code: int
    output: str
    peak_kib: int
    """Largest address space of one of the ranks."""


def start(folder: Path, ranks: int, model: dict, sets: Sequence[str], limit_kib: int | None) -> Ended:
    """Train two updates by a real launch, each process limited in its address space."""
    write_inputs(
        folder,
        {
            "train_micro_batch_size_per_gpu": 1,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
            "zero_optimization": {"stage": 0},
        },
        {"model": {**model, "dropout": 0.0}, "logging": {"tensorboard": False, "every_steps": 1}},
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "largetrain", "--ds_config", "engine.json", "--config", "run.json", "--steps", "2"),
        *("--output", "out"),
        *(("--set", *sets) if sets else ()),
    ]
    limited = ["bash", "-c", f'ulimit -v {limit_kib or "unlimited"}; exec "$@"', "bash", *command]
    # arenas reserve address space that nobody uses
    env = {**os.environ, **CPU_ONLY, **ONE_THREAD, "MALLOC_ARENA_MAX": "1"}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        limited, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peaks = [0]
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, peaks, done))
    watcher.start()
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        done.set()
        watcher.join()
    return Ended(process.returncode, output, peaks[0])


def _watch(launcher: int, peaks: list[int], done: threading.Event) -> None:
    while not done.wait(0.05):
        for pid in _children(launcher):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:  # it has ended in the meantime
                continue
            if (found := re.search(r"VmPeak:\s+(\d+) kB", status)) is not None:
                peaks[0] = max(peaks[0], int(found[1]))


def _children(pid: int) -> list[str]:
    """Processes that any thread of a process has started."""
    found: list[str] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += task.read_text().split()
        except OSError:  # the thread has ended in the meantime
            continue
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"some of: {', '.join(CASES)}")
    chosen = parser.parse_args(argv).cases or list(CASES)
    problems, losses = [], {}
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        folder = Path(name)
        tiny = start(folder / "tiny", 1, TINY, (), None)
        assert tiny.code == 0 and tiny.peak_kib > 2**20, tiny
        needed_kib = parameters(LARGE) * BYTES_PER_PARAMETER // 1024
        limit_kib = tiny.peak_kib + int(SHARE * needed_kib)
        print(
            f"a tiny run takes {tiny.peak_kib / 2**20:.2f} GiB of address space, the large model "
            f"{needed_kib / 2**20:.2f} GiB more; every process is allowed {limit_kib / 2**20:.2f} GiB"
        )
        for case in chosen:
            ranks, sets = CASES[case]
            ended = start(folder / case.replace(" ", "-"), ranks, LARGE, sets, limit_kib)
            loss = LOSS.search(ended.output)
            print(f"{case}: exit code {ended.code}, {ended.peak_kib / 2**20:.2f} GiB, loss {loss[1] if loss else '-'}")
            if ranks == 1:
                told = [line for line in ended.output.splitlines() if LINE in line]
                print(*told, sep="\n")
                if ended.code == 0 or len(told) != 1 or "parallel.pipeline_stages" not in told[0]:
                    problems.append(f"{case}: did not fail with one line of advice\n{ended.output}")
            elif ended.code != 0 or loss is None:
                problems.append(f"{case}: did not train\n{ended.output}")
            else:
                losses[case] = loss[1]
    if len(set(losses.values())) > 1:
        problems.append(f"losses differ: {json.dumps(losses)}")
    print(*problems, f"{len(problems)} problems", sep="\n")
    return int(bool(problems))


def parameters(model: dict) -> int:
    """Of the built-in decoder of these sizes."""
    decoder = load(None, None, [f"model.{key}={value}" for key, value in model.items()]).decoder
    assert decoder is not None
    return decoder.parameter_count()


if __name__ == "__main__":
    sys.exit(main())
