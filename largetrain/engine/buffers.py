"""Buffers that differ between ranks: made equal for evaluation and saving, each rank's own ones kept for training.

DistributedDataParallel is told not to touch buffers (`forward_sync_buffers=False`): it would overwrite every rank's
batch statistics by rank 0's at each forward pass. Averages over ranks use all data instead.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.engine.held import MODEL, Named, pairs_of, read
from largetrain.parallel.pieces import Piece, Pieces


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that belong to the model's `state_dict`, each once."""
    named = []
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                named.append((f"{path}.{name}" if path else name, buffer))
    return named


def buffer_pieces(buffers: Named, prefix: str = MODEL) -> list[Piece]:
    """Copies, because averaging may have put other values into the live ones for a moment.

    Args:
        buffers: see `saved_buffers`.
    """
    return [
        Piece(prefix + name, tuple(buffer.shape), 0, buffer.detach().clone().reshape(-1))
        for name, buffer in pairs_of(buffers)
    ]


def restore_buffers(buffers: Named, pieces: Pieces, names: Collection[str] | None = None, prefix: str = MODEL) -> None:
    """Fill these buffers, or those of them with these names."""
    for name, buffer in pairs_of(buffers):
        if names is None or name in names:
            with torch.no_grad():
                buffer.copy_(read(pieces, prefix + name, tuple(buffer.shape)).view(buffer.shape))


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Running statistics and whatever else a model keeps in floating point, in a fixed order."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def differ_between_ranks(tensors: Sequence[Tensor]) -> bool:
    """Whether any element is another one on another rank; collective, the same answer everywhere."""
    if not tensors or dist.get_world_size() == 1:
        return False
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
    extremes = torch.cat([flat, -flat])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes.chunk(2)
    return bool((largest != -smallest).any())  # not-a-number differs from itself


@contextmanager
def equal_buffers(model: nn.Module) -> Iterator[bool]:
    """Within it, floating buffers are their averages over ranks; afterwards each rank has its own again.

    So evaluating or saving at any step leaves training exactly as it was. Collective.

    Yields:
        whether they differed, the same on all ranks.
    """
    buffers = floating_buffers(model)
    if not differ_between_ranks(buffers):
        yield False
        return
    own = [buffer.clone() for buffer in buffers]
    flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    with torch.no_grad():
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))
        try:
            yield True
        finally:
            for buffer, kept in zip(buffers, own, strict=True):
                buffer.copy_(kept)


class BufferGuard:
    """Keeps an update with a non-finite loss out of running statistics: they would never recover.

    A skipped update whose loss was finite (the scaled gradients overflowed) leaves its statistics, as torch.amp does.
    """

    def __init__(self, model: nn.Module):
        self._buffers = list(model.buffers())
        self._kept = [buffer.clone() for buffer in self._buffers]

    def keep(self) -> None:
        """Remember the buffers before an update."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    def restore_if_spoilt(self, loss: float) -> None:
        """Put them back when the loss of the update, equal on all ranks, or one of the buffers is not finite.

        The loss decides for all ranks alike: those whose own part was finite forget it too, so that counters of
        batches stay equal.
        """
        floating = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        if math.isfinite(loss) and all(bool(torch.isfinite(buffer).all()) for buffer in floating):
            return
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)
