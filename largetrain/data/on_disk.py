"""Datasets that torchvision has downloaded before: CIFAR and the MNIST family, read into memory."""

import os
import pickle

import numpy as np
from torchvision import datasets

from largetrain.config.document import one_line
from largetrain.config.vision_rules import LAYOUTS
from largetrain.errors import ConfigError

LAYOUT_NAMES = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST", "fashionmnist": "FashionMNIST"}
"""Format -> torchvision's class."""

Arrays = tuple[np.ndarray, np.ndarray]


def load_arrays(name: str, root: str) -> tuple[Arrays, Arrays, tuple[str, ...]]:
    """Return the training and test splits, and the class names, of a dataset on disk.

    Args:
        name: a key of `LAYOUT_NAMES`.
        root: the folder that torchvision calls root.

    Returns:
        For each split the images, uint8 [count, height, width] or [count, height, width, 3], and int64 labels.

    Raises:
        ConfigError: it is not there, incomplete or damaged.
    """
    root = os.path.expanduser(root)
    title, folder = LAYOUT_NAMES[name], os.path.join(root, LAYOUTS[name])
    kind = getattr(datasets, title)
    fetch = f"`torchvision.datasets.{title}({root!r}, download=True)` completes it where there is a network"
    if not os.path.isdir(folder):
        raise ConfigError(f"data.source: {one_line(root)} holds no {LAYOUTS[name]}/, which {name} needs; {fetch}.")
    try:
        splits = [kind(root, train=train, download=False) for train in (True, False)]
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError, OSError, EOFError, pickle.PickleError):
        raise ConfigError(f"data.source: {title} in {one_line(folder)} is incomplete or damaged; {fetch}.") from None
    train, test = [(np.asarray(split.data), np.asarray(split.targets, dtype=np.int64)) for split in splits]
    for images, labels in (train, test):
        if len(images) != len(labels) or not len(labels):
            raise ConfigError(
                f"data.source: {title} in {one_line(folder)} has {len(images)} images and {len(labels)} "
                f"labels; {fetch}."
            )
    return train, test, tuple(splits[0].classes)
