"""DeepSpeed's PipelineModule around layers that are built and cut here."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from largetrain.config.layout import Layout, Place
from largetrain.engine.buffers import saved_buffers
from largetrain.engine.partition import runs_of
from largetrain.models.staged import StagedModel
from largetrain.models.stages import NamedLayer

TABLE = "table"


class Tail(nn.Module):
    """Holds the last layer where it wants labels, which only the loss function has; passes its input through."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class Stage:
    """The layers of this rank, built, with the names that the whole model gives their tensors.

    Args:
        bounds: first layer of each run of layers, and the number of layers; a run for each stage, or two for DualPipeV.
        recomputed: run these layers again in the backward pass instead of keeping their activations.
    """

    def __init__(self, model: StagedModel, bounds: Sequence[int], layout: Layout, recomputed: bool):
        place = layout.place(dist.get_rank())
        self.bounds, self.layout, self.place, self.recomputed = list(bounds), layout, place, recomputed
        self.runs = runs_of(bounds, layout.stages)[place.stage]
        self.folded = len(self.runs) == 2
        self.loss_stage = 0 if self.folded else layout.stages - 1
        self.is_first, self.is_last = place.stage == 0, place.stage == self.loss_stage
        self.layers: dict[int, nn.Module] = {}
        self.names: dict[str, str] = {}
        """Name in the PipelineModule -> name in the whole model; of parameters and buffers."""
        self.tied: tuple[str, nn.Module] | None = None
        """Name and holder of a weight that another stage has as well."""
        self.tie_stages = self._stages_of_the_tie(model.layers)
        indices = [index for begin, end in self.runs for index in range(begin, end)]
        own = {model.layers[index].name: model.layers[index] for index in indices}
        for index in indices:
            self._build(model, index, own)
        self.last: nn.Module | None = None
        if self.is_last and model.last_takes_labels:
            index = len(model.layers) - 1
            self.last, prefix = self.layers[index], f"{index}."
            self.layers[index] = Tail(self.last)
            self.names = {
                f"{prefix}layer.{local.removeprefix(prefix)}" if local.startswith(prefix) else local: name
                for local, name in self.names.items()
            }

    def _stages_of_the_tie(self, layers: Sequence[NamedLayer]) -> list[int]:
        """The stages of the layers that share a weight; empty when one stage has them all."""
        index_of = {layer.name: index for index, layer in enumerate(layers)}
        found = set()
        for index, layer in enumerate(layers):
            if layer.tied_to is not None:
                found |= {self._stage_of(index), self._stage_of(index_of[layer.tied_to])}
        return sorted(found) if len(found) > 1 else []

    def _stage_of(self, index: int) -> int:
        all_runs = enumerate(runs_of(self.bounds, self.layout.stages))
        return next(stage for stage, runs in all_runs if any(begin <= index < end for begin, end in runs))

    def _build(self, model: StagedModel, index: int, own: dict[str, NamedLayer]) -> None:
        layer = model.layers[index]
        arguments: list[Any] = []
        if layer.tied_to is not None:
            source = next(position for position, other in enumerate(model.layers) if other.name == layer.tied_to)
            holder = self.layers[source] if layer.tied_to in own else model.layers[source].build()
            arguments = [holder.weight]
        module = layer.build(*arguments)
        self.layers[index] = module
        for local, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]:
            self.names[f"{index}.{local}"] = model.name(layer, local, tensor)
        if self.tie_stages and (layer.tied_to is not None or self._gives_the_tie(model, layer)):
            self.tied = (layer.tied_to or layer.name) + ".weight", module

    def _gives_the_tie(self, model: StagedModel, layer: NamedLayer) -> bool:
        return any(other.tied_to == layer.name for other in model.layers)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole model, each once."""
        return {
            self.names[f"{index}.{local}"]: parameter
            for index, layer in self.layers.items()
            for local, parameter in layer.named_parameters()
        }

    def named_buffers(self) -> dict[str, Tensor]:
        """This rank's buffers that a checkpoint keeps, by their names in the whole model."""
        return {
            self.names[f"{index}.{local}"]: buffer
            for index, layer in self.layers.items()
            for local, buffer in saved_buffers(layer)
        }

    def functions(self) -> list[nn.Module]:
        """One module for each layer of the whole model; those of other stages are never called."""
        return [self.layers.get(index, _ELSEWHERE) for index in range(self.bounds[-1])]


_ELSEWHERE = nn.Identity()


def pipeline_module(stage: Stage, loss: Callable[[Tensor, Any], Tensor], verbose: bool = False) -> Any:
    """DeepSpeed's PipelineModule of this rank's stage; a collective over all ranks."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = stage.layout
    base: Any = DualPipeVModule if stage.folded else PipelineModule

    class CutModule(base):
        """Cut where we say; tied weights are found by what the stages hold."""

        def _partition_layers(self, method: str = "given") -> None:
            self.parts = stage.bounds
            self._set_bounds(*stage.runs[0])
            if stage.folded:  # what DualPipeVModule calls stages, and which of their layers are here
                self.num_stages, self.phase_bounds = len(stage.bounds) - 1, stage.runs

        def _build(self) -> None:
            super()._build()
            self._in_training = [module for module in self.modules() if module.training]
            runs: list[list[Any]] = self.phase_funcs if stage.folded else [self.forward_funcs]
            for functions in runs if stage.recomputed else ():
                functions[:] = [_recomputed(layer) for layer in functions]

        def forward(self, inputs: Tensor) -> Any:
            outputs = super().forward(inputs)
            return outputs.contiguous() if isinstance(outputs, Tensor) else outputs  # as gloo wants to send it

        def _index_tied_modules(self) -> dict[str, Any]:
            return _tied_comms(stage, self)

        def train(self, mode: bool = True) -> Any:
            """Only what was in training mode at the start: a frozen part stays as it is."""
            super().train(False)
            for module in self._in_training if mode else ():
                module.training = True
            return self

    # DeepSpeed reads it where a launcher has not set it
    os.environ.setdefault("LOCAL_RANK", "0")
    topology = PipeModelDataParallelTopology(num_pp=layout.stages, num_mp=layout.tensor, num_dp=layout.data)
    with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
        return CutModule(stage.functions(), topology=topology, loss_fn=loss)


def _recomputed(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer, run again in the backward pass; as it is where that would save nothing or move statistics twice."""
    normed = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in layer.modules())
    if normed or isinstance(layer, Tail) or not any(True for _ in layer.parameters()):
        return layer
    return partial(_run_again, layer)


def _run_again(layer: nn.Module, value: Tensor) -> Tensor:
    return checkpoint(layer, value, use_reentrant=False) if torch.is_grad_enabled() else layer(value)


def _tied_comms(stage: Stage, module: Any) -> dict[str, Any]:
    """How DeepSpeed sums the gradients of the copies of a tied weight, and counts it once."""
    if not stage.tie_stages:
        return {}
    layout, found = stage.layout, {}
    for ranks in _fibres(layout, stage.tie_stages):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            assert stage.tied is not None
            holder: Any = stage.tied[1]
            module.tied_modules[TABLE] = holder
            found[TABLE] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": holder}
            if dist.get_rank() != ranks[0]:
                holder.weight.ds_pipe_replicated = True
    return found


def _fibres(layout: Layout, stages: Sequence[int]) -> Iterator[list[int]]:
    """Ranks at these stages that differ in nothing else."""
    for data in range(layout.data):
        for tensor in range(layout.tensor):
            yield [layout.rank(Place(stage, data, 0, tensor)) for stage in stages]
