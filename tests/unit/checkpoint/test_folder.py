"""Which folders are checkpoints, which are whole, and which one --resume means; no process group."""

import json
import os
import subprocess
import sys

import pytest

from largetrain.checkpoint.folder import (
    all_checkpoints,
    best_checkpoint,
    complete_checkpoints,
    find_checkpoint,
    leftovers,
    newer_than,
    pointed_at,
    read_facts,
    step_folder,
    step_of,
)
from largetrain.checkpoint.manifest import sealed
from largetrain.checkpoint.verify import problem_of
from largetrain.checkpoint.writer import replace, write_best
from largetrain.errors import ConfigError
from tests.unit.checkpoint.made import make

WEIGHTS = "pieces/rank-00001.safetensors"


def flip(path, index=-1):
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(content)


def test_names_sort_by_number_not_by_text(tmp_path):
    for step in (900, 1000, 100_000_000, 99_999_999):
        make(tmp_path, step, ranks=1)
        for path in tmp_path.glob("abandoned-*"):
            path.rename(tmp_path / path.name.removeprefix("abandoned-"))
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [900, 1000, 99_999_999, 100_000_000]
    assert step_folder(10) == "step-00000010"


def test_other_names_are_not_checkpoints(tmp_path):
    path = make(tmp_path, 1)
    for name in ("partial-step-00000002", "abandoned-step-00000003", "step-4", "step-0000000x", "step-00000005.old"):
        (tmp_path / name).mkdir()
    assert all_checkpoints(tmp_path) == [path]


def test_newer_than_counts_incomplete_ones(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / step_folder(3) / "manifest.json").unlink()
    assert [step_of(path) for path in newer_than(tmp_path, 1)] == [2, 3]
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 2]


def test_only_what_saves_leave_is_a_leftover(tmp_path):
    (tmp_path / "partial-step-00000001").mkdir()
    for name in ("partial-results", "partial-step-1", "partial-step-00000002.bak", "abandoned-step-00000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "partial-step-00000003").write_text("a file")
    (tmp_path / "partial-step-00000004").symlink_to(tmp_path / "partial-results")
    assert [path.name for path in leftovers(tmp_path)] == ["partial-step-00000001"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
        (lambda p: (p / WEIGHTS).write_bytes(b"wei"), f"{WEIGHTS} has 3 bytes, "),
        (lambda p: (p / "ranks" / "rank-00000.pt").unlink(), "ranks/rank-00000.pt is missing"),
        (lambda p: (p / "manifest.json").unlink(), "is not a complete checkpoint (manifest.json is missing)"),
        (lambda p: (p / "best.json").write_text("{}"), "best.json is not what was written"),
        (lambda p: replace(p / "best.json", sealed({"step": 2, "state": {}})), "best.json is of another checkpoint"),
        (lambda p: (p / "best.json").mkdir(), "best.json is not a regular file"),
    ],
)
def test_damage_is_described(tmp_path, damage, words):
    path = make(tmp_path, 1)
    damage(path)
    assert words in problem_of(path)


@pytest.mark.parametrize("name", ["run.json", "pieces/rank-00000.safetensors", WEIGHTS, "ranks/rank-00001.pt"])
def test_a_flipped_bit_is_found_in_the_contents(tmp_path, name):
    path = make(tmp_path, 1)
    flip(path / name)
    assert problem_of(path) is None
    assert problem_of(path, contents=True) == f"{path / name} is not what was written (its SHA-256 differs)"


def test_auto_takes_the_newest_true_one_and_names_newer_ones(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4):
        make(folder, step)
    (folder / step_folder(3) / WEIGHTS).write_bytes(b"")
    flip(folder / step_folder(4) / WEIGHTS)
    found, passed_over = find_checkpoint("auto", tmp_path)
    assert found == folder / step_folder(2)
    assert [step_folder(step) in line for step, line in zip((3, 4), passed_over, strict=True)] == [True, True]
    assert find_checkpoint("auto", tmp_path / "nothing") == (None, [])


def test_a_path_may_be_the_checkpoint_the_run_or_its_folder(tmp_path):
    path = make(tmp_path / "checkpoints", 4)
    for given in (path, tmp_path, tmp_path / "checkpoints"):
        assert find_checkpoint(str(given), tmp_path / "elsewhere") == (path, [])
    renamed = path.rename(tmp_path / "kept")
    assert find_checkpoint(str(renamed), tmp_path) == (renamed, [])


def test_an_explicit_path_must_hold_a_true_checkpoint(tmp_path):
    path = make(tmp_path / "checkpoints", 4)
    flip(path / WEIGHTS)
    with pytest.raises(ConfigError, match=f"{WEIGHTS} is not what was written"):
        find_checkpoint(str(path), tmp_path)
    (path / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"no complete checkpoint there\n.*rank-00001.safetensors is missing"):
        find_checkpoint(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        find_checkpoint(str(tmp_path / step_folder(9)), tmp_path)


def test_best_is_what_the_pointer_names_and_must_be_true(tmp_path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(ConfigError, match="names no best checkpoint"):
        find_checkpoint("best", tmp_path)
    path = make(folder, 4)
    write_best(path, {"best_figure": 0.5})
    assert find_checkpoint("best", tmp_path) == (path, [])
    assert read_facts(path)["state"] == {"step": 4, "best_figure": 0.5}
    flip(path / WEIGHTS)
    with pytest.raises(ConfigError, match=f"--resume best: .*{WEIGHTS} is not what was written"):
        find_checkpoint("best", tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"../step-00000004", b"/tmp/step-00000004", b"step-00000005", b"step-4", b"\xff", b"step-00000004\nx",
     b"x" * 200, b"step-00000004\0"],
)  # fmt: skip
def test_a_pointer_to_anything_else_names_nothing(tmp_path, content):
    make(tmp_path, 4)
    pointer = tmp_path / "best"
    pointer.write_bytes(b"step-00000004\n")
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000004"
    pointer.write_bytes(content)
    assert best_checkpoint(tmp_path) is None


def test_a_pointer_is_a_file_and_names_a_folder(tmp_path):
    make(tmp_path, 4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "step-00000004" / "run.json")
    (tmp_path / "step-00000009").symlink_to(tmp_path / "step-00000004")
    (tmp_path / "to-link").write_text("step-00000009")
    assert [pointed_at(tmp_path / name) for name in ("pipe", "link", "to-link", "absent")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", b"{", "run.json has 1 bytes"),
        ("best.json", b"{", "best.json cannot be read"),
        ("best.json", b'{"state": {}, "sha256": "0"}', "best.json is not what was written"),
    ],
)
def test_facts_that_cannot_be_read_name_the_file(tmp_path, name, content, words):
    path = make(tmp_path, 1)
    (path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_facts(path)


def test_changed_facts_are_not_read(tmp_path):
    path = make(tmp_path, 1)
    content = (path / "run.json").read_bytes()
    (path / "run.json").write_bytes(content.replace(b'"step": 1', b'"step": 2'))
    assert json.loads((path / "run.json").read_bytes())["state"]["step"] == 2
    with pytest.raises(ConfigError, match=r"run.json is not what was written"):
        read_facts(path)


def test_listing_and_verifying_need_no_torch():
    modules = "folder, verify, manifest, retention, space, header"
    code = f"import sys; from largetrain.checkpoint import {modules}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
