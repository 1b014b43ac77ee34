"""From an image and its labels to a sample of fixed size: together, through torchvision's tv_tensors."""

import random
from typing import Any

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import Image, Mask

from largetrain.config.vision_schema import SegmentationData
from largetrain.data.images import IGNORED

Sample = dict[str, Any]


class _Transform:
    """What training and evaluation share: scaling, filling, normalising."""

    def __init__(self, data: SegmentationData):
        self.mean, self.std = data.mean, data.std
        self.base_size = data.base_size or data.image_size
        self.fill: dict[Any, Any] = {Image: tuple(round(255 * value) for value in data.mean), Mask: IGNORED}

    def scaled(self, image: Image, mask: Mask, longer_side: float) -> tuple[Image, Mask]:
        """Both scaled so that the longer side is as given: the image bilinearly with antialiasing, labels nearest."""
        height, width = image.shape[-2:]
        factor = longer_side / max(height, width)
        size = [max(1, round(height * factor)), max(1, round(width * factor))]
        return functional.resize(image, size, antialias=True), functional.resize(mask, size)

    def sample(self, image: Image, mask: Mask) -> Sample:
        """images float32 [3, height, width], normalised; labels int64 [height, width]."""
        images = functional.normalize(functional.to_dtype(image, torch.float32, scale=True), self.mean, self.std)
        return {"images": images.as_subclass(torch.Tensor), "labels": mask.as_subclass(torch.Tensor).long()}


class TrainTransform(_Transform):
    """Random scale, crop (padded where the image is smaller), flip and colours.

    Draws from Python's and torch's generators, which the loader seeds for each sample and epoch.
    """

    def __init__(self, data: SegmentationData):
        super().__init__(data)
        augment = data.augment
        self.scale = augment.scale
        steps: list[Any] = [v2.RandomCrop(data.image_size, pad_if_needed=True, fill=self.fill)]
        steps.append(v2.RandomHorizontalFlip(augment.flip))
        if augment.color_jitter:
            strength = augment.color_jitter
            steps.append(v2.ColorJitter(brightness=strength, contrast=strength, saturation=strength))
        self.steps = v2.Compose(steps)

    def __call__(self, image: Image, mask: Mask) -> Sample:
        image, mask = self.scaled(image, mask, self.base_size * random.uniform(*self.scale))
        return self.sample(*self.steps(image, mask))


class EvaluationTransform(_Transform):
    """Scaled to base_size and padded on the right and below to a square, the same always."""

    def __call__(self, image: Image, mask: Mask) -> Sample:
        image, mask = self.scaled(image, mask, self.base_size)
        height, width = image.shape[-2:]
        padding = [0, 0, self.base_size - width, self.base_size - height]
        padded = v2.Pad(padding, fill=self.fill)(image, mask) if any(padding) else (image, mask)
        return self.sample(*padded)
