"""A sample of the image fuzzer; the whole run is `python -m tests.fuzz.images`."""

import pytest

from tests.fuzz import images


@pytest.mark.timeout(120)
def test_damaged_files_are_images_or_bad_images(tmp_path):
    outcomes, faults = images.run(150, 7, tmp_path)
    assert faults == []
    assert min(outcomes[what] for what in ("image", "no image", "mask", "no mask")) >= 5


def test_the_fuzzer_finds_what_must_not_be(tmp_path, monkeypatch):
    """An exception of another kind, and a line printed below Python."""

    def fails(path):
        raise OSError("broken")

    def prints(path):
        images.os.write(2, b"TIFFFillStrip: Invalid strip")

    monkeypatch.setattr(images, "as_image", fails)
    monkeypatch.setattr(images, "as_mask", prints)
    faults = images.run(1, 0, tmp_path)[1]
    assert len(faults) == 2 and "OSError: broken" in faults[0] and "something was printed" in faults[1]


def test_every_seed_is_whole(tmp_path):
    for name, content in images.seeds().items():
        (tmp_path / name).write_bytes(content)
        images.as_image(tmp_path / name)
