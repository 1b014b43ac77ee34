"""Damage image files in many ways and read them: `python -m tests.fuzz.images --count 2000 --seed 0`.

Every outcome must be an image or a BadImage, in bounded time and memory, with nothing on the terminal.
"""

import argparse
import contextlib
import io
import os
import resource
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from largetrain.data.images import BadImage, read_image
from largetrain.data.masks import read_mask

MAX_SECONDS = 5.0
MAX_GROWTH_BYTES = 2 << 30
"""Of the peak memory: PIL's largest image, 179 million pixels, takes 716 MB as RGB, and as much again when turned."""

Damage = Callable[[bytes, np.random.RandomState], bytes]


def seeds() -> dict[str, bytes]:
    """Return valid files of all formats and of many modes, by name."""
    pixels = np.random.RandomState(0).randint(0, 256, (24, 20, 3), dtype=np.uint8)
    pixels[4:20, 4:16] = 90  # flat parts make longer runs in compressed data
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "a description"
    made = {
        "rgb.png": (image, {}),
        "palette.png": (image.quantize(16), {"transparency": b"\0\x80"}),
        "wide.png": (Image.fromarray(np.arange(480, dtype=np.uint16).reshape(24, 20) * 99), {}),
        "alpha.png": (image.convert("RGBA"), {"exif": exif}),
        "animated.png": (image, {"save_all": True, "append_images": [image.rotate(90)]}),
        "rgb.jpg": (image, {"exif": exif}),
        "progressive.jpg": (image, {"progressive": True, "comment": "hello"}),
        "cmyk.jpg": (image.convert("CMYK"), {}),
        "grey.jpg": (image.convert("L"), {}),
        "rgb.bmp": (image, {}),
        "palette.bmp": (image.quantize(16), {}),
        "bits.bmp": (image.convert("1"), {}),
        "still.gif": (image, {}),
        "animated.gif": (image, {"save_all": True, "append_images": [image.rotate(90)]}),
        "lossy.webp": (image, {"exif": exif}),
        "lossless.webp": (image, {"lossless": True}),
        "animated.webp": (image, {"save_all": True, "append_images": [image.rotate(90)]}),
        "raw.tif": (image, {}),
        "lzw.tif": (image, {"compression": "tiff_lzw"}),
        "jpeg.tif": (image, {"compression": "jpeg"}),
        "deflate.tif": (image, {"compression": "tiff_adobe_deflate"}),
        "fax.tif": (image.convert("1"), {"compression": "group4"}),
        "pages.tif": (image, {"save_all": True, "append_images": [image.rotate(90)]}),
        "rgb.ppm": (image, {}),
        "grey.pgm": (image.convert("L"), {}),
    }
    files = {}
    for name, (picture, options) in made.items():
        buffer = io.BytesIO()
        kind = {"jpg": "JPEG", "tif": "TIFF", "pgm": "PPM"}.get(name[-3:], Path(name).suffix[1:].upper())
        picture.save(buffer, kind, **options)
        files[name] = buffer.getvalue()
    files["text.ppm"] = b"P3\n# a comment\n2 2\n255\n" + b"9 8 7 " * 4
    return files


def truncated(data: bytes, random: np.random.RandomState) -> bytes:
    return data[: random.randint(0, len(data))]


def flipped(data: bytes, random: np.random.RandomState) -> bytes:
    changed = bytearray(data)
    for _ in range(1 << random.randint(0, 7)):
        changed[random.randint(len(changed))] = random.randint(256)
    return bytes(changed)


def header_flipped(data: bytes, random: np.random.RandomState) -> bytes:
    """Most of what makes decoders go astray stands at the front."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 6)):
        changed[random.randint(min(64, len(changed)))] = random.choice([0, 1, 127, 128, 255, random.randint(256)])
    return bytes(changed)


def spliced(data: bytes, random: np.random.RandomState) -> bytes:
    other = list(seeds().values())[random.randint(len(seeds()))]
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def doubled(data: bytes, random: np.random.RandomState) -> bytes:
    low, high = sorted(random.randint(0, len(data) + 1, 2).tolist())
    return data[:high] + data[low:high] * random.randint(1, 20) + data[high:]


def cut_out(data: bytes, random: np.random.RandomState) -> bytes:
    low, high = sorted(random.randint(0, len(data) + 1, 2).tolist())
    return data[:low] + data[high:]


def resized(data: bytes, random: np.random.RandomState) -> bytes:
    """Write another width or height where a format keeps its own, with a fitting checksum for PNG."""
    size = int(random.choice([0, 1, 7, 13000, 30000, 65535, 2**31 - 1, 2**32 - 1]))
    changed = bytearray(data)
    if data[:4] == b"\x89PNG":
        place = random.choice([16, 20])
        changed[place : place + 4] = struct.pack(">I", size)
        changed[29:33] = struct.pack(">I", zlib.crc32(bytes(changed[12:29])))
        return bytes(changed)
    # the sizes of the seeds, 20 x 24, in both byte orders: JPEG, BMP, GIF and TIFF keep them so
    for old in (b"\x00\x18\x00\x14", b"\x14\x00\x18\x00", b"\x14\x00\x00\x00", b"\x18\x00\x00\x00", b"20 24"):
        place = data.find(old)
        if place >= 0 and random.randint(2):
            new = struct.pack("<Q", size)[: len(old)] if old != b"20 24" else b"%d %d" % (size, 24)
            return data[:place] + new + data[place + len(old) :]
    return bytes(changed)


def tag_changed(data: bytes, random: np.random.RandomState) -> bytes:
    """Overwrite one aligned 12-byte entry: a tag of TIFF or EXIF."""
    changed = bytearray(data)
    place = 2 * random.randint(max(1, len(data) // 2 - 6))
    for offset in random.choice(12, random.randint(1, 4)):
        if place + offset < len(changed):
            changed[place + offset] = random.choice([0, 1, 2, 4, 16, 255])
    return bytes(changed)


def emptied(data: bytes, random: np.random.RandomState) -> bytes:
    return data[: random.randint(0, 2)]


def text(data: bytes, random: np.random.RandomState) -> bytes:
    lines = [
        b"<html>404</html>",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"P6 ",
        b"P5\n-1 5\n255\n",
        b"GIF89a",
    ]
    return lines[random.randint(len(lines))] * random.randint(1, 50)


def noise(data: bytes, random: np.random.RandomState) -> bytes:
    return data[: random.randint(4, 16)] + random.bytes(random.randint(1, 2000))


def whole(data: bytes, random: np.random.RandomState) -> bytes:
    return data


DAMAGES: tuple[Damage, ...] = (
    truncated,
    flipped,
    flipped,
    header_flipped,
    spliced,
    doubled,
    cut_out,
    resized,
    resized,
    tag_changed,
    emptied,
    text,
    noise,
    whole,
)


def attempt(number: int, seed: int, files: dict[str, bytes]) -> tuple[str, bytes]:
    """Return the name, which tells what was done, and the content of one damaged file."""
    random = np.random.RandomState([seed, number])
    name = list(files)[random.randint(len(files))]
    damage = DAMAGES[random.randint(len(DAMAGES))]
    content = damage(files[name], random)
    if random.randint(4) == 0:
        content = DAMAGES[random.randint(len(DAMAGES))](content or b"\0", random)
    stem, suffix = name.split(".")
    return f"{number}-{stem}-{damage.__name__}.{suffix}", content


def run(count: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """Read `count` damaged files, each as an image and as a mask.

    Returns:
        How often each reader gave a result and how often a BadImage, and a line for each outcome that must not be.
    """
    files = seeds()
    outcomes: Counter = Counter()
    faults: list[str] = []
    for number in range(count):
        name, content = attempt(number, seed, files)
        path = folder / name
        path.write_bytes(content)
        for what, read in (("image", as_image), ("mask", as_mask)):
            started, peak = time.perf_counter(), _peak_bytes()
            try:
                with tempfile.TemporaryFile() as printed, _into(printed):
                    outcomes[what if _readable(read, path) else f"no {what}"] += 1
                    sys.stderr.flush()
                    assert not printed.tell(), "something was printed"
            except Exception:  # noqa: BLE001  # whatever it is, it is the finding
                faults.append(f"{name}, {what}: {traceback.format_exc()}")
            if (taken := time.perf_counter() - started) > MAX_SECONDS:
                faults.append(f"{name}, {what}: took {taken:.1f} s")
            if (grown := _peak_bytes() - peak) > MAX_GROWTH_BYTES:
                faults.append(f"{name}, {what}: memory grew by {grown >> 20} MiB")
        path.unlink()
    return outcomes, faults


def as_image(path: Path) -> None:
    image = read_image(path)
    assert image.mode == "RGB" and min(image.size) > 0
    assert np.asarray(image).shape == (image.height, image.width, 3)


def as_mask(path: Path) -> None:
    mask = read_mask(path)
    assert mask.ndim == 2 and min(mask.shape) > 0 and np.issubdtype(mask.dtype, np.integer)


def _readable(read: Callable[[Path], None], path: Path) -> bool:
    try:
        read(path)
    except BadImage as error:
        assert error.path == str(path) and error.reason and "\n" not in str(error)
        return False
    return True


@contextlib.contextmanager
def _into(file: Any) -> Iterator[None]:
    """Let everything that is written to standard error go into a file, also by C libraries."""
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, faults = run(arguments.count, arguments.seed, Path(folder))
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{arguments.count} files, seed {arguments.seed}: {dict(outcomes)}, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
