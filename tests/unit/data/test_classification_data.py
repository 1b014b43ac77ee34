"""Classification data: every source and layout, held-out shares, mistakes, the stream that comes out."""

import hashlib
import itertools
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from largetrain.config.vision_schema import ClassificationRun
from largetrain.data.classification import build_classification
from largetrain.data.digits import load_digits
from largetrain.data.loader import TrainStream, evaluation_batches
from largetrain.data.order import SampleOrder
from largetrain.errors import ConfigError
from tests.unit.data.helpers import batch_of

RAW = {"mean": [0.0] * 3, "std": [1.0] * 3, "image_size": 8, "augment": {"crop": "center", "flip": 0.0}}


def build(source, model=None, **data):
    return build_classification(ClassificationRun(data={"source": str(source), **RAW, **data}, model=model or {}))


def draw(path, value, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 255 - value)).save(path)


def folder(root, classes=("cat", "dog"), per_class=3, start=0):
    """Class folders of images whose red value counts up."""
    for index, (name, number) in enumerate(itertools.product(classes, range(per_class))):
        draw(root / name / f"{number}.png", start + index)
    return root


def reds(dataset):
    """Red value (0..255) and label of every sample."""
    return [
        (round(float(one["images"][0, 0, 0]) * 255), one["labels"])
        for one in map(dataset.__getitem__, range(len(dataset)))
    ]


def test_class_folders_are_classes_in_the_order_of_their_names(tmp_path):
    splits = build(folder(tmp_path / "data", ("dog", "cat", "ant")), validation_fraction=0.3)
    assert splits.classes == ("ant", "cat", "dog")
    # drawn as dog 0-2, cat 3-5, ant 6-8
    both = reds(splits.train) + reds(splits.validation)
    assert sorted(both) == [(0, 2), (1, 2), (2, 2), (3, 1), (4, 1), (5, 1), (6, 0), (7, 0), (8, 0)]
    assert len(splits.train) and len(splits.validation)
    assert f"{len(splits.train)} training and {len(splits.validation)} validation images of 3" in splits.report[0]


def test_the_held_out_share_does_not_depend_on_the_place(tmp_path):
    """Copied elsewhere, the same samples are held out and the fingerprint stays."""
    first, second = (build(folder(tmp_path / name, per_class=20)) for name in ("a", "b"))
    assert reds(first.validation) == reds(second.validation) and first.fingerprint == second.fingerprint


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_imagenets_layout(tmp_path, name):
    folder(tmp_path / "train"), folder(tmp_path / name, per_class=1, start=100)
    splits = build(tmp_path)
    assert len(splits.train) == 6 and reds(splits.validation) == [(100, 0), (101, 1)]


def test_a_folder_train_alone_is_a_split_and_beside_others_a_class(tmp_path):
    folder(tmp_path / "a" / "train", per_class=10), folder(tmp_path / "a" / "test")
    splits = build(tmp_path / "a")
    assert splits.classes == ("cat", "dog") and len(splits.train) + len(splits.validation) == 20
    assert build(folder(tmp_path / "b", ("bus", "train"))).classes == ("bus", "train")


def test_a_validation_folder_of_its_own(tmp_path):
    folder(tmp_path / "a"), folder(tmp_path / "b", per_class=2, start=50)
    splits = build(tmp_path / "a", validation=str(tmp_path / "b"))
    assert len(splits.train) == 6 and len(splits.validation) == 4
    changed = folder(tmp_path / "c", per_class=3, start=50)
    assert build(tmp_path / "a", validation=str(changed)).fingerprint != splits.fingerprint


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder(tmp_path / "data")
    assert build("~/data").classes == ("cat", "dog")


MISTAKES = {
    "missing": (lambda root: None, r"data\.source: .*data does not exist"),
    "file": (lambda root: root.write_text(""), r"data\.source: .*data is a file"),
    "no classes": (lambda root: root.mkdir(), r"holds no class folders"),
    "loose images": (lambda root: draw(root / "1.png", 1), r"holds 1 images but no class folders"),
    "no images": (lambda root: [(root / name).mkdir(parents=True) for name in "ab"], r"holds no image in its class"),
    "one class": (lambda root: folder(root, ("cat",)), r"a single class folder, cat; there must be at least two"),
    "empty class": (
        lambda root: (folder(root), (root / "eel").mkdir(), (root / "emu").mkdir()),
        r"no image in the class folders eel, emu of",
    ),
    "two validations": (
        lambda root: [folder(root / name) for name in ("train", "val", "valid")],
        r"holds both val/ and valid/",
    ),
    "other classes": (
        lambda root: (folder(root / "train"), folder(root / "val", ("cat", "eel"))),
        r"data\.source: the validation folder .*val has other classes.*only there: eel; missing there: dog",
    ),
    "unsorted validation": (
        lambda root: (folder(root / "train"), draw(root / "val" / "1.png", 1)),
        r"val holds 1 images but no class folders.*ImageNet",
    ),
    "incomplete CIFAR": (
        lambda root: (root / "cifar-10-batches-py").mkdir(parents=True),
        r"CIFAR10 in .* is incomplete or damaged; `torchvision\.datasets\.CIFAR10\(.*download=True\)`",
    ),
    "incomplete MNIST": (
        lambda root: (root / "MNIST" / "raw").mkdir(parents=True),
        r"MNIST in .* is incomplete or damaged; `torchvision\.datasets\.MNIST\(.*download=True\)`",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_name_the_key_and_the_way_out(tmp_path, kind):
    make, message = MISTAKES[kind]
    make(tmp_path / "data")
    with pytest.raises(ConfigError, match=message) as caught:
        build(tmp_path / "data")
    assert str(caught.value).startswith("data.source: ") and "\n" not in str(caught.value)


def test_a_format_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.source: .* holds no cifar-100-python/, which cifar100 needs"):
        build(folder(tmp_path), format="cifar100")


def test_too_few_outputs_are_refused(tmp_path):
    folder(tmp_path, ("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"model\.num_classes: 2 is less than the 3 classes"):
        build(tmp_path, model={"num_classes": 2})
    assert len(build(tmp_path, model={"num_classes": 5}).classes) == 3


def write_cifar(root, monkeypatch, name="cifar10"):
    """CIFAR's pickles with 2 images in each; torchvision checks digests, which are set to those of these files."""
    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    place = root / kind.base_folder
    place.mkdir(parents=True)
    key = "labels" if name == "cifar10" else "fine_labels"
    number = 0
    for listed in (kind.train_list, kind.test_list):
        sums = []
        for file, _ in listed:
            pixels = np.zeros((2, 3, 32, 32), dtype=np.uint8)
            pixels[:, 0] = np.array([number, number + 1])[:, None, None]
            content = pickle.dumps({"data": pixels.reshape(2, -1), key: [number % 10, (number + 1) % 10]})
            (place / file).write_bytes(content)
            sums.append([file, hashlib.md5(content).hexdigest()])
            number += 2
        monkeypatch.setattr(kind, "train_list" if listed is kind.train_list else "test_list", sums)
    meta = pickle.dumps({kind.meta["key"]: [f"class {i}" for i in range(10 if name == "cifar10" else 100)]})
    (place / kind.meta["filename"]).write_bytes(meta)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": hashlib.md5(meta).hexdigest()})
    return place


@pytest.mark.parametrize(("name", "train", "classes"), [("cifar10", 10, 10), ("cifar100", 2, 100)])
def test_cifar_as_torchvision_keeps_it(tmp_path, monkeypatch, name, train, classes):
    place = write_cifar(tmp_path / "data", monkeypatch, name)
    for source, layout in [(tmp_path / "data", "auto"), (place, "auto"), (tmp_path / "data", name)]:
        splits = build(source, format=layout)
        assert reds(splits.train) == [(i, i % 10) for i in range(train)]
        assert reds(splits.validation) == [(train + i, (train + i) % 10) for i in range(2)]
        assert len(splits.classes) == classes and splits.classes[1] == "class 1"


def test_a_damaged_cifar_is_not_used(tmp_path, monkeypatch):
    place = write_cifar(tmp_path, monkeypatch)
    (place / "data_batch_3").write_bytes((place / "data_batch_3").read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"data\.source: CIFAR10 in .*incomplete or damaged"):
        build(tmp_path)


def write_mnist(root, kind):
    raw = root / kind / "raw"
    raw.mkdir(parents=True)
    for prefix, count, start in (("train", 5, 0), ("t10k", 2, 100)):
        values = np.arange(start, start + count, dtype=np.uint8)
        pixels = np.broadcast_to(values[:, None, None], (count, 28, 28)).tobytes()
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + (values % 10).tobytes())
    return raw


@pytest.mark.parametrize("kind", ["MNIST", "FashionMNIST"])
def test_mnist_as_torchvision_keeps_it(tmp_path, kind):
    raw = write_mnist(tmp_path, kind)
    for source, layout in [(tmp_path, "auto"), (raw, "auto"), (raw.parent, "auto"), (tmp_path, kind.lower())]:
        splits = build(source, format=layout)
        assert reds(splits.train) == [(i, i) for i in range(5)]
        assert reds(splits.validation) == [(100, 0), (101, 1)] and len(splits.classes) == 10
    item = splits.validation[1]["images"]
    assert item.shape == (3, 8, 8) and item[0].equal(item[1]) and item[0].equal(item[2])


def test_a_cut_mnist_is_not_used(tmp_path):
    raw = write_mnist(tmp_path, "MNIST")
    path = raw / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="MNIST in .* is incomplete or damaged"):
        build(tmp_path)
    labels = raw / "t10k-labels-idx1-ubyte"
    write = struct.pack(">II", 2049, 1) + b"\0"
    labels.write_bytes(write), path.write_bytes(struct.pack(">IIII", 2051, 5, 28, 28) + bytes(5 * 28 * 28))
    with pytest.raises(ConfigError, match="has 2 images and 1 labels"):
        build(tmp_path)


def test_several_datasets_in_one_folder_need_a_format(tmp_path):
    write_mnist(tmp_path, "MNIST"), write_mnist(tmp_path, "FashionMNIST")
    with pytest.raises(ConfigError, match="holds MNIST and FashionMNIST.*data.format: mnist or fashionmnist"):
        build(tmp_path)
    assert "FashionMNIST" in build(tmp_path, format="fashionmnist").report[0]


def test_the_digits_are_split_by_content():
    splits = build("digits")
    images, labels = load_digits()
    assert splits.classes == tuple("0123456789")
    assert len(splits.train) + len(splits.validation) == 1797
    # 10 % within 5 standard deviations of 12.7, and no image on both sides
    assert abs(len(splits.validation) - 180) < 64
    sides = [
        {one["images"].numpy().tobytes() for one in map(s.__getitem__, range(len(s)))}
        for s in (splits.train, splits.validation)
    ]
    assert not sides[0] & sides[1]
    first = splits.train[0]
    original = images[[i for i in range(1797) if labels[i] == first["labels"]]] / np.float32(255)
    assert min(np.abs(one - first["images"].numpy()).max() for one in original) <= 2**-23


def test_synthetic_images_cost_next_to_nothing():
    splits = build("synthetic", samples=100, classes=7, image_size=32, eval_size=40)
    assert (len(splits.train), len(splits.validation), len(splits.classes)) == (90, 10, 7)
    again = build("synthetic", samples=100, classes=7, image_size=32, eval_size=40)
    item = splits.train[5]
    assert item["images"].shape == (3, 32, 32) and item["images"].dtype == torch.float32
    assert item["images"].equal(again.train[5]["images"]) and not item["images"].equal(splits.train[6]["images"])
    assert {splits.train[i]["labels"] for i in range(90)} == set(range(7))
    assert splits.validation[0]["images"].shape == (3, 40, 40)
    assert 0.9 < float(item["images"].std()) < 1.1  # 3072 values: 8 standard deviations
    # no sample of its own memory: the view says so
    assert item["images"].untyped_storage().data_ptr() == splits.train[6]["images"].untyped_storage().data_ptr()
    assert len(build("synthetic", samples=1).train) == 1 and build("synthetic", samples=1).validation is None
    assert len(build("synthetic").classes) == 1000


@pytest.mark.parametrize("key", ["image_size", "validation_fraction", "mean", "augment", "eval_size"])
def test_the_fingerprint_follows_what_changes_samples(key):
    changed = {
        "image_size": 9,
        "validation_fraction": 0.2,
        "mean": [0.5] * 3,
        "augment": {"crop": "center"},
        "eval_size": 9,
    }
    assert build("digits").fingerprint != build("digits", **{key: changed[key]}).fingerprint


def test_the_fingerprint_ignores_how_samples_are_loaded(tmp_path):
    folder(tmp_path / "a")
    expected = build(tmp_path / "a").fingerprint
    assert build(tmp_path / "a", workers=3, on_bad_image="skip", max_bad_images=7).fingerprint == expected
    os.rename(tmp_path / "a" / "cat" / "0.png", tmp_path / "a" / "cat" / "9.png")
    assert build(tmp_path / "a").fingerprint != expected


AUGMENTED = {
    "image_size": 16,
    "augment": {"policy": "randaugment", "color_jitter": 0.3, "random_erasing": 0.5, "mixup": 0.4, "cutmix": 1.0},
}


@pytest.mark.timeout(120)
def test_micro_batches_do_not_depend_on_processes_or_history(tmp_path):
    """The same images and soft labels with 0 and 2 processes, and from the middle."""
    splits = build(folder(tmp_path, per_class=8), **AUGMENTED)
    order = SampleOrder(len(splits.train), 4, 5)
    whole = list(TrainStream(splits.train, order, batch_of(micro_batch=4), 0, updates=8))
    for consumed, workers in [(0, 2), (12, 0), (12, 2)]:
        part = list(
            TrainStream(splits.train, order, batch_of(micro_batch=4), 0, consumed, workers, updates=8 - consumed // 4)
        )
        for expected, found in zip(whole[consumed // 4 :], part, strict=True):
            assert expected.keys() == found.keys() == {"images", "labels", "targets", "sample_id"}
            assert all(expected[key].equal(found[key]) for key in expected)
    micro = whole[0]
    assert micro["images"].shape == (4, 3, 16, 16) and micro["images"].dtype == torch.float32
    assert micro["labels"].dtype == torch.int64 and micro["targets"].shape == (4, 2)
    torch.testing.assert_close(micro["targets"].sum(1), torch.ones(4), rtol=0, atol=2.0**-22)


def test_mixing_does_not_depend_on_the_rank():
    """A micro-batch is mixed alike, whichever rank it falls to: 2 ranks x 4 against 1 rank with accumulation."""
    splits = build("synthetic", samples=100, image_size=8, augment={"mixup": 1.0, "cutmix": 1.0})
    order = SampleOrder(len(splits.train), 8, 0)
    one = list(TrainStream(splits.train, order, batch_of(1, 4, 2), 0, updates=3))
    two = [list(TrainStream(splits.train, order, batch_of(2, 4), rank, updates=3)) for rank in range(2)]
    for index, micro in enumerate(one):
        other = two[index % 2][index // 2]
        assert micro["images"].equal(other["images"]) and micro["targets"].equal(other["targets"])


def test_evaluation_of_five_images_on_any_number_of_ranks(tmp_path):
    """Each exactly once, the same number of micro-batches on every rank, no mixing; padding is marked."""
    splits = build(folder(tmp_path / "a"), validation=str(folder(tmp_path / "b", ("cat", "dog"), 3)), **AUGMENTED)
    os.unlink(tmp_path / "b" / "dog" / "2.png")
    splits = build(tmp_path / "a", validation=str(tmp_path / "b"), **AUGMENTED)
    alone = list(evaluation_batches(splits.validation, 2, 1, 0))
    by_id = {int(i): image for b in alone for i, image in zip(b["sample_id"], b["images"], strict=True) if i >= 0}
    for ranks in (1, 2, 3):
        per_rank = [list(evaluation_batches(splits.validation, 2, ranks, rank)) for rank in range(ranks)]
        assert {len(batches) for batches in per_rank} == {-(-5 // (2 * ranks))}
        seen = []
        for batch in itertools.chain(*per_rank):
            assert batch.keys() == {"images", "labels", "sample_id", "valid"} and batch["images"].shape == (
                2,
                3,
                16,
                16,
            )
            assert (batch["labels"] == -100).equal(~batch["valid"]) and batch["labels"].dtype == torch.int64
            for i, valid, image in zip(batch["sample_id"].tolist(), batch["valid"], batch["images"], strict=True):
                assert image.equal(by_id[max(i, 0)])
                seen += [i] if valid else []
        assert sorted(seen) == [0, 1, 2, 3, 4]


def test_datasets_are_cheap_to_send():
    """What a loader process gets of a folder does not grow by objects: names are packed."""
    from largetrain.data.classification import FileImages

    names = [f"n{i % 1000:08d}/image_{i:07d}.JPEG" for i in range(20000)]
    images = FileImages("/data", names)
    assert len(pickle.dumps(images)) < 20000 * (len(names[0]) + 8) + 1000
    assert [images.name(i) for i in (0, 19999)] == [names[0], names[-1]] and images.take(np.array([7])).keys() == [
        names[7]
    ]
    strange = FileImages("/data", ["a\udcff.png", "é.png"])
    assert strange.keys() == ["a\udcff.png", "é.png"]
