"""Vision models from a run's keys: by name, by target, frozen; every mistake names its key and the way out."""

import re
import sys
import textwrap
import warnings

import pytest
import torch
from torch import nn

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

USER_CODE = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, num_classes, width=4):
            super().__init__()
            self.conv = nn.Conv2d(3, width, 3)
            self.head = nn.Linear(width, num_classes)

        def forward(self, images):
            return self.head(self.conv(images).mean((2, 3)))

    class Bare(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(3, 2))

    class Frozen(Bare):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

    class TwoInputs(nn.Module):
        def forward(self, images, labels):
            return images

    class Lazy(nn.Sequential):
        def __init__(self, num_classes):
            super().__init__(
                nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Dropout(), nn.Flatten(), nn.LazyLinear(num_classes)
            )
            self[2].eval()

    class LazyWrong(nn.Sequential):
        def __init__(self):
            super().__init__(nn.LazyConv2d(4, 3), nn.Linear(5, 5))

    class LazyUnused(Net):
        def __init__(self, num_classes):
            super().__init__(num_classes)
            self.spare = nn.LazyLinear(2)

    def number():
        return 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(textwrap.dedent(USER_CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_nets", None)


def classification(size: int = 32, eval_size: int | None = None, **model) -> ClassificationRun:
    return ClassificationRun(
        model=VisionModelConfig(**model), data=ClassificationData(image_size=size, eval_size=eval_size)
    )


def segmentation(aux_weight: float = 0.5, **model) -> SegmentationRun:
    return SegmentationRun(
        model=SegmentationModelConfig(**model),
        data=SegmentationData(image_size=32),
        loss=SegmentationLoss(aux_weight=aux_weight),
    )


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (classification(name="resnet19"), "model.name: 'resnet19' is unknown; did you mean 'resnet18'"),
        (classification(name="ResNet18"), "did you mean 'resnet18'"),
        (classification(name="qqqq"), "there are: alexnet, convnext_base,"),
        (classification(name="fcn_resnet50"), "'fcn_resnet50' is a segmentation model, but task is classification"),
        (segmentation(name="resnet18"), "'resnet18' is a classification model, but task is segmentation"),
        (classification(name="fasterrcnn_resnet50_fpn"), "object detection is not supported"),
        (classification(name="quantized_resnet18"), "computes in int8 and cannot be trained"),
        (classification(name="r3d_18"), "takes video clips, not images; choose a classification model"),
        (segmentation(name="raft_small"), "takes pairs of frames, not images; choose a segmentation model"),
        (classification(args={"zero_init": True}), "model.args.zero_init: 'resnet18' has no such parameter; did you"),
        (classification(args={"weights": "x"}), "model.args.weights: is set by the key model.pretrained"),
        (classification(args={"num_classes": 3}), "model.args.num_classes: is set by the key model.num_classes"),
        (
            classification(args={"width_per_group": "a"}),
            "model.args: 'resnet18' cannot be built with width_per_group='a'",
        ),
        (classification(args={"groups": 7}), "model.args: 'resnet18' cannot be built with groups=7"),
        (classification(name="vit_b_16", args={"patch_size": 8}), "model.args.patch_size: is what makes 'vit_b_16'"),
        (classification(name="efficientnet_b0", args={"drop": 1}), "model.args.drop: 'efficientnet_b0' has no such"),
        (segmentation(name="fcn_resnet50", args={"aux": True}), "model.args.aux: 'fcn_resnet50' has no such parameter"),
        (classification(40, name="vit_b_16"), "data.image_size: 'vit_b_16' cuts images into 16s"),
        (classification(32, 48, name="vit_b_16"), "data.eval_size: 'vit_b_16' takes images of one size alone"),
        (classification(64, name="maxvit_t"), "data.image_size: 'maxvit_t' needs a multiple of 224"),
        (classification(62, name="alexnet"), "data.image_size: 'alexnet' needs images of at least 63 pixels, not 62"),
        (
            classification(64, 62, name="alexnet"),
            "data.eval_size: 'alexnet' needs images of at least 63 pixels, not 62",
        ),
        (classification(74, name="inception_v3", args={"aux_logits": False}), "needs images of at least 75 pixels"),
        (classification(298, name="inception_v3"), "the auxiliary head of 'inception_v3' needs at least 299 pixels"),
        (classification(freeze=["layr1"]), "model.freeze: no parameter's name begins with 'layr1'"),
        (classification(freeze=["layer"]), "did you mean 'layer4' or 'layer3' or 'layer2'?"),
        (
            classification(pretrained_backbone=True),
            "model.pretrained_backbone: is for torchvision's segmentation models",
        ),
        (
            segmentation(name="fcn_resnet50", pretrained=True, pretrained_backbone=True),
            "model.pretrained_backbone: has no effect beside model.pretrained",
        ),
    ],
)
def test_mistakes_are_named(run, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_vision_model(run, 10)


@pytest.mark.parametrize("name", ["alexnet", "squeezenet1_1", "densenet121", "googlenet", "vgg11"])
def test_the_smallest_accepted_image_goes_through_and_a_smaller_one_would_not(name):
    least = {"alexnet": 63, "squeezenet1_1": 17, "densenet121": 29, "googlenet": 15, "vgg11": 32}[name]
    with torch.device("meta"):
        model = build_vision_model(classification(least, name=name), 10)
        model(torch.zeros(2, 3, least, least))
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 3, least - 1, least - 1))
    with pytest.raises(ConfigError, match=f"at least {least} pixels"):
        build_vision_model(classification(least - 1, name=name), 10)


def test_inceptions_auxiliary_head_needs_the_size_that_is_asked_for():
    with torch.device("meta"):
        model = build_vision_model(classification(299, name="inception_v3"), 10)
        assert model(torch.zeros(2, 3, 299, 299)).aux_logits.shape == (2, 10)
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 3, 298, 298))


def test_arguments_reach_the_model():
    model = build_vision_model(classification(name="squeezenet1_1", args={"dropout": 0.25}), 7)
    assert model.classifier[0].p == 0.25
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize("size", [32, 48])
def test_a_vit_is_built_for_the_images_of_the_run(size):
    with torch.device("meta"):
        model = build_vision_model(classification(size, name="vit_b_16"), 10)
        assert model(torch.zeros(1, 3, size, size)).shape == (1, 10)


def test_googlenet_keeps_its_auxiliary_heads_and_raises_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_vision_model(classification(name="googlenet"), 10)
    assert model(torch.zeros(2, 3, 32, 32)).aux_logits1.shape == (2, 10)
    # torchvision's own default, a normal distribution of 0.01; torch's of a convolution would have 1 / sqrt(3 x 147).
    # The deviation of 9408 draws is known to 1 / sqrt(2 x 9408) = 0.7 %, so 5 % are seven of its own deviations.
    assert float(model.conv1.conv.weight.detach().std()) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(
    ("aux_weight", "args", "expected"),
    [(0.5, {}, True), (0.0, {}, False), (0.5, {"aux_loss": False}, False), (0.0, {"aux_loss": True}, True)],
)
def test_the_auxiliary_head_follows_its_weight_unless_arguments_say_otherwise(aux_weight, args, expected):
    with torch.device("meta"):
        model = build_vision_model(segmentation(aux_weight, name="fcn_resnet50", args=args), 4)
    assert (model.aux_classifier is not None) == expected


def test_a_model_without_an_auxiliary_head_is_built_without():
    model = build_vision_model(segmentation(name="lraspp_mobilenet_v3_large"), 4)
    assert list(model(torch.zeros(2, 3, 32, 32))) == ["out"]


def test_frozen_prefixes_and_batch_norms_stay_as_they_are():
    lines: list[str] = []
    run = classification(name="shufflenet_v2_x0_5", freeze=["conv1", "stage2.0."], freeze_batch_norm=True)
    model = build_vision_model(run, 10, lines.append).train()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    owner = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    expected = {n for n in owner if n.startswith(("conv1.", "stage2.0.")) or owner[n] in norms}
    assert frozen == expected
    assert not any(module.training for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    assert lines == ["18 of 170 parameter tensors are frozen by model.freeze"]


def test_everything_frozen_is_an_error():
    run = classification(name="squeezenet1_1", freeze=["features", "classifier"])
    with pytest.raises(ConfigError, match="model.freeze: every parameter of the model is frozen"):
        build_vision_model(run, 10)


def test_channels_last_and_recomputed_stages_give_the_same_function():
    torch.manual_seed(0)
    plain = build_vision_model(classification(name="shufflenet_v2_x0_5"), 10).eval()
    torch.manual_seed(0)
    lines: list[str] = []
    run = classification(name="shufflenet_v2_x0_5", channels_last=True, activation_checkpointing=True)
    model = build_vision_model(run, 10, lines.append).eval()
    assert model.stage2[0].branch2[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert re.fullmatch(r"activations of \d+ stages are recomputed", lines[0])
    images = torch.randn(2, 3, 32, 32)
    # sums of at most 1024 x 9 terms in another order, through 56 layers: a wide bound that a wrong layout would break
    torch.testing.assert_close(model(images), plain(images), rtol=1e-3, atol=1e-4)


def test_a_target_is_given_its_arguments_and_the_number_of_classes(user_module):
    model = build_vision_model(classification(target="my_nets:Net", args={"width": 6}), 9)
    assert model.conv.out_channels == 6 and model.head.out_features == 9
    model = build_vision_model(classification(target="my_nets:Bare"), 9)
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear"]


def test_a_targets_lazy_layers_take_their_shapes_and_keep_fresh_statistics(user_module):
    model = build_vision_model(classification(16, target="my_nets:Lazy"), 9)
    conv, norm, dropout, _, head = model
    assert conv.weight.shape == (4, 3, 3, 3) and head.weight.shape == (9, 4 * 14 * 14)
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any() and bool((norm.running_var == 1).all())
    assert model.training and norm.training and not dropout.training


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"target": "my_nets:number"}, "gives a value of type int, not a torch.nn.Module"),
        ({"target": "my_nets:Frozen"}, "has no trainable parameter"),
        ({"target": "my_nets:TwoInputs"}, "is called as forward(images), but missing a required argument: 'labels'"),
        ({"target": "my_nets:LazyWrong"}, "its forward fails on images [2, 3, 32, 32]"),
        ({"target": "my_nets:LazyUnused"}, "lazy layers that its forward leaves out: spare.weight"),
        ({"target": "my_nets:Net", "args": {"depth": 1}}, "model.args.depth: 'my_nets:Net' has no such parameter"),
        ({"target": "my_nets:Net", "args": {"num_classes": 1}}, "model.args.num_classes: is set by the key"),
        ({"target": "my_nets:Nett"}, "did you mean 'Net'?"),
        (
            {"target": "my_nets:Net", "pretrained": True},
            "model.pretrained: a model of your own has no published weights",
        ),
        (
            {"target": "my_nets:Net", "activation_checkpointing": True},
            "model.activation_checkpointing: this model has no",
        ),
    ],
)
def test_mistakes_in_a_target_are_named(user_module, model, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_vision_model(classification(**model), 10)
