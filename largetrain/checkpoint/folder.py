"""Reading checkpoint folders: which are complete, which one `--resume` means, what they hold. No process group."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from largetrain.errors import ConfigError

MANIFEST = "manifest.json"
BEST_RECORD = "best.json"  # beside what the manifest vouches for: the evaluation comes after the checkpoint
STEP_NAME = re.compile(r"step-(\d{8,})")


def step_folder(step: int) -> str:
    """Name of the checkpoint after `step` updates."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Updates done at a checkpoint, from the name of its folder."""
    match = STEP_NAME.fullmatch(path.name)
    assert match, path
    return int(match.group(1))


def rng_file(checkpoint: Path, rank: int) -> Path:
    """Where `rank` keeps its random generators."""
    return checkpoint / "rng" / f"rank-{rank:05d}.pt"


def all_checkpoints(folder: Path) -> list[Path]:
    """Folders of `folder` that are named like checkpoints, complete or not, in order of steps."""
    return sorted((path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)), key=step_of)


def newer_than(folder: Path, step: int) -> list[Path]:
    """Checkpoints of `folder`, complete or not, after more than `step` updates."""
    return [path for path in all_checkpoints(folder) if step_of(path) > step]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of `folder` whose manifest is there and true, oldest first."""
    return [path for path in all_checkpoints(folder) if problem_of(path) is None]


def problem_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, in words, or None when every file of its manifest is whole."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        there = "is not a complete checkpoint" if checkpoint.is_dir() else "is not there"
        return f"{checkpoint} {there} ({MANIFEST} is missing)"
    except (OSError, ValueError) as error:
        return f"{checkpoint / MANIFEST} cannot be read ({error})"
    if not isinstance(sizes, dict) or not {"run.json"} <= sizes.keys():
        return f"{checkpoint / MANIFEST} is not a manifest"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, {size} were written"
    return None


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `best` names in a `checkpoints/` folder; None without one that is there."""
    pointer = folder / "best"
    if not pointer.is_file():
        return None
    named = folder / pointer.read_text().strip()
    return named if named.parent == folder and STEP_NAME.fullmatch(named.name) and named.is_dir() else None


def find_checkpoint(resume: str, output: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` means, and one line for each newer one that is passed over.

    Args:
        resume: "auto" (newest complete one of `output`, None when there is none), "best" (the one that the run's best
            evaluation left) or a checkpoint, a run's output folder, or its `checkpoints/` folder.

    Raises:
        ConfigError: an explicit path that holds no complete checkpoint.
    """
    if resume == "best":
        best = best_checkpoint(output / "checkpoints")
        if best is None:
            raise ConfigError(f"--resume best: {output / 'checkpoints'} names no best checkpoint (checkpoints.best)")
        if problem := problem_of(best):
            raise ConfigError(f"--resume best: {problem}. Give another checkpoint, or --resume auto")
        return best, []
    if resume != "auto":
        given = Path(resume)
        if STEP_NAME.fullmatch(given.absolute().name):
            if problem := problem_of(given):
                raise ConfigError(f"--resume {resume}: {problem}. Give another checkpoint, or --resume auto")
            return given, []
        folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    else:
        folder = output / "checkpoints"
    whole = complete_checkpoints(folder)
    newest = whole[-1] if whole else None
    skipped = [
        problem for path in newer_than(folder, step_of(newest) if newest else -1) if (problem := problem_of(path))
    ]
    if newest is None and resume != "auto":
        raise ConfigError([f"--resume {resume}: no complete checkpoint there", *skipped])
    return newest, skipped


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint, its `state` with what an evaluation after it found (`BEST_RECORD`).

    Raises:
        ConfigError: it is not what `CheckpointManager.save` wrote.
    """
    path = checkpoint / "run.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        path = checkpoint / BEST_RECORD
        if path.is_file():
            facts["state"].update(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {checkpoint}: {path} cannot be read ({error}). Give another checkpoint") from error
    return facts


def read_rng(checkpoint: Path, rank: int) -> dict[str, Any]:
    """The random generators that `rank` saved; tensors and plain types only, nothing else is unpickled."""
    rng: dict[str, Any] = torch.load(rng_file(checkpoint, rank), weights_only=True)
    return rng
