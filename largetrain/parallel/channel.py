"""Exchange of small vectors between the ranks of a group: the statistics of batch norms.

A ResNet-18 does this 40 times per update, each time waiting for all ranks. Through gloo every exchange wakes several
sleeping threads, 0.1 to 1 ms; ranks of one host that look at shared memory instead need 0.01 to 0.05 ms.
"""

import mmap
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST = 2 * 4096 + 2
"""Numbers that a rank may send through shared memory: the statistics of 4096 channels. Longer vectors take gloo."""
SHM = Path("/dev/shm")
SHARED_MEMORY = SHM.is_dir() and platform.machine() == "x86_64"
"""Other processors may show a peer the step count before the numbers that were written ahead of it."""
LINE = 8  # numbers in a cache line: each rank's step count has its own
ACTIVE_S = 0.05  # a waiting rank looks again and again for so long, then at intervals
INTERVAL_S = 0.0002
CHECK_S = 1.0  # how often a waiting rank looks whether the process that it waits for is still there


class Channel:
    """The ranks of a group, for exchanges of fp64 vectors on the CPU.

    A process group cannot be copied: copies of a channel are the channel. What connects the ranks is made in the
    first exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self._memory: _Memory | None = None
        self._tried = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks; all ranks where none was given."""
        group = self._group or dist.group.WORLD
        assert group is not None  # None only before the process group is made
        return group

    @property
    def ranks(self) -> int:
        """Their number; 1 without torch.distributed."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    def gather(self, *pieces: Tensor) -> Tensor:
        """What all ranks have given, as rows: [ranks, n]. A collective.

        Args:
            pieces: joined to a vector [n] of fp64 numbers; n is the same on all ranks.

        Returns:
            Rows in rank order, fp64; to be used before the next exchange, which may write over them.
        """
        length = sum(map(len, pieces))
        memory = self._connected()
        if memory is not None and length <= LONGEST:
            return memory.gather(pieces, length)
        local = torch.cat(pieces, out=torch.empty(length, dtype=torch.float64))
        rows = local.new_empty(self.ranks * length)
        dist.all_gather_single(rows, local, self.group)
        return rows.view(self.ranks, length)

    def _connected(self) -> "_Memory | None":
        if not self._tried:
            self._memory, self._tried = _connect(self.group), True
        return self._memory

    def __copy__(self) -> "Channel":
        return self

    def __deepcopy__(self, memo: dict) -> "Channel":
        return self


class _Memory:
    """Memory that all ranks of a group map: a step count per rank, and two sets of one row per rank.

    A rank writes its row, then its step count, and waits until the counts of all ranks have come to the same step.
    The rows of the step before lie in the other set: when a rank writes to a set again, every rank has counted the
    step after the one whose rows it held, so it has read them.
    """

    def __init__(self, memory: mmap.mmap, rank: int, process_ids: list[int], timeout_s: float):
        ranks = len(process_ids)
        self.steps = memoryview(memory)[: 8 * LINE * ranks].cast("q")
        self.rows = torch.frombuffer(memory, dtype=torch.float64, offset=8 * LINE * ranks).view(2, ranks, LONGEST)
        self.rank, self.process_ids, self.timeout_s = rank, process_ids, timeout_s
        self.step = 0
        self.views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        # More ranks than cores: the one that is waited for needs the core of the one that waits.
        self.active_s = ACTIVE_S if ranks <= (os.cpu_count() or 1) else INTERVAL_S

    def gather(self, pieces: tuple[Tensor, ...], length: int) -> Tensor:
        """The vectors of all ranks: [ranks, length], valid until the next call."""
        self.step += 1
        rows, own = self._views(self.step % 2, length)
        torch.cat(pieces, out=own)
        self.steps[LINE * self.rank] = self.step
        for peer in range(len(self.process_ids)):
            if self.steps[LINE * peer] < self.step:
                self._wait_for(peer)
        return rows

    def _views(self, which: int, length: int) -> tuple[Tensor, Tensor]:
        """The rows and the own row of a set: kept, since making a view takes as long as reading it."""
        if (which, length) not in self.views:
            rows = self.rows[which, :, :length]
            self.views[which, length] = rows, rows[self.rank]
        return self.views[which, length]

    def _wait_for(self, peer: int) -> None:
        begin = time.monotonic()
        checked = begin
        while self.steps[LINE * peer] < self.step:
            now = time.monotonic()
            if now - begin < self.active_s:
                os.sched_yield()
                continue
            time.sleep(INTERVAL_S)
            if now - checked > CHECK_S:
                checked = now
                self._check(peer, now - begin)

    def _check(self, peer: int, waited_s: float) -> None:
        """End the wait for a process that is gone, or that has been waited for too long."""
        if waited_s > self.timeout_s:
            raise RuntimeError(f"rank {peer} of the batch-norm group did not come to a batch norm for {waited_s:.0f} s")
        if not _runs(self.process_ids[peer]) and self.steps[LINE * peer] < self.step:
            raise RuntimeError(f"rank {peer} of the batch-norm group (process {self.process_ids[peer]}) has ended")


def _connect(group: dist.ProcessGroup) -> _Memory | None:
    """Map one memory on all ranks of the group; None on all of them if one cannot: they are on several hosts."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = 8 * LINE * ranks + 8 * 2 * ranks * LONGEST
    path = _make_file(size) if rank == 0 and SHARED_MEMORY else None
    try:
        message = [str(path) if path else None]
        dist.broadcast_object_list(message, group=group, group_src=0)
        memory = _map(message[0], size)
        answers: list[Any] = [None] * ranks
        dist.all_gather_object(answers, (memory is not None, os.getpid()), group=group)
        if memory is None or not all(mapped for mapped, _ in answers):
            return None
        process_ids = [process_id for _, process_id in answers]
        return _Memory(memory, rank, process_ids, _timeout_s(group))
    finally:
        if path:
            path.unlink()  # the memory goes with the last process that maps it


def _make_file(size: int) -> Path | None:
    try:
        descriptor, name = tempfile.mkstemp(prefix="largetrain-", dir=SHM)
    except OSError:
        return None
    path = Path(name)
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, since a full /dev/shm would kill the process later
    except OSError:
        path.unlink()
        return None
    finally:
        os.close(descriptor)
    return path


def _map(name: str | None, size: int) -> mmap.mmap | None:
    if not name or not SHARED_MEMORY:
        return None
    try:
        with open(name, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None


def _timeout_s(group: dist.ProcessGroup) -> float:
    """For how long a collective of this group waits."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _runs(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
