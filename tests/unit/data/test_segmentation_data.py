"""Segmentation data: masks read as they are, each layout, and image and mask kept together."""

import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import max_pool2d, pad

from largetrain.config.vision_schema import SegmentationAugment, SegmentationData, SegmentationRun
from largetrain.data.images import BadImage
from largetrain.data.masks import Labels, read_mask
from largetrain.data.segmentation import build_segmentation
from largetrain.data.segmentation_layouts import CITYSCAPES_CLASSES, VOC_CLASSES
from largetrain.errors import ConfigError

RAW = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}
AS_IT_IS = SegmentationAugment(scale=[1.0, 1.0], flip=0.0)


def write_image(path, values):
    """values uint8 [height, width]: a grey RGB image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.repeat(np.asarray(values, dtype=np.uint8)[..., None], 3, axis=2)).save(path, quality=95)


def write_mask(path, values, mode="P"):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, dtype=np.uint8))
    if mode == "P":
        # colours whose brightness is nothing like the index
        image = image.copy()
        image.putpalette([(37 * index + shift) % 256 for index in range(256) for shift in (0, 90, 170)])
    image.save(path)


def write_pair(root, name, mask, folders=("images", "masks")):
    write_image(root / folders[0] / f"{name}.png", np.asarray(mask) % 7 * 30)
    write_mask(root / folders[1] / f"{name}.png", mask)


def build(source, size=4, **data):
    data = {"image_size": size, **RAW, "augment": AS_IT_IS, **data}
    return build_segmentation(SegmentationRun(data=SegmentationData(source=str(source), **data)))


def labels_of(splits, index=0):
    return splits.validation[index]["labels"]


SQUARE = [[0, 1, 2, 255], [0, 1, 2, 255], [0, 0, 0, 0], [1, 1, 1, 1]]


# ---- one mask


def test_palette_indices_are_read_as_they_are(tmp_path):
    write_mask(tmp_path / "mask.png", [[0, 1], [2, 255]])
    assert Image.open(tmp_path / "mask.png").mode == "P"
    assert read_mask(tmp_path / "mask.png").tolist() == [[0, 1], [2, 255]]
    labels = Labels(3, 255).of(read_mask(tmp_path / "mask.png"), "mask.png")
    assert labels.tolist() == [[0, 1], [2, -100]]


def png_of_grey_bits(path, rows, bits):
    """A grey PNG of 2 or 4 bits per pixel, which PIL reads but cannot write."""
    import struct
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packed = b""
    for row in rows:
        whole = "".join(f"{value:0{bits}b}" for value in row)
        packed += b"\0" + int(whole, 2).to_bytes(len(whole) // 8, "big")
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), bits, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(packed)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize(("bits", "row"), [(2, [0, 1, 2, 3]), (4, [0, 1, 9, 15])])
def test_grey_values_of_few_bits_are_not_stretched(tmp_path, bits, row):
    png_of_grey_bits(tmp_path / "mask.png", [row, row[::-1]], bits)
    assert read_mask(tmp_path / "mask.png").tolist() == [row, row[::-1]]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[False, True]]), [[0, 1]]),
        (np.array([[3, 200]], dtype=np.uint8), [[3, 200]]),
        (np.array([[3, 40000]], dtype=np.uint16), [[3, 40000]]),
        (np.array([[-1, 70000]], dtype=np.int32), [[-1, 70000]]),
    ],
    ids=["1", "L", "I;16", "I"],
)
def test_grey_modes_keep_their_values(tmp_path, array, expected):
    Image.fromarray(array).save(tmp_path / "mask.tif")
    assert read_mask(tmp_path / "mask.tif").tolist() == expected


def test_masks_with_colours_and_jpegs_are_refused_with_a_way_out(tmp_path):
    write_image(tmp_path / "rgb.png", [[0, 1]])
    with pytest.raises(BadImage, match=r"rgb\.png.*mode RGB.*8-bit grey or palette PNG"):
        read_mask(tmp_path / "rgb.png")
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "mask.jpg")
    with pytest.raises(BadImage, match=r"mask\.jpg.*JPEG does not keep"):
        read_mask(tmp_path / "mask.jpg")


@pytest.mark.parametrize(
    ("ignore_index", "values", "expected"),
    [
        (255, np.array([0, 2, 255], dtype=np.uint8), [0, 2, -100]),
        (-1, np.array([0, 2, -1], dtype=np.int32), [0, 2, -100]),
        (0, np.array([0, 1, 2], dtype=np.uint8), [-100, 1, 2]),
        (3, np.array([3, 1, 2], dtype=np.uint16), [-100, 1, 2]),
    ],
)
def test_the_ignored_value_is_the_only_one_without_a_class(ignore_index, values, expected):
    assert Labels(3, ignore_index).of(values, "mask").tolist() == expected


@pytest.mark.parametrize(
    ("ignore_index", "values", "said"),
    [
        (255, np.array([0, 3], dtype=np.uint8), r"value 3, .*0\.\.2.*ignore_index is 255"),
        (-1, np.array([0, 255], dtype=np.uint8), r"value 255, .*0\.\.2.*set data.ignore_index: 255.*store that as 1"),
        (255, np.array([0, -1], dtype=np.int32), "value -1, "),
        (255, np.array([0, -7], dtype=np.int32), "value -7, "),
        (255, np.array([0, 256], dtype=np.uint16), "value 256, "),
        (255, np.array([0, 2**31 - 1], dtype=np.int32), "value 2147483647, "),
    ],
)
def test_other_values_are_refused_with_file_and_value(ignore_index, values, said):
    with pytest.raises(BadImage, match=rf"folder/mask\.png.*{said}"):
        Labels(3, ignore_index).of(values, "folder/mask.png")


# ---- layouts


def test_pairs_with_splits(tmp_path):
    for split, names in (("train", "abc"), ("val", "de")):
        for name in names:
            write_pair(tmp_path / split, name, SQUARE)
    splits = build(tmp_path, classes=["sky", "road", "tree"])
    assert (len(splits.train), len(splits.validation), splits.classes) == (3, 2, ("sky", "road", "tree"))
    expected = torch.tensor(SQUARE).masked_fill(torch.tensor(SQUARE) == 255, -100)
    for sample in (splits.train[0], splits.validation[0]):
        assert torch.equal(sample["labels"], expected) and sample["labels"].dtype == torch.int64
        assert sample["images"].dtype == torch.float32 and type(sample["images"]) is torch.Tensor
        torch.testing.assert_close(sample["images"][0], torch.tensor(SQUARE).remainder(7) * 30 / 255)
    assert "3 images for training, 2 for validation" in splits.report[0] and len(splits.report) == 1
    assert pickle.loads(pickle.dumps(splits.train))[1]["labels"].shape == (4, 4)


def test_pairs_without_a_split_hold_out_the_same_ones_always(tmp_path):
    for index in range(20):
        write_pair(tmp_path, f"deep/{index}", SQUARE)
    first, again = (build(tmp_path, classes=3, validation_fraction=0.3) for _ in range(2))
    names = [{pair.name for pair in split.source.pairs} for split in (first.train, first.validation)]
    assert len(names[0] | names[1]) == 20 and not names[0] & names[1] and names[1]
    assert [pair.name for pair in again.validation.source.pairs] == sorted(names[1])
    assert first.fingerprint == again.fingerprint and first.classes == ("class_0", "class_1", "class_2")


def test_the_fingerprint_follows_files_and_keys_but_not_the_place(tmp_path):
    def prints(root, **data):
        for index in range(4):
            write_pair(tmp_path / root, str(index), SQUARE)
        return build(tmp_path / root, classes=3, **data).fingerprint

    first = prints("a")
    assert prints("b") == first
    assert prints("a", workers=2, on_bad_image="skip") == first
    assert prints("a", ignore_index=255, image_size=8) != first
    write_pair(tmp_path / "b", "5", SQUARE)
    assert prints("b") != first


def test_a_validation_folder_of_its_own(tmp_path):
    for root, names in (("here", "abc"), ("there", "de")):
        for name in names:
            write_pair(tmp_path / root, name, SQUARE)
    splits = build(tmp_path / "here", classes=3, validation=str(tmp_path / "there"))
    assert (len(splits.train), len(splits.validation)) == (3, 2)


@pytest.mark.parametrize("alone", ["images", "masks"])
def test_missing_partners_are_named(tmp_path, alone):
    write_pair(tmp_path, "a", SQUARE)
    write_mask(tmp_path / alone / "lonely.png", SQUARE)
    with pytest.raises(ConfigError, match=rf"data.source: 1 files have no \w+ of the same name: .*{alone}/lonely\.png"):
        build(tmp_path, classes=3)


def test_two_files_of_one_name_are_named(tmp_path):
    write_pair(tmp_path, "a", SQUARE)
    write_image(tmp_path / "images/a.jpg", SQUARE)
    with pytest.raises(ConfigError, match=r"a\.jpg and .*a\.png have the same name"):
        build(tmp_path, classes=3)


def test_pairs_need_classes(tmp_path):
    write_pair(tmp_path, "a", SQUARE)
    with pytest.raises(ConfigError, match="data.classes: needed"):
        build(tmp_path)


@pytest.mark.parametrize("inside", ["", "VOC2012", "VOCdevkit/VOC2012"])
def test_voc(tmp_path, inside):
    root = tmp_path / inside
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    for split, names in (("train", ["2007_1", "2007_3"]), ("val", ["2007_2"])):
        (root / f"ImageSets/Segmentation/{split}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            write_image(root / f"JPEGImages/{name}.jpg", [[9, 9], [9, 9]])
            write_mask(root / f"SegmentationClass/{name}.png", [[0, 20], [15, 255]])
    write_image(root / "JPEGImages/2007_4.jpg", [[9]])  # in no list
    splits = build(tmp_path, size=2)
    assert (len(splits.train), len(splits.validation), splits.classes) == (2, 1, VOC_CLASSES)
    assert len(VOC_CLASSES) == 21 and labels_of(splits).tolist() == [[0, 20], [15, -100]]
    (root / "SegmentationClass/2007_2.png").unlink()
    with pytest.raises(ConfigError, match=r"data.source: 1 files are missing: .*SegmentationClass/2007_2\.png"):
        build(tmp_path, size=2)


def write_cityscapes(root, values, tail):
    for split in ("train", "val"):
        write_image(root / f"leftImg8bit/{split}/aachen/aachen_0_1_leftImg8bit.png", np.zeros((2, 2)))
        write_mask(root / f"gtFine/{split}/aachen/aachen_0_1_gtFine_{tail}.png", values, mode="L")


def test_cityscapes_ids_become_classes(tmp_path):
    write_cityscapes(tmp_path, [[7, 33], [26, 5]], "labelIds")
    splits = build(tmp_path, size=2)
    assert len(CITYSCAPES_CLASSES) == 19 and splits.classes == CITYSCAPES_CLASSES
    assert labels_of(splits).tolist() == [[0, 18], [13, -100]]
    assert [CITYSCAPES_CLASSES[index] for index in (0, 18, 13)] == ["road", "bicycle", "car"]
    write_cityscapes(tmp_path, [[18, 0], [0, 255]], "labelTrainIds")  # preferred when it is there
    assert labels_of(build(tmp_path, size=2)).tolist() == [[18, 0], [0, -100]]


def test_cityscapes_without_a_mask_and_with_a_wrong_value(tmp_path):
    write_cityscapes(tmp_path, [[7, 34], [26, 5]], "labelIds")
    with pytest.raises(BadImage, match="value 34"):
        build(tmp_path, size=2)
    (tmp_path / "gtFine/val/aachen/aachen_0_1_gtFine_labelIds.png").unlink()
    with pytest.raises(ConfigError, match=r"1 files are missing: .*gtFine/val/aachen/aachen_0_1_gtFine_labelIds\.png"):
        build(tmp_path, size=2)


def test_unknown_layouts_and_empty_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"data.source: .* is in no layout .*SegmentationClass.*leftImg8bit.*masks"):
        build(tmp_path)
    with pytest.raises(ConfigError, match=r"data.source: .*nowhere does not exist"):
        build(tmp_path / "nowhere")
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="holds no image in the layout pairs"):
        build(tmp_path, classes=3)
    write_pair(tmp_path, "a", SQUARE)
    with pytest.raises(ConfigError, match="no image for validation"):
        build(tmp_path, classes=3)


# ---- what a split holds


def write_binary(root, values=(0, 255), names="abcd"):
    for name in names:
        write_pair(root, name, [[values[0]] * 4, [values[1]] * 4])


def test_a_foreground_that_is_ignored_is_told(tmp_path):
    write_binary(tmp_path)
    report = build(tmp_path, classes=2).report
    warnings = [line for line in report if line.startswith("warning: ")]
    assert len(warnings) == 2 and "for training" in warnings[0] and "for validation" in warnings[1]
    assert "only the class class_0 occurs; 50% of their pixels are ignored (data.ignore_index=255)" in warnings[0]
    write_binary(tmp_path, (0, 1))
    assert len(build(tmp_path, classes=2).report) == 1


def test_binary_masks_with_nothing_ignored_are_refused(tmp_path):
    write_binary(tmp_path)
    with pytest.raises(BadImage, match="value 255, .*store that as 1"):
        build(tmp_path, classes=2, ignore_index=-1)


def test_masks_without_any_label_are_refused(tmp_path):
    write_binary(tmp_path, (255, 255))
    with pytest.raises(ConfigError, match=r"data: none of the \d masks looked at for training .*ignore_index=255"):
        build(tmp_path, classes=2)


def test_wrong_masks_are_refused_or_left_to_the_loader(tmp_path):
    for index in range(6):
        write_pair(tmp_path / "train", str(index), SQUARE)
        write_pair(tmp_path / "val", str(index), SQUARE)
    write_pair(tmp_path / "train", "3", [[0, 9]])
    with pytest.raises(BadImage, match=r"train/masks/3\.png.*value 9"):
        build(tmp_path, classes=3)
    splits = build(tmp_path, classes=3, on_bad_image="skip", max_bad_images=1)
    assert (splits.train.on_bad_image, splits.train.max_bad_images) == ("skip", 1)
    with pytest.raises(BadImage, match=r"train/masks/3\.png.*value 9"):
        splits.train[3]
    for index in range(6):
        write_pair(tmp_path / "train", str(index), [[0, 9]])
    # all of them: nothing would be left, and to skip them is no way out
    with pytest.raises(ConfigError, match=r"none of the 6 masks looked at for training \(of 6\) .*value 9.*") as caught:
        build(tmp_path, classes=3, on_bad_image="skip")
    assert "on_bad_image" not in str(caught.value)


def test_other_sizes_and_damaged_files_are_named(tmp_path):
    for name in "abc":
        write_pair(tmp_path / "train", name, SQUARE)
        write_pair(tmp_path / "val", name, SQUARE)
    splits = build(tmp_path, classes=3)
    write_mask(tmp_path / "train/masks/a.png", [[0, 1, 2]])
    with pytest.raises(BadImage, match=r"train/masks/a\.png.*3 x 1 pixels.*4 x 4"):
        splits.train[0]
    for folder, index in (("images", 1), ("masks", 2)):
        path = tmp_path / f"train/{folder}/{'abc'[index]}.png"
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(BadImage, match=rf"{folder}/{'abc'[index]}\.png"):
            splits.train[index]


# ---- transforms


def blocks(height, width, cell=10):
    rows, columns = np.arange(height) // cell, np.arange(width) // cell
    return (rows[:, None] * 2 + columns) % 5


def write_blocks(root, height=40, width=30):
    for split in ("train", "val"):
        mask = blocks(height, width)
        write_image(root / f"{split}/images/a.png", mask * 40 + 20)
        write_mask(root / f"{split}/masks/a.png", mask)


def interior(labels, reach):
    """Pixels whose whole neighbourhood is seen and has their label."""
    padded = pad(labels[None].float(), (reach,) * 4, value=-100)
    size = 2 * reach + 1
    high, low = max_pool2d(padded, size, stride=1)[0], -max_pool2d(-padded, size, stride=1)[0]
    return (labels >= 0) & (high == labels) & (low == labels)


def seeded(dataset, seed, index=0):
    random.seed(seed)
    torch.manual_seed(seed)
    return dataset[index]


def test_image_and_mask_stay_together(tmp_path):
    write_blocks(tmp_path)
    augment = SegmentationAugment(scale=[0.5, 2.0], flip=0.5)
    train = build(tmp_path, size=48, base_size=64, classes=5, augment=augment).train
    checked, ignored, first_columns = 0, 0, set()
    for seed in range(30):
        sample = seeded(train, seed)
        images, labels = sample["images"], sample["labels"]
        assert images.shape == (3, 48, 48) and labels.shape == (48, 48)
        # 30 x 40 pixels reach up to 128: one pixel of the file is at most 3.2 wide, and bilinear mixes two
        inside = interior(labels, 5)
        # a constant neighbourhood stays constant; one step of 8 bits for the rounding of the interpolation
        expected = (labels[inside] * 40 + 20) / 255
        assert ((images[:, inside] - expected).abs() <= 1.01 / 255).all()
        checked += int(inside.sum())
        ignored += int((labels == -100).sum())
        first_columns.add(tuple(labels[24].tolist()))
    assert checked > 2000 and ignored > 2000 and len(first_columns) == 30


def test_the_draw_is_a_function_of_the_seeds(tmp_path):
    write_blocks(tmp_path)
    augment = SegmentationAugment(color_jitter=0.5)
    train = build(tmp_path, size=32, classes=5, augment=augment).train
    first, again, other = seeded(train, 1), seeded(train, 1), seeded(train, 2)
    assert torch.equal(first["images"], again["images"]) and torch.equal(first["labels"], again["labels"])
    assert not torch.equal(first["images"], other["images"])


def test_a_flip_mirrors_both(tmp_path):
    write_blocks(tmp_path, 30, 30)
    plain, mirrored = (
        build(tmp_path, size=30, classes=5, augment=SegmentationAugment(scale=[1.0, 1.0], flip=flip)).train[0]
        for flip in (0.0, 1.0)
    )
    assert torch.equal(plain["labels"].flip(-1), mirrored["labels"])
    assert torch.equal(plain["images"].flip(-1), mirrored["images"])
    assert not torch.equal(plain["labels"], mirrored["labels"])


def test_padding_is_of_the_mean_colour_and_ignored(tmp_path):
    write_blocks(tmp_path)  # 40 high, 30 wide
    mean = [0.2, 0.4, 0.6]  # 51, 102, 153 of 255: exactly 0 after normalising, but for one rounding
    splits = build(tmp_path, size=40, classes=5, mean=mean, std=[0.5, 0.5, 0.5])
    sample = splits.validation[0]
    assert torch.equal(sample["labels"][:, :30], torch.from_numpy(blocks(40, 30)))
    assert (sample["labels"][:, 30:] == -100).all()
    assert sample["images"][:, :, 30:].abs().max() < 1e-6
    assert (sample["images"][:, :, :30].abs().amax(0) > 0.05).all()
    sample = splits.train[0]
    padded = sample["labels"] == -100
    assert padded.sum() == 40 * 10 and sample["images"][:, padded].abs().max() < 1e-6


def test_colours_change_the_image_alone(tmp_path):
    write_blocks(tmp_path, 30, 30)
    plain = build(tmp_path, size=30, classes=5).train[0]
    augment = SegmentationAugment(scale=[1.0, 1.0], flip=0.0, color_jitter=0.9)
    varied = seeded(build(tmp_path, size=30, classes=5, augment=augment).train, 3)
    assert torch.equal(plain["labels"], varied["labels"]) and not torch.equal(plain["images"], varied["images"])


@pytest.mark.parametrize(("height", "width"), [(1, 300), (300, 1), (1, 1)])
def test_thin_images_keep_a_pixel(tmp_path, height, width):
    for split in ("train", "val"):
        write_pair(tmp_path / split, "a", np.ones((height, width)))
    splits = build(tmp_path, size=16, classes=2, augment=SegmentationAugment(scale=[0.1, 2.0]))
    for seed in range(5):
        assert seeded(splits.train, seed)["labels"].shape == (16, 16)
    assert (splits.validation[0]["labels"] == 1).sum() == (256 if height == width else 16)


def test_evaluation_is_base_size_and_training_image_size(tmp_path):
    write_blocks(tmp_path)
    splits = build(tmp_path, size=16, base_size=24, classes=5)
    assert splits.train[0]["images"].shape == (3, 16, 16)
    assert splits.validation[0]["images"].shape == (3, 24, 24)
    assert torch.equal(splits.validation[0]["images"], splits.validation[0]["images"])


# ---- synthetic


def test_synthetic_samples_are_of_the_sizes_asked_for():
    splits = build("synthetic", size=8, base_size=12, samples=30, validation_fraction=0.2, classes=4)
    assert (len(splits.train), len(splits.validation), len(splits.classes)) == (30, 6, 4)
    assert splits.train[29]["images"].shape == (3, 8, 8) and splits.validation[5]["labels"].shape == (12, 12)
    assert splits.train[0]["labels"].unique().tolist() == [0, 1, 2, 3]
    assert torch.equal(splits.train[3]["images"], build("synthetic", size=8, samples=30).train[3]["images"])
    assert len(build("synthetic", size=8).classes) == 21
