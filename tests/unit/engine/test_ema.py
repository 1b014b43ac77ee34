"""The moving average is the closed form over the weights of applied updates."""

import copy

import pytest
import torch
from torch import nn

from largetrain.engine.ema import Ema

UPDATES = 9


class Model(nn.Module):
    """One weight and a batch norm, whose values the tests set."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(2).double()

    def forward(self, x):
        return self.norm(x) * self.weight


def states(count):
    """Weights and running means after each update."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, 2, dtype=torch.float64, generator=generator)


def follow(ema, model, values, start=0):
    for weight, mean in values[start:]:
        with torch.no_grad():
            model.weight.copy_(weight)
            model.norm.running_mean.copy_(mean)
            model.norm.num_batches_tracked.add_(1)
        ema.update(model)


def closed_form(values, decay, every, warmup):
    """Copies until the last step within the warm-up, or at the first step; then a weighted sum of the steps after."""
    taken = [index + 1 for index in range(len(values)) if (index + 1) % every == 0]
    copied = max([step for step in taken if step <= warmup], default=taken[0])
    after = [step for step in taken if step > copied]
    average = decay ** len(after) * values[copied - 1]
    for place, step in enumerate(after):
        average = average + (1 - decay) * decay ** (len(after) - 1 - place) * values[step - 1]
    return average


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_it_is_the_closed_form(decay, every, warmup):
    """fp64, nine steps of two roundings each on values of order one: 1e-14 is beyond that."""
    model, values = Model(), states(UPDATES)
    ema = Ema(model, decay, every, warmup)
    follow(ema, model, values)
    expected = closed_form(values, decay, every, warmup)
    assert torch.allclose(ema.module.weight, expected[0], rtol=0, atol=1e-14)
    assert torch.allclose(ema.module.norm.running_mean, expected[1], rtol=0, atol=1e-14)
    assert torch.equal(model.weight.detach(), values[-1][0])  # the model itself is left alone


def test_it_starts_as_the_model_and_never_trains():
    model = Model()
    with torch.no_grad():
        model.weight.fill_(3.0)
    ema = Ema(model, 0.9, 1, 0)
    assert torch.equal(ema.module.weight, model.weight) and ema.module is not model
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert not any(module.training for module in ema.module.modules())
    assert model.weight.requires_grad and model.training


@pytest.mark.parametrize("stop", range(1, UPDATES))
def test_it_goes_on_from_its_state(stop):
    """To the bit, also within the warm-up and between two of its steps; the counters are plain."""
    straight_model, model, values = Model(), Model(), states(UPDATES)
    straight, ema = Ema(straight_model, 0.9, 2, 3), Ema(model, 0.9, 2, 3)
    follow(straight, straight_model, values)
    follow(ema, model, values[:stop])
    counters, tensors = ema.counters(), copy.deepcopy(ema.module.state_dict())
    again = Ema(Model(), 0.9, 2, 3)
    again.module.load_state_dict(tensors)
    again.go_to(counters)
    follow(again, model, values, start=stop)
    assert again.updates == straight.updates == UPDATES
    for name, value in straight.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name
