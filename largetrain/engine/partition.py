"""Which layers a pipeline stage gets: what each layer costs, and the cut that keeps the largest stage smallest."""

import inspect
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from largetrain.errors import ConfigError
from largetrain.models.stages import NamedLayer

KEY = "parallel.partition"
IMBALANCE = 0.15
"""From here on the report suggests something else."""
ELEMENTWISE = 8  # operations per element that a layer without products is taken for
TIMED = 3  # runs of each layer, after one that warms up


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes, for one micro-batch."""

    name: str
    kind: str
    """Name of its class."""
    parameters: int
    flops: float
    """Of the forward pass."""
    saved_bytes: int
    """Activations that its backward pass needs."""
    seconds: float = 0.0
    """Forward and backward, where it was measured."""


def layer_costs(
    layers: Sequence[NamedLayer],
    sample: Tensor,
    dtype: torch.dtype,
    timed: bool = False,
    labels: Tensor | None = None,
) -> list[LayerCost]:
    """Run every layer once on a sample, one at a time, so that never more than one of them exists.

    Args:
        layers: undivided by tensor parallelism.
        sample: input of the first layer for one micro-batch, floats in fp32; layers are built and run on its device.
        dtype: in which the run computes.
        timed: measure forward and backward as well.
        labels: of the sample, for a last layer that cannot do without.

    Raises:
        ConfigError: a layer gives no tensor for the next one.
    """
    costs: list[LayerCost] = []
    value: Any = sample
    tables: dict[str, Tensor] = {}
    wanted = {layer.tied_to for layer in layers}
    for layer in layers:
        module = _built(layer, tables, sample.device)
        if layer.name in wanted:
            tables[layer.name] = module.weight  # type: ignore[assignment]
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"parallel.pipeline_stages: layer {costs[-1].name} ({costs[-1].kind}) gives a {type(value).__name__}, "
                f"and stages hand on one tensor; let layers() list modules that give one, or write 1."
            )
        needs_labels = layer is layers[-1] and labels is not None and not _takes_one(module)
        cost, value = _cost(layer, module, [value, labels] if needs_labels else [value], timed)
        costs.append(cost)
    half = torch.finfo(dtype).bits < 32
    return [_in_half(cost) for cost in costs] if half else costs


def _in_half(cost: LayerCost) -> LayerCost:
    return LayerCost(cost.name, cost.kind, cost.parameters, cost.flops, cost.saved_bytes // 2, cost.seconds)


def _built(layer: NamedLayer, tables: dict[str, Tensor], device: torch.device) -> nn.Module:
    with torch.device(device):
        return layer.build(*([] if layer.tied_to is None else [tables[layer.tied_to]]))


def _takes_one(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError:
        return False
    return True


def _cost(layer: NamedLayer, module: nn.Module, arguments: Sequence[Any], timed: bool) -> tuple[LayerCost, Any]:
    """Its cost, and what it gives."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()  # statistics of batch norms must not move
    saved: dict[int, int] = {}  # each storage once: the graph keeps them, so no two have the same address
    own = {_storage(parameter) for parameter in module.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            saved.setdefault(_storage(tensor), tensor.numel() * tensor.element_size())
        return tensor

    inputs = arguments[0].detach().requires_grad_(arguments[0].is_floating_point())
    call = partial(_called, module, inputs, *arguments[1:])
    counter = FlopCounterMode(display=False)
    with counter, saved_tensors_hooks(note, lambda tensor: tensor):
        output = call()
    seconds = _seconds(module, inputs, call) if timed else 0.0
    for part, mode in modes:
        part.training = mode
    parameters = 0 if layer.tied_to is not None else sum(p.numel() for p in module.parameters() if p.requires_grad)
    elements = sum(tensor.numel() for tensor in _tensors(output))
    flops = counter.get_total_flops() + ELEMENTWISE * elements
    kind = type(module).__name__
    cost = LayerCost(layer.name, kind, parameters, flops, sum(saved.values()), seconds)
    return cost, output.detach() if isinstance(output, Tensor) else output


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _called(module: nn.Module, inputs: Tensor, *others: Tensor) -> Any:
    """The inputs as a stage gets them: no leaf, so that a layer may work in place."""
    return module(inputs.clone() if inputs.requires_grad else inputs, *others)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _seconds(module: nn.Module, inputs: Tensor, call: Callable[[], Any]) -> float:
    """Smallest time of a forward and backward pass; gradients are thrown away."""
    wanted: list[Tensor] = [p for p in [inputs, *module.parameters()] if p.requires_grad]
    times = []
    for _ in range(TIMED + 1):
        _wait(inputs.device)
        started = time.perf_counter()
        outputs = [tensor for tensor in _tensors(call()) if tensor.requires_grad]
        if wanted and outputs:
            torch.autograd.grad([tensor.sum() for tensor in outputs], wanted, allow_unused=True)
        _wait(inputs.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weights_of(method: str, costs: Sequence[LayerCost]) -> list[float]:
    """What the sizes of stages are counted in.

    Raises:
        ConfigError: the method is unknown, or its regular expression fits no layer or is none.
    """
    simple: dict[str, Callable[[LayerCost], float]] = {
        "cost": lambda cost: cost.flops,
        "parameters": lambda cost: float(cost.parameters),
        "uniform": lambda cost: 1.0,
        "time": lambda cost: cost.seconds,
    }
    if method in simple:
        return [simple[method](cost) for cost in costs]
    kind, colon, pattern = method.partition(":")
    if kind != "type" or not colon:
        raise ConfigError(
            f"{KEY}: {method!r} is none of cost, parameters, uniform, time, type:REGEX, or a list of numbers of layers."
        )
    try:
        fits = [float(bool(re.search(pattern, cost.kind, re.IGNORECASE))) for cost in costs]
    except re.error as error:
        raise ConfigError(f"{KEY}: {pattern!r} is no regular expression ({error}).") from error
    if not any(fits):
        kinds = ", ".join(dict.fromkeys(cost.kind for cost in costs))
        raise ConfigError(f"{KEY}: no layer's class fits {pattern!r}; there are {kinds}.")
    return fits


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Bounds of `stages` runs of layers, none empty, whose largest sum is smallest; of equal ones the most even.

    Exact, by dynamic programming over (stages, layers).

    Returns:
        stages + 1 indices, from 0 to the number of layers.
    """
    count = len(weights)
    assert 1 <= stages <= count, (stages, count)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: list[dict[int, tuple[float, float, list[int]]]] = [{0: (0.0, 0.0, [0])}]
    for stage in range(1, stages + 1):
        row = {}
        for end in range(stage, count - (stages - stage) + 1):
            row[end] = min(
                (
                    (max(top, size), squares + size * size, [*bounds, end])
                    for begin, (top, squares, bounds) in best[-1].items()
                    if begin < end
                    for size in [sums[end] - sums[begin]]
                ),
                key=lambda choice: choice[:2],
            )
        best.append(row)
    return best[-1][count][2]


def bounds_of(partition: str | list[int], costs: Sequence[LayerCost], stages: int) -> list[int]:
    """Bounds of the stages by `parallel.partition`.

    Raises:
        ConfigError: more stages than layers, or a list that does not add up.
    """
    if stages > len(costs):
        raise ConfigError(f"parallel.pipeline_stages: {stages} stages for {len(costs)} layers; write at most that.")
    if isinstance(partition, str):
        return balanced(weights_of(partition, costs), stages)
    if sum(partition) != len(costs) or len(partition) != stages:
        names = ", ".join(cost.name for cost in costs)
        raise ConfigError(
            f"{KEY}: {partition} adds up to {sum(partition)} layers in {len(partition)} stages, but there are "
            f"{len(costs)} layers ({names}) for {stages} stages."
        )
    bounds = [0]
    for length in partition:
        bounds.append(bounds[-1] + length)
    return bounds


def runs_of(bounds: Sequence[int], stages: int) -> list[list[tuple[int, int]]]:
    """First layer and end of the runs of layers of each stage: one; or, of twice as many, the s-th from both ends."""
    runs = list(itertools.pairwise(bounds))
    if len(runs) == stages:
        return [[run] for run in runs]
    assert len(runs) == 2 * stages, (bounds, stages)
    return [[runs[stage], runs[-1 - stage]] for stage in range(stages)]


def shares_of(bounds: Sequence[int], costs: Sequence[LayerCost], stages: int) -> list[float]:
    """Predicted share of the time of each stage: by measured seconds where there are some, else by operations."""
    sizes = [cost.seconds or cost.flops for cost in costs]
    sums = [sum(sum(sizes[begin:end]) for begin, end in runs) for runs in runs_of(bounds, stages)]
    return [part / sum(sums) for part in sums]


@dataclass(frozen=True)
class Memory:
    """What a rank keeps per parameter and per micro-batch."""

    bytes_per_parameter: float
    micro_batches: int
    tensor: int = 1


def memory_of(engine_config: dict[str, Any], micro_batches: int, data: int, tensor: int) -> Memory:
    """By the usual count (Rajbhandari et al. 2020): weights, gradients and Adam's two moments, fp32 masters in half.

    Args:
        data: ranks that ZeRO-1 divides the optimizer state over.
    """
    half = any(engine_config.get(name, {}).get("enabled") for name in ("fp16", "bf16"))
    stage = int(engine_config.get("zero_optimization", {}).get("stage", 0))
    state = 12 if half or stage else 8  # masters and moments
    return Memory((4 if half else 8) + state / (data if stage else 1), micro_batches, tensor)


def partition_report(
    bounds: Sequence[int], costs: Sequence[LayerCost], memory: Memory, partition: Any, stages: int
) -> list[str]:
    """The table of stages, and what would be more even where they are not."""
    shares = shares_of(bounds, costs, stages)
    rows = [["stage", "layers", "", "parameters", "time", "memory"]]
    for stage, runs in enumerate(runs_of(bounds, stages)):
        own = [cost for begin, end in runs for cost in costs[begin:end]]
        parameters = sum(cost.parameters for cost in own) / memory.tensor
        # with two runs DualPipeV keeps 2 x stages + 1 micro-batches in one or the other of them
        in_flight = min(memory.micro_batches, stages - stage if len(runs) == 1 else stages + 0.5)
        saved = in_flight * sum(cost.saved_bytes for cost in own) / memory.tensor
        total = parameters * memory.bytes_per_parameter + saved
        rows.append(
            [
                str(stage),
                str(len(own)),
                ", ".join(_names(costs[begin:end]) for begin, end in runs),
                f"{parameters:,.0f}",
                f"{shares[stage]:.0%}",
                f"{total / 2**20:,.0f} MiB",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [
        f"stages by {partition}: predicted share of time and memory of a rank",
        *lines,
        *_advice(shares, costs, bounds),
    ]


def _names(run: Sequence[LayerCost]) -> str:
    return run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}"


def _advice(shares: Sequence[float], costs: Sequence[LayerCost], bounds: Sequence[int]) -> list[str]:
    excess = max(shares) * len(shares) - 1
    if excess <= IMBALANCE:
        return []
    worst = shares.index(max(shares))
    line = f"note: stage {worst} takes {excess:.0%} more time than the mean, and all others wait for it"
    measured = "time" if any(cost.seconds for cost in costs) else "cost"
    better = balanced(weights_of(measured, costs), len(bounds) - 1)
    even = max(shares_of(better, costs, len(shares))) * len(shares) - 1
    if even < excess - 0.01:
        lengths = [end - begin for begin, end in itertools.pairwise(better)]
        return [f"{line}; parallel.partition: {lengths} would leave {even:.0%}"]
    return [f"{line}; no other cut is more even: fewer stages, or more and smaller layers, would be"]
