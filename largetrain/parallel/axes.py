"""Process groups along the axes of a layout: whom this rank talks to for what."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from largetrain.config.layout import Layout


@dataclass(frozen=True)
class Axis:
    """This rank among those that differ from it along one axis."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """torch's process group; None: all ranks of the run, or this rank alone where `size` is 1."""


@dataclass(frozen=True)
class Axes:
    """The groups of this rank; `Axes()` is a rank that works alone."""

    tensor: Axis = Axis()
    """Ranks that hold other parts of the same matrices and work on the same samples."""
    sequence: Axis = Axis()
    """Ranks that hold other parts of the same sequences (Ulysses)."""
    data: Axis = Axis()
    """Ranks with other samples, at the same part of each sequence."""
    replicas: Axis = Axis()
    """Ranks that hold the same weights, and reduce gradients: data x sequence."""
    stages: Axis = Axis()
    """Pipeline stages of the same samples."""
    model: Axis = Axis()
    """Ranks that hold one model together: stages x tensor."""
    sequence_parallel: bool = False
    """Between tensor-parallel layers each tensor rank has a part of the sequence."""


def make_axes(layout: Layout) -> Axes:
    """The groups of this rank; a collective over all ranks."""
    place = vars(layout.place(dist.get_rank()))

    def axis(*names: str) -> Axis:
        groups = layout.groups(*names)
        mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
        if len(mine) == 1:
            return Axis()
        if len(mine) == layout.world_size:
            return Axis(dist.get_rank(), len(mine), None)
        made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group, in the same order
        return Axis(mine.index(dist.get_rank()), len(mine), made[groups.index(mine)])

    assert set(place) == {"stage", "data", "sequence", "tensor"}
    return Axes(
        tensor=axis("tensor"),
        sequence=axis("sequence"),
        data=axis("data"),
        replicas=axis("data", "sequence"),
        stages=axis("stage"),
        model=axis("stage", "tensor"),
        sequence_parallel=layout.sequence_parallel,
    )
