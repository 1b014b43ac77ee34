"""Start one program the way a user types it, watch it, clean up after it, and read what it reports."""

import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOOK_EVERY_S = 0.5


class LaunchError(Exception):
    """A program failed or took too long; the message ends with its last lines of output."""


@dataclass(frozen=True)
class Launched:
    """What was seen of a launch from outside."""

    started: float
    """Wall-clock time."""
    seconds: float
    """Until the launcher was gone."""
    cpu_s: float
    """Processor time of all its processes."""
    leftovers: tuple[int, ...]
    """Bytes of each file that it left in shared memory."""


@dataclass(frozen=True)
class Outcome:
    """One launch: seconds from starting the launcher, bytes."""

    first_update_s: float
    """Until rank 0 finished the first update."""
    total_s: float
    """Until the launcher was gone."""
    cpu_s: float
    """Processor time of launcher and ranks, start and end included; on a busy machine it says more than the rest."""
    tokens_per_s: float
    """Over the updates after the first `warm` ones, all ranks together."""
    step_s: float
    """Seconds per update, over the same updates."""
    peak_bytes: int
    """Of the rank that used most."""
    leftover_bytes: int
    """Left behind in shared memory, and removed by the benchmark."""
    leftovers: int
    """Number of those files."""
    first_loss: float
    """Of the first update, in nats per token: the same model before it has learnt anything."""


def free_port() -> int:
    """A port for the rendezvous; its number also marks the shared-memory files of the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session_processes(session: int, proc: Path = Path("/proc")) -> list[int]:
    """Live processes of a session: a launcher started as its leader, and all that it started."""
    members = []
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def mapped_shared_memory(pids: Sequence[int], proc: Path = Path("/proc")) -> set[Path]:
    """Files in shared memory that any of the processes has mapped."""
    found: set[Path] = set()
    for pid in pids:
        try:
            maps = (proc / str(pid) / "maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line)
        found.update(Path(path.removesuffix(" (deleted)")) for path in paths)
    return found


def run_watched(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, limit_s: float
) -> tuple[float, float, set[Path]]:
    """Run a command in a session of its own, output to folder/output.txt; nothing of it survives this call.

    Returns:
        wall-clock time at its start, seconds until its end, and the shared-memory files that its processes mapped.

    Raises:
        LaunchError: exit code other than 0, or still running after `limit_s`.
    """
    output = folder / "output.txt"
    mapped: set[Path] = set()
    with open(output, "wb") as sink:
        started, clock = time.time(), time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - clock < limit_s:
                mapped |= mapped_shared_memory(session_processes(process.pid))
                try:
                    process.wait(LOOK_EVERY_S)
                except subprocess.TimeoutExpired:
                    continue
            seconds, late = time.monotonic() - clock, process.poll() is None
        finally:
            _end_session(process.pid)
            process.wait()
    if late or process.returncode:
        reason = f"still running after {limit_s:.0f} s" if late else f"exit code {process.returncode}"
        tail = output.read_text(errors="replace")[-1500:]
        raise LaunchError(f"{' '.join(command)}: {reason}\n{tail}")
    return started, seconds, mapped


def _end_session(session: int) -> None:
    """Kill every process of a session, and wait until they are gone: orphans disappear a little later."""
    while members := session_processes(session):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_leftovers(before: set[Path], mapped: set[Path], port: int) -> list[int]:
    """Remove files of one run from shared memory; returns their sizes in bytes.

    A file belongs to the run if it was not there before and the run's processes mapped it, or DeepSpeed named it after
    the run's port (which nobody else has used meanwhile).
    """
    sizes = []
    for path in sorted(set(SHARED_MEMORY.iterdir()) - before):
        of_port = path.name.startswith("deepspeed_") and f"_{port}_" in path.name
        if path in mapped or of_port:
            sizes.append(path.stat().st_size)
            path.unlink()
    return sizes


def launch(command: Sequence[str], environment: Mapping[str, str], folder: Path, limit_s: float, port: int) -> Launched:
    """`run_watched`, then clear the shared memory of what it left, also after a failure."""
    cpu_before = _cpu_of_children_s()
    before, mapped = set(SHARED_MEMORY.iterdir()), set[Path]()
    try:
        started, seconds, mapped = run_watched(command, environment, folder, limit_s)
    finally:
        sizes = remove_leftovers(before, mapped, port)
    return Launched(started, seconds, _cpu_of_children_s() - cpu_before, tuple(sizes))


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ranks_report(folder: Path) -> tuple[list[float], int, float]:
    """Times of rank 0's updates, the greatest peak memory, and the first loss, from what `Meter` wrote."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return reports[0]["times"], max(r["peak_bytes"] for r in reports), reports[0]["losses"]["1"]


def largetrain_report(folder: Path) -> tuple[list[float], int, float]:
    """The same from largetrain's metrics file."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    return [row["time"] for row in rows], max(rows[-1]["memory_bytes"]), rows[0]["loss"]


def outcome(
    report: tuple[list[float], int, float],
    launched: Launched,
    tokens_per_update: int,
    warm: int,
) -> Outcome:
    """Put together what a program reported and what was seen from outside.

    Args:
        report: times of updates, peak bytes, first loss.
        launched: what was seen from outside.
        tokens_per_update: over all ranks.
        warm: updates at the beginning that do not count for the rate.
    """
    times, peak, loss = report
    step_s = (times[-1] - times[warm - 1]) / (len(times) - warm)
    return Outcome(
        first_update_s=times[0] - launched.started,
        total_s=launched.seconds,
        cpu_s=launched.cpu_s,
        tokens_per_s=tokens_per_update / step_s,
        step_s=step_s,
        peak_bytes=peak,
        leftover_bytes=sum(launched.leftovers),
        leftovers=len(launched.leftovers),
        first_loss=loss,
    )
