"""Activation checkpointing of any vision model: its stages recompute themselves in the backward pass.

A stage gets a subclass of its own class, whose forward runs through torch.utils.checkpoint. So names, `state_dict`
and `isinstance` stay as they are, and a deep copy uses its own weights (not so with a replaced `forward` attribute).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from largetrain.errors import ConfigError


def recompute_stages(model: nn.Module) -> list[str]:
    """Make each stage of `model` recompute its activations; give the names of what recomputes.

    Stages are found from the structure alone: the blocks of Sequential, ModuleList and ModuleDict containers, and of
    modules that hold more than half of the parameters. Plain layers that follow one another in a Sequential (VGG) are
    joined into runs that end at each pooling layer.
    """
    names = []
    total = _count(model)
    for name, module in list(_stages(model, "", total)):
        if isinstance(module, nn.Sequential) and _is_plain(module):
            runs = [run for run in _runs(module) if _worth(module, run)]
            if runs:
                module.__class__ = _recomputing_runs(type(module))  # type: ignore[arg-type]
                module._recomputed_runs = runs  # type: ignore[assignment]
                names += [f"{name}.{run[0]}-{run[-1]}".lstrip(".") for run in runs]
        else:
            module.__class__ = _recomputing(type(module))  # type: ignore[arg-type]
            names.append(name)
    return names


def _stages(module: nn.Module, name: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each stage below `module`, and of each Sequential that holds layers itself."""
    container = isinstance(module, nn.ModuleList | nn.ModuleDict) or _is_plain(module)
    if not container and 2 * _count(module) <= total:
        if _is_block(module):
            yield name, module
        return
    if _is_plain(module):
        yield name, module
    for child_name, child in module.named_children():
        yield from _stages(child, f"{name}.{child_name}" if name else child_name, total)


def _is_plain(module: nn.Module) -> bool:
    """A Sequential that only runs its children in order."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_block(module: nn.Module) -> bool:
    """A module of several layers, at least one of them with parameters: recomputing it saves memory."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _runs(sequential: nn.Sequential) -> list[list[str]]:
    """Names of the layers without children, in runs that end at a pooling layer or a child with layers.

    A run does not begin with a layer that works in place: it would alter the input that the run starts from again.
    """
    runs: list[list[str]] = [[]]
    for name, child in sequential.named_children():
        if any(True for _ in child.children()):
            runs.append([])
        elif runs[-1] or not getattr(child, "inplace", False):
            runs[-1].append(name)
            if "Pool" in type(child).__name__:
                runs.append([])
    return [run for run in runs if run]


def _worth(sequential: nn.Sequential, run: list[str]) -> bool:
    layers = [sequential._modules[name] for name in run]
    return len(layers) > 1 and any(True for layer in layers if layer is not None for _ in layer.parameters())


def _count(module: nn.Module) -> int:
    # ZeRO-3 empties parameters and keeps their size in ds_numel
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


@cache
def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        return _recomputed([self], kind.forward, self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@cache
def _recomputing_runs(kind: type[nn.Sequential]) -> type[nn.Sequential]:
    def forward(self: Any, input: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, input)
        runs = getattr(self, "_recomputed_runs", [])  # a slice of this container is a new one without runs
        run_from = {run[0]: run for run in runs}
        within = {name for run in runs for name in run[1:]}
        for name, child in self.named_children():
            if name in run_from:
                layers = [self._modules[layer] for layer in run_from[name]]
                input = _recomputed(layers, _run_layers, layers, input)
            elif name not in within:
                input = child(input)
        return input

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _run_layers(layers: list[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


def _recomputed(stage: list[nn.Module], function: Any, *args: Any, **kwargs: Any) -> Any:
    # DenseNet appends to the list that it has passed: the recomputation must find it as it was
    args = tuple(list(arg) if type(arg) is list else arg for arg in args)
    # torch checks the tensors among the arguments, but not those in lists
    listed = [held for arg in args if isinstance(arg, list | tuple) for held in arg if isinstance(held, torch.Tensor)]
    versions = [held._version for held in listed]

    @contextmanager
    def again() -> Iterator[None]:
        if [held._version for held in listed] != versions:
            raise ConfigError(
                f"model.activation_checkpointing: the input of {type(stage[0]).__name__} was altered in place after it "
                f"was passed, so the stage cannot be run again on it; use layers with inplace=False, or turn it off."
            )
        with _buffers_kept(stage):
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again()

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _buffers_kept(stage: list[nn.Module]) -> Iterator[None]:
    """Let the recomputation write into copies of the buffers: batch norm would count each batch twice.

    Copies, since writing the old values back would alter tensors that autograd has saved. What a normalisation layer
    computes in training does not depend on its running statistics, so the recomputation gives the same activations.
    """
    kept: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module in (below for layer in stage for below in layer.modules()):
        if module.training:
            kept += [(module, name, held) for name, held in module._buffers.items() if held is not None]
    try:
        for module, name, held in kept:
            module._buffers[name] = held.clone()
        yield
    finally:
        for module, name, held in kept:
            module._buffers[name] = held
