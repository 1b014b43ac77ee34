"""Folders of checkpoints: which are complete, which one `--resume` means, where pointers point. No torch."""

import os
import re
from pathlib import Path
from typing import Any

from largetrain.checkpoint.manifest import STEP_NAME, regular_size
from largetrain.checkpoint.verify import Check, contents_problem_of, facts_of, problem_of
from largetrain.errors import CheckpointError, ConfigError

PARTIAL = "partial-"
ABANDONED = "abandoned-"
PARTIAL_NAME = re.compile(PARTIAL + STEP_NAME.pattern, re.ASCII)
LONGEST_POINTER_BYTES = 100


def step_folder(step: int) -> str:
    """Name of the checkpoint after `step` updates."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Updates done at a checkpoint, from the name of its folder."""
    match = STEP_NAME.fullmatch(path.name)
    assert match, path
    return int(match.group(1))


def all_checkpoints(folder: Path) -> list[Path]:
    """Folders of `folder` that are named like checkpoints, complete or not, in order of steps."""
    return sorted((path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)), key=step_of)


def newer_than(folder: Path, step: int) -> list[Path]:
    """Checkpoints of `folder`, complete or not, after more than `step` updates."""
    return [path for path in all_checkpoints(folder) if step_of(path) > step]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of `folder` with a true manifest whose files are all there, oldest first; contents are not read."""
    return [path for path in all_checkpoints(folder) if problem_of(path) is None]


def leftovers(folder: Path) -> list[Path]:
    """What saves and prunings that were killed have left in `folder`; nothing that somebody else put there."""
    return sorted(
        path
        for path in folder.glob(f"{PARTIAL}*")
        if PARTIAL_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def pointed_at(pointer: Path) -> Path | None:
    """The checkpoint beside a pointer file that it names; None without one that is there."""
    try:
        if regular_size(pointer) > LONGEST_POINTER_BYTES:
            return None
        name = pointer.read_bytes().decode("ascii", errors="replace").strip()
    except (OSError, CheckpointError):
        return None
    named = pointer.with_name(name) if STEP_NAME.fullmatch(name) else None
    return named if named is not None and named.is_dir() and not named.is_symlink() else None


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `best` names in a `checkpoints/` folder; None without one that is there."""
    return pointed_at(folder / "best")


def find_checkpoint(resume: str, output: Path, check: Check = contents_problem_of) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` means, read whole and found true, and one line for each newer one passed over.

    Args:
        resume: "auto" (newest complete one of `output`, None when there is none), "best" (the one that the run's best
            evaluation left) or a checkpoint, a run's output folder, or its `checkpoints/` folder.
        check: reads one whole.

    Raises:
        ConfigError: an explicit path that holds no complete checkpoint.
    """
    if resume == "best":
        best = best_checkpoint(output / "checkpoints")
        if best is None:
            raise ConfigError(f"--resume best: {output / 'checkpoints'} names no best checkpoint (checkpoints.best)")
        return _whole("best", best, check), []
    if resume == "auto":
        return _newest(output / "checkpoints", check)
    given = Path(resume)
    if STEP_NAME.fullmatch(given.absolute().name) or os.path.lexists(given / "manifest.json"):
        return _whole(resume, given, check), []
    found, skipped = _newest(given / "checkpoints" if (given / "checkpoints").is_dir() else given, check)
    if found is None:
        raise ConfigError([f"--resume {resume}: no complete checkpoint there", *skipped])
    return found, skipped


def _whole(resume: str, checkpoint: Path, check: Check) -> Path:
    if problem := check(checkpoint):
        raise ConfigError(f"--resume {resume}: {problem}. Give another checkpoint, or --resume auto")
    return checkpoint


def _newest(folder: Path, check: Check) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of `folder`, and what is wrong with newer ones, oldest first."""
    skipped: list[str] = []
    for path in reversed(all_checkpoints(folder)):
        problem = check(path)
        if problem is None:
            return path, skipped
        skipped.insert(0, problem)
    return None, skipped


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint, its `state` with what an evaluation after it found.

    Raises:
        ConfigError: it is not what was written, or not of a run.
    """
    try:
        facts = facts_of(checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"--resume {checkpoint}: {error}. Give another checkpoint") from error
    if facts.get("weights_only"):  # written by `largetrain checkpoint import`
        raise ConfigError(f"--resume {checkpoint}: holds weights alone; begin a run with them: init_from={checkpoint}")
    return facts
