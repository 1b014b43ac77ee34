"""scikit-learn's handwritten digits: real data without a download, for demonstrations and tests."""

from functools import lru_cache
from importlib import import_module

import numpy as np

from largetrain.errors import ConfigError

CLASSES = tuple("0123456789")
_GREYS = 16  # scikit-learn gives 0..16


@lru_cache(maxsize=1)
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [1797, 8, 8] in 0..255, and their digits, int64 [1797].

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        datasets = import_module("sklearn.datasets")  # an extra, and slow to import
    except ImportError:
        raise ConfigError(
            "data.source: digits needs scikit-learn; pip install -e '.[demo]', or name a folder of images."
        ) from None
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.rint(pixels.reshape(-1, 8, 8) * (255 / _GREYS)).astype(np.uint8)
    return images, labels.astype(np.int64)
