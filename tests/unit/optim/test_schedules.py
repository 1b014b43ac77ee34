"""Schedules against their closed forms and against torch's schedulers."""

import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from largetrain.config.schedule_rules import schedule_problems
from largetrain.config.schema import ScheduleConfig
from largetrain.optim.schedules import schedule_factor

EPSILON = 2.0**-52


def factors(schedule: ScheduleConfig, total: int, per_epoch: float) -> list[float]:
    factor = schedule_factor(schedule, total, per_epoch)
    return [factor(update) for update in range(1, total + 1)]


def torch_factors(make, total: int) -> list[float]:
    """Rates that a torch scheduler, stepped after every update, gives to updates 1..total of a rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "make", "smallest"),
    [
        (
            ScheduleConfig(type="step", milestones=[3, 6, 9]),
            lambda o: lr_scheduler.StepLR(o, step_size=30, gamma=0.1),
            1.0,
        ),
        (
            ScheduleConfig(type="step", milestones=[1.5, 4], gamma=0.5),
            lambda o: lr_scheduler.MultiStepLR(o, [15, 40], gamma=0.5),
            1.0,
        ),
        (ScheduleConfig(type="cosine"), lambda o: lr_scheduler.CosineAnnealingLR(o, 100), math.sin(math.pi / 200) ** 2),
        (ScheduleConfig(type="poly"), lambda o: lr_scheduler.PolynomialLR(o, 100, power=0.9), 0.01),
        (ScheduleConfig(type="constant"), lambda o: lr_scheduler.ConstantLR(o, factor=1.0), 1.0),
    ],
)
def test_without_warmup_the_rates_are_torchs(schedule, make, smallest):
    """torch's recurrences multiply ratios of two rounded numbers, up to 3 roundings for each of 100 updates; those of
    the decays have an absolute error of epsilon over the smallest number that they divide by."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch_factors(make, 100)
    for ours, theirs in zip(factors(schedule, 100, 10.0), expected, strict=True):
        assert abs(ours - theirs) <= 300 * EPSILON * theirs / smallest


def test_warmup_rises_to_the_full_rate_and_the_decay_starts_from_it():
    schedule = ScheduleConfig(type="cosine", warmup=2.0, warmup_start=0.2)
    rates = factors(schedule, 12, 2.0)
    assert rates[:4] == pytest.approx([0.4, 0.6, 0.8, 1.0], rel=4 * EPSILON)
    assert rates[4] == 1.0
    expected = [(1 + math.cos(math.pi * x / 8)) / 2 for x in range(8)]
    assert rates[4:] == pytest.approx(expected, rel=4 * EPSILON)


def test_the_first_update_of_a_warmup_from_zero_is_not_lost():
    assert factors(ScheduleConfig(type="constant", warmup=1.0), 6, 4.0) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_milestones_count_from_the_start_of_the_run_and_are_rounded_to_updates():
    schedule = ScheduleConfig(type="step", milestones=[1, 2], gamma=0.5, warmup=0.4)
    # 2.5 updates in an epoch: a warm-up of 1, milestones after 2 and 5 updates
    assert factors(schedule, 8, 2.5) == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_a_milestone_within_the_warmup_holds_after_it():
    schedule = ScheduleConfig(type="step", milestones=[1], gamma=0.5, warmup=2.0)
    assert factors(schedule, 5, 2.0) == [0.25, 0.5, 0.75, 1.0, 0.5]


@pytest.mark.parametrize("kind", ["cosine", "poly"])
def test_the_decay_never_falls_below_final(kind):
    schedule = ScheduleConfig(type=kind, final=0.3)
    rates = factors(schedule, 50, 10.0)
    assert min(rates) == rates[-1] == 0.3
    free = factors(ScheduleConfig(type=kind), 50, 10.0)
    assert rates == [max(rate, 0.3) for rate in free]


def test_past_the_end_the_last_rate_holds():
    assert schedule_factor(ScheduleConfig(type="poly"), 10, 1.0)(25) == 0.0
    assert schedule_factor(ScheduleConfig(type="cosine", final=0.1), 10, 1.0)(25) == 0.1


def test_a_run_shorter_than_its_warmup_never_leaves_it():
    assert factors(ScheduleConfig(warmup=5.0), 3, 2.0) == pytest.approx([0.1, 0.2, 0.3])
    assert schedule_factor(ScheduleConfig(warmup=4.5), 10, 2.0)(10) == 1.0


@pytest.mark.parametrize(
    ("schedule", "key", "text"),
    [
        ({"type": "cosine", "milestones": [3.0]}, "milestones", "`type: step`"),
        ({"type": "poly", "gamma": 0.5}, "gamma", "`type: step`"),
        ({"type": "step", "milestones": [1.0], "power": 1.0}, "power", "`type: poly`"),
        ({"type": "constant", "final": 0.1}, "final", "no effect"),
        ({"type": "step"}, "milestones", "is empty"),
        ({"type": "step", "milestones": [3.0, 3.0, 2.0]}, "milestones", "3 follows 3"),
        ({"warmup_start": 0.1}, "warmup_start", "without `warmup`"),
        ({"warmup": 9.0}, "warmup", "whole run of 9"),
    ],
)
def test_contradictions_are_found(schedule, key, text):
    ((path, problem),) = schedule_problems(ScheduleConfig(**schedule), epochs=9.0)
    assert path == ("schedule", key)
    assert text in problem


@pytest.mark.parametrize("kind", ["constant", "step", "poly", "cosine"])
def test_a_config_with_every_default_written_out_has_no_problem(kind):
    milestones = [30.0, 60.0] if kind == "step" else []
    written = ScheduleConfig(type=kind, milestones=milestones, warmup=1.0).model_dump()
    assert schedule_problems(ScheduleConfig(**written), epochs=90.0) == []
