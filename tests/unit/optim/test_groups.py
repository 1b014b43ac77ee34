"""Parameter groups: every trainable parameter once, in order, with the decay and rate that the config gives it."""

import pytest
import torch
from torch import nn

from largetrain.config.schema import ParametersConfig
from largetrain.errors import ConfigError
from largetrain.optim.groups import groups_report, parameter_groups


class Net(nn.Module):
    """A convolution, four kinds of normalisation, attention and two heads that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
        self.layer10 = nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 5)
        self.second = nn.Linear(4, 5)
        self.second.weight = self.head.weight


def names_by_group(model: nn.Module, groups: list[dict]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def test_nothing_configured_is_one_group_in_the_models_order():
    model = Net()
    model.layer1[0].weight.requires_grad_(False)
    groups = parameter_groups(model, ParametersConfig())
    expected = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names_by_group(model, groups) == [expected]
    assert [sorted(group) for group in groups] == [["lr_factor", "params"]]
    assert groups_report(groups) == []


def test_norms_and_biases_get_their_own_weight_decay():
    model = Net()
    groups = parameter_groups(model, ParametersConfig(norm_weight_decay=0.0, bias_weight_decay=0.25))
    weights, biases, norms = names_by_group(model, groups)
    assert weights == [
        "layer1.0.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "head.weight",
    ]
    assert biases == [
        "layer1.0.bias",
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "head.bias",
        "second.bias",
    ]
    assert norms == [
        "layer1.1.weight",
        "layer1.1.bias",
        "layer1.2.weight",
        "layer1.2.bias",
        "layer10.0.weight",
        "layer10.0.bias",
        "layer10.1.weight",
    ]
    assert [group.get("weight_decay") for group in groups] == [None, 0.25, 0.0]
    assert len(groups_report(groups)) == 3


def test_a_bias_keeps_the_optimizers_decay_when_only_norms_have_their_own():
    model = Net()
    groups = parameter_groups(model, ParametersConfig(norm_weight_decay=0.0))
    rest, norms = names_by_group(model, groups)
    assert "head.bias" in rest and "layer1.1.bias" in norms


def test_the_longest_prefix_of_whole_parts_gives_the_rate():
    model = Net()
    factors = {"layer1": 0.1, "layer1.1": 0.5, "head.": 10}
    groups = parameter_groups(model, ParametersConfig(lr_factors=factors))
    rates = {
        name: group["lr_factor"]
        for group, names in zip(groups, names_by_group(model, groups), strict=True)
        for name in names
    }
    assert rates["layer1.0.weight"] == rates["layer1.2.bias"] == 0.1
    assert rates["layer1.1.weight"] == 0.5
    assert rates["layer10.0.weight"] == rates["attention.in_proj_weight"] == 1.0
    assert rates["head.weight"] == rates["head.bias"] == 10.0
    assert rates["second.bias"] == 1.0


def test_a_shared_parameter_is_found_by_either_name():
    model = Net()
    groups = parameter_groups(model, ParametersConfig(lr_factors={"second": 3.0}))
    assert names_by_group(model, groups)[1] == ["head.weight", "second.bias"]


def test_factor_zero_freezes():
    model = Net()
    groups = parameter_groups(model, ParametersConfig(lr_factors={"layer1": 0, "layer1.0.bias": 1}))
    (names,) = names_by_group(model, groups)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"layer1.0.weight", "layer1.1.weight", "layer1.1.bias", "layer1.2.weight", "layer1.2.bias"}
    assert not frozen & set(names) and "layer1.0.bias" in names


@pytest.mark.parametrize("config", [ParametersConfig(norm_weight_decay=0.0, lr_factors={"head": 2.0, "layer1": 0.5})])
def test_every_trainable_parameter_is_in_exactly_one_group(config):
    model = Net()
    held = [id(parameter) for group in parameter_groups(model, config) for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    torch.optim.SGD(parameter_groups(model, config), lr=0.1)  # torch itself refuses a parameter in two groups


def test_weights_under_weight_norm_are_no_norm():
    class WeightNormLinear(nn.Linear):
        pass

    class NormalizedLinear(nn.Linear):
        pass

    model = nn.Sequential(WeightNormLinear(2, 2, bias=False), NormalizedLinear(2, 2, bias=False), nn.BatchNorm1d(2))
    groups = parameter_groups(model, ParametersConfig(norm_weight_decay=0.0))
    assert names_by_group(model, groups) == [["0.weight", "1.weight"], ["2.weight", "2.bias"]]


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        ("hed", "did you mean 'head'?"),
        ("layer", "did you mean 'layer1' or 'layer10'?"),
        ("layer1.9", "there are: layer1.0, layer1.1, layer1.2."),
        ("layer1.0.wight", "did you mean 'layer1.0.weight'?"),
        ("classifier", "there are: layer1, layer10, attention, head, second."),
        ("layer1.features", "there are: layer1.0, layer1.1, layer1.2."),
        ("", "there are:"),
        (".", "there are:"),
    ],
)
def test_a_prefix_that_fits_nothing_is_named_with_those_near_it(prefix, hint):
    with pytest.raises(ConfigError) as caught:
        parameter_groups(Net(), ParametersConfig(lr_factors={prefix: 0.5}))
    assert str(caught.value).startswith(f"parameters.lr_factors.{prefix}: ")
    assert hint in str(caught.value)


@pytest.mark.parametrize("freeze", [True, False])
def test_nothing_left_to_train_is_an_error(freeze):
    model = nn.Sequential(nn.Linear(2, 2))
    factors = {"0": 0.0}
    if freeze:
        model.requires_grad_(False)
        factors = {}
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        parameter_groups(model, ParametersConfig(lr_factors=factors))
