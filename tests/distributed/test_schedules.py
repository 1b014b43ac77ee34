"""Learning rates: every schedule that DeepSpeed names follows its closed form, by applied updates alone."""

import copy
import math

import pytest

from tests.distributed.parity.harness import SEQ_LEN, VOCAB, Disturbed, call_all, engine_json, resolve, train
from tests.ranks import run_ranks
from tests.reference import toy_batches

LOW, HIGH, WARM, TOTAL, UPDATES = 0.01, 0.1, 4, 10, 14
BAD_UPDATE = 2  # index of the update that overflows
WARMUP = {"warmup_min_lr": LOW, "warmup_max_lr": HIGH, "warmup_num_steps": WARM}
COSINE = {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.05, "warmup_num_steps": WARM, "total_num_steps": TOTAL}
CYCLE = {
    "cycle_min_lr": LOW,
    "cycle_max_lr": HIGH,
    "cycle_first_step_size": 4,
    "cycle_second_step_size": 6,
    "decay_step_size": 2,
    "decay_lr_rate": 0.5,
}
RANGE = {"lr_range_test_min_lr": LOW, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}


def rise(step, kind):
    """Share of the warm-up at this step, 0 to 1."""
    if step >= WARM:
        return 1.0
    return step / WARM if kind == "linear" else math.log(step + 1) / math.log(WARM)


def warmup(kind):
    return lambda step: LOW + (HIGH - LOW) * rise(step, kind)


def warmup_decay(step):
    share = rise(step, "linear") if step < WARM else max(0.0, (TOTAL - step) / (TOTAL - WARM))
    return LOW + (HIGH - LOW) * share


def warmup_cosine(step):
    """The cosine counts from the last step of the warm-up, so it ends at step TOTAL - 1."""
    if step < WARM:
        return HIGH * (0.2 + 0.8 * step / WARM)
    progress = min(1.0, (step - WARM + 1) / (TOTAL - WARM))
    return HIGH * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def one_cycle(step):
    if step <= 4:
        return LOW + (HIGH - LOW) * step / 4
    if step <= 10:
        return LOW + (HIGH - LOW) * (10 - step) / 6
    return LOW / (1 + 0.5 * (step - 10) / 2)


SCHEDULES = {
    "warmup_log": ("WarmupLR", {**WARMUP, "warmup_type": "log"}, warmup("log")),
    "warmup_linear": ("WarmupLR", {**WARMUP, "warmup_type": "linear"}, warmup("linear")),
    "decay": ("WarmupDecayLR", {**WARMUP, "warmup_type": "linear", "total_num_steps": TOTAL}, warmup_decay),
    "cosine": ("WarmupCosineLR", {**COSINE, "warmup_type": "linear"}, warmup_cosine),
    "one_cycle": ("OneCycle", CYCLE, one_cycle),
    "range": ("LRRangeTest", RANGE, lambda step: LOW * (1 + 2.0 * step / 3)),
    "range_stairs": (
        "LRRangeTest",
        {**RANGE, "lr_range_test_staircase": True},
        lambda step: LOW * (1 + 2.0 * (step // 3)),
    ),
}


def engine(name, micro):
    kind, params, _ = SCHEDULES[name]
    return engine_json(2, micro=micro, optimizer=("AdamW", {"lr": HIGH}), scheduler={"type": kind, "params": params})


def train_each(world_size, batches, task=None):
    """Rank 0's outcome with every schedule; one start of the ranks for all."""
    resolved = [resolve(engine(name, 4 // world_size), world_size, steps=TOTAL) for name in SCHEDULES]
    outcomes = run_ranks(call_all, world_size, [(train, (made, batches, copy.copy(task))) for made in resolved])[0]
    return dict(zip(SCHEDULES, outcomes, strict=True))


@pytest.fixture(scope="module", params=[1, 2, 4], ids="ranks{}".format)
def runs(request):
    return train_each(request.param, toy_batches(UPDATES, 4, SEQ_LEN, VOCAB))


@pytest.mark.parametrize("name", SCHEDULES)
def test_update_n_uses_the_rate_of_step_n(runs, name):
    rate = SCHEDULES[name][2]
    expected = [rate(step) for step in range(1, UPDATES + 1)]
    assert runs[name].lrs == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_skipped_update_does_not_advance_the_schedule():
    outcomes = train_each(2, toy_batches(5, 4, SEQ_LEN, VOCAB), Disturbed({BAD_UPDATE: math.inf}))
    for name, outcome in outcomes.items():
        rate = SCHEDULES[name][2]
        assert outcome.applied == [True, True, False, True, True], name
        assert outcome.lrs == pytest.approx([rate(step) for step in (1, 2, 3, 3, 4)], rel=1e-12), name


def test_peak_follows_the_optimizer_and_update_one_has_it():
    """Without this the peak would be the scheduler's own 0.001, and the first updates would use a rate of 0."""
    engine = engine_json(
        micro=4,
        optimizer=("AdamW", {"lr": 1e-5}),
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    )
    (outcome,) = run_ranks(train, 1, resolve(engine, 1), toy_batches(4, 4, SEQ_LEN, VOCAB))
    assert outcome.lrs == pytest.approx([1e-5] * 4, rel=1e-12)


def test_without_a_scheduler_the_rate_is_the_optimizers():
    engine = engine_json(3, micro=2, optimizer=("AdamW", {"lr": 3e-4}))
    outcomes = run_ranks(train, 2, resolve(engine, 2), toy_batches(2, 4, SEQ_LEN, VOCAB))
    assert [outcome.lrs for outcome in outcomes] == [[3e-4] * 2] * 2
