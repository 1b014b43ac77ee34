"""What a task is: the meaning of a batch, as sums that add up over micro-batches and ranks."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

Batch = dict[str, Any]


class Task(Protocol):
    """Turns a batch into a loss sum and its weight, and evaluation sums into metrics."""

    unit: str
    """What the weight counts, for rates in the log, such as "tokens"."""

    def weight(self, batch: Batch) -> float:
        """What the loss is divided by: the valid targets of the batch, or the sum of their weights.

        Known from the batch as it comes from the loader (CPU tensors), before the forward pass.
        """

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """0-d loss summed over the valid targets, fp32 (fp64 for fp64 models); always on the graph of `model`."""

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums of one batch, float64 or int64 of any shape; each is added over all batches and ranks."""

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Named figures from the totals of `evaluate`, as CPU tensors."""

    def figures(self) -> tuple[str, ...]:
        """Names that `metrics` gives, known before any evaluation; some may be absent from one of them."""

    def preview(self, model: nn.Module, batch: Batch) -> Tensor | None:
        """A picture of predictions beside the truth, uint8 [3, H, W]; None for tasks without one.

        `model` is in evaluation mode and on the device of the batch.
        """
