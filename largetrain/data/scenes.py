"""Scenes composed from handwritten digits, with a mask: segmentation without a download.

One digit, a 0, 1 or 2, is drawn dark on a light card before a dim background, and the whole card is of the digit's
class. That is what a net with coarse feature maps learns from nothing within minutes; thin strokes, or smaller cards of
all ten digits in all colours, are not. A scene is made when it is asked for, from its number alone: the same on any
rank and in any loader process.
"""

import numpy as np
from PIL import Image

DIGITS = 3
"""The digits below this one are in the scenes."""
SCENE_CLASSES = ("background", *(str(digit) for digit in range(DIGITS)))
RIM = 255
"""Value of the one-pixel rim around each card, which belongs to no class."""
SCENES = "scenes of digits, version 3"
"""Part of the fingerprint; to be changed with how scenes are made."""
_SEED = 2718  # of the scenes, not of the run: all runs are measured on the same ones
_SMALLEST, _LARGEST = 0.6, 0.85  # side of a card as a share of that of the scene
_BEHIND, _CARD, _INK = (30, 110), (200, 256), (0, 50)  # brightness of each channel, from and below
_CLOUDS, _NOISE = 20, 4


class DigitScenes:
    """`count` scenes of `side` x `side` pixels.

    Args:
        digits: uint8 [digits, 8, 8], brightness 0..255.
        labels: [digits], 0..DIGITS - 1.
        stream: number of the random stream; splits have different ones.
    """

    def __init__(self, digits: np.ndarray, labels: np.ndarray, count: int, side: int, stream: int):
        self.digits, self.labels = digits, labels
        self.count, self.side, self.stream = count, side, stream

    def __len__(self) -> int:
        return self.count

    def scene(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Image uint8 [side, side, 3], and mask uint8 [side, side]: 0 background, 1 + digit, 255 rim."""
        rng = np.random.default_rng((_SEED, self.stream, index))
        image = self._background(rng)
        mask = np.zeros((self.side, self.side), dtype=np.uint8)
        self._draw_digit(image, mask, rng)
        image += rng.integers(-_NOISE, _NOISE + 1, image.shape)
        return np.clip(image, 0, 255).astype(np.uint8), mask

    def _background(self, rng: np.random.Generator) -> np.ndarray:
        """Soft clouds of colour, float32 [side, side, 3]."""
        coarse = (rng.integers(*_BEHIND, 3) + rng.integers(-_CLOUDS, _CLOUDS + 1, (5, 5, 3))).astype(np.uint8)
        clouds = Image.fromarray(coarse).resize((self.side, self.side), Image.Resampling.BILINEAR)
        return np.asarray(clouds, dtype=np.float32).copy()

    def _draw_digit(self, image: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> None:
        which = rng.integers(len(self.digits))
        size = max(1, round(self.side * rng.uniform(_SMALLEST, _LARGEST)))
        y, x = rng.integers(0, self.side - size + 1, 2)
        scaled = Image.fromarray(self.digits[which]).resize((size, size), Image.Resampling.BILINEAR)
        ink = np.asarray(scaled, dtype=np.float32)[..., None] / 255
        card, colour = rng.integers(*_CARD, 3), rng.integers(*_INK, 3)
        image[y : y + size, x : x + size] = card + ink * (colour - card)
        shape = np.zeros(mask.shape, dtype=bool)
        shape[y : y + size, x : x + size] = True
        mask[_grown(shape)] = RIM
        mask[shape] = 1 + self.labels[which]


def _grown(shape: np.ndarray) -> np.ndarray:
    """The shape with one pixel more in each of the four directions."""
    grown = shape.copy()
    grown[1:] |= shape[:-1]
    grown[:-1] |= shape[1:]
    grown[:, 1:] |= shape[:, :-1]
    grown[:, :-1] |= shape[:, 1:]
    return grown
