"""Labelled images: from the data section of a classification run to its training and validation datasets."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from largetrain.config.document import one_line
from largetrain.config.vision_rules import layouts_below
from largetrain.config.vision_schema import ClassificationData, ClassificationRun
from largetrain.data import digits
from largetrain.data.class_folders import Listing, find_class_folders
from largetrain.data.images import ImageSplits, fingerprint, held_out, read_image
from largetrain.data.on_disk import LAYOUT_NAMES, load_arrays
from largetrain.data.transforms import Mixing, eval_sizes, evaluation_transform, training_transform
from largetrain.errors import ConfigError

SYNTHETIC_CLASSES = 1000
_SHIFTS = 8191
# what does not change a sample, or is in the digest of the files
_NOT_IN_FINGERPRINT = {"target", "args", "workers", "on_bad_image", "max_bad_images", "source", "validation"}


class Images(Protocol):
    """PIL RGB images by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Image.Image: ...

    def take(self, indices: np.ndarray) -> "Images": ...

    def keys(self) -> Sequence[str | bytes]:
        """What each is known by when a share is held out: its relative name or its content."""


class FileImages:
    """Images in files; the names are packed, because a million small objects are slow to hand to a loader process."""

    def __init__(self, root: str, names: Sequence[str]):
        encoded = [os.fsencode(name) for name in names]
        self._root, self._names = root, b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def name(self, index: int) -> str:
        return os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])

    def __getitem__(self, index: int) -> Image.Image:
        return read_image(os.path.join(self._root, self.name(index)))

    def take(self, indices: np.ndarray) -> "FileImages":
        return FileImages(self._root, [self.name(int(index)) for index in indices])

    def keys(self) -> list[str]:
        return [self.name(index) for index in range(len(self))]


class ArrayImages:
    """Images in memory: uint8 [count, height, width], grey, or [count, height, width, 3]."""

    def __init__(self, pixels: np.ndarray):
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index]).convert("RGB")

    def take(self, indices: np.ndarray) -> "ArrayImages":
        return ArrayImages(self._pixels[indices])

    def keys(self) -> list[bytes]:
        return [image.tobytes() for image in self._pixels]


class LabelledImages(Dataset):
    """Map-style dataset of {"images": float32 [3, S, S], "labels": int}.

    Args:
        images, labels: of the same length; labels int64.
        transform: PIL RGB image -> tensor.
        data: `on_bad_image` and `max_bad_images` are used.
        mixing: applied to whole micro-batches, which then have "targets" as well.
    """

    def __init__(
        self, images: Images, labels: np.ndarray, transform: Any, data: ClassificationData, mixing: Mixing | None = None
    ):
        assert len(images) == len(labels)
        self.images, self.labels, self.transform, self.mixing = images, labels, transform, mixing
        self.on_bad_image, self.max_bad_images = data.on_bad_image, data.max_bad_images

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": self.transform(self.images[index]), "labels": int(self.labels[index])}

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return _mixed(default_collate(items), self.mixing)


class RandomImages(Dataset):
    """Random images at next to no cost, for speed tests: windows on one row of normally distributed numbers.

    A sample is a view of memory that all samples share; micro-batches are copies.

    Args:
        ids: int64, the samples of this split.
    """

    def __init__(self, ids: np.ndarray, size: int, classes: int, mixing: Mixing | None = None):
        self.ids, self.size, self.classes, self.mixing = ids, size, classes, mixing
        generator = torch.Generator().manual_seed(size)
        self._numbers = torch.randn(3 * size * size + _SHIFTS, generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample, size = int(self.ids[index]), self.size
        start = sample * 7 % _SHIFTS
        images = self._numbers[start : start + 3 * size * size].view(3, size, size)
        return {"images": images, "labels": sample % self.classes}

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return _mixed(default_collate(items), self.mixing)


@dataclass(frozen=True)
class _Split:
    images: Images
    labels: np.ndarray
    digest: str

    def take(self, chosen: np.ndarray) -> "_Split":
        return replace(self, images=self.images.take(np.flatnonzero(chosen)), labels=self.labels[chosen])


@dataclass(frozen=True)
class _Found:
    train: _Split
    validation: _Split | None
    classes: tuple[str, ...]
    origin: str
    """Words for a person."""


def build_classification(run: ClassificationRun) -> ImageSplits:
    """Find a run's images and prepare its datasets; reads names and sizes, and the pixels only of what lies in arrays.

    Raises:
        ConfigError: the source is missing, incomplete, empty or of one class, classes of the splits differ, or
            `model.num_classes` is too small.
    """
    data = run.data
    if data.source == "synthetic":
        return _synthetic(run)
    found = _digits() if data.source == "digits" else _in_folder(data)
    if data.validation is not None:
        listing = find_class_folders(data.validation, "data.validation", found.classes)
        found = replace(found, validation=_files(listing))
    train, validation, how = found.train, found.validation, ""
    if validation is None:
        chosen = held_out(train.images.keys(), data.validation_fraction)
        if chosen.any():
            train, validation = train.take(~chosen), train.take(chosen)
            what = "content" if data.source == "digits" else "name"
            how = f"; validation: {data.validation_fraction:.0%} of them, chosen by {what}"
    counts = f"{len(train.labels):,} training and {len(validation.labels) if validation else 0:,} validation images"
    keys = data.model_dump(mode="json", exclude=_NOT_IN_FINGERPRINT)
    digests = (found.train.digest, found.validation.digest if found.validation else None)
    return ImageSplits(
        LabelledImages(train.images, train.labels, training_transform(data), data, _mixing(run, found.classes)),
        LabelledImages(validation.images, validation.labels, evaluation_transform(data), data) if validation else None,
        found.classes,
        fingerprint([], *digests, found.classes, sorted(keys.items())),
        (f"data: {counts} of {len(found.classes):,} classes, {found.origin}{how}",),
    )


def _mixed(batch: dict[str, Tensor], mixing: Mixing | None) -> dict[str, Tensor]:
    if mixing is not None:
        batch["images"], batch["targets"] = mixing(batch["images"], batch["labels"])
    return batch


def _mixing(run: ClassificationRun, classes: Sequence[str]) -> Mixing | None:
    outputs = run.model.num_classes
    if outputs == "auto":
        outputs = len(classes)
    elif outputs < len(classes):
        raise ConfigError(
            f"model.num_classes: {outputs} is less than the {len(classes)} classes of the data; leave it out, or give "
            f"at least {len(classes)}."
        )
    augment = run.data.augment
    return Mixing(augment, outputs) if augment.mixup or augment.cutmix else None


def _synthetic(run: ClassificationRun) -> ImageSplits:
    data = run.data
    count = data.classes or SYNTHETIC_CLASSES
    classes = tuple(str(index) for index in range(count))
    ids = np.arange(data.samples)
    held = min(max(1, round(data.samples * data.validation_fraction)), data.samples - 1)
    train, validation = ids[: len(ids) - held], ids[len(ids) - held :]
    keys = data.model_dump(mode="json", exclude=_NOT_IN_FINGERPRINT)
    return ImageSplits(
        RandomImages(train, data.image_size, count, _mixing(run, classes)),
        RandomImages(validation, eval_sizes(data)[0], count) if held else None,
        classes,
        fingerprint([], "synthetic", count, sorted(keys.items())),
        (
            f"data: {len(train):,} training and {held:,} validation images of {count:,} classes, synthetic: random "
            f"numbers for speed tests, not cropped or augmented",
        ),
    )


def _digits() -> _Found:
    pixels, labels = digits.load_digits()
    return _Found(_array(pixels, labels), None, digits.CLASSES, "handwritten digits of scikit-learn")


def _in_folder(data: ClassificationData) -> _Found:
    known = layouts_below(data.source) if data.format == "auto" or data.format in LAYOUT_NAMES else {}
    if data.format == "auto" and len(known) > 1:
        raise ConfigError(
            f"data.source: {one_line(data.source)} holds {' and '.join(LAYOUT_NAMES[name] for name in known)}. Say "
            f"which one is meant with data.format: {' or '.join(known)}."
        )
    if data.format in LAYOUT_NAMES or known:
        name = data.format if data.format in LAYOUT_NAMES else next(iter(known))
        root = known.get(name, data.source)
        train, validation, classes = load_arrays(name, root)
        return _Found(_array(*train), _array(*validation), classes, f"{LAYOUT_NAMES[name]} in {one_line(root)}")
    listing = find_class_folders(data.source, "data.source")
    validation_files = None
    if listing.validation is not None and data.validation is None:
        validation_files = _files(find_class_folders(listing.validation, "data.source", listing.classes))
    return _Found(_files(listing), validation_files, listing.classes, f"class folders in {one_line(data.source)}")


def _array(pixels: np.ndarray, labels: np.ndarray) -> _Split:
    pixels = np.ascontiguousarray(pixels)
    digest = hashlib.sha256(f"{pixels.shape}".encode() + labels.astype("<i8").tobytes())
    digest.update(pixels.data)
    return _Split(ArrayImages(pixels), labels, digest.hexdigest())


def _files(listing: Listing) -> _Split:
    names = [file.name for file in listing.files]
    return _Split(FileImages(listing.root, names), listing.labels, fingerprint(listing.files))
