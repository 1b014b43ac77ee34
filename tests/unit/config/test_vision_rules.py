"""Rules of the data section of image runs."""

import subprocess
import sys

import pytest

from largetrain.config.load import load
from largetrain.config.vision_rules import data_problems, layouts_below
from largetrain.config.vision_schema import ClassificationData, SegmentationData
from largetrain.errors import ConfigError

SOUND = [
    ClassificationData(),
    ClassificationData(source="synthetic", classes=10, samples=64),
    # a whole run turned to synthetic images for a speed test
    ClassificationData(
        source="synthetic",
        format="folder",
        validation="/nowhere",
        eval_resize=232,
        on_bad_image="skip",
        augment={"policy": "trivialaugment", "random_erasing": 0.1},
    ),
    ClassificationData(augment={"crop": "pad", "crop_padding": 2}, image_size=32),
    ClassificationData(augment={"policy": "randaugment", "magnitude": 5, "crop_scale": [0.2, 0.2]}),
    ClassificationData(on_bad_image="skip", max_bad_images=3, validation_fraction=0.2),
    ClassificationData(image_size=176, eval_size=224, eval_resize=232),
    ClassificationData(target="a:B", args={"x": 1}, workers=2, on_bad_image="skip", augment={"repeats": 3}),
    SegmentationData(),
    SegmentationData(source="synthetic", samples=8, classes=3),
    SegmentationData(samples=64, augment={"scale": [1.0, 1.0]}),
]


@pytest.mark.parametrize("data", SOUND, ids=lambda data: repr(data.model_fields_set))
def test_sound_sections_pass(data):
    assert data_problems(data) == []


MISTAKES = [
    ({"source": "nowhere"}, "source", r'"nowhere" does not exist .*Name a folder, or `digits`, or `synthetic`'),
    ({"source": "digit"}, "source", "Did you mean `digits`?"),
    ({"source": ""}, "source", '"" does not exist'),
    ({"validation": "nowhere"}, "validation", '"nowhere" does not exist'),
    ({"mean": [123.7, 116.3, 103.5]}, "mean", "divide by 255"),
    ({"std": [0.2, 0.0, 0.2]}, "std", "not above 0"),
    ({"std": [58.4, 57.1, 57.4]}, "std", "divide by 255"),
    ({"max_bad_images": 3}, "max_bad_images", "unless data.on_bad_image is skip"),
    ({"classes": 10}, "classes", "is for the source `synthetic`"),
    ({"samples": 10}, "samples", "is for the source `synthetic`"),
    ({"source": "synthetic", "classes": 1}, "classes", "1 leaves nothing to tell apart"),
    ({"format": "folder"}, "format", "has no effect with the source `digits`"),
    ({"image_size": 224, "eval_resize": 200}, "eval_resize", "less than image_size=224"),
    ({"eval_size": 224, "eval_resize": 200}, "eval_resize", "less than eval_size=224"),
    ({"augment": {"crop_padding": 4}}, "augment.crop_padding", "crop=resized; it is for `pad`"),
    ({"augment": {"crop": "pad", "crop_scale": [0.1, 1.0]}}, "augment.crop_scale", "it is for `resized`"),
    ({"augment": {"crop": "center", "crop_ratio": [1.0, 1.0]}}, "augment.crop_ratio", "it is for `resized`"),
    ({"augment": {"crop_scale": [1.0, 0.1]}}, "augment.crop_scale", r"write \[0\.1, 1\.0\]"),
    ({"augment": {"crop_ratio": [1.3, 0.7]}}, "augment.crop_ratio", r"write \[0\.7, 1\.3\]"),
    ({"augment": {"crop_scale": [0.0, 0.0]}}, "augment.crop_scale", "must be above 0"),
    ({"image_size": 8, "augment": {"crop": "pad", "crop_padding": 8}}, "augment.crop_padding", "image_size=8"),
    ({"augment": {"magnitude": 9}}, "augment.magnitude", "policy=none; it is for `randaugment`"),
    ({"target": "a:B", "source": "digits"}, "source", "has no effect with data.target='a:B'"),
    ({"target": "a:B", "augment": {"repeats": 2, "mixup": 0.2}}, "augment.mixup", "has no effect with data.target"),
]


@pytest.mark.parametrize(("keys", "path", "text"), MISTAKES)
def test_mistakes_of_classification_are_named(keys, path, text):
    found = data_problems(ClassificationData(**keys))
    assert [".".join(where) for where, _ in found] == [f"data.{path}"]
    with pytest.raises(ValueError, match=text):
        raise ValueError(found[0][1])


SEGMENTATION_MISTAKES = [
    ({"validation": "."}, "validation", "makes its own validation scenes"),
    ({"source": "digit_scene"}, "source", "Did you mean `digit_scenes`?"),
    ({"format": "voc"}, "format", "no effect with the source `digit_scenes`"),
    ({"source": "synthetic", "classes": ["a", "b", "a"]}, "classes", '"a" stands there twice'),
    ({"source": "synthetic", "classes": ["a"]}, "classes", "1 leaves nothing"),
    ({"source": "synthetic", "classes": 300}, "classes", "at most 256"),
    ({"augment": {"scale": [2.0, 0.5]}}, "augment.scale", r"write \[0\.5, 2\.0\]"),
]


@pytest.mark.parametrize(("keys", "path", "text"), SEGMENTATION_MISTAKES)
def test_mistakes_of_segmentation_are_named(keys, path, text):
    found = data_problems(SegmentationData(**keys))
    assert [".".join(where) for where, _ in found] == [f"data.{path}"]
    with pytest.raises(ValueError, match=text):
        raise ValueError(found[0][1])


def paths(data):
    return [".".join(where) for where, _ in data_problems(data)]


def test_several_mistakes_are_reported_together():
    data = ClassificationData(source="nowhere", mean=[2.0] * 3, augment={"magnitude": 3, "crop_ratio": [2.0, 1.0]})
    assert paths(data) == ["data.source", "data.mean", "data.augment.magnitude", "data.augment.crop_ratio"]


def test_files_are_no_sources_and_home_is_expanded(tmp_path, monkeypatch):
    (tmp_path / "file.txt").write_text("")
    found = data_problems(ClassificationData(source=str(tmp_path / "file.txt")))
    assert len(found) == 1 and "is a file; name the folder" in found[0][1]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    assert data_problems(ClassificationData(source="~/data", validation="~/data")) == []


def test_a_fraction_beside_another_validation_split_has_no_effect(tmp_path):
    (tmp_path / "a").mkdir()
    fraction = {"validation_fraction": 0.2}
    where = ["data.validation_fraction"]
    assert paths(ClassificationData(source=str(tmp_path), validation=str(tmp_path / "a"), **fraction)) == where
    assert paths(ClassificationData(source=str(tmp_path), **fraction)) == []
    assert paths(ClassificationData(source=str(tmp_path), format="cifar10", **fraction)) == where
    assert paths(SegmentationData(source=str(tmp_path), format="voc", **fraction)) == where
    (tmp_path / "train").mkdir(), (tmp_path / "valid").mkdir()
    assert paths(ClassificationData(source=str(tmp_path), **fraction)) == where
    (tmp_path / "a" / "MNIST" / "raw").mkdir(parents=True)
    assert paths(ClassificationData(source=str(tmp_path / "a"), **fraction)) == where


def test_pairs_need_classes(tmp_path):
    assert paths(SegmentationData(source=str(tmp_path), format="pairs")) == ["data.classes"]
    assert paths(SegmentationData(source=str(tmp_path), format="pairs", classes=3)) == []
    assert paths(SegmentationData(source=str(tmp_path), format="pairs", classes=3, samples=5)) == ["data.samples"]


def test_layouts_are_found_from_above_and_from_within(tmp_path):
    for below in ("cifar-10-batches-py", "MNIST/raw"):
        (tmp_path / below).mkdir(parents=True)
    root = str(tmp_path)
    assert layouts_below(root) == {"cifar10": root, "mnist": root}
    assert layouts_below(str(tmp_path / "cifar-10-batches-py")) == {"cifar10": root}
    assert layouts_below(str(tmp_path / "MNIST")) == layouts_below(str(tmp_path / "MNIST" / "raw")) == {"mnist": root}
    assert layouts_below(str(tmp_path / "none")) == {}


def test_the_rules_load_neither_torch_nor_pil():
    code = (
        "import sys, largetrain.config.vision_rules; sys.exit(any(m in sys.modules for m in ('torch', 'PIL', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_an_image_run_needs_an_optimizer_of_its_own(tmp_path):
    engine, run = tmp_path / "engine.json", tmp_path / "run.yaml"
    engine.write_text('{"train_micro_batch_size_per_gpu": 2}')
    run.write_text("task: classification\ndata: {source: synthetic}\n")
    with pytest.raises(ConfigError, match=r"engine.json: optimizer: is missing; write one with its type and params.lr"):
        load(str(engine), str(run))
    run.write_text(run.read_text() + "engine: {optimizer: {type: SGD, params: {lr: 0.1}}}\n")
    assert load(str(engine), str(run)).engine["optimizer"]["type"] == "SGD"


@pytest.mark.parametrize("key", ["mixup", "cutmix"])
def test_an_alpha_that_mixes_nothing_is_refused(key):
    (path, text), *rest = data_problems(ClassificationData(source="digits", augment={key: 1e-300}))
    assert path == ("data", "augment", key) and not rest
    assert text == "1e-300 mixes nothing; write 0, or at least 0.01."
