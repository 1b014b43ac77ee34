"""Updates that are not finite, in stages: skipped by all ranks whichever stage saw it, named, and the run stopped."""

import pytest
from torch import nn

from tests.distributed.test_guard import EVERY, POISON, VOCAB, _InfiniteGradient, diverge, inputs
from tests.distributed.tiny_run import rows_of, train
from tests.ranks import run_ranks


class Table(nn.Embedding):
    """The first stage; its gradient alone is infinite for a batch with the poison in it."""

    poison = True

    def forward(self, input_ids):
        hidden = super().forward(input_ids)
        poisoned = self.poison and bool((input_ids == POISON).any())
        return hidden + _InfiniteGradient.apply(hidden) if poisoned else hidden


class Loss(nn.Linear):
    """The last stage; its loss is infinite for a batch whose labels hold the poison."""

    poison = True

    def forward(self, hidden, labels):
        logits = super().forward(hidden).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        poisoned = self.poison and bool((labels == POISON).any())
        return (loss * float("inf") if poisoned else loss), (labels != -100).sum()


class Staged(nn.Module):
    """A next-token table in two stages; `value` says where it is poisoned."""

    def __init__(self, value):
        super().__init__()
        self.table, self.last = Table(VOCAB, 8), Loss(8, VOCAB)
        self.table.poison, self.last.poison = value == "gradient", value == "loss"

    def layers(self):
        return [self.table, self.last]


def staged_inputs(folder, stage, precision, poisoned, value, **others):
    sets = inputs(folder, stage, precision, poisoned, value, **others)
    return [sets[0].replace("test_guard:Poisoned", "test_pipeline_guard:Staged"), sets[1], "parallel.pipeline_stages=2"]


@pytest.mark.parametrize(
    ("stage", "precision", "value"),
    [(0, "fp32", "gradient"), (1, "fp16", "loss")],
)
def test_one_bad_sample_skips_its_update_on_all_stages_and_replicas(tmp_path, stage, precision, value):
    clean = staged_inputs(tmp_path, stage, precision, [], value)
    whole = run_ranks(train, 4, tmp_path, 5, "whole", None, clean)[3]  # the last stage of the second replica
    bad = whole.updates[2]["samples"][2]
    sets = staged_inputs(tmp_path, stage, precision, [bad], value)
    results = run_ranks(train, 4, tmp_path, 5, "out", None, sets)
    for outcome in results:
        assert [update["applied"] for update in outcome.updates] == [True, True, False, True, True]
        assert outcome.updates[4]["norm"] == results[0].updates[4]["norm"] < float("inf")
        lrs = [update["lr"] for update in whole.updates]
        assert [update["lr"] for update in outcome.updates] == [*lrs[:3], *lrs[2:4]]
    row = rows_of(tmp_path)[2]
    assert (row["loss"] is None) == (value == "loss") and row["skipped"] == 1


def test_at_its_floor_the_loss_scale_ends_the_run_on_all_stages(tmp_path):
    fp16 = {"initial_scale_power": 2, "min_loss_scale": 1, "hysteresis": 1}
    sets = staged_inputs(tmp_path, 0, "fp16", EVERY, "gradient", fp16=fp16)
    first, second = run_ranks(diverge, 2, tmp_path, 20, sets)
    assert first == second
    message, code = first
    assert code == 3 and "gradients are not finite while every loss is" in message
    assert message.startswith("step 3: the loss scale is at its floor (1, fp16.min_loss_scale)")
    assert "Samples of this update: rank 1, samples " in message  # those of the last stage
    assert [row["loss_scale"] for row in rows_of(tmp_path)] == [4, 2, 1]


def test_the_culprit_is_named_by_the_last_stage(tmp_path):
    sets = staged_inputs(tmp_path, 1, "fp32", EVERY, "loss", guard=2)
    first, second = run_ranks(diverge, 2, tmp_path, 20, sets)
    assert first == second
    assert first[0].startswith("step 2: 2 updates in a row") and "the loss is not finite on rank 1, samples" in first[0]
