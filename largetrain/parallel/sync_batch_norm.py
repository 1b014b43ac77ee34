"""Batch-norm modules that share statistics over ranks, and the conversion of a model to them.

A module is converted by giving it another class, so that its parameters, buffers, hooks, fused activation and every
reference to it stay what they are. The class runs the forward pass of the class it replaces, in which F.batch_norm is
exchanged: that works for torch's own, for subclasses that call them, and for those that call F.batch_norm.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase, _NormBase
from torch.overrides import TorchFunctionMode

from largetrain.errors import ConfigError
from largetrain.parallel.channel import Channel
from largetrain.parallel.norm_kinds import is_frozen, is_live
from largetrain.parallel.sync_statistics import HALF, sync_batch_norm


@dataclass(frozen=True)
class _Shared:
    """What a converted module knows: the ranks of its statistics, and its name for messages."""

    channel: Channel
    name: str


class Synchronised:
    """Mixed into the class of a batch norm: in training mode its statistics are those of all ranks of a group."""

    shared: _Shared | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the class below with the batch norm in it exchanged.

        Raises:
            ValueError: fewer than two values per channel in the whole group.
            ConfigError: the class below does not use torch's batch norm function.
        """
        if self.shared is None or not self.training:  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self._with_statistics_of_all_ranks(*args, **kwargs)

    @torch.compiler.disable  # a compiled model is cut here: collectives of this kind cannot be traced
    def _with_statistics_of_all_ranks(self, *args: Any, **kwargs: Any) -> Any:
        assert self.shared is not None
        with _Exchange(self.shared.channel) as exchange:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not exchange.met:
            raise ConfigError(
                f"sync_batch_norm: {type(self).__mro__[2].__name__} at {self.shared.name!r} computes its statistics "
                "without torch's batch_norm function, which cannot be synchronised; set sync_batch_norm: off or use "
                "another normalisation there."
            )
        return out


class SyncBatchNorm1d(Synchronised, nn.BatchNorm1d):
    """nn.BatchNorm1d over several ranks."""


class SyncBatchNorm2d(Synchronised, nn.BatchNorm2d):
    """nn.BatchNorm2d over several ranks."""


class SyncBatchNorm3d(Synchronised, nn.BatchNorm3d):
    """nn.BatchNorm3d over several ranks."""


class SyncBatchNormAnyDim(Synchronised, _BatchNorm):
    """What torch's nn.SyncBatchNorm becomes, which DDP refuses on the CPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


OURS: dict[type, type] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNormAnyDim,
}


class _Exchange(TorchFunctionMode):
    """While it is active, F.batch_norm and torch.batch_norm in training mode are the synchronised one."""

    def __init__(self, channel: Channel):
        super().__init__()
        self.channel = channel
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._functional(*args, **kwargs)
        if func is torch.batch_norm:
            return self._low_level(*args, **kwargs)
        return func(*args, **kwargs)

    def _functional(
        self, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):  # the signature of F.batch_norm
        self.met = True
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        return sync_batch_norm(input, running_mean, running_var, weight, bias, momentum, eps, self.channel)

    def _low_level(
        self, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True
    ):  # the signature of torch.batch_norm
        return self._functional(input, running_mean, running_var, weight, bias, training, momentum, eps)


def convert_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Let every trained batch norm of the model share its statistics over the ranks of a group.

    Frozen batch norms stay as they are. Converting twice is the same as once, with the later group. Running
    statistics in half precision become fp32: rounded to 8 bits they stop moving.

    Args:
        model: changed in place.
        group: the ranks; None for all.

    Returns:
        The model.

    Raises:
        ConfigError: modules that keep batch statistics and cannot be converted; all of them are named.
    """
    modules = dict(model.named_modules())
    problems = [problem for name, module in modules.items() if (problem := _problem(name, module))]
    if problems:
        raise ConfigError(problems)
    channel = Channel(group)
    for name, module in modules.items():
        if is_live(module):
            _convert(module, _Shared(channel, name))
    return model


def _convert(module: Any, shared: _Shared) -> None:
    if not isinstance(module, Synchronised):
        if isinstance(module, nn.SyncBatchNorm):
            del module.process_group
        cls: Any = type(module)
        module.__class__ = _synchronised(cls)
    module.shared = shared
    for buffer in (module.running_mean, module.running_var):
        if buffer is not None and buffer.dtype in HALF and not isinstance(module, _LazyNormBase):
            buffer.data = buffer.data.float()


@cache
def _synchronised(cls: Any) -> Any:
    """The class of converted modules of a class: one of ours, or one made for a subclass or a lazy class."""
    if cls in OURS:
        return OURS[cls]
    made: Any = type(f"Sync{cls.__name__}", (Synchronised, cls), {"__doc__": f"{cls.__name__} over several ranks."})
    if issubclass(cls, _LazyNormBase):
        made.cls_to_become = _synchronised(cls.cls_to_become)
    return made


def _problem(name: str, module: nn.Module) -> str | None:
    """Why the batch norm of this name cannot be converted, with a way out; None if it can or is none."""
    kind = type(module).__name__
    if is_frozen(module) or isinstance(module, Synchronised):
        return None
    if isinstance(module, nn.SyncBatchNorm) and type(module) is not nn.SyncBatchNorm:
        return (
            f"sync_batch_norm: {kind} at {name!r} is synchronised by its own library and cannot be converted; "
            "build the model with its plain batch norms, or set sync_batch_norm: off."
        )
    if isinstance(module, _NormBase):  # batch norms; instance norms have no statistics of the batch
        return None
    if isinstance(getattr(module, "running_mean", None), Tensor):
        return (
            f"sync_batch_norm: {kind} at {name!r} keeps running statistics but is no batch norm of torch, so it cannot "
            "be synchronised; replace it by a subclass of nn.BatchNorm2d, or set sync_batch_norm: off."
        )
    return None
