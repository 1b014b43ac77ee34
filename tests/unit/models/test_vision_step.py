"""A sample of torchvision's models takes a training step; launch/models runs all of them."""

import pytest
import torch
from torch import nn

from tests.sweeps import vision_models
from tests.sweeps.vision_models import all_names, main, run_for, try_model

# one of each family whose structure asks for something of its own, with the backend that suits it
SAMPLE = {
    "resnet18": "ddp",
    "mobilenet_v3_small": "ddp",
    "squeezenet1_1": "ddp",  # convolutions without batch norm
    "densenet121": "ddp",
    "efficientnet_b0": "ddp",
    "shufflenet_v2_x0_5": "ddp",
    "googlenet": "ddp",
    "vit_b_32": "deepspeed",
    "lraspp_mobilenet_v3_large": "ddp",
    "deeplabv3_mobilenet_v3_large": "ddp",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_is_built_picks_a_backend_and_takes_a_step(name):
    row = try_model(run_for(name))
    assert row.backend == SAMPLE[name]
    assert (row.batch_norms > 0) == (name not in ("squeezenet1_1", "vit_b_32"))
    assert row.parameters > 300_000


def test_the_sweep_knows_every_model():
    names = all_names()
    assert len(names) == len(set(names)) >= 86
    assert {"resnet50", "vit_h_14", "maxvit_t", "fcn_resnet101", "deeplabv3_mobilenet_v3_large"} <= set(names)


class Stuck(nn.Linear):
    """Its weight gets no gradient, its bias a NaN, or all is well."""

    fault = ""

    def forward(self, images):
        weight = self.weight.detach() if self.fault == "unused" else self.weight
        bias = self.bias * float("nan") if self.fault == "nan" else self.bias
        return nn.functional.linear(images.mean((2, 3)), weight, bias)


@pytest.mark.parametrize(("fault", "text"), [("", ""), ("unused", "no gradient: weight"), ("nan", "the loss is nan")])
def test_the_sweep_finds_what_is_wrong(monkeypatch, fault, text):
    monkeypatch.setattr(vision_models, "build_vision_model", lambda run, classes: Stuck(3, classes))
    monkeypatch.setattr(Stuck, "fault", fault)
    if not fault:
        assert try_model(run_for("resnet18")).backend == "deepspeed"
        return
    with pytest.raises(AssertionError, match=text):
        try_model(run_for("resnet18"))


def test_an_update_that_moves_nothing_is_found(monkeypatch):
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
    with pytest.raises(AssertionError, match="not moved by the update: "):
        try_model(run_for("shufflenet_v2_x0_5"))


def test_the_command_reports_and_its_exit_code_tells(capsys):
    assert main(["shufflenet_v2_x0_5", "resnet19"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:5] == ["shufflenet_v2_x0_5", "0.4", "M", "56", "ddp"]
    assert lines[3].startswith("2 models, 1 took a step; ddp 1, deepspeed 0; ")
    assert lines[4].startswith("failed: resnet19: ConfigError: model.name: 'resnet19' is unknown")
