"""A manifest names the files of a checkpoint, and nothing in it is trusted."""

import json
import os

import pytest

from largetrain.checkpoint.manifest import read_json, read_manifest
from largetrain.checkpoint.verify import problem_of
from largetrain.errors import CheckpointError
from tests.unit.checkpoint.made import forge, make

RUN, WEIGHTS, OWN = "run.json", "pieces/rank-00001.safetensors", "ranks/rank-00001.pt"


def test_a_manifest_is_read_back(tmp_path):
    path = make(tmp_path, 7, run_id="köln")
    manifest = read_manifest(path)
    assert (manifest.run_id, manifest.step, manifest.world_size) == ("köln", 7, 2)
    on_disk = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    del on_disk["manifest.json"]
    assert {name: record.bytes for name, record in manifest.files.items()} == on_disk
    assert manifest.total_bytes == sum(on_disk.values())
    assert problem_of(path) is None and problem_of(path, contents=True) is None


def rename_file(new):
    def change(content):
        content["files"][new] = content["files"].pop(WEIGHTS)

    return change


FORGED = {
    "leaves the folder": (rename_file("../step-00000009/run.json"), "names '../step-00000009/run.json'"),
    "absolute": (rename_file("/etc/passwd"), "names '/etc/passwd'"),
    "inside but odd": (rename_file("pieces/../run.json"), "names 'pieces/../run.json'"),
    "other digits": (rename_file("ranks/rank-0000٣.pt"), "which is no file of a checkpoint"),
    "newline": (rename_file("ranks/rank-00003.pt\n"), "which is no file of a checkpoint"),
    "lone surrogate": (rename_file("\ud800"), r"names '\\ud800'"),
    "long": (rename_file("x" * 10**6), "which is no file of a checkpoint"),
    "empty": (lambda c: c["files"].clear(), "lacks run.json or the files of a rank"),
    "no facts": (lambda c: c["files"].pop(RUN), "lacks run.json"),
    "a rank is absent": (lambda c: c["files"].pop("ranks/rank-00000.pt"), "the files of a rank"),
    "negative size": (lambda c: c["files"][RUN].update(bytes=-1), "no size and digest of 'run.json'"),
    "size in words": (lambda c: c["files"][RUN].update(bytes="9"), "no size and digest of 'run.json'"),
    "true as size": (lambda c: c["files"][RUN].update(bytes=True), "no size and digest of 'run.json'"),
    "huge size": (lambda c: c["files"][RUN].update(bytes=10**30), "no size and digest of 'run.json'"),
    "no digest": (lambda c: c["files"][RUN].pop("sha256"), "no size and digest of 'run.json'"),
    "no record": (lambda c: c["files"].update({RUN: None}), "no size and digest of 'run.json'"),
    "files as a list": (lambda c: c.update(files=[]), "is not a manifest"),
    "run_id as a number": (lambda c: c.update(run_id=1), "is not a manifest"),
    "another step": (lambda c: c.update(step=3), r"is of another checkpoint \(step 3\)"),
    "step below zero": (lambda c: c.update(step=-1), "its step is no number"),
    "step in words": (lambda c: c.update(step="7"), "its step is no number"),
    "true as format": (lambda c: c.update(format=True), "is not a manifest"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_manifest_with_a_right_digest_is_not_trusted_either(tmp_path, forgery):
    change, words = FORGED[forgery]
    path = make(tmp_path, 7)
    forge(path, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_manifest(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500
    str(caught.value).encode()  # it can be printed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"cannot be read \(Expecting value"),
        (b'{"format": 2', "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", r"is not what was written \(no JSON object\)"),
        (b"{}", "digest is missing"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"step": ' + b"9" * 10_000 + b"}", "cannot be read"),
        (b'{"format": 2, "sha256": "00"}', "its own digest differs"),
        (b'{"format": 2, "sha256": null}', "its own digest differs"),
    ],
)
def test_what_is_no_manifest_is_described(tmp_path, content, words):
    path = make(tmp_path, 7)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"manifest.json.*{words}"):
        read_manifest(path)


def test_every_changed_byte_of_a_manifest_is_noticed(tmp_path):
    path = make(tmp_path, 7, ranks=1)
    content = (path / "manifest.json").read_bytes()
    for index in range(0, len(content), 7):
        for bit in (0, 5):
            changed = bytearray(content)
            changed[index] ^= 1 << bit
            (path / "manifest.json").write_bytes(changed)
            if json_of(changed) != json_of(content):  # white space may change
                assert "manifest.json" in problem_of(path), (index, bit)


def json_of(content):
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_checkpoints_of_other_versions_are_named_as_such(tmp_path):
    old, new = make(tmp_path, 1), make(tmp_path, 2)
    (old / "manifest.json").write_text(json.dumps({"run.json": 10, "rng/rank-00000.pt": 9}))
    assert problem_of(old) == f"{old} was written by an earlier version of largetrain (format 1; this one reads 2)"
    forge(new, lambda content: content.update(format=3))
    assert problem_of(new) == f"{new} was written by a later version of largetrain (format 3; this one reads 2)"


def test_links_and_pipes_are_neither_followed_nor_waited_for(tmp_path):
    path = make(tmp_path, 7)
    (tmp_path / "step-00000008").symlink_to(path)
    assert "is a symbolic link" in problem_of(tmp_path / "step-00000008")
    for name in ("manifest.json", RUN, WEIGHTS, OWN):
        kept = (path / name).read_bytes()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(kept)
        (path / name).unlink()
        (path / name).symlink_to(elsewhere)
        assert problem_of(path) == f"{path / name} is a symbolic link"
        (path / name).unlink()
        os.mkfifo(path / name)
        assert problem_of(path) == f"{path / name} is not a regular file"
        (path / name).unlink()
        (path / name).write_bytes(kept)
    (path / "pieces").rename(tmp_path / "pieces")
    (path / "pieces").symlink_to(tmp_path / "pieces")
    assert problem_of(path) == f"{path / 'pieces'} is a symbolic link"


def test_a_file_too_large_to_be_one_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    with pytest.raises(CheckpointError, match="has 1,099,511,627,776 bytes"):
        read_json(path)
