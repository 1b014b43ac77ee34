"""Checkpoints of a run: written aside, confirmed by every rank, published by one rename.

A checkpoint is a folder `step-00000010/` with the backend's files, `run.json` (counters and facts of the
run), `rng/rank-00000.pt` (random generators of each rank) and `manifest.json` (every file with its size,
written last). A folder without a manifest whose files are all there is never resumed from.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largetrain.errors import ConfigError, LargetrainError

MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{8,})")


def step_folder(step: int) -> str:
    """Name of the checkpoint after `step` updates."""
    return f"step-{step:08d}"


class CheckpointManager:
    """Saves into and prunes one run's `checkpoints/` folder; every method is called on all ranks.

    Args:
        folder: the run's `checkpoints/`.
        keep_last: newest checkpoints to keep; 0 keeps all.
        write_parts: writes the backend's files of this rank into the given folder.
    """

    def __init__(self, folder: Path, keep_last: int, write_parts: Callable[[Path], None]):
        self.folder, self.keep_last, self.write_parts = folder, keep_last, write_parts
        self.rank = dist.get_rank()

    def save(self, step: int, facts: dict[str, Any], rng: dict[str, Any]) -> Path:
        """Write the checkpoint after `step` updates and return its folder.

        Args:
            facts: plain JSON types, equal on all ranks.
            rng: this rank's `random_state`.

        Raises:
            LargetrainError: a rank could not write; earlier checkpoints are untouched.
        """
        final = self.folder / step_folder(step)
        if _on_rank_0((final / MANIFEST).exists):
            return final
        partial = self.folder / f"partial-{step_folder(step)}"
        _on_rank_0(lambda: self._clear(partial))
        failure = None
        try:
            self.write_parts(partial)
            (partial / "rng").mkdir(parents=True, exist_ok=True)
            torch.save(rng, partial / "rng" / f"rank-{self.rank:05d}.pt")
        except OSError as error:
            failure = f"rank {self.rank}: {error}"
        failures = _gather(failure)
        if any(failures):
            _on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise LargetrainError(
                f"checkpoint {final} was not written ({'; '.join(f for f in failures if f)}); earlier ones are intact"
            )
        _on_rank_0(lambda: self._publish(partial, final, facts))
        return final

    def _clear(self, partial: Path) -> None:
        for leftover in self.folder.glob("partial-*"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)

    def _publish(self, partial: Path, final: Path, facts: dict[str, Any]) -> None:
        _write_json(partial / "run.json", facts)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        _write_json(partial / MANIFEST, {str(p.relative_to(partial)): p.stat().st_size for p in files})
        if final.exists():  # an incomplete leftover under the final name: no manifest, so worth nothing
            shutil.rmtree(final)
        partial.rename(final)
        pointer = self.folder / "latest.partial"
        pointer.write_text(final.name + "\n")
        pointer.replace(self.folder / "latest")
        self._prune(final)

    def _prune(self, newest: Path) -> None:
        """Delete this run's oldest complete checkpoints beyond `keep_last`, by number, never the newest."""
        if self.keep_last == 0:
            return
        older = [path for path in complete_checkpoints(self.folder) if _step(path) < _step(newest)]
        for path in older[: max(0, len(older) - (self.keep_last - 1))]:
            shutil.rmtree(path)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of `folder` whose manifest is there and true, oldest first."""
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and not problem_of(path)]
    return sorted(found, key=_step)


def problem_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, in words, or None when every file of its manifest is whole."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())
    except FileNotFoundError:
        return f"{checkpoint} is not a complete checkpoint ({MANIFEST} is missing)"
    except (OSError, ValueError) as error:
        return f"{checkpoint / MANIFEST} cannot be read ({error})"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, {size} were written"
    return None


def find_checkpoint(resume: str, output: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` means, and one line for each newer one that is passed over.

    Args:
        resume: "auto" (newest complete one of `output`, None when there is none) or a checkpoint, a run's
            output folder, or its `checkpoints/` folder.

    Raises:
        ConfigError: an explicit path that holds no complete checkpoint.
    """
    if resume != "auto":
        given = Path(resume)
        if STEP_NAME.fullmatch(given.name):
            if problem := problem_of(given):
                raise ConfigError(f"--resume {resume}: {problem}. Give another checkpoint, or --resume auto")
            return given, []
        folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    else:
        folder = output / "checkpoints"
    whole = complete_checkpoints(folder)
    newest = whole[-1] if whole else None
    skipped = [
        problem
        for path in sorted(folder.glob("step-*"))
        if STEP_NAME.fullmatch(path.name) and (newest is None or _step(path) > _step(newest))
        if (problem := problem_of(path))
    ]
    if newest is None and resume != "auto":
        raise ConfigError([f"--resume {resume}: no complete checkpoint there", *skipped])
    return newest, skipped


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint."""
    facts: dict[str, Any] = json.loads((checkpoint / "run.json").read_text())
    return facts


def read_rng(checkpoint: Path, rank: int) -> dict[str, Any]:
    """The random generators that `rank` saved; tensors and plain types only, nothing else is unpickled."""
    rng: dict[str, Any] = torch.load(checkpoint / "rng" / f"rank-{rank:05d}.pt", weights_only=True)
    return rng


def _step(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    assert match, path
    return int(match.group(1))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _gather(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _on_rank_0(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and give its result, or its failure, to every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise LargetrainError(f"checkpoint: {outcome[1]}")
    return outcome[0]
