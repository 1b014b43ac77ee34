"""What converting a model to synchronised batch norms keeps, and what it refuses. No process group."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.ops import FrozenBatchNorm2d

from largetrain.errors import ConfigError
from largetrain.models.batch_norm import freeze_batch_norms
from largetrain.parallel.sync_batch_norm import (
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    SyncBatchNormAnyDim,
    Synchronised,
    convert_sync_batch_norm,
)
from largetrain.parallel.sync_statistics import MANY, _local_statistics


def converted(model: nn.Module) -> nn.Module:
    return convert_sync_batch_norm(model, None)


@pytest.mark.parametrize(
    ("layer", "ours"),
    [
        (nn.BatchNorm1d, SyncBatchNorm1d),
        (nn.BatchNorm2d, SyncBatchNorm2d),
        (nn.BatchNorm3d, SyncBatchNorm3d),
        (nn.SyncBatchNorm, SyncBatchNormAnyDim),
    ],
)
def test_classes(layer, ours):
    """Ours are torch's own kind, check dims as it does, and are no nn.SyncBatchNorm, which DDP refuses on the CPU."""
    module = converted(layer(3))
    assert type(module) is ours and isinstance(module, nn.modules.batchnorm._BatchNorm)
    assert not isinstance(module, nn.SyncBatchNorm) and "process_group" not in vars(module)
    with pytest.raises(ValueError, match="expected .*D input"):
        module(torch.zeros(3))
    assert type(converted(module)) is ours


def test_a_model_keeps_all_but_the_classes():
    """Same tensors, keys in the same order, hooks, shared modules, parametrizations, and the same outputs."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, dtype=torch.float32))
    model.append(model[0])
    parametrizations.weight_norm(model[1])
    nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Softplus())
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append("after"))
    model[0].register_forward_pre_hook(lambda *args: calls.append("before"))
    plain = copy.deepcopy(model)
    tensors = {name: id(p) for name, p in model.named_parameters()} | {n: id(b) for n, b in model.named_buffers()}
    assert converted(model) is model
    assert tensors == {n: id(p) for n, p in model.named_parameters()} | {n: id(b) for n, b in model.named_buffers()}
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model[3] is model[0] and isinstance(model[2], Synchronised)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(model(x), plain(x)) and calls == ["before", "after"] * 4
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


def test_a_converted_model_is_copied_and_saved():
    model = converted(torchvision.models.resnet18(num_classes=3))
    average = copy.deepcopy(model)
    assert average.bn1.shared.channel is model.layer1[0].bn1.shared.channel
    assert average.bn1.running_mean is not model.bn1.running_mean
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torchvision.models.resnet18(num_classes=3).load_state_dict(torch.load(file, weights_only=True))


def test_lazy_layers_become_synchronised_ones():
    model = converted(
        nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyBatchNorm2d(dtype=torch.bfloat16), nn.LazyBatchNorm3d())
    )
    model[0](torch.randn(4, 3))
    model[2](torch.randn(4, 3, 2, 2, 2))
    assert [type(model[0]), type(model[2])] == [SyncBatchNorm1d, SyncBatchNorm3d]
    assert isinstance(model[1], nn.LazyBatchNorm2d) and isinstance(model[1], Synchronised)  # until it is used


def test_frozen_layers_and_instance_norms_are_left_alone():
    timm_like = type("FrozenBatchNormAct2d", (nn.Module,), {"running_mean": torch.zeros(3)})()
    model = nn.ModuleList([FrozenBatchNorm2d(3), freeze_batch_norms(nn.BatchNorm2d(3)), timm_like])
    model.append(nn.InstanceNorm2d(3, track_running_stats=True))
    classes = [type(module) for module in model]
    converted(model)
    assert [type(module) for module in model] == classes


def test_half_statistics_become_fp32():
    module = converted(nn.BatchNorm2d(3).bfloat16())
    assert (module.running_mean.dtype, module.running_var.dtype) == (torch.float32, torch.float32)
    assert module.weight.dtype == torch.bfloat16
    assert converted(nn.BatchNorm2d(3).double()).running_var.dtype == torch.float64


class OwnStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))


class LibrarySync(nn.SyncBatchNorm):
    pass


def test_what_cannot_be_converted_is_named():
    """All of it, and then nothing is converted."""
    model = nn.ModuleDict({"stem": OwnStatistics(), "body": nn.ModuleList([nn.BatchNorm2d(3), LibrarySync(3)])})
    with pytest.raises(ConfigError) as caught:
        converted(model)
    first, second = caught.value.problems
    assert "OwnStatistics at 'stem'" in first and "sync_batch_norm: off" in first
    assert "LibrarySync at 'body.1'" in second and "plain batch norms" in second
    assert type(model["body"][0]) is nn.BatchNorm2d


class ByHand(nn.BatchNorm2d):
    def forward(self, x):
        return (x - x.mean((0, 2, 3), keepdim=True)) if self.training else F.batch_norm(x, *self.buffers())


def test_a_subclass_with_arithmetic_of_its_own_is_refused_when_it_runs():
    model = converted(nn.Sequential(nn.Identity(), ByHand(3)))
    with pytest.raises(ConfigError, match="ByHand at '1' computes its statistics without torch's batch_norm"):
        model(torch.randn(2, 3, 4, 4))


@pytest.mark.parametrize(("centre", "spread"), [(0.0, 1.0), (1e4, 1e-2), (-300.0, 5.0)])
def test_statistics_of_large_maps_are_exact_to_rounding(centre, spread):
    """fp32 values far from zero with a small spread: what is subtracted is exact, so the error stays that of the sums.

    Sums of 8,192 terms in fp32: 6 sqrt(2 x 8192 / 3) u = 2.6e-5 of a standard deviation, and of the variance.
    """
    x = (centre + spread * torch.randn(8, 5, 32, 32, dtype=torch.float64)).float()
    count, mean, var = _local_statistics(x)
    exact = x.double()
    assert float(count) == 8 * 32 * 32 >= MANY
    deviation = exact.std((0, 2, 3), correction=0)
    bound = 6 * math.sqrt(2 * 8192 / 3) * 2.0**-24
    # the mean itself is rounded to fp32 once more
    assert ((mean - exact.mean((0, 2, 3))).abs() <= bound * deviation + abs(centre) * 2.0**-23).all()
    assert ((var / deviation.square() - 1).abs() <= bound).all()
