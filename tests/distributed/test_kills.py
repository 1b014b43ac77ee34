"""Ranks are killed within saves of whole small runs, which then go on as if nothing had been.

A core of `python -m tests.sweeps.kills`.
"""

import random

import pytest

from tests.distributed.dying import SAVES, Death, killed_and_resumed, make_kind, random_deaths
from tests.sweeps.kills import LAST, LATER, unreached


@pytest.fixture(scope="module")
def kind(tmp_path_factory):
    return make_kind(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return make_kind(tmp_path_factory.mktemp("slow"), slow=True)


def test_every_fault_point_is_reached(kind):
    """Else the matrix of kills would lack cells."""
    assert unreached([kind]) == set()


@pytest.mark.parametrize(
    "deaths",
    [
        [Death(2, (0,), point="mid-manifest"), Death(LATER, (1,), point="mid-pieces")],
        [Death(LATER, (0,), point="mid-prune"), Death(LAST, (0,), point="after-rename")],
    ],
    ids=lambda deaths: "; ".join(map(str, deaths)),
)
def test_a_killed_rank_costs_nothing_that_was_written(kind, deaths):
    """One run that is killed twice."""
    found, _ = killed_and_resumed(kind, deaths, deaths[0].point)
    assert found == []


def test_kills_in_the_middle_of_a_write_while_training_goes_on(slow):
    assert all(slow.traces[0].updates.get(step) for step in SAVES[:-1])
    found, told = killed_and_resumed(slow, random_deaths(slow, random.Random(0), 2))
    assert found == [] and "in the middle of a write" in told


def test_a_checkpoint_that_was_best_when_it_was_published_is(slow):
    """Killed at once after the rename: the record is in it, and `best` names it when the run goes on."""
    assert any("open" in change and "partial-step-00000006/best.json" in change for _, change in slow.traces[0].changes)
    found, _ = killed_and_resumed(slow, [Death(LATER, (0,), point="after-rename")], "best")
    assert found == []
