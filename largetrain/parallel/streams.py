"""Streams of random numbers beside torch's current one.

Where all tensor-parallel ranks hold the same activations they must drop the same elements, and where each holds a part
they must not. The ranks' generators are equal and advance equally; a stream of a rank's own begins at a number drawn
from the common one, mixed with the rank. So a checkpoint and a recomputation, which keep the generators, need know
nothing of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from largetrain.parallel.axes import Axis


def draw_seed() -> int:
    """One number from torch's current CPU generator, whatever the current device."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


@contextmanager
def stream(device: torch.device | None, *seeds: int) -> Iterator[None]:
    """Within it, torch's generators give a stream of their own; afterwards they go on as if untouched.

    Args:
        device: the one whose generator is used beside the CPU's, where it is a GPU.
        seeds: not negative; mixed (numpy's SeedSequence), since torch's CPU generator looks at 32 bits of its seed.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]) >> 1)
        yield


@contextmanager
def own_stream(axis: Axis, device: torch.device) -> Iterator[None]:
    """Within it, this rank's generator gives what no other rank of the axis gets; nothing on an axis of one rank.

    The common stream advances by one number.
    """
    if axis.size == 1:
        yield
        return
    with stream(device, draw_seed(), axis.rank):
        yield
