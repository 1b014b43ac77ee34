"""Image files: reading them whatever their bytes are, listing folders, holding a share out.

What both image tasks build on; nothing here knows of labels.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from largetrain.config.document import one_line
from largetrain.errors import EXIT_MISTAKE, ConfigError, LargetrainError

IGNORED = -100
"""Label of what has none: padding in evaluation, pixels of `ignore_index`."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File names that are images, in any case; those of torchvision.datasets.ImageFolder."""
# Named, because PIL's own search would try all formats that it knows, also those that start another program (EPS).
_READERS = (JpegImageFile, PngImageFile, PpmImageFile, BmpImageFile, TiffImageFile, WebPImageFile, GifImageFile)
FORMATS = tuple(reader.format for reader in _READERS)
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MAX_REASON = 160

# without any handler, what PIL logs of a damaged file would reach the terminal
logging.getLogger("PIL").addHandler(logging.NullHandler())


class BadImage(LargetrainError):
    """One file that cannot be read as an image (or as what belongs to it, such as its mask)."""

    exit_code = EXIT_MISTAKE

    def __init__(self, path: str | os.PathLike[str], reason: str):
        self.path, self.reason = os.fspath(path), reason
        super().__init__(
            f"data: {one_line(self.path)} cannot be read ({reason}). Repair or remove the file, or let other samples "
            f"take the place of such files with data.on_bad_image: skip"
        )

    def __reduce__(self) -> tuple[type["BadImage"], tuple[str, str]]:
        return BadImage, (self.path, self.reason)


@dataclass(frozen=True)
class ImageSplits:
    """What the data of an image task are built into."""

    train: Any
    """Map-style dataset."""
    validation: Any | None
    """Map-style dataset, with the preparation of evaluation; None where there is none."""
    classes: tuple[str, ...]
    """Names, index 0 first."""
    fingerprint: str
    """sha256 of what the samples are."""
    report: tuple[str, ...]
    """Lines for a person: counts, classes, where they came from."""


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Return an image file as RGB, 8 bits per channel, upright (EXIF), of an animation the first frame.

    Transparency is dropped; 16 bits per channel are scaled to 8.

    Raises:
        BadImage: whatever keeps it from being read.
    """
    image = open_image(path)
    try:
        with _quiet():
            return _rgb(image)
    except Exception as error:  # a decoder may raise anything on damaged data
        raise BadImage(path, _reason(error)) from error


def open_image(path: str | os.PathLike[str], *, upright: bool = True) -> Image.Image:
    """Return an image file decoded in its own mode (such as "P": palette indices), its file closed.

    Args:
        upright: turn it as its EXIF entry says.

    Raises:
        BadImage: whatever keeps it from being read.
    """
    try:
        with _quiet(), open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("the file is empty")
            image: Image.Image = Image.open(file, formats=FORMATS)
            if min(image.size) < 1:
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            if isinstance(image, TiffImageFile):
                _silence_libtiff()
            image.load()
            return _upright(image) if upright else image
    except Exception as error:  # a decoder may raise anything on damaged data
        raise BadImage(path, _reason(error)) from error


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep PIL's remarks on damaged files off the terminal; a damaged file is either an error or good enough."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _silence_libtiff() -> None:
    """Switch off the handlers through which libtiff, below PIL, prints about each damaged file; once per process."""
    # where PIL holds libtiff in itself, or the system has no such list, libtiff goes on printing
    with contextlib.suppress(OSError, AttributeError):
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtiff" in line}
        for path in loaded:
            library = ctypes.CDLL(path)
            for handler in (library.TIFFSetErrorHandler, library.TIFFSetWarningHandler):
                handler.argtypes, handler.restype = [ctypes.c_void_p], ctypes.c_void_p
                handler(None)


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not a JPEG, PNG, PPM, BMP, TIFF, WebP or GIF image"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = one_line(text).strip().rstrip(".") or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  # pixels are whole; a damaged EXIF block says nothing about them
        return image
    if turn is None:
        return image
    turned = image.transpose(turn)
    turned.format = image.format
    return turned


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; store them with 8 or 16 bits")
    if image.mode.startswith("I"):  # PIL itself would cut 16 bits off at 255
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((np.clip(values, 0, 65535) >> 8).astype(np.uint8))
    return image.convert("RGB")


@dataclass(frozen=True)
class ImageFile:
    """A file found in a folder."""

    name: str
    """Path below the folder, with "/"."""
    size: int
    """Bytes."""


def list_images(folder: str | os.PathLike[str], key: str) -> list[ImageFile]:
    """Return the image files below a folder, sorted by folder and name; hidden ones are left out, links followed.

    Args:
        key: names the folder in errors, such as `data.source`.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    found: list[ImageFile] = []
    _walk(os.fspath(folder), "", key, found, frozenset())
    return found


def list_folders(folder: str | os.PathLike[str], key: str) -> list[str]:
    """Return the names of the folders directly in a folder, sorted; hidden ones are left out.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    return sorted(entry.name for entry in _entries(os.fspath(folder), key) if entry.is_dir())


def _walk(folder: str, prefix: str, key: str, found: list[ImageFile], above: frozenset[tuple[int, int]]) -> None:
    entries = sorted(_entries(folder, key), key=lambda entry: entry.name)
    state = os.stat(folder)
    here = (state.st_dev, state.st_ino)
    if here in above:
        raise ConfigError(f"{key}: {one_line(folder)} is a link to a folder that holds it; remove the link.")
    for entry in entries:
        # a pipe or device of a fitting name would hang whoever reads it
        if entry.name.lower().endswith(EXTENSIONS) and entry.is_file():
            found.append(ImageFile(prefix + entry.name, entry.stat().st_size))
    for entry in entries:
        if entry.is_dir():
            _walk(entry.path, f"{prefix}{entry.name}/", key, found, above | {here})


def _entries(folder: str, key: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError:
        raise ConfigError(f"{key}: {one_line(folder)} does not exist. Name a folder of images.") from None
    except NotADirectoryError:
        raise ConfigError(f"{key}: {one_line(folder)} is a file; name the folder that holds the images.") from None
    except OSError as error:
        raise ConfigError(f"{key}: {one_line(folder)} cannot be read ({error.strerror}).") from error


def held_out(names: Sequence[str | bytes], fraction: float) -> np.ndarray:
    """Choose the samples of the validation split: by the digest of their names, so the same always.

    Adding or removing samples moves no other one. Of two or more samples each split gets at least one; a single one
    is for training.

    Args:
        names: what identifies each sample: a relative path, or the content.
        fraction: share to hold out, in expectation.

    Returns:
        bool [len(names)], True: validation.
    """
    digests = np.array([int.from_bytes(_digest(name)[:8], "big") for name in names], dtype=np.uint64)
    chosen = digests < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if len(names) > 1 and not chosen.any():
        chosen[digests.argmin()] = True
    elif len(names) and chosen.all():
        chosen[digests.argmax()] = False
    return chosen


def fingerprint(files: Iterable[ImageFile], *facts: Any) -> str:
    """Return the sha256, in hex, of files' names and sizes in this order and of whatever else says what samples are.

    Args:
        facts: plain values with a stable repr, such as keys of the data section.
    """
    total = hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape"))
    for file in files:
        total.update(f"{file.name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _digest(name: str | bytes) -> bytes:
    return hashlib.sha256(name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")).digest()
