"""Checkpoints of a run: written aside, confirmed by every rank, published by one rename.

A checkpoint is a folder `step-00000010/` with the backend's files, `run.json` (counters and facts of the
run), `rng/rank-00000.pt` (random generators of each rank) and `manifest.json` (every file with its size,
written last). A folder without a manifest whose files are all there is never resumed from.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largetrain.checkpoint.folder import (
    BEST_RECORD,
    MANIFEST,
    best_checkpoint,
    complete_checkpoints,
    newer_than,
    rng_file,
    step_folder,
    step_of,
)
from largetrain.errors import CheckpointError




class CheckpointManager:
    """Saves into and prunes one run's `checkpoints/` folder; every method is called on all ranks.

    Args:
        folder: the run's `checkpoints/`, on a file system that all ranks share.
        keep_last: newest checkpoints to keep; 0 keeps all.
        write_parts: writes the backend's files of this rank into the given folder. It may raise OSError or
            RuntimeError (torch.save on a full disk) on one rank alone, if it leaves no peer waiting.
    """

    def __init__(self, folder: Path, keep_last: int, write_parts: Callable[[Path], None]):
        self.folder, self.keep_last, self.write_parts = folder, keep_last, write_parts
        self.rank = dist.get_rank()
        self._saved_step: int | None = None

    def save(self, step: int, facts: dict[str, Any], rng: dict[str, Any]) -> Path:
        """Write the checkpoint after `step` updates and return its folder; a second call at that step does nothing.

        Args:
            facts: plain JSON types, equal on all ranks.
            rng: this rank's `random_state`.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are untouched.
        """
        final = self.folder / step_folder(step)
        if step == self._saved_step:
            return final
        partial = self.folder / f"partial-{final.name}"
        self._together(final, lambda: self._clear(partial), only=0)
        try:
            self._together(final, lambda: self._write(partial, rng))
            self._together(final, lambda: self._publish(partial, final, facts), only=0)
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # gives the disk its room back
            raise
        self._saved_step = step
        return final

    def mark_best(self, checkpoint: Path, record: dict[str, Any]) -> None:
        """Let `best` name this checkpoint, which is not pruned from now on; the one before it may be.

        Args:
            record: values of the run's state that the evaluation changed; a run that is resumed from here has them.

        Raises:
            CheckpointError: as for `save`.
        """

        def mark() -> None:
            partial = checkpoint / f"{BEST_RECORD}.partial"
            _write_json(partial, record)
            partial.replace(checkpoint / BEST_RECORD)
            _point(self.folder / "best", checkpoint)

        self._together(checkpoint, mark, only=0)

    def _together(self, final: Path, action: Callable[[], None], only: int | None = None) -> None:
        """Run `action` on all ranks, or on rank `only`; all return when the last has, or all raise.

        The all-gather is also the barrier between one step of a save and the next.
        """
        failure: OSError | RuntimeError | None = None
        if only is None or only == self.rank:
            try:
                action()
            except (OSError, RuntimeError) as error:
                failure = error
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, None if failure is None else f"rank {self.rank}: {failure}")
        if any(reports):
            raise CheckpointError(
                f"checkpoint {final} could not be written ({'; '.join(filter(None, reports))}). Earlier checkpoints "
                f"are intact: make room or mend the file system, then go on with --resume"
            ) from failure

    def _clear(self, partial: Path) -> None:
        for leftover in self.folder.glob("partial-*"):
            shutil.rmtree(leftover)
        (partial / "rng").mkdir(parents=True)

    def _write(self, partial: Path, rng: dict[str, Any]) -> None:
        self.write_parts(partial)
        torch.save(rng, rng_file(partial, self.rank))

    def _publish(self, partial: Path, final: Path, facts: dict[str, Any]) -> None:
        absent = [rank for rank in range(dist.get_world_size()) if not rng_file(partial, rank).is_file()]
        if absent:
            raise OSError(
                f"files of ranks {absent} are not in {partial}: --output must be on storage shared by all hosts"
            )
        _write_json(partial / "run.json", facts)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        for path in files:
            _sync(path)  # the manifest must not reach the disk before what it vouches for
        _write_json(partial / MANIFEST, {str(p.relative_to(partial)): p.stat().st_size for p in files})
        for path in (*(p for p in partial.rglob("*") if p.is_dir()), partial):
            _sync(path)
        self._set_aside_abandoned(final)
        partial.rename(final)
        _point(self.folder / "latest", final)
        self._prune(final)

    def _set_aside_abandoned(self, final: Path) -> None:
        """Rename what a run that was resumed from an earlier step leaves ahead: `auto` must not go back to it.

        Under `final`'s own name lies either an incomplete leftover or the same step of the abandoned run.
        """
        for path in (*newer_than(self.folder, step_of(final)), final):
            if not path.exists():
                continue
            aside = self.folder / f"abandoned-{path.name}"
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)

    def _prune(self, newest: Path) -> None:
        """Delete this run's oldest complete checkpoints beyond `keep_last`, by number, never the newest or the best."""
        if self.keep_last == 0:
            return
        older = [path for path in complete_checkpoints(self.folder) if step_of(path) < step_of(newest)]
        best = best_checkpoint(self.folder)
        for path in older[: max(0, len(older) - (self.keep_last - 1))]:
            if path == best:
                continue
            # first under a name that is no checkpoint's: a kill half-way leaves nothing that looks damaged
            doomed = path.rename(self.folder / f"partial-{path.name}")
            shutil.rmtree(doomed)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _point(pointer: Path, checkpoint: Path) -> None:
    """Let a file name a checkpoint, by one rename."""
    partial = pointer.with_name(f"{pointer.name}.partial")
    partial.write_text(checkpoint.name + "\n")
    _sync(partial)
    partial.replace(pointer)
    _sync(pointer.parent)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
