"""The harness itself: results, failures, hangs, and what is left behind."""

import os
import subprocess
import sys
import time

import pytest

from tests import ranks
from tests.ranks import RankFailed, RankTimeout, RankTraceback, run_ranks


class Unpicklable(Exception):
    """Its constructor takes two arguments but hands on one, so that unpickling fails."""

    def __init__(self, first, second):
        super().__init__(first)


def identity():
    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), os.getcwd()


def init_gloo():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank()


def sum_of_ranks(scale):
    import torch
    import torch.distributed as dist

    rank = init_gloo()
    value = torch.full((3,), float(rank + 1) * scale)
    dist.all_reduce(value)
    return value


def fail_on(rank, exception):
    import torch
    import torch.distributed as dist

    print(f"output of {os.environ['RANK']}")
    if init_gloo() == rank:
        raise exception
    dist.all_reduce(torch.zeros(1))  # would wait for ever


def raise_unpicklable():
    raise Unpicklable("told", "untold")


def exit_on(rank, code):
    if int(os.environ["RANK"]) == rank:
        os._exit(code)
    time.sleep(60)


def system_exit():
    sys.exit(4)


def sleep_in_here(rank):
    if int(os.environ["RANK"]) == rank:
        time.sleep(60)
    return "done"


def leave_thread():
    import threading

    threading.Thread(target=time.sleep, args=(60,)).start()
    return "done"


def start_grandchild(rank):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if int(os.environ["RANK"]) == rank:
        raise ValueError(child.pid)
    time.sleep(60)


def leave_buffer():
    path = ranks.SHM / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{os.environ['MASTER_PORT']}_0"
    path.write_bytes(b"x")


def process_facts():
    import torch

    server = os.getppid()
    preloaded = {name for name in ("torch", "deepspeed") if name in sys.modules}
    return preloaded, len(os.listdir(f"/proc/{server}/task")), torch.get_num_threads(), os.environ["EXTRA"]


def backward():
    import torch

    weight = torch.ones(200, 200, requires_grad=True)
    (weight @ weight).sum().backward()
    return float(weight.grad[0, 0])


def compile_an_op(name):
    from torch.utils import cpp_extension

    cpp_extension.load(name, sources=[], build_directory="/nonexistent")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # a zombie still answers
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_results_come_in_rank_order():
    assert run_ranks(identity, 3) == [(rank, rank, 3, os.getcwd()) for rank in range(3)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_can_reduce(world_size):
    results = run_ranks(sum_of_ranks, world_size, 2.0)
    assert [result.tolist() for result in results] == [[world_size * (world_size + 1.0)] * 3] * world_size


def test_exception_of_one_rank_is_raised_here_and_ends_its_peers():
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^no good$") as caught:
        run_ranks(fail_on, 2, 1, ValueError("no good"))
    assert time.monotonic() - start < 20
    story = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "rank 1 of 2 failed" in story and "in fail_on" in story
    assert "output of 0" in story and "output of 1" in story


def test_exception_that_cannot_travel_is_told_as_text():
    with pytest.raises(RankFailed, match=r"rank 0 of 1 failed[\s\S]*Unpicklable: told"):
        run_ranks(raise_unpicklable, 1)


def test_exit_code_of_a_dead_rank_is_reported():
    with pytest.raises(RankFailed, match="rank 1 ended with exit code 3"):
        run_ranks(exit_on, 2, 1, 3)


def test_sys_exit_does_not_end_the_test_run():
    with pytest.raises(RankFailed, match="SystemExit: 4"):
        run_ranks(system_exit, 1)


def test_hang_is_ended_and_its_rank_and_stack_named():
    run_ranks(identity, 1)  # the server's start is not part of the time
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="not finished after 2 s: rank 1\n") as caught:
        run_ranks(sleep_in_here, 2, 1, timeout=2)
    assert 2 <= time.monotonic() - start < 10
    assert "sleep_in_here" in str(caught.value)


def test_rank_that_returned_but_does_not_exit_is_a_hang():
    with pytest.raises(RankTimeout, match=r"rank 0 \(had returned, but did not exit\)"):
        run_ranks(leave_thread, 1, timeout=2)


def test_processes_started_by_ranks_are_ended_too():
    with pytest.raises(ValueError) as caught:
        run_ranks(start_grandchild, 2, 0)
    pid = caught.value.args[0]
    end = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(pid)


@pytest.mark.skipif(not ranks.SHM.is_dir(), reason="no /dev/shm here")
def test_leaked_shared_memory_is_removed_and_reported():
    with pytest.raises(RankFailed, match="left behind in /dev/shm: deepspeed_allreduce_buffer") as caught:
        run_ranks(leave_buffer, 1)
    name = str(caught.value).splitlines()[0].rpartition(" ")[2]
    assert not (ranks.SHM / name).exists()


def test_server_has_imported_and_not_computed():
    preloaded, server_threads, threads, extra = run_ranks(process_facts, 1, env={"EXTRA": "yes"})[0]
    assert preloaded == {"torch", "deepspeed"}
    assert server_threads == 1  # forking a process with threads is what the server avoids
    assert (threads, extra) == (1, "yes")


def test_backward_works_in_ranks_after_a_backward_here():
    expected = backward()
    assert run_ranks(backward, 2) == [expected, expected]


def test_no_op_is_ever_compiled():
    with pytest.raises(RuntimeError, match="would compile the C\\+\\+ op 'fused_adam'"):
        run_ranks(compile_an_op, 1, "fused_adam")


def test_the_port_is_not_given_to_anyone_else():
    with ranks._reserved_port() as first, ranks._reserved_port() as second:
        assert first != second


def test_second_call_is_fast():
    run_ranks(identity, 2)
    start = time.monotonic()
    run_ranks(sum_of_ranks, 2, 1.0)
    assert time.monotonic() - start < 10  # two imports of torch and deepspeed take longer on a busy machine
