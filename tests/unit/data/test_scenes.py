"""Scenes of digits: the same from their number alone, digits of the splits apart, a mask that fits."""

import pickle

import numpy as np
import pytest
import torch

from largetrain.config.vision_schema import SegmentationAugment, SegmentationData, SegmentationRun
from largetrain.data.scenes import DIGITS, SCENE_CLASSES, DigitScenes
from largetrain.data.segmentation import build_segmentation
from largetrain.errors import ConfigError


def bars(count=10):
    """A vertical bar, two of eight pixels wide, for each digit."""
    digits = np.zeros((count, 8, 8), dtype=np.uint8)
    digits[:, 1:7, 3:5] = 255
    return digits, np.arange(count) % DIGITS


def scenes(count=50, side=64, stream=0):
    return DigitScenes(*bars(), count, side, stream)


def build(**data):
    data = {"image_size": 32, "samples": 40, "augment": SegmentationAugment(scale=[1.0, 1.0], flip=0.0), **data}
    return build_segmentation(SegmentationRun(data=SegmentationData(**data)))


def test_a_scene_depends_on_its_number_alone():
    first, again = scenes(), pickle.loads(pickle.dumps(scenes(count=7)))
    later = [again.scene(index) for index in (6, 3)]
    for index, (image, mask) in zip((6, 3), later, strict=True):
        assert np.array_equal(first.scene(index)[0], image) and np.array_equal(first.scene(index)[1], mask)
    assert not np.array_equal(first.scene(3)[1], first.scene(6)[1])
    assert not np.array_equal(first.scene(3)[1], scenes(stream=1).scene(3)[1])


def test_masks_hold_digits_with_a_rim_of_one_pixel():
    seen, digit_beside = set(), []
    for index in range(50):
        image, mask = scenes().scene(index)
        assert image.shape == (64, 64, 3) and image.dtype == mask.dtype == np.uint8 and mask.shape == (64, 64)
        values = set(np.unique(mask).tolist())
        assert {0, 255} <= values <= {*range(4), 255} and len(values - {0, 255}) == 1
        seen |= values
        # no digit touches the background: there is a rim between
        for one, other in ((mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1])):
            for near, far in ((one, other), (other, one)):
                assert not ((near > 0) & (near < 255) & (far == 0)).any()
        # the rim is thin: a digit is next to its pixels
        around = np.pad(mask, 1)
        beside = np.stack([around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:]])
        digit_beside.append(((beside > 0) & (beside < 255))[:, mask == 255].any(axis=0))
    assert seen == {*range(4), 255}
    assert np.concatenate(digit_beside).all()


def test_digits_can_be_told_from_what_is_behind():
    # a bar differs by about half of the range in one channel, far more than clouds and noise
    for index in range(30):
        image, mask = scenes().scene(index)
        digit = (mask > 0) & (mask < 255)
        assert np.abs(image[digit].astype(int) - image[mask == 0].mean(0)).max(axis=1).mean() > 40


def test_splits_have_scenes_and_digits_of_their_own():
    pytest.importorskip("sklearn")
    splits = build(validation_fraction=0.25)
    assert (len(splits.train), len(splits.validation)) == (40, 10) and splits.classes == SCENE_CLASSES
    train, validation = (
        {digit.tobytes() for digit in split.source.scenes.digits} for split in (splits.train, splits.validation)
    )
    for split in (splits.train, splits.validation):
        assert {*split.source.scenes.labels.tolist()} == {*range(DIGITS)}
    assert len(train) > 350 and len(validation) > 100 and not train & validation


def test_samples_are_normalised_and_their_rims_ignored():
    pytest.importorskip("sklearn")
    splits = build(mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])
    image, mask = splits.train.source.scenes.scene(5)
    sample = splits.train[5]
    expected = torch.from_numpy(mask).long()
    assert torch.equal(sample["labels"], expected.masked_fill(expected == 255, -100))
    torch.testing.assert_close(sample["images"], torch.from_numpy(image).permute(2, 0, 1) / 255)
    assert splits.validation[9]["labels"].shape == (32, 32)
    assert build(base_size=48).validation[0]["labels"].shape == (48, 48)


def test_what_scenes_cannot_have_is_refused():
    pytest.importorskip("sklearn")
    assert build(classes=[f"name {index}" for index in range(4)]).classes[3] == "name 3"
    with pytest.raises(ConfigError, match="data.classes: digit_scenes has 4 classes, but 3 are given"):
        build(classes=3)
    with pytest.raises(ConfigError, match="data.validation: digit_scenes"):
        build(validation="folder")


def test_fingerprints_of_runs_with_other_scenes_differ():
    pytest.importorskip("sklearn")
    assert build().fingerprint == build(workers=3).fingerprint
    assert len({build(**data).fingerprint for data in ({}, {"samples": 41}, {"base_size": 48})}) == 3
