"""Collectives that autograd differentiates: where tensors pass between what all ranks of an axis hold alike, what each
holds a part of, and what each holds a summand of.

The pairs are Megatron's: identity forward with all-reduce backward and its converse (Shoeybi et al. 2019), all-gather
forward with reduce-scatter backward and its converse (Korthikanti et al. 2022), and the all-to-all of DeepSpeed
Ulysses (Jacobs et al. 2023), which is its own converse. Sums are made in the dtype of what is summed.

Every function gives its argument back on an axis of one rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.parallel.axes import Axes, Axis

SEQUENCE = 1
"""The dim of activations [batch, seq_len, ...] that is divided."""


def enter(x: Tensor, axes: Axes) -> Tensor:
    """Hand what lies between tensor-parallel layers to one whose output is divided.

    Under sequence parallelism the ranks' parts [batch, seq_len / ranks, hidden] become the whole; the gradient, of
    which each rank has a summand, is summed.
    """
    if axes.tensor.size == 1:
        return x
    return _Gathered.apply(x, axes.tensor) if axes.sequence_parallel else _GradientSummed.apply(axes.tensor, x)[0]


def leave(x: Tensor, axes: Axes) -> Tensor:
    """Sum what a tensor-parallel layer with divided input gives: each rank has a summand of it.

    Under sequence parallelism each rank keeps its part of the sequence only.
    """
    if axes.tensor.size == 1:
        return x
    return _SummedPart.apply(x, axes.tensor) if axes.sequence_parallel else _Summed.apply(x, axes.tensor)


def gradient_summed(axis: Axis, *parameters: Tensor | None) -> tuple[Any, ...]:
    """Parameters that all ranks hold alike and use on a part of the work: their gradients are the ranks' sum.

    So the replicas get equal gradients to the bit. One all-reduce for all of them; None stays None.
    """
    if axis.size == 1:
        return parameters
    if all(parameter is None for parameter in parameters):
        return parameters
    given = iter(_GradientSummed.apply(axis, *(p for p in parameters if p is not None)))
    return tuple(None if parameter is None else next(given) for parameter in parameters)


def used_on_parts(axes: Axes, *parameters: Tensor | None) -> tuple[Any, ...]:
    """Parameters of what lies between tensor-parallel layers: used on a part of the sequence, or alike on all ranks."""
    return gradient_summed(axes.tensor, *parameters) if axes.sequence_parallel else parameters


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """x [ranks, ...]: item i goes to rank i, and item j of the result came from rank j."""
    return x if axis.size == 1 else _Exchanged.apply(x, axis)


def gathered_last(x: Tensor, axis: Axis, sizes: list[int]) -> Tensor:
    """Join the ranks' parts along the last dim, of these sizes; the gradient is taken apart again."""
    return x if axis.size == 1 else _GatheredLast.apply(x, axis, sizes)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def start_gather(part: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Parts [batch, seq_len / ranks, ...] -> what waits for the whole [batch, seq_len, ...]; without a gradient."""
    parts = part.new_empty((axis.size, *part.shape))
    gathering = dist.all_gather_single(parts.flatten(0, 1), part.contiguous(), group=axis.group, async_op=True)

    def finish() -> Tensor:
        if gathering is not None:  # None: this rank is not in the group, which it always is
            gathering.wait()
        return parts.movedim(0, SEQUENCE).flatten(SEQUENCE, SEQUENCE + 1)

    return finish


def _sum_part(x: Tensor, axis: Axis) -> Tensor:
    """Summands [batch, seq_len, ...] -> this rank's part [batch, seq_len / ranks, ...] of their sum."""
    assert x.shape[SEQUENCE] % axis.size == 0, (tuple(x.shape), axis.size)
    parts = x.unflatten(SEQUENCE, (axis.size, -1)).movedim(SEQUENCE, 0).contiguous()
    total = torch.empty_like(parts[0])
    dist.reduce_scatter_single(total, parts.flatten(0, 1), group=axis.group)
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GradientSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if len(grads) == 1:
            return None, _sum(grads[0], ctx.axis)
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=ctx.axis.group)
        sums = flat.split([grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(sums, grads, strict=True))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_gather(x, axis)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_part(grad, ctx.axis), None


class _SummedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _sum_part(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_gather(grad, ctx.axis)(), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=axis.group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.forward(ctx, grad, ctx.axis), None


class _GatheredLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: list[int]) -> Tensor:
        ctx.first, ctx.size = sum(sizes[: axis.rank]), sizes[axis.rank]
        padded = torch.nn.functional.pad(x, (0, max(sizes) - x.shape[-1])).contiguous()
        parts = padded.new_empty((axis.size, *padded.shape))
        dist.all_gather_single(parts.flatten(0, 1), padded, group=axis.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.first, ctx.size).contiguous(), None, None
