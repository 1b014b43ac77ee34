"""Sums over micro-batches and ranks: losses weighted by the global batch, evaluation in int64 and float64."""

import math

import pytest
import torch
import torch.distributed as dist

from largetrain.engine.sums import UpdateSums, evaluation_sums
from tests.ranks import run_ranks

WEIGHTS = (3, 1.5)  # of the two ranks


def one_update(losses, weights):
    """Body of a rank: factor, scaled losses with their gradients, mean and weight."""
    dist.init_process_group("gloo")
    rank, seen = dist.get_rank(), []
    sums = UpdateSums(weights[rank], torch.device("cpu"))
    for index, value in enumerate(losses[rank]):
        loss = torch.tensor(value, requires_grad=True)
        sums.add(loss, last=index == len(losses[rank]) - 1)
        scaled = sums.scaled(loss, 2.0)
        scaled.backward()
        seen.append((float(scaled), float(loss.grad)))
    mean, weight = sums.finish()
    return seen, float(mean), weight, [float(loss) for loss in sums.losses]


def test_losses_are_weighted_by_the_whole_batch():
    """DDP averages over two ranks: loss x 2 ranks / weight, and here x 2 besides."""
    losses = ((6.0, 3.0), (1.5, 0.75))
    for rank, (seen, mean, weight, kept) in enumerate(run_ranks(one_update, 2, losses, WEIGHTS)):
        factor = 2 * 2 / 4.5
        assert seen == [pytest.approx((loss * factor, factor), rel=1e-6) for loss in losses[rank]]
        assert mean == pytest.approx(11.25 / 4.5, rel=1e-6)
        assert weight == 4  # 4.5, rounded to whole targets
        assert kept == list(losses[rank])


def test_a_batch_without_targets_is_zero_and_no_division():
    for seen, mean, weight, _ in run_ranks(one_update, 2, ((0.0,), (0.0,)), (0, 0)):
        assert seen == [(0.0, 4.0)] and mean == 0.0 and weight == 0


def test_a_loss_that_is_not_finite_has_gradients_that_are_not():
    for rank, (seen, mean, _, _) in enumerate(run_ranks(one_update, 2, ((1.0,), (math.inf,)), WEIGHTS)):
        assert math.isnan(seen[0][1]) == (rank == 1)
        assert not math.isfinite(mean)


LARGE = 2**53 + 1  # an int64 that float64 has not


def add_up(shares):
    dist.init_process_group("gloo")

    def evaluate(value):
        return {
            "count": torch.tensor(value * LARGE),
            "matrix": torch.full((2, 3), value),
            "loss": torch.tensor(value / 4, dtype=torch.float64),
        }

    batches = shares[dist.get_rank()]
    return evaluation_sums(iter(batches), evaluate), evaluation_sums(iter(()), evaluate)


def test_evaluation_sums_are_exact_on_every_rank():
    for totals, none in run_ranks(add_up, 2, ((1, 0), (4, 5))):
        assert int(totals["count"]) == 10 * LARGE
        assert torch.equal(totals["matrix"], torch.full((2, 3), 10))
        assert float(totals["loss"]) == 2.5 and totals["loss"].dtype == torch.float64
        assert none == {}


def single_dtype(dtype):
    dist.init_process_group("gloo")
    with pytest.raises(AssertionError, match="int64 and float64"):
        evaluation_sums([1], lambda _: {"loss": torch.tensor(1, dtype=dtype)})


def test_other_dtypes_are_our_own_mistake():
    run_ranks(single_dtype, 1, torch.float32)
