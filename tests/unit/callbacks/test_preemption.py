"""When a run is stopped, in one process whose agreement is a script of what the ranks would answer."""

from pathlib import Path

import pytest

from largetrain.callbacks.periodic import CHECKPOINT, Checkpointing, Evaluation
from largetrain.callbacks.preemption import Abandoned, Preemption
from largetrain.engine.signals import Stop
from largetrain.errors import CheckpointError, PreemptedError
from tests.unit.callbacks.test_periodic import moments


class Agreement:
    """Answers with what this rank brings and what another rank is said to bring."""

    def __init__(self, of_another=()):
        self.of_another, self.last, self.brought = iter(of_another), 0, []

    def union(self, flags):
        self.brought.append(flags)
        self.last = flags | next(self.of_another, 0)
        return self.last


class Requests:
    def __init__(self):
        self.told = []

    def begin(self):
        self.told.append("begin")

    def end(self):
        self.told.append("end")


def preemption_of(agreement, sources=(), requests=None, saved=None):
    saved = [] if saved is None else saved

    def save():
        saved.append(1)
        return Path("folder")

    return Preemption(agreement, sources, save, requests)


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (Stop.SIGTERM, 75, "(SIGTERM)"),
        (Stop.TIME, 75, "(--max-minutes is over)"),
        (Stop.LAUNCHER, 75, "(the launcher has died)"),
        (Stop.SIGINT | Stop.SIGTERM, 130, "(interrupted, SIGTERM)"),  # as unhooked launchers make of Ctrl-C
    ],
)
@pytest.mark.parametrize("of_another_rank", [False, True])
def test_what_any_rank_is_asked_stops_it_saved(flags, code, reason, of_another_rank):
    saved, requests = [], Requests()
    own = [0, 0 if of_another_rank else flags]
    agreement = Agreement([0, flags if of_another_rank else 0])
    preemption = preemption_of(agreement, [lambda: own.pop(0)], requests, saved)
    preemption.on_start(0)
    first, second, *_ = moments(5)
    preemption.on_step(first)
    assert saved == []
    with pytest.raises(PreemptedError, match="stopped after update 2 .*saved in folder.*--resume auto") as caught:
        preemption.on_step(second)
    assert reason in str(caught.value)
    assert (caught.value.exit_code, saved, requests.told) == (code, [1], ["begin", "end"])


def test_after_the_last_update_a_run_ends_as_usual():
    saved, requests = [], Requests()
    preemption = preemption_of(Agreement(), [lambda: Stop.SIGTERM], requests, saved)
    preemption.on_step(list(moments(3))[-1])
    preemption.on_end(3)
    assert (saved, requests.told) == ([], ["end"])


def test_a_checkpoint_that_fails_is_what_the_run_ends_with():
    def save():
        raise CheckpointError("no room")

    with pytest.raises(CheckpointError, match="no room"):
        Preemption(Agreement(), [lambda: Stop.SIGTERM], save).on_step(next(moments(3)))


def test_an_evaluation_is_given_up_before_the_next_batch_and_its_loader_closed():
    closed = []

    def batches():
        try:
            yield from range(5)
        finally:
            closed.append(True)

    seen = []
    preemption = preemption_of(Agreement([0, 0, Stop.SIGUSR1]))
    with pytest.raises(Abandoned):
        for batch in preemption.watched(batches()):
            seen.append(batch)
    assert (seen, closed) == ([0, 1], [True])
    assert list(preemption_of(Agreement()).watched(iter([1, 2]))) == [1, 2]


class Backend:
    def evaluate(self, batches):
        return {"loss": float(sum(batches))}

    def preview(self, batch):
        return None


@pytest.mark.parametrize("stops", [False, True])
def test_an_evaluation_that_is_owed_comes_first_and_can_be_given_up_again(stops):
    told, saved = [], []

    class Listener:
        def on_evaluation(self, step, figures):
            told.append((step, figures))

    preemption = preemption_of(Agreement([0, Stop.SIGTERM if stops else 0]), saved=saved)
    batches = lambda: iter([1, 2])  # noqa: E731
    evaluation = Evaluation(Backend(), batches, 2, True, [Listener()], owed=True, preemption=preemption)
    if stops:
        with pytest.raises(PreemptedError, match="stopped after update 4"):
            evaluation.on_start(4)
    else:
        evaluation.on_start(4)
    assert told == ([] if stops else [(4, {"loss": 3.0})])
    assert saved == ([1] if stops else [])
    Evaluation(Backend(), batches, 2, True, [Listener()]).on_start(4)  # nothing is owed
    assert len(told) == (0 if stops else 1)


def test_milestones():
    saved = []
    checkpointing = Checkpointing(lambda: saved.append(moment.step), 4, False, milestones=[1, 3, 4])
    for moment in moments(9):
        checkpointing.on_step(moment)
    assert saved == [1, 3, 4, 8]


def test_the_clock_of_any_rank_makes_all_ranks_save_after_the_next_update(monkeypatch):
    now, saved = [0.0], []
    monkeypatch.setattr("largetrain.callbacks.periodic.time.monotonic", lambda: now[0])
    agreement = Agreement([0, CHECKPOINT])  # another rank's clock is ahead once
    checkpointing = Checkpointing(lambda: saved.append(moment.step), 7, False, every_minutes=0.5, agreement=agreement)
    preemption = Preemption(agreement, [checkpointing.flags], lambda: Path("folder"))
    for moment in moments(10):
        now[0] += 10.0
        checkpointing.on_step(moment)
        preemption.on_step(moment)
    # 3: of another rank; 30 s later, in update 6, its own, so 7, where one is due anyway; 10 s into 10: not yet
    assert saved == [3, 7]
    assert [index + 1 for index, flags in enumerate(agreement.brought) if flags] == [6, 10]
