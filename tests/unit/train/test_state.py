"""Counters and random generators."""

import random

import numpy as np
import torch

from largetrain.train.state import TrainState, random_state, restore_random_state, seed_rank

CPU = torch.device("cpu")


def draws():
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
    ]


def test_counters():
    state = TrainState()
    state.advance(applied=True, samples=8, tokens=100)
    state.advance(applied=False, samples=8, tokens=90)
    state.advance(applied=False, samples=8, tokens=90)
    assert state == TrainState(step=3, consumed_samples=24, skipped=2, skipped_in_a_row=2, tokens=280)
    state.advance(applied=True, samples=8, tokens=1)
    assert (state.skipped, state.skipped_in_a_row) == (2, 0)
    assert TrainState(**state.to_dict()) == state


def test_all_generators_are_restored_also_between_the_halves_of_a_gaussian_pair(tmp_path):
    seed_rank(7, 0)
    random.gauss(0, 1)
    np.random.randn()  # leaves the second of a pair cached
    torch.save(random_state(CPU), tmp_path / "rng.pt")
    expected = draws()
    seed_rank(8, 3)
    assert draws() != expected
    restore_random_state(torch.load(tmp_path / "rng.pt", weights_only=True), CPU)
    assert draws() == expected


def test_ranks_and_seeds_have_streams_of_their_own():
    seen = set()
    for seed in (0, 1, 2):
        for rank in (0, 1, 2):
            seed_rank(seed, rank)
            seen |= {random.random(), float(np.random.rand()), torch.rand(()).item()}
    assert len(seen) == 27
