"""Learning-rate schedules of both backends: the same value for update k, whoever runs it.

The schedules of the engine JSON are DeepSpeed's own classes; a run's `schedule` section becomes a `FactorSchedule`.
Groups of parameters may carry a `lr_factor`, which multiplies whatever the schedule says.
"""

from collections.abc import Callable
from typing import Any

import torch

# DeepSpeed's schedulers start at index -1. Update 1 takes the value of step 1: the warm-ups compute it from the index
# (index 0 is still warmup_min_lr), these two from the index plus one.
FIRST_INDEX = {"LRRangeTest": 0, "OneCycle": 0}


class FactorSchedule:
    """Sets each group's rate to its base rate x `lr_factor` x factor(k) for update k = 1, 2, ...

    Has the methods by which DeepSpeed's engine steps and saves a schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]):
        self.optimizer, self.factor = optimizer, factor
        self.last_batch_iteration = 0
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.step(0)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next update, or to the one after `last_batch_iteration` updates."""
        done = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = done
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * group.get("lr_factor", 1.0) * self.factor(done + 1)

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


def made_by_name(section: dict[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's schedule for the `scheduler` section of an engine JSON; None without one."""
    if not section:
        return None
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, section["type"])(optimizer=optimizer, **section.get("params", {}))


def start(schedule: Any, optimizer: Any) -> None:
    """Bring a schedule, or none, to update 1, and let its rates follow `lr_factor` from here on."""
    if isinstance(schedule, FactorSchedule):
        return
    if schedule is None:
        _apply_factors(optimizer)
        return
    plain_step = schedule.step

    def step(*args: Any, **kwargs: Any) -> None:
        plain_step(*args, **kwargs)
        _apply_factors(optimizer)

    if any("lr_factor" in group for group in optimizer.param_groups):
        schedule.step = step
    while schedule.last_batch_iteration < FIRST_INDEX.get(type(schedule).__name__, 1):
        schedule.step()


def go_to(schedule: Any, applied: int) -> None:
    """Bring a schedule, whatever the run had before, to the update after so many applied ones."""
    first = 0 if isinstance(schedule, FactorSchedule) else FIRST_INDEX.get(type(schedule).__name__, 1)
    schedule.step(first + applied)


def base_rate(optimizer: Any) -> float:
    """The rate of a group without a factor: what the schedule says."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / group.get("lr_factor", 1.0)


def _apply_factors(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_factor", 1.0)
