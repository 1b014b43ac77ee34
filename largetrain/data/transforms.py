"""From a PIL image to the tensor that the model sees, in training and in evaluation; mixing of micro-batches.

torchvision's transforms in the order of its reference recipe: crop, flip, policy, colours, tensor, normalise, erase.
They draw from torch's global generator, which the loader seeds for each sample.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from largetrain.config.vision_schema import AugmentConfig, ClassificationData

MAX_ASPECT = 8
"""Images longer than this many times their shorter side are cut to it before scaling, which bounds memory."""


def training_transform(data: ClassificationData) -> v2.Compose:
    """Return the augmentation of a run: PIL RGB image -> float32 [3, image_size, image_size], normalised."""
    augment, interpolation = data.augment, v2.InterpolationMode(data.interpolation)
    steps: list[Any] = _training_crop(data, interpolation)
    if augment.flip:
        steps.append(v2.RandomHorizontalFlip(augment.flip))
    steps += _policy(augment, interpolation)
    if augment.color_jitter:
        steps.append(v2.ColorJitter(augment.color_jitter, augment.color_jitter, augment.color_jitter))
    steps.append(ToNormalised(data.mean, data.std))
    if augment.random_erasing:
        steps.append(v2.RandomErasing(augment.random_erasing))
    return v2.Compose(steps)


def evaluation_transform(data: ClassificationData) -> v2.Compose:
    """Return the preparation in evaluation: PIL RGB image -> float32 [3, S, S], normalised; S: see `eval_sizes`."""
    size, resize = eval_sizes(data)
    steps = _centre_crop(resize, size, v2.InterpolationMode(data.interpolation))
    return v2.Compose([*steps, ToNormalised(data.mean, data.std)])


def eval_sizes(data: ClassificationData) -> tuple[int, int]:
    """Return the side of the images in evaluation, and the shorter side to which they are scaled before the crop."""
    size = data.eval_size or data.image_size
    margin = 256 / 224 if size >= 128 else 1.0
    return size, data.eval_resize or round(size * margin)


def _training_crop(data: ClassificationData, interpolation: v2.InterpolationMode) -> list[Any]:
    augment, size = data.augment, data.image_size
    if augment.crop == "resized":
        scale, ratio = tuple(augment.crop_scale), tuple(augment.crop_ratio)
        return [v2.RandomResizedCrop(size, scale, ratio, interpolation)]
    if augment.crop == "pad":
        return [
            LimitAspect(),
            v2.Resize(size, interpolation),
            v2.RandomCrop(size, padding=augment.crop_padding or None),
        ]
    eval_size, eval_resize = eval_sizes(data)
    # the same part of the image as in evaluation, at the size of training
    return _centre_crop(max(size, round(eval_resize * size / eval_size)), size, interpolation)


def _centre_crop(resize: int, size: int, interpolation: v2.InterpolationMode) -> list[Any]:
    return [LimitAspect(), v2.Resize(resize, interpolation), v2.CenterCrop(size)]


def _policy(augment: AugmentConfig, interpolation: v2.InterpolationMode) -> list[Any]:
    if augment.policy == "randaugment":
        return [v2.RandAugment(magnitude=augment.magnitude, interpolation=interpolation)]
    if augment.policy == "trivialaugment":
        return [v2.TrivialAugmentWide(interpolation=interpolation)]
    if augment.policy == "autoaugment":
        return [v2.AutoAugment(interpolation=interpolation)]
    if augment.policy == "augmix":
        return [v2.AugMix()]  # works on tensors, for which torchvision turns images bilinearly only
    return []


class ToNormalised(torch.nn.Module):
    """PIL RGB image -> float32 [3, height, width], (value / 255 - mean) / std per channel.

    To the last bit torchvision's PILToTensor, ToDtype and Normalize, in less than half the time.
    """

    def __init__(self, mean: list[float], std: list[float]):
        super().__init__()
        self._mean, self._std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)

    def forward(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().mul_(1.0 / 255).sub_(self._mean).div_(self._std)


class LimitAspect(torch.nn.Module):
    """Cut the middle out of a very long PIL image: scaled by its shorter side it could take gigabytes."""

    def forward(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if max(width, height) <= MAX_ASPECT * min(width, height):
            return image
        kept = min(width, MAX_ASPECT * height), min(height, MAX_ASPECT * width)
        left, top = (width - kept[0]) // 2, (height - kept[1]) // 2
        return image.crop((left, top, left + kept[0], top + kept[1]))


class Mixing:
    """Mixup and cutmix of a micro-batch; with both, each micro-batch draws one of the two.

    Args:
        augment: `mixup`, `cutmix` and `repeats` are used.
        num_classes: length of the soft labels.
    """

    def __init__(self, augment: AugmentConfig, num_classes: int):
        self._repeats = augment.repeats
        self._choices: list[Any] = []
        if augment.mixup:
            self._choices.append(v2.MixUp(alpha=augment.mixup, num_classes=num_classes))
        if augment.cutmix:
            self._choices.append(v2.CutMix(alpha=augment.cutmix, num_classes=num_classes))

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed images, float32 [B, 3, S, S], and soft labels, float32 [B, num_classes], rows summing to 1.

        Args:
            images: float32 [B, 3, S, S].
            labels: int64 [B].
        """
        which = int(torch.randint(len(self._choices), ())) if len(self._choices) > 1 else 0
        if self._repeats == 1:
            return self._choices[which](images, labels)
        # torchvision mixes each image with the one before it; here that would be another copy of the same sample
        order = torch.cat(
            [torch.arange(start, len(labels), self._repeats) for start in range(min(self._repeats, len(labels)))]
        )
        mixed, targets = self._choices[which](images[order], labels[order])
        back = order.argsort()
        return mixed[back], targets[back]
