"""Every valid token of the global batch weighs the same, however the batch is shared out; and what follows from it."""

import gc
import itertools
import resource
from pathlib import Path

import pytest
import torch

from largetrain.callbacks.base import Callback
from largetrain.callbacks.recorder import Recorder
from largetrain.data.order import SampleOrder
from largetrain.train.state import TrainState
from largetrain.train.trainer import Trainer
from tests.distributed.parity.harness import (
    SEQ_LEN,
    VOCAB,
    Disturbed,
    call_all,
    engine_json,
    make_backend,
    make_model,
    rank_parts,
    resolve,
    train,
)
from tests.ranks import run_ranks
from tests.reference import IGNORED, Optimizer, tolerance_for, toy_batches, train_reference

SGD = ("SGD", {"lr": 1.0})


def batch_with_counts(counts, seq_len):
    """One sample for each count, of which so many labels are valid."""
    ((ids, labels),) = toy_batches(1, len(counts), seq_len, VOCAB, masked=0.0)
    for row, count in enumerate(counts):
        labels[row, count:] = IGNORED
    return ids, labels


def reference_in_rank(resolved, batches, lr, clip):
    return train_reference(lambda: make_model(resolved), batches, [lr] * len(batches), Optimizer("sgd"), clip=clip)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_15_1_8_2_tokens_equal_one_batch_of_26(stage):
    """Two ranks, two micro-batches each. The gradient is what SGD with rate 1 and no clipping moves the weights by."""
    model = {"style": "gpt", "layers": 2, "hidden": 32, "heads": 4, "seq_len": 16}
    engine = engine_json(stage, "fp32", 2, 1, SGD, gradient_clipping=0)
    resolved = resolve(engine, 2, model)
    batches = [batch_with_counts([15, 1, 8, 2], 16)]
    outcomes = run_ranks(train, 2, resolved, batches)
    expected = run_ranks(reference_in_rank, 1, resolved, batches, 1.0, 0.0)[0]
    for outcome in outcomes:
        assert outcome.tokens == [26]
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
        for name, weight in expected.weights.items():
            gradient = outcome.initial[name] - outcome.weights[name]
            torch.testing.assert_close(gradient, expected.initial[name] - weight, rtol=0, atol=1e-6)


def test_an_update_with_a_rank_without_tokens():
    """Masked labels may leave a rank nothing to learn from; the others' tokens still weigh fully."""
    resolved = resolve(engine_json(2, "fp32", 1, 1, SGD), 2)
    batches = [batch_with_counts([8, 0], SEQ_LEN)]
    expected = run_ranks(reference_in_rank, 1, resolved, batches, 1.0, 1.0)[0]
    for outcome in run_ranks(train, 2, resolved, batches):
        assert outcome.applied == [True]
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
        assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_changes_neither_weights_nor_logged_loss(stage):
    """The same global batch of 8 in one micro-batch and in eight."""
    batches = toy_batches(3, 8, SEQ_LEN, VOCAB)
    runs = [resolve(engine_json(stage, "fp32", 8 // micro, micro, ("SGD", {"lr": 0.3})), 1) for micro in (8, 1)]
    whole, split = run_ranks(call_all, 1, [(train, (resolved, batches)) for resolved in runs])[0]
    bounds = tolerance_for(torch.float32, 8 * SEQ_LEN, updates=3)
    assert split.losses == pytest.approx(whole.losses, rel=bounds["rtol"])
    assert split.grad_norms == pytest.approx(whole.grad_norms, rel=bounds["rtol"])
    for name, weight in whole.weights.items():
        torch.testing.assert_close(split.weights[name], weight, **bounds)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipped_update_has_exactly_the_norm_of_the_clip(stage, precision):
    """The loss is a thousand times too large; SGD with rate 1 then moves the weights by the clip, 0.1."""
    fp16 = {"fp16": {"initial_scale_power": 4}} if precision == "fp16" else {}
    resolved = resolve(engine_json(stage, precision, 2, 1, SGD, gradient_clipping=0.1, **fp16), 2)
    task = Disturbed({0: 1000.0}, accumulation=2)
    for outcome in run_ranks(train, 2, resolved, toy_batches(1, 4, SEQ_LEN, VOCAB), task):
        moved = sum(float((w - outcome.initial[n]).double().square().sum()) for n, w in outcome.weights.items()) ** 0.5
        assert outcome.grad_norms[0] > 100  # logged before clipping
        # fp32 masters of order one change by 1e-4 and are rounded to 1.2e-7 / 2
        assert moved == pytest.approx(0.1, rel=1e-4)


def test_without_clipping_the_norm_is_logged_and_the_update_whole():
    resolved = resolve(engine_json(0, "fp32", 1, 4, SGD, gradient_clipping=0), 1)
    (outcome,) = run_ranks(train, 1, resolved, toy_batches(1, 4, SEQ_LEN, VOCAB), Disturbed({0: 10.0}))
    moved = sum(float((w - outcome.initial[n]).double().square().sum()) for n, w in outcome.weights.items()) ** 0.5
    assert outcome.grad_norms[0] > 5
    assert moved == pytest.approx(outcome.grad_norms[0], rel=1e-5)


def train_in_order(resolved, samples, updates):
    """Body of a rank: updates on the samples that `data/order` gives; also which samples each update used."""
    import torch.distributed as dist

    backend, sizes = make_backend(resolved), resolved.batch
    ids, labels = samples
    order = SampleOrder(len(ids), sizes.global_batch, seed=5)
    rows = []
    for update in range(updates):
        micro = []
        for step in range(sizes.gradient_accumulation_steps):
            chosen, _ = order.rank_ids(update, step, sizes.micro_batch, sizes.data_parallel, dist.get_rank())
            picked = torch.from_numpy(chosen)
            micro.append({"input_ids": ids[picked], "labels": labels[picked], "sample_id": picked})
        result = backend.train_step(iter(micro))
        rows.append((float(result.loss), result.applied, result.sample_ids))
    return rows


def test_epochs_that_do_not_divide_carry_on():
    """6 micro-batches an epoch, accumulation 4, 2 epochs: 3 whole updates, every sample twice, none left pending."""
    resolved = resolve(engine_json(2, "fp32", 4, 1, ("SGD", {"lr": 0.3})), 1)
    ((ids, labels),) = toy_batches(1, 6, SEQ_LEN, VOCAB)
    order = SampleOrder(6, resolved.batch.global_batch, seed=5)
    assert order.steps_for(2) == 3
    assert order.dropped_for(2) == 0
    (rows,) = run_ranks(train_in_order, 1, resolved, (ids, labels), 3)
    assert all(applied for _, applied, _ in rows)
    used = [sample for _, _, samples in rows for sample in samples]
    assert sorted(used[:6]) == sorted(used[6:]) == list(range(6))
    global_batches = [(ids[list(samples)], labels[list(samples)]) for _, _, samples in rows]
    expected = run_ranks(reference_in_rank, 1, resolved, global_batches, 0.3, 1.0)[0]
    assert [loss for loss, _, _ in rows] == pytest.approx(expected.losses, rel=1e-6)


def test_what_does_not_fill_an_update_is_known_before_the_start():
    order = SampleOrder(samples=6, global_batch=4, seed=0)
    assert (order.steps_for(1), order.dropped_for(1)) == (1, 2)


class Repeated:
    """The stream of a loop: the same micro-batches again and again."""

    wait_s = 0.0

    def __init__(self, parts):
        self.parts = itertools.cycle(parts)

    def __next__(self):
        return next(self.parts)

    def __iter__(self):
        return self

    def close(self):
        pass


class Resident(Callback):
    """Resident memory of this process (bytes) after given updates."""

    def __init__(self, *steps):
        self.steps, self.sizes = steps, []

    def on_step(self, moment):
        if moment.step in self.steps:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.sizes.append(pages * resource.getpagesize())


def watch_memory(resolved, batch, updates, warm):
    """Body of a rank: the real loop, with a logging interval that is longer than the run."""
    backend, resident = make_backend(resolved), Resident(warm, updates)
    stream = Repeated(rank_parts(resolved, batch, 0))
    recorder = Recorder([], every_steps=10 * updates, clip=1.0)
    Trainer(backend, stream, TrainState(), updates, resolved.batch.global_batch, [recorder, resident]).fit()
    return resident.sizes


def test_memory_is_flat_while_nothing_is_logged():
    """A running loss that kept its graph would grow by all activations of every step."""
    resolved = resolve(engine_json(2, "fp32", 2, 2, ("AdamW", {"lr": 1e-3})), 1)
    ((warm, end),) = run_ranks(watch_memory, 1, resolved, *toy_batches(1, 4, SEQ_LEN, VOCAB), 300, 60)
    assert end - warm < 5e6
