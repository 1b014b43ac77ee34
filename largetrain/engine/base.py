"""The backend protocol: what the trainer may ask of whatever runs the optimizer steps."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from largetrain.parallel.pieces import Pieces, Snapshot
from largetrain.tasks.base import Task

MicroBatch = dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """One optimizer update, equal on all ranks; tensors stay on the device so that nobody waits for them."""

    loss: Tensor
    """0-d fp32, nats: sum over the valid targets of the global batch divided by their count."""
    lr: float
    """Learning rate that this update used."""
    grad_norm: float | Tensor
    """Global L2 norm of the unscaled gradient before clipping; not finite when the update was skipped."""
    loss_scale: float
    """Loss scale in force during this update; 1.0 without fp16."""
    applied: bool
    """False: gradients were not finite, weights and schedule did not move on any rank."""
    tokens: int
    """Valid targets in the global batch."""
    scale_exhausted: bool
    """The update overflowed at the smallest loss scale that the engine JSON allows."""
    local_losses: tuple[Tensor, ...]
    """Loss sum of each of this rank's micro-batches, 0-d, kept to name the culprit of a skipped update."""
    sample_ids: tuple[int, ...]
    """Samples of this rank in this update."""


class Backend(Protocol):
    """Runs optimizer steps; owns the wrapped model, the optimizer and the loss scale."""

    dtype: torch.dtype
    """In which products are computed."""
    task: Task
    notes: list[str]
    """Lines for a person, from the construction."""

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """Pull exactly gradient_accumulation_steps items, then update once."""

    def evaluate(self, batches: Iterator[MicroBatch]) -> dict[str, float]:
        """Sum the task's quantities over all batches and ranks; every rank must bring as many batches."""

    def preview(self, batch: MicroBatch) -> Tensor | None:
        """The task's picture of predictions on `batch`, uint8 [3, H, W], or None; called on every rank."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights and buffers by name, tied ones under their first name."""

    def snapshot(self) -> Snapshot:
        """This rank's part of everything that the next update depends on; collective.

        The pieces are views of live storage: to be copied before the next update.
        """

    def restore(self, pieces: Pieces, same_layout: bool) -> None:
        """Take up what `snapshot` gave; collective.

        Args:
            same_layout: backend, ranks, stage and parameter groups are those that wrote it.

        Raises:
            CheckpointError: something is missing, or only the layout that wrote it can use it.
        """

    def load_weights(self, pieces: Pieces, names: Collection[str] | None = None) -> None:
        """Take weights and buffers alone, of these names or all of them; collective."""
