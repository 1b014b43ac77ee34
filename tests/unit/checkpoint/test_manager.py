"""Saving: written aside by all ranks, published by one rename, or not at all; all ranks hear of a failure on one."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from largetrain.checkpoint.folder import complete_checkpoints, problem_of, read_facts, read_rng, step_of
from largetrain.checkpoint.manager import CheckpointError, CheckpointManager
from tests.ranks import run_ranks


def steps_in(folder):
    return [step_of(path) for path in complete_checkpoints(folder)]


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def manager_on(folder, keep_last=2, write=None):
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def parts(directory):
        torch.save(torch.full((10,), rank), directory / f"part-{rank}.pt")

    return CheckpointManager(folder, keep_last, write or parts), rank


def save_steps(folder, steps, keep_last):
    manager, rank = manager_on(folder, keep_last)
    for step in steps:
        manager.save(step, {"step": step}, {"torch": torch.tensor([step, rank])})
    return names_in(folder)


def test_a_checkpoint_holds_every_ranks_files(tmp_path):
    run_ranks(save_steps, 3, tmp_path, [10], 2)
    path = tmp_path / "step-00000010"
    assert problem_of(path) is None
    assert read_facts(path) == {"step": 10}
    for rank in range(3):
        assert read_rng(path, rank)["torch"].tolist() == [10, rank]
        assert torch.load(path / f"part-{rank}.pt").tolist() == [rank] * 10
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    assert names_in(tmp_path) == ["latest", "step-00000010"]


def test_the_newest_are_kept_by_number(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [900, 950, 1000, 1050, 1100], 2)
    assert steps_in(tmp_path) == [1050, 1100]
    run_ranks(save_steps, 2, tmp_path / "one", [9, 10, 11], 1)
    assert steps_in(tmp_path / "one") == [11]


def test_zero_keeps_all(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [1, 2, 3], 0)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_higher_numbers_of_an_abandoned_run_are_set_aside_not_kept_for_new_ones(tmp_path):
    run_ranks(save_steps, 1, tmp_path, [4, 5000], 0)
    run_ranks(save_steps, 1, tmp_path, [5, 6, 7], 2)
    assert steps_in(tmp_path) == [6, 7]
    assert "abandoned-step-00005000" in names_in(tmp_path)
    assert (tmp_path / "latest").read_text() == "step-00000007\n"


def test_the_same_step_of_an_abandoned_run_is_replaced(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [4], 0)
    (tmp_path / "step-00000004" / "run.json").write_text('{"old": 1}')
    run_ranks(save_steps, 1, tmp_path, [4], 0)
    assert read_facts(tmp_path / "step-00000004") == {"step": 4}
    assert not (tmp_path / "step-00000004" / "part-1.pt").exists()  # no stale shard of the other layout
    assert (tmp_path / "abandoned-step-00000004" / "part-1.pt").exists()


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / "partial-step-00000003" / "rng").mkdir(parents=True)
    run_ranks(save_steps, 2, tmp_path, [5], 2)
    assert names_in(tmp_path) == ["latest", "step-00000005"]


def save_twice(folder):
    calls = []
    manager, _ = manager_on(folder, write=calls.append)
    first, second = (manager.save(1, {}, {}) for _ in range(2))
    assert first == second
    return len(calls)


def test_a_second_save_of_a_step_does_nothing(tmp_path):
    assert run_ranks(save_twice, 2, tmp_path) == [1, 1]


FAILURES = {
    "OSError": OSError(errno.ENOSPC, "No space left on device"),
    "RuntimeError": RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
}


def save_with_failure(folder, failing_rank, failure):
    broken = False

    def parts(directory):
        (directory / f"part-{rank}.pt").write_bytes(b"x" * 100)
        if broken and rank == failing_rank:
            raise FAILURES[failure]

    manager, rank = manager_on(folder, write=parts)
    manager.save(1, {}, {})
    broken = True
    with pytest.raises(CheckpointError) as caught:
        manager.save(2, {}, {})
    names = names_in(folder)
    dist.barrier()
    broken = False
    manager.save(3, {}, {})
    return str(caught.value), names


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_on_one_rank_is_told_to_all_and_earlier_checkpoints_stay(tmp_path, failing_rank, failure):
    results = run_ranks(save_with_failure, 2, tmp_path, failing_rank, failure)
    for message, _ in results:
        assert f"rank {failing_rank}: {FAILURES[failure]}" in message
        assert "step-00000002 could not be written" in message
        assert "Earlier checkpoints are intact" in message
    assert results[0][1] == ["latest", "step-00000001"]  # the partial folder has made room
    assert steps_in(tmp_path) == [1, 3]


def publish_fails(folder, name):
    manager, rank = manager_on(folder)
    manager.save(1, {}, {})
    kept = getattr(os, name)

    def full(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    setattr(os, name, full)  # rank 1 does not publish: only rank 0 meets it
    try:
        with pytest.raises(CheckpointError, match="rank 0: .*Input/output error"):
            manager.save(2, {}, {})
    finally:
        setattr(os, name, kept)
    return rank


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_failure_while_publishing_is_told_to_all(tmp_path, name):
    run_ranks(publish_fails, 2, tmp_path, name)
    assert steps_in(tmp_path) == [1]


def without_shared_storage(folder):
    """Each rank writes on a disk of its own, as hosts without a shared file system do."""
    rank = int(os.environ["RANK"])
    manager, _ = manager_on(folder / str(rank))
    if rank:
        (folder / str(rank) / "partial-step-00000001" / "rng").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"files of ranks \[1\] are not in .*shared by all hosts"):
        manager.save(1, {}, {})


def test_hosts_without_shared_storage_are_found_out(tmp_path):
    run_ranks(without_shared_storage, 2, tmp_path)


def die_while_saving(folder):
    def parts(directory):
        (directory / f"part-{rank}.pt").write_bytes(b"x" * 100)
        if dying and rank == 1:
            os._exit(9)

    dying = False
    manager, rank = manager_on(folder, write=parts)
    manager.save(1, {}, {})
    dying = True
    manager.save(2, {}, {})


def test_a_rank_killed_while_saving_leaves_the_earlier_checkpoint(tmp_path):
    from tests.ranks import RankFailed

    with pytest.raises((RankFailed, RuntimeError)):
        run_ranks(die_while_saving, 2, tmp_path)
    assert steps_in(tmp_path) == [1]
    run_ranks(save_steps, 2, tmp_path, [2], 2)
    assert steps_in(tmp_path) == [1, 2]
