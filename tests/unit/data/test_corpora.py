"""Reading documents: formats, faults with their place, and what is skipped."""

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largetrain.data.builtin import builtin_documents
from largetrain.data.corpora import Reading, digest, documents, find_sources
from largetrain.errors import ConfigError


def read(path, **options):
    reading = Reading(**options)
    found = [text for source in find_sources(str(path), "data.source") for text in documents(source, reading)]
    reading.raise_problems("data.source")
    return found, reading


def fails(path, **options):
    with pytest.raises(ConfigError) as caught:
        read(path, **options)
    return str(caught.value)


def lines(*objects, end="\n"):
    return "".join(json.dumps(value) + end for value in objects).encode()


def test_text_file_with_bom_and_crlf(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntw\xc3\xb6\r\n")
    assert read(tmp_path / "a.txt")[0] == ["one\ntwö\n"]


def test_json_lines_with_bom_crlf_and_no_final_line_end(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\n"}\r\n{"text": "two", "id": 3}')
    assert read(tmp_path / "a.jsonl")[0] == ["one\r\n", "two"]


def test_packed_json_lines_and_another_key(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines({"body": "one"}, {"body": "two"})))
    assert read(tmp_path / "a.jsonl.gz", text_key="body")[0] == ["one", "two"]


def test_folders_are_read_recursively_in_order_and_hidden_files_left_out(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.jsonl", "c.md", ".hidden.txt", ".git/x.txt", "B.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines({"text": name}) if name.endswith("jsonl") else name.encode())
    assert read(tmp_path)[0] == ["B.TXT", "a/y.jsonl", "a/z.txt", "b.txt"]


def test_a_file_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    sources = find_sources([str(tmp_path), str(tmp_path / "a.txt"), "builtin", "builtin"], "data.source")
    assert [source.kind for source in sources] == [".txt", "builtin"]


def test_empty_documents_are_skipped_and_counted(tmp_path):
    """An empty document is skipped and counted, wherever it stands."""
    (tmp_path / "a.jsonl").write_bytes(lines({"text": ""}, {"text": "one"}, {"text": " \n"}, {"text": "two"}) + b"\n")
    found, reading = read(tmp_path / "a.jsonl")
    assert found == ["one", "two"] and reading.empty == 3 and reading.bad == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"\xe6A", "not valid UTF-8: byte 0xE6 at offset 0"),
        (b'{"text": "ab', "not valid JSON"),
        (b"[1, 2]", "the line is a JSON array, not an object"),
        (b"3", "the line is a JSON number, not an object"),
        (b'{"txt": "a", "id": 1}', 'key "text" is missing (keys here: id, txt)'),
        (b'{"text": null}', 'key "text" holds a null, not a string'),
        (b'{"text": ["a"]}', 'key "text" holds a array, not a string'),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
    ids=range(10),
)
def test_faults_of_a_line_are_told_with_file_and_line(tmp_path, line, told):
    """Bytes that are no text, a BOM, CRLF and a line cut short: named by file and line, or skipped and counted."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines({"text": "one"}) + b"\n" + line + b"\n" + lines({"text": "two"}))
    message = fails(path)
    assert f"{path}:3: " in message and told in message and "data.on_bad_input=skip" in message
    found, reading = read(path, skip_bad=True)
    assert found == ["one", "two"] and reading.bad == 1 and reading.empty == 1


def test_a_cut_off_last_line_is_told_as_such(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines({"text": "one"}, {"text": "two"})[:-6])
    message = fails(path)
    assert f"{path}:2: not valid JSON" in message and "may be cut off" in message


def test_invalid_utf8_in_a_text_file_names_the_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nxy\xe6A\n")
    assert f"{path}:3: not valid UTF-8: byte 0xE6 at offset 2 of the line" in fails(path)
    assert read(path, skip_bad=True)[1].bad == 1


def test_utf16_is_recognised(tmp_path):
    (tmp_path / "a.txt").write_bytes("hello".encode("utf-16"))
    assert "looks like UTF-16" in fails(tmp_path / "a.txt")


def test_all_faults_come_in_one_report_up_to_a_bound(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"{\n[\n")
    message = fails(tmp_path)
    assert all(f"{tmp_path / name}:{line}: " in message for name in ("a.jsonl", "b.jsonl") for line in (1, 2))
    (tmp_path / "a.jsonl").write_bytes(b"{\n" * 1000)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    assert len(caught.value.problems) == 21 and "the first 20 faults" in caught.value.problems[-1]


def damage(path, kind):
    if kind == "missing":
        path = path.with_name("nope.txt")
    elif kind == "no match":
        path = path / "folder"
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "x.md").write_text("x")
    elif kind == "unknown extension":
        path = path / "x.csv"
        path.write_text("x")
    elif kind == "zero bytes":
        path = path / "x.txt"
        path.touch()
    elif kind == "dangling link":
        path = path / "x.txt"
        path.symlink_to("nowhere")
    elif kind == "pipe":
        path = path / "x.txt"
        os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("missing", "does not exist"),
        ("no match", "holds no .txt, .jsonl, .jsonl.gz file"),
        ("unknown extension", "unknown extension. Accepted: .txt, .jsonl, .jsonl.gz"),
        ("zero bytes", "is empty (0 bytes)"),
        ("dangling link", "neither a file nor a folder"),
        ("pipe", "neither a file nor a folder"),
    ],
)
def test_unusable_paths_are_told_with_key_and_path(tmp_path, kind, told):
    path = damage(tmp_path, kind)
    message = fails(path)
    assert message.startswith("data.source: ") and str(path) in message and told in message


def test_all_unusable_paths_are_told_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        find_sources([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], "data.validation")
    assert len(caught.value.problems) == 2 and all("data.validation" in line for line in caught.value.problems)
    with pytest.raises(ConfigError, match="the list is empty"):
        find_sources([], "data.source")


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("kind", ["truncated", "not gzip", "flipped"])
def test_a_damaged_gzip_is_told_even_if_faults_are_skipped(tmp_path, kind, skip_bad):
    path = tmp_path / "a.jsonl.gz"
    packed = bytearray(gzip.compress(lines(*({"text": f"line {i} {i * 7919}"} for i in range(200)))))
    if kind == "truncated":
        packed = packed[: len(packed) // 2]
    elif kind == "not gzip":
        packed = bytearray(b"hello world")
    else:
        packed[-6] ^= 1
    path.write_bytes(packed)
    message = fails(path, skip_bad=skip_bad)
    assert message.startswith("data.source: ") and str(path) in message and "damaged or truncated gzip" in message


def test_an_unreadable_file_is_told(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    source = find_sources(str(path), "data.source")[0]
    path.unlink()
    path.mkdir()  # also for the superuser, who may read any file
    for use in (digest, lambda source: list(documents(source, Reading()))):
        with pytest.raises(ConfigError, match=f"data.source: cannot read {path}: Is a directory"):
            use(source)


FRAGMENTS = (
    b'{"text": |"a"|}|\n|\r\n|{|[|"|\\u|\\ud83d|1e999|NaN|\xef\xbb\xbf|\xff|\x00|{"text": "x"}\n|null|\x85|\xe2\x80\xa8'
).split(b"|")


@settings(max_examples=300, deadline=None)
@given(
    content=st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(b"".join)),
    skip_bad=st.booleans(),
)
def test_no_bytes_make_json_lines_fail_in_another_way(tmp_path_factory, content, skip_bad):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(content or b"\n")
    try:
        found, reading = read(path, skip_bad=skip_bad)
    except ConfigError as error:
        assert not skip_bad and str(path) in str(error)
        return
    assert all(isinstance(text, str) and text.strip() and text.encode() for text in found)
    assert skip_bad or reading.bad == 0


def test_digest_is_that_of_content_not_of_path(tmp_path):
    for name, text in (("a.txt", "x"), ("b.txt", "x"), ("c.txt", "y")):
        (tmp_path / name).write_text(text)
    a, b, c = map(digest, find_sources(str(tmp_path), "data.source"))
    assert a == b != c


def test_builtin_corpus_is_the_reference_and_the_library():
    texts = list(builtin_documents())
    size = sum(len(text.encode()) for text in texts)
    assert 1_000_000 < size < 40_000_000 and len(texts) > 200
    assert texts == list(builtin_documents())
    assert texts[0].startswith('The "assert" statement')
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "json" / "decoder.py").read_text() in texts
    for left_out in ("test/support/__init__.py", "idlelib/run.py", "encodings/cp437.py"):
        path = library / left_out
        assert not path.exists() or path.read_text() not in texts
