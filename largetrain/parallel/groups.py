"""Process groups of the ranks that share something."""

from typing import Literal

import torch.distributed as dist

from largetrain.errors import ConfigError


def batch_norm_group(ranks: Literal["all", "node"] | int, local_world_size: int) -> dist.ProcessGroup | None:
    """The ranks that share batch statistics with this one: neighbours in rank order.

    A collective over all ranks where it makes groups.

    Args:
        ranks: `all`, `node` for the ranks of one host, or the size of each group.
        local_world_size: ranks on each host.

    Returns:
        The group of this rank; None for all ranks.

    Raises:
        ConfigError: the ranks do not divide into groups of that size.
    """
    if ranks == "all":
        return None
    world_size = dist.get_world_size()
    size = local_world_size if ranks == "node" else ranks
    if world_size % size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        what = f"node, {size} ranks on this host," if ranks == "node" else f"{size}"
        raise ConfigError(
            f"sync_batch_norm_ranks: {what} does not divide {world_size} ranks into groups of one size; "
            f"use one of {', '.join(map(str, divisors))}, or all.",
            on_all_ranks=True,
        )
    if size == world_size:
        return None
    group, _ = dist.new_subgroups(size)
    return group
