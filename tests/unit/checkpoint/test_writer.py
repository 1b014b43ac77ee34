"""Files are written whole and hashed on the way, past the page cache where that is possible."""

import errno
import hashlib
import os

import pytest
import torch

from largetrain.checkpoint import writer
from largetrain.checkpoint.header import ALIGNMENT
from largetrain.checkpoint.staging import Staging, plan
from largetrain.checkpoint.writer import LEAST_DIRECT_BYTES, publish, write_file, write_rank
from largetrain.parallel.pieces import Piece

LARGE = 3 * LEAST_DIRECT_BYTES


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(writer, "CHUNK_BYTES", 16 * ALIGNMENT)


def content_of(size):
    """Random bytes, at the start of a page."""
    torch.manual_seed(size)
    values = torch.randint(0, 256, (size,), dtype=torch.uint8)
    planned = plan([Piece("a", (size,), 0, values)])
    return Staging().fill(planned)


def check(path, content, **options):
    record = write_file(path, content, **options)
    assert path.read_bytes() == bytes(content)
    assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("size", [0, 1, 2, 3, ALIGNMENT, 2 * ALIGNMENT + 1])
def test_small_files(tmp_path, size):
    check(tmp_path / "file", bytes(range(256)) * (size // 256) + bytes(size % 256))


@pytest.mark.parametrize("size", [LARGE, LARGE + 1, LARGE + ALIGNMENT - 1, 2 * LEAST_DIRECT_BYTES - 1])
def test_large_files_of_any_length(tmp_path, size, small_chunks):
    check(tmp_path / "file", content_of(size))


def test_large_files_go_past_the_page_cache(tmp_path, monkeypatch, small_chunks):
    """All but the end, which is less than a block."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("this file system has no direct writes")
    content, real, past = content_of(LARGE + 5), os.write, []

    def spy(descriptor, data):
        past.append(len(data) if writer.fcntl.fcntl(descriptor, writer.fcntl.F_GETFL) & os.O_DIRECT else 0)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", spy)
    check(tmp_path / "file", content)
    assert sum(past) == len(content) // ALIGNMENT * ALIGNMENT


@pytest.mark.parametrize("where", ["memory", "file system", "half-way"])
def test_where_that_is_not_possible_they_go_through_it(tmp_path, monkeypatch, small_chunks, where):
    content, real, calls = content_of(LARGE), os.write, []
    if where == "memory":
        content = memoryview(bytes(content) + b"odd")[3:]

    def refuse(descriptor, data):
        calls.append(len(data))
        if writer.fcntl.fcntl(descriptor, writer.fcntl.F_GETFL) & os.O_DIRECT and len(calls) > (where == "half-way"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data)

    if where != "memory":
        monkeypatch.setattr(os, "write", refuse)
    check(tmp_path / "file", content)


def test_short_writes_are_continued(tmp_path, monkeypatch, small_chunks):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[: max(1, len(data) // 3)]))
    check(tmp_path / "file", content_of(LARGE))


def test_other_failures_are_raised(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for content in (content_of(LARGE), b"small"):
        with pytest.raises(OSError, match="No space left"):
            write_file(tmp_path / str(len(content)), content)


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "file").write_text("there")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", b"new")


def test_a_write_can_be_given_up(tmp_path, small_chunks):
    class Enough(Exception):
        pass

    calls = []

    def going():
        calls.append(1)
        if len(calls) > 5:
            raise Enough

    with pytest.raises(Enough):
        write_file(tmp_path / "file", content_of(LARGE), going=going)
    assert len(calls) < 10


def test_a_file_that_another_rank_wrote_elsewhere_is_missed(tmp_path):
    partial, final = tmp_path / "partial-step-00000001", tmp_path / "step-00000001"
    writer.prepare(partial)
    files = write_rank(partial, 0, memoryview(b""), b"own")
    elsewhere = tmp_path / "elsewhere"
    writer.prepare(elsewhere)
    files |= write_rank(elsewhere, 1, memoryview(b"image"), b"own")
    with pytest.raises(OSError, match=r"files of ranks \[1\] are not in .*shared by all hosts"):
        publish(partial, final, "run", b"{}", files, 2)
    assert not final.exists()
