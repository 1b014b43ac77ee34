"""Ulysses: ranks that share a sequence give the loss, gradients and updates of one rank."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from largetrain.config.layout import Layout
from largetrain.models.decoder import Decoder
from largetrain.models.ulysses import HeadExchange, sequence_batch
from largetrain.parallel.axes import Axes, make_axes
from tests.distributed.parity.parallel import Cell, measure
from tests.ranks import run_ranks
from tests.reference import tolerance_for
from tests.unit.models.specs import small_spec

CELLS = {
    4: [
        Cell(ulysses=2, data=2, zero=1, style="gpt", tied=True),
        Cell(ulysses=4, shape="8x2", zero=2, optimizer="SGD", accumulation=4),
        Cell(ulysses=4, shape="8x2", zero=3, recompute=True),
        Cell(ulysses=4, shape="8x2", zero=3, precision="bf16"),
    ]
}


def test_updates_equal_those_of_one_process():
    for cells in CELLS.values():
        for cell, errors in zip(cells, measure(cells), strict=True):
            assert not errors.failures(), (cell, errors.failures())


def there_and_back(heads, kv_heads):
    """Body of a rank: every head of every position arrives where it belongs, and returns."""
    dist.init_process_group("gloo")
    axis = make_axes(Layout(4, sequence=4)).sequence
    size, group = heads // 4, heads // kv_heads
    position = torch.arange(8).view(1, 1, 8, 1).expand(2, -1, -1, 3)
    whole = {"query": torch.arange(heads), "key": torch.arange(kv_heads), "value": torch.arange(kv_heads) + 50}
    whole = {name: numbers.view(1, -1, 1, 1) * 100 + position for name, numbers in whole.items()}
    exchange = HeadExchange(heads, kv_heads, axis)
    own = [tensor.narrow(2, 2 * axis.rank, 2) for tensor in whole.values()]
    query, key, value = exchange.to_heads(*own)
    mine = range(axis.rank * size, (axis.rank + 1) * size)
    assert torch.equal(query, whole["query"][:, list(mine)])
    repeats = size // key.shape[1]
    for name, tensor in (("key", key), ("value", value)):
        assert torch.equal(tensor.repeat_interleave(repeats, dim=1), whole[name][:, [head // group for head in mine]])
    assert torch.equal(exchange.to_sequence(query), own[0])
    return key.shape[1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "held"), [(8, 8, 2), (8, 4, 1), (8, 2, 1), (8, 1, 1), (12, 6, 3), (12, 3, 3)]
)
def test_heads_arrive_with_their_keys_and_values(heads, kv_heads, held):
    """Whole where key/value heads divide, one for all query heads where ranks share it, else a copy for each."""
    assert run_ranks(there_and_back, 4, heads, kv_heads) == [held] * 4


def decoders_on_parts(kernel):
    """Body of a rank: loss and gradients of several decoders, summed over the ranks, against the whole sequence."""
    dist.init_process_group("gloo")
    axes = make_axes(Layout(3, sequence=3))
    worst = 0.0
    kinds = (("gpt", 6, False), ("llama", 3, True), ("llama", 2, False), ("gpt", 1, True))
    with sdpa_kernel(getattr(SDPBackend, kernel)) if kernel else nullcontext():
        for style, kv, recompute in kinds:
            spec = small_spec(style, hidden=48, heads=6, kv_heads=kv, activation_checkpointing=recompute)
            ids, labels = (torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(n)) for n in (0, 1))
            labels[0, :5] = -100
            results = []
            for groups in (axes, Axes()):
                torch.manual_seed(3)
                model = Decoder(spec, groups).double()
                batch = sequence_batch({"input_ids": ids, "labels": labels, "sample_id": ids[:, 0]}, groups.sequence)
                assert batch["input_ids"].shape == (2, 12 // groups.sequence.size) and len(batch["sample_id"]) == 2
                loss, count = model(batch["input_ids"], batch["labels"])
                loss.backward()
                results.append([loss.detach(), count, *(p.grad for p in model.parameters())])
            for part in results[0]:
                dist.all_reduce(part)
            assert results[0][1] == results[1][1]
            # 24 tokens' gradients in fp64, summed in another order
            scaled = [(a - b).abs().max() / max(float(b.abs().max()), 0.1) for a, b in zip(*results, strict=True)]
            worst = max(worst, float(max(scaled)))
    return worst


@pytest.mark.parametrize("kernel", ["", "MATH", "FLASH_ATTENTION"])
def test_parts_of_a_sequence_give_loss_and_gradients_of_the_whole(kernel):
    """Rotary and learned positions are the rank's own; with torch's attention kernels one by one."""
    assert max(run_ranks(decoders_on_parts, 3, kernel)) < 1e-12


def too_long():
    dist.init_process_group("gloo")
    axes = make_axes(Layout(2, sequence=2))
    try:
        Decoder(small_spec("gpt"), axes)(torch.zeros(1, 9, dtype=torch.int64))
    except ValueError as error:
        return str(error)


def test_the_context_counts_all_parts():
    assert run_ranks(too_long, 2) == ["input_ids has 18 tokens per sample, but the context is 16"] * 2


LONG = 4096


def long_sequence():
    """Body of a rank: loss, gradients summed over ranks, and bytes that autograd keeps, live storages counted once."""
    dist.init_process_group("gloo")
    axes = make_axes(Layout(dist.get_world_size(), sequence=dist.get_world_size()))
    torch.manual_seed(3)
    model = Decoder(small_spec("llama", seq_len=LONG, heads=4, kv_heads=4, loss_chunk_tokens=512), axes)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(61, (1, LONG), generator=torch.Generator().manual_seed(0))
    batch = sequence_batch({"input_ids": ids, "labels": ids.roll(-1, 1)}, axes.sequence)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = model(batch["input_ids"], batch["labels"])
    (loss / LONG).backward()
    found = [loss.detach() / LONG, *(p.grad for p in model.parameters())]
    for tensor in found:
        dist.all_reduce(tensor)
    return found, sum(kept.values())


def test_a_long_sequence_on_several_ranks_equals_one_rank_with_less_memory():
    """4096 tokens; what is kept divides, but for the tables of the rotary positions: 4096 x 8 / 2 x 2 in fp32."""
    ((expected, whole),) = run_ranks(long_sequence, 1)
    tables = LONG * 4 * 2 * 4
    bound = tolerance_for(torch.float32, LONG)["rtol"]
    for ranks in (2, 4):
        for found, kept in run_ranks(long_sequence, ranks):
            scaled = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
            assert max(scaled) < bound
            assert kept - tables == pytest.approx((whole - tables) / ranks, rel=0.01)
