"""When evaluation and checkpoints are due, in one process."""

import pytest
import torch

from largetrain.callbacks.base import Callback, Moment
from largetrain.callbacks.periodic import Best, Checkpointing, Evaluation
from largetrain.engine.base import StepResult
from largetrain.train.state import TrainState

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


def test_the_best_of_another_figure_is_forgotten_and_an_absent_figure_passed_over():
    state, marked = TrainState(), []
    top5 = Best("top5", False, state, lambda: state.step, marked.append, print)
    for state.step, figures in enumerate([{"top5": 90.0}, {}, {"top5": 80.0}, {"top5": 95.0}], 1):
        top5.on_evaluation(state.step, figures)
    assert marked == [1, 4] and (state.best_figure, state.best_step, state.best_name) == (95.0, 4, "top5")
    top1 = Best("top1", False, TrainState(**state.to_dict()), lambda: 5, marked.append, print)
    top1.on_evaluation(5, {"top5": 95.0, "top1": 60.0})
    assert marked == [1, 4, 5]
