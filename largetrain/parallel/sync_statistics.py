"""The arithmetic of synchronised batch normalisation: one collective per layer in each direction.

On the CPU, where torch has no such function, ours; on CUDA torch's own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

from largetrain.parallel.channel import Channel

HALF = (torch.float16, torch.bfloat16)


def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    channel: Channel,
) -> Tensor:
    """Normalise with the statistics of the batches of all ranks of a channel and update the running statistics.

    A collective: every rank of the channel must call it, in the same order, and again in the backward pass where `x`
    needs a gradient. The gradients of weight and bias are those of this rank's rows; DDP averages them.

    Args:
        x: [N, C, ...], N may differ between ranks and may be 0; any float dtype.
        running_mean: [C], updated in place; None: not kept.
        running_var: [C], the same.
        weight: [C] or None for 1.
        bias: [C] or None for 0.
        momentum: weight of this batch in the running statistics.
        eps: added to the variance.
        channel: ranks that share statistics.

    Returns:
        Shape, dtype and memory format of `x`.

    Raises:
        ValueError: fewer than two values per channel on all ranks together.
    """
    ranks = channel.ranks
    if ranks == 1 or x.device.type == "meta":  # meta: only shapes are asked for
        return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    if x.device.type == "cpu":
        return _SyncBatchNorm.apply(x, weight, bias, running_mean, running_var, eps, momentum, channel)
    # With no rows torch sends statistics of the input's dtype, its peers send fp32: make the two the same.
    given = x.float() if x.numel() == 0 and x.dtype in HALF else x
    out = TorchSyncBatchNorm.apply(given, weight, bias, running_mean, running_var, eps, momentum, channel.group, ranks)
    return out.to(x.dtype)


class _SyncBatchNorm(torch.autograd.Function):
    """Batch norm over the ranks of a group, for CPU tensors.

    Statistics are fp32, or fp64 for an fp64 input, and merged in fp64. All ranks merge the same numbers in the same
    order, so that mean, variance and running statistics have the same bits everywhere.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, eps, momentum, channel):
        x = _dense(x)
        count, mean, m2 = _merge(channel.gather(_local_statistics(x)))
        if count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)} on this rank "
                f"and {count} in total on the {channel.ranks} ranks that share batch statistics"
            )
        _move(running_mean, mean, momentum)
        _move(running_var, m2 / (count - 1), momentum)
        mean, var = mean.to(_precise(x)), (m2 / count).to(_precise(x))
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.count, ctx.channel = eps, count, channel
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.batch_norm(x, mean, var, _cast(weight, mean.dtype), _cast(bias, mean.dtype), False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, var = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        dy = _dense_like(dy, x)
        sum_dy, sum_dy_normed = _local_sums(dy, x, mean, var, ctx.eps)
        dx = None
        if for_x:
            means = ctx.channel.sum(torch.cat((sum_dy, sum_dy_normed)).double()).view(2, -1) / ctx.count
            scale = (var + ctx.eps).rsqrt()
            scale = scale if weight is None else scale * weight
            shift, slope = means.to(scale.dtype) * -scale
            # dx = scale (dy - mean of dy - normed x * mean of dy normed x): normed x by the kernel of the forward pass
            dx = F.batch_norm(x if x.dtype == mean.dtype else x.to(mean.dtype), mean, var, slope, shift, eps=ctx.eps)
            dx = dx.addcmul_(dy, scale.view(-1, *[1] * (x.dim() - 2))).to(x.dtype)
        grad_weight = sum_dy_normed.to(weight.dtype) if for_weight else None
        return dx, grad_weight, sum_dy.to(ctx.bias_dtype) if for_bias else None, *[None] * 5


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _channels_last(x: Tensor) -> torch.memory_format | None:
    """The channels-last format of this many dims, if there is one."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())


def _dense(x: Tensor) -> Tensor:
    """`x` in one of the two layouts that the kernels are fast for: its own, or else contiguous."""
    last = _channels_last(x)
    return x if last and x.is_contiguous(memory_format=last) else x.contiguous()


def _dense_like(dy: Tensor, x: Tensor) -> Tensor:
    """`dy` in the layout of `x`: with two layouts the kernel takes a path that is many times slower."""
    last = _channels_last(x)
    return dy.contiguous() if last is None or x.is_contiguous() else dy.contiguous(memory_format=last)


def _local_statistics(x: Tensor) -> Tensor:
    """Count, means and centred sums of squares of this rank's rows: [1 + 2C] fp64."""
    channels = x.size(1)
    count = x.numel() // channels
    if count == 0:
        return torch.zeros(2 * channels + 1, dtype=torch.float64)
    # The kernel's results have the dtype of the running statistics that it is given, else that of its input.
    running_mean, running_var = (torch.zeros(channels), torch.ones(channels)) if x.dtype in HALF else (None, None)
    mean, var = torch.batch_norm_update_stats(x, running_mean, running_var, 0.0)
    return torch.cat((torch.tensor([count], dtype=torch.float64), mean.double(), var.double() * count))


def _merge(parts: Tensor) -> tuple[int, Tensor, Tensor]:
    """Merge the statistics of the ranks by Chan, Golub and LeVeque's formula: no difference of large squares.

    Args:
        parts: [ranks, 1 + 2C] fp64, a row as `_local_statistics` makes it.

    Returns:
        The count, and mean and centred sum of squares, [C] fp64 each.
    """
    channels = (parts.size(1) - 1) // 2
    counts = parts[:, :1]
    total = int(counts.sum())
    means, m2 = parts[:, 1:].split(channels, dim=1)
    mean = (means * counts).sum(0) / max(total, 1)
    return total, mean, (m2 + (means - mean).square_().mul_(counts)).sum(0)


def _move(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Move a running statistic towards `value`, [C] fp64; rounded once, to the buffer's dtype."""
    if running is not None:
        running.copy_(running.double().mul_(1 - momentum).add_(value, alpha=momentum))


def _local_sums(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sums over this rank's rows of dy and of dy times the normalised x, [C] each in the dtype of `mean`."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    only_sums = [False, True, True]
    _, sum_dy_normed, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean, var, None, None, False, eps, only_sums
    )
    return sum_dy, sum_dy_normed
