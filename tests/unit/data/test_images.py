"""Reading image files: formats, modes, damage; listing folders; holding a share out."""

import io
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from PIL import Image

from largetrain.data.images import (
    BadImage,
    ImageFile,
    fingerprint,
    held_out,
    list_folders,
    list_images,
    open_image,
    read_image,
)
from largetrain.errors import ConfigError


def picture(width=12, height=8):
    """Red grows to the right, green downwards; blue is 200."""
    pixels = np.full((height, width, 3), 200, dtype=np.uint8)
    pixels[..., 0] = np.arange(width) * 20
    pixels[..., 1] = np.arange(height)[:, None] * 30
    return pixels


def saved(path, image, **options):
    image.save(path, **options)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.PPM", "a.bmp", "a.tif", "a.tiff"])
def test_lossless_formats_come_back_to_the_value(tmp_path, name):
    image = read_image(saved(tmp_path / name, Image.fromarray(picture())))
    assert image.mode == "RGB" and np.array_equal(np.asarray(image), picture())


QUADRANTS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], dtype=np.uint8)


def quadrants():
    """16 x 16 pixels, the unit of JPEG and WebP, of red, green / blue, white; beside them a black third row."""
    return np.concatenate([QUADRANTS.repeat(16, 0).repeat(16, 1), np.zeros((16, 32, 3), np.uint8)])


def middles(image):
    return np.asarray(image)[8::16, 8::16].astype(int)


def test_lossy_formats_come_back_nearly(tmp_path):
    """One colour per block survives quality 95 within 4 of 255; a channel swap would be off by 255."""
    for name in ("a.jpg", "a.jpeg", "a.webp"):
        image = read_image(saved(tmp_path / name, Image.fromarray(quadrants()), quality=95))
        assert np.abs(middles(image)[:2] - QUADRANTS).max() <= 4, name


def test_the_content_decides_the_format_not_the_name(tmp_path):
    saved(tmp_path / "a.png", Image.fromarray(picture()))
    os.rename(tmp_path / "a.png", tmp_path / "a.jpg")
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.jpg")), picture())


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path):
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    for name in ("a.png", "a.tif"):
        image = read_image(saved(tmp_path / name, Image.fromarray(values)))
        assert np.asarray(image)[0].tolist() == [[v, v, v] for v in (0, 0, 1, 128, 255)], name


def test_modes_become_rgb(tmp_path):
    red = Image.new("RGB", (4, 3), (255, 0, 0))
    palette = red.quantize(4)
    palette.info["transparency"] = bytes([0, 128, 255, 255])  # makes PIL warn when it drops them
    for name, image in {
        "rgba.png": Image.new("RGBA", (4, 3), (255, 0, 0, 10)),
        "palette.png": palette,
        "cmyk.jpg": Image.new("CMYK", (4, 3), (0, 255, 255, 0)),
    }.items():
        found = read_image(saved(tmp_path / name, image))
        error = np.abs(np.asarray(found).astype(int) - [255, 0, 0]).max()
        assert found.mode == "RGB" and error <= (3 if name == "cmyk.jpg" else 0), name
    for name, image in {"grey.png": Image.new("L", (4, 3), 7), "bits.png": Image.new("1", (4, 3), 1)}.items():
        expected = 7 if name == "grey.png" else 255
        assert (np.asarray(read_image(saved(tmp_path / name, image))) == expected).all()


def test_a_palette_can_be_read_as_indices(tmp_path):
    mask = Image.fromarray(np.array([[0, 3], [255, 1]], dtype=np.uint8))
    mask.putpalette(list(range(256)) * 3)
    image = open_image(saved(tmp_path / "m.png", mask))
    assert image.mode == "P" and np.asarray(image).tolist() == [[0, 3], [255, 1]]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_exif_turns_the_image_upright(tmp_path, suffix):
    """Orientation 6: the first row of the file is the right side of the picture."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(tmp_path / f"a.{suffix}", Image.fromarray(quadrants()), exif=exif, quality=95)
    assert open_image(path, upright=False).size == (32, 48)
    image = read_image(path)
    assert image.size == (48, 32)
    assert np.abs(middles(image) - np.rot90(middles(quadrants()), -1)).max() <= 4


def test_a_damaged_exif_block_does_not_spoil_the_pixels(tmp_path):
    path = saved(tmp_path / "a.png", Image.fromarray(picture()), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert np.array_equal(np.asarray(read_image(path)), picture())


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (5, 4), color) for color in ("red", "lime", "blue")]
    for name in ("a.gif", "a.webp", "a.png", "a.tif"):
        options = {"lossless": True} if name == "a.webp" else {}
        path = saved(tmp_path / name, frames[0], save_all=True, append_images=frames[1:], **options)
        assert np.asarray(read_image(path))[0, 0].tolist() == [255, 0, 0], name


def png_bytes():
    buffer = io.BytesIO()
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (40, 40, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def header_with_size(width, height):
    """A PNG whose header promises other sizes than its data have."""
    import zlib

    data = bytearray(png_bytes())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


BAD = {
    "half": (png_bytes()[: len(png_bytes()) // 2], "truncated|[Tt]runcat|broken|not enough|incomplete"),
    "empty": (b"", "the file is empty"),
    "text": (b"not an image at all\n", "not a JPEG, PNG, PPM, BMP, TIFF, WebP or GIF image"),
    "bomb": (header_with_size(50000, 50000), "2500000000 pixels"),
    "no pixels": (header_with_size(0, 10), "0 x 10|not a JPEG|[Ss]ize"),
    "script": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a JPEG"),
    "floats": (b"Pf\n2 1\n-1.0\n" + np.ones(2, np.float32).tobytes(), "floating-point pixels have no fixed range"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_read_is_named(tmp_path, kind):
    content, reason = BAD[kind]
    path = tmp_path / "bad.png"
    path.write_bytes(content)
    with pytest.raises(BadImage, match=reason) as caught:
        read_image(path)
    assert caught.value.path == str(path) and str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_files_folders_and_closed_ones_are_bad_images(tmp_path):
    with pytest.raises(BadImage, match="No such file"):
        read_image(tmp_path / "none.png")
    with pytest.raises(BadImage, match="Is a directory"):
        read_image(tmp_path)
    closed = saved(tmp_path / "closed.png", Image.fromarray(picture()))
    closed.chmod(0)
    if not os.access(closed, os.R_OK):  # root reads everything
        with pytest.raises(BadImage, match="Permission denied"):
            read_image(closed)


def test_a_bad_image_travels_between_processes():
    error = pickle.loads(pickle.dumps(BadImage("/x/a.png", "cut")))
    assert (error.path, error.reason, str(error)) == ("/x/a.png", "cut", str(BadImage("/x/a.png", "cut")))


def test_files_are_closed(tmp_path):
    good, bad = saved(tmp_path / "a.gif", Image.fromarray(picture())), tmp_path / "b.png"
    bad.write_bytes(png_bytes()[:200])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        kept = [read_image(good), open_image(good)]
        with pytest.raises(BadImage):
            read_image(bad)
    assert len(os.listdir("/proc/self/fd")) == before and kept


def test_nothing_reaches_the_terminal(tmp_path):
    """A large image, a palette with transparency and a cut TIFF make PIL warn, log, or libtiff print."""
    palette = Image.new("RGB", (4, 3), (255, 0, 0)).quantize(4)
    palette.info["transparency"] = bytes([0, 128, 255, 255])
    saved(tmp_path / "palette.png", palette)
    saved(tmp_path / "a.tif", Image.fromarray(picture()), compression="tiff_lzw")
    (tmp_path / "cut.tif").write_bytes((tmp_path / "a.tif").read_bytes()[:-30])
    (tmp_path / "bad.png").write_bytes(header_with_size(10000, 10000))  # 100 million: a warning of PIL's
    code = f"""
        from largetrain.data.images import BadImage, read_image
        for name in ("palette.png", "cut.tif", "bad.png"):
            try:
                read_image({str(tmp_path)!r} + "/" + name)
            except BadImage as error:
                assert error.reason
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_folders_are_listed_like_image_folder_does(tmp_path):
    """The order of torchvision.datasets.ImageFolder, less hidden files, which it would take for images."""
    from torchvision.datasets import ImageFolder

    for name in ("b/2.png", "b/10.JPG", "b/sub/1.png", "a/x.webp", "a/z z.bmp", "a/notes.txt", "b/é.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"12345")
    expected = [os.path.relpath(path, tmp_path / "data") for path, _ in ImageFolder(tmp_path / "data").samples]
    for name in ("b/._2.png", ".thumbs/1.png", "a/.cache/1.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"12345")
    found = list_images(tmp_path / "data", "data.source")
    assert [file.name for file in found] == expected and {file.size for file in found} == {5}
    assert list_folders(tmp_path / "data", "data.source") == ["a", "b"]


def test_links_are_followed_but_not_in_circles(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "1.png").write_bytes(b"1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "broken.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(tmp_path / "data" / "pipe.png")  # reading it would wait for a writer
    assert [file.name for file in list_images(tmp_path / "data", "k")] == ["linked/1.png"]
    (tmp_path / "real" / "up").symlink_to(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"^k: .*up is a link to a folder that holds it"):
        list_images(tmp_path / "data", "k")


def test_folders_that_cannot_be_listed_are_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.source: .*none does not exist"):
        list_images(tmp_path / "none", "data.source")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^data\.validation: .*file is a file; name the folder"):
        list_folders(tmp_path / "file", "data.validation")


def test_the_held_out_share_depends_on_names_alone():
    """Of 20000 names 10 % are chosen within 5 standard deviations (5 x 42), and others do not move them."""
    names = [f"class/{i}.png" for i in range(20000)]
    chosen = held_out(names, 0.1)
    assert abs(int(chosen.sum()) - 2000) < 5 * 42.5
    assert np.array_equal(held_out(names[::2], 0.1), chosen[::2])
    assert np.array_equal(held_out(names[::-1], 0.1), chosen[::-1])
    assert held_out([b"a", b"b"], 0.5).tolist() == held_out(["a", "b"], 0.5).tolist()
    # for good: another choice would mix training and validation images of a resumed run
    assert np.flatnonzero(chosen)[:5].tolist() == FIRST_HELD_OUT


FIRST_HELD_OUT = [15, 19, 22, 47, 64]


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-12])
def test_each_split_gets_a_sample_where_there_are_two(fraction):
    for count in range(2, 6):
        chosen = held_out([str(i) for i in range(count)], fraction)
        assert 1 <= chosen.sum() < count
    assert held_out([], fraction).tolist() == [] and len(held_out(["a"], fraction)) == 1


def test_one_sample_is_for_training():
    assert held_out(["a"], 0.999999).tolist() == [False]


def test_the_fingerprint_changes_with_names_sizes_order_and_facts():
    files = [ImageFile("a.png", 1), ImageFile("b.png", 2)]
    prints = {
        fingerprint(files, 1),
        fingerprint(files[::-1], 1),
        fingerprint(files, 2),
        fingerprint([ImageFile("a.png", 1), ImageFile("b.png", 3)], 1),
        fingerprint([ImageFile("a.png", 1), ImageFile("c.png", 2)], 1),
        fingerprint(files[:1], 1),
    }
    assert len(prints) == 6 and fingerprint(list(files), 1) in prints
