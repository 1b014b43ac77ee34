"""What the data section of image runs must make sense of: sources that exist, ranges that hold, keys that do something.

Imports neither torch nor torchvision; opens no file.
"""

import os
from collections.abc import Iterator

from largetrain.config.document import nearest, shown
from largetrain.config.vision_schema import AugmentConfig, ClassificationData, SegmentationData

Problem = tuple[tuple[str, ...], str]
VisionData = ClassificationData | SegmentationData

USED_WITH_TARGET = {"target", "args", "workers", "on_bad_image", "max_bad_images"}
BUILT_IN = {ClassificationData: ("digits", "synthetic"), SegmentationData: ("digit_scenes", "synthetic")}
# by which folder each is known, as torchvision's datasets lay them out below their root
LAYOUTS = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "mnist": os.path.join("MNIST", "raw"),
    "fashionmnist": os.path.join("FashionMNIST", "raw"),
}
SMALLEST_ALPHA = 0.01  # below, the Beta distribution of mixing gives 0 or 1 only, and then not even that
VALIDATION_NAMES = ("val", "valid", "validation")


def data_problems(data: VisionData) -> list[Problem]:
    """Return the key path, under the run, and the text of each mistake in an image run's data section.

    Mistakes are keys given that have no effect beside the others, ranges that contradict, and sources that do not
    exist. With `data.target` only the keys that it uses are looked at. The source `synthetic` leaves most keys idle and
    none is reported for it: it is put over a whole run (`--set data.source=synthetic`) to measure speed without files.
    """
    if data.target is not None:
        return list(_beside_target(data))
    if data.source == "synthetic":
        return [*_numbers(data), *_class_count(data)]
    problems: list[Problem] = [*_sources(data), *_numbers(data), *_held_out(data)]
    if "max_bad_images" in data.model_fields_set and data.on_bad_image == "error":
        problems.append((("data", "max_bad_images"), "has no effect unless data.on_bad_image is skip; remove it."))
    if isinstance(data, ClassificationData):
        problems += [*_classification(data), *_augment(data)]
    else:
        problems += _segmentation(data)
    return problems


def layouts_below(source: str) -> dict[str, str]:
    """Return the formats found in a folder, as torchvision lays them out, and the root of each.

    Args:
        source: the root, or a dataset's own folder below it.
    """
    folder = os.path.abspath(os.path.expanduser(source))
    found = {name: folder for name, below in LAYOUTS.items() if os.path.isdir(os.path.join(folder, below))}
    for name, below in LAYOUTS.items():
        parts = below.split(os.sep)
        for length in range(1, len(parts) + 1):
            root = os.path.normpath(os.path.join(folder, *[os.pardir] * length))
            if folder.split(os.sep)[-length:] == parts[:length] and os.path.isdir(os.path.join(root, below)):
                found.setdefault(name, root)
    return found


def _beside_target(data: VisionData) -> Iterator[Problem]:
    for key in sorted(data.model_fields_set - USED_WITH_TARGET):
        if key == "augment":
            # repeated augmentation is a matter of the order of samples, whatever makes them
            for below in sorted(data.augment.model_fields_set - {"repeats"}):
                yield ("data", "augment", below), _no_effect_beside_target(data)
        else:
            yield ("data", key), _no_effect_beside_target(data)


def _no_effect_beside_target(data: VisionData) -> str:
    return (
        f"is for the image sources and has no effect with data.target={data.target!r}; remove it, or hand it to your "
        f"class under data.args."
    )


def _sources(data: VisionData) -> Iterator[Problem]:
    built_in = BUILT_IN[type(data)]
    if data.source not in built_in:
        yield from _folder("source", data.source, built_in)
    if data.validation is not None:
        yield from _folder("validation", data.validation, ())


def _folder(key: str, named: str, built_in: tuple[str, ...]) -> Iterator[Problem]:
    folder = os.path.expanduser(named)
    others = "".join(f", or `{name}`" for name in built_in)
    if "\0" in named or not os.path.exists(folder):
        meant = nearest(named, built_in)
        advice = f"Did you mean `{meant}`?" if meant else f"Name a folder{others}."
        yield ("data", key), f"{shown(named)} does not exist (looked from {os.getcwd()}). {advice}"
    elif not os.path.isdir(folder):
        yield ("data", key), f"{shown(named)} is a file; name the folder that holds the images{others}."


def _numbers(data: VisionData) -> Iterator[Problem]:
    if not all(0.0 <= value <= 1.0 for value in data.mean):
        yield ("data", "mean"), f"{data.mean} is not in 0..1, the range of the channels; divide by 255."
    if not all(0.0 < value <= 1.0 for value in data.std):
        yield ("data", "std"), f"{data.std} is not above 0 and at most 1; channels are in 0..1: divide by 255."


def _held_out(data: VisionData) -> Iterator[Problem]:
    if "validation_fraction" not in data.model_fields_set:
        return
    where = ("data", "validation_fraction")
    if data.validation is not None:
        yield where, "has no effect beside data.validation, which names the held-out images; remove one of them."
        return
    own = _own_validation(data)
    if own:
        yield where, f"has no effect: {own} has its own validation split, which is used; remove it."


def _own_validation(data: VisionData) -> str | None:
    """What has a validation split of its own: the format, or the folder in the source; None when nothing has."""
    source, layout = data.source, data.format
    if source in BUILT_IN[type(data)]:
        return None
    if layout in (*LAYOUTS, "voc", "cityscapes"):
        return f"data.format={layout}"
    if layout == "auto" and isinstance(data, ClassificationData) and (found := layouts_below(source)):
        return f"{shown(source)} ({next(iter(found))})"
    folder = os.path.expanduser(source)
    for name in VALIDATION_NAMES:
        if os.path.isdir(os.path.join(folder, "train")) and os.path.isdir(os.path.join(folder, name)):
            return os.path.join(source, name)
    return None


def _classification(data: ClassificationData) -> Iterator[Problem]:
    given = data.model_fields_set
    for key in sorted(given & {"classes", "samples"}):
        yield ("data", key), f"is for the source `synthetic` and has no effect with {shown(data.source)}; remove it."
    if data.source == "digits" and "format" in given and data.format != "auto":
        yield ("data", "format"), "is for folders and has no effect with the source `digits`; remove it."
    size = data.eval_size or data.image_size
    if data.eval_resize is not None and data.eval_resize < size:
        name = "eval_size" if data.eval_size else "image_size"
        yield (
            ("data", "eval_resize"),
            f"{data.eval_resize} is less than {name}={size}: there would be a black margin. Give at least {size}.",
        )


def _augment(data: ClassificationData) -> Iterator[Problem]:
    augment = data.augment
    given = augment.model_fields_set
    for key, text in _augment_clashes(augment, given):
        yield ("data", "augment", key), text
    for key in ("crop_scale", "crop_ratio"):
        yield from _ascending(("data", "augment", key), getattr(augment, key))
    if augment.crop == "resized" and augment.crop_scale[1] == 0.0:
        yield ("data", "augment", "crop_scale"), "takes no part of the image; its largest share must be above 0."
    if augment.crop == "pad" and augment.crop_padding >= data.image_size:
        yield (
            ("data", "augment", "crop_padding"),
            f"{augment.crop_padding} is not less than data.image_size={data.image_size}: crops could miss the image.",
        )


def _augment_clashes(augment: AugmentConfig, given: set[str]) -> Iterator[tuple[str, str]]:
    needs: dict[str, str] = {"crop_padding": "pad", "crop_scale": "resized", "crop_ratio": "resized"}
    for key, crop in needs.items():
        if key in given and augment.crop != crop:
            yield key, f"has no effect with data.augment.crop={augment.crop}; it is for `{crop}`. Remove one of them."
    for key in ("mixup", "cutmix"):
        if 0.0 < getattr(augment, key) < SMALLEST_ALPHA:
            yield key, f"{getattr(augment, key):g} mixes nothing; write 0, or at least {SMALLEST_ALPHA}."
    if "magnitude" in given and augment.policy != "randaugment":
        yield (
            "magnitude",
            f"has no effect with data.augment.policy={augment.policy}; it is for `randaugment`. Remove one of them.",
        )


def _segmentation(data: SegmentationData) -> Iterator[Problem]:
    given = data.model_fields_set
    built_in = data.source in BUILT_IN[SegmentationData]
    if not built_in and "samples" in given:
        yield (
            ("data", "samples"),
            f"is for `digit_scenes` and `synthetic` and has no effect with {shown(data.source)}; remove it.",
        )
    if data.source == "digit_scenes" and data.validation is not None:
        yield ("data", "validation"), "is for folders: `digit_scenes` makes its own validation scenes; remove it."
    if built_in and "format" in given and data.format != "auto":
        yield ("data", "format"), f"is for folders and has no effect with the source `{data.source}`; remove it."
    if data.format == "pairs" and not built_in and data.classes is None:
        yield ("data", "classes"), "is needed with data.format=pairs: name the classes, or give their number."
    yield from _class_count(data)
    yield from _ascending(("data", "augment", "scale"), data.augment.scale)


def _ascending(path: tuple[str, ...], pair: list[float]) -> Iterator[Problem]:
    if pair[0] > pair[1]:
        yield path, f"{pair} has its largest value first; write {pair[::-1]}."


def _class_count(data: VisionData) -> Iterator[Problem]:
    where = ("data", "classes")
    if isinstance(data.classes, list):
        double = sorted({name for name in data.classes if data.classes.count(name) > 1})
        if double:
            yield where, f"{shown(double[0])} stands there twice; every class needs its own name."
    count = len(data.classes) if isinstance(data.classes, list) else data.classes
    if count is not None and count < 2:
        yield where, f"{count} leaves nothing to tell apart; give at least 2."
    if isinstance(data, SegmentationData) and count is not None and count > 256:
        yield where, f"{count} classes do not fit masks of 8 bits; at most 256 can be told apart."
