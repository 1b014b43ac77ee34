"""When evaluation and checkpoints are due, in one process."""

import pytest
import torch

from largetrain.callbacks.base import Callback, Moment
from largetrain.callbacks.periodic import Checkpointing, Evaluation
from largetrain.engine.base import StepResult

RESULT = StepResult(torch.tensor(1.0), 0.1, 1.0, 1.0, True, 10, False, (torch.tensor(1.0),), (1,))


def moments(total, start=0):
    for step in range(start + 1, total + 1):
        yield Moment(step, total, step * 8, 0, 0, 0.1, 0.0, RESULT)


@pytest.mark.parametrize(
    ("every", "at_end", "due"),
    [(0, True, [7]), (0, False, []), (3, True, [3, 6, 7]), (3, False, [3, 6]), (7, True, [7]), (100, False, [])],
)
def test_due_steps(every, at_end, due):
    saved = []
    checkpointing = Checkpointing(lambda: saved.append(moment.step), every, at_end)
    for moment in moments(7):
        checkpointing.on_step(moment)
    assert saved == due


@pytest.mark.parametrize(("every", "at_end", "due"), [(2, True, [2, 4, 5]), (0, True, [5]), (5, False, [5])])
@pytest.mark.parametrize("draws", [True, False])
def test_listeners_are_told_the_figures_and_shown_the_first_batch(every, at_end, due, draws):
    told, pictures = [], []

    class Listener(Callback):
        def on_evaluation(self, step, figures):
            told.append((step, figures))

        def on_picture(self, step, picture):
            pictures.append((step, picture.tolist()))

    class Backend:
        def evaluate(self, batches):
            return {"loss": float(sum(batches))}

        def preview(self, batch):
            return torch.tensor([batch]) if draws else None

    evaluation = Evaluation(Backend(), lambda: iter([1, 2]), every, at_end, [Listener()])
    for moment in moments(5):
        evaluation.on_step(moment)
    assert told == [(step, {"loss": 3.0}) for step in due]
    assert pictures == ([(step, [1]) for step in due] if draws else [])
