"""What a run writes: the metrics file, TensorBoard, evaluation; and that evaluation leaves the training alone."""

import json

import pytest
import torch

from largetrain.callbacks.base import Callback
from tests.distributed.tiny_run import (
    SEQ_LEN,
    TRAIN_SAMPLES,
    VALIDATION_SAMPLES,
    precision_section,
    rows_of,
    train,
    write_inputs,
)
from tests.ranks import run_ranks

PROMISED = {"step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens", "tokens_per_s"}


def training(rows):
    return [row for row in rows if "loss" in row]


def evaluations(rows):
    return [row for row in rows if "eval/loss" in row]


def scalars(folder):
    """Tag -> [(step, value)] as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "out" / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_one_row_per_update_with_the_promised_keys(tmp_path):
    write_inputs(tmp_path, precision_section("fp16"), {"evaluation": {"every_steps": 2, "at_end": True}})
    outcome = run_ranks(train, 2, tmp_path, 5)[0]
    rows = rows_of(tmp_path)
    assert [row["step"] for row in training(rows)] == [1, 2, 3, 4, 5]
    for row, update in zip(training(rows), outcome.updates, strict=True):
        assert row.keys() >= PROMISED
        assert (row["loss"], row["lr"], row["loss_scale"]) == (update["loss"], update["lr"], update["scale"])
        assert row["tokens"] == 8 * SEQ_LEN
        assert row["consumed_samples"] == 8 * row["step"]
        assert row["step_s"] > 0 and 0 <= row["data_wait_share"] <= 1
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])
        assert row["clip_coefficient"] == pytest.approx(min(1.0, 1.0 / (row["grad_norm"] + 1e-6)))
    assert [row["step"] for row in evaluations(rows)] == [2, 4, 5]
    for row in evaluations(rows):
        assert row["eval/perplexity"] == pytest.approx(torch.tensor(row["eval/loss"]).exp().item(), rel=1e-5)
        # one token per byte, and one for the end of the text
        bits = row["eval/loss"] / torch.log(torch.tensor(2.0)).item()
        assert row["eval/bits_per_byte"] == pytest.approx(bits, rel=0.02)
    assert any(len(row.get("memory_bytes", ())) == 2 for row in rows)


def test_after_resume_steps_rise_strictly_in_the_file_and_in_tensorboard(tmp_path):
    """Stopped at 5 after a checkpoint at 3, with the half line of a killed writer; 4 and 5 are done again."""
    write_inputs(
        tmp_path,
        {},
        {"checkpoints": {"every_steps": 3}, "logging": {"tensorboard": True, "every_steps": 1}},
    )
    first = run_ranks(train, 2, tmp_path, 8, "out", None, (), 5)[0]
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]
    with (tmp_path / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 3.')
    second = run_ranks(train, 2, tmp_path, 8, "out", "auto")[0]
    losses = [update["loss"] for update in (*first.updates[:3], *second.updates)]
    rows = rows_of(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == list(zip(range(1, 9), losses, strict=True))
    curves = scalars(tmp_path)
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 9))
    assert [value for _, value in curves["train/loss"]] == pytest.approx(losses)
    assert {"train/lr", "train/grad_norm", "train/tokens_per_s", "memory_bytes/rank-1"} <= curves.keys()
    # one writer: one event file for each of the two launches
    assert len(list((tmp_path / "out" / "tensorboard").iterdir())) == 2


def test_a_checkpoint_never_lacks_rows_before_it(tmp_path):
    """Rows are collected for 100 updates, but those before a checkpoint are written with it."""
    write_inputs(tmp_path, {}, {"checkpoints": {"every_steps": 2}, "logging": {"every_steps": 100}})
    run_ranks(_killed_at, 2, tmp_path, 3)
    assert [row["step"] for row in rows_of(tmp_path)][:2] == [1, 2]


def _killed_at(folder, step):
    class Seen(Exception):
        pass

    class Look(Callback):
        def on_step(self, moment):
            if moment.step == step:
                file = folder / "out" / "metrics.jsonl"
                self.seen = [json.loads(line)["step"] for line in file.read_text().splitlines()]
                raise Seen

    look = Look()
    with pytest.raises(Seen):
        train(folder, 5, callbacks=[look])
    assert look.seen == [1, 2]


def test_rows_up_to_a_failure_are_written(tmp_path):
    write_inputs(tmp_path, {}, {"logging": {"every_steps": 100}})
    run_ranks(train, 2, tmp_path, 9, "out", None, (), 4)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]


def evaluated(folder, world_size, stage=2, sets=(), micro=2):
    write_inputs(
        folder,
        {
            "zero_optimization": {"stage": stage},
            "train_micro_batch_size_per_gpu": micro,
            "train_batch_size": 12,
            "gradient_accumulation_steps": "auto",
        },
        {"evaluation": {"at_end": True}},
    )
    run_ranks(train, world_size, folder, 2, f"out{world_size}", None, list(sets))
    return evaluations(rows_of(folder, f"out{world_size}"))[0]


def test_evaluation_counts_every_sample_once_for_any_number_of_ranks(tmp_path):
    """11 samples over 1, 2 and 3 ranks by 2: short last batches, and one rank with nothing but padding in it."""
    rows = [evaluated(tmp_path, world_size) for world_size in (1, 2, 3)]
    assert [row["eval/tokens"] for row in rows] == [VALIDATION_SAMPLES * SEQ_LEN] * 3


def test_evaluation_gives_the_same_loss_for_any_number_of_ranks(tmp_path):
    sets = ["optimizer.params.lr=0.0001", "scheduler=null", "model.dropout=0"]
    losses = [evaluated(tmp_path, world_size, sets=sets)["eval/loss"] for world_size in (1, 2, 3)]
    # two updates of the same global batches: weights agree to fp32 rounding, and so do the means of 176 tokens
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_evaluation_of_the_first_samples_only(tmp_path):
    assert evaluated(tmp_path, 2, sets=["evaluation.max_samples=3"])["eval/tokens"] == 3 * SEQ_LEN


@pytest.mark.parametrize("stage", [0, 3])
def test_fewer_validation_samples_than_ranks_do_not_hang(tmp_path, stage):
    assert evaluated(tmp_path, 3, stage, ["evaluation.max_samples=1"])["eval/tokens"] == SEQ_LEN


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_does_not_change_the_training(tmp_path, stage, workers):
    """With dropout on: the streams of random numbers are where they would be without evaluation."""
    write_inputs(tmp_path, {"zero_optimization": {"stage": stage}})
    without = run_ranks(train, 2, tmp_path, 4, "without")
    sets = ["evaluation.every_steps=1", f"data.workers={workers}"]
    evaluating = run_ranks(train, 2, tmp_path, 4, "evaluating", None, sets, timeout=120)
    assert len(evaluations(rows_of(tmp_path, "evaluating"))) == 4
    assert [outcome.updates for outcome in evaluating] == [outcome.updates for outcome in without]
    assert [outcome.state for outcome in evaluating] == [outcome.state for outcome in without]


def test_an_epoch_is_as_many_updates_as_announced(tmp_path):
    write_inputs(tmp_path, {}, {"epochs": 1.0})
    outcome = run_ranks(_one_epoch, 2, tmp_path)
    ids = sorted(i for rank in outcome for update in rank for i in update)
    assert len(ids) == len(set(ids)) == TRAIN_SAMPLES - TRAIN_SAMPLES % 8


def _one_epoch(folder):
    from largetrain.compose import build
    from largetrain.config.load import load
    from largetrain.config.world import launch_world

    world, lines, samples = launch_world(), [], []

    class Note(Callback):
        def on_step(self, moment):
            samples.append(moment.result.sample_ids)

    resolved = load(
        str(folder / "engine.json"),
        str(folder / "run.json"),
        flags={"output": ("--output", str(folder / "out"))},
        world_size=world.world_size,
    )
    built = build(resolved, world, resume=None, verbose=False, say=lines.append)
    built.trainer.callbacks = [*built.trainer.callbacks, Note()]
    built.trainer.fit()
    assert any("1 epochs: 7 updates of 8 samples; the last 4 samples" in line for line in lines), lines
    return samples
