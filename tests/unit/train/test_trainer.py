"""The loop, with a backend that only counts."""

import itertools

import pytest
import torch

from largetrain.callbacks.base import Callback
from largetrain.engine.base import StepResult
from largetrain.train.state import TrainState
from largetrain.train.trainer import Trainer


class CountingBackend:
    def __init__(self, applied=()):
        self.pulled, self.applied = [], dict(applied)

    def train_step(self, micro_batches):
        self.pulled += [next(micro_batches), next(micro_batches)]
        update = len(self.pulled) // 2
        return StepResult(
            loss=torch.tensor(1.0),
            lr=0.1,
            grad_norm=1.0,
            loss_scale=1.0,
            applied=self.applied.get(update, True),
            tokens=10,
            scale_exhausted=False,
            local_losses=(torch.tensor(1.0),) * 2,
            sample_ids=(1, 2),
        )


class Stream:
    def __init__(self):
        self.wait_s, self.closed, self._count = 0.0, False, itertools.count()

    def __iter__(self):
        return self

    def __next__(self):
        self.wait_s += 0.25
        return next(self._count)

    def close(self):
        self.closed = True


class Log(Callback):
    def __init__(self, name, events, fail_at=None):
        self.name, self.events, self.fail_at = name, events, fail_at

    def on_start(self, step):
        self.events.append((self.name, "start", step))

    def on_step(self, moment):
        self.events.append((self.name, "step", moment.step))
        self.moment = moment
        if moment.step == self.fail_at:
            raise ValueError("stop here")

    def on_end(self, step):
        self.events.append((self.name, "end", step))

    def on_failure(self, step):
        self.events.append((self.name, "failure", step))


def test_callbacks_are_called_in_order_and_told_the_truth():
    events, stream = [], Stream()
    first, second = Log("first", events), Log("second", events)
    backend = CountingBackend({2: False})
    state = Trainer(backend, stream, TrainState(), 3, 8, [first, second]).fit()
    moments = ["start", *["step"] * 3, "end"]
    steps = [0, 1, 2, 3, 3]
    assert events == [(n, m, s) for m, s in zip(moments, steps, strict=True) for n in ("first", "second")]
    assert state == TrainState(step=3, consumed_samples=24, skipped=1, skipped_in_a_row=0, tokens=30)
    assert backend.pulled == list(range(6))
    assert first.moment.last
    assert first.moment.data_s == 0.5
    assert stream.closed


def test_a_resumed_run_makes_the_remaining_updates():
    events = []
    Trainer(CountingBackend(), Stream(), TrainState(step=2, consumed_samples=16), 3, 8, [Log("a", events)]).fit()
    assert events == [("a", "start", 2), ("a", "step", 3), ("a", "end", 3)]


def test_a_failure_reaches_every_callback_and_ends_the_loader():
    events, stream = [], Stream()
    callbacks = [Log("a", events, fail_at=2), Log("b", events)]
    with pytest.raises(ValueError, match="stop here"):
        Trainer(CountingBackend(), stream, TrainState(), 5, 8, callbacks).fit()
    assert events[-3:] == [("a", "step", 2), ("a", "failure", 2), ("b", "failure", 2)]
    assert stream.closed
