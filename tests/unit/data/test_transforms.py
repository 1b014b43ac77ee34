"""From images to tensors: sizes, values, what each key changes, mixing."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from largetrain.config.vision_schema import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig, ClassificationData
from largetrain.data.transforms import LimitAspect, Mixing, eval_sizes, evaluation_transform, training_transform

PLAIN = {"flip": 0.0}


def noise(width, height, seed=0):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8))


def data_of(augment=None, **keys):
    return ClassificationData(augment=AugmentConfig(**(augment or {})), **keys)


def raw(**keys):
    """Keys under which values stay in 0..1."""
    return {"mean": [0.0] * 3, "std": [1.0] * 3, **keys}


def drawn(transform, image, seed=0):
    torch.manual_seed(seed)
    return transform(image)


@pytest.mark.parametrize("crop", ["resized", "pad", "center"])
@pytest.mark.parametrize("policy", ["none", "randaugment", "trivialaugment", "autoaugment", "augmix"])
def test_every_pipeline_gives_the_size_and_type(crop, policy):
    augment = {"crop": crop, "policy": policy, "color_jitter": 0.4, "random_erasing": 1.0}
    transform = training_transform(data_of(augment, image_size=24, interpolation="bicubic"))
    for size in [(8, 8), (24, 24), (50, 31), (1, 900)]:
        tensor = drawn(transform, noise(*size))
        assert tensor.shape == (3, 24, 24) and tensor.dtype == torch.float32 and tensor.isfinite().all()


@pytest.mark.parametrize("size", [(40, 30), (8, 8), (30, 300), (1, 60000)])
def test_evaluation_gives_the_size(size):
    assert evaluation_transform(data_of(image_size=24, eval_size=32))(noise(*size)).shape == (3, 32, 32)


def test_evaluation_is_torchvisions_recipe_to_the_last_bit():
    """Resize, centre crop, tensor, normalise, as ClassificationPresetEval of torchvision's references."""
    reference = v2.Compose(
        [
            v2.Resize(256, v2.InterpolationMode.BILINEAR),
            v2.CenterCrop(224),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    image = noise(300, 280)
    assert evaluation_transform(data_of())(image).equal(reference(image))


def test_training_is_torchvisions_recipe_to_the_last_bit():
    """The order of ClassificationPresetTrain: crop, flip, policy, tensor, normalise, erase; same draws, same image."""
    reference = v2.Compose(
        [
            v2.RandomResizedCrop(32),
            v2.RandomHorizontalFlip(0.5),
            v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            v2.RandomErasing(0.5),
        ]
    )
    transform = training_transform(data_of({"policy": "trivialaugment", "random_erasing": 0.5}, image_size=32))
    for seed in range(12):
        assert drawn(transform, noise(60, 40, seed), seed).equal(drawn(reference, noise(60, 40, seed), seed))


def test_values_are_normalised_per_channel():
    grey = Image.new("RGB", (8, 8), (51, 102, 255))  # 0.2, 0.4, 1.0
    transform = evaluation_transform(data_of(image_size=8, mean=[0.1, 0.4, 0.5], std=[0.1, 0.2, 0.25]))
    # values below 2 in fp32, three roundings
    assert transform(grey)[:, 0, 0].tolist() == pytest.approx([1.0, 0.0, 2.0], abs=3 * 2**-23)


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, (224, 256)),
        ({"image_size": 176, "eval_size": 224, "eval_resize": 232}, (224, 232)),
        ({"image_size": 299}, (299, 342)),
        ({"image_size": 128}, (128, 146)),
        ({"image_size": 127}, (127, 127)),
        ({"image_size": 32}, (32, 32)),
        ({"image_size": 32, "eval_resize": 40}, (32, 40)),
    ],
)
def test_sizes_of_evaluation(keys, sizes):
    assert eval_sizes(data_of(**keys)) == sizes


def test_interpolation_is_used():
    images = [
        evaluation_transform(data_of(image_size=16, interpolation=kind))(noise(40, 40))
        for kind in ("bilinear", "bicubic")
    ]
    assert not images[0].equal(images[1])


def test_padded_crops_shift_the_image_by_at_most_the_padding():
    """Of a single bright pixel in the middle the place moves over all of -2..2 in both directions."""
    pixels = np.zeros((9, 9, 3), dtype=np.uint8)
    pixels[4, 4] = 255
    transform = training_transform(data_of({"crop": "pad", "crop_padding": 2, **PLAIN}, **raw(image_size=9)))
    found = {
        tuple((drawn(transform, Image.fromarray(pixels), seed)[0].nonzero()[0] - 4).tolist()) for seed in range(300)
    }
    assert found == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}


def test_the_centre_crop_of_training_shows_what_evaluation_shows():
    image = noise(64, 48)
    data = data_of({"crop": "center", **PLAIN}, image_size=32, eval_resize=40)
    assert training_transform(data)(image).equal(evaluation_transform(data)(image))
    # at half the size, the same share of the image: a bright frame outside it stays outside
    pixels = np.full((100, 100, 3), 255, dtype=np.uint8)
    pixels[15:85, 15:85] = 0  # evaluation shows 60 of 100 pixels, and scaling reaches a few further
    data = data_of({"crop": "center", **PLAIN}, **raw(image_size=30, eval_size=60, eval_resize=100))
    assert training_transform(data)(Image.fromarray(pixels)).max() == 0
    assert evaluation_transform(data)(Image.fromarray(pixels)).max() == 0


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_the_chance_of_a_flip(chance):
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    pixels[:, :2] = 255
    transform = training_transform(data_of({"crop": "center", "flip": chance}, **raw(image_size=4)))
    flips = sum(bool(drawn(transform, Image.fromarray(pixels), seed)[0, 0, 3]) for seed in range(200))
    assert flips == 200 * chance or (chance == 0.5 and 65 <= flips <= 135)  # 5 standard deviations


@pytest.mark.parametrize(
    "augment",
    [
        {"policy": "randaugment"},
        {"policy": "trivialaugment"},
        {"policy": "autoaugment"},
        {"policy": "augmix"},
        {"color_jitter": 0.4},
        {"random_erasing": 1.0},
        {"crop_scale": [0.8, 0.9]},
        {"crop_ratio": [1.5, 1.6]},
        {"flip": 1.0},
    ],
)
def test_each_key_changes_the_images(augment):
    """Against the same pipeline without it, for the same draws; and two draws differ."""
    base = {"flip": 0.0, "crop_scale": [0.5, 0.6], "crop_ratio": [0.9, 1.1]}
    transform = training_transform(data_of({**base, **augment}, image_size=16))
    plain = training_transform(data_of(base, image_size=16))
    image = noise(20, 20)
    changed = [not drawn(transform, image, seed).equal(drawn(plain, image, seed)) for seed in range(10)]
    assert sum(changed) >= 5
    assert not drawn(transform, image, 0).equal(drawn(transform, image, 1))


def test_the_magnitude_of_randaugment_is_used():
    image = noise(20, 20)
    weak, strong = (
        training_transform(data_of({"policy": "randaugment", "magnitude": m, "crop": "center", **PLAIN}, image_size=20))
        for m in (1, 25)
    )
    plain = evaluation_transform(data_of(image_size=20))(image)
    moved = [sum(float((drawn(t, image, s) - plain).abs().mean()) for s in range(20)) for t in (weak, strong)]
    assert moved[1] > 1.5 * moved[0]


def test_long_images_are_cut_in_the_middle():
    pixels = np.zeros((1000, 3, 3), dtype=np.uint8)
    pixels[488:512] = 255
    cut = LimitAspect()(Image.fromarray(pixels))
    assert cut.size == (3, 24) and np.asarray(cut).min() == 255
    image = noise(80, 10)
    assert LimitAspect()(image) is image
    assert LimitAspect()(noise(81, 10)).size == (80, 10)


def one_hot(labels, classes):
    return torch.nn.functional.one_hot(labels, classes).float()


def test_mixup_mixes_images_and_labels_by_the_same_share():
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 2, 3])
    images = one_hot(labels, 4)[:, :3, None, None].expand(4, 3, 5, 5).contiguous()
    mixing = Mixing(AugmentConfig(mixup=1.0), 6)
    shares = set()
    for _ in range(8):
        mixed, targets = mixing(images.clone(), labels)
        assert mixed.shape == images.shape and targets.shape == (4, 6) and targets.dtype == torch.float32
        share = float(targets[0, 0])
        # each sum is of two products: three roundings of values up to 1
        close = {"rtol": 0.0, "atol": 3 * 2.0**-24}
        torch.testing.assert_close(targets.sum(1), torch.ones(4), **close)
        expected = share * one_hot(labels, 6) + (1 - share) * one_hot(labels.roll(1), 6)
        torch.testing.assert_close(targets, expected, **close)
        torch.testing.assert_close(mixed, share * images + (1 - share) * images.roll(1, 0), **close)
        shares.add(share)
    assert len(shares) == 8


def test_cutmix_labels_are_the_shares_of_the_area():
    torch.manual_seed(1)
    labels = torch.arange(3)
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 3, 16, 16).contiguous()
    for _ in range(8):
        mixed, targets = Mixing(AugmentConfig(cutmix=1.0), 3)(images.clone(), labels)
        for index in range(3):
            own = float((mixed[index, 0] == index).double().mean())
            other = float((mixed[index, 0] == (index - 1) % 3).double().mean())
            assert own + other == 1.0
            assert targets[index, index].item() == pytest.approx(own, abs=2**-22)
            assert targets[index].sum().item() == pytest.approx(1.0, abs=2**-22)


def test_with_both_each_micro_batch_draws_one():
    """A mixup of 0s and 1s has values between, everywhere alike; a cutmix has none."""
    torch.manual_seed(2)
    images, labels = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 16, 16).contiguous(), torch.tensor([0, 1])
    mixing = Mixing(AugmentConfig(mixup=1.0, cutmix=1.0), 2)
    drawn_images = [mixing(images, labels)[0] for _ in range(64)]
    kinds = [bool(((mixed > 0.001) & (mixed < 0.999)).any()) for mixed in drawn_images]
    assert 12 <= sum(kinds) <= 52  # half of 64, 5 standard deviations


@pytest.mark.parametrize("repeats", [2, 3])
def test_copies_of_a_sample_are_mixed_with_other_samples(repeats):
    torch.manual_seed(3)
    labels = torch.arange(4).repeat_interleave(repeats)
    images = labels.float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2).contiguous()
    mixed, targets = Mixing(AugmentConfig(mixup=1.0, repeats=repeats), 4)(images, labels)
    assert ((targets > 0).sum(1) == 2).all()
    # the images followed their labels back to their places: label-weighted means are what was mixed
    torch.testing.assert_close(mixed[:, 0, 0, 0], targets @ torch.arange(4.0), rtol=0, atol=2.0**-20)
    assert targets.gather(1, labels[:, None]).unique().numel() <= 2
