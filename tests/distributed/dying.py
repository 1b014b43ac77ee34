"""Small runs whose ranks are killed as `kill -9` does it, started again, and compared with the run that never was."""

import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from largetrain.checkpoint import manager as manager_module
from largetrain.checkpoint import retention, writer
from largetrain.checkpoint.folder import (
    PARTIAL,
    all_checkpoints,
    find_checkpoint,
    pointed_at,
    step_folder,
    step_of,
)
from largetrain.checkpoint.manager import CheckpointManager
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.verify import problem_of
from largetrain.compose import AlreadyComplete
from tests.distributed.tiny_run import Outcome, rows_of, train, without_times, write_inputs
from tests.ranks import RankEnd, let_ranks_end, run_ranks

STEPS = 8
SAVES = (2, 4, 6, 8)
RANKS = 2
ENOUGH_S = 20.0
"""Within which a rank has to end after another was killed."""
TOO_LATE = "the run had ended before"
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}
SLOW_CHUNK_BYTES, SLOW_CHUNK_S = 2048, 0.003


@dataclass(frozen=True)
class Death:
    """When ranks are killed.

    Args:
        step: of the save.
        point: of `largetrain.checkpoint.faults`.
        change: or before this change to the names in the checkpoint folder, counted from the start of the save.
        after_s: or so long after the save has begun to write.
        ranks: which.
    """

    step: int
    ranks: tuple[int, ...] = (0,)
    point: str = ""
    change: int = 0
    after_s: float | None = None

    def __str__(self) -> str:
        ranks = "ranks 0 and 1" if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        at = self.point or (f"change {self.change}" if self.change else f"{self.after_s or 0:.3f} s into it")
        return f"{ranks}, save of step {self.step}, {at}"


@dataclass
class Trace:
    """What the saves of one rank came past."""

    points: list[tuple[int, str]] = field(default_factory=list)
    """Step of the save, fault point."""
    changes: list[tuple[int, str]] = field(default_factory=list)
    """Step of the save, change to the names in the checkpoint folder."""
    writing_s: dict[int, float] = field(default_factory=dict)
    """Seconds of each write, by step."""
    updates: dict[int, int] = field(default_factory=dict)
    """Updates that ended while it went on, by step."""


@dataclass
class Kind:
    """A way to run, and the run that nobody kills."""

    folder: Path
    sets: tuple[str, ...]
    slow: bool
    straight: list[Outcome] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    def time_of(self, rank: int, step: int, point: str, start: int = 0) -> int:
        """How often the rank comes to a point after update `start`, until it does in the save of `step`; 0: never."""
        seen = [at for at, name in self.traces[rank].points if name == point and at > start]
        return seen.index(step) + 1 if step in seen else 0


def make_kind(folder: Path, sets: Sequence[str] = (), *, slow: bool = False, backend: str = "deepspeed") -> Kind:
    """Write the inputs, and train without a kill: once as is, and once so that the checkpoint of each step stays."""
    write_inputs(
        folder,
        {"zero_optimization": {"stage": 2}} if backend == "deepspeed" else None,
        {
            "backend": backend,
            "evaluation": {"every_steps": 2, "at_end": True},
            "checkpoints": {"every_steps": 2, "at_end": True, "keep_last": 1, "best": "loss"},
        },
    )
    kind = Kind(folder, tuple(sets), slow)
    results = run_ranks(train_traced, RANKS, folder, "straight", kind.sets, slow)
    kind.straight, kind.traces = [outcome for outcome, _ in results], [trace for _, trace in results]
    all_kept = run_ranks(train_traced, RANKS, folder, "all", (*sets, "checkpoints.keep_last=0"), False)
    assert [outcome.state for outcome, _ in all_kept] == [outcome.state for outcome in kind.straight]
    assert tuple(map(step_of, all_checkpoints(folder / "all" / "checkpoints"))) == SAVES
    return kind


def killed_and_resumed(kind: Kind, deaths: Sequence[Death], output: str = "out") -> tuple[list[str], str]:
    """Start a run, kill it, and start it again, for every death in turn and then to its end.

    Returns:
        What is wrong; and what there was to see.
    """
    folder = kind.folder / output
    found, told = [], []
    for death in deaths:
        before = newest(folder)
        ends = let_ranks_end(
            train_and_die, RANKS, kind.folder, output, kind.sets, kind.slow, death, env=fault_of(kind, death, before)
        )
        partial = sorted((folder / "checkpoints").glob(f"{PARTIAL}*"))
        found += [f"{folder}: {problem}" for problem in _wrong_checkpoints(kind, folder, death, before)]
        if death.after_s is not None and death.step == STEPS and all(end.code == 0 for end in ends):
            told.append(TOO_LATE)  # this write was faster than the one that the moment was drawn from
            continue
        found += _ended_rightly(death, ends)
        words = [f"goes on from {newest(folder) or 'the start'}"]
        if partial:
            words.insert(0, "in the middle of a write")
        if len(death.ranks) < RANKS:
            words.insert(0, f"the other ended after {max(end.after_s for end in ends):.1f} s")
        told.append(", ".join(words))
    found += _finished(kind, output)
    return found, "; ".join(told)


def fault_of(kind: Kind, death: Death, start: int) -> dict[str, str]:
    """The variable of `largetrain.checkpoint.faults`, for a death at a point of a run that goes on from `start`."""
    if not death.point:
        return {}
    [rank] = death.ranks
    return {"LARGETRAIN_TEST_KILL": f"{rank}:{death.point}:{kind.time_of(rank, death.step, death.point, start)}"}


def newest(folder: Path) -> int:
    """Step of the checkpoint that `--resume auto` takes; 0: none."""
    found, _ = find_checkpoint("auto", folder)
    return step_of(found) if found is not None else 0


# ---------------------------------------------------------------- what has to hold


def _ended_rightly(death: Death, ends: Sequence[RankEnd]) -> list[str]:
    found = []
    killed = any(end.code == -signal.SIGKILL for end in ends)
    for rank, end in enumerate(ends):
        if rank in death.ranks:
            first = death.after_s is not None and killed and end.error is not None  # it heard of the other's death
            if end.code != -signal.SIGKILL and not first:
                found.append(f"rank {rank} was not killed: it ended with {end.code}\n{end.error or end.output}")
        elif end.code is None or end.after_s > ENOUGH_S:
            found.append(f"rank {rank} went on for {end.after_s:.0f} s after the other's death\n{end.output}")
        elif end.code != 1 or end.error is None:
            found.append(f"rank {rank} ended with {end.code} and no error\n{end.output}")
    return found


def _wrong_checkpoints(kind: Kind, folder: Path, death: Death, before: int) -> list[str]:
    """What is wrong in a folder after a kill."""
    found = []
    paths = all_checkpoints(folder / "checkpoints")
    for path in paths:
        if problem := problem_of(path, contents=True):
            found.append(f"half-written: {problem}")
        elif difference := differing(path, kind.folder / "all" / "checkpoints" / path.name, while_running=True):
            found.append(f"corrupted: {path.name}: {difference}")
    due = max([step for step in SAVES if step < death.step], default=0)
    if newest(folder) < max(due, before):
        found.append(
            f"lost: {newest(folder)} is the newest checkpoint, that of step {max(due, before)} had been written"
        )
    for name in ("latest", "best"):
        pointer = folder / "checkpoints" / name
        if pointer.exists() and pointed_at(pointer) is None:
            found.append(f"{name} points nowhere")
    return found


def _finished(kind: Kind, output: str) -> list[str]:
    """Let the run go on to its end; what is not as in the straight run."""
    folder, straight = kind.folder / output, kind.folder / "straight"
    start = newest(folder)
    found = []
    try:
        outcomes = run_ranks(train_to_the_end, RANKS, kind.folder, output, kind.sets)
    except Exception as error:  # noqa: BLE001 (whatever it is, this run is lost, and the sweep goes on)
        return [f"lost: it cannot go on from {start or 'the start'}: {type(error).__name__}: {error}"]
    for rank, outcome in enumerate(outcomes):
        expected = kind.straight[rank]
        word = f"resuming from {folder / 'checkpoints'}/step-{start:08}" if start else "starting anew"
        if rank == 0 and not any(word in line for line in outcome.lines) and not outcome.error:
            found.append(f"not {word!r}: {outcome.lines}")
        if outcome.updates != expected.updates[start:]:
            found.append(f"rank {rank}: other updates")
        if outcome.error:
            if start < STEPS:
                found.append(f"rank {rank}: {outcome.error}")
        else:
            found += [
                f"rank {rank}: other {name}" for name in expected.state if outcome.state[name] != expected.state[name]
            ]
    if without_times(rows_of(kind.folder, output)) != without_times(rows_of(kind.folder, "straight")):
        found.append("other metrics")
    names, expected_names = _names(folder), _names(straight)
    if missing := expected_names - names:
        found.append(f"missing: {sorted(missing)}")
    if (more := names - expected_names) and start < STEPS:  # else there was no other save, which prunes
        found.append(f"left behind: {sorted(more)}")
    for path in all_checkpoints(folder / "checkpoints"):
        if problem := problem_of(path, contents=True) or differing(
            path, kind.folder / "all" / "checkpoints" / path.name
        ):
            found.append(f"at the end: {path.name}: {problem}")
    for name in ("latest", "best"):
        pointers = [(place / "checkpoints" / name).read_text() for place in (folder, straight)]
        if pointers[0] != pointers[1] or pointed_at(folder / "checkpoints" / name) is None:
            found.append(f"at the end: {name} is {pointers[0]!r}, not {pointers[1]!r}")
    return found


def _names(folder: Path) -> set[str]:
    """What lies in the checkpoint folder, but for the one that may have been the best when the last was pruned for."""
    paths = {path.relative_to(folder / "checkpoints") for path in (folder / "checkpoints").rglob("*")}
    return {str(path) for path in paths if path.parts[0] != step_folder(SAVES[-2])}


def differing(ours: Path, theirs: Path, *, while_running: bool = False) -> str | None:
    """How two checkpoints differ, tensor by tensor and bit by bit; None: they do not.

    Args:
        while_running: the evaluation after the first may not have said yet whether it is the best.
    """
    if not theirs.is_dir():
        return "there is none of this step in the straight run"
    one, other = open_checkpoint(ours), open_checkpoint(theirs)
    if list(one.keys()) != list(other.keys()):
        return "other tensors"
    for key in one.keys():  # noqa: SIM118 (a Pieces is no mapping)
        if one.shape(key) != other.shape(key) or _packed(one.read(key)) != _packed(other.read(key)):
            return f"{key} differs"
    for rank in range(RANKS):
        if _packed(one.own(rank)) != _packed(other.own(rank)):
            return f"other random generators on rank {rank}"
    if one.shared != other.shared:
        return "other shared values"
    states = [_without_best(each.facts["state"]) if while_running else each.facts["state"] for each in (one, other)]
    return None if states[0] == states[1] else f"other counters: {json.dumps(states)}"


def _without_best(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.startswith("best_")}


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# ---------------------------------------------------------------- what runs in a rank


def train_traced(folder: Path, output: str, sets: Sequence[str], slow: bool) -> tuple[Outcome, Trace]:
    """Train to the end and note what the saves come past."""
    watch = _Watch(folder / output / "checkpoints", slow, None)
    return train(folder, STEPS, output, sets=sets), watch.trace


def train_and_die(folder: Path, output: str, sets: Sequence[str], slow: bool, death: Death) -> None:
    """Train, until this rank or another is killed."""
    _Watch(folder / output / "checkpoints", slow, death if int(os.environ["RANK"]) in death.ranks else None)
    train(folder, STEPS, output, resume="auto", sets=sets)


def train_to_the_end(folder: Path, output: str, sets: Sequence[str]) -> Outcome:
    """Go on with a run, which may have been killed after its last checkpoint."""
    try:
        return train(folder, STEPS, output, resume="auto", sets=sets)
    except AlreadyComplete as complete:
        return Outcome(error=str(complete))


class _Watch:
    """Follows this rank's saves, and kills it in one of them.

    Args:
        folder: of the checkpoints.
        slow: let every write take long, so that training goes on meanwhile, and marks of the best one come before it
            ends. Else they wait for that: what a save prunes depends on it, and has to be the same in every run.
    """

    def __init__(self, folder: Path, slow: bool, death: Death | None):
        self.folder, self.death, self.trace = f"{folder}{os.sep}", death, Trace()
        self.step = 0
        self._follow_saves(slow)
        self._follow_points()
        sys.addaudithook(self._changed)

    def _follow_saves(self, slow: bool) -> None:
        names = ("_start", "_write", "poll", "_going", "mark_best")
        start, write, poll, going, mark = (getattr(CheckpointManager, name) for name in names)
        trace, death = self.trace, self.death

        def started(manager: Any, step: int, *args: Any) -> None:
            self.step = step
            start(manager, step, *args)

        def written(manager: Any, job: Any) -> None:
            if death is not None and death.after_s is not None and death.step == job.step:
                threading.Timer(death.after_s, _die).start()
            began = time.monotonic()
            write(manager, job)
            trace.writing_s[job.step] = time.monotonic() - began

        def polled(manager: Any) -> None:  # once after every update, and by saves
            if manager._job is not None and not manager._job.done.is_set():
                trace.updates[manager._job.step] = trace.updates.get(manager._job.step, 0) + 1
            poll(manager)

        def marked(manager: Any, *args: Any) -> None:
            if manager._job is not None:
                manager._job.done.wait()
            mark(manager, *args)

        def slowly(manager: Any) -> None:
            time.sleep(SLOW_CHUNK_S)
            going(manager)

        CheckpointManager._start, CheckpointManager._write, CheckpointManager.poll = started, written, polled
        if slow:
            writer.CHUNK_BYTES = SLOW_CHUNK_BYTES
            CheckpointManager._going = slowly
        else:
            CheckpointManager.mark_best = marked

    def _follow_points(self) -> None:
        plain = writer.fault

        def noted(point: str) -> None:
            self.trace.points.append((self.step, point))
            plain(point)

        for module in (manager_module, writer, retention):
            module.fault = noted

    def _changed(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            place = args[0]
        elif event in CHANGES:
            place = self._place(event, args)
        else:
            return
        if self.step == 0 or not str(place).startswith(self.folder):
            return
        self.trace.changes.append((self.step, f"{event} {place}"))
        death = self.death
        counted = death is not None and death.change > 0 and self.step == death.step
        if counted and sum(step == self.step for step, _ in self.trace.changes) == death.change:
            _die()

    def _place(self, event: str, args: tuple[Any, ...]) -> str:
        """The path of a change, which may be relative to an open folder."""
        folder = args[2] if event in ("os.rename", "os.mkdir") else args[1]
        if folder == -1:
            return str(args[0])
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), args[0])


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def random_deaths(kind: Kind, draw: random.Random, most: int) -> list[Death]:
    """Up to `most` kills of one run at random moments of its writes, one save after another."""
    steps = sorted(draw.sample(SAVES, draw.randint(1, most)))
    return [
        Death(step, draw.choice([(0,), (1,), (0, 1)]), after_s=draw.uniform(0, 1.1 * kind.traces[0].writing_s[step]))
        for step in steps
    ]
