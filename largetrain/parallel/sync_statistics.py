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
MANY = 2048
"""Values per channel from which three fast passes take less time than torch's slow one (measured on one core)."""


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
        count, mean, var = _merge(channel.gather(*_local_statistics(x)))
        if count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)} on this rank "
                f"and {count} in total on the {channel.ranks} ranks that share batch statistics"
            )
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            running_var.mul_(1 - momentum).add_(var, alpha=momentum * count / (count - 1))
        mean, var = mean.to(_precise(x)), var.to(_precise(x))
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.count, ctx.channel = eps, count, channel
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _normalise(x, mean, var, _cast(weight, mean.dtype), _cast(bias, mean.dtype), eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, var = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        dy = _dense_like(dy, x)
        sum_dy, sum_dy_normed = _local_sums(dy, x, mean, var, ctx.eps)
        dx = None
        if for_x:
            sums = ctx.channel.gather(sum_dy, sum_dy_normed).sum(0, dtype=mean.dtype).view(2, -1)
            scale = (var + ctx.eps).rsqrt_()
            scale = scale if weight is None else scale.mul_(weight)
            # dx = scale (dy - mean of dy - normed x * mean of dy normed x), the last two terms by the forward's kernel
            shift, slope = sums.mul_(scale).div_(-ctx.count)
            dx = _normalise(x if x.dtype == mean.dtype else x.to(mean.dtype), mean, var, slope, shift, ctx.eps)
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


def _normalise(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, in one pass."""
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)


def _local_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count [1] fp64, means and biased variances [C] of this rank's rows."""
    channels = x.size(1)
    count = x.numel() // channels
    if count == 0:
        return torch.zeros(1, dtype=torch.float64), torch.zeros(channels), torch.zeros(channels)
    if x.dtype == torch.float32 and count >= MANY and _channels_last(x) and x.is_contiguous():
        return torch.tensor([count], dtype=torch.float64), *_planes_statistics(x, count)
    # The kernel's results have the dtype of the running statistics that it is given, else that of its input.
    running_mean, running_var = (torch.zeros(channels), torch.ones(channels)) if x.dtype in HALF else (None, None)
    mean, var = torch.batch_norm_update_stats(x, running_mean, running_var, 0.0)
    return torch.tensor([count], dtype=torch.float64), mean, var


def _planes_statistics(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means and biased variances, [C], of fp32 maps whose planes are contiguous, where torch's kernel is slow.

    It takes 0.9 ms for 8x64x32x32 on one core, these three passes 0.2 ms. Deviations are taken before they are
    squared, and what rounding left in their mean is taken off again.
    """
    dims = (0, *range(2, x.dim()))
    mean = x.sum(dims).div_(count)
    deviation = x - mean.view(-1, *[1] * (x.dim() - 2))
    ones = torch.ones_like(mean)
    rest, square = _sums(deviation, deviation, torch.zeros_like(mean), ones, 0.0)
    rest.div_(count)
    return mean + rest, square.div_(count).sub_(rest.square())


def _merge(parts: Tensor) -> tuple[int, Tensor, Tensor]:
    """Merge the statistics of the ranks by Chan, Golub and LeVeque's formula: no difference of large squares.

    Args:
        parts: [ranks, 1 + 2C] fp64, rows of count, means and biased variances.

    Returns:
        The count, and mean and biased variance, [C] fp64 each.
    """
    counts, means, variances = parts.split_with_sizes((1, parts.size(1) // 2, parts.size(1) // 2), dim=1)
    total = int(counts.sum())
    shares = counts / max(total, 1)
    mean = (means * shares).sum(0)
    return total, mean, (means - mean).square_().add_(variances).mul_(shares).sum(0)


def _local_sums(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sums over this rank's rows of dy and of dy times the normalised x, [C] each in the dtype of `mean`."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    return _sums(dy, x, mean, var, eps)


def _sums(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sums per channel of dy and of dy (x - mean) / sqrt(var + eps), [C] each, in one pass of torch's kernel."""
    only_sums = [False, True, True]
    _, sum_dy_normed, sum_dy = torch.ops.aten.native_batch_norm_backward.default(
        dy, x, None, mean, var, None, None, False, eps, only_sums
    )
    return sum_dy, sum_dy_normed
