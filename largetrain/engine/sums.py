"""What an update and an evaluation add up over ranks, shared by the backends."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.engine.base import MicroBatch

Sums = dict[str, Tensor]


class UpdateSums:
    """Weight and loss of one update, summed over ranks while this rank computes.

    Awaited on the spot, each of the two sums would stop all ranks.

    Args:
        weight: of this rank's micro-batches together: valid targets, or the sum of their class weights.
        device: where the loss is.
    """

    def __init__(self, weight: float, device: torch.device):
        self._weight = torch.tensor(weight, dtype=torch.float64, device=device)
        self._weighing = dist.all_reduce(self._weight, async_op=True)
        self._factor: Tensor | None = None
        self.losses: list[Tensor] = []
        """Loss sum of each of this rank's micro-batches so far."""

    def factor(self) -> Tensor:
        """What turns a loss sum of this rank into its part of `ranks` x the mean over the global batch; 0-d fp64."""
        if self._factor is None:
            self._weighing.wait()
            # a global batch without any valid target has loss sums of 0, which 1 leaves alone
            whole = torch.where(self._weight > 0, self._weight, 1.0)
            self._factor = dist.get_world_size() / whole
        return self._factor

    def scaled(self, loss_sum: Tensor, scale: float = 1.0) -> Tensor:
        """The value to differentiate. A non-finite loss can have finite gradients; this makes them NaN as well."""
        factor = torch.where(torch.isfinite(loss_sum.detach()), self.factor() * scale, torch.nan)
        return loss_sum * factor.to(loss_sum.dtype)

    def add(self, loss_sum: Tensor, last: bool) -> None:
        """Note the loss sum of a micro-batch; the last one sends the total on its way."""
        self.losses.append(loss_sum.detach())
        if last:
            self._loss = torch.stack(self.losses).sum()
            self._summing = dist.all_reduce(self._loss, async_op=True)

    def finish(self) -> tuple[Tensor, int]:
        """Mean loss of the global batch (0-d, on the device) and its weight, rounded to whole targets."""
        self._summing.wait()
        weight = float(self._weight)
        return (self._loss / (weight if weight > 0 else 1.0)).float(), round(weight)


def evaluation_sums(batches: Iterable[MicroBatch], evaluate: Callable[[MicroBatch], Sums]) -> Sums:
    """Add up what `evaluate` gives of each batch, over all batches and ranks.

    Every rank brings as many batches; integers are summed as int64, the rest as fp64.

    Returns:
        CPU tensors, equal on all ranks; empty when there are no batches.
    """
    totals: Sums = {}
    for batch in batches:
        for name, value in evaluate(batch).items():
            totals[name] = totals[name] + value if name in totals else value.clone()
    for dtype in (torch.int64, torch.float64):
        names = sorted(name for name, value in totals.items() if value.dtype == dtype)
        if not names:
            continue
        flat = torch.cat([totals[name].reshape(-1) for name in names])
        dist.all_reduce(flat)
        parts = flat.cpu().split([totals[name].numel() for name in names])
        totals.update({name: part.view(totals[name].shape) for name, part in zip(names, parts, strict=True)})
    left = [name for name, value in totals.items() if value.dtype not in (torch.int64, torch.float64)]
    assert not left, f"a task sums in int64 and float64: {left}"
    return totals
