"""Scenes composed from handwritten digits, with a mask: segmentation without a download.

Each digit is drawn on a light card, and the whole card is of the digit's class: regions that a net with coarse feature
maps can learn within minutes, which thin strokes are not. A scene is made when it is asked for, from its number alone:
the same on any rank and in any loader process.
"""

import numpy as np
from PIL import Image

SCENE_CLASSES = ("background", *(str(digit) for digit in range(10)))
RIM = 255
"""Value of the one-pixel rim around each card, which belongs to no class."""
SCENES = "scenes of digits, version 2"
"""Part of the fingerprint; to be changed with how scenes are made."""
_SEED = 2718  # of the scenes, not of the run: all runs are measured on the same ones
_FEWEST, _MOST = 1, 3
_SMALLEST, _LARGEST = 0.4, 0.6  # side of a card as a share of that of the scene
_NOISE = 12


class DigitScenes:
    """`count` scenes of `side` x `side` pixels.

    Args:
        digits: uint8 [digits, 8, 8], brightness 0..255.
        labels: [digits], 0..9.
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
        for _ in range(rng.integers(_FEWEST, _MOST + 1)):
            self._draw_digit(image, mask, rng)
        image += rng.integers(-_NOISE, _NOISE + 1, image.shape)
        return np.clip(image, 0, 255).astype(np.uint8), mask

    def _background(self, rng: np.random.Generator) -> np.ndarray:
        """Soft clouds of colour, float32 [side, side, 3]."""
        middle = rng.integers(40, 216, 3)
        coarse = np.clip(middle + rng.integers(-40, 41, (5, 5, 3)), 0, 255).astype(np.uint8)
        clouds = Image.fromarray(coarse).resize((self.side, self.side), Image.Resampling.BILINEAR)
        return np.asarray(clouds, dtype=np.float32).copy()

    def _draw_digit(self, image: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> None:
        which = rng.integers(len(self.digits))
        size = max(1, round(self.side * rng.uniform(_SMALLEST, _LARGEST)))
        y, x = rng.integers(0, self.side - size + 1, 2)
        scaled = Image.fromarray(self.digits[which]).resize((size, size), Image.Resampling.BILINEAR)
        ink = np.asarray(scaled, dtype=np.float32)[..., None] / 255
        card, colour = rng.integers(160, 256, 3), rng.integers(0, 96, 3)
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
