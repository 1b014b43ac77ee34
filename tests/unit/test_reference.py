"""The reference loop against closed forms: what the parity tests rest on."""

import math

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.reference import (
    FloorReached,
    HalfProductsInFp32,
    LossScale,
    Optimizer,
    ToyLanguageModel,
    clip_coefficient,
    movement_error,
    tolerance_for,
    toy_batches,
    train_reference,
)

SGD = Optimizer(kind="sgd")


class Bigram(nn.Module):
    """Logits are a row of a table: the gradient is softmax minus one-hot, known in closed form."""

    def __init__(self, vocab=5):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, vocab * vocab).reshape(vocab, vocab))

    def forward(self, input_ids):
        return self.table[input_ids]


def bigram_gradient(table, input_ids, labels):
    """Mean over valid tokens of softmax(row) - one_hot(label), added to the token's row; in fp64."""
    grad = torch.zeros_like(table, dtype=torch.float64)
    valid = labels != -100
    for token, label in zip(input_ids[valid].tolist(), labels[valid].tolist(), strict=True):
        grad[token] += table[token].double().softmax(0)
        grad[token, label] -= 1
    return grad / int(valid.sum())


def reference_in_rank(factory, batches, lrs, optimizer, options):
    return train_reference(factory, batches, lrs, optimizer, **options)


def reference(factory=ToyLanguageModel, updates=3, lrs=None, optimizer=None, batches=None, **options):
    """Runs in a rank, as the parity tests do."""
    batches = batches or toy_batches(updates, 12)
    return run_ranks(reference_in_rank, 1, factory, batches, lrs or [0.1] * len(batches), optimizer, options)[0]


def shifted(run, other):
    """Where `run` would have ended had it started from `other`'s initial weights, which half precision rounds."""
    return {name: weight - run.initial[name] + other.initial[name] for name, weight in run.weights.items()}


@pytest.fixture(scope="module")
def bigram_batch():
    return toy_batches(1, 4, vocab=5)


def test_sgd_step_is_the_closed_form(bigram_batch):
    run = reference(Bigram, batches=bigram_batch, lrs=[0.5], optimizer=SGD, clip=0.0)
    start = run.initial["table"]
    grad = bigram_gradient(start, *bigram_batch[0])
    torch.testing.assert_close(run.weights["table"], (start - 0.5 * grad).float(), **tolerance_for(torch.float32, 32))
    assert run.grad_norms[0] == pytest.approx(float(grad.norm()), rel=1e-6)


def test_loss_is_the_mean_over_the_valid_tokens_of_the_global_batch(bigram_batch):
    ids, labels = bigram_batch[0]
    log_probabilities = Bigram().table.detach().double().log_softmax(1)
    valid = labels != -100
    assert 0 < int(valid.sum()) < valid.numel()
    expected = -log_probabilities[ids[valid], labels[valid]].mean()
    assert reference(Bigram, batches=bigram_batch).losses[0] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_split_of_the_batch_does_not_matter(kind):
    optimizer = Optimizer(kind=kind, eps=1e-3)
    whole, split = (reference(optimizer=optimizer, pieces=pieces) for pieces in (1, 6))
    bounds = tolerance_for(torch.float32, terms=96, updates=3)
    torch.testing.assert_close(torch.tensor(split.losses), torch.tensor(whole.losses), **bounds)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(split.weights[name], weight, **bounds)


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(ValueError, match="12 samples cannot be cut into 5"):
        reference(pieces=5)


def test_clipped_sgd_moves_by_the_clip_exactly(bigram_batch):
    run = reference(Bigram, batches=bigram_batch, lrs=[1.0], optimizer=SGD, clip=0.1, loss_factors={0: 1000.0})
    moved = float((run.weights["table"] - run.initial["table"]).norm())
    assert run.grad_norms[0] > 100
    assert moved == pytest.approx(0.1, rel=1e-5)


def test_clip_coefficient():
    assert clip_coefficient(4.0, 1.0) == pytest.approx(1 / (4 + 1e-6), rel=1e-12)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 0.0) == 1.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_follows_fp32_within_its_epsilon(precision):
    options = {"optimizer": SGD, "pieces": 3, "loss_scale": LossScale(initial_power=8)}
    full, half = (reference(precision=name, **options) for name in ("fp32", precision))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert 0 < movement_error(shifted(half, full), full.weights, full.initial) < 8 * torch.finfo(dtype).eps
    assert half.weights["head.weight"].dtype == torch.float32
    assert half.losses != full.losses
    torch.testing.assert_close(torch.tensor(half.losses), torch.tensor(full.losses), **tolerance_for(dtype, 3))


def test_master_weights_keep_steps_below_the_resolution_of_bf16():
    """A thousandth of eps per step would never show without fp32 master weights."""
    run = reference(updates=4, lrs=[1e-5] * 4, optimizer=SGD, precision="bf16")
    moved = (run.weights["norm.weight"] - run.initial["norm.weight"]).abs()
    assert 0 < float(moved.max()) < torch.finfo(torch.bfloat16).eps / 100


def test_accumulation_in_fp32_is_closer_than_in_bf16():
    full = reference(optimizer=SGD, updates=1)
    errors = {
        dtype: movement_error(
            shifted(reference(optimizer=SGD, updates=1, precision="bf16", pieces=12, grad_dtype=dtype), full),
            full.weights,
            full.initial,
        )
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert errors[torch.float32] < errors[torch.bfloat16]


def test_overflow_halves_the_scale_and_skips_exactly_that_update():
    lrs = [0.1, 0.2, 0.3, 0.4]
    options = {"precision": "fp16", "lrs": lrs, "optimizer": SGD}
    batches = toy_batches(4, 12)
    run = reference(
        batches=batches, loss_factors={1: math.inf}, loss_scale=LossScale(initial_power=8, hysteresis=1), **options
    )
    assert run.skipped == [False, True, False, False]
    assert run.scales == [256, 256, 128, 128]
    assert run.lrs == [0.1, 0.2, 0.2, 0.3]  # the skipped update did not use its rate up
    assert run.grad_norms[1] == math.inf
    without = reference(
        batches=[batches[0], *batches[2:]], loss_scale=LossScale(initial_power=7, hysteresis=1), **options
    )
    # The scale is a power of two: it changes no bit of the result unless gradients underflow.
    assert movement_error(run.weights, without.weights, without.initial) < 8 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_infinite_gradients_are_skipped_without_a_scale_too(precision):
    run = reference(precision=precision, loss_factors={1: math.inf})
    assert run.skipped == [False, True, False]
    assert run.scales == [1, 1, 1]
    assert all(bool(weight.isfinite().all()) for weight in run.weights.values())


def scales_after(scale, overflows):
    values = []
    for overflow in overflows:
        scale.update(overflow)
        values.append(scale.value)
    return values


def test_hysteresis_uses_up_before_the_scale_falls():
    assert scales_after(LossScale(initial_power=4, hysteresis=3), [True] * 4) == [16, 16, 8, 4]


def test_consecutive_hysteresis_is_restored_by_a_clean_update():
    overflows = [True, False, True, True]
    assert scales_after(LossScale(4, hysteresis=2), overflows) == [16, 16, 8, 4]
    assert scales_after(LossScale(4, hysteresis=2, consecutive_hysteresis=True), overflows) == [16, 16, 16, 8]


def test_scale_grows_after_the_window():
    clean = scales_after(LossScale(4, window=2), [False] * 6)
    assert clean == [16, 16, 32, 32, 64, 64]
    broken = scales_after(LossScale(4, window=2, hysteresis=1), [False, True, False, False, False, False])
    assert broken == [16, 8, 8, 8, 16, 16]


def deepspeed_scales(power, options, overflows):
    from types import SimpleNamespace

    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist = SimpleNamespace(get_rank=lambda: 0)  # it asks only to decide who logs
    scaler = loss_scaler.DynamicLossScaler(2.0**power, min_scale=1, **options)
    values = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        values.append(scaler.cur_scale)
    return values


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_scale_is_counted_as_deepspeed_counts_it(hysteresis, consecutive):
    generator = torch.Generator().manual_seed(hysteresis)
    overflows = (torch.rand(300, generator=generator) < 0.15).tolist()
    options = {"scale_window": 3, "delayed_shift": hysteresis, "consecutive_hysteresis": consecutive}
    expected = run_ranks(deepspeed_scales, 1, 40, options, overflows)[0]
    assert min(expected) > 1 and len(set(expected)) > 5
    assert scales_after(LossScale(40, 3, hysteresis, consecutive), overflows) == expected


def test_floor_ends_the_run():
    scale = LossScale(initial_power=1, hysteresis=1)
    scale.update(True)
    assert scale.value == 1
    with pytest.raises(FloorReached):
        scale.update(True)


def test_static_scale_never_moves():
    assert scales_after(LossScale(static=128.0), [True, False, True]) == [128.0] * 3


def half_products(dtype):
    """Error of a long product in half with and without the mode, against fp64."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 4096).to(dtype), torch.randn(4096, 8).to(dtype)
    exact = a.double() @ b.double()
    with HalfProductsInFp32():
        inside = a @ b
    weight = b.clone().requires_grad_()
    with HalfProductsInFp32():
        (a @ weight).sum().backward()
    return exact, inside, weight.grad, a


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_products_are_rounded_once(dtype):
    exact, inside, grad, a = run_ranks(half_products, 1, dtype)[0]
    assert inside.dtype == grad.dtype == dtype
    unit_roundoff = torch.finfo(dtype).eps / 2
    # One rounding of the result, on top of an fp32 sum of 4096 terms of order one.
    torch.testing.assert_close(inside.double(), exact, rtol=unit_roundoff, atol=1e-3)
    column_sums = a.double().sum(0, keepdim=True).T.expand(-1, 8)
    torch.testing.assert_close(grad.double(), column_sums, rtol=unit_roundoff, atol=1e-5)


def test_tolerance_is_the_derived_one():
    bound = tolerance_for(torch.float32, terms=64, updates=2)
    expected = 6 * math.sqrt(2 * 64 / 3) * 2**-24 * 2
    assert bound == {"rtol": pytest.approx(expected), "atol": pytest.approx(expected)}
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(200, 64, generator=generator)
    forward, backward = torch.zeros(200), torch.zeros(200)
    for index in range(64):
        forward += terms[:, index]
        backward += terms[:, -1 - index]
    difference = float(((forward - backward).abs() / 8).max())  # the sums are of order sqrt(64)
    assert difference < tolerance_for(torch.float32, terms=64)["atol"] < 100 * difference


def test_movement_error():
    start, end = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    assert movement_error(end, end, start) == 0
    assert movement_error({"w": -torch.ones(4)}, end, start) == 2
    assert math.isnan(movement_error(start, start, start))
    with pytest.raises(ValueError, match="unknown weights"):
        movement_error({**end, "other": torch.zeros(1)}, end, start)


def test_toy_batches_are_learnable_and_ragged():
    run = reference(updates=30, lrs=[0.02] * 30, optimizer=Optimizer())
    assert run.losses[-1] < 0.75 * run.losses[0]
    counts = (toy_batches(1, 12)[0][1] != -100).sum(1)
    assert len(set(counts.tolist())) > 2
