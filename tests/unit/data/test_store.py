"""Token files: types wide enough, and damage that is noticed."""

import numpy as np
import pytest

from largetrain.data.store import DamagedError, Split, SplitWriter, map_tokens, read_offsets, token_dtype, verify
from largetrain.errors import ConfigError


def write(folder, vocab_size, *documents):
    writer = SplitWriter(folder, "train", vocab_size)
    for ids in documents:
        writer.add(np.array(ids, dtype=np.int64), text_bytes=len(ids))
    return writer.finish()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint16"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (70_000, "uint32"), (2**32, "uint32")],
)
def test_the_type_holds_every_id(vocab_size, dtype):
    assert token_dtype(vocab_size).name == dtype
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_ids_above_65535_come_back(tmp_path):
    """Ids above 65535 must not wrap."""
    split = write(tmp_path, 70_000, [5, 65535], [], [65536, 69999])
    verify(tmp_path, "train", split, 70_000)
    tokens = map_tokens(tmp_path, "train", split)
    assert tokens.tolist() == [5, 65535, 65536, 69999] and not tokens.flags.writeable
    offsets = read_offsets(tmp_path, "train", split)
    assert offsets.tolist() == [0, 2, 2, 4] and offsets.dtype == np.int64
    assert (split.documents, split.tokens, split.max_id, split.text_bytes) == (3, 4, 69999, 4)
    assert Split.from_json(split.to_json()) == split


@pytest.mark.parametrize("bad", [[70_000], [3, -1], [2**33]])
def test_ids_outside_the_vocabulary_are_refused_on_write(tmp_path, bad):
    with pytest.raises(ConfigError, match=r"data.tokenizer: it produced ids .*vocabulary is 0..69999"):
        write(tmp_path, 70_000, [1], bad)


def test_ids_outside_the_vocabulary_are_refused_on_load(tmp_path):
    split = write(tmp_path, 70_000, [69_999])
    with pytest.raises(DamagedError, match="highest id 69999, vocabulary 60000"):
        verify(tmp_path, "train", split, 60_000)


@pytest.mark.parametrize("name", ["train.bin", "train.offsets"])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone"])
def test_damage_is_noticed(tmp_path, name, damage):
    split = write(tmp_path, 257, list(range(200)))
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    content = content[:-2] if damage == "cut" else content + b"\0\0" if damage == "longer" else content
    path.unlink()
    if damage != "gone":
        path.write_bytes(content)
    with pytest.raises(DamagedError, match=name):
        verify(tmp_path, "train", split, 257)


@pytest.mark.parametrize("value", [None, {}, {"tokens": 1}, [1]])
def test_a_foreign_manifest_is_damage(value):
    with pytest.raises(DamagedError):
        Split.from_json(value)


def test_large_files_are_checked_at_their_ends(tmp_path, monkeypatch):
    from largetrain.data import store

    monkeypatch.setattr(store, "BLOCK_BYTES", 64)
    monkeypatch.setattr(store, "FULL_CHECK_BYTES", 1000)
    split = write(tmp_path, 257, [7] * 40_000)
    verify(tmp_path, "train", split, 257)
    for place in (0, 79_999):
        content = bytearray((tmp_path / "train.bin").read_bytes())
        content[place] ^= 1
        (tmp_path / "train.bin").write_bytes(content)
        with pytest.raises(DamagedError):
            verify(tmp_path, "train", split, 257)
        content[place] ^= 1
        (tmp_path / "train.bin").write_bytes(content)
