"""Segmentation masks: files of class indices, read as they are and checked against the classes."""

import os

import numpy as np
import torch
from torch import Tensor

from largetrain.data.images import IGNORED, BadImage, open_image

_WRONG = np.int32(-1)
_OFFSET = 2  # place of value 0 in the table of labels
_PNG_DEPTH = 24  # offset of the bit depth in a PNG file
_GREY_SCALE = {2: 85, 4: 17}  # what PIL multiplies grey values of 2 and 4 bits by


def read_mask(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the values of a mask, [height, width], uint8 or wider.

    Palette images give their indices and grey ones their values, of any depth: never brightness.

    Raises:
        BadImage: it cannot be read, has colours instead of indices, or is a JPEG, which changes values.
    """
    image = open_image(path)
    if image.format == "JPEG":
        raise BadImage(path, "a JPEG does not keep the values of a mask; store masks as PNG")
    if image.mode not in ("P", "L", "1", "I") and not image.mode.startswith("I;16"):
        raise BadImage(
            path,
            f"a mask holds one class index per pixel, but this one has the mode {image.mode}; store the indices as "
            f"an 8-bit grey or palette PNG",
        )
    values = np.asarray(image)
    if values.dtype == bool:
        return values.astype(np.uint8)
    if image.format == "PNG" and image.mode == "L":
        with open(path, "rb") as file:
            file.seek(_PNG_DEPTH)
            values = values // np.uint8(_GREY_SCALE.get(file.read(1)[0], 1))
    return values


class Labels:
    """Turns the values of a mask into labels: class indices, and -100 where there is none.

    Args:
        num_classes: values 0 .. num_classes - 1 are classes.
        ignore_index: value without a class, which may be one of those; -1: hardly any, as it needs signed files.
        mapping: value of the file -> class or IGNORED, instead of both.
    """

    def __init__(self, num_classes: int, ignore_index: int, mapping: dict[int, int] | None = None):
        self._ignore_index = ignore_index
        known = (
            {**{value: value for value in range(num_classes)}, ignore_index: IGNORED} if mapping is None else mapping
        )
        self._allowed = f"0..{num_classes - 1}, and data.ignore_index is {ignore_index}"
        if mapping is not None:
            self._allowed = f"those of {', '.join(str(value) for value in sorted(mapping))}"
        # one place for each value from -1 on, between two for all that is below and beyond
        self._table = np.full(max(256, num_classes) + 3, _WRONG, dtype=np.int32)
        for value, label in known.items():
            self._table[value + _OFFSET] = label

    def of(self, values: np.ndarray, path: str | os.PathLike[str]) -> Tensor:
        """Labels of a mask, int32 [height, width].

        Raises:
            BadImage: a value is neither a class nor the ignored one; names file, value and what is allowed.
        """
        if values.dtype == np.uint8:
            labels = self._table[_OFFSET : _OFFSET + 256][values]
        else:
            labels = self._table[np.clip(values.astype(np.int64) + _OFFSET, 0, len(self._table) - 1)]
        wrong = labels == _WRONG
        if wrong.any():
            raise BadImage(path, self._complaint(int(values[wrong][0])))
        return torch.from_numpy(labels)

    def _complaint(self, value: int) -> str:
        way_out = "set data.classes or data.ignore_index to fit"
        if value == 255:
            way_out = (
                "255 is often what has no class (also -1, stored in 8 bits): then set data.ignore_index: 255; if it is "
                "a foreground, store that as 1"
            )
        return f"the mask holds the value {value}, but classes are {self._allowed}; {way_out}"
