"""Updates with a non-finite loss or gradient: skipped by all ranks together, named, and the run stopped in the end."""

import pytest
import torch
from torch import nn

from largetrain.errors import DivergedError
from tests.distributed.tiny_run import SEQ_LEN, precision_section, rows_of, train, write_inputs
from tests.ranks import run_ranks

VOCAB = 257
POISON = 7


class Poisoned(nn.Module):
    """A next-token table whose loss is `value` times inf for a batch with the poison token in it.

    Args:
        value: "loss" makes the loss infinite; "gradient" keeps it finite and overflows the gradient alone.
    """

    def __init__(self, value: str = "loss"):
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)
        self.value = value

    def forward(self, input_ids, labels):
        logits = self.table(input_ids).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        if bool((input_ids == POISON).any()):
            loss = loss * torch.inf if self.value == "loss" else loss + _InfiniteGradient.apply(logits).sum()
        return loss, (labels != -100).sum()


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, torch.inf)


class Samples(torch.utils.data.Dataset):
    """Samples of random tokens; those with the given ids hold the poison."""

    def __init__(self, split, poisoned=(), size=64):
        self.poisoned, self.size = set(poisoned), size

    def __len__(self):
        return self.size

    def __getitem__(self, sample):
        generator = torch.Generator().manual_seed(sample)
        tokens = torch.randint(10, VOCAB, (SEQ_LEN + 1,), generator=generator)
        if sample in self.poisoned:
            tokens[3] = POISON
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def inputs(folder, stage, precision, poisoned, value="loss", guard=25, fp16=None):
    engine = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        **precision_section(precision),
    }
    if fp16:
        engine["fp16"] = {"enabled": True, **fp16}
    write_inputs(folder, engine, {"guard": {"max_skipped_in_a_row": guard}, "checkpoints": {"every_steps": 2}})
    names = "tests.distributed.test_guard"
    return [
        f"model={{target: '{names}:Poisoned', args: {{value: {value}}}, vocab_size: {VOCAB}}}",
        f"data={{target: '{names}:Samples', args: {{poisoned: {list(poisoned)}}}}}",
    ]


def samples_of_update(folder, sets, update, rank):
    """Ids that `rank` draws in an update, found by a run without poison."""
    outcome = run_ranks(train, 2, folder, update, "look", None, sets)[rank]
    return outcome.updates[update - 1]["samples"]


EVERY = range(64)


def diverge(folder, steps, sets, resume=None):
    try:
        train(folder, steps, resume=resume, sets=sets)
    except DivergedError as error:
        return str(error), error.exit_code
    raise AssertionError("the run was not stopped")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_at_its_floor_the_loss_scale_ends_the_run(tmp_path, stage):
    """Scale 16, halved once per skip down to the floor of 1, where the next overflow stops the run."""
    fp16 = {"initial_scale_power": 4, "min_loss_scale": 1, "hysteresis": 1}
    sets = inputs(tmp_path, stage, "fp16", EVERY, fp16=fp16)
    results = run_ranks(diverge, 2, tmp_path, 20, sets)
    assert results[0] == results[1]  # all ranks stop at the same step with the same words
    message, code = results[0]
    assert code == 3
    assert message.startswith("step 5: the loss scale is at its floor (1, fp16.min_loss_scale)")
    assert "rank 0, samples " in message
    assert "rank 1, samples " in message
    assert "Last finite loss: none" in message
    assert "step-00000005" in message
    assert [row["loss_scale"] for row in rows_of(tmp_path)] == [16, 8, 4, 2, 1]
    assert [row["skipped"] for row in rows_of(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_too_many_skips_in_a_row_end_the_run(tmp_path, stage, precision):
    sets = inputs(tmp_path, stage, precision, EVERY, guard=3)
    results = run_ranks(diverge, 2, tmp_path, 20, sets)
    assert results[0] == results[1]
    message, code = results[0]
    assert code == 3
    assert message.startswith("step 3: 3 updates in a row were skipped (guard.max_skipped_in_a_row)")
    rows = rows_of(tmp_path)
    assert [row["applied"] for row in rows] == [False] * 3
    assert len({row["lr"] for row in rows}) == 1  # the schedule stands still


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")])
@pytest.mark.parametrize("value", ["loss", "gradient"])
def test_one_bad_sample_on_one_rank_skips_its_update_on_all(tmp_path, stage, precision, value):
    clean = inputs(tmp_path, stage, precision, [], value)
    whole = run_ranks(train, 2, tmp_path, 5, "whole", None, clean)[1]
    bad = whole.updates[2]["samples"][2]  # of the second micro-batch of rank 1 in update 3
    sets = inputs(tmp_path, stage, precision, [bad], value)
    results = run_ranks(train, 2, tmp_path, 5, "out", None, sets)
    for outcome in results:
        assert [update["applied"] for update in outcome.updates] == [True, True, False, True, True]
        lrs = [update["lr"] for update in whole.updates]
        # the schedule counts applied updates only
        assert [update["lr"] for update in outcome.updates] == [*lrs[:3], *lrs[2:4]]
        assert len(set(lrs)) > 2
    if precision == "fp16":
        assert results[0].updates[3]["scale"] == results[0].updates[2]["scale"]  # the hysteresis of 2 takes one
    assert results[0].updates[4]["norm"] < float("inf")
    row = rows_of(tmp_path)[2]
    assert (row["loss"] is None) == (value == "loss")
    assert row["skipped"] == 1


def test_the_culprit_is_named_by_step_rank_and_sample(tmp_path):
    clean = inputs(tmp_path, 2, "fp32", [])
    ids = samples_of_update(tmp_path, clean, 3, 1)
    sets = inputs(tmp_path, 2, "fp32", [ids[2]], guard=1)
    message, _ = run_ranks(diverge, 2, tmp_path, 6, sets)[0]
    assert f"the loss is not finite on rank 1, samples {ids[2]}, {ids[3]}." in message  # its micro-batch
    assert "rank 0, samples" in message.partition("Samples of this update:")[2]
    last = float(message.partition("Last finite loss: ")[2].partition(". ")[0])
    assert last == pytest.approx(rows_of(tmp_path)[1]["loss"], abs=1e-4)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "fp16"), (3, "bf16")])
def test_the_checkpoint_of_a_stopped_run_resumes(tmp_path, stage, precision):
    """The bad sample gone (here: the model's fault mended), the run goes on from where it was stopped."""
    clean = inputs(tmp_path, stage, precision, [])
    ids = samples_of_update(tmp_path, clean, 3, 0) + samples_of_update(
        tmp_path / "again", inputs(tmp_path / "again", stage, precision, []), 4, 0
    )
    sets = inputs(tmp_path, stage, precision, ids, guard=2)
    message, _ = run_ranks(diverge, 2, tmp_path, 8, sets)[0]
    assert message.startswith("step 4: 2 updates in a row")
    resumed = run_ranks(train, 2, tmp_path, 8, "out", "auto", sets)[0]
    assert [update["step"] for update in resumed.updates] == [5, 6, 7, 8]
    assert all(update["applied"] for update in resumed.updates)
    assert [row["skipped"] for row in rows_of(tmp_path)] == [0, 0, 1, 2, 2, 2, 2, 2]


def test_a_failing_save_does_not_hide_why_the_run_was_stopped(tmp_path):
    sets = inputs(tmp_path, 2, "fp32", EVERY, guard=1)
    message, code = run_ranks(_diverge_on_a_full_disk, 2, tmp_path, sets)[0]
    assert code == 3
    assert "1 updates in a row were skipped" in message
    assert "could not be written" in message


def _diverge_on_a_full_disk(folder, sets):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    torch.save = full
    return diverge(folder, 5, sets)
