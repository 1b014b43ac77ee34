"""Folders of images with masks: which file belongs to which, in the layouts of VOC, Cityscapes, and plain pairs."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from largetrain.config.document import one_line
from largetrain.config.vision_rules import VALIDATION_NAMES
from largetrain.data.images import IGNORED, ImageFile, list_folders, list_images
from largetrain.errors import ConfigError

VOC_CLASSES = tuple(
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person "
    "pottedplant sheep sofa train tvmonitor".split()
)
# The 19 classes that are trained, each with its value in *_labelIds.png.
CITYSCAPES_IDS = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
CITYSCAPES_CLASSES = tuple(CITYSCAPES_IDS)
# values 0..33 and, for the licence plate (-1), 255
CITYSCAPES_MAPPING = dict.fromkeys((*range(34), 255), IGNORED) | {
    value: index for index, value in enumerate(CITYSCAPES_IDS.values())
}
_VOC_LIST = "ImageSets/Segmentation"
_SHOWN = 3


@dataclass(frozen=True)
class Pair:
    """An image and its mask, as full paths; `name` identifies the sample on any machine."""

    name: str
    image: str
    mask: str


@dataclass(frozen=True)
class Listing:
    """What a folder holds. `validation` is None where it has no such split."""

    format: str
    train: list[Pair]
    validation: list[Pair] | None
    classes: tuple[str, ...] | None = None
    mapping: dict[int, int] | None = field(default=None)
    """Values of the masks -> classes; None: the values are the classes."""


def list_folder(folder: str, format: str, key: str) -> Listing:
    """Return the pairs of a folder.

    Args:
        format: `voc`, `cityscapes`, `pairs`, or `auto`: by what is there.
        key: names the folder in errors, such as `data.source`.

    Raises:
        ConfigError: the folder has not the layout, or files lack their partner.
    """
    list_folders(folder, key)  # says what is wrong with the folder itself
    root = Path(folder)
    if format == "auto":
        format = _recognised(root, key)
    listing = {"voc": _voc, "cityscapes": _cityscapes, "pairs": _pairs}[format](root, key)
    if not listing.train and not listing.validation:
        raise ConfigError(f"{key}: {one_line(folder)} holds no image in the layout {format}.")
    return listing


def files_of(pairs: Iterable[Pair]) -> list[ImageFile]:
    """Both files of each pair with their sizes, sorted by name, for the fingerprint."""
    files = []
    for pair in sorted(pairs, key=lambda pair: pair.name):
        files.append(ImageFile(pair.name, os.path.getsize(pair.image)))
        files.append(ImageFile(f"{pair.name} mask", os.path.getsize(pair.mask)))
    return files


def _recognised(root: Path, key: str) -> str:
    if (root / "leftImg8bit").is_dir():
        return "cityscapes"
    if _voc_root(root) is not None:
        return "voc"
    if any((root / split / "images").is_dir() for split in ("", "train", *VALIDATION_NAMES)):
        return "pairs"
    raise ConfigError(
        f"{key}: {one_line(str(root))} is in no layout that is known. Expected one of JPEGImages/, SegmentationClass/ "
        f"and {_VOC_LIST}/ (voc); leftImg8bit/ and gtFine/ (cityscapes); images/ and masks/, below train/ and val/ if "
        f"there is a split (pairs)."
    )


def _voc_root(root: Path) -> Path | None:
    inner = [folder / "VOC2012" for folder in (root, root / "VOCdevkit")]
    inner += sorted([*root.glob("VOC2*"), *root.glob("VOCdevkit/VOC2*")], reverse=True)
    return next((folder for folder in (root, *inner) if (folder / _VOC_LIST).is_dir()), None)


def _voc(root: Path, key: str) -> Listing:
    found = _voc_root(root)
    if found is None:
        raise ConfigError(f"{key}: {one_line(str(root))} holds no {_VOC_LIST}/, also not below VOCdevkit/VOC2012.")
    splits = {}
    for split in ("train", "val"):
        names = _voc_names(found / _VOC_LIST / f"{split}.txt")
        if names is not None:
            splits[split] = [
                Pair(name, f"{found}/JPEGImages/{name}.jpg", f"{found}/SegmentationClass/{name}.png") for name in names
            ]
    if "train" not in splits and "val" not in splits:
        raise ConfigError(f"{key}: {one_line(str(found / _VOC_LIST))} holds neither train.txt nor val.txt.")
    _check_there([path for pairs in splits.values() for pair in pairs for path in (pair.image, pair.mask)], key)
    return Listing("voc", splits.get("train", []), splits.get("val"), VOC_CLASSES)


def _voc_names(path: Path) -> list[str] | None:
    try:
        return sorted(set(path.read_text(encoding="utf-8").split()))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{one_line(str(path))} cannot be read ({error}). Give one image name per line.") from None


def _cityscapes(root: Path, key: str) -> Listing:
    images_tail, found = "_leftImg8bit.png", {}
    for split in ("train", "val"):
        folder = root / "leftImg8bit" / split
        if folder.is_dir():
            found[split] = [
                file.name.removesuffix(images_tail)
                for file in list_images(folder, key)
                if file.name.endswith(images_tail)
            ]
    names = [(split, name) for split, stems in found.items() for name in stems]
    # made by the data set's own script; where they are, they are what its users mean
    tail = "_gtFine_labelTrainIds.png"
    trained = bool(names) and all((root / "gtFine" / split / (name + tail)).is_file() for split, name in names)
    tail = tail if trained else "_gtFine_labelIds.png"
    splits: dict[str, list[Pair]] = {split: [] for split in found}
    for split, name in names:
        image, mask = f"leftImg8bit/{split}/{name}{images_tail}", f"gtFine/{split}/{name}{tail}"
        splits[split].append(Pair(f"{split}/{name}", f"{root}/{image}", f"{root}/{mask}"))
    _check_there([pair.mask for pairs in splits.values() for pair in pairs], key)
    mapping = None if trained else CITYSCAPES_MAPPING
    return Listing("cityscapes", splits.get("train", []), splits.get("val"), CITYSCAPES_CLASSES, mapping)


def _pairs(root: Path, key: str) -> Listing:
    if (root / "images").is_dir():
        return Listing("pairs", _matched(root, "", key), None)
    splits = {
        split: _matched(root, f"{split}/", key) for split in ("train", *VALIDATION_NAMES) if (root / split).is_dir()
    }
    if not splits:
        raise ConfigError(
            f"{key}: {one_line(str(root))} holds neither images/ and masks/ nor train/ and val/ with these."
        )
    return Listing("pairs", splits.pop("train", []), next(iter(splits.values()), None))


def _matched(root: Path, prefix: str, key: str) -> list[Pair]:
    images, masks = (_by_stem(root / prefix / folder, key) for folder in ("images", "masks"))
    for have, other, what in ((images, masks, "mask"), (masks, images, "image")):
        alone = sorted(have[stem] for stem in have.keys() - other.keys())
        if alone:
            raise ConfigError(
                f"{key}: {len(alone)} files have no {what} of the same name: {_some(alone)}. Add what is missing, or "
                f"move them away."
            )
    return [Pair(prefix + stem, images[stem], masks[stem]) for stem in sorted(images)]


def _by_stem(folder: Path, key: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in list_images(folder, key):
        stem = str(PurePosixPath(file.name).with_suffix(""))
        path = f"{folder}/{file.name}"
        if stem in found:
            raise ConfigError(
                f"{key}: {one_line(found[stem])} and {one_line(path)} have the same name; keep one of them."
            )
        found[stem] = path
    return found


def _check_there(paths: Sequence[str], key: str) -> None:
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise ConfigError(f"{key}: {len(missing)} files are missing: {_some(missing)}.")


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(one_line(path) for path in paths[:_SHOWN]) + more
