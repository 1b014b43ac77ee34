"""Language modeling keeps its sums: fp64, added up, read as tensors."""

import math

import torch

from largetrain.tasks.language_modeling import LanguageModeling
from tests.unit.tasks.models import Answer


def test_sums_are_fp64_and_give_loss_perplexity_and_bits():
    # uniform logits over 4 tokens: ln 4 nats at each of the 3 valid targets
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": labels}
    model = Answer(torch.zeros(2, 3, 4))
    task = LanguageModeling(bytes_per_token=2.0)
    sums = task.evaluate(model, batch)
    assert {value.dtype for value in sums.values()} == {torch.float64}
    figures = task.metrics({name: value * 2 for name, value in sums.items()})
    assert task.figures() == tuple(figures)
    assert LanguageModeling().figures() == tuple(LanguageModeling().metrics(sums))
    assert figures["tokens"] == 6.0 and task.weight(batch) == 3
    # fp32 logarithms: 1e-6 is some ulps of ln 4
    assert math.isclose(figures["loss"], math.log(4), rel_tol=1e-6)
    assert math.isclose(figures["perplexity"], 4.0, rel_tol=1e-5)
    assert math.isclose(figures["bits_per_byte"], 1.0, rel_tol=1e-6)
    assert task.preview(model, batch) is None
