"""Remembered digests: reused for an untouched large file, never for a changed one."""

import os
import time

import pytest

from largetrain.data import digests
from largetrain.data.corpora import digest, find_sources
from largetrain.data.digests import remembered_digest


@pytest.fixture
def large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    return path


def source_of(path):
    return find_sources(str(path), "data.source")[0]


def test_an_untouched_large_file_is_read_once(large_file, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_S", 0.0)
    expected = digest(source_of(large_file))
    time.sleep(0.02)
    assert remembered_digest(source_of(large_file), tmp_path) == expected
    with monkeypatch.context() as patch:
        patch.setattr(digests, "digest", lambda _: pytest.fail("read again"))
        assert remembered_digest(source_of(large_file), tmp_path) == expected
    stat = large_file.stat()
    large_file.write_text("y" * 100)
    os.utime(large_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a copy that keeps times: the change time tells
    assert remembered_digest(source_of(large_file), tmp_path) == digest(source_of(large_file)) != expected


def test_a_file_just_written_is_not_remembered(large_file, tmp_path):
    remembered_digest(source_of(large_file), tmp_path)
    assert not (tmp_path / "digests").exists()


def test_a_damaged_note_is_ignored(large_file, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_S", 0.0)
    time.sleep(0.02)
    expected = remembered_digest(source_of(large_file), tmp_path)
    (note,) = (tmp_path / "digests").iterdir()
    note.write_text(expected[:20])
    assert remembered_digest(source_of(large_file), tmp_path) == expected == note.read_text()


def test_small_files_are_read_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_S", 0.0)
    (tmp_path / "a.txt").write_text("x")
    time.sleep(0.02)
    assert remembered_digest(source_of(tmp_path / "a.txt"), tmp_path) == digest(source_of(tmp_path / "a.txt"))
    assert not (tmp_path / "digests").exists()
