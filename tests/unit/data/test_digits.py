"""The built-in digits."""

import sys

import numpy as np
import pytest

from largetrain.data import digits
from largetrain.errors import ConfigError


def test_the_digits_are_those_of_scikit_learn_in_256_greys():
    from sklearn.datasets import load_digits

    images, labels = digits.load_digits()
    reference = load_digits()
    assert images.dtype == np.uint8 and images.shape == (1797, 8, 8) and labels.dtype == np.int64
    assert np.array_equal(labels, reference.target)
    # 16 greys become 256: each is within half a step of its share
    assert np.abs(images / 255 - reference.images / 16).max() <= 0.5 / 255
    assert images.min() == 0 and images.max() == 255


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    digits.load_digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"data\.source: digits needs scikit-learn; pip install -e '.\[demo\]'"):
        digits.load_digits()
    monkeypatch.undo()
    assert len(digits.load_digits()[0]) == 1797
