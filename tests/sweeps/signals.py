"""Stop runs at random moments, start them again, and compare what comes out with a run that was never stopped.

`python -m tests.sweeps.signals --count 50 --seed 0` makes real launches by `deepspeed` on two ranks. Each gets one
signal, at a random moment from its start to after its end, to a random one of its processes; then the run is started
again with `--resume auto`, until it is complete. After every launch all its checkpoints are read and their digests
compared; at the end metrics, weights, optimizer and random generators have to be those of the straight run.

Exit code 0: no run lost, no checkpoint damaged, no process left.
"""

import argparse
import io
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.verify import problem_of
from tests.distributed.tiny_run import rows_of, without_times, write_inputs
from tests.signalled import Ended, Shot, launch

STEPS = 150
TARGETS = ("runner", "launch", "rank0", "rank1")
MOST_STOPS = 4
"""Of one run; after them it is let go to its end."""
ASKED = {75, 130}
STARTING = {128 + signal.SIGTERM, 256 - signal.SIGTERM}
"""Before the first update; the second when a rank had not come to its own handler yet."""
FILES = ("--ds_config", "engine.json", "--config", "run.json", "--resume", "auto", "--steps", str(STEPS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="signals to send")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    problems: list[str] = []
    outcomes: Counter[str] = Counter()
    sent = runs = 0
    with tempfile.TemporaryDirectory(prefix="signals-") as name:
        folder = Path(name)
        write_inputs(
            folder,
            {"zero_optimization": {"stage": 2}},
            {
                "logging": {"every_steps": 1},
                "data": {"workers": 1},
                "evaluation": {"every_steps": 10, "at_end": True},
                "checkpoints": {"every_steps": 7, "at_end": True, "keep_last": 3},
            },
        )
        straight = launch(folder, "deepspeed", [*FILES, "--output", "straight"])
        assert straight.code == 0, straight.output
        print(f"straight run: {straight.wall_s:.1f} s", flush=True)
        while sent < options.count:
            output = f"run-{runs}"
            runs += 1
            sent += one_run(folder, output, straight, draw, options.count - sent, outcomes, problems)
            shutil.rmtree(folder / output, ignore_errors=True)
    print("\n".join(f"{count:4d} x {what}" for what, count in sorted(outcomes.items())))
    print(f"{sent} signals to {runs} runs; {len(problems)} problems")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


def one_run(
    folder: Path,
    output: str,
    straight: Ended,
    draw: random.Random,
    most: int,
    outcomes: Counter[str],
    problems: list[str],
) -> int:
    """Start a run, stop it and start it again until it is complete; returns how many signals were sent."""
    sent, launches, wall_s = 0, 0, straight.wall_s
    while True:
        shot = random_shot(draw, wall_s, newest(folder / output)) if sent < min(MOST_STOPS, most) else None
        ended = launch(folder, "deepspeed", [*FILES, "--output", output], shot)
        launches += 1
        where = f"{output}, launch {launches}, {shot}, code {ended.code}"
        print(f"{where}, after {ended.shot_s and round(ended.shot_s, 2)} s", flush=True)
        if shot is not None and ended.shot_s is not None:
            sent += 1
            outcomes[f"{phase(ended)}, {shot.target}: code {ended.code}"] += 1
        if found := trouble(folder / output, ended, shot):
            problems.append(f"{where}: {found}\n{ended.output}")
        if ended.shot_s is None:
            wall_s = ended.wall_s  # the machine may be busier than it was
        if ended.code == 0 and is_complete(folder / output):
            break
        if launches > 3 * MOST_STOPS:
            problems.append(f"{where}: the run does not come to its end")
            return sent
    if difference := compare(folder, output):
        problems.append(f"{output}: {difference}")
    return sent


def random_shot(draw: random.Random, wall_s: float, done: int) -> Shot:
    """Half of them at any time from the start to after the end, the others soon after a random update.

    Args:
        wall_s: how long a launch takes that is not stopped.
        done: updates that are done already.
    """
    target = draw.choice(TARGETS)
    if draw.random() < 0.5:
        return Shot(target, delay_s=draw.uniform(0, 1.1 * wall_s))
    return Shot(target, after=f"step {draw.randint(done + 1, STEPS)}/{STEPS}  loss", delay_s=draw.uniform(0, 0.06))


def newest(folder: Path) -> int:
    """Updates behind the newest checkpoint; the one after the last update is not counted."""
    steps = [int(path.name[-8:]) for path in (folder / "checkpoints").glob("step-*")]
    return min(max(steps, default=0), STEPS - 1)


def phase(ended: Ended) -> str:
    """When the signal came, by what the output says."""
    if "done: " in ended.output:
        return "too late"
    if f"/{STEPS}  loss" in ended.output or "stopped after update" in ended.output:
        return "training"
    return "starting"


def trouble(folder: Path, ended: Ended, shot: Shot | None) -> str | None:
    """What is wrong after a launch."""
    if ended.left:
        return f"processes {ended.left} were left"
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    damaged = [found for path in checkpoints if (found := problem_of(path, contents=True))]
    if damaged:
        return f"damaged: {damaged}"
    signalled = shot is not None and ended.shot_s is not None
    # the first codes of a process that ended before Python ran the hook or the rank's first line
    at_once = {-signal.SIGTERM, *STARTING} if phase(ended) == "starting" else set()
    allowed = {0, *ASKED, *at_once} if signalled else {0}
    if ended.code not in allowed:
        return f"exit code {ended.code}"
    if "Traceback" in ended.output:
        return "a traceback"
    return None


def is_complete(folder: Path) -> bool:
    """Whether the last update is in a checkpoint."""
    return (folder / "checkpoints" / f"step-{STEPS:08}").is_dir()


def compare(folder: Path, output: str) -> str | None:
    """How a run differs from the straight one."""
    if without_times(rows_of(folder, output)) != without_times(rows_of(folder, "straight")):
        return "other metrics"
    ours, theirs = (folder / name / "checkpoints" / f"step-{STEPS:08}" for name in (output, "straight"))
    one, other = open_checkpoint(ours), open_checkpoint(theirs)
    keys = list(one.keys())
    if keys != list(other.keys()):
        return "other tensors"
    differing = [key for key in keys if not torch.equal(one.read(key), other.read(key))]
    if differing:
        return f"tensors differ: {differing}"
    if json.dumps(one.shared, sort_keys=True) != json.dumps(other.shared, sort_keys=True):
        return "other counters"
    for rank in range(2):
        if packed(one.own(rank)) != packed(other.own(rank)):
            return f"other random generators on rank {rank}"
    return None


def packed(value: Any) -> bytes:
    """Tensors and plain types as bytes, to be compared."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
