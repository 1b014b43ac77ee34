"""Pretrained weights: what is loaded, what may be left out, and that everything else is named and refused."""

import re
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer

from largetrain.config.vision_schema import (
    ClassificationData,
    ClassificationRun,
    SegmentationData,
    SegmentationLoss,
    SegmentationModelConfig,
    SegmentationRun,
    VisionModelConfig,
)
from largetrain.errors import ConfigError
from largetrain.models.vision import build_vision_model
from largetrain.models.vision_weights import load_pretrained

SMALL = "shufflenet_v2_x0_5"
URL_NAME = "shufflenetv2_x0.5-f707e7126e.pth"


def a_run(**model) -> ClassificationRun:
    return ClassificationRun(model=VisionModelConfig(**{"name": SMALL} | model), data=ClassificationData(image_size=32))


def a_state(num_classes: int = 1000, name: str = SMALL, **args) -> dict[str, torch.Tensor]:
    """Weights that no initialisation gives: every float tensor is shifted by 1."""
    model = models.get_model(name, weights=None, num_classes=num_classes, **args)
    return OrderedDict((k, v + 1 if v.is_floating_point() else v) for k, v in model.state_dict().items())


def built(run, num_classes: int = 10) -> tuple[dict[str, torch.Tensor], list[str]]:
    lines: list[str] = []
    return build_vision_model(run, num_classes, lines.append).state_dict(), lines


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {f"module.{name}": tensor for name, tensor in state.items()}, "args": {"lr": 0.1}},
        lambda state: (
            {f"module._orig_mod.{name}": tensor for name, tensor in state.items()} | {"n_averaged": torch.tensor(4)}
        ),
    ],
    ids=["plain", "state_dict", "model_module", "averaged_compiled"],
)
def test_a_file_is_unwrapped_and_loaded(tmp_path, wrap):
    state = a_state(10)
    torch.save(wrap(state), tmp_path / "weights.pth")
    found, lines = built(a_run(pretrained=str(tmp_path / "weights.pth")))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert lines == [f"loaded {len(state)} tensors from {tmp_path}/weights.pth"]


def test_safetensors_are_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = a_state(10)
    safetensors.save_file(dict(state), tmp_path / "w.safetensors")
    found, _ = built(a_run(pretrained=str(tmp_path / "w.safetensors")))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:100])
    with pytest.raises(ConfigError, match="cut.safetensors cannot be read"):
        built(a_run(pretrained=str(tmp_path / "cut.safetensors")))


def test_a_head_of_another_size_is_left_as_initialised_and_said(tmp_path):
    state = a_state(1000)
    torch.save(state, tmp_path / "w.pth")
    torch.manual_seed(5)
    fresh = models.get_model(SMALL, weights=None, num_classes=10).state_dict()
    torch.manual_seed(5)
    found, lines = built(a_run(pretrained=str(tmp_path / "w.pth")))
    assert all(torch.equal(found[name], state[name]) for name in state if not name.startswith("fc."))
    assert torch.equal(found["fc.weight"], fresh["fc.weight"]) and torch.equal(found["fc.bias"], fresh["fc.bias"])
    assert lines[0].startswith(f"loaded {len(state) - 2} tensors")
    assert lines[1].endswith(": fc.weight, fc.bias")


@pytest.mark.parametrize("pretrained", [True, "IMAGENET1K_V1", "DEFAULT", "ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1"])
def test_torchvisions_weights_are_taken_from_the_cache(tmp_path, monkeypatch, pretrained):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    state = a_state(1000)
    torch.save(state, tmp_path / "hub" / "checkpoints" / URL_NAME)
    found, lines = built(a_run(pretrained=pretrained), num_classes=1000)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert "ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1" in lines[0]


def test_offline_the_message_says_which_file_goes_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for variable in ("https_proxy", "HTTPS_PROXY"):  # a port that nobody listens on: offline wherever the test runs
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(ConfigError) as caught:
        built(a_run(pretrained=True))
    text = str(caught.value)
    assert text.startswith(f"model.pretrained: {URL_NAME} is not in {tmp_path}/hub/checkpoints, and https://")
    assert "put that file there" in text


def without(state: dict, *names: str) -> dict:
    return {name: tensor for name, tensor in state.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: without(s, "conv1.0.weight", "conv1.1.bias"), "lacks conv1.0.weight, conv1.1.bias. "),
        (lambda s: s | {"extra.weight": torch.zeros(2)}, "holds extra.weight, which the model has not"),
        (
            lambda s: s | {"conv1.0.weight": torch.zeros(24, 3, 5, 5)},
            "does not fit the model: conv1.0.weight is [24, 3, 5, 5] there and [24, 3, 3, 3] here",
        ),
        (
            lambda s: {f"encoder.{n}": t for n, t in s.items()},
            "none of its 338 names is one of the model's; it has encoder.conv1.0.weight, ",
        ),
        (lambda s: {}, "is empty, not parameters by name"),
        (lambda s: [1, 2], "holds a list, not parameters by name"),
        (lambda s: {"epoch": 3, "best": 0.5}, "holds more than tensors: epoch, best"),
        # the sixth is a batch count, which torch starts at 0 where it is absent
        (lambda s: without(s, *list(s)[:6]), "and 2 more"),
        (lambda s: nn.Linear(2, 2), "could run code and is not loaded"),
    ],
    ids=["missing", "unexpected", "reshaped", "no_match", "empty", "list", "no_tensors", "many", "object"],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, change, text):
    torch.save(change(a_state(10)), tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        built(a_run(pretrained=str(tmp_path / "w.pth")))
    assert str(caught.value).startswith(f"model.pretrained: {tmp_path}/w.pth")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"PK\x03\x04cut", b"\x80\x02}q\x00.", b"\x80"])
def test_damaged_files_are_named(tmp_path, content):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"model.pretrained: {tmp_path}/w.pth")):
        built(a_run(pretrained=str(tmp_path / "w.pth")))


def test_no_code_in_a_file_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "marker"), "w"))

    torch.save({"model": Evil()}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="could run code"):
        built(a_run(pretrained=str(tmp_path / "w.pth")))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("pretrained", "text"),
    [
        ("IMAGENET1K_V2", "'IMAGENET1K_V2' is neither a file nor a name of this model's weights; did you mean"),
        ("Other_Weights.IMAGENET1K_V1", "is neither a file nor a name"),
        ("nowhere/weights.pth", "there is no file nowhere/weights.pth"),
    ],
)
def test_unknown_weights_are_named(pretrained, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        built(a_run(pretrained=pretrained))


def test_densenets_published_names_are_understood(tmp_path):
    state = a_state(10, "densenet121")
    old = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", name): tensor for name, tensor in state.items()}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "w.pth")
    found, _ = built(a_run(name="densenet121", pretrained=str(tmp_path / "w.pth")))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("old", [True, False])
def test_versions_of_the_layers_reach_their_own_renaming(tmp_path, prefix, old):
    """torchvision's perceptrons rename what their first version wrote, which they know from the file's metadata."""
    make = partial(VisionTransformer, 32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=4, num_classes=10)
    state = make().state_dict()
    saved = OrderedDict((prefix + name, tensor + 1) for name, tensor in state.items())
    if old:
        for layer, was in ((0, "linear_1"), (3, "linear_2")):
            for kind in ("weight", "bias"):
                stem = f"{prefix}encoder.layers.encoder_layer_0.mlp."
                saved[f"{stem}{was}.{kind}"] = saved.pop(f"{stem}{layer}.{kind}")
    else:
        saved._metadata = {(prefix + k).rstrip("."): v for k, v in state._metadata.items()}
    torch.save(saved, tmp_path / "w.pth")
    model = make()
    load_pretrained(model, str(tmp_path / "w.pth"), None, "model.pretrained", 10)
    assert all(torch.equal(tensor, state[name] + 1) for name, tensor in model.state_dict().items())


def test_a_vit_for_another_image_size_is_refused(tmp_path):
    make = partial(VisionTransformer, patch_size=16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=4)
    torch.save(make(image_size=64, num_classes=1000).state_dict(), tmp_path / "w.pth")
    with pytest.raises(
        ConfigError, match="encoder.pos_embedding is .* the data.image_size that they are for"
    ) as caught:
        load_pretrained(make(image_size=32, num_classes=10), str(tmp_path / "w.pth"), None, "model.pretrained", 10)
    assert "head" not in str(caught.value)


def segmentation_run(aux_weight: float = 0.5, **model) -> SegmentationRun:
    return SegmentationRun(
        model=SegmentationModelConfig(**{"name": "deeplabv3_mobilenet_v3_large"} | model),
        data=SegmentationData(image_size=32),
        loss=SegmentationLoss(aux_weight=aux_weight),
    )


def test_the_backbone_takes_classification_weights_without_their_head(tmp_path):
    state = a_state(1000, "mobilenet_v3_large")
    torch.save(state, tmp_path / "w.pth")
    found, lines = built(segmentation_run(pretrained_backbone=str(tmp_path / "w.pth")), 5)
    features = {name.removeprefix("features."): tensor for name, tensor in state.items() if "features." in name}
    assert {name for name in found if name.startswith("backbone.")} == {f"backbone.{name}" for name in features}
    assert all(torch.equal(found[f"backbone.{name}"], tensor) for name, tensor in features.items())
    assert lines == [f"loaded {len(features)} tensors from {tmp_path}/w.pth"]


def test_resnets_backbone_leaves_its_fully_connected_layer_out(tmp_path):
    state = a_state(1000, "resnet50")
    torch.save(state, tmp_path / "w.pth")
    found, _ = built(segmentation_run(name="fcn_resnet50", pretrained_backbone=str(tmp_path / "w.pth")), 5)
    assert all(torch.equal(found[f"backbone.{n}"], tensor) for n, tensor in state.items() if not n.startswith("fc."))
    torch.save(a_state(10, "resnet18"), tmp_path / "other.pth")
    with pytest.raises(ConfigError, match="model.pretrained_backbone: .*other.pth does not fit"):
        built(segmentation_run(name="fcn_resnet50", pretrained_backbone=str(tmp_path / "other.pth")), 5)


def test_auxiliary_heads_may_be_absent_on_either_side(tmp_path):
    name = "deeplabv3_mobilenet_v3_large"
    with_aux = a_state(5, name, weights_backbone=None, aux_loss=True)
    torch.save(with_aux, tmp_path / "aux.pth")
    torch.save({n: t for n, t in with_aux.items() if not n.startswith("aux_")}, tmp_path / "bare.pth")
    found, lines = built(segmentation_run(0.0, pretrained=str(tmp_path / "aux.pth")), 5)
    assert all(torch.equal(tensor, with_aux[n]) for n, tensor in found.items())
    assert lines[1].startswith("not used, since the model is built without it: aux_classifier.")
    found, lines = built(segmentation_run(0.5, pretrained=str(tmp_path / "bare.pth")), 5)
    assert all(torch.equal(tensor, with_aux[n]) for n, tensor in found.items() if not n.startswith("aux_"))
    assert "left as initialised" in lines[1] and "aux_classifier.0.weight" in lines[1]
