"""The data of a segmentation run: images with masks from folders, scenes of digits, or random ones for speed tests."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor
from torchvision.tv_tensors import Image, Mask

from largetrain.config.document import one_line
from largetrain.config.vision_schema import SegmentationData, SegmentationRun
from largetrain.data.digits import load_digits
from largetrain.data.images import IGNORED, BadImage, ImageSplits, fingerprint, held_out, read_image
from largetrain.data.masks import Labels, read_mask
from largetrain.data.scenes import DIGITS, RIM, SCENE_CLASSES, SCENES, DigitScenes
from largetrain.data.segmentation_layouts import Pair, files_of, list_folder
from largetrain.data.segmentation_transforms import EvaluationTransform, Sample, TrainTransform
from largetrain.errors import ConfigError

MASKS_LOOKED_AT = 64
SYNTHETIC_CLASSES = 21
_POOL = 8
# keys of the data section that do not change what the samples are
_BESIDE = {"source", "validation", "workers", "on_bad_image", "max_bad_images", "target", "args"}


class Source(Protocol):
    """Where a dataset takes its images and labels from."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image, Mask]:
        """Image uint8 [3, height, width], and labels int32 [height, width]."""


class SegmentationDataset:
    """Samples `images` float32 [3, S, S] and `labels` int64 [S, S], -100 where a pixel has no class.

    Args:
        source: what is read.
        transform: what makes a sample of it.
        data: says what becomes of files that cannot be read.
    """

    def __init__(self, source: Source, transform: TrainTransform | EvaluationTransform, data: SegmentationData):
        self.source, self.transform = source, transform
        self.on_bad_image, self.max_bad_images = data.on_bad_image, data.max_bad_images

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.transform(*self.source.read(index))


class FilePairs:
    """Images and masks from files."""

    def __init__(self, pairs: Sequence[Pair], labels: Labels):
        self.pairs, self._labels = pairs, labels

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> tuple[Image, Mask]:
        """See Source.

        Raises:
            BadImage: one of the files cannot be read, the mask holds values that are no class, or sizes differ.
        """
        image = read_image(self.pairs[index].image)
        labels = self.labels(index)
        height, width = labels.shape
        if image.size != (width, height):
            raise BadImage(
                self.pairs[index].mask,
                f"the mask has {width} x {height} pixels, but its image {image.width} x {image.height}",
            )
        return Image(pil_to_tensor(image)), Mask(labels)

    def labels(self, index: int) -> Tensor:
        """Labels of one mask, int32 [height, width]."""
        path = self.pairs[index].mask
        return self._labels.of(read_mask(path), path)


class Scenes:
    """Scenes of digits."""

    def __init__(self, scenes: DigitScenes):
        self.scenes, self._labels = scenes, Labels(len(SCENE_CLASSES), RIM)

    def __len__(self) -> int:
        return len(self.scenes)

    def read(self, index: int) -> tuple[Image, Mask]:
        """See Source."""
        image, mask = self.scenes.scene(index)
        return Image(torch.from_numpy(image).permute(2, 0, 1)), Mask(self._labels.of(mask, f"scene {index}"))


class SyntheticSamples:
    """Random samples for speed tests: a few are made once and given again and again."""

    def __init__(self, count: int, side: int, num_classes: int, stream: int):
        generator = torch.Generator().manual_seed(stream)
        self.count = count
        self._images = torch.randn(_POOL, 3, side, side, generator=generator)
        self._labels = torch.randint(num_classes, (_POOL, side, side), generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return {"images": self._images[index % _POOL], "labels": self._labels[index % _POOL]}


def build_segmentation(run: SegmentationRun) -> ImageSplits:
    """Return the datasets of a segmentation run.

    Training samples have sides of data.image_size, those of validation of data.base_size.

    Raises:
        ConfigError: a folder is not laid out as it should be, files miss their partner, or classes do not fit.
        BadImage: a mask that was looked at holds wrong values, and data.on_bad_image is "error".
    """
    if run.data.source == "digit_scenes":
        return _digit_scenes(run.data)
    if run.data.source == "synthetic":
        return _synthetic(run.data)
    return _folder(run.data)


def _folder(data: SegmentationData) -> ImageSplits:
    listing = list_folder(os.path.expanduser(data.source), data.format, "data.source")
    train, validation = listing.train, listing.validation
    if data.validation is not None:
        other = list_folder(os.path.expanduser(data.validation), listing.format, "data.validation")
        train, validation = [*train, *(validation or [])], other.validation or other.train
    elif validation is None:
        chosen = held_out([pair.name for pair in train], data.validation_fraction)
        validation = [pair for pair, held in zip(train, chosen, strict=True) if held]
        train = [pair for pair, held in zip(train, chosen, strict=True) if not held]
    classes = _classes(data, listing.classes, "cityscapes" if listing.mapping else None)
    for pairs, split in ((train, "training"), (validation, "validation")):
        if not pairs:
            raise ConfigError(f"data.source: {one_line(data.source)} holds no image for {split}.")
    labels = Labels(len(classes), data.ignore_index, listing.mapping)
    sources = FilePairs(train, labels), FilePairs(validation, labels)
    report = [
        f"data: {listing.format} in {one_line(data.source)}: {len(train)} images for training, {len(validation)} for "
        f"validation, {len(classes)} classes"
    ]
    for source, split in zip(sources, ("training", "validation"), strict=True):
        report += _warnings(source, split, classes, data)
    return ImageSplits(
        SegmentationDataset(sources[0], TrainTransform(data), data),
        SegmentationDataset(sources[1], EvaluationTransform(data), data),
        classes,
        fingerprint([*files_of(train), *files_of(validation)], listing.format, classes, len(train), *_facts(data)),
        tuple(report),
    )


def _digit_scenes(data: SegmentationData) -> ImageSplits:
    if data.validation is not None:
        raise ConfigError("data.validation: digit_scenes makes its own validation scenes; remove the key.")
    classes = _classes(data, SCENE_CLASSES, "digit_scenes")
    side = data.base_size or data.image_size
    images, labels = load_digits()
    images, labels = images[labels < DIGITS], labels[labels < DIGITS]
    held = held_out([image.tobytes() for image in images], data.validation_fraction)
    counts = data.samples, max(1, round(data.samples * data.validation_fraction))
    train, validation = (
        DigitScenes(images[chosen], labels[chosen], count, side, stream)
        for stream, (chosen, count) in enumerate(zip((~held, held), counts, strict=True))
    )
    return ImageSplits(
        SegmentationDataset(Scenes(train), TrainTransform(data), data),
        SegmentationDataset(Scenes(validation), EvaluationTransform(data), data),
        classes,
        fingerprint([], SCENES, images.tobytes(), labels.tobytes(), classes, *_facts(data)),
        (
            f"data: scenes of handwritten digits, {side} x {side} pixels: {counts[0]} for training from "
            f"{(~held).sum()} digits, {counts[1]} for validation from {held.sum()} others, {len(classes)} classes",
        ),
    )


def _synthetic(data: SegmentationData) -> ImageSplits:
    classes = _classes(data, tuple(f"class_{index}" for index in range(SYNTHETIC_CLASSES)), None)
    counts = data.samples, max(1, round(data.samples * data.validation_fraction))
    train = SyntheticSamples(counts[0], data.image_size, len(classes), 0)
    validation = SyntheticSamples(counts[1], data.base_size or data.image_size, len(classes), 1)
    report = f"data: random images: {counts[0]} for training, {counts[1]} for validation, {len(classes)} classes"
    return ImageSplits(train, validation, classes, fingerprint([], "synthetic", classes, *_facts(data)), (report,))


def _facts(data: SegmentationData) -> list[Any]:
    return sorted(data.model_dump(exclude=_BESIDE).items())


def _classes(data: SegmentationData, own: tuple[str, ...] | None, made_for: str | None) -> tuple[str, ...]:
    """The names that the user gives, or the source's own.

    Args:
        own: names that the format comes with.
        made_for: what has just these classes and no others; None: the user may name other ones.
    """
    given = data.classes
    if given is None and own is None:
        raise ConfigError("data.classes: needed for pairs of images and masks: their names, or how many there are.")
    if given is None or (own is not None and given == len(own)):
        return own or ()
    names = tuple(given) if isinstance(given, list) else tuple(f"class_{index}" for index in range(given))
    if made_for and own and len(names) != len(own):
        raise ConfigError(
            f"data.classes: {made_for} has {len(own)} classes, but {len(names)} are given; remove the key."
        )
    return names


def _warnings(source: FilePairs, split: str, classes: tuple[str, ...], data: SegmentationData) -> list[str]:
    """Look at masks spread over the split, before hours are spent on them.

    Raises:
        BadImage: one is wrong and none may be.
        ConfigError: all are wrong, or none has a labelled pixel.
    """
    places = np.unique(np.linspace(0, len(source) - 1, min(len(source), MASKS_LOOKED_AT)).round().astype(int))
    counts, ignored, bad = np.zeros(len(classes), dtype=np.int64), 0, []
    for place in places:
        try:
            labels = source.labels(int(place))
        except BadImage as error:
            bad.append(error)
            if data.on_bad_image == "error":
                raise
            if len(bad) == len(places):
                raise ConfigError(
                    f"data: none of the {len(places)} masks looked at for {split} (of {len(source)}) can be read; the "
                    f"last one is {error.path} ({error.reason}). Repair them, or set the key that they do not fit."
                ) from error
            continue
        valid = labels != IGNORED
        ignored += int((~valid).sum())
        counts += torch.bincount(labels[valid], minlength=len(classes)).numpy()
    looked_at = f"the {len(places) - len(bad)} masks looked at for {split} (of {len(source)})"
    if not counts.any():
        raise ConfigError(
            f"data: none of {looked_at} has a pixel with a class: all are ignored (data.ignore_index="
            f"{data.ignore_index}). Change that key, or give masks with classes."
        )
    if np.count_nonzero(counts) > 1 or len(classes) == 1:
        return []
    share = ignored / (ignored + int(counts.sum()))
    hint = ""
    if ignored:
        hint = (
            f"; {share:.0%} of their pixels are ignored (data.ignore_index={data.ignore_index}): if that value is a "
            f"foreground, store it as 1"
        )
    return [f"warning: in {looked_at} only the class {classes[counts.argmax()]} occurs{hint}"]
