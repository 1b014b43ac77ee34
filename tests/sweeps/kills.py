"""Kill ranks and launchers as `kill -9` does, start the run again, and compare it with the run that never was killed.

    python -m tests.sweeps.kills [--seed N] [--only WORD ...]

* points: each of two ranks at every fault point of a save (the first, a later one that prunes, the last), asynchronous
  and synchronous;
* changes: each rank before every change to the names in the checkpoint folder, marks of the best one included;
* moments: one rank or both, up to three times per run, at random moments of slow writes while training goes on;
* launches: `deepspeed`, the process below it, torchrun's agent, and ranks below them, in real launches.

After each kill every checkpoint folder has to be whole and hold, to the bit, the state of the straight run after that
update; none that was written may be lost; ranks that live have to end by themselves. At the end updates, metrics,
weights, optimizer, random generators and the names in the checkpoint folder have to be those of the straight run.

Exit code 0: nothing corrupted, no run lost, no process and no shared memory left. Ten minutes on two idle cores; CI
runs a core (tests/distributed/test_kills.py).
"""

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from largetrain.checkpoint.faults import POINTS
from largetrain.checkpoint.folder import all_checkpoints
from largetrain.checkpoint.verify import problem_of
from tests.distributed.dying import (
    RANKS,
    SAVES,
    TOO_LATE,
    Death,
    Kind,
    differing,
    killed_and_resumed,
    make_kind,
    random_deaths,
)
from tests.distributed.tiny_run import rows_of, without_times, write_inputs
from tests.ranks import SHM
from tests.signalled import Shot, launch

SOURCES = Path(__file__).parents[2] / "largetrain"
FIRST, LATER, LAST = 2, 6, 8
RUNS_OF_MOMENTS = 12
LAUNCH_STEPS = 60
SHOTS = (
    ("deepspeed", "runner", "step 3/"),
    ("deepspeed", "launch", "step 9/"),
    ("torchrun", "runner", "step 12/"),
    ("deepspeed", "rank1", "step 16/"),
    ("torchrun", "rank0", "step 8/"),
)
Cell = tuple[Kind, list[Death]]


def points_in_source() -> set[str]:
    """Names in `fault(...)` and where its point is given to `write_file`, as the source has them."""
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py") if path.name != "faults.py")
    named = set(re.findall(r'\bfault\("([^"]+)"\)', text))
    return named | {point for point in POINTS if f'"{point}"' in text}


def unreached(kinds: Sequence[Kind]) -> set[str]:
    """Fault points that are listed or in the source, but that no save came past: cells that would be missing."""
    reached = {name for kind in kinds for trace in kind.traces for _, name in trace.points}
    return (points_in_source() | set(POINTS)) - reached


def at_points(kind: Kind, steps: Sequence[int] = (FIRST, LATER, LAST)) -> Iterator[Cell]:
    """Every rank at every point that it comes to in the saves of these steps."""
    for step in steps:
        for rank in range(RANKS):
            names = [name for at, name in kind.traces[rank].points if at == step]
            yield from ((kind, [Death(step, (rank,), point=name)]) for name in dict.fromkeys(names))


def at_changes(kind: Kind) -> Iterator[Cell]:
    """Every rank before every change to names within a later save."""
    for rank in range(RANKS):
        count = sum(step == LATER for step, _ in kind.traces[rank].changes)
        yield from ((kind, [Death(LATER, (rank,), change=change)]) for change in range(1, count + 1))


def at_moments(kinds: Sequence[Kind], draw: random.Random) -> Iterator[Cell]:
    for index in range(RUNS_OF_MOMENTS):
        kind = kinds[index % len(kinds)]
        yield kind, random_deaths(kind, draw, 3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="cells whose line holds all these words")
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    memory_before, began = set(SHM.iterdir()), time.monotonic()
    problems: list[str] = []
    kills = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        for title, cell in cells(folder, draw, problems):
            if not all(word in title for word in options.only):
                continue
            started = time.monotonic()
            found, told = killed_and_resumed(*cell) if cell else one_launch(folder / "launches", title)
            kills += (len(cell[1]) if cell else 1) - told.count(TOO_LATE)
            if cell:
                shutil.rmtree(cell[0].folder / "out")
            print(
                f"{title}: {told}: {'; '.join(found) or 'as the straight run'} ({time.monotonic() - started:.1f} s)",
                flush=True,
            )
            problems += [f"{title}: {problem}" for problem in found]
    problems += [
        f"left in {SHM}: {path.name}" for path in sorted(set(SHM.iterdir()) - memory_before) if is_orphan(path)
    ]
    corrupted = sum(bool(re.search(r": (corrupted|half-written): ", problem)) for problem in problems)
    lost = sum(": lost: " in problem for problem in problems)
    print(
        f"{kills} kills: {corrupted} corrupted, {lost} lost, {len(problems)} problems; {time.monotonic() - began:.0f} s"
    )
    return 1 if problems else 0


def cells(folder: Path, draw: random.Random, problems: list[str]) -> Iterator[tuple[str, Cell | None]]:
    """All cells with their titles, the straight runs made on the way; None: a launch, which the title names."""
    kinds = {}
    for word, asynchronous in (("asynchronous", "true"), ("synchronous", "false")):
        kinds[word] = make_kind(folder / word, [f"checkpoints.asynchronous={asynchronous}"])
    if missing := unreached(list(kinds.values())):
        problems.append(f"no save comes to {sorted(missing)}")
    for word, kind in kinds.items():
        yield from ((f"points, {word}, {deaths[0]}", (kind, deaths)) for kind, deaths in at_points(kind))
    for kind, deaths in at_changes(kinds["synchronous"]):
        [death] = deaths
        changes = [what for step, what in kind.traces[death.ranks[0]].changes if step == death.step]
        what = changes[death.change - 1].replace(str(kind.folder / "straight" / "checkpoints"), "").replace(" /", " ")
        yield f"changes, {death} ({what})", (kind, deaths)
    slow = [
        make_kind(folder / "slow", slow=True),
        make_kind(folder / "slow-ddp", ["data.workers=1"], slow=True, backend="ddp"),
    ]
    for kind in slow:
        if not all(kind.traces[0].updates.get(step) for step in SAVES[:-1]):
            problems.append(f"no training while writes go on: {kind.traces[0].updates}")
    for kind, deaths in at_moments(slow, draw):
        yield f"moments, {kind.folder.name}, {'; '.join(map(str, deaths))}", (kind, deaths)
    for launcher, target, after in SHOTS:
        yield f"launches, {launcher}, {target}, {after}", None


def is_orphan(path: Path) -> bool:
    """Whether a file of shared memory is one of torch or DeepSpeed whose process is gone."""
    owner = re.match(r"torch_(\d+)_|deepspeed_allreduce_buffer", path.name)
    return owner is not None and path.exists() and not (owner.group(1) and Path("/proc", owner.group(1)).exists())


# ---------------------------------------------------------------- real launches


def one_launch(folder: Path, title: str) -> tuple[list[str], str]:
    """Kill a process of a launch, start it again, and compare."""
    _, launcher, target, after = title.split(", ")
    words = ["--ds_config", "engine.json", "--config", "run.json", "--resume", "auto", "--steps", str(LAUNCH_STEPS)]
    if not folder.exists():
        write_inputs(
            folder,
            {"zero_optimization": {"stage": 2}},
            {
                "logging": {"every_steps": 1},
                "data": {"workers": 1},
                "evaluation": {"every_steps": 7, "at_end": True},
                "checkpoints": {"every_steps": 2, "at_end": True, "keep_last": 0},
            },
        )
        straight = launch(folder, "deepspeed", [*words, "--output", "straight"])
        assert straight.code == 0, straight.output
    ended = launch(folder, launcher, [*words, "--output", "out"], Shot(target, signal.SIGKILL, after=after))
    found = [] if ended.code not in (0, None) else [f"exit code {ended.code} after the kill"]
    found += [f"processes {ended.left} were left"] if ended.left else []
    found += _wrong(folder)
    steps = len(all_checkpoints(folder / "out" / "checkpoints"))
    resumed = launch(folder, launcher, [*words, "--output", "out"])
    if resumed.code != 0:
        found.append(f"exit code {resumed.code} of the second launch\n{resumed.output}")
    found += [f"processes {resumed.left} were left"] if resumed.left else []
    found += _wrong(folder)
    checkpoints = folder / "out" / "checkpoints"
    if len(all_checkpoints(checkpoints)) != LAUNCH_STEPS // 2 or list(checkpoints.glob("partial-*")):
        found.append(f"other checkpoints: {sorted(path.name for path in checkpoints.iterdir())}")
    if without_times(rows_of(folder)) != without_times(rows_of(folder, "straight")):
        found.append("other metrics")
    shutil.rmtree(folder / "out")
    return found, f"exit code {ended.code}, {steps} checkpoints"


def _wrong(folder: Path) -> list[str]:
    found = []
    for path in all_checkpoints(folder / "out" / "checkpoints"):
        if problem := problem_of(path, contents=True):
            found.append(f"half-written: {problem}")
        elif difference := differing(path, folder / "straight" / "checkpoints" / path.name):
            found.append(f"corrupted: {path.name}: {difference}")
    return found


if __name__ == "__main__":
    sys.exit(main())
