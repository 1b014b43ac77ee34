"""Checkpoints read and hashed by all ranks together, with one decision: before anything of them is used.

Rank 0 looks for a checkpoint; when it wants the contents of one checked, every rank reads a share of the files. A rank
reads the files that it will need itself, so that they are in its own host's page cache when it does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from largetrain.checkpoint.verify import Check, problem_of, problems_in_share
from largetrain.errors import CheckpointError, ConfigError

T = TypeVar("T")


def led_by_first(action: Callable[[Check], T]) -> T:
    """Run `action` on rank 0 and give what it returns to all ranks. A collective.

    Args:
        action: gets a function that says what is wrong with a checkpoint, contents included, or None.

    Raises:
        ConfigError, CheckpointError: on all ranks: what `action` raised.
    """
    if dist.get_rank() == 0:
        told = _lead(action)
    else:
        told = _told(None)
        while isinstance(told, Path):
            _hash_together(told)
            told = _told(None)
    outcome, problems, damage = told
    if problems is not None:
        raise ConfigError(problems, on_all_ranks=True)
    if damage is not None:
        raise CheckpointError(damage)
    return cast(T, outcome)


def _lead(action: Callable[[Check], T]) -> tuple[T | None, tuple[str, ...] | None, str | None]:
    def check(checkpoint: Path) -> str | None:
        problem = problem_of(checkpoint)
        if problem is not None:
            return problem
        _told(checkpoint)
        return _hash_together(checkpoint)

    told: tuple[T | None, tuple[str, ...] | None, str | None]
    try:
        told = action(check), None, None
    except ConfigError as error:
        told = None, error.problems, None
    except CheckpointError as error:
        told = None, None, str(error)
    _told(told)
    return told


def _told(what: Any) -> Any:
    """Rank 0's word to all."""
    box = [what]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _hash_together(checkpoint: Path) -> str | None:
    """What the first file is that is not what was written, by name, and why; the same on all ranks."""
    found: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, problems_in_share(checkpoint, dist.get_rank(), dist.get_world_size()))
    problems = {name: problem for share in found for name, problem in share.items()}
    return problems[min(problems)] if problems else None
