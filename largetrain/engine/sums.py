"""What an update and an evaluation add up over ranks, shared by the backends."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.engine.base import MicroBatch
from largetrain.parallel.axes import Axis

Sums = dict[str, Tensor]


class UpdateSums:
    """Weight and loss of one update, summed over ranks while this rank computes.

    Awaited on the spot, each of the two sums would stop all ranks.

    Args:
        weight: of this rank's micro-batches together: valid targets, or the sum of their class weights.
        device: where the loss is.
        replicas: the ranks with other samples, or other parts of the same; None: all ranks of the run.
    """

    def __init__(self, weight: float, device: torch.device, replicas: Axis | None = None):
        self._replicas = replicas or all_ranks()
        self._weight = torch.tensor(weight, dtype=torch.float64, device=device)
        self._wait_for_weight = _start_sum(self._weight, self._replicas)
        self._factor: Tensor | None = None
        self.losses: list[Tensor] = []
        """Loss sum of each of this rank's micro-batches so far."""

    def factor(self) -> Tensor:
        """What turns a loss sum of this rank into its part of `replicas` x the mean over the global batch; 0-d fp64."""
        if self._factor is None:
            self._wait_for_weight()
            # a global batch without any valid target has loss sums of 0, which 1 leaves alone
            whole = torch.where(self._weight > 0, self._weight, 1.0)
            self._factor = self._replicas.size / whole
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
            self._wait_for_loss = _start_sum(self._loss, self._replicas)

    def finish(self) -> tuple[Tensor, int]:
        """Mean loss of the global batch (0-d, on the device) and its weight, rounded to whole targets."""
        self._wait_for_loss()
        weight = float(self._weight)
        return (self._loss / (weight if weight > 0 else 1.0)).float(), round(weight)


def all_ranks() -> Axis:
    """Every rank with samples of its own."""
    return Axis(dist.get_rank(), dist.get_world_size())


def _start_sum(tensor: Tensor, axis: Axis) -> Callable[[], Any]:
    """Sum in place over the axis; to be awaited by a call of what this gives."""
    if axis.size == 1:
        return lambda: None
    return dist.all_reduce(tensor, group=axis.group, async_op=True).wait


def evaluation_sums(
    batches: Iterable[MicroBatch], evaluate: Callable[[MicroBatch], Sums], replicas: Axis | None = None
) -> Sums:
    """Add up what `evaluate` gives of each batch, over all batches and ranks.

    Every rank brings as many batches; integers are summed as int64, the rest as fp64.

    Args:
        replicas: as for `UpdateSums`.

    Returns:
        CPU tensors, equal on all ranks; empty when there are no batches.
    """
    totals: Sums = {}
    axis = replicas or all_ranks()
    for batch in batches:
        for name, value in evaluate(batch).items():
            totals[name] = totals[name] + value if name in totals else value.clone()
    for dtype in (torch.int64, torch.float64):
        names = sorted(name for name, value in totals.items() if value.dtype == dtype)
        if not names:
            continue
        flat = torch.cat([totals[name].reshape(-1) for name in names])
        _start_sum(flat, axis)()
        parts = flat.cpu().split([totals[name].numel() for name in names])
        totals.update({name: part.view(totals[name].shape) for name, part in zip(names, parts, strict=True)})
    left = [name for name, value in totals.items() if value.dtype not in (torch.int64, torch.float64)]
    assert not left, f"a task sums in int64 and float64: {left}"
    return totals
