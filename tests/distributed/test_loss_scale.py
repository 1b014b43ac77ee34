"""Overflows: exactly the bad update is skipped, on all ranks together, and the loss scale moves as documented."""

import math

import pytest
import torch

from tests.distributed.parity.harness import SEQ_LEN, VOCAB, Disturbed, engine_json, make_model, resolve, train
from tests.ranks import run_ranks
from tests.reference import LossScale, Optimizer, movement_error, toy_batches, train_reference

LR, GLOBAL_BATCH, RANKS = 0.1, 4, 2
HALF_BOUND = 3 * math.sqrt(2 * (RANKS + 1) / 3) * 2**-11  # relative movement in fp16; derived in parity/matrix.py


def run(stage, precision, updates, task=None, accumulation=1, **fp16):
    """Outcomes of both ranks."""
    sections = {"fp16": fp16} if fp16 else {}
    engine = engine_json(
        stage,
        precision,
        accumulation,
        GLOBAL_BATCH // RANKS // accumulation,
        ("SGD", {"lr": LR}),
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
        **sections,
    )
    return run_ranks(train, RANKS, resolve(engine, RANKS), toy_batches(updates, GLOBAL_BATCH, SEQ_LEN, VOCAB), task)


def reference_in_rank(resolved, updates, scale, factors):
    return train_reference(
        lambda: make_model(resolved),
        toy_batches(updates, GLOBAL_BATCH, SEQ_LEN, VOCAB),
        [LR * step / 10 for step in range(1, updates + 1)],
        Optimizer("sgd"),
        precision="fp16",
        pieces=RANKS,
        loss_scale=scale,
        loss_factors=factors,
    )


def reference(updates, scale, factors=None):
    resolved = resolve(engine_json(micro=GLOBAL_BATCH), 1)
    return run_ranks(reference_in_rank, 1, resolved, updates, scale, factors or {})[0]


def check_against(outcomes, expected):
    for outcome in outcomes:
        assert outcome.scales == expected.scales
        assert outcome.applied == [not skipped for skipped in expected.skipped]
        assert outcome.lrs == pytest.approx(expected.lrs, rel=1e-12)
        assert outcome.final_scale == expected.final_scale
        assert movement_error(outcome.weights, expected.weights, expected.initial) < HALF_BOUND


@pytest.mark.parametrize(("stage", "only_rank"), [(0, 1), (1, 0), (2, 1), (3, 1), (2, None)])
def test_overflow_halves_the_scale_and_skips_that_update_alone(stage, only_rank):
    outcomes = run(stage, "fp16", 4, Disturbed({1: math.inf}, only_rank=only_rank), hysteresis=1)
    expected = reference(4, LossScale(8, hysteresis=1), {1: math.inf})
    assert expected.scales == [256, 256, 128, 128]
    assert expected.skipped == [False, True, False, False]
    check_against(outcomes, expected)
    assert not math.isfinite(outcomes[0].grad_norms[1])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_skipped_update_changes_no_bit(stage):
    """With the bad update and without its batch: the weights are the same, bit by bit."""
    outcome = run(stage, "fp16", 2, Disturbed({1: math.inf}), hysteresis=1)[0]
    before = run(stage, "fp16", 1, hysteresis=1)[0]
    for name, weight in before.weights.items():
        assert torch.equal(outcome.weights[name], weight)


@pytest.mark.parametrize("consecutive", [False, True])
def test_hysteresis(consecutive):
    bad = {0: math.inf, 2: math.inf, 3: math.inf}
    outcomes = run(2, "fp16", 5, Disturbed(bad), hysteresis=2, consecutive_hysteresis=consecutive)
    expected = reference(5, LossScale(8, hysteresis=2, consecutive_hysteresis=consecutive), bad)
    assert expected.scales == ([256, 256, 256, 256, 128] if consecutive else [256, 256, 256, 128, 64])
    check_against(outcomes, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_scale_grows_after_the_window_and_growth_updates_are_exact(stage):
    """DeepSpeed alone halves the gradient of an update at which the scale grows."""
    outcomes = run(stage, "fp16", 5, initial_scale_power=4, loss_scale_window=1)
    expected = reference(5, LossScale(4, window=1))
    assert expected.scales == [16, 16, 32, 64, 128]
    check_against(outcomes, expected)
    assert outcomes[0].grad_norms == pytest.approx(expected.grad_norms, rel=HALF_BOUND)


def test_static_scale_stays_and_still_skips():
    outcomes = run(2, "fp16", 3, Disturbed({1: math.inf}), loss_scale=128.0)
    check_against(outcomes, reference(3, LossScale(static=128.0), {1: math.inf}))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_floor_is_reported_and_held(stage):
    """scale_exhausted is what the guard stops a run for; until then every rank goes on."""
    bad = dict.fromkeys(range(4), math.inf)
    outcomes = run(stage, "fp16", 5, Disturbed(bad), hysteresis=1, initial_scale_power=2, min_loss_scale=1)
    for outcome in outcomes:
        assert outcome.scales == [4, 2, 1, 1, 1]
        assert outcome.exhausted == [False, False, True, True, False]
        assert outcome.applied == [False] * 4 + [True]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_bad_rank_skips_the_update_on_all(stage, precision):
    """First infinite gradients, then a NaN added to the loss, which leaves the gradients finite."""
    bad = Disturbed({1: math.inf, 3: math.nan}, accumulation=2, only_rank=1)
    outcomes = run(stage, precision, 5, bad, accumulation=2)
    for outcome in outcomes:
        assert outcome.applied == [True, False, True, False, True]
        for losses in (outcome.losses, outcome.grad_norms):
            assert [math.isfinite(loss) for loss in losses] == outcome.applied
        assert outcome.lrs == pytest.approx([LR * step / 10 for step in (1, 2, 2, 3, 3)])
        assert all(bool(weight.isfinite().all()) for weight in outcome.weights.values())
        assert all(torch.equal(weight, outcomes[0].weights[name]) for name, weight in outcome.weights.items())
