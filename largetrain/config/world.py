"""How many ranks there are and which one this is, as the launcher says it in the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from largetrain.config.document import shown
from largetrain.errors import ConfigError

MAX_RANKS = 10**7
MAX_PORT = 65535
# Starters of tasks that set no RANK: name, size, rank, and what to export from.
TASKS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "${SLURM_STEP_TASKS_PER_NODE%%(*}"),
    ("srun", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "${SLURM_TASKS_PER_NODE%%(*}"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "$OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "$MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class World:
    """This process among all; `source` says where the world size came from, for error messages."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    source: str = "no launcher: WORLD_SIZE is unset"


def launch_world(env: Mapping[str, str] = os.environ) -> World:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (or DeepSpeed's LOCAL_SIZE); one process when unset.

    Raises:
        ConfigError: a variable is not a whole number, the rank lies outside the world, several ranks have no
            MASTER_ADDR and MASTER_PORT to meet at, or srun or mpirun started tasks that nobody gave a rank.
    """
    problems: list[str] = []

    def read(name: str, low: int, high: int = MAX_RANKS) -> int | None:
        written = env.get(name, "").strip()
        if not written:
            return None
        number = int(written) if written.isascii() and written.isdigit() and len(written) < 20 else None
        if number is None or not low <= number <= high:
            text = f"is not a whole number from {low} to {high}; unset it."
            problems.append(f"environment: {name}={shown(written)} {text}")
            return None
        return number

    size = read("WORLD_SIZE", 1)
    rank, local_rank = read("RANK", 0), read("LOCAL_RANK", 0)
    local_size = read("LOCAL_WORLD_SIZE", 1) or read("LOCAL_SIZE", 1)
    if size is not None and size > 1:
        read("MASTER_PORT", 1, MAX_PORT)
    if not problems:
        problems = _contradictions(env, size, rank, local_rank, local_size)
    if problems:
        raise ConfigError(problems, on_all_ranks=size is None and rank is None)
    if size is None:
        return World()
    local_size = min(local_size or size, size)
    rank = rank or 0
    if local_rank is None:
        local_rank = rank % local_size
    return World(rank, local_rank, size, local_size, f"WORLD_SIZE={size} set by the launcher")


def task_rank(env: Mapping[str, str]) -> str:
    """This process's rank as text: RANK, or the number that srun or mpirun gave one of several tasks; else "0"."""
    if env.get("RANK"):
        return env["RANK"]
    found = _task(env)
    return env.get(found[2], "0") if found else "0"


def _task(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The row of `TASKS` that describes this process as one of several; None for a process of its own."""
    for row in TASKS:
        size = env.get(row[1], "")
        if size and env.get(row[2]):
            return row if size.isdigit() and size.strip("0") not in ("", "1") else None
    return None


def _contradictions(
    env: Mapping[str, str], size: int | None, rank: int | None, local_rank: int | None, local_size: int | None
) -> list[str]:
    """What does not fit together among numbers that are each right."""
    if size is None:
        if rank is not None:
            return [f"environment: RANK={rank} is set without WORLD_SIZE; set both, or neither."]
        found = _task(env)
        return [_without_rank(env, *found)] if found else []
    problems = []
    if size > 1 and rank is None:
        problems.append(f"environment: WORLD_SIZE={size} is set without RANK; use a launcher, or unset it.")
    if rank is not None and rank >= size:
        problems.append(f"environment: RANK={rank} lies outside WORLD_SIZE={size}.")
    if local_rank is not None and local_size is not None and local_rank >= local_size:
        problems.append(
            f"environment: LOCAL_RANK={local_rank} lies outside the {local_size} ranks of this host "
            f"(LOCAL_WORLD_SIZE or LOCAL_SIZE)."
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name, "").strip()]
    if size > 1 and missing:
        problems.append(
            f"environment: WORLD_SIZE={size} is set without {' and '.join(missing)}, where the ranks would meet; "
            f"use a launcher (deepspeed, torchrun), or export the address of rank 0's host and a free port."
        )
    return problems


def _without_rank(env: Mapping[str, str], starter: str, size: str, rank: str, local_rank: str, local_size: str) -> str:
    exports = f"RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} LOCAL_WORLD_SIZE={local_size}"
    return (
        f"environment: this is task {env[rank]} of {env[size]} started by {starter}, and without RANK each task would "
        f"train alone. Start it as: {starter} ... bash -c 'export {exports} MASTER_ADDR=<host of task 0> "
        f"MASTER_PORT=<free port>; exec python -m largetrain ...'; or unset {rank} for one process."
    )
