"""DeepSpeed's compiled operators: which of them training can use here, and compiling them ahead of time.

DeepSpeed compiles an operator when it is first used, silently, for minutes, and on every rank's critical path. Here
the same builders run up front in one worker process (`build_worker`), with a line for each result and a sign of life
in between. The results lie in torch's own cache folder, where DeepSpeed finds them (`OpBuilder.jit_load`, which is
`torch.utils.cpp_extension.load`).
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from largetrain.doctor.machine import available_memory_bytes, compile_jobs, environment_path
from largetrain.errors import LargetrainError

HEARTBEAT_S = 10.0
WORKER_COMMAND = (sys.executable, "-m", "largetrain.doctor.build_worker")


@dataclass(frozen=True)
class OpResult:
    """What became of one operator.

    `state`: `ready` (nothing to do), `compiled`, `stale` (not compiled, or outdated; only when checking), `unusable`
    (not for this machine, see `detail`), `failed` (see `detail`), `waiting` or `unlocked` (news on the way, no result).
    """

    name: str
    state: str
    detail: str = ""
    seconds: float = 0.0
    final: bool = True


def lock_holders(lock: Path, proc: Path = Path("/proc")) -> list[int]:
    """Processes (of those that we may look at) that have the lock file open."""
    holders = []
    for process in proc.iterdir():
        if process.name.isdigit() and _has_open(process / "fd", lock):
            holders.append(int(process.name))
    return holders


def _has_open(descriptors: Path, wanted: Path) -> bool:
    try:
        return any(os.readlink(entry) == str(wanted.resolve()) for entry in descriptors.iterdir())
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return False  # another user's process, or one that just ended: it cannot be told, and is not ours to wait for


def run_worker(
    names: Sequence[str],
    heartbeat: Callable[[str, float], None],
    *,
    build: bool = True,
    log: Path,
    heartbeat_s: float = HEARTBEAT_S,
    command: Sequence[str] = WORKER_COMMAND,
) -> Iterator[OpResult]:
    """Check or compile operators in a worker process; yields each one's result when it is there.

    Args:
        names: operators, or `["all"]` for what this machine's training can use, or `["common"]` for AdamW's.
        heartbeat: called with the operator in work ("" before the first) and its seconds so far.
        build: False only says what would be compiled.
        log: receives everything that the compiler and DeepSpeed print.
        heartbeat_s: time between two calls of `heartbeat`.
        command: the worker's command line (tests put another program here).

    Raises:
        LargetrainError: the worker died (out of memory, killed); the message names the log.
    """
    cores = len(os.sched_getaffinity(0))
    jobs = os.environ.get("MAX_JOBS") or str(compile_jobs(available_memory_bytes(), cores))
    environment = os.environ | {"PATH": environment_path(), "MAX_JOBS": jobs, "PYTHONUNBUFFERED": "1"}
    arguments = [*command, "build" if build else "check", *names]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        # a session of its own, so that ninja and the compilers end with the worker when this run is interrupted
        worker = subprocess.Popen(
            arguments, env=environment, stdout=subprocess.PIPE, stderr=output, start_new_session=True
        )
        try:
            yield from _results(worker, heartbeat, heartbeat_s)
        except BaseException:
            os.killpg(worker.pid, signal.SIGTERM)
            raise
        finally:
            worker.wait()
    if worker.returncode != 0:
        reason = f"signal {-worker.returncode}" if worker.returncode < 0 else f"exit code {worker.returncode}"
        raise LargetrainError(f"compiling DeepSpeed's operators ended with {reason}; see {log}")


def _results(
    worker: subprocess.Popen[bytes], heartbeat: Callable[[str, float], None], heartbeat_s: float
) -> Iterator[OpResult]:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    assert worker.stdout is not None
    threading.Thread(target=_pump, args=(worker.stdout, lines.put), daemon=True).start()
    current, since = "", time.monotonic()
    while True:
        try:
            line = lines.get(timeout=heartbeat_s)
        except queue.Empty:
            heartbeat(current, time.monotonic() - since)
            continue
        if not line:
            return
        message = json.loads(line)
        if message["state"] == "started":
            current, since = message["name"], time.monotonic()
        else:
            yield OpResult(**message)


def _pump(stream: Iterable[bytes], put: Callable[[bytes], None]) -> None:
    for line in stream:
        put(line)
    put(b"")
