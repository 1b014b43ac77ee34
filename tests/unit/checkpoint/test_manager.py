"""Saving: copied at once, written in the background by all ranks, published by one rename, or not at all."""

import errno
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from largetrain.checkpoint import manager as manager_module
from largetrain.checkpoint import writer
from largetrain.checkpoint.folder import best_checkpoint, complete_checkpoints, read_facts, step_folder, step_of
from largetrain.checkpoint.manager import CheckpointManager
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.retention import Retention
from largetrain.checkpoint.verify import problem_of
from largetrain.errors import CheckpointError, ConfigError
from largetrain.parallel.pieces import Piece, Snapshot
from tests.ranks import RankFailed, run_ranks


def steps_in(folder):
    return [step_of(path) for path in complete_checkpoints(folder)]


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


TWO = Retention(2)


class Job:
    """One rank: a manager, a tensor that all ranks share out, and what was told."""

    def __init__(self, folder, retention=TWO, run_id="this run", size=10, **options):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.folder, self.lines = Path(folder), []
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = torch.zeros(size)
        self.start, stop = size * self.rank // ranks, size * (self.rank + 1) // ranks
        self.part = self.weight[self.start : stop]
        self.manager = CheckpointManager(self.folder, retention, run_id=run_id, tell=self.lines.append, **options)

    def snapshot(self):
        piece = Piece("model/a", tuple(self.weight.shape), self.start, self.part)
        return Snapshot([piece], {"scale": 2.0}, {"random": torch.tensor([self.rank])})

    def save(self, step, **options):
        self.weight.fill_(step)
        path = self.manager.save(step, {"state": {"step": step}}, self.snapshot, **options)
        self.weight.fill_(-1)  # the next update, while the thread writes
        return path

    def end(self):
        self.manager.finish()
        self.manager.close()
        return self.lines


def save_steps(folder, steps, retention, run_id="this run", asynchronous=True):
    job = Job(folder, retention, run_id, asynchronous=asynchronous)
    for step in steps:
        job.save(step)
        job.manager.poll()
    return job.end()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_holds_what_was_there_when_it_was_saved(tmp_path, asynchronous):
    assert run_ranks(save_steps, 3, tmp_path, [10, 20], Retention(1), "r", asynchronous) == [[]] * 3
    path = tmp_path / "step-00000020"
    assert problem_of(path, contents=True) is None
    reader = open_checkpoint(path)
    assert reader.facts == {"state": {"step": 20}, "shared": {"scale": 2.0}} and reader.manifest.run_id == "r"
    assert reader.read("model/a").tolist() == [20.0] * 10
    assert [reader.own(rank)["random"].tolist() for rank in range(3)] == [[0], [1], [2]]
    assert (tmp_path / "latest").read_text() == "step-00000020\n"
    assert names_in(tmp_path) == ["latest", "step-00000020"]


def test_the_newest_and_what_else_is_wanted_are_kept(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [900, 950, 1000, 1050, 1100], Retention(2))
    assert steps_in(tmp_path) == [1050, 1100]
    run_ranks(save_steps, 2, tmp_path / "more", [1, 2, 3, 4, 5, 6], Retention(1, 4, (1,)))
    assert steps_in(tmp_path / "more") == [1, 4, 6]


def test_another_runs_checkpoints_are_never_pruned(tmp_path):
    run_ranks(save_steps, 1, tmp_path, [1, 2], Retention(0), "another")
    run_ranks(save_steps, 1, tmp_path, [3, 4, 5], Retention(1))
    assert steps_in(tmp_path) == [1, 2, 5]


def test_higher_numbers_of_an_abandoned_run_are_set_aside_not_kept_for_new_ones(tmp_path):
    run_ranks(save_steps, 1, tmp_path, [4, 5000], Retention(0))
    run_ranks(save_steps, 1, tmp_path, [5, 6, 7], Retention(2))
    assert steps_in(tmp_path) == [6, 7]
    assert "abandoned-step-00005000" in names_in(tmp_path)
    assert (tmp_path / "latest").read_text() == "step-00000007\n"


def test_the_same_step_of_an_abandoned_run_is_replaced(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [4], Retention(0))
    run_ranks(save_steps, 1, tmp_path, [4], Retention(0))
    assert open_checkpoint(tmp_path / "step-00000004").world_size == 1  # no stale file of the other layout
    assert open_checkpoint(tmp_path / "abandoned-step-00000004").world_size == 2
    run_ranks(save_steps, 1, tmp_path, [4], Retention(0))  # of the same run: the older one goes
    assert open_checkpoint(tmp_path / "abandoned-step-00000004").world_size == 1
    run_ranks(save_steps, 1, tmp_path, [4], Retention(0), "another")
    run_ranks(save_steps, 1, tmp_path, [4], Retention(0), "a third")
    assert names_in(tmp_path)[:2] == ["abandoned-step-00000004", "abandoned-step-00000004-2"]


def only_start(folder):
    Job(folder)


def test_leftovers_of_a_killed_save_are_removed_at_the_start_and_nothing_else(tmp_path):
    (tmp_path / "partial-step-00000003" / "ranks").mkdir(parents=True)
    (tmp_path / "partial-notes").mkdir()
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "best.json.partial").touch()
    run_ranks(only_start, 2, tmp_path)
    assert names_in(tmp_path) == ["partial-notes", "step-00000002"]
    assert names_in(tmp_path / "step-00000002") == []


def mark_and_fail_to_name(folder):
    """Marked before it is published; then `best` cannot be written."""
    job = Job(folder)
    publishing = threading.Event()
    publish, manager_module.publish = manager_module.publish, lambda *args: (publishing.wait(), publish(*args))
    if job.rank == 0:
        (folder / "best.partial").mkdir()
    path = job.save(1)
    job.manager.mark_best(path, {"best_figure": 0.25})
    publishing.set()
    job.end()


def test_a_mark_that_came_before_is_published_with_the_checkpoint(tmp_path):
    run_ranks(mark_and_fail_to_name, 2, tmp_path)
    assert best_checkpoint(tmp_path) is None
    assert read_facts(tmp_path / "step-00000001")["state"] == {"step": 1, "best_figure": 0.25}


def save_twice(folder):
    job = Job(folder)
    paths = [job.save(1), job.save(1), job.save(1, wait=True), job.save(1)]
    assert paths == [folder / "step-00000001"] * 4
    inode = paths[0].stat().st_ino
    job.end()
    return inode == paths[0].stat().st_ino


def test_a_second_save_of_a_step_does_nothing(tmp_path):
    assert run_ranks(save_twice, 2, tmp_path) == [True, True]


def go_on(folder, resumed):
    job = Job(folder, Retention(1), resumed=resumed)
    before = resumed.stat().st_ino
    assert job.save(1, wait=True) == folder / "step-00000001"
    assert ((folder / "step-00000001").stat().st_ino == before) == (resumed.parent == folder)
    job.save(2)
    return job.end()


def test_the_one_that_the_run_goes_on_from_is_not_written_again(tmp_path):
    """A run that is stopped before its first update; another folder's checkpoint is not its own."""
    run_ranks(save_steps, 2, tmp_path / "a", [1], Retention(1))
    run_ranks(go_on, 2, tmp_path / "b", tmp_path / "a" / "step-00000001")
    assert names_in(tmp_path / "b") == ["latest", "step-00000002"]
    run_ranks(go_on, 2, tmp_path / "a", tmp_path / "a" / "step-00000001")
    assert names_in(tmp_path / "a") == ["latest", "step-00000002"]


def mark(folder):
    job = Job(folder, Retention(1))
    first = job.save(1)
    job.manager.mark_best(first, {"best_figure": 0.25})  # as a rule before it is published
    job.save(2)
    third = job.save(3, wait=True)
    assert steps_in(folder) == [1, 3]
    job.manager.mark_best(third, {"best_figure": 0.5})
    job.save(4)
    return job.end()


def test_the_best_one_is_kept_until_another_is(tmp_path):
    assert run_ranks(mark, 2, tmp_path) == [[], []]
    assert steps_in(tmp_path) == [3, 4]
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000003"
    assert read_facts(tmp_path / "step-00000003")["state"] == {"step": 3, "best_figure": 0.5}


def mark_in_vain(folder):
    job = Job(folder, Retention(1))
    first = job.save(1, wait=True)
    if job.rank == 0:
        (folder / "best.partial").mkdir()  # in the way
    job.manager.mark_best(first, {"best_figure": 0.25})
    job.save(2)  # tries again, in vain; keeps the first all the same
    job.manager.finish()
    if job.rank == 0:
        assert steps_in(folder) == [1, 2]
        (folder / "best.partial").rmdir()
    dist.barrier()
    job.save(3)
    return job.end()


def test_a_mark_that_cannot_be_written_is_told_and_tried_again(tmp_path):
    lines, others = run_ranks(mark_in_vain, 2, tmp_path)
    assert [line[:55] for line in lines] == ["warning: checkpoints/best cannot name step-00000001 yet"] * 2
    assert others == []
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000001" and steps_in(tmp_path) == [1, 3]


# ---------------------------------------------------------------- failures


FAILURES = {
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "broken": OSError(errno.EIO, "Input/output error"),
    "odd": RuntimeError("many\nlines " + "ü\x07" * 9000),
}


def names_after(job):
    """What is in the folder when the write has ended on all ranks."""
    job.manager._job.done.wait()
    dist.barrier()
    return names_in(job.folder)


class Breaking:
    """`write_rank` that fails on one rank while it is told to."""

    def __init__(self, rank, failure):
        self.rank, self.failure, self.broken = rank, FAILURES[failure], False
        self.real = writer.write_rank
        manager_module.write_rank = self

    def __call__(self, partial, rank, *args):
        if self.broken and rank == self.rank:
            (partial / "pieces" / "half").write_bytes(b"x" * 100)
            raise self.failure
        return self.real(partial, rank, *args)


def save_with_failure(folder, failing_rank, failure):
    job, breaking = Job(folder), Breaking(failing_rank, failure)
    job.save(1)
    job.manager.finish()
    breaking.broken = True
    job.save(2)
    names = names_after(job)
    for _ in range(2):
        job.manager.poll()
    dist.barrier()
    breaking.broken = False
    job.save(3)
    return job.end(), names


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_on_one_rank_is_told_to_all_once_and_the_next_save_tries_again(tmp_path, failing_rank, failure):
    for lines, names in run_ranks(save_with_failure, 2, tmp_path, failing_rank, failure):
        assert len(lines) == 1 and len(lines[0]) < 1300 and "\n" not in lines[0]
        reason = " ".join(str(FAILURES[failure]).split())[:60]
        assert lines[0].startswith(f"checkpoint step 2 could not be written: rank {failing_rank}: {reason}")
        assert lines[0].endswith("; the previous ones are intact; trying again at the next checkpoint")
        assert names == ["latest", "step-00000001"]  # the partial folder has made room
    assert steps_in(tmp_path) == [1, 3]


def fail_twice(folder, asynchronous):
    job, breaking = Job(folder, asynchronous=asynchronous), Breaking(1, "full")
    job.save(1)
    job.manager.finish()
    breaking.broken = True
    job.save(2)
    words = r"step-00000003 could not be written \(rank 1: .*No space left"
    with pytest.raises(CheckpointError, match=words) as caught:
        job.save(3)
        assert asynchronous  # else the call before has raised
        job.save(4)
    assert caught.value.on_all_ranks
    with pytest.raises(CheckpointError, match="step-00000003"):
        job.manager.finish()
    breaking.broken = False
    job.save(4, wait=True)
    return job.end()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_second_failure_in_a_row_ends_the_run_on_all_ranks(tmp_path, asynchronous):
    for lines in run_ranks(fail_twice, 2, tmp_path, asynchronous):
        assert [line[:17] for line in lines] == ["checkpoint step 2"]  # the other is in the error
    assert steps_in(tmp_path) == [1, 4]


def fail_when_waited_for(folder):
    job, breaking = Job(folder), Breaking(1, "full")
    breaking.broken = True
    job.save(1)
    breaking.broken = False
    job.save(1, wait=True)  # the one in the background has failed
    assert steps_in(folder) == [1]
    dist.barrier()
    breaking.broken = True
    with pytest.raises(CheckpointError, match="step-00000002 could not be written"):
        job.save(2, wait=True)
    breaking.broken = False
    job.save(3)
    job.save(4)
    job.manager.finish()
    breaking.broken = True
    job.save(5)
    with pytest.raises(CheckpointError, match="step-00000005"):
        job.manager.finish()


def test_one_that_is_waited_for_is_written_or_an_error(tmp_path):
    run_ranks(fail_when_waited_for, 2, tmp_path)
    assert steps_in(tmp_path) == [3, 4]


def publish_fails(folder, name):
    job = Job(folder)
    job.save(1, wait=True)
    kept = getattr(os, name)

    def full(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    if job.rank == 0:
        setattr(os, name, full)
    try:
        with pytest.raises(CheckpointError, match="rank 0: .*Input/output error"):
            job.save(2, wait=True)
    finally:
        setattr(os, name, kept)
    dist.barrier()
    return names_in(folder)


@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir"])
def test_a_failure_while_publishing_is_told_to_all(tmp_path, name):
    assert run_ranks(publish_fails, 2, tmp_path, name) == [["latest", "step-00000001"]] * 2


def cannot_stage(folder):
    job = Job(folder)
    if job.rank == 1:
        job.part = job.part.to(torch.complex64)  # no checkpoint has it
    with pytest.raises(CheckpointError, match="rank 1: KeyError"):
        job.save(1, wait=True)
    return names_in(folder) if folder.exists() else []


def test_a_rank_that_cannot_copy_its_part_is_told_to_all(tmp_path):
    assert run_ranks(cannot_stage, 2, tmp_path) == [[], []]


def after_the_rename(folder):
    job = Job(folder, Retention(1))
    job.save(1, wait=True)
    if job.rank == 0:
        (folder / "latest.partial").mkdir()
    job.save(2, wait=True)
    return job.end()


def test_what_fails_after_the_rename_costs_no_checkpoint(tmp_path):
    lines, _ = run_ranks(after_the_rename, 2, tmp_path)
    assert len(lines) == 1 and lines[0].startswith("warning: checkpoint step 2 is written, but ")
    assert steps_in(tmp_path) == [1, 2]


def without_shared_storage(folder, there):
    """Each rank writes on a disk of its own, as hosts without a shared file system do."""
    job = Job(folder / os.environ["RANK"])
    if job.rank and there:
        (job.folder / "partial-step-00000001" / "pieces").mkdir(parents=True)
        (job.folder / "partial-step-00000001" / "ranks").mkdir()
    words = r"files of ranks \[1\] are not in " if there else "is not there: "
    with pytest.raises(CheckpointError, match=f"{words}.*--output must be on storage shared by all hosts"):
        job.save(1, wait=True)


@pytest.mark.parametrize("there", [True, False])
def test_hosts_without_shared_storage_are_found_out(tmp_path, there):
    run_ranks(without_shared_storage, 2, tmp_path, there)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill_disk(folder, unnoticed):
    if unnoticed:
        manager_module.lacking = lambda folder, needed: None  # as a quota, or another writer, would go unseen
    job = Job(folder / "checkpoints", Retention(1), size=150_000)
    job.save(1)
    job.manager.finish()
    if job.rank == 0:
        (folder / "other").write_bytes(b"x" * 1_000_000)
    dist.barrier()
    job.save(2)
    names = names_after(job)
    job.manager.poll()
    dist.barrier()
    if job.rank == 0:
        (folder / "other").unlink()
    dist.barrier()
    job.save(3)
    return job.end(), names


@pytest.mark.parametrize("unnoticed", [False, True])
def test_a_full_disk_leaves_the_run_and_the_checkpoint_before(small_disk, unnoticed):
    for lines, names in run_ranks(fill_disk, 2, small_disk, unnoticed):
        assert len(lines) == 1 and names == ["latest", "step-00000001"]
        assert ("No space left on device" if unnoticed else "rank 0: no room: it takes 67") in lines[0]
    assert steps_in(small_disk / "checkpoints") == [3]
    assert problem_of(small_disk / "checkpoints" / step_folder(3), contents=True) is None


def ask_for_room(folder, own_bytes):
    folder.mkdir(exist_ok=True)
    job = Job(folder)
    job.manager.check_room(own_bytes)
    return job.lines


def test_room_is_asked_for_at_the_start_for_all_ranks_together(small_disk):
    assert run_ranks(ask_for_room, 2, small_disk / "checkpoints", 200_000) == [[], []]
    lines, others = run_ranks(ask_for_room, 2, small_disk / "checkpoints", 500_000)
    assert len(lines) == 1 and "room for 1 more checkpoints" in lines[0] and others == []
    with pytest.raises(ConfigError, match=r"there is no room for a checkpoint: it takes 2.3 MB") as caught:
        run_ranks(ask_for_room, 2, small_disk / "checkpoints", 1_100_000)
    assert caught.value.on_all_ranks


# ---------------------------------------------------------------- while it is written


def hold(gate):
    real = manager_module.write_rank

    def waiting(*args):
        gate.wait()
        return real(*args)

    manager_module.write_rank = waiting


def wait_for_the_one_before(folder):
    job, gate = Job(folder), threading.Event()
    hold(gate)
    first = job.save(1)
    job.manager.poll()
    assert not first.exists() and job.lines == []  # training goes on
    threading.Timer(1.2, gate.set).start()
    job.save(2)
    assert problem_of(first, contents=True) is None
    return job.end()


def test_a_save_waits_for_the_one_before_and_says_so(tmp_path):
    for lines in run_ranks(wait_for_the_one_before, 2, tmp_path):
        assert len(lines) == 1
        assert lines[0].startswith("step 2: training waited 1.") and "checkpoint of step 1" in lines[0]


def change_once_copied(folder):
    """As a backend has it: what `save` leaves to be copied may change when the wait is over."""
    job, go, waits = Job(folder), threading.Event(), []
    job.manager.check_room(100, reserve=True)
    real = job.manager._staging.fill
    job.manager._staging.fill = lambda planned: (go.wait(), real(planned))[1]

    def snapshot():
        return replace(job.snapshot(), before_change=waits.append)

    job.weight.fill_(1)
    path = job.manager.save(1, {"state": {"step": 1}}, snapshot)
    job.manager.poll()
    [wait] = waits
    threading.Timer(0.3, go.set).start()
    begin = time.monotonic()
    wait()
    waited = time.monotonic() - begin
    job.weight.fill_(-1)
    assert wait() is True  # there is nothing left to wait for
    job.end()
    return waited, open_checkpoint(path).read("model/a").tolist()


def test_what_is_copied_while_training_goes_on_is_waited_for_before_it_changes(tmp_path):
    for waited, values in run_ranks(change_once_copied, 2, tmp_path):
        assert waited > 0.2 and values == [1.0] * 10


def fail_to_copy(folder):
    job, waits = Job(folder), []
    if job.rank == 1:
        job.manager._staging.fill = lambda planned: 1 / 0
    job.manager.save(1, {}, lambda: replace(job.snapshot(), before_change=waits.append))
    waits[0]()  # does not wait for ever
    with pytest.raises(CheckpointError, match="rank 1: ZeroDivisionError"):
        job.manager.finish()


def test_a_copy_that_fails_in_the_background_is_told_to_all(tmp_path):
    run_ranks(fail_to_copy, 2, tmp_path)


def die_while_writing(folder, how):
    job = Job(folder)
    job.save(1, wait=True)
    if job.rank == 1:
        manager_module.write_rank = lambda *args: os._exit(9) if how == "dies" else time.sleep(600)
    job.save(2)
    if job.rank == 1:
        time.sleep(3)
        os._exit(9)
    begin = time.monotonic()
    if how == "dies":
        with pytest.raises(RuntimeError, match="(?i)connection"):
            job.manager.finish()
    job.manager.close(patience_s=0.2)
    assert time.monotonic() - begin < 3
    (folder / "closed").touch()


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_lost_while_it_writes_holds_nobody_up(tmp_path, how):
    with pytest.raises(RankFailed, match="exit code 9"):
        run_ranks(die_while_writing, 2, tmp_path, how)
    if how == "hangs":
        assert (tmp_path / "closed").exists()
    assert steps_in(tmp_path) == [1]
    run_ranks(save_steps, 2, tmp_path, [2], Retention(2))
    assert names_in(tmp_path)[-2:] == ["step-00000001", "step-00000002"]


def fail_elsewhere(folder):
    job = Job(folder)
    job.save(1)
    job.manager.close()


def test_closing_lets_a_write_under_way_end(tmp_path):
    run_ranks(fail_elsewhere, 2, tmp_path)
    assert steps_in(tmp_path) == [1]
