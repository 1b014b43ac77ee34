"""Whom DeepSpeed's engine reduces with, where ranks hold parts of one model: its "model parallel unit"."""

from typing import Any

import torch.distributed as dist

from largetrain.parallel.axes import Axes, Axis


class ModelParallelUnit:
    """Answers what DeepSpeed asks of the `mpu` in `deepspeed.initialize` and `zero.Init`.

    It reduces gradients and shards optimizer state over the data-parallel group, and counts gradient norm and overflow
    over the model-parallel one, parameters without a mark of `parallel/shards` on its first rank only.
    """

    def __init__(self, replicas: Axis, tensor: Axis):
        self._replicas, self._tensor = replicas, tensor

    def get_data_parallel_rank(self) -> int:
        return self._replicas.rank

    def get_data_parallel_world_size(self) -> int:
        return self._replicas.size

    def get_data_parallel_group(self) -> Any:
        return self._replicas.group

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_group(self) -> Any:
        return self._tensor.group


def unit_for(axes: Axes) -> ModelParallelUnit | None:
    """The unit of this rank, None where every rank has the whole model; a collective over all ranks.

    Ranks that share sequences (Ulysses) are data-parallel ranks to DeepSpeed: their gradients are summed alike.
    """
    if axes.tensor.size == 1:
        return None
    return ModelParallelUnit(_with_group(axes.replicas), _with_group(axes.tensor))


def _with_group(axis: Axis) -> Axis:
    """The same with a process group, which DeepSpeed wants also for one rank and for all."""
    if axis.group is not None:
        return axis
    group = dist.group.WORLD if axis.size > 1 else dist.new_subgroups(1)[0]
    return Axis(axis.rank, axis.size, group)
