"""Counts, map sizes, freezing and the report of a model's batch norms."""

import copy

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import segmentation
from torchvision.ops import FrozenBatchNorm2d

from largetrain.errors import ConfigError
from largetrain.models.batch_norm import (
    BatchNormSite,
    batch_norm_report,
    batch_norm_sites,
    count_layers,
    freeze_batch_norms,
    set_momentum,
    wants_sync,
)
from largetrain.parallel.sync_batch_norm import convert_sync_batch_norm


def deeplab(**kw):
    return segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5, **kw)


# ---------------------------------------------------------------- counts


def test_counts_of_resnet18():
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    counts = count_layers(model)
    # All but 20 batch norms of 4,800 channels with weight and bias, and the head of 512 x 1000 + 1000.
    assert (counts.parameters, counts.convolution_parameters) == (11_689_512, 11_689_512 - 9_600 - 513_000)
    assert counts.reason == "20 live batch-norm layers, 95 % of 11,689,512 parameters in convolutions"


def test_counts_take_each_module_and_parameter_once_and_only_trained_ones():
    shared = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), shared, nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4), shared)
    model.extend([FrozenBatchNorm2d(4), nn.ConvTranspose1d(2, 2, 1), nn.Linear(3, 3), nn.LazyBatchNorm2d()])
    model[2].weight = model[0].weight
    model[7].requires_grad_(False)
    counts = count_layers(convert_sync_batch_norm(model, None))
    assert (counts.live_batch_norms, counts.frozen_batch_norms) == (3, 1)
    assert counts.convolution_parameters == 12 + 4 + (4 + 2)
    assert counts.parameters == counts.convolution_parameters + 2 * 8
    assert counts.reason.startswith("3 live batch-norm layers (1 frozen), 57 % of 38 parameters")
    assert count_layers(nn.Identity()).convolution_share == 0.0


# ---------------------------------------------------------------- freezing


class Fused(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.drop(super().forward(x))


@pytest.mark.parametrize("make", [nn.BatchNorm2d, Fused, lambda n: convert_sync_batch_norm(nn.BatchNorm2d(n), None)])
def test_frozen_batch_norms_stay_as_they_are(make):
    """After model.train(), for statistics and weights; the layer still passes gradients on."""
    model = nn.Sequential(make(3))
    keys, layer = list(model.state_dict()), model[0]
    calls = []
    layer.register_forward_hook(lambda *args: calls.append(1))
    nn.init.constant_(layer.running_mean, 2.0)
    assert freeze_batch_norms(model) is model and model[0] is layer
    before = copy.deepcopy(model.state_dict())
    model.train()
    x = torch.full((2, 3, 2, 2), 5.0, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert calls and list(model.state_dict()) == keys
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters()) and x.grad.abs().sum() > 0
    if make is Fused:
        assert layer.drop.training and set(y.flatten().round().tolist()) == {
            0.0,
            6.0,
        }  # dropout doubles (5 - 2) or drops
    else:
        torch.testing.assert_close(y.detach(), torch.full_like(y, 3 / (1 + 1e-5) ** 0.5))
    assert count_layers(model).live_batch_norms == 0 and not copy.deepcopy(model).train()[0].training


def test_a_fused_activation_is_trained_on():
    model = Fused(3)
    model.act = nn.PReLU()
    nn.utils.parametrize.register_parametrization(model, "weight", nn.Softplus())
    freeze_batch_norms(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["act.weight"]


def test_a_batch_norm_without_statistics_cannot_be_frozen():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False), nn.LazyBatchNorm2d())
    with pytest.raises(ConfigError) as caught:
        freeze_batch_norms(model)
    untracked, lazy = caught.value.problems
    assert "model.freeze_batch_norm: the batch norm '1' keeps no running statistics" in untracked
    assert "'2' has no size yet" in lazy and type(model[0]) is nn.BatchNorm2d


# ---------------------------------------------------------------- sites


def test_sites_of_resnet18():
    model = torchvision.models.resnet18().eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sites = batch_norm_sites(model, (8, 3, 64, 64))
    assert sites is not None and len(sites) == 20
    assert sites[0] == BatchNormSite("bn1", 64, (32, 32), 1024.0)
    assert sites[-1] == BatchNormSite("layer4.1.bn2", 512, (2, 2), 4.0)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not model.training and not model.bn1._forward_pre_hooks and torch.equal(random, torch.get_rng_state())


def test_sites_of_a_segmentation_model_with_an_auxiliary_head():
    model = convert_sync_batch_norm(deeplab(aux_loss=True), None)
    sites = {site.name: site for site in batch_norm_sites(model, (1, 3, 64, 96)) or []}
    assert len(sites) == count_layers(model).live_batch_norms
    assert sites["classifier.0.convs.4.2"] == BatchNormSite("classifier.0.convs.4.2", 256, (1, 1), 1.0)
    assert sites["aux_classifier.1"].map_size == (8, 12)


def test_sites_of_a_model_with_auxiliary_outputs_in_training():
    model = torchvision.models.googlenet(num_classes=3, init_weights=False)
    assert "aux1.conv.bn" in {site.name for site in batch_norm_sites(model, (1, 3, 64, 64)) or []}


class NeedsValues(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


def test_sites_of_a_model_that_needs_values_are_unknown():
    assert batch_norm_sites(nn.Sequential(nn.BatchNorm2d(3), NeedsValues()), (1, 3, 8, 8)) is None


def test_sites_are_those_of_live_layers_with_the_smallest_map():
    shared = nn.BatchNorm2d(3)
    frozen = freeze_batch_norms(nn.BatchNorm2d(3))
    model = nn.Sequential(shared, frozen, nn.AvgPool2d(2), shared, nn.Flatten(), nn.BatchNorm1d(48))
    assert batch_norm_sites(model, (1, 3, 8, 8)) == [
        BatchNormSite("0", 3, (4, 4), 16.0),
        BatchNormSite("5", 48, (), 1.0),
    ]


# ---------------------------------------------------------------- auto and the report

WIDE, POINT = BatchNormSite("stem.bn", 8, (32, 32), 1024.0), BatchNormSite("pool.bn", 8, (1, 1), 1.0)


@pytest.mark.parametrize(
    ("sites", "micro_batch", "world_size", "dense", "expected"),
    [
        ([], 1, 2, True, (False, "no trained batch norm")),
        ([POINT], 1, 1, True, (False, "one rank")),
        ([WIDE], 64, 2, True, (True, "dense prediction")),
        (None, 15, 2, False, (True, "15 images per rank, fewer than 16")),
        ([WIDE], 1, 2, False, (True, "1 image per rank, fewer than 16")),
        ([WIDE], 16, 2, False, (False, "16 images per rank, at least 16")),
        ([WIDE, POINT], 16, 2, False, (True, "pool.bn sees one value per image and channel")),
        (None, 16, 2, False, (False, "16 images per rank, at least 16")),
    ],
)
def test_auto(sites, micro_batch, world_size, dense, expected):
    assert wants_sync(sites, micro_batch, world_size, dense) == expected


def test_report_of_a_synchronised_run():
    assert batch_norm_report([WIDE, POINT], 4, 8, 1, synchronised=True) == [
        "batch norm: 2 trained layers, 32 (pool.bn) to 32,768 (stem.bn) values per channel; "
        "statistics synchronised over 4 ranks, 32 images each"
    ]


def test_report_names_every_risk():
    lines = batch_norm_report([WIDE, POINT], 2, 1, 3, synchronised=False, world_size=4)
    assert lines[0] == (
        "batch norm: 2 trained layers, 1 (pool.bn) to 1,024 (stem.bn) values per channel; "
        "statistics of each rank alone, 1 image each"
    )
    assert lines[1].startswith("batch norm: pool.bn would get one value per channel, which torch refuses in training;")
    assert lines[2] == "batch norm: 1 image behind each statistic, fewer than 16: expect lower accuracy"
    assert lines[3] == (
        "batch norm: with 3 micro-batches per update, statistics are of 1 image, not of the global batch of 12"
    )
    assert lines[4].startswith("batch norm: the running statistics of 4 ranks drift apart;") and len(lines) == 5


def test_report_of_groups_of_ranks_and_of_unknown_maps():
    assert batch_norm_report(None, 2, 8, 2, synchronised=True, world_size=4) == [
        "batch norm: map sizes unknown (the model does not run on the meta device); "
        "statistics synchronised over 2 ranks, 16 images each",
        "batch norm: with 2 micro-batches per update, statistics are of 16 images, not of the global batch of 64",
        "batch norm: the running statistics of 2 groups of ranks drift apart; they are averaged before each evaluation "
        "and checkpoint. sync_batch_norm_ranks: all keeps them equal",
    ]
    assert batch_norm_report([], 2, 8, 2, synchronised=True) == []
    assert "1,024 values per channel" in batch_norm_report([WIDE], 1, 1, 1, synchronised=False)[0]


def test_momentum_is_set_on_every_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4, momentum=None)))
    set_momentum(model, 0.25)
    x = torch.randn(8, 3, 2, 2)
    before = model[1].running_mean.clone()
    model(x)
    torch.testing.assert_close(model[1].running_mean, 0.75 * before + 0.25 * model[0](x).mean((0, 2, 3)))
    assert model[2][0].momentum == 0.25
    with pytest.raises(ConfigError, match="model.batch_norm_momentum: the model has no batch norm"):
        set_momentum(nn.Linear(2, 2), 0.25)
