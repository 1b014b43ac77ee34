"""Evaluation, checkpoints and the guard against runs that no longer learn."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from largetrain.callbacks.base import Callback, Moment
from largetrain.callbacks.preemption import Abandoned, Preemption
from largetrain.checkpoint.manager import CheckpointManager
from largetrain.engine.base import Backend, MicroBatch
from largetrain.engine.signals import Stop
from largetrain.errors import CheckpointError, DivergedError
from largetrain.parallel.agreement import StepAgreement

CHECKPOINT = int(Stop.NOT_A_STOP)
"""Bit of the agreement after updates: a checkpoint is due by the clock."""


def _first_kept(batches: Iterator[MicroBatch], kept: list[MicroBatch]) -> Iterator[MicroBatch]:
    for batch in batches:
        if not kept:
            kept.append(batch)
        yield batch


def is_due(step: int, every_steps: int, at_end: bool) -> bool:
    """Whether what happens every so many updates (0: never), or at the end that this is, happens after this one."""
    return at_end or (every_steps > 0 and step % every_steps == 0)


class BestSoFar(Protocol):
    """Where the best figure of a run is remembered."""

    best_figure: float | None
    best_step: int
    best_name: str


class Evaluation(Callback):
    """Evaluates every `every_steps` updates and at the end, and tells `listeners`.

    Args:
        batches: makes this rank's evaluation batches anew; equally many on every rank.
        owed: the run goes on after an update whose evaluation was never finished, so it begins with that one.
        preemption: may give an evaluation up.
    """

    def __init__(
        self,
        backend: Backend,
        batches: Callable[[], Iterator[MicroBatch]],
        every_steps: int,
        at_end: bool,
        listeners: Iterable[Callback],
        *,
        owed: bool = False,
        preemption: Preemption | None = None,
    ):
        self.backend, self.batches = backend, batches
        self.every_steps, self.at_end = every_steps, at_end
        self.listeners = tuple(listeners)
        self.owed, self.preemption = owed, preemption

    def on_start(self, step: int) -> None:
        if self.owed:
            self._evaluate(step)

    def on_step(self, moment: Moment) -> None:
        if is_due(moment.step, self.every_steps, self.at_end and moment.last):
            self._evaluate(moment.step)

    def _evaluate(self, step: int) -> None:
        first: list[MicroBatch] = []
        batches = _first_kept(self.batches(), first)
        if self.preemption is None:
            figures = self.backend.evaluate(batches)
        else:
            try:
                figures = self.backend.evaluate(self.preemption.watched(batches))
            except Abandoned:
                self.preemption.stop(step)
        picture = self.backend.preview(first[0]) if first else None
        for listener in self.listeners:
            listener.on_evaluation(step, figures)
            if picture is not None:
                listener.on_picture(step, picture)


class Best(Callback):
    """Keeps the checkpoint of the best evaluation so far.

    Args:
        figure: name of the figure, as evaluations give it; one that lacks it is passed over.
        smaller: the smallest value is best instead of the largest.
        state: where the best value is remembered, and saved with the run.
        save: writes a checkpoint, or finds the one of this step, and returns its folder.
        mark: makes it the best one.
        tell: prints a line on rank 0.
    """

    def __init__(
        self,
        figure: str,
        smaller: bool,
        state: BestSoFar,
        save: Callable[[], Path],
        mark: Callable[[Path], None],
        tell: Callable[[str], None],
    ):
        self.figure, self.smaller, self.state = figure, smaller, state
        self.save, self.mark, self.tell = save, mark, tell

    def on_evaluation(self, step: int, figures: dict[str, float]) -> None:
        value = figures.get(self.figure, math.nan)
        # a run that was resumed may have looked at another figure before
        before = self.state.best_figure if self.state.best_name == self.figure else None
        better = before is None or (value < before if self.smaller else value > before)
        if math.isnan(value) or not better:
            return
        self.state.best_figure, self.state.best_step, self.state.best_name = value, step, self.figure
        self.mark(self.save())
        self.tell(f"step {step}: best {self.figure} so far, {value:.4f}")


class Checkpointing(Callback):
    """Calls `save` every `every_steps` updates, at milestones, after the last update, and by the clock.

    Args:
        save: writes a checkpoint, or finds the one of this step; may return before it is on the disk.
        milestones: further updates after which one is written.
        every_minutes: longest time between two, or None. By the clock of any rank: `flags` has to be among the
            sources of `agreement`, whose last answer counts here after the following update.
    """

    def __init__(
        self,
        save: Callable[[], object],
        every_steps: int,
        at_end: bool,
        *,
        milestones: Collection[int] = (),
        every_minutes: float | None = None,
        agreement: StepAgreement | None = None,
    ):
        self.save, self.every_steps, self.at_end = save, every_steps, at_end
        self.milestones, self.every_minutes, self.agreement = frozenset(milestones), every_minutes, agreement
        self._saved_at = time.monotonic()

    def flags(self) -> int:
        """`CHECKPOINT` when this rank's clock says that the next one is due."""
        late = self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes
        return CHECKPOINT if late else 0

    def on_step(self, moment: Moment) -> None:
        asked = self.agreement is not None and bool(self.agreement.last & CHECKPOINT)
        milestone = moment.step in self.milestones
        if asked or milestone or is_due(moment.step, self.every_steps, self.at_end and moment.last):
            self.save()
            self._saved_at = time.monotonic()


class Writing(Callback):
    """Follows what a `CheckpointManager` writes in the background: tells of it, waits for the last one."""

    def __init__(self, manager: CheckpointManager):
        self.manager = manager

    def on_step(self, moment: Moment) -> None:
        self.manager.poll()

    def on_end(self, step: int) -> None:
        self.manager.finish()
        self.manager.close()

    def on_failure(self, step: int) -> None:
        self.manager.close()


class Guard(Callback):
    """Reports every skipped update and stops the run after too many in a row, with a checkpoint to resume from.

    Args:
        max_in_a_row: skipped updates in a row that end the run.
        save: writes a checkpoint and returns its folder.
        say: prints one line on rank 0.
    """

    def __init__(self, max_in_a_row: int, save: Callable[[], object], say: Callable[[str], None]):
        self.max_in_a_row, self.save, self.say = max_in_a_row, save, say
        self._last_finite_loss: torch.Tensor | None = None

    def on_step(self, moment: Moment) -> None:
        result = moment.result
        if result.applied:
            self._last_finite_loss = result.loss
            return
        cause = self._cause(moment)
        self.say(f"step {moment.step}: update skipped on all ranks, {cause}; loss scale {result.loss_scale:g}")
        exhausted = result.scale_exhausted
        if moment.skipped_in_a_row < self.max_in_a_row and not exhausted:
            return
        finite = (
            "none since the start or resume"
            if self._last_finite_loss is None
            else f"{float(self._last_finite_loss):.4f}"
        )
        reason = (
            f"the loss scale is at its floor ({result.loss_scale:g}, fp16.min_loss_scale) and gradients still overflow"
            if exhausted
            else f"{moment.skipped_in_a_row} updates in a row were skipped (guard.max_skipped_in_a_row)"
        )
        raise DivergedError(
            f"step {moment.step}: {reason}: {cause}. Last finite loss: {finite}. {self._samples(moment)}"
            f"Weights are those of the last applied update{self._checkpoint()}"
        )

    def _checkpoint(self) -> str:
        """Where to go on from; a save that fails as well must not hide why the run was stopped."""
        try:
            return f"; resume from {self.save()}, for instance with a lower learning rate"
        except CheckpointError as error:
            return f". {error}"

    def _cause(self, moment: Moment) -> str:
        """Which ranks and samples had a non-finite loss; collective, all ranks get the same words."""
        result = moment.result
        bad = []
        if result.local_losses:  # only the last pipeline stage has them
            per_batch = len(result.sample_ids) // len(result.local_losses)
            bad = [
                result.sample_ids[index * per_batch : (index + 1) * per_batch]
                for index, finite in enumerate(torch.isfinite(torch.stack(result.local_losses)).tolist())
                if not finite
            ]
        found = _gather([i for ids in bad for i in ids] if bad else None)
        if all(ids is None for ids in found):
            return "gradients are not finite while every loss is"
        return f"the loss is not finite on {_by_rank(found)}"

    def _samples(self, moment: Moment) -> str:
        """All samples of the update, for a cause that names none; collective."""
        found = _gather(list(moment.result.sample_ids) or None)
        return f"Samples of this update: {_by_rank(found)}. "


def _gather(value: list[int] | None) -> list[list[int] | None]:
    values: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _by_rank(ids_of_ranks: Sequence[list[int] | None]) -> str:
    return "; ".join(
        f"rank {rank}, samples {_shorten(ids)}" for rank, ids in enumerate(ids_of_ranks) if ids is not None
    )


def _shorten(ids: Sequence[int], most: int = 16) -> str:
    return ", ".join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")
