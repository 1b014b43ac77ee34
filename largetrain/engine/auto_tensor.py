"""Tensor parallelism for models that are not ours, by DeepSpeed's AutoTP and the plan that the model brings along.

AutoTP (deepspeed.ai/tutorials/automatic-tensor-parallelism) replaces the linear layers that a Hugging Face model's
`tp_plan` names, inside `deepspeed.initialize`. What it made of each parameter is looked at afterwards: only plain
slices of whole parameters are accepted, because checkpoints and the gradient norm rely on knowing them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.errors import ConfigError
from largetrain.parallel.axes import Axis
from largetrain.parallel.shards import Shard, mark, shard_of

KEY = "parallel.tensor_parallel"


def needs_auto_tensor(model: nn.Module, tensor: Axis) -> bool:
    """Whether tensor ranks are asked for and the model has not divided itself."""
    return tensor.size > 1 and not any(shard_of(parameter) for parameter in model.parameters())


@dataclass(frozen=True)
class _Edges:
    """What is kept of a whole parameter: enough to tell where a slice of it was cut."""

    shape: tuple[int, ...]
    first_row: Tensor
    """Index 0 of dim 0: what a slice along dim 1 is cut from."""
    first_column: Tensor
    """Index 0 of all dims but the first: what a slice along dim 0 is cut from."""


class AutoTensor:
    """Prepares a model for AutoTP and marks what came of it.

    Args:
        model: whole, on every rank with the same weights; its plan is made known under the names of the whole model.

    Raises:
        ConfigError: no part of the model has a plan, or several have.
    """

    def __init__(self, model: nn.Module, tensor: Axis):
        self.tensor = tensor
        _lift_plan(model)
        self._edges = {
            name: _Edges(tuple(parameter.shape), *_edges(parameter))
            for name, parameter in model.named_parameters()
            if parameter.ndim > 0
        }

    @property
    def section(self) -> dict[str, Any]:
        """`tensor_parallel` of the engine JSON."""
        return {"autotp_size": self.tensor.size}

    def mark_shards(self, model: nn.Module) -> int:
        """Write on every divided parameter which part it is; a collective over the tensor ranks.

        Returns:
            how many are divided.

        Raises:
            ConfigError: something is no plain slice of what it was, or nothing was divided.
        """
        starts: dict[str, tuple[int, int]] = {}
        parameters = dict(model.named_parameters())
        for name, edges in self._edges.items():
            parameter: Any = parameters.get(name)
            if parameter is None:
                raise ConfigError(f"{KEY}: dividing the model took away its parameter {name}; write 1.")
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if shape == edges.shape:
                continue
            found = self._shard(name, shape, edges)
            mark(parameter, found)
            starts[name] = found.dim, found.start
        if not starts:
            raise ConfigError(f"{KEY}: the plan of model.target divides none of its parameters; write 1.")
        for name in starts:
            self._check(name, parameters[name])
        return len(starts)

    def _shard(self, name: str, shape: tuple[int, ...], edges: _Edges) -> Shard:
        dims = [dim for dim, (mine, whole) in enumerate(zip(shape, edges.shape, strict=True)) if mine != whole]
        if len(dims) != 1:
            raise ConfigError(f"{KEY}: {name} became {list(shape)} of {list(edges.shape)}, which is no slice; write 1.")
        sizes: list[int] = [0] * self.tensor.size
        dist.all_gather_object(sizes, shape[dims[0]], group=self.tensor.group)
        if sum(sizes) != edges.shape[dims[0]]:
            raise ConfigError(f"{KEY}: the parts of {name} overlap or leave something out; write 1.")
        return Shard(edges.shape, dims[0], sum(sizes[: self.tensor.rank]), shape[dims[0]])

    def _check(self, name: str, parameter: Any) -> None:
        """Compare values with those before: a fused matrix, for one, is cut into parts that do not lie together."""
        if hasattr(parameter, "ds_id"):
            return  # ZeRO-3 has taken the values away; stages below show the same cut
        shard = shard_of(parameter)
        assert shard is not None
        row, column = _edges(parameter)
        edges = self._edges[name]
        before, after = (edges.first_column, column) if shard.dim == 0 else (edges.first_row, row)
        part = before[shard.start : shard.start + shard.size]
        part = part.to(parameter.dtype).float()  # the model may be in half precision by now
        if shard.dim > 1 or not torch.equal(part, after):
            raise ConfigError(
                f"{KEY}: the plan cuts {name} into parts that are no slices of it (a fused matrix?); write 1."
            )


def _edges(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """First row and first column, fp32 on the CPU."""
    values = parameter.detach()
    flat = values.reshape(values.shape[0], -1)
    return flat[0].float().cpu(), flat[:, 0].float().cpu()


def _lift_plan(model: nn.Module) -> None:
    """Make the plan of the Hugging Face model inside a user's module known on the module itself."""
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    plans = {name: plan for name, module in model.named_modules() if (plan := _get_hf_tp_plan(module))}
    outermost = [name for name in plans if not any(other != name and _within(name, other) for other in plans)]
    if len(outermost) != 1:
        what = "has no tensor-parallel plan" if not outermost else f"holds several models: {', '.join(outermost)}"
        raise ConfigError(
            f"{KEY}: model.target {what}; models of transformers such as Llama, Mistral and Qwen bring one. Use "
            f"parallel.pipeline_stages or a higher ZeRO stage instead."
        )
    (name,) = outermost
    if not name:
        return
    inner: Any = model.get_submodule(name)
    outer: Any = model
    if not hasattr(outer, "config"):
        outer.config = inner.config
    outer._tp_plan = {f"{name}.{pattern}": style for pattern, style in plans[name].items()}


def _within(name: str, other: str) -> bool:
    return not other or name.startswith(other + ".")
