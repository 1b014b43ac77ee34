"""Rates by update, with factors of parameter groups; the schedules of the engine JSON are in tests/distributed."""

import pytest
import torch
from torch import nn

from largetrain.config.schema import ScheduleConfig
from largetrain.engine import schedules
from largetrain.engine.schedules import FactorSchedule
from largetrain.optim.schedules import schedule_factor

BASE, FACTORS = 0.4, (1.0, 0.1, 0.0)
SECTIONS = {
    "none": None,
    "WarmupLR": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": BASE}},
    "OneCycle": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": BASE, "cycle_momentum": False}},
    "LRRangeTest": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": BASE, "lr_range_test_step_size": 3}},
}


def optimizer(factors=FACTORS):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr_factor": factor} for factor in factors]
    return torch.optim.SGD(groups, lr=BASE)


def rates(made):
    return [group["lr"] for group in made.param_groups]


def test_update_k_has_the_factor_of_k():
    made = optimizer()
    schedule = FactorSchedule(made, lambda update: 1 / update)
    schedules.start(schedule, made)
    for update in range(1, 6):
        assert rates(made) == pytest.approx([BASE * factor / update for factor in FACTORS], rel=1e-15)
        assert schedules.base_rate(made) == pytest.approx(BASE / update, rel=1e-15)
        assert schedule.get_last_lr() == rates(made)
        schedule.step()


def test_the_runs_schedule_through_it():
    factor = schedule_factor(ScheduleConfig(type="poly", power=1.0, warmup=1.0), total_steps=10, steps_per_epoch=2.0)
    made = optimizer((1.0,))
    schedule, seen = FactorSchedule(made, factor), []
    for _ in range(10):
        seen += rates(made)
        schedule.step()
    # warm-up of 2 updates, then 1 - (k - 3) / 8
    assert seen == pytest.approx([BASE * f for f in (0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8)])


@pytest.mark.parametrize("done", [0, 1, 7])
def test_it_goes_on_from_its_state_with_a_new_base_rate(done):
    """The rate of the configuration holds, not what the checkpoint remembers."""
    schedule = FactorSchedule(optimizer(), lambda update: 1 / update)
    for _ in range(done):
        schedule.step()
    made = optimizer()
    for group in made.param_groups:
        group["lr"] = 2 * BASE
    again = FactorSchedule(made, lambda update: 1 / update)
    again.load_state_dict(schedule.state_dict())
    again.step(again.last_batch_iteration)
    assert rates(made) == pytest.approx([2 * BASE * factor / (done + 1) for factor in FACTORS], rel=1e-15)
    again.step()
    assert again.last_batch_iteration == done + 1


@pytest.mark.parametrize("name", SECTIONS)
def test_factors_multiply_what_deepspeeds_schedules_say(name):
    """Each group beside the same schedule on an optimizer without factors."""
    made, plain = optimizer(), optimizer((1.0,))
    pair = [(schedules.made_by_name(SECTIONS[name], which), which) for which in (made, plain)]
    for schedule, which in pair:
        schedules.start(schedule, which)
    seen = []
    for _ in range(6):
        (base,) = rates(plain)
        assert rates(made) == pytest.approx([base * factor for factor in FACTORS], rel=1e-15)
        assert schedules.base_rate(made) == pytest.approx(base, rel=1e-15)
        seen.append(base)
        for schedule, _ in pair:
            if schedule is not None:
                schedule.step()
    assert (len(set(seen)) > 1) == (name != "none") and seen[0] > 0
