"""Optimizers of the ddp backend by the names of the engine JSON: torch's own updates, or one clear line."""

import pytest
import torch
from torch import nn

from largetrain.config.engine_schema import engine_schema
from largetrain.engine.optimizers import optimizer_by_name, skip_infinite_updates
from largetrain.errors import ConfigError

NEEDS_THE_ENGINE = ("Muon", "MuAdam", "MuAdamW", "MuSGD")  # refused with the JSON, see config/ddp_keys
REFUSED = {
    "Lamb": "optimizer.type: DeepSpeed has no Lamb for CPUs; write AdamW",
    "Lion": "optimizer.type: backend ddp has Lion on GPUs only; write AdamW or SGD.",
    "SparseAdam": "optimizer.type: SparseAdam takes sparse gradients",
}


def groups_of(weight):
    return [{"params": [weight], "lr_factor": 1.0}]


@pytest.mark.parametrize("name", [name for name in engine_schema()["x-optimizers"] if name not in NEEDS_THE_ENGINE])
def test_each_optimizer_makes_torchs_update_or_is_refused(name):
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    if name in REFUSED:
        with pytest.raises(ConfigError) as caught:
            optimizer_by_name({"type": name, "params": {"lr": 0.1}}, groups_of(weight), "cpu")
        assert str(caught.value).startswith(REFUSED[name])
        return
    made = optimizer_by_name({"type": name, "params": {"lr": 0.1}}, groups_of(weight), "cpu")
    other = nn.Parameter(weight.detach().clone())
    kinds = {"Adam": torch.optim.AdamW}  # DeepSpeed's Adam decays like AdamW unless told otherwise
    no_decay = {"weight_decay": 0.0} if name in ("Adam", "AdamW") else {}
    expected = kinds.get(name, getattr(torch.optim, name))([other], lr=0.1, **no_decay)
    for step in range(3):
        for parameter, optimizer in ((weight, made), (other, expected)):
            parameter.grad = torch.tensor([0.5, -1.0, 2.0]) * (step + 1)
            optimizer.step()
    # torch's fused kernel and its plain one may round the last bit of a step otherwise
    assert torch.allclose(weight, other, rtol=1e-6, atol=0)
    assert not torch.equal(weight, torch.tensor([1.0, -2.0, 3.0]))


def test_adam_without_decoupled_decay_and_keys_beyond_torchs():
    weight = nn.Parameter(torch.ones(2))
    section = {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": False, "betas": [0.8, 0.9]}}
    made = optimizer_by_name(section, groups_of(weight), "cpu")
    assert isinstance(made, torch.optim.Adam) and not isinstance(made, torch.optim.AdamW)
    assert made.defaults["betas"] == (0.8, 0.9)
    section["params"]["bias_correction"] = False
    with pytest.raises(ConfigError, match="backend ddp runs Adam as torch's, which takes .* only; remove the others"):
        optimizer_by_name(section, groups_of(weight), "cpu")


def test_clipping_and_skipping():
    """By 0.1 / (norm + 1e-6), on parameters with a gradient; not at all when one is not finite."""
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([used, unused], lr=1.0)
    skip_infinite_updates(optimizer, [used, unused], 0.1)
    used.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert float(optimizer._global_grad_norm) == 5.0 and not optimizer.overflow
    assert used.detach().tolist() == pytest.approx([-0.06, -0.08], rel=1e-6)
    used.grad = torch.tensor([torch.inf, 0.0])
    optimizer.step()
    assert optimizer.overflow and used.detach().tolist() == pytest.approx([-0.06, -0.08], rel=1e-6)
    assert unused.item() == 1.0
