"""Micro-batches: sharding, epochs, processes, resume, and what happens when loading fails."""

import gc
import itertools
import os
import random
import time

import numpy as np
import pytest
import torch

from largetrain.data import loader
from largetrain.data.loader import LoaderError, TrainStream, evaluation_batches
from largetrain.data.order import SampleOrder
from largetrain.data.text import prepare
from tests.unit.data import helpers
from tests.unit.data.helpers import Numbers, Plain, TokenizesInWorker, batch_of, make_tokenizer, run_of


def stream(dataset, batch, rank=0, consumed=0, workers=0, seed=3, **options):
    order = SampleOrder(len(dataset), batch.global_batch, seed)
    return TrainStream(dataset, order, batch, rank, consumed, workers, **options)


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def ids(batches):
    return [batch["sample_id"].tolist() for batch in batches]


@pytest.fixture
def text_data(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} of the text\n" for i in range(200)))
    return prepare(run_of(tmp_path, source=str(tmp_path / "a.txt"), validation_fraction=0.2), 16, 257)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_out_every_epoch(workers):
    """Orders differ between epochs, the union is the whole set, ranks are disjoint."""
    batch = batch_of(data_parallel=2, micro_batch=2, accumulation=1)
    seen = [ids(itertools.islice(stream(Numbers(8), batch, rank, workers=workers), 4)) for rank in range(2)]
    epochs = [[flat(rank[2 * epoch : 2 * epoch + 2]) for rank in seen] for epoch in range(2)]
    for first, second in epochs:
        assert sorted(first + second) == list(range(8))
    assert epochs[0] != epochs[1]


def test_replicas_of_one_data_parallel_rank_get_the_same_samples():
    """With 4 ranks as 2 pipeline stages x 2 replicas, the stages match and the replicas differ."""
    batch = batch_of(data_parallel=2, micro_batch=2, accumulation=2)
    drawn = [ids(itertools.islice(stream(Numbers(16), batch, rank=replica), 4)) for replica in (0, 1, 0, 1)]
    assert drawn[0] == drawn[2] and drawn[1] == drawn[3]
    assert not set(flat(drawn[0][:2])) & set(flat(drawn[1][:2]))


def test_the_stream_follows_the_order(text_data):
    batch = batch_of(data_parallel=3, micro_batch=2, accumulation=2)
    order = SampleOrder(len(text_data.train), batch.global_batch, 3)
    for rank in range(3):
        drawn = list(TrainStream(text_data.train, order, batch, rank, consumed_samples=7, updates=40))
        assert len(drawn) == 80
        for index, micro in enumerate(drawn):
            expected = order.rank_ids(index // 2, index % 2, 2, 3, rank, start=7)[0]
            assert micro["sample_id"].tolist() == expected.tolist()
            assert micro["input_ids"].equal(torch.stack([text_data.train[int(i)]["input_ids"] for i in expected]))
            assert micro["labels"].equal(torch.stack([text_data.train[int(i)]["labels"] for i in expected]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_is_the_tail_with_the_same_random_numbers(workers):
    batch = batch_of(data_parallel=1, micro_batch=3, accumulation=1)
    whole = list(stream(Numbers(10), batch, updates=9))
    tail = list(stream(Numbers(10), batch, consumed=12, updates=5, workers=workers))
    assert ids(tail) == ids(whole[4:])
    assert [b["noise"].tolist() for b in tail] == [b["noise"].tolist() for b in whole[4:]]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_epoch_reaches_loader_processes(start_method):
    """Processes that live on see each epoch, also within a micro-batch that straddles two."""
    batch = batch_of(micro_batch=3)
    drawn = list(stream(Numbers(8), batch, workers=2, updates=8, start_method=start_method))
    epochs = torch.cat([micro["epoch"] for micro in drawn]).tolist()
    assert epochs == [0] * 8 + [1] * 8 + [2] * 8
    pids = {int(pid) for micro in drawn for pid in micro["pid"]}
    assert len(pids) == 2 and os.getpid() not in pids


def test_random_numbers_depend_on_sample_and_epoch_alone():
    by_key = {}
    for batch, ranks, workers in [(batch_of(1, 4), 1, 0), (batch_of(2, 2), 2, 0), (batch_of(1, 2, 2), 1, 2)]:
        drawn = {}
        for rank in range(ranks):
            for micro in stream(Numbers(8), batch, rank, workers=workers, updates=4):
                keys = zip(micro["epoch"].tolist(), micro["sample_id"].tolist(), strict=True)
                drawn.update(zip(keys, micro["noise"].tolist(), strict=True))
        by_key = by_key or drawn
        assert drawn == by_key
    assert len(set(by_key.values())) == 16


def test_loading_leaves_the_process_random_streams_alone(text_data):
    """Dropout must not depend on how data are loaded."""
    for dataset, workers in [(Numbers(8), 0), (text_data.train, 0), (Numbers(8), 1)]:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        expected = torch.rand(1).item(), random.random(), np.random.rand()
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        list(stream(dataset, batch_of(micro_batch=2), workers=workers, updates=3))
        list(evaluation_batches(dataset, 2, 1, 0))
        assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_time_spent_waiting_is_counted():
    class Slow(Plain):
        def __getitem__(self, index):
            time.sleep(0.02)
            return {"value": index}

    slow = stream(Slow(), batch_of(micro_batch=2), updates=3)
    for _ in slow:
        time.sleep(0.05)
    assert 0.12 <= slow.wait_s < 0.27


def test_items_are_stacked_by_the_dataset_or_by_default():
    class Ragged(Plain):
        def __getitem__(self, index):
            return {"value": torch.ones(index + 1)}

        def collate_fn(self, items):
            return {"value": torch.nn.utils.rnn.pad_sequence([one["value"] for one in items], batch_first=True)}

    order = SampleOrder(8, 2, 0, shuffle=False)
    micro = next(TrainStream(Ragged(), order, batch_of(micro_batch=2), 0, consumed_samples=2))
    assert micro["value"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]] and micro["sample_id"].tolist() == [2, 3]
    micro = next(TrainStream(Plain(), order, batch_of(micro_batch=2), 0))
    assert micro["value"].tolist() == [0, 1] and micro["sample_id"].dtype == torch.int64


def test_copies_of_a_sample_get_different_random_numbers():
    order = SampleOrder(8, 4, 3, repeats=2)
    drawn = list(TrainStream(Numbers(8), order, batch_of(micro_batch=4), 0, updates=8))
    keys = [(i, float(noise)) for b in drawn for i, noise in zip(b["sample_id"].tolist(), b["noise"], strict=True)]
    assert [i for i, _ in keys[::2]] == [i for i, _ in keys[1::2]]
    assert len(set(keys)) == 32


EVALUATIONS = [*itertools.product([1, 5, 8, 13], [1, 2, 3, 4], [0]), (5, 3, 2)]


@pytest.mark.parametrize(("samples", "data_parallel", "workers"), EVALUATIONS)
def test_evaluation_has_each_sample_once_and_equal_counts(samples, data_parallel, workers):
    per_rank = [
        list(evaluation_batches(Numbers(samples), 2, data_parallel, r, workers=workers)) for r in range(data_parallel)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    seen = []
    for micro in flat(per_rank):
        valid = micro["valid"]
        assert valid.dtype == torch.bool and micro["value"].shape == (2,)
        assert (micro["labels"][~valid] == -100).all() and (micro["sample_id"][~valid] == -1).all()
        assert micro["labels"][valid].tolist() == [[i] * 3 for i in micro["sample_id"][valid].tolist()]
        seen += micro["sample_id"][valid].tolist()
    assert sorted(seen) == list(range(samples))


def test_evaluation_of_the_first_samples_only(text_data):
    batches = [b for r in range(2) for b in evaluation_batches(text_data.validation, 4, 2, r, max_samples=5)]
    assert sorted(flat(b["sample_id"][b["valid"]].tolist() for b in batches)) == [0, 1, 2, 3, 4]
    assert sum(int((b["labels"] != -100).sum()) for b in batches) == 5 * 16
    assert len(list(evaluation_batches(text_data.validation, 4, 1, 0, max_samples=10**9))) == -(
        -len(text_data.validation) // 4
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["BusError", "ShmFull"])
def test_full_shared_memory_is_named(name):
    """The message says what to do about shared memory."""
    with pytest.raises(LoaderError, match=r"/dev/shm is full or too small.*--shm-size.*data.workers"):
        next(stream(getattr(helpers, name)(), batch_of(), workers=2))


@pytest.mark.timeout(60)
def test_a_killed_loader_process_is_told():
    with pytest.raises(LoaderError, match=r"a loader process died .*Killed"):
        next(stream(helpers.Killed(), batch_of(), workers=2))


@pytest.mark.timeout(60)
def test_a_hanging_dataset_ends_in_time():
    with pytest.raises(LoaderError, match=r"no micro-batch from 1 loader processes in time.*data.workers=0"):
        next(stream(helpers.Hangs(), batch_of(), workers=1, timeout_s=1.0))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_dataset_come_through(workers):
    started = time.monotonic()
    with pytest.raises(ValueError, match="is broken"):
        next(stream(helpers.Raises(), batch_of(), workers=workers))
    with pytest.raises(TypeError, match="Items gives list instead of a dict"):
        next(stream(Items(), batch_of(), workers=workers))
    gc.collect()
    assert time.monotonic() - started < 5  # what torch waits for each process if the collector ends them


class Items(Plain):
    def __getitem__(self, index):
        return index

    def collate_fn(self, items):
        return items


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_tokenizer_used_before_the_fork_does_not_hang(tmp_path, start_method):
    """The parent has used its tokenizer's threads, then two processes encode."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    tokenizer.encode_batch(["the cat sat"] * 500)
    batches = list(
        stream(TokenizesInWorker(tokenizer), batch_of(micro_batch=2), workers=2, updates=4, start_method=start_method)
    )
    assert sorted(flat(b["index"].tolist() for b in batches)) == list(range(8))


@pytest.mark.timeout(60)
def test_closing_ends_the_processes():
    open_stream = stream(Numbers(8), batch_of(micro_batch=2), workers=2)
    pids = {int(pid) for _ in range(4) for pid in next(open_stream)["pid"]}
    open_stream.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(StopIteration):
        next(open_stream)


def test_the_block_of_the_order_does_not_show(text_data, monkeypatch):
    batch = batch_of(data_parallel=2, micro_batch=2, accumulation=2)
    expected = ids(stream(text_data.train, batch, 1, updates=11))
    for block in (1, 7, 10**6):
        monkeypatch.setattr(loader, "ORDER_BLOCK", block)
        assert ids(stream(text_data.train, batch, 1, updates=11)) == expected
