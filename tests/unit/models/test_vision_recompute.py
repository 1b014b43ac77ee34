"""Recomputed activations: the same numbers as without, to the last bit and the last statistic, from less memory."""

import copy

import pytest
import torch
from torch import nn
from torchvision import models

from largetrain.errors import ConfigError
from largetrain.models.vision_recompute import recompute_stages

MODELS = {
    "resnet18": {},
    "vgg11_bn": {},  # the run of plain layers
    "densenet121": {},  # hands a list on that grows
    "efficientnet_b0": {},  # stochastic depth, and a head that drops out in place
    "swin_t": {},
    "googlenet": {"init_weights": True},  # several outputs
    "lraspp_mobilenet_v3_large": {"weights_backbone": None},  # a dict of outputs
}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = models.get_model(name, weights=None, num_classes=20, **MODELS[name]).train()
    if name == "vgg11_bn":
        model = model.features  # nine tenths of its parameters are in the head
    return model, torch.randn(2, 3, 32, 32)


def total(output) -> torch.Tensor:
    outputs = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return torch.stack([part.square().sum() for part in outputs]).sum()


def one_step(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Sum of all outputs' squares, after its backward pass."""
    torch.manual_seed(4)  # of dropout and stochastic depth
    loss = total(model(images))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_are_those_without(name):
    """Bit equality: the recomputation runs the same kernels on the same numbers, in the same order of summation."""
    plain, images = build(name)
    recomputing = copy.deepcopy(plain)
    stages = recompute_stages(recomputing)
    assert len(stages) > 2, stages
    assert torch.equal(one_step(recomputing, images), one_step(plain, images))
    assert list(recomputing.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():  # running statistics and num_batches_tracked above all
        assert torch.equal(recomputing.state_dict()[key], value), key
    for (key, ours), theirs in zip(recomputing.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), key


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn"])
def test_most_activations_are_not_kept(name):
    def kept_bytes(model: nn.Module, images: torch.Tensor) -> int:
        sizes = []
        note = lambda held: sizes.append(0 if isinstance(held, nn.Parameter) else held.nbytes) or held  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda held: held):
            model(images)
        return sum(sizes)

    model, images = build(name)
    before = kept_bytes(model, images)
    recompute_stages(model)
    assert kept_bytes(model, images) < before / 2  # what is left is the stem, and one input for each stage


class Norms(nn.Sequential):
    """Running statistics of every kind, in one block that recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4, momentum=None),
            nn.InstanceNorm2d(4, track_running_stats=True),
            nn.BatchNorm2d(4, affine=False),
            nn.Conv2d(4, 4, 1),
        )


def test_statistics_with_cumulative_momentum_and_instance_norm_are_counted_once():
    torch.manual_seed(0)
    plain = Norms()
    recomputing = copy.deepcopy(plain)
    assert recompute_stages(recomputing) == ["block.0-4"]
    for seed in range(3):
        images = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
        one_step(plain, images)
        one_step(recomputing, images)
    state = recomputing.state_dict()
    assert state["block.1.num_batches_tracked"] == 3
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())


def test_without_gradients_nothing_changes():
    plain, images = build("googlenet")
    recomputing = copy.deepcopy(plain)
    recompute_stages(recomputing)
    with torch.no_grad():
        assert torch.equal(recomputing.eval()(images), plain.eval()(images))


def test_a_deep_copy_runs_on_its_own_weights():
    model, images = build("lraspp_mobilenet_v3_large")
    recompute_stages(model)
    twin = copy.deepcopy(model)
    expected = one_step(copy.deepcopy(model), images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = one_step(twin, images)
    assert torch.equal(found, expected)
    assert found != 0
    assert isinstance(twin, type(model))


def test_stages_are_the_blocks_of_the_trunk():
    resnet, _ = build("resnet18")
    assert recompute_stages(resnet) == [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]
    vgg, _ = build("vgg11_bn")
    assert recompute_stages(vgg)[:3] == ["0-3", "4-7", "8-14"]


class AltersItsInput(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inner = nn.Identity()

    def forward(self, held):
        x = held[0] if isinstance(held, list) else held
        return super().forward(x.mul_(2))


class PassesLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AltersItsInput(), AltersItsInput()])

    def forward(self, x):
        for block in self.blocks:
            x = block([x])
        return x


def test_a_stage_whose_input_is_altered_in_place_is_refused():
    """Recomputing from the altered input would give other gradients without a word."""
    passes_tensors = nn.Sequential(AltersItsInput(), AltersItsInput())
    passes_lists = PassesLists()
    for model, refusal in ((passes_tensors, RuntimeError), (passes_lists, ConfigError)):
        assert len(recompute_stages(model)) == 2
        with pytest.raises(refusal, match="altered in place|modified by an inplace operation"):
            model(torch.ones(1, 2)).sum().backward()


def test_a_model_without_blocks_has_no_stages():
    assert recompute_stages(nn.Linear(3, 3)) == []
