"""From files to samples: the split, the cache, and refusals."""

import errno
import itertools
import json
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from largetrain.data import cache, text
from largetrain.data.store import SplitWriter, read_offsets
from largetrain.data.text import prepare
from largetrain.errors import ConfigError
from tests.ranks import run_ranks
from tests.unit.data.helpers import make_tokenizer, run_of


def write_documents(path, count, size=200, start=0):
    path.write_text(
        "".join(
            json.dumps({"text": f"document {i:05d} " + "ab cd\n" * (size // 6)}) + "\n" for i in range(start, count)
        )
    )
    return str(path)


def texts_of(dataset):
    """The documents of a split, read back from its token file."""
    tokens = np.fromfile(dataset.folder / f"{dataset.name}.bin", dtype=dataset.split.dtype)
    offsets = read_offsets(dataset.folder, dataset.name, dataset.split)
    documents = [tokens[low:high].tolist() for low, high in itertools.pairwise(offsets)]
    assert all(ids[-1] == 256 and 256 not in ids[:-1] for ids in documents)
    return [bytes(ids[:-1]).decode() for ids in documents]


def entries(folder):
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.endswith(".lock"))


def test_samples_are_inputs_and_shifted_labels(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(97, 123)) * 20)
    data = prepare(run_of(tmp_path, source=str(tmp_path / "a.txt"), validation_fraction=0.1), 16, 257)
    stream = np.fromfile(data.train.folder / "train.bin", dtype="<u2")
    assert len(data.train) == (len(stream) - 1) // 16
    for index in range(len(data.train)):
        item = data.train[index]
        assert item["input_ids"].tolist() == stream[index * 16 : index * 16 + 16].tolist()
        assert item["labels"].tolist() == stream[index * 16 + 1 : index * 16 + 17].tolist()
        assert item["sample_id"] == index
    batch = data.train.get_batch(np.array([3, 0, 3]))
    assert batch["input_ids"].shape == (3, 16) and str(batch["input_ids"].dtype) == "torch.int64"
    assert batch["labels"].is_contiguous() and batch["input_ids"].is_contiguous()
    assert batch["labels"][0].tolist() == data.train[3]["labels"].tolist() and batch["sample_id"].tolist() == [3, 0, 3]
    for bad in (len(data.train), -1):
        with pytest.raises(IndexError):
            data.train.get_batch(np.array([0, bad]))


def test_one_text_file_is_cut_at_its_end(tmp_path):
    """The user's single file trains on its beginning and is judged by its end, cut at a line."""
    lines = [f"line {i} ü\n" for i in range(1000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    data = prepare(run_of(tmp_path, source=str(tmp_path / "a.txt")), 16, 257)
    train, held_out = texts_of(data.train), texts_of(data.validation)
    assert train[0] + held_out[0] == "".join(lines) and held_out[0].startswith("line 9")
    size = len("".join(lines).encode())
    assert abs(data.validation.split.text_bytes / size - 0.05) < 0.01
    assert data.train.split.text_bytes + data.validation.split.text_bytes == size
    assert any("the end of the text" in line for line in data.report)


def test_a_cut_without_lines_keeps_characters_whole(tmp_path):
    (tmp_path / "a.txt").write_text("ü" * 999)
    data = prepare(run_of(tmp_path, source=str(tmp_path / "a.txt"), validation_fraction=0.3), 16, 257)
    assert texts_of(data.train)[0] + texts_of(data.validation)[0] == "ü" * 999


def test_many_documents_are_split_by_content(tmp_path):
    """Adding documents moves no other, and a copy lands on the side of its original."""
    path = tmp_path / "a.jsonl"
    write_documents(path, 1000)
    small = prepare(run_of(tmp_path, source=str(path)), 16, 257)
    first_train, first_held_out = set(texts_of(small.train)), set(texts_of(small.validation))
    assert 20 < len(first_held_out) < 100 and not first_train & first_held_out
    assert len(first_train) + len(first_held_out) == 1000
    write_documents(path, 1500)
    path.write_text(path.read_text() * 2)
    large = prepare(run_of(tmp_path, source=str(path)), 16, 257)
    train, held_out = set(texts_of(large.train)), set(texts_of(large.validation))
    assert first_train < train and first_held_out < held_out and not train & held_out
    assert any("content hash" in line for line in large.report)


def test_a_lopsided_hash_split_is_given_up_for_a_cut(tmp_path):
    """One huge document among many small ones must not become the whole validation text."""
    small = [{"text": f"small {i}\n"} for i in range(400)]
    for index in range(40):  # whichever side the huge one falls on, the share stays near 5 %
        huge = {"text": f"huge {index}\n" + "abc def\n" * 20_000}
        path = tmp_path / f"{index}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in [*small, huge]))
        data = prepare(run_of(tmp_path, source=str(path)), 16, 257)
        share = data.validation.tokens / (data.validation.tokens + data.train.tokens)
        assert 0.015 < share < 0.16


def test_separate_validation_files(tmp_path):
    (tmp_path / "a.txt").write_text("train " * 50)
    (tmp_path / "b.txt").write_text("other " * 50)
    run = run_of(tmp_path, source=str(tmp_path / "a.txt"), validation=[str(tmp_path / "b.txt")])
    data = prepare(run, 16, 257)
    assert texts_of(data.train) == ["train " * 50] and texts_of(data.validation) == ["other " * 50]
    with pytest.raises(ConfigError, match=r"data.validation: .*a.txt is also in data.source"):
        prepare(run_of(tmp_path, source=str(tmp_path / "a.txt"), validation=str(tmp_path)), 16, 257)


def test_bytes_per_token_counts_text_and_not_ends(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 500)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "ü" * 20}) + "\n" + json.dumps({"text": "y" * 10}) + "\n")
    run = run_of(tmp_path, source=str(tmp_path / "a.txt"), validation=str(tmp_path / "b.jsonl"))
    assert prepare(run, 16, 257).bytes_per_token == 50 / 52


def test_a_tokenizer_file_end_to_end(tmp_path):
    reference = make_tokenizer(tmp_path / "tokenizer.json", vocab_size=280)
    sentence = "the quick brown fox jumps over the dog "
    (tmp_path / "a.txt").write_text(sentence * 200)
    (tmp_path / "v.txt").write_text(sentence * 20)
    run = run_of(
        tmp_path, source=str(tmp_path / "a.txt"), validation=str(tmp_path / "v.txt"),
        tokenizer=str(tmp_path / "tokenizer.json"),
    )  # fmt: skip
    data = prepare(run, 16, 280)
    tokens = np.fromfile(data.validation.folder / "validation.bin", dtype="<u2").tolist()
    assert tokens == [*reference.encode(sentence * 20).ids, reference.token_to_id("<|endoftext|>")]
    assert data.bytes_per_token == len(sentence) * 20 / len(tokens) > 1.5
    with pytest.raises(ConfigError, match=r"model.vocab_size=200 is smaller than the 2\d\d ids of data.tokenizer"):
        prepare(run, 16, 200)


def test_skipped_and_empty_documents_are_reported(tmp_path):
    path = tmp_path / "a.jsonl"
    body = [json.dumps({"text": "word " * 40})] * 10
    path.write_text("\n".join(['{"text": ""}', *body[:5], '{"text": ""}', "{broken", *body[5:], "  "]) + "\n")
    with pytest.raises(ConfigError, match=rf"{path}:8: not valid JSON"):
        prepare(run_of(tmp_path, source=str(path)), 16, 257)
    data = prepare(run_of(tmp_path, source=str(path), on_bad_input="skip"), 16, 257)
    assert "skipped 3 empty documents" in data.report
    assert any(line.startswith("skipped 1 documents that are not valid") for line in data.report)
    assert data.train.split.text_bytes + data.validation.split.text_bytes == 10 * 200


@pytest.mark.parametrize("content", ['{"text": ""}\n\n', "\n", '{"text": "  "}'])
def test_all_empty_is_an_error_that_says_so(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"data.source: no document of .*a.jsonl has any text \(\d empty, 0 unusable"):
        prepare(run_of(tmp_path, source=str(tmp_path)), 16, 257)


def test_a_split_shorter_than_one_sample_is_refused(tmp_path):
    """The message names the split, the tokens found and those needed."""
    (tmp_path / "a.txt").write_text("x" * 10)
    with pytest.raises(ConfigError, match=r"data.source: the train split has 10 tokens, but one sample needs 17 "):
        prepare(run_of(tmp_path, source=str(tmp_path / "a.txt")), 16, 257)
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(
        ConfigError, match=r"the validation split has 2 tokens, .* needs 17 .*raise data.validation_fra"
    ):
        prepare(run_of(tmp_path, source=str(tmp_path / "a.txt"), validation_fraction=0.01), 16, 257)
    (tmp_path / "v.txt").write_text("short")
    with pytest.raises(ConfigError, match=r"data.validation: the validation split has 6 tokens, .* needs 17"):
        prepare(
            run_of(tmp_path, source=str(tmp_path / "a.txt"), validation=str(tmp_path / "v.txt")), 16, 257
        )  # fmt: skip
    (tmp_path / "z.txt").touch()
    with pytest.raises(ConfigError, match=r"data.source: .*z.txt is empty \(0 bytes\)"):
        prepare(run_of(tmp_path, source=str(tmp_path / "z.txt")), 16, 257)


def test_the_cache_is_used_and_keyed_by_content(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one two\n" * 100)
    run = run_of(tmp_path, source=str(path))
    lines = []
    first = prepare(run, 16, 257, progress=lambda share, line: lines.append((share, line)))
    assert lines[-1][0] == 1.0 and "MB" in lines[-1][1] and len(entries(tmp_path / "cache")) == 1
    shutil.copy(path, tmp_path / "b.txt")  # the same content elsewhere
    with monkeypatch.context() as patch:
        patch.setattr(text, "write_splits", lambda *_: pytest.fail("tokenized again"))
        again = prepare(run_of(tmp_path, source=str(tmp_path / "b.txt")), 16, 257, progress=lambda *_: pytest.fail(""))
        other = prepare(run, 32, 257)
    assert again.fingerprint == first.fingerprint != other.fingerprint
    path.write_text("one tow\n" * 100)
    changed = prepare(run, 16, 257)
    fraction = prepare(run_of(tmp_path, source=str(path), validation_fraction=0.1), 16, 257)
    assert len({first.fingerprint, changed.fingerprint, fraction.fingerprint}) == 3
    assert len(entries(tmp_path / "cache")) == 3


@pytest.mark.parametrize("name", ["train.bin", "validation.offsets", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_entry_is_built_again(tmp_path, name, damage):
    path = tmp_path / "a.txt"
    path.write_text("one two\n" * 100)
    run = run_of(tmp_path, source=str(path))
    folder = prepare(run, 16, 257).train.folder
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    content = bytearray(kept[name])
    content[len(content) // 2] ^= 1
    (folder / name).unlink()
    if damage != "gone":
        (folder / name).write_bytes(content if damage == "flip" else content[: len(content) // 2])
    lines = []
    prepare(run, 16, 257, progress=lambda share, line: lines.append(line))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == kept
    assert any("are damaged" in line and "building them again" in line for line in lines)
    assert entries(tmp_path / "cache") == [folder.name]


def prepare_on_rank(folder):
    lines = []
    run = run_of(folder, source=str(folder / "a.txt"))
    data = prepare(run, 16, 257, progress=lambda share, line: lines.append(line))
    return data.fingerprint, len(data.train), sum(line.startswith("tokenizing") for line in lines)


@pytest.mark.timeout(120)
def test_processes_that_start_together_build_once(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n" * 500_000)
    found = run_ranks(prepare_on_rank, 3, tmp_path)
    assert len({(fingerprint, samples) for fingerprint, samples, _ in found}) == 1
    assert sum(built for _, _, built in found) == 1
    assert len(entries(tmp_path / "cache")) == 1


def test_leftovers_of_a_killed_build_are_removed(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n" * 100)
    run = run_of(tmp_path, source=str(tmp_path / "a.txt"))
    folder = prepare(run, 16, 257).train.folder
    folder.rename(folder.with_name(f"{folder.name}.tmp-killed"))
    prepare(run, 16, 257)
    assert entries(tmp_path / "cache") == [folder.name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch, code):
    def full(self):
        raise OSError(code, "full")

    (tmp_path / "a.txt").write_text("one two\n" * 100)
    monkeypatch.setattr(SplitWriter, "finish", full)
    with pytest.raises(ConfigError, match=r"data.cache: no space left for tokenized data in .*cache"):
        prepare(run_of(tmp_path, source=str(tmp_path / "a.txt")), 16, 257)
    assert entries(tmp_path / "cache") == []


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n" * 100)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"data.cache: cannot write .*cache.*set data.cache"):
        prepare(run_of(tmp_path, source=str(tmp_path / "a.txt")), 16, 257)


def test_a_file_system_without_locks_still_works(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    (tmp_path / "a.txt").write_text("one two\n" * 100)
    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    assert len(prepare(run_of(tmp_path, source=str(tmp_path / "a.txt")), 16, 257).train) > 0


def test_a_file_that_changes_meanwhile_is_told(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two\n" * 100)

    def progress(share, line):
        path.write_text("three\n" * 100)

    with pytest.raises(ConfigError, match=r"data.source: a file changed while it was read"):
        prepare(run_of(tmp_path, source=str(path)), 16, 257, progress=progress)


def test_the_cache_folder_follows_the_usual_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_root(None) == tmp_path / "largetrain"
    assert cache.cache_root("here") == Path.cwd() / "here"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_root(None) == tmp_path / ".cache" / "largetrain"


def test_a_dataset_travels_without_its_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n" * 50_000)
    dataset = prepare(run_of(tmp_path, source=str(tmp_path / "a.txt")), 16, 257).train
    first = dataset[0]["input_ids"]
    packed = pickle.dumps(dataset)
    assert len(packed) < 5000 and pickle.loads(packed)[0]["input_ids"].equal(first)


def test_the_builtin_corpus_is_ready_in_seconds(tmp_path):
    started = time.process_time()
    data = prepare(run_of(tmp_path), 256, 257)
    assert time.process_time() - started < 10
    assert data.train.tokens > 3_000_000 and 0.015 < data.validation.tokens / data.train.tokens < 0.16
