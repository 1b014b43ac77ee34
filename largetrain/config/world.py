"""How many ranks there are and which one this is, as the launcher says it in the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from largetrain.errors import ConfigError


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
        ConfigError: a variable is not a whole number, or the rank lies outside the world.
    """
    problems: list[str] = []

    def read(name: str, low: int) -> int | None:
        written = env.get(name, "").strip()
        if not written:
            return None
        if not written.isascii() or not written.isdigit() or int(written) < low:
            problems.append(f"environment: {name}={written!r} is not a whole number of at least {low}; unset it.")
            return None
        return int(written)

    size = read("WORLD_SIZE", 1)
    rank, local_rank = read("RANK", 0), read("LOCAL_RANK", 0)
    local_size = read("LOCAL_WORLD_SIZE", 1) or read("LOCAL_SIZE", 1)
    if size is None and rank is not None and not problems:
        problems.append(f"environment: RANK={rank} is set without WORLD_SIZE; set both, or neither.")
    if size is not None and size > 1 and rank is None and not problems:
        problems.append(f"environment: WORLD_SIZE={size} is set without RANK; use a launcher, or unset it.")
    if size is not None and rank is not None and rank >= size:
        problems.append(f"environment: RANK={rank} lies outside WORLD_SIZE={size}.")
    if problems:
        raise ConfigError(problems)
    if size is None:
        return World()
    local_size = min(local_size or size, size)
    rank = rank or 0
    if local_rank is None:
        local_rank = rank % local_size
    return World(rank, local_rank, size, local_size, f"WORLD_SIZE={size} set by the launcher")
