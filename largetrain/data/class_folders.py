"""Images sorted into one folder per class, as torchvision.datasets.ImageFolder reads them; ImageNet's layout."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from largetrain.config.document import one_line
from largetrain.config.vision_rules import VALIDATION_NAMES
from largetrain.data.images import EXTENSIONS, ImageFile, list_folders, list_images
from largetrain.errors import ConfigError

_NAMED = 5  # names in one message


@dataclass(frozen=True)
class Listing:
    """The files of one split."""

    root: str
    files: list[ImageFile]
    """Sorted by class, then by name; names start with the class."""
    labels: np.ndarray
    """int64 [files]."""
    classes: tuple[str, ...]
    validation: str | None
    """The folder of the validation split beside this one, where the layout has one."""


def find_class_folders(source: str, key: str, like: Sequence[str] | None = None) -> Listing:
    """List the images of a folder of class folders, or of the `train/` in it.

    Args:
        source: the folder; `~` is expanded.
        key: names it in errors, such as `data.source`.
        like: the classes of the training split, which this one must have; None: this is the training split, in which
            no class may be empty.

    Raises:
        ConfigError: no such folder, no classes, no images, one class, empty classes, or other classes than `like`.
    """
    root = os.path.expanduser(source)
    names = list_folders(root, key)
    if like is None and _has_splits(root, names, key):
        listing = find_class_folders(os.path.join(root, "train"), key)
        return replace(listing, validation=_validation_below(root, names, key))
    _check_classes(root, names, key, like)
    files: list[ImageFile] = []
    labels: list[int] = []
    empty = []
    for label, name in enumerate(names):
        found = list_images(os.path.join(root, name), key)
        files += [ImageFile(f"{name}/{file.name}", file.size) for file in found]
        labels += [label] * len(found)
        if not found:
            empty.append(name)
    if not files:
        raise ConfigError(f"{key}: {one_line(root)} holds no image in its class folders ({', '.join(EXTENSIONS)}).")
    if empty and like is None:
        raise ConfigError(
            f"{key}: no image in the class folders {_some(empty)} of {one_line(root)}. Remove the empty folders, which "
            f"would count as classes, or fill them."
        )
    return Listing(root, files, np.array(labels, dtype=np.int64), tuple(names), None)


def _has_splits(root: str, names: list[str], key: str) -> bool:
    """Whether the folders are splits; `train` may also be the name of a class, beside others."""
    if "train" not in names:
        return False
    others = set(names) - {"train"}
    return bool(others & set(VALIDATION_NAMES)) or (others <= {"test"} and bool(list_folders(f"{root}/train", key)))


def _validation_below(root: str, names: list[str], key: str) -> str | None:
    found = [name for name in VALIDATION_NAMES if name in names]
    if len(found) > 1:
        raise ConfigError(
            f"{key}: {one_line(root)} holds both {found[0]}/ and {found[1]}/. Name the one to use as data.validation, "
            f"and its train/ as data.source."
        )
    return os.path.join(root, found[0]) if found else None


def _check_classes(root: str, names: list[str], key: str, like: Sequence[str] | None) -> None:
    if not names:
        loose = sum(name.lower().endswith(EXTENSIONS) for name in os.listdir(root))
        what = f"holds {loose:,} images but no class folders" if loose else "holds no class folders"
        raise ConfigError(
            f"{key}: {one_line(root)} {what}. Sort the images into one folder per class (the validation images of "
            f"ImageNet come unsorted), or name the folder above."
        )
    if like is None and len(names) == 1:
        raise ConfigError(
            f"{key}: {one_line(root)} holds a single class folder, {one_line(names[0])}; there must be at least two "
            f"classes. Name the folder that holds one folder per class."
        )
    if like is None or tuple(names) == tuple(like):
        return
    here, there = sorted(set(names) - set(like)), sorted(set(like) - set(names))
    parts = [
        *([f"only there: {_some(here)}"] if here else []),
        *([f"missing there: {_some(there)}"] if there else []),
    ]
    raise ConfigError(
        f"{key}: the validation folder {one_line(root)} has other classes than the training data; {'; '.join(parts)}. "
        f"Both need the same class folders."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
