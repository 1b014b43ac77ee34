"""What a task is: the meaning of a batch, as sums that add up over micro-batches and ranks."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

Batch = dict[str, Any]


class Task(Protocol):
    """Turns a batch into a loss sum and its weight, and evaluation sums into metrics."""

    unit: str
    """What the weight counts, for rates in the log, such as "tokens"."""

    def weight(self, batch: Batch) -> int:
        """Valid targets in the batch, known before the forward pass."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """0-d fp32 loss summed over the valid targets; on the graph of `model`."""

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """0-d fp64 sums of one batch; they are added over all batches and ranks."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Named figures from the totals of `evaluate`."""
