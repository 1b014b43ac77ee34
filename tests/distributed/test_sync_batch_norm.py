"""Batch norm over ranks against torch's plain batch norm over the whole batch in one process."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from largetrain.errors import ConfigError
from largetrain.parallel import channel
from largetrain.parallel.groups import batch_norm_group
from largetrain.parallel.sync_batch_norm import Synchronised, convert_sync_batch_norm
from tests.ranks import run_ranks

CHANNELS = 5
LAYERS = {nn.BatchNorm1d: [(CHANNELS,), (CHANNELS, 3)], nn.BatchNorm2d: [(CHANNELS, 3, 4)]}
LAYERS[nn.BatchNorm3d] = [(CHANNELS, 2, 3, 4)]
OPTIONS = [{}, {"affine": False}, {"bias": False}, {"momentum": None}, {"track_running_stats": False}]
CASES = [(layer, shape, kw) for layer, shapes in LAYERS.items() for shape in shapes for kw in OPTIONS]
SPLITS = [(2, 2), (3, 1), (1, 1, 1, 1), (4, 0), (0, 1, 3)]
STEPS = 3


def tolerance(dtype: torch.dtype) -> dict:
    """For values of a few units that come from sums of at most 4 x 24 = 96 terms.

    In fp32 a sum in another order differs by at most terms x eps of the terms' size, and here by its root typically;
    16 eps of values up to about 4 leaves room for that and for the roundings of mean, deviation and scale.
    """
    error = 1e-12 if dtype == torch.float64 else 64 * torch.finfo(dtype).eps
    return {"rtol": error, "atol": error}


def batches(shape, dtype, steps=STEPS):
    """Input and output gradient of the whole batch of 4, for each step."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x, dy = torch.randn(2, 4, *shape, generator=generator, dtype=torch.float64).to(dtype)
        yield 3 * x - 1, dy


def outcome(model, shape, dtype, rows=slice(None), input_grad=True) -> dict:
    """Train without an optimizer: last output, input and parameter gradients, and the buffers."""
    for x, dy in batches(shape, dtype):
        model.zero_grad()
        x = x[rows].clone().requires_grad_(input_grad)
        y = model(x)
        y.backward(dy[rows]) if y.requires_grad else None
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, "grads": grads, "buffers": dict(model.named_buffers())}


def assert_equal_to_one_process(parts: list[dict], whole: dict, dtype) -> None:
    """Rows of the ranks joined, weight gradients summed; statistics bit-equal on all ranks."""
    close = partial(assert_close, **tolerance(dtype))
    close(torch.cat([part["y"] for part in parts]), whole["y"])
    if whole["dx"] is not None:
        close(torch.cat([part["dx"] for part in parts]), whole["dx"])
    for part in parts:
        assert part["grads"].keys() == whole["grads"].keys()
        assert part["buffers"].keys() == whole["buffers"].keys()
        for name, buffer in part["buffers"].items():
            assert torch.equal(buffer, parts[0]["buffers"][name])
            close(buffer, whole["buffers"][name])
    for name, grad in whole["grads"].items():
        close(sum(part["grads"][name] for part in parts), grad)


def rows_of(splits) -> slice:
    rank = dist.get_rank()
    return slice(sum(splits[:rank]), sum(splits[: rank + 1]))


def weighted(layer: nn.Module) -> nn.Module:
    """Weights that differ from channel to channel."""
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return layer


# ---------------------------------------------------------------- layers


def layers_on_a_rank(splits, shared_memory):
    channel.SHARED_MEMORY = shared_memory and channel.SHARED_MEMORY
    dist.init_process_group("gloo")
    made = {}
    for index, (layer, shape, kw) in enumerate(CASES):
        for dtype in (torch.float64, torch.float32):
            model = convert_sync_batch_norm(weighted(layer(CHANNELS, dtype=dtype, **kw)), None)
            assert isinstance(model, layer)
            made[index, dtype] = outcome(model, shape, dtype, rows_of(splits))
    return made


@pytest.mark.parametrize(
    ("splits", "shared_memory"), [*((splits, True) for splits in SPLITS), ((3, 1), False), ((4, 0), False)]
)
def test_ranks_equal_one_process(splits, shared_memory):
    """Outputs, input gradients, summed weight gradients and running statistics, for any split of the batch."""
    ranks = run_ranks(layers_on_a_rank, len(splits), splits, shared_memory)
    for (index, dtype), whole in reference_layers().items():
        assert_equal_to_one_process([made[index, dtype] for made in ranks], whole, dtype)


@cache
def reference_layers():
    return {
        (index, dtype): outcome(weighted(layer(CHANNELS, dtype=dtype, **kw)), shape, dtype)
        for index, (layer, shape, kw) in enumerate(CASES)
        for dtype in (torch.float64, torch.float32)
    }


# ---------------------------------------------------------------- models


class FusedBySuper(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(super().forward(x))


class FusedByFunction(nn.BatchNorm2d):
    def forward(self, x):
        self.num_batches_tracked.add_(1)
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.3, self.eps)
        return F.silu(y)


class FusedByTorch(nn.BatchNorm2d):
    def forward(self, x):
        running = self.running_mean, self.running_var
        return torch.batch_norm(x, self.weight, self.bias, *running, self.training, 0.3, self.eps, False).tanh()


class OwnBase(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input):
        assert input.dim() == 4


class Twice(nn.Module):
    """One batch norm in two places."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.again = nn.Sequential(nn.Tanh(), self.norm)

    def forward(self, x):
        return self.again(self.norm(x)) + self.norm(x * x)


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def timm_norm():
    return pytest.importorskip("timm.layers").BatchNormAct2d(CHANNELS, act_layer=nn.SiLU)


def without_weight_gradient():
    layer = nn.BatchNorm2d(CHANNELS)
    layer.weight.requires_grad_(False)
    return layer


MODELS = {
    "fused by super()": lambda: FusedBySuper(CHANNELS),
    "fused by F.batch_norm": lambda: FusedByFunction(CHANNELS),
    "fused by torch.batch_norm": lambda: FusedByTorch(CHANNELS),
    "subclass of the base": lambda: OwnBase(CHANNELS),
    "timm": timm_norm,
    "used twice": Twice,
    "recomputed": lambda: Recomputed(nn.Tanh(), nn.BatchNorm2d(CHANNELS), nn.Tanh(), nn.BatchNorm2d(CHANNELS)),
    "lazy": lambda: nn.Sequential(nn.LazyBatchNorm2d(), nn.Tanh()),
    "compiled": lambda: nn.Sequential(nn.Tanh(), nn.BatchNorm2d(CHANNELS), nn.Tanh()),
    "weight without gradient": without_weight_gradient,
    "torch's SyncBatchNorm": lambda: nn.SyncBatchNorm(CHANNELS),
    "channels last": lambda: nn.BatchNorm2d(CHANNELS),
    "two layers in channels last": lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 1)),
}
PLAIN = {"torch's SyncBatchNorm": lambda: nn.BatchNorm2d(CHANNELS)}
SHAPE, UNEVEN = (CHANNELS, 3, 4), (3, 1)


def built(name, make):
    torch.manual_seed(0)
    model = make().double()
    if "channels last" in name:
        model.register_forward_pre_hook(lambda module, args: args[0].contiguous(memory_format=torch.channels_last))
        model.register_forward_hook(
            lambda module, args, y: check(y.is_contiguous(memory_format=torch.channels_last), y)
        )
    return model


def check(condition, value):
    assert condition
    return value


def models_on_a_rank():
    dist.init_process_group("gloo")
    made = {}
    for name, make in MODELS.items():
        try:
            model = convert_sync_batch_norm(built(name, make), None)
        except pytest.skip.Exception:
            continue
        if name == "compiled":
            model.compile(backend="eager")
        if name == "lazy":
            model(next(batches(SHAPE, torch.float64))[0][rows_of(UNEVEN)])
        made[name] = outcome(model, SHAPE, torch.float64, rows_of(UNEVEN), input_grad=name != "lazy")
    return made


@cache
def models_on_ranks():
    return run_ranks(models_on_a_rank, 2)


@pytest.mark.parametrize("name", MODELS)
def test_converted_models_equal_one_process(name):
    """Subclasses, shared and lazy modules, recomputation and layouts, on 3 + 1 images against 4."""
    model = built(name, PLAIN.get(name, MODELS[name]))
    if name == "lazy":
        model(next(batches(SHAPE, torch.float64))[0])
    whole = outcome(model, SHAPE, torch.float64, input_grad=name != "lazy")
    assert_equal_to_one_process([made[name] for made in models_on_ranks()], whole, torch.float64)


# ---------------------------------------------------------------- numbers at the edge


def edges_on_a_rank():
    dist.init_process_group("gloo")
    found = {}
    layer = convert_sync_batch_norm(nn.BatchNorm2d(CHANNELS, affine=False), None)
    y = layer(far_from_zero()[rows_of((5, 3))])
    found["far"] = y, layer.running_mean, layer.running_var
    for dtype in (torch.bfloat16, torch.float16):
        layer = convert_sync_batch_norm(weighted(nn.BatchNorm2d(CHANNELS)), None)
        x, dy = (t[rows_of(UNEVEN)].to(dtype) for t in next(batches(SHAPE, torch.float32)))
        x = x.requires_grad_()
        with torch.autocast("cpu", dtype):
            y = layer(x)
        y.backward(dy)
        found[dtype] = y.detach(), x.grad, layer.weight.grad, layer.running_mean, layer.running_var
    half = convert_sync_batch_norm(nn.BatchNorm2d(CHANNELS).bfloat16(), None)
    y = half(torch.randn(2, *SHAPE, dtype=torch.bfloat16, requires_grad=True))
    y.sum().backward()
    found["half weights"] = y.dtype, half.weight.grad.dtype, half.running_mean.dtype, half.running_var.dtype
    with pytest.raises(ValueError, match="more than 1 value per channel.*0 in total on the 2 ranks|.*1 in total"):
        layer(torch.randn(dist.get_rank(), CHANNELS, 1, 1))
    layer.eval()
    if dist.get_rank() == 0:  # would wait for the other rank if it were a collective
        found["eval"] = torch.equal(layer(x.detach()), F.batch_norm(x.detach(), *stats(layer)))
    return found


def stats(layer):
    return layer.running_mean, layer.running_var, layer.weight, layer.bias


def far_from_zero():
    """Values 1e4 +- 1e-2 in fp32, where E[x^2] - E[x]^2 has no correct digit."""
    x = torch.randn(8, CHANNELS, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (1e4 + 1e-2 * x).float()


@cache
def edges():
    return run_ranks(edges_on_a_rank, 2)


def test_statistics_far_from_zero_stay_accurate():
    """As accurate as the mean that fp32 can hold: a unit in its last place is 1e-3, a tenth of the deviation."""
    x = far_from_zero().double()
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    ulp = 2.0**-10
    for _, running_mean, running_var in edges_parts("far"):
        assert_close(running_mean.double(), 0.1 * mean, rtol=2**-23, atol=0)
        # Merging moves the centre of each rank's sum by the rounding of its mean, at most ulp / 2, against a distance
        # of the ranks' means of less than 1e-3.
        assert_close((running_var.double() - 0.9) / 0.1, var * x.numel() / (x.numel() - 1), rtol=0, atol=ulp * 1e-3)
    assert float(var.min()) > 9e-5
    y = torch.cat([y for y, *_ in edges_parts("far")]).double()
    scale = (var + 1e-5).rsqrt().view(1, -1, 1, 1)
    # Rounding of the mean (1/2), of x scale and of mean scale (1/2 each, one binade up at most: 1 each).
    assert float((y - (x - mean.view(1, -1, 1, 1)) * scale).abs().max()) < 2.5 * ulp * float(scale.max())


def edges_parts(key):
    return [found[key] for found in edges()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_have_fp32_statistics(dtype):
    """Under autocast: output and gradient in half, statistics those of the same values in fp32."""
    x, dy = (t.to(dtype).float() for t in next(batches(SHAPE, torch.float32)))
    layer = weighted(nn.BatchNorm2d(CHANNELS))
    y = layer(x.requires_grad_())
    y.backward(dy)
    parts = edges_parts(dtype)
    assert all(part[0].dtype == part[1].dtype == dtype for part in parts)
    once = {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}  # rounded once from fp32
    assert_close(torch.cat([part[0] for part in parts]).float(), y.detach(), **once)
    assert_close(torch.cat([part[1] for part in parts]).float(), x.grad, **once)
    assert_close(sum(part[2] for part in parts), layer.weight.grad, **tolerance(torch.float32))
    for *_, running_mean, running_var in parts:
        assert_close((running_mean, running_var), (layer.running_mean, layer.running_var), **tolerance(torch.float32))


def test_half_weights_keep_fp32_statistics():
    assert edges_parts("half weights") == [(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)] * 2


def test_evaluation_is_no_collective():
    """One rank alone evaluates; the result is that of the running statistics."""
    assert edges()[0]["eval"] is True


# ---------------------------------------------------------------- groups and copies


def groups_on_a_rank():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with pytest.raises(ConfigError, match="sync_batch_norm_ranks: 3 does not divide 4 ranks.*1, 2, 4, or all"):
        batch_norm_group(3, 2)
    assert batch_norm_group("all", 2) is None and batch_norm_group(4, 2) is None
    members = {size: dist.get_process_group_ranks(batch_norm_group(size, 2)) for size in (1, 2, "node")}
    pair = convert_sync_batch_norm(nn.BatchNorm1d(1, momentum=1.0), batch_norm_group("node", 2))
    average = copy.deepcopy(pair)
    pair(torch.tensor([[float(rank)]]))
    average(torch.tensor([[float(rank) + 10]]))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        convert_sync_batch_norm(nn.BatchNorm1d(1), batch_norm_group(1, 2))(torch.zeros(1, 1))
    return members, float(pair.running_mean), float(average.running_mean), isinstance(average, Synchronised)


def test_statistics_are_shared_within_groups_of_ranks():
    """Two groups of two, also for a deep copy of the model, which uses the same process group."""
    found = run_ranks(groups_on_a_rank, 4)
    assert [members for members, *_ in found] == [
        {1: [rank], 2: pair, "node": pair} for rank, pair in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]])
    ]
    assert [rest for _, *rest in found] == [[0.5, 10.5, True]] * 2 + [[2.5, 12.5, True]] * 2
