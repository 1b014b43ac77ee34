"""torchvision's ResNets, VGGs and vision transformers as lists of layers, which a pipeline cuts."""

import torch
from torch import Tensor, nn
from torchvision.models import VGG, ResNet, VisionTransformer

from largetrain.errors import ConfigError
from largetrain.models.staged import KEY, StagedModel, staged_model


def staged_vision_model(model: nn.Module) -> StagedModel:
    """The layers of a model of torchvision, or of a user's own that lists them.

    Raises:
        ConfigError: the model has branches, or nobody knows its order.
    """
    if isinstance(model, ResNet):
        blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
        stem = [model.conv1, model.bn1, model.relu, model.maxpool]
        return staged_model(model, [*stem, *blocks, model.avgpool, nn.Flatten(), model.fc])
    if isinstance(model, VGG):
        return staged_model(model, [*model.features, model.avgpool, nn.Flatten(), *model.classifier])
    if isinstance(model, VisionTransformer):
        encoder = model.encoder
        return staged_model(model, [Patches(model), *encoder.layers, encoder.ln, FirstToken(), *model.heads])
    if type(model).__module__.startswith("torchvision.") and not callable(getattr(model, "layers", None)):
        raise ConfigError(
            f"{KEY}: a {type(model).__name__} is not cut into stages; ResNets, VGGs and vision transformers are. "
            f"Write 1, or model.target with layers()."
        )
    return staged_model(model)


class Patches(nn.Module):
    """Images to tokens: patches, the class token, positions, dropout (Dosovitskiy et al. 2021).

    Its parameters are the whole model's own.
    """

    def __init__(self, model: VisionTransformer):
        super().__init__()
        self.conv_proj, self.dropout = model.conv_proj, model.encoder.dropout
        self.class_token, self.pos_embedding = model.class_token, model.encoder.pos_embedding

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 3, H, W] to tokens [batch, 1 + patches, hidden]."""
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        return self.dropout(tokens + self.pos_embedding)


class FirstToken(nn.Module):
    """What the class token has gathered: [batch, tokens, hidden] to [batch, hidden]."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]
