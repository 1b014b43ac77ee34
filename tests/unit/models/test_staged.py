"""Models as lists of layers: the same outputs and the same names as the whole model."""

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

from largetrain.errors import ConfigError
from largetrain.models.staged import staged_decoder, staged_model
from largetrain.models.vision_stages import staged_vision_model
from largetrain.parallel.axes import Axes
from tests.unit.models.specs import small_spec

SIZE = 64  # the smallest that all of them take


def net(name):
    torch.manual_seed(0)
    if name == "vit":
        sizes = {"image_size": SIZE, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
        model = torchvision.models.VisionTransformer(**sizes, num_classes=3, representation_size=8)
        nn.init.normal_(model.heads.head.weight)
        return model
    if name == "bottleneck":  # ResNet-50, wide and ResNeXt differ by these numbers
        return ResNet(Bottleneck, [1, 2, 1, 1], num_classes=3, groups=2, width_per_group=8)
    model = getattr(torchvision.models, name)(num_classes=3)
    if name.startswith("vgg"):  # without its 120 million weights
        model.classifier[0], model.classifier[3] = nn.Linear(512 * 49, 8), nn.Linear(8, 8)
        model.classifier[6] = nn.Linear(8, 3)
    return model


def names_by_layer(staged):
    """The names that every layer's tensors have in the whole model."""
    found = []
    for layer in staged.layers:
        module = layer.build()
        tensors = [*module.named_parameters(), *module.named_buffers()]
        found.append([staged.name(layer, local, tensor) for local, tensor in tensors])
    return found


@pytest.mark.parametrize("name", ["resnet18", "bottleneck", "vgg11_bn", "vit"])
def test_layers_of_torchvision_one_after_the_other_are_the_model(name):
    model = net(name).eval()
    staged = staged_vision_model(model)
    value = images = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        for layer in staged.layers:
            value = layer.build()(value.clone())  # some work in place
        assert torch.equal(value, model(images))
    names = [name for layer in names_by_layer(staged) for name in layer]
    assert sorted(names) == sorted(model.state_dict())
    assert not staged.last_takes_labels


def test_layers_carry_the_names_of_torchvision():
    names = {layer.name for layer in staged_vision_model(net("resnet18")).layers}
    assert {"conv1", "bn1", "layer1.0", "layer4.1", "fc"} <= names
    names = {layer.name for layer in staged_vision_model(net("vit")).layers}
    assert {"encoder.layers.encoder_layer_0", "encoder.ln", "heads.head"} <= names
    assert {"features.0", "classifier.6"} <= {layer.name for layer in staged_vision_model(net("vgg11_bn")).layers}


def test_a_net_whose_order_nobody_knows_is_refused_with_a_way_out():
    model = torchvision.models.squeezenet1_1(num_classes=2)
    with pytest.raises(ConfigError) as caught:
        staged_vision_model(model)
    words = "a SqueezeNet is not cut into stages; ResNets, VGGs and vision transformers are. Write 1, or model.target"
    assert words in caught.value.problems[0]


def test_names_of_the_decoder_are_those_of_the_whole_one():
    """Also of the tied table, which the head has under the name of the embedding."""
    from largetrain.models.decoder import Decoder

    spec = small_spec("gpt", tie_embeddings=True)
    torch.manual_seed(3)
    whole = Decoder(spec)
    torch.manual_seed(3)
    staged = staged_decoder(spec, Axes())
    table = staged.layers[0].build().weight
    names = {}
    for layer in staged.layers:
        module = layer.build(*([table] if layer.tied_to else []))
        names |= {staged.name(layer, local, tensor): tensor for local, tensor in module.named_parameters()}
    expected = dict(whole.named_parameters())
    assert names.keys() == expected.keys()
    assert all(torch.equal(names[name], expected[name]) for name in expected)
    assert staged.layers[-1].tied_to == "token_embedding" and staged.last_takes_labels
    assert staged.whole_layers is None


class Nested(nn.Module):
    """Layers of modules in modules; the last one takes labels."""

    class Out(nn.Linear):
        def forward(self, hidden, labels):
            return nn.functional.cross_entropy(super().forward(hidden), labels, reduction="sum")

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"first": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})
        self.out = self.Out(4, 2)

    def layers(self):
        return [nn.Sequential(self.body["first"], nn.ReLU()), self.body["norm"], self.out]


def test_a_users_layers_may_be_wrapped_and_keep_their_names():
    staged = staged_model(Nested())
    assert names_by_layer(staged) == [
        ["body.first.weight", "body.first.bias"],
        [f"body.norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")],
        ["out.weight", "out.bias"],
    ]
    assert [layer.name for layer in staged.layers] == ["Sequential-0", "body.norm", "out"]
    assert staged.last_takes_labels


class Listing(nn.Module):
    def __init__(self, listing):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.layers = listing


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 2), "does not say how it can be cut; give it a method layers()"),
        (lambda: Listing(nn.ModuleList([nn.Linear(2, 2)])), "does not say how it can be cut"),
        (lambda: Listing(lambda: [nn.Linear(2, 2)]), "must give two or more modules"),
        (lambda: Listing(lambda: [nn.ReLU(), torch.relu]), "must give two or more modules"),
        (lambda: Listing(lambda: [nn.ReLU(), nn.ReLU()]), "leaves out one.weight, one.bias, two.weight and 1 more"),
    ],
)
def test_a_list_that_is_none_is_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        staged_model(make())
    assert words in caught.value.problems[0] and caught.value.problems[0].startswith("parallel.pipeline_stages: ")


def test_layers_that_the_model_does_not_have_are_refused():
    model = Listing(None)
    model.layers = lambda: [model.one, model.two, nn.Linear(2, 2)]
    with pytest.raises(ConfigError, match="parameters that the model does not have; register them"):
        staged_model(model)
    model.layers = lambda: [model.one, model.two, model.one]
    with pytest.raises(ConfigError, match=r"one\.weight is in several of the layers"):
        staged_model(model)
