"""Evaluation, checkpoints and the guard against runs that no longer learn."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from largetrain.callbacks.base import Callback, Moment
from largetrain.engine.base import Backend, MicroBatch
from largetrain.errors import DivergedError


class Evaluation(Callback):
    """Evaluates every `every_steps` updates and at the end, and tells `listeners`.

    Args:
        batches: makes this rank's evaluation batches anew; equally many on every rank.
    """

    def __init__(
        self,
        backend: Backend,
        batches: Callable[[], Iterator[MicroBatch]],
        every_steps: int,
        at_end: bool,
        listeners: Iterable[Callback],
    ):
        self.backend, self.batches = backend, batches
        self.every_steps, self.at_end = every_steps, at_end
        self.listeners = tuple(listeners)

    def on_step(self, moment: Moment) -> None:
        due = self.every_steps > 0 and moment.step % self.every_steps == 0
        if due or (self.at_end and moment.last):
            figures = self.backend.evaluate(self.batches())
            for listener in self.listeners:
                listener.on_evaluation(moment.step, figures)


class Checkpointing(Callback):
    """Calls `save` every `every_steps` updates and after the last one."""

    def __init__(self, save: Callable[[], object], every_steps: int, at_end: bool):
        self.save, self.every_steps, self.at_end = save, every_steps, at_end

    def on_step(self, moment: Moment) -> None:
        due = self.every_steps > 0 and moment.step % self.every_steps == 0
        if due or (self.at_end and moment.last):
            self.save()


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
        finite = "none" if self._last_finite_loss is None else f"{float(self._last_finite_loss):.4f}"
        reason = (
            f"the loss scale is at its floor ({result.loss_scale:g}, fp16.min_loss_scale) and gradients still overflow"
            if exhausted
            else f"{moment.skipped_in_a_row} updates in a row were skipped (guard.max_skipped_in_a_row)"
        )
        raise DivergedError(
            f"step {moment.step}: {reason}: {cause}. Last finite loss: {finite}. "
            f"Weights are those of the last applied update; resume from {self.save()} "
            f"with a lower learning rate, other data or bf16"
        )

    def _cause(self, moment: Moment) -> str:
        """Which ranks and samples had a non-finite loss; collective, all ranks get the same words."""
        result = moment.result
        finite = bool(torch.isfinite(torch.stack(result.local_losses)).all())
        bad = None if finite else (dist.get_rank(), result.sample_ids)
        found: list[tuple[int, tuple[int, ...]] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, bad)
        if not any(found):
            return "gradients are not finite while every loss is"
        culprits = "; ".join(f"rank {item[0]}, samples {_shorten(item[1])}" for item in found if item)
        return f"the loss is not finite on {culprits}"


def _shorten(ids: tuple[int, ...], most: int = 16) -> str:
    return ", ".join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")
