"""Which folders are checkpoints, which are whole, and which one --resume means; no process group."""

import json

import pytest
import torch

from largetrain.checkpoint.folder import (
    all_checkpoints,
    complete_checkpoints,
    find_checkpoint,
    newer_than,
    problem_of,
    read_facts,
    read_rng,
    rng_file,
    step_folder,
    step_of,
)
from largetrain.errors import ConfigError


def make(folder, step, content=b"weights"):
    """A whole checkpoint of one data file."""
    path = folder / step_folder(step)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(content)
    (path / "run.json").write_text('{"state": {}}')
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    (path / "manifest.json").write_text(json.dumps(sizes))
    return path


def test_names_sort_by_number_not_by_text(tmp_path):
    for step in (900, 1000, 100_000_000, 99_999_999):
        make(tmp_path, step)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [900, 1000, 99_999_999, 100_000_000]
    assert step_folder(10) == "step-00000010"


def test_other_names_are_not_checkpoints(tmp_path):
    make(tmp_path, 1)
    for name in ("partial-step-00000002", "abandoned-step-00000003", "step-4", "step-0000000x", "step-00000005.old"):
        make(tmp_path, 9).rename(tmp_path / name)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000001"]


def test_newer_than_counts_incomplete_ones(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / step_folder(3) / "manifest.json").unlink()
    assert [step_of(path) for path in newer_than(tmp_path, 1)] == [2, 3]
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "weights.pt").unlink(), "weights.pt is missing"),
        (lambda p: (p / "weights.pt").write_bytes(b"wei"), "weights.pt has 3 bytes, 7 were written"),
        (lambda p: (p / "manifest.json").unlink(), "is not a complete checkpoint"),
        (lambda p: (p / "manifest.json").write_bytes(b'{"weights.pt": 7'), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_bytes(b"[]"), "is not a manifest"),
        (lambda p: (p / "manifest.json").write_bytes(b"{}"), "is not a manifest"),
    ],
)
def test_damage_is_described(tmp_path, damage, words):
    path = make(tmp_path, 1)
    assert problem_of(path) is None
    damage(path)
    assert words in problem_of(path)


def test_auto_takes_the_newest_whole_one_and_names_newer_ones(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make(folder, step)
    (folder / step_folder(3) / "weights.pt").write_bytes(b"")
    found, passed_over = find_checkpoint("auto", tmp_path)
    assert found == folder / step_folder(2)
    assert len(passed_over) == 1
    assert step_folder(3) in passed_over[0]
    assert find_checkpoint("auto", tmp_path / "nothing") == (None, [])


def test_a_path_may_be_the_checkpoint_the_run_or_its_folder(tmp_path):
    path = make(tmp_path / "checkpoints", 4)
    for given in (path, tmp_path, tmp_path / "checkpoints"):
        assert find_checkpoint(str(given), tmp_path / "elsewhere") == (path, [])


def test_an_explicit_path_must_hold_a_whole_checkpoint(tmp_path):
    path = make(tmp_path / "checkpoints", 4)
    (path / "weights.pt").unlink()
    with pytest.raises(ConfigError, match="weights.pt is missing"):
        find_checkpoint(str(path), tmp_path)
    with pytest.raises(ConfigError, match=r"no complete checkpoint there\n.*weights.pt is missing"):
        find_checkpoint(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        find_checkpoint(str(tmp_path / step_folder(9)), tmp_path)


def test_facts_that_cannot_be_read_name_the_file(tmp_path):
    path = make(tmp_path, 1)
    (path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="run.json cannot be read"):
        read_facts(path)


def test_random_generators_are_read_without_running_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    rng_file(tmp_path, 0).parent.mkdir()
    torch.save({"torch": Trap()}, rng_file(tmp_path, 0))
    with pytest.raises(Exception, match="Weights only load failed"):
        read_rng(tmp_path, 0)
    assert not (tmp_path / "ran").exists()
