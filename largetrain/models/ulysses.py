"""DeepSpeed Ulysses (Jacobs et al. 2023): each rank has a part of the sequence, and for attention some heads of all.

One all-to-all carries query, key and value from parts of the sequence to shares of the heads, another the result back.
Every rank needs whole key/value heads of its own: where theirs do not divide over the ranks, they travel to each rank
whose query heads look at them.
"""

from typing import Any

import torch
from torch import Tensor

from largetrain.models.tensor_parallel import head_share
from largetrain.parallel.axes import Axis
from largetrain.parallel.regions import exchange


class HeadExchange:
    """Moves attention heads between the ranks that share a sequence.

    Args:
        heads, kv_heads: of the whole model; `axis.size` divides heads.
    """

    def __init__(self, heads: int, kv_heads: int, axis: Axis):
        self.axis = axis
        shares = [head_share(heads, kv_heads, rank, axis.size) for rank in range(axis.size)]
        if all(share.grouped and share.count == shares[0].count for share in shares):
            sent = [head for share in shares for head in range(share.first, share.first + share.count)]
        else:  # groups of several sizes: every query head gets a copy of its own
            sent = [head * kv_heads // heads for head in range(heads)]
        self._sent = None if sent == list(range(kv_heads)) else sent

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [batch, its heads, seq_len / ranks, head_dim] -> [batch, heads of this rank, seq_len, head_dim]."""
        if self.axis.size == 1:
            return query, key, value
        if self._sent is not None:
            index = torch.tensor(self._sent, device=key.device)
            key, value = key.index_select(1, index), value.index_select(1, index)
        parts = [x.unflatten(1, (self.axis.size, -1)).movedim(1, 0) for x in (query, key, value)]
        received = exchange(torch.cat(parts, dim=2), self.axis)  # [ranks, batch, heads, seq_len / ranks, head_dim]
        # taken apart before they are made contiguous, so that what attention keeps of one does not keep the others
        split = received.split([part.shape[2] for part in parts], dim=2)
        query, key, value = (x.movedim(0, 2).flatten(2, 3) for x in split)
        return query, key, value

    def to_sequence(self, mixed: Tensor) -> Tensor:
        """[batch, heads of this rank, seq_len, head_dim] -> [batch, heads, seq_len / ranks, head_dim]."""
        if self.axis.size == 1:
            return mixed
        parts = mixed.unflatten(2, (self.axis.size, -1)).movedim(2, 0)
        return exchange(parts, self.axis).movedim(0, 1).flatten(1, 2)


TOKENS = ("input_ids", "labels")
"""What of a batch is divided over the ranks that share its sequences."""


def sequence_batch(batch: dict[str, Any], axis: Axis) -> dict[str, Any]:
    """The same batch with this rank's part of each sequence."""
    if axis.size == 1:
        return batch
    return {key: sequence_part(value, axis) if key in TOKENS else value for key, value in batch.items()}


def sequence_part(tensor: Tensor, axis: Axis) -> Tensor:
    """This rank's part of [batch, seq_len, ...]."""
    size = tensor.shape[1] // axis.size
    assert size * axis.size == tensor.shape[1], (tuple(tensor.shape), axis.size)
    return tensor.narrow(1, axis.rank * size, size)
