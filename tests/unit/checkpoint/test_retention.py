"""Which checkpoints are deleted, and whether there is room for those that are kept."""

from collections import namedtuple

import pytest

from largetrain.checkpoint import space
from largetrain.checkpoint.folder import step_folder
from largetrain.checkpoint.retention import Retention, remove, superfluous
from largetrain.checkpoint.space import in_words, lacking, room_at_start
from largetrain.checkpoint.writer import write_best
from largetrain.errors import ConfigError
from tests.unit.checkpoint.made import make


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        (Retention(2), [900, 950, 1000]),
        (Retention(1), [900, 950, 1000, 1050]),
        (Retention(9), []),
        (Retention(0), []),
        (Retention(1, keep_every_steps=100), [950, 1050]),
        (Retention(1, milestones=(950,)), [900, 1000, 1050]),
        (Retention(2, 500, (900, 7)), [950]),
    ],
)
def test_steps_go_by_number(retention, gone):
    steps = [1000, 1050, 1100, 900, 950]
    assert retention.superfluous(steps) == gone
    assert retention.superfluous(steps, keep=[900, 1050]) == [step for step in gone if step not in (900, 1050)]


def steps_of(paths):
    return [int(path.name[5:]) for path in paths]


def test_only_this_runs_complete_ones_count_and_go(tmp_path):
    for step in range(1, 8):
        make(tmp_path, step, run_id="another" if step in (2, 6) else "this")
    (tmp_path / step_folder(7) / "run.json").unlink()  # the newest by name, and not complete
    (tmp_path / step_folder(9)).symlink_to(tmp_path / step_folder(6))
    assert steps_of(superfluous(tmp_path, Retention(2), "this")) == [1, 3]
    assert steps_of(superfluous(tmp_path, Retention(1), "another")) == [2]
    write_best(tmp_path / step_folder(3), {})
    assert steps_of(superfluous(tmp_path, Retention(2), "this")) == [1]
    assert steps_of(superfluous(tmp_path, Retention(1), "this", [tmp_path / step_folder(1)])) == [4]


def test_removing_one_leaves_what_it_does_not_hold(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    path = make(tmp_path / "checkpoints", 1)
    (path / "link").symlink_to(outside)
    remove(path)
    assert list((tmp_path / "checkpoints").iterdir()) == [] and (outside / "file").exists()


Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch):
    """Sets how much room every disk has."""
    return lambda count: monkeypatch.setattr(space.shutil, "disk_usage", lambda path: Usage(0, 0, count))


MB = 10**6


def test_a_checkpoint_that_does_not_fit_is_named_with_both_sizes(tmp_path, free):
    free(3 * MB)
    assert lacking(tmp_path, 2 * MB) is None
    assert lacking(tmp_path, 3 * MB) == f"it takes 3.1 MB, and {tmp_path} has 3.0 MB free"


def test_room_for_all_that_is_kept_is_asked_for_at_the_start(tmp_path, free):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    free(9 * MB)
    assert room_at_start(folder, 2 * MB, Retention(3)) is None
    free(8 * MB)
    warning = room_at_start(folder, 2 * MB, Retention(3))
    assert "8.0 MB free, room for 3 more checkpoints. checkpoints.keep_last: 3 takes 4 of 2.1 MB" in warning
    make(folder, 1)  # it will have gone before the fifth
    assert room_at_start(folder, 2 * MB, Retention(3)) is None
    free(3 * MB)
    assert room_at_start(folder, 2 * MB, Retention(0)) is None
    free(1 * MB)
    with pytest.raises(ConfigError, match=f"--output {tmp_path}: there is no room for a checkpoint: it takes 2.1 MB"):
        room_at_start(folder, 2 * MB, Retention(3))


def test_bytes_in_words():
    counts = (0, 999, 1000, 1_234_567, 5 * 10**9, 7 * 10**15)
    assert [in_words(count) for count in counts] == ["0 bytes", "999 bytes", "1.0 kB", "1.2 MB", "5.0 GB", "7000.0 TB"]
