"""Runs a function on several ranks of one host, quickly: the harness of the distributed tests.

A rank is forked from a server process that has imported torch and deepspeed once (multiprocessing's
"forkserver"), so that a case of two ranks takes well under a second instead of two imports of five. The pytest
process itself is not forked: once it has run a backward pass or an OpenMP region, torch refuses or hangs in its
children, and unit tests do both. The server never computes, so it stays single-threaded and safe to fork.

Functions and arguments travel by pickle: the function must be defined at the top of a module. Ranks run on the
CPU, also on a machine with GPUs: asking for a CUDA device in the server would spoil it for its children.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

PRELOAD = [  # with what deepspeed.initialize and torch.optim import when they are first used (3 s per rank)
    *("numpy", "pytest", "torch", "torch.distributed", "torch.utils.cpp_extension", "torch.onnx"),
    *("torch._dynamo", "torch._inductor.compile_fx", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("torchvision.models.segmentation", "torchvision.transforms.v2"),
]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CPU_ONLY = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
SHM = Path("/dev/shm")
GRACE_S = 1.0  # between the deadline, at which a rank prints its stacks and ends itself, and the kill
ORPHAN_S = 15.0  # within which what a killed rank had started has to end
TAIL_LINES = 60  # of each rank's output in a failure message

_context = multiprocessing.get_context("forkserver")
_server_ready = False


class RankFailed(Exception):
    """A rank ended without a result, left something behind, or raised what cannot be pickled."""


class RankTimeout(RankFailed):
    """Ranks had not finished in time; the message has their names and stacks."""


class RankTraceback(Exception):
    """The cause of a re-raised exception: the traceback and the output of the ranks, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass
class _Rank:
    """One running rank: its process, the pipe of its report, the file of its output."""

    index: int
    process: Any
    pipe: connection.Connection
    log: Path
    report: tuple[str, Any, str] | None = None  # ("result", value, "") or ("error", exception or None, traceback)

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    def receive(self) -> None:
        """Take the report if there is one; a closed pipe is a rank that died without."""
        try:
            if self.report is None and self.pipe.poll():
                self.report = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            pass

    def failed(self) -> bool:
        """It raised, or ended without a result or with an exit code."""
        ended = self.ended  # before the pipe is read: a rank reports first and ends then
        self.receive()
        if self.report is not None and self.report[0] == "error":
            return True
        return ended and (self.report is None or self.process.exitcode != 0)


@dataclass
class _Job:
    """All ranks of one call."""

    deadline: float  # time.monotonic(), which all processes of a host share
    timeout_s: float
    ranks: list[_Rank] = field(default_factory=list)

    def output(self) -> str:
        """The end of every rank's output, headed by the rank."""
        parts = []
        for rank in self.ranks:
            lines = rank.log.read_text(errors="replace").splitlines() if rank.log.exists() else []
            if lines:
                parts.append(f"--- output of rank {rank.index} ---\n" + "\n".join(lines[-TAIL_LINES:]))
        return "\n".join(parts)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Call `fn(*args)` on every rank and return the results in rank order.

    Each rank sees the environment of this process, the variables of a launcher (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), no GPU and `env` on top, works in this process's current
    directory, and uses one thread. A process group that `fn` leaves open is destroyed after it returns.
    Building a C++ op is an error.

    Args:
        fn: defined at the top of a module; what it returns must be picklable. CPU tensors are fine.
        world_size: ranks to start.
        args: the same for all ranks; picklable.
        timeout: seconds for all ranks together, start-up of the server not counted.
        env: extra environment variables.

    Raises:
        BaseException: what the first failing rank raised, with that rank's traceback as its cause.
        RankFailed: a rank ended without a result, or shared memory was left behind.
        RankTimeout: not all ranks had finished in time.
    """
    _start_server()
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _reserved_port() as port:
        job = _Job(time.monotonic() + timeout, timeout)
        try:
            _start_all(job, payload, world_size, port, env or {}, Path(folder))
            failed = _wait(job)
            ended_at = time.monotonic()
        finally:
            _kill(job.ranks)
        leaked = _remove_leaked_buffers(port)
        _raise_failure(job, failed, ended_at)
        if leaked:
            raise RankFailed(f"left behind in {SHM}: {', '.join(leaked)}\n{job.output()}")
        if "PYTEST_CURRENT_TEST" in os.environ:
            sys.stdout.write(job.output())  # shown when the test fails later
        return [rank.report[1] for rank in job.ranks if rank.report]


@dataclass
class RankEnd:
    """How a rank ended by itself."""

    code: int | None
    """Exit code, or minus the signal; None: it had not ended in time."""
    output: str
    after_s: float
    """Since the first rank's end."""
    result: Any = None
    error: str | None = None
    """The traceback of what it raised."""


def let_ranks_end(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, env: Mapping[str, str] | None = None
) -> list[RankEnd]:
    """As `run_ranks`, for ranks of which some are killed: waits until each has ended by itself, and judges none.

    Raises:
        RankFailed: shared memory, or a process that a rank had started, was left behind.
    """
    _start_server()
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _reserved_port() as port:
        job = _Job(time.monotonic() + timeout, timeout)
        try:
            _start_all(job, payload, world_size, port, env or {}, Path(folder))
            ended_at = _ends(job)
            left = _groups_left([rank for rank in job.ranks if rank.index in ended_at])
        finally:
            _kill(job.ranks)
        left += _remove_leaked_buffers(port)
        if left:
            raise RankFailed(f"left behind: {', '.join(left)}\n{job.output()}")
        first = min(ended_at.values(), default=time.monotonic())
        ends = []
        for rank in job.ranks:
            code = rank.process.exitcode if rank.index in ended_at else None
            output = rank.log.read_text(errors="replace") if rank.log.exists() else ""
            end = RankEnd(code, output, ended_at.get(rank.index, time.monotonic()) - first)
            if rank.report is not None and rank.report[0] == "error":
                end.error = rank.report[2]
            elif rank.report is not None:
                end.result = rank.report[1]
            ends.append(end)
        return ends


def _ends(job: _Job) -> dict[int, float]:
    """When each rank ended, of those that do before the deadline; `time.monotonic()`."""
    ended_at: dict[int, float] = {}
    while len(ended_at) < len(job.ranks) and time.monotonic() < job.deadline:
        for rank in job.ranks:
            ended = rank.ended
            rank.receive()
            if ended:
                ended_at.setdefault(rank.index, time.monotonic())
        time.sleep(0.01)
    return ended_at


def _groups_left(ranks: Sequence[_Rank]) -> list[str]:
    """Ranks that have ended, but not all that they started; a data loader's process looks for its parent every 5 s."""
    deadline = time.monotonic() + ORPHAN_S
    while left := [rank for rank in ranks if _has_group(rank.process.pid)]:
        if time.monotonic() > deadline:
            return [f"processes of rank {rank.index}" for rank in left]
        time.sleep(0.05)
    return []


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _start_server() -> None:
    """Start the fork server and wait for its imports, once per process."""
    global _server_ready
    if _server_ready:
        return
    before = dict(os.environ)
    os.environ.update(ONE_THREAD | CPU_ONLY)  # read when torch, numpy and deepspeed are imported
    try:
        _context.set_forkserver_preload(PRELOAD)
        probe = _context.Process(target=int)
        probe.start()
        probe.join()
    finally:
        os.environ.clear()
        os.environ.update(before)
    _server_ready = True


@contextmanager
def _reserved_port():
    """Yield a TCP port that nobody else gets while the block runs.

    The socket is bound but does not listen: with SO_REUSEADDR on both sides rank 0's store may still bind the port
    and listen on it, while the kernel gives it to no process that asks for a free one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def _environment(rank: int, world_size: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of one rank, as a launcher would make it."""
    launcher = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **CPU_ONLY,
    }
    if Path("/sys/class/net/lo").exists():
        launcher["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name may resolve to an address that nobody serves
    return {**os.environ, **ONE_THREAD, **launcher, **extra}


def _start_all(job: _Job, payload: bytes, world_size: int, port: int, env: Mapping[str, str], folder: Path) -> None:
    for index in range(world_size):
        variables = _environment(index, world_size, port, env)
        job.ranks.append(_start(index, payload, variables, job.deadline, folder))


def _start(index: int, payload: bytes, variables: dict[str, str], deadline: float, folder: Path) -> _Rank:
    receiver, sender = _context.Pipe(duplex=False)
    log = folder / f"rank{index}.log"
    process = _context.Process(
        target=_rank_main, args=(payload, variables, deadline, str(log), os.getcwd(), sender), name=f"rank {index}"
    )
    process.start()
    sender.close()  # so that the death of the rank closes the pipe
    return _Rank(index, process, receiver, log)


def _wait(job: _Job) -> list[_Rank]:
    """Return when all ranks have ended, when one has failed, or some time after the deadline.

    Returns:
        The ranks that had failed, or not finished, by themselves: nothing has been killed yet.
    """
    while True:
        # In this order: a rank that is not pending had ended before it is asked whether it failed.
        pending = [rank for rank in job.ranks if not rank.ended]
        failed = [rank for rank in job.ranks if rank.failed()]
        if failed and (time.monotonic() < job.deadline or any(rank.report for rank in failed)):
            return failed
        left_s = job.deadline + GRACE_S - time.monotonic()
        if not pending or left_s <= 0:
            return [*failed, *(rank for rank in pending if rank not in failed)]
        pipes = [rank.pipe for rank in pending if rank.report is None]
        connection.wait([*pipes, *(rank.process.sentinel for rank in pending)], timeout=left_s)


def _kill(ranks: Sequence[_Rank]) -> None:
    """End every rank with all processes that it started; return when they are gone."""
    for rank in ranks:
        try:
            os.killpg(rank.process.pid, signal.SIGKILL)  # also what a rank that has ended may have left
        except ProcessLookupError:
            if not rank.ended:
                rank.process.kill()  # so young that it leads no group yet
    for rank in ranks:
        rank.process.join()
        rank.pipe.close()


def _raise_failure(job: _Job, failed: Sequence[_Rank], ended_at: float) -> None:
    """Raise for the ranks that failed, if any: the first one's own exception where that can travel."""
    if not failed:
        return
    for rank in failed:
        if rank.report is not None and rank.report[0] == "error":
            _, error, text = rank.report
            story = f"rank {rank.index} of {len(job.ranks)} failed:\n{text}\n{job.output()}"
            if error is None:
                raise RankFailed(story)
            raise error from RankTraceback(story)
    if ended_at >= job.deadline:
        states = ", ".join(f"rank {r.index}{' (had returned, but did not exit)' if r.report else ''}" for r in failed)
        raise RankTimeout(f"not finished after {job.timeout_s:g} s: {states}\n{job.output()}")
    rank = failed[0]
    raise RankFailed(f"rank {rank.index} ended with {_exit_text(rank.process.exitcode)}\n{job.output()}")


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _remove_leaked_buffers(port: int) -> list[str]:
    """Remove what DeepSpeed's shared-memory op left for this port, and name it."""
    leaked = sorted(SHM.glob(f"deepspeed_allreduce_buffer_*_{port}_*")) if SHM.is_dir() else []
    for path in leaked:
        path.unlink()
    return [path.name for path in leaked]


# ---------------------------------------------------------------- what runs in a rank


def _rank_main(payload: bytes, variables: dict[str, str], deadline: float, log: str, folder: str, pipe) -> None:
    """Body of a rank: run the function, send the report, end."""
    os.setsid()  # a group of its own, killed as a whole
    _redirect_output(log)
    # Prints all stacks and ends the rank, even when the process that started it is gone.
    faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.01), exit=True, file=sys.stderr)
    try:
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        _prepare_torch()
        fn, args = pickle.loads(payload)
        report = pickle.dumps(("result", fn(*args), ""))
        _close_group()
    except BaseException as error:  # noqa: BLE001 (all of them travel to the parent)
        traceback.print_exc()
        pipe.send_bytes(_error_report(error))
        sys.stderr.flush()
        os._exit(1)  # peers and loader workers are ended by the parent
    pipe.send_bytes(report)


def _redirect_output(log: str) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    # The server's own stream objects may belong to a closed terminal: make new ones on the same descriptors.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="replace")


def _prepare_torch() -> None:
    import torch
    from torch.utils import cpp_extension

    torch.set_num_threads(1)
    load = cpp_extension.load

    def load_only_built(name: str, sources: Any, build_directory: str | None = None, **kwargs: Any) -> Any:
        """Load an op that exists already; building one inside a test would take minutes."""
        directory = build_directory or cpp_extension._get_build_directory(name, verbose=False)
        if not (Path(directory) / f"{name}.so").exists():
            raise RuntimeError(f"this test would compile the C++ op {name!r}")
        return load(name, sources, build_directory=build_directory, **kwargs)

    cpp_extension.load = load_only_built


def _close_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _error_report(error: BaseException) -> bytes:
    """The pickled report of an exception; without the exception itself if it does not survive a round trip."""
    text = traceback.format_exc()
    if isinstance(error, SystemExit):  # would end the test run if it were raised there
        return pickle.dumps(("error", None, f"SystemExit: {error.code}\n{text}"))
    try:
        report = pickle.dumps(("error", error, text))
        pickle.loads(report)
    except Exception as reason:  # noqa: BLE001 (pickling runs code of any class)
        return pickle.dumps(("error", None, f"{text}\n(the exception could not be pickled: {reason!r})"))
    return report
