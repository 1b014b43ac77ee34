"""The learning rate's course as a pure function of the update number, so that resuming needs no scheduler state."""

import math
from bisect import bisect_right
from collections.abc import Callable

from largetrain.config.schedule_rules import updates_of
from largetrain.config.schema import ScheduleConfig


def schedule_factor(schedule: ScheduleConfig, total_steps: int, steps_per_epoch: float) -> Callable[[int], float]:
    """Give the factor on the optimizer's rate for update k = 1..total_steps.

    With W updates of warm-up: `warmup_start` + (1 - `warmup_start`) k / W up to k = W, which has the full rate. After
    it the decay at x = (k - 1 - W) / (total_steps - W), so update W + 1 has the full rate too, and never less than
    `final`. Milestones count from the start of the run, warm-up included. Past the end x stays 1. A run that is
    shorter than its warm-up never leaves it.

    Args:
        schedule: as written in the run config.
        total_steps: updates of the whole run, T.
        steps_per_epoch: updates in a pass over the training data; need not be whole.
    """
    warmup = updates_of(schedule.warmup, steps_per_epoch)
    milestones = [updates_of(epoch, steps_per_epoch) for epoch in schedule.milestones]

    def factor(update: int) -> float:
        if update <= warmup:
            return schedule.warmup_start + (1.0 - schedule.warmup_start) * update / warmup
        past = update - 1  # updates that are done when this one takes its rate
        x = min((past - warmup) / max(total_steps - warmup, 1), 1.0)
        return max(_decay(schedule, x, bisect_right(milestones, past)), schedule.final)

    return factor


def _decay(schedule: ScheduleConfig, x: float, milestones_past: int) -> float:
    if schedule.type == "step":
        return schedule.gamma**milestones_past
    if schedule.type == "poly":
        return (1.0 - x) ** schedule.power
    if schedule.type == "cosine":
        return (1.0 + math.cos(math.pi * x)) / 2.0
    return 1.0
