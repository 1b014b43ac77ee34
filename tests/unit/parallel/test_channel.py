"""The shared memory of a channel: waiting for a rank that is late, gone, or never comes."""

import copy
import mmap
import os
import subprocess
import sys
import threading

import pytest
import torch

from largetrain.parallel import channel
from largetrain.parallel.channel import LINE, LONGEST, Channel, _make_file, _map, _Memory


def memory_of(ranks: int) -> mmap.mmap:
    return mmap.mmap(-1, 8 * LINE * ranks + 8 * 2 * ranks * LONGEST)


def test_ranks_get_the_rows_of_the_same_step(monkeypatch):
    """Two threads as ranks, one of them late now and then: 50 steps, each with the rows of that step."""
    monkeypatch.setattr(channel, "ACTIVE_S", 0.001)
    memory = memory_of(2)
    ranks = [_Memory(memory, rank, [os.getpid()] * 2, timeout_s=10) for rank in (0, 1)]
    got: list[list[list]] = [[], []]

    def work(rank: int) -> None:
        for step in range(50):
            if rank == step % 7 == 1:
                threading.Event().wait(0.005)
            pieces = torch.tensor([step]), torch.full((2,), 100.0 * rank + step)
            got[rank].append(ranks[rank].gather(pieces, 3).tolist())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for rows in got:
        assert rows == [[[step, step, step], [step, 100 + step, 100 + step]] for step in range(50)]


def test_a_rank_that_has_ended_is_named(monkeypatch):
    monkeypatch.setattr(channel, "CHECK_S", 0.0)
    monkeypatch.setattr(channel, "ACTIVE_S", 0.0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(RuntimeError, match=f"rank 1 of the batch-norm group .process {ended.pid}. has ended"):
        _Memory(memory_of(2), 0, [os.getpid(), ended.pid], timeout_s=60).gather((torch.zeros(3),), 3)


def test_a_rank_that_never_comes_ends_the_wait(monkeypatch):
    monkeypatch.setattr(channel, "CHECK_S", 0.0)
    monkeypatch.setattr(channel, "ACTIVE_S", 0.0)
    with pytest.raises(RuntimeError, match="rank 1 of the batch-norm group did not come"):
        _Memory(memory_of(2), 0, [os.getpid()] * 2, timeout_s=0.01).gather((torch.zeros(3),), 3)


def test_a_full_or_missing_shared_memory_is_not_used(monkeypatch, tmp_path):
    """Then the ranks exchange through gloo."""
    monkeypatch.setattr(channel, "SHM", tmp_path / "absent")
    assert _make_file(4096) is None
    monkeypatch.setattr(channel, "SHM", tmp_path)
    monkeypatch.setattr(channel.os, "posix_fallocate", lambda *args: (_ for _ in ()).throw(OSError("full")))
    assert _make_file(4096) is None and not list(tmp_path.iterdir())
    assert _map(str(tmp_path / "of another host"), 4096) is None


def test_copies_are_the_channel():
    one = Channel(None)
    assert copy.copy(one) is one and copy.deepcopy([one])[0] is one
    assert one.ranks == 1  # without a process group
