"""Checkpoints of a run: copied to host memory, written in the background, published by one rename, or not at all.

A thread on every rank copies and writes that rank's part; training waits for the copy alone, and only when the next
update is about to change what is copied. The ranks' threads report to one another, and rank 0's publishes the
checkpoint when all have succeeded. What went wrong is known to all ranks alike.
"""

import contextlib
import io
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largetrain.checkpoint.faults import fault
from largetrain.checkpoint.folder import PARTIAL, all_checkpoints, leftovers, step_folder
from largetrain.checkpoint.manifest import BEST_RECORD, FileRecord
from largetrain.checkpoint.reports import Reports, shortened
from largetrain.checkpoint.retention import Retention, remove, superfluous
from largetrain.checkpoint.space import SPARE_BYTES, lacking, room_at_start
from largetrain.checkpoint.staging import Planned, Staging, plan
from largetrain.checkpoint.writer import facts_bytes, partial_name, point, prepare, publish, write_best, write_rank
from largetrain.errors import CheckpointError, ConfigError
from largetrain.parallel.pieces import Snapshot

MOST_FAILURES = 2
NOTICEABLE_S = 1.0
PATIENCE_S = 20.0  # for a write under way when the run ends in failure; launchers kill after 30


class _Failed(Exception):
    """A rank could not do its part; the same on all ranks."""


class _GivenUp(Exception):
    """The process ends."""


@dataclass
class _Job:
    """One checkpoint on its way to the disk."""

    step: int
    final: Path
    planned: Planned | None = None
    """What is to be copied; None once it is."""
    copied: threading.Event = field(default_factory=threading.Event)
    """The live tensors may change."""
    image: memoryview = field(default_factory=lambda: memoryview(b""))
    """Of this rank's file; empty without pieces."""
    own: bytes = b""
    facts: bytes = b""
    problem: str | None = None
    """Why this rank has nothing to write."""
    done: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None
    """Why it was not written; the same on all ranks, once done."""
    lost: BaseException | None = None
    """What kept this rank from hearing of the others."""
    notes: list[str] = field(default_factory=list)
    published: bool = False
    best: dict[str, Any] | None = None
    """The record of `mark_best` that came before it was published."""
    told: bool = False
    counted: bool = False


class CheckpointManager:
    """Saves into and prunes one run's `checkpoints/` folder. Made on all ranks together.

    Args:
        folder: the run's `checkpoints/`, on a file system that all ranks share.
        run_id: the run's; checkpoints of another are never pruned.
        asynchronous: write in the background; else `save` returns when the checkpoint is written.
        tell: prints a line on rank 0.
        resumed: the checkpoint that the run goes on from. Where it is in `folder`, a save at its step does nothing: it
            is there, and to replace it would leave none for a moment.
        timeout_s: how much later than the first rank the last may be done with writing; absent: torch's 30 minutes.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        *,
        run_id: str,
        asynchronous: bool = True,
        tell: Callable[[str], None] = lambda line: None,
        resumed: Path | None = None,
        timeout_s: float | None = None,
    ):
        self.folder, self.retention, self.run_id = folder, retention, run_id
        self.asynchronous, self.tell = asynchronous, tell
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.rank == 0:
            self._clear()
        self._reports = Reports(timeout_s)
        self._staging = Staging()
        self._reserving: threading.Thread | None = None
        own = resumed is not None and resumed.absolute().parent == folder.absolute()
        self._resumed = resumed.absolute().name if resumed is not None and own else None
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._unmarked: tuple[Path, dict[str, Any]] | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # between mark_best and the publishing thread

    # ------------------------------------------------------------ the training thread

    def save(self, step: int, facts: dict[str, Any], snapshot: Callable[[], Snapshot], *, wait: bool = False) -> Path:
        """Have the run's state copied and written as the checkpoint after `step` updates; returns its folder.

        A collective. Waits until the checkpoint before is written. A second call at a step does nothing, unless it is
        to wait and the first has failed. One failure is told, by `poll`, and the next checkpoint tries again.

        Args:
            facts: plain JSON types, equal on all ranks.
            snapshot: called at once, on all ranks; its tensors may change when what was given to `before_change` has
                returned, and where there is no such, as soon as `save` has.
            wait: return when the checkpoint is on the disk.

        Raises:
            CheckpointError: on all ranks: the second write in a row failed, or this one did, which was waited for.
                Earlier checkpoints are untouched.
            RuntimeError: another rank is gone.
        """
        final = self.folder / step_folder(step)
        repeated = self._job is not None and self._job.step == step
        if (repeated and not wait) or (self._job is None and final.name == self._resumed):
            return final
        failure = self._settle(f"step {step}: ")
        if repeated and failure is None:
            return final
        best = self._job.best if repeated and self._job is not None else None
        self._start(step, final, facts, snapshot(), best)
        if wait or not self.asynchronous:
            self._settle(must_succeed=wait)
        return final

    def poll(self) -> None:
        """Tell of what the background has come to, once; after every update. No collective."""
        job = self._job
        if job is None or job.told or not job.done.is_set():
            return
        job.told = True
        for note in job.notes:
            self.tell(note)
        if job.failure is not None:
            self.tell(
                f"checkpoint step {job.step} could not be written: {job.failure}; the previous ones are intact; "
                f"trying again at the next checkpoint"
            )
        elif job.lost is not None:
            why = "it was given up" if isinstance(job.lost, _GivenUp) else "another rank is gone, or does not answer"
            self.tell(f"checkpoint step {job.step} is not whole: {why}; the previous ones are intact")

    def finish(self) -> None:
        """Wait until the last checkpoint is written. A collective.

        Raises:
            CheckpointError: on all ranks: it could not be.
            RuntimeError: another rank is gone.
        """
        self._settle(must_succeed=True)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """End the background thread when the run has ended in whatever way; no collective.

        A write under way gets `patience_s` seconds to end well; it does not when another rank is gone.
        """
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
            self._closing.set()
            thread.join(patience_s)
        self.poll()
        if thread is None or not thread.is_alive():
            self._job = None  # lets go of the memory
            self._staging.close()
            if self._reserving is not None:
                self._reserving.join(patience_s)

    def mark_best(self, checkpoint: Path, record: dict[str, Any]) -> None:
        """Let `best` name this checkpoint, which is not pruned from now on; the one before it may be. No collective.

        Args:
            checkpoint: one that `save` returned; marked when it is written, if it is not yet.
            record: values of the run's state that the evaluation changed; a run that is resumed from here has them.
        """
        if self.rank != 0:
            return
        with self._lock:
            job = self._job
            if job is not None and job.final == checkpoint and not job.published:
                job.best = record
                return
            self._unmarked = (checkpoint, record)
            note = self._mark()
        if note is not None:
            self.tell(note)

    def check_room(self, own_bytes: int, *, reserve: bool = False) -> None:
        """See whether the disk has room for what is to be kept; tells if it has not. A collective.

        Args:
            own_bytes: about what this rank will write of each checkpoint.
            reserve: take the host's memory for it now, in the background, so that the first save need not.

        Raises:
            ConfigError: on all ranks: there is not room for one.
        """

        def going() -> None:
            """Nothing ends this wait but the timeout."""

        needed = sum(report["bytes"] for report in self._reports.exchange({"bytes": own_bytes}, going))
        problem = None
        if self.rank == 0:
            try:
                if warning := room_at_start(self.folder, needed, self.retention):
                    self.tell(warning)
            except (ConfigError, OSError) as error:
                problem = shortened(str(error))
        problem = self._reports.exchange({"problem": problem}, going)[0]["problem"]
        if problem is not None:
            raise ConfigError(problem, on_all_ranks=True)
        if reserve:
            count = own_bytes + own_bytes // 50 + SPARE_BYTES  # and a header
            self._reserving = threading.Thread(target=self._reserve, args=(count,), name="reserve", daemon=True)
            self._reserving.start()

    def _reserve(self, count: int) -> None:
        with contextlib.suppress(OSError):  # the first save will find out, and tell
            self._staging.reserve(count)

    def _settle(self, prefix: str = "", must_succeed: bool = False) -> str | None:
        """Wait for the write under way; returns why it failed, which is counted once. The same on all ranks.

        Raises:
            CheckpointError: it failed, and so had the one before, or it must not.
        """
        job = self._job
        if job is None:
            return None
        begin = time.monotonic()
        job.done.wait()
        waited = time.monotonic() - begin
        if prefix and waited > NOTICEABLE_S:
            self.tell(
                f"{prefix}training waited {waited:.1f} s until the checkpoint of step {job.step} was written "
                f"(checkpoints.every_steps: larger intervals would spare that)"
            )
        fatal = must_succeed
        if not job.counted:
            job.counted = True
            self._failures = 0 if job.failure is None else self._failures + 1
            fatal = fatal or self._failures >= MOST_FAILURES
        if job.failure is not None and fatal:
            job.told = True
            raise CheckpointError(
                f"checkpoint {job.final} could not be written ({job.failure}). Earlier checkpoints are intact: make "
                f"room or mend the file system, then go on with --resume"
            )
        self.poll()
        if job.lost is not None:
            raise job.lost
        return job.failure

    def _start(
        self, step: int, final: Path, facts: dict[str, Any], snapshot: Snapshot, best: dict[str, Any] | None
    ) -> None:
        """See what is to be written and let the thread go; what fails here is reported by it."""
        job = _Job(step, final, best=best)
        try:
            own = io.BytesIO()
            torch.save(snapshot.own, own)
            job.planned = plan(snapshot.pieces)
            job.own = own.getvalue()
            job.facts = facts_bytes(facts, snapshot.shared) if self.rank == 0 else b""
        except Exception as error:  # noqa: BLE001 (the other ranks must hear of it, not wait)
            job.problem = f"{type(error).__name__}: {error}"
        self._job = job
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint {step}", daemon=True)
        self._thread.start()
        if snapshot.before_change is not None:
            snapshot.before_change(job.copied.wait)
        else:
            job.copied.wait()

    # ------------------------------------------------------------ the background thread

    def _run(self, job: _Job) -> None:
        try:
            self._copy(job)
            self._write(job)
        except _Failed as failure:
            job.failure = str(failure)
        except BaseException as error:  # noqa: BLE001 (raised by the training thread)
            job.lost = error
        finally:
            job.done.set()

    def _copy(self, job: _Job) -> None:
        try:
            if self._reserving is not None:
                self._reserving.join()
                self._reserving = None
            if job.planned is not None:
                job.image = self._staging.fill(job.planned)
        except Exception as error:  # noqa: BLE001 (the other ranks must hear of it, not wait)
            job.problem = f"{type(error).__name__}: {error}"
        finally:
            job.planned = None  # lets go of the live tensors
            job.copied.set()

    def _write(self, job: _Job) -> None:
        partial = self.folder / f"{PARTIAL}{job.final.name}"
        sizes = self._together(lambda: self._needed(job))
        try:
            self._together(lambda: self._prepare(partial, sum(sizes)), only=0)
            written = self._together(lambda: self._written(partial, job.image, job.own))
            self._together(lambda: self._publish(partial, job, written), only=0)
        except _Failed:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # gives the disk its room back
            raise

    def _together(self, action: Callable[[], Any], only: int | None = None) -> list[Any]:
        """Run `action` on all ranks, or on rank `only`; returns the results when the last has, or all raise.

        The exchange is also the barrier between one step of a save and the next.
        """
        report: dict[str, Any] = {}
        if only is None or only == self.rank:
            try:
                report["result"] = action()
            except _GivenUp:
                raise
            except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks must not wait for this one)
                report["failure"] = shortened(str(error) or type(error).__name__)
        reports = self._reports.exchange(report, self._going)
        failures = [f"rank {rank}: {each['failure']}" for rank, each in enumerate(reports) if "failure" in each]
        if failures:
            raise _Failed("; ".join(failures[:8]) + (f" and {len(failures) - 8} more" if len(failures) > 8 else ""))
        return [each.get("result") for each in reports]

    def _going(self) -> None:
        if self._closing.is_set():
            raise _GivenUp("the run has ended")

    def _needed(self, job: _Job) -> int:
        if job.problem is not None:
            raise OSError(job.problem)
        return sum(map(len, (job.image, job.own, job.facts)))

    def _prepare(self, partial: Path, needed_bytes: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear_all()
        if problem := lacking(self.folder, needed_bytes):
            raise OSError(f"no room: {problem}")
        prepare(partial)

    def _written(self, partial: Path, image: memoryview, own: bytes) -> dict[str, list[Any]]:
        files = write_rank(partial, self.rank, image, own, self._going)
        fault("before-report")
        return {name: [record.bytes, record.sha256] for name, record in files.items()}

    def _publish(self, partial: Path, job: _Job, written: list[dict[str, list[Any]]]) -> None:
        files = {name: FileRecord(*record) for each in written for name, record in each.items()}
        with self._lock:  # a mark comes before it is published, and with it, or after
            publish(partial, job.final, self.run_id, job.facts, files, self.world_size, job.best)
            job.published = True
            if job.best is not None:
                self._unmarked = (job.final, job.best)
            note = self._mark()
        if note is not None:
            job.notes.append(note)
        try:  # the checkpoint is there: what fails from here on costs it nothing
            fault("before-pointer")
            point(self.folder / "latest", job.final)
            fault("before-prune")
            for old in superfluous(self.folder, self.retention, self.run_id, [job.final, *self._kept()]):
                remove(old)
            fault("after-prune")
        except OSError as error:
            job.notes.append(f"warning: checkpoint step {job.step} is written, but {error}: older ones may remain")

    def _kept(self) -> list[Path]:
        return [self._unmarked[0]] if self._unmarked is not None else []

    def _mark(self) -> str | None:
        """Mark the best checkpoint, if one waits for that; returns a note if it still does."""
        if self._unmarked is None:
            return None
        try:
            write_best(*self._unmarked)
        except OSError as error:
            return f"warning: checkpoints/best cannot name {self._unmarked[0].name} yet: {error}"
        self._unmarked = None
        return None

    def _clear_all(self) -> None:
        for leftover in leftovers(self.folder):
            shutil.rmtree(leftover)

    def _clear(self) -> None:
        """Remove at the start what a killed run has left; what cannot be is met again, and told, by the first save."""
        for leftover in leftovers(self.folder):
            shutil.rmtree(leftover, ignore_errors=True)
        for checkpoint in all_checkpoints(self.folder):
            with contextlib.suppress(OSError):
                (checkpoint / partial_name(BEST_RECORD)).unlink()
