"""The order of samples: permutations, epochs, ranks, resume."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largetrain.data.order import SampleOrder, permute


@pytest.mark.parametrize("samples", [*range(1, 70), 127, 128, 129, 1000, 4096, 4097, 65535])
def test_every_epoch_is_a_permutation(samples):
    for epoch in range(3):
        ids = permute(np.arange(samples), samples, seed=7, epoch=epoch)
        assert np.array_equal(np.sort(ids), np.arange(samples))


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 5000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_any_seed_and_epoch_give_a_permutation(samples, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(samples), samples, seed, epoch)), np.arange(samples))


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(10**6, 2**40), seed=st.integers(0, 2**32), start=st.integers(0, 2**40))
def test_huge_ranges_stay_in_range_and_never_repeat(samples, seed, start):
    index = np.unique((start + np.arange(0, 2000, dtype=np.int64) * 524287) % samples)
    ids = permute(index, samples, seed, 0)
    assert ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < samples
    assert len(np.unique(ids)) == len(index)


def test_the_order_is_fixed_for_good():
    """A changed permutation would silently reorder the data of every resumed run."""
    assert permute(np.arange(10), 10, 1234, 0).tolist() == [2, 0, 5, 7, 6, 4, 8, 1, 3, 9]
    assert permute(np.arange(3), 2**40, 1234, 5).tolist() == [844019391078, 380785812635, 742301761814]


def test_epochs_and_seeds_differ():
    orders = {tuple(permute(np.arange(64), 64, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("samples", [2, 3, 5, 8, 12])
def test_every_sample_is_equally_likely_at_every_place(samples):
    """Chi-square of (place, sample) counts over 4000 fixed epochs, against the 1e-6 tail of its normal limit."""
    epochs = 4000
    orders = np.array([permute(np.arange(samples), samples, 99, epoch) for epoch in range(epochs)])
    for place in range(samples):
        counts = np.bincount(orders[:, place], minlength=samples)
        chi_square = float(((counts - epochs / samples) ** 2 / (epochs / samples)).sum())
        degrees = samples - 1
        # Wilson-Hilferty: (chi2 / k)^(1/3) is close to normal with mean 1 - 2/9k and variance 2/9k
        score = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
        assert score < 4.75


def test_small_sets_reach_every_permutation():
    orders = {tuple(permute(np.arange(4), 4, 5, epoch)) for epoch in range(600)}
    assert len(orders) == 24


def test_neighbours_are_spread():
    """The distance of neighbouring places is that of a random order: on average a third of the range."""
    ids = permute(np.arange(100_000), 100_000, 3, 0)
    assert abs(np.abs(np.diff(ids)).mean() / 100_000 - 1 / 3) < 0.005


@pytest.mark.parametrize("data_parallel", [1, 2, 3, 4])
def test_ranks_are_disjoint_and_an_epoch_is_whole(data_parallel):
    """Union per epoch is the whole set, ranks share nothing, epochs differ."""
    samples, micro = 24, 2
    order = SampleOrder(samples, global_batch=micro * data_parallel, seed=1)
    updates = samples // order.global_batch
    epochs = []
    for epoch in range(2):
        per_rank = [
            np.concatenate(
                [
                    order.rank_ids(epoch * updates + update, 0, micro, data_parallel, rank)[0]
                    for update in range(updates)
                ]
            )
            for rank in range(data_parallel)
        ]
        everything = np.concatenate(per_rank)
        assert sorted(everything.tolist()) == list(range(samples))
        epochs.append(everything.tolist())
    assert epochs[0] != epochs[1]


def test_an_update_has_the_same_samples_for_every_way_of_sharing_it_out():
    order = SampleOrder(100, global_batch=12, seed=4)
    whole = order.ids(12 * 9, 12)[0].tolist()
    for data_parallel, micro, accumulation in [(1, 12, 1), (1, 3, 4), (2, 3, 2), (3, 4, 1), (4, 1, 3), (12, 1, 1)]:
        shared = [
            order.rank_ids(9, step, micro, data_parallel, rank)[0]
            for step in range(accumulation)
            for rank in range(data_parallel)
        ]
        assert np.concatenate(shared).tolist() == whole


@settings(max_examples=80, deadline=None)
@given(
    samples=st.integers(1, 300),
    consumed=st.integers(0, 2000),
    count=st.integers(0, 400),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
def test_a_resumed_order_is_the_tail_of_the_whole(samples, consumed, count, seed, shuffle):
    order = SampleOrder(samples, 4, seed, shuffle)
    ids, epochs = order.ids(0, consumed + count)
    tail_ids, tail_epochs = order.ids(consumed, count)
    assert np.array_equal(tail_ids, ids[consumed:]) and np.array_equal(tail_epochs, epochs[consumed:])
    assert np.array_equal(epochs, np.arange(consumed + count) // samples)


def test_a_batch_carries_on_into_the_next_epoch():
    order = SampleOrder(10, global_batch=4, seed=0)
    ids, epochs = order.ids(8, 4)
    assert epochs.tolist() == [0, 0, 1, 1]
    assert sorted([*order.ids(0, 8)[0], *ids[:2]]) == list(range(10))


def test_without_shuffling_the_order_is_the_identity():
    ids, epochs = SampleOrder(5, 2, seed=3, shuffle=False).ids(3, 6)
    assert ids.tolist() == [3, 4, 0, 1, 2, 3] and epochs.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "steps", "dropped"),
    [(10, 4, 1, 2, 2), (10, 4, 2, 5, 0), (10, 4, 0.7, 1, 3), (10, 1, 0.7, 7, 0), (3, 4, 1, 0, 3), (6, 4, 2.0, 3, 0)],
)
def test_updates_of_epochs_are_known_before_the_start(samples, batch, epochs, steps, dropped):
    """What does not fill a last update is counted."""
    order = SampleOrder(samples, batch, 0)
    assert (order.steps_for(epochs), order.dropped_for(epochs)) == (steps, dropped)


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (-1, 1), (2**63, 1), (4, 0)])
def test_impossible_sizes_are_refused(samples, batch):
    with pytest.raises(ValueError):
        SampleOrder(samples, batch, 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_repeated_augmentation_shows_copies_in_a_row_with_their_own_epochs(shuffle):
    """Over `repeats` epochs every sample comes `repeats` times; no pair of sample and epoch ever comes twice."""
    order = SampleOrder(10, global_batch=4, seed=5, shuffle=shuffle, repeats=3)
    ids, epochs = order.ids(0, 90)
    once, _ = SampleOrder(10, 4, 5, shuffle).ids(0, 30)
    assert ids.tolist() == once.repeat(3).tolist()
    assert sorted(ids[:30]) == sorted([*range(10)] * 3)
    assert len(set(zip(ids.tolist(), epochs.tolist(), strict=True))) == 90
    assert epochs[:3].tolist() == [0, 1, 2] and epochs[30:33].tolist() == [3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 60), repeats=st.integers(1, 7), consumed=st.integers(0, 500), count=st.integers(0, 200))
def test_repeated_orders_resume_anywhere(samples, repeats, consumed, count):
    order = SampleOrder(samples, 4, 1, repeats=repeats)
    ids, epochs = order.ids(0, consumed + count)
    tail_ids, tail_epochs = order.ids(consumed, count)
    assert np.array_equal(tail_ids, ids[consumed:]) and np.array_equal(tail_epochs, epochs[consumed:])


def test_an_epoch_has_as_many_samples_with_repeats():
    order = SampleOrder(10, 4, 0, repeats=5)
    assert (order.steps_for(2), order.dropped_for(1)) == (5, 2)
    with pytest.raises(ValueError, match="repeats=0"):
        SampleOrder(10, 4, 0, repeats=0)
