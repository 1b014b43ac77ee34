"""Batches of other shapes than the one before: stages neither hang nor take old numbers for new ones."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from largetrain.errors import ConfigError
from tests.distributed.parity.parallel import BACKENDS, VOCAB, Cell
from tests.ranks import run_ranks
from tests.reference import toy_batches

STAGES = Cell(backend="pipeline", stages=2, accumulation=2)
LENGTHS = (8, 5, 8, 3)  # of the sequences of each update


def batches_of(samples, length, count):
    found = toy_batches(count, samples, length, VOCAB)
    return [
        {"input_ids": ids, "labels": labels, "valid": torch.ones(samples, dtype=torch.bool)} for ids, labels in found
    ]


def updates_and_evaluations(cell):
    """Body of a rank: updates of several lengths, each followed by an evaluation of batches of several shapes."""
    backend, _ = BACKENDS[cell.backend](cell.resolve())
    seen, blind = [], cell.stages == 3 and dist.get_rank() == 1
    for length in LENGTHS:
        batches = [{}] * cell.accumulation if blind else batches_of(4, length, cell.accumulation)
        result = backend.train_step(iter(batches))
        shapes = ((4, length), (1, 8), (3, 2), (4, 7), (2, 8), (1, 1))
        figures = backend.evaluate(iter([batch for shape in shapes for batch in batches_of(*shape, 1)]))
        seen += [float(result.loss), float(result.grad_norm), figures["loss"]]
    return seen


CELLS = {
    "three stages": replace(STAGES, stages=3, layers=3),  # the middle one trains without seeing a batch
    "dualpipev": replace(STAGES, layers=4, schedule="dualpipev", accumulation=4),
}


@pytest.mark.parametrize("name", CELLS)
def test_updates_and_evaluations_of_several_shapes_are_those_of_one_rank(name):
    """Sums of under 100 numbers, over four updates."""
    cell = CELLS[name]
    alone = replace(cell, backend="deepspeed", stages=1, schedule="1f1b")
    (expected,) = run_ranks(updates_and_evaluations, 1, alone)
    for seen in run_ranks(updates_and_evaluations, cell.stages, cell, timeout=100):
        assert seen == pytest.approx(expected, rel=1e-5)


def mixed():
    """Body of a rank: micro-batches of two shapes in one update, and then an update as usual."""
    backend, _ = BACKENDS["pipeline"](STAGES.resolve())
    with pytest.raises(ConfigError) as caught:
        backend.train_step(iter(batches_of(4, 8, 1) + batches_of(3, 8, 1)))
    return caught.value.problems[0], backend.train_step(iter(batches_of(4, 8, 2))).applied


def test_shapes_that_differ_within_an_update_are_refused_before_anything_is_sent():
    for words, applied in run_ranks(mixed, 2):
        assert "shapes [3, 8], [4, 8]" in words and "pad them alike" in words
        assert applied
