"""Tensor parallelism through the engine: parity with one process, replicas, the gradient norm, and what is sent.

`python -m tests.sweeps.parallel_parity` measures every cell; here is a core of them.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from largetrain.config.layout import Layout
from largetrain.engine.mpu import unit_for
from largetrain.engine.optimizers import skip_infinite_updates
from largetrain.engine.replicas import kept_apart, take_first_gradients
from largetrain.models import layers
from largetrain.models.decoder import Decoder
from largetrain.models.rotary import rotary_table, rotate
from largetrain.parallel.axes import Axes, Axis, make_axes
from largetrain.parallel.shards import Shard, mark, shard_of
from tests.distributed.parity.harness import Disturbed
from tests.distributed.parity.parallel import (
    GLOBAL_BATCH,
    SEQ_LEN,
    VOCAB,
    Cell,
    deepspeed_backend,
    gathered_weights,
    measure,
    rank_parts,
    reference,
    train_cell,
)
from tests.ranks import run_ranks
from tests.reference import toy_batches
from tests.traffic import counted
from tests.unit.models.specs import small_spec

BOTH = {"tensor": 2, "data": 2}
CELLS = [
    Cell(**BOTH, zero=0),
    Cell(**BOTH, zero=1, sequence_parallel=True, style="gpt", tied=True, recompute=True),
    Cell(**BOTH, zero=2, style="gpt", tied=True, chunk=5),
    Cell(**BOTH, zero=3, sequence_parallel=True),
    Cell(**BOTH, zero=2, precision="bf16", sequence_parallel=True),
    Cell(tensor=4, zero=0, shape="8x2", sequence_parallel=True, style="gpt", tied=True),
    Cell(tensor=4, zero=3, shape="8x2", recompute=True, optimizer="SGD"),
    Cell(tensor=4, zero=1, shape="8x2", precision="fp16"),
]


def test_updates_equal_those_of_one_process():
    """Losses, gradient norms, evaluation and gathered weights; the same initial weights to the bit."""
    for cell, errors in zip(CELLS, measure(CELLS), strict=True):
        assert not errors.failures(), (cell, errors.failures())


# ---------------------------------------------------------------- replicas


def replicas_of(cell, updates, dropout):
    """Body of a rank: this rank's copies of what is not divided, after some updates with dropout."""
    resolved = cell.resolve()
    resolved = replace(resolved, decoder=replace(resolved.decoder, dropout=dropout))
    backend = deepspeed_backend(resolved)
    torch.manual_seed(5)  # as `seed_rank` does: alike on tensor ranks
    losses = []
    for batch in toy_batches(updates, GLOBAL_BATCH, SEQ_LEN, VOCAB):
        losses.append(float(backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank()))).loss))
    named = backend.engine.module.named_parameters()
    return losses, {name: p.detach().clone() for name, p in named if shard_of(p) is None}


def replicas_of_both():
    cells = [Cell(tensor=2, zero=0, style="gpt"), Cell(tensor=2, zero=1, style="gpt", sequence_parallel=True)]
    cells.append(Cell(tensor=2, zero=2, style="gpt", tied=True))  # the vocabulary's parts shift what follows by 24
    return [replicas_of(cell, 50, 0.1) for cell in cells]


def test_replicas_stay_equal_to_the_bit():
    """50 updates with dropout (cases, row 74); the norm's gradients come from parts of the sequence in one of them."""
    for (losses, weights), (other_losses, others) in zip(*run_ranks(replicas_of_both, 2, timeout=120), strict=True):
        assert losses == other_losses and losses[-1] < losses[0]
        assert len(weights) == 4 * 2 + 2 * 2 + 2 + 1  # norms, biases of rows, final norm, positions
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def parted(stage, together):
    """Body of a rank: whether replicas are equal after updates whose gradients of them differed between the ranks."""
    resolved = Cell(tensor=2, zero=stage, style="gpt").resolve()
    backend = deepspeed_backend(resolved)
    parameters = list(backend.engine.module.parameters())
    if together:  # as with three replicas, whose sums may be made in another order
        axes = replace(backend.axes, replicas=Axis(0, 3))
        take_first_gradients(backend.optimizer, stage, parameters, axes)
    if dist.get_rank() == 1:
        for parameter in parameters:
            if shard_of(parameter) is None:
                parameter.register_hook(lambda grad: grad * 1.001)
    for batch in toy_batches(3, GLOBAL_BATCH, SEQ_LEN, VOCAB):
        backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank())))
    return gathered_weights(backend)[1]


def parted_at_all_stages():
    return [(parted(stage, False), parted(stage, True)) for stage in range(4)]


def test_replicas_take_the_first_ranks_sums():
    """Which a run does where the order of a sum over replicas may differ between tensor ranks."""
    assert run_ranks(parted_at_all_stages, 2, timeout=120) == [[(False, True)] * 4] * 2


def test_what_ranks_hold_alike_is_a_group_of_its_own():
    """Each group of the run is split by who else holds what; nothing is, for a rank that shares with nobody."""
    names = {parameter: name for name in "abcd" for parameter in [torch.nn.Parameter(torch.zeros(4))]}
    a, b, c, d = names
    mark(a, Shard((8,), 0, 0, 4))
    mark(c, Shard((8,), 0, 0, 4))
    groups = [{"params": [a, b, c], "lr_factor": 1.0}, {"params": [d], "lr_factor": 2.0}]

    def split(axes, tied=()):
        found = kept_apart(groups, axes, tied)
        return ["".join(names[p] for p in group["params"]) for group in found], [group["lr_factor"] for group in found]

    assert split(Axes()) == (["abc", "d"], [1.0, 2.0])
    assert split(Axes(tensor=Axis(0, 2))) == (["ac", "b", "d"], [1.0, 1.0, 2.0])
    assert split(Axes(tensor=Axis(0, 2)), [c]) == (["a", "b", "c", "d"], [1.0, 1.0, 1.0, 2.0])
    assert split(Axes(), [c]) == (["ab", "c", "d"], [1.0, 1.0, 2.0])


# ---------------------------------------------------------------- the gradient norm


def without_marks(cell):
    """Body of a rank: the norm with the blocks' parts of matrices taken for replicas, and rightly."""
    layers.mark = lambda parameter, shard: mark(parameter, shard) if shard.shape[0] == VOCAB else None
    wrong = train_cell(cell, updates=1).grad_norms[0]
    layers.mark = mark
    return wrong, train_cell(cell, updates=1).grad_norms[0]


def norms_of_all_stages(stages):
    return [without_marks(Cell(tensor=2, zero=stage)) for stage in stages]


def test_parts_without_marks_would_show_in_the_norm():
    """The parity of norms would not miss it, hundreds of times above its bound: rank 1's parts are not counted."""
    expected = reference(Cell()).grad_norms[0]
    for wrong, right in run_ranks(norms_of_all_stages, 2, (0, 1, 2, 3))[0]:
        assert right == pytest.approx(expected, rel=1e-5)
        assert abs(wrong / expected - 1) > 0.01


def norm_of_parts(infinite_on):
    """Body of a rank: 2 stages x 2 tensor ranks, each with a part, a replica, and on stage 1 a copy of a tied table."""
    dist.init_process_group("gloo")
    axes = make_axes(Layout(4, tensor=2, stages=2))
    part, replica, tied = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    mark(part, Shard((4,), 0, 2 * axes.tensor.rank, 2))
    part.grad, replica.grad, tied.grad = (torch.full((2,), value) for value in (1.0, 2.0, 4.0))
    if axes.stages.rank == 1:
        tied.ds_pipe_replicated = True
    if dist.get_rank() == infinite_on:
        part.grad[0] = torch.inf
    parameters = [part, replica, tied]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    skip_infinite_updates(optimizer, parameters, 0.5, axes)
    optimizer.step()
    return float(optimizer._global_grad_norm), optimizer.overflow, [p.tolist() for p in parameters]


def test_the_norm_counts_parts_everywhere_replicas_once_and_tied_copies_once():
    """8 elements of parts, 4 of replicas on two stages, 2 of one table: sqrt(8 x 1 + 4 x 4 + 2 x 16)."""
    norm = 56**0.5
    for found, overflow, weights in run_ranks(norm_of_parts, 4, None):
        assert found == pytest.approx(norm, rel=1e-6) and not overflow
        expected = [[-value * 0.5 / norm] * 2 for value in (1.0, 2.0, 4.0)]
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=1e-5, atol=0)


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_update_on_all():
    for norm, overflow, weights in run_ranks(norm_of_parts, 4, 3):
        assert norm == float("inf") and overflow and not any(map(any, weights))


def disturbed(zero):
    """Body of a rank: the loss of the second update is infinite on one tensor rank of one replica alone."""
    resolved = Cell(**BOTH, zero=zero, accumulation=1).resolve()
    backend = deepspeed_backend(resolved, Disturbed({1: float("inf")}, only_rank=1))
    applied, moved = [], []
    for batch in toy_batches(3, GLOBAL_BATCH, SEQ_LEN, VOCAB):
        before = gathered_weights(backend)[0]
        applied.append(backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank()))).applied)
        after = gathered_weights(backend)[0]
        moved.append(any(not torch.equal(before[name], weight) for name, weight in after.items()))
    return applied, moved, all(bool(weight.isfinite().all()) for weight in after.values())


def disturbed_at_all_stages():
    return [disturbed(zero) for zero in range(4)]


def test_an_overflow_on_one_rank_is_skipped_on_all():
    for stages in run_ranks(disturbed_at_all_stages, 4):
        assert stages == [([True, False, True], [True, False, True], True)] * 4


# ---------------------------------------------------------------- what is sent


def sent(sequence_parallel, recompute, style, kv_heads, chunk):
    """Body of a rank: collectives of one forward and backward pass, as (kind, elements) -> count."""
    dist.init_process_group("gloo")
    axes = make_axes(Layout(2, tensor=2, sequence_parallel=sequence_parallel))
    spec = small_spec(
        style,
        kv_heads=kv_heads,
        layers=3,
        activation_checkpointing=recompute,
        loss_chunk_tokens=chunk,
        tie_embeddings=False,
    )
    model = Decoder(spec, axes)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with counted() as traffic:
        loss, _ = model(ids, ids)
        loss.backward()
    assert {message.dtype for message in traffic.messages} == {torch.float32}
    found = {}
    for (kind, ranks, elements), count in traffic.table().items():
        assert ranks == 2
        found[kind, elements] = found.get((kind, elements), 0) + count
    return found


BATCH, SEQ, HIDDEN, LAYERS = 3, 16, 32, 3
TOKENS, ACTIVATION = BATCH * SEQ, BATCH * SEQ * HIDDEN


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_four_all_reduces_of_the_activations_per_layer(style, recompute):
    """Shoeybi et al. 2019: 2 forward, 2 backward. Beside them one of the embedding, one of the gradient that leaves
    the head, and the loss: the largest logit of each token, and its sum of exponentials with the target's logit.
    With recomputation one more per layer; the second one's result is not needed, and torch stops before it.
    """
    found = run_ranks(sent, 2, False, recompute, style, 4 if style == "gpt" else 2, 1024)[0]
    layer = 5 if recompute else 4
    assert found == {
        ("all_reduce", ACTIVATION): layer * LAYERS + 2,
        ("all_reduce", TOKENS): 1,
        ("all_reduce", 2 * TOKENS): 1,
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_sequence_parallelism_sends_the_same_bytes_as_reduce_scatter_and_all_gather(recompute):
    """Korthikanti et al. 2022: each all-reduce becomes a reduce-scatter and an all-gather of the same elements. A
    layer: all-gather and reduce-scatter around attention and feed-forward, forward and backward. Their inputs are
    gathered again in the backward pass instead of kept, as the paper has it (section 4.2.2): one more each. The norms'
    weights and the rows' biases get their gradients summed, each norm's two in one.
    With recomputation another all-gather each, and one reduce-scatter: the second's result is not needed.
    """
    found = run_ranks(sent, 2, True, recompute, "gpt", 4, 1024)[0]
    assert found == {
        # and those of the embedding's gradient and of the head's input
        ("all_gather", ACTIVATION): (8 if recompute else 6) * LAYERS + 2,
        # and those of the embedding and of the gradient of the head's input
        ("reduce_scatter", ACTIVATION): (5 if recompute else 4) * LAYERS + 2,
        ("all_reduce", 2 * HIDDEN): 2 * LAYERS + 1,
        ("all_reduce", HIDDEN): 2 * LAYERS,
        ("all_reduce", SEQ * HIDDEN): 1,  # learned positions
        ("all_reduce", TOKENS): 1,
        ("all_reduce", 2 * TOKENS): 1,
    }


def test_shared_heads_and_chunks_of_the_loss_are_sent_beside():
    """One key/value head on 2 ranks: two weights of 8 x 32, each with a gradient to sum. Chunks of 20, 20, 8 tokens."""
    found = run_ranks(sent, 2, False, False, "llama", 1, 20)[0]
    assert found == {
        ("all_reduce", ACTIVATION): 4 * LAYERS + 2,
        ("all_reduce", 8 * HIDDEN): 2 * LAYERS,
        ("all_reduce", 20): 2,
        ("all_reduce", 8): 1,
        ("all_reduce", 2 * 20): 2,
        ("all_reduce", 2 * 8): 1,
    }


def sent_by_an_update():
    """Body of a rank: what one update sends within each axis beside the layers, by ZeRO stage."""
    found = []
    for zero in (0, 1):
        cell = Cell(**BOTH, zero=zero, accumulation=1)
        resolved = cell.resolve()
        backend = deepspeed_backend(resolved)
        parts = rank_parts(resolved, toy_batches(1, GLOBAL_BATCH, SEQ_LEN, VOCAB)[0], dist.get_rank())
        with counted() as traffic:
            backend.train_step(iter(parts))
        tensor = tuple(range(dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 2))
        own = sum(p.numel() for p in backend.engine.module.parameters())
        found.append((own, [m for m in traffic.messages if m.ranks != tensor], traffic.of("all_reduce", tensor)))
    return found


def test_an_update_sends_the_gradients_of_its_parts_among_replicas():
    """Stage 0: an all-reduce of this rank's parameters; within the tensor axis one number for norm and overflow.

    Among replicas weight and loss of the update are two more numbers.
    """
    (own, among_replicas, within_tensor), (_, with_zero, _) = run_ranks(sent_by_an_update, 4)[0]
    assert all(len(message.ranks) == 2 for message in among_replicas)
    assert sorted(m.elements for m in among_replicas if m.elements > 1) == [own]
    assert [m.elements for m in among_replicas].count(1) == 2
    assert [m.elements for m in within_tensor].count(1) == 1
    assert sum(m.elements for m in with_zero if m.kind in ("all_reduce", "reduce")) >= own


# ---------------------------------------------------------------- what is kept


def kept_by_a_block(sequence_parallel, style):
    """Body of a rank: elements that autograd keeps of one block, of a whole activation; live storages counted once."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    axes = make_axes(Layout(ranks, tensor=ranks, sequence_parallel=sequence_parallel and ranks > 1))
    spec = small_spec(style, heads=8, kv_heads=8, ffn_hidden=128, seq_len=SEQ)
    block = Decoder(spec, axes).blocks[0]
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights and tensor.dtype == torch.float32:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    part = SEQ // ranks if axes.sequence_parallel else SEQ
    x = torch.randn(BATCH, part, HIDDEN, requires_grad=True)
    rotate(torch.zeros(1, SEQ, 4), 1e4)  # the table, which is kept for ever
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    tables = [table.untyped_storage().data_ptr() for table in rotary_table(SEQ, 4, 1e4, x.device, x.dtype)]
    statistics = BATCH * part * (2 * 2 if style == "gpt" else 2)  # of the two norms, one or two numbers per token
    logsumexp = BATCH * SEQ * 8 // ranks  # of attention, one number per head and token
    found = sum(elements for storage, elements in kept.items() if storage not in tables)
    return (found - statistics - logsumexp) / ACTIVATION


@pytest.mark.parametrize(("style", "between"), [("gpt", 4), ("llama", 6)])
def test_sequence_parallelism_divides_all_that_a_layer_keeps(style, between):
    """In activations of b x s x h: both norms keep their input, and their output is kept for the next product
    (Korthikanti et al. 2022 count 2 x (2 + 2) bytes per element of these four, table 2); the rest is divided by tensor
    parallelism alone. Torch's RMSNorm on a CPU keeps its normalised input as well.
    """
    (whole,) = run_ranks(kept_by_a_block, 1, False, style)
    assert whole > between
    for ranks in (2, 4):
        assert run_ranks(kept_by_a_block, ranks, False, style)[0] == between + (whole - between) / ranks
        assert run_ranks(kept_by_a_block, ranks, True, style)[0] == whole / ranks


# ---------------------------------------------------------------- DeepSpeed's view


def units():
    dist.init_process_group("gloo")
    seen = []
    for layout in (Layout(4, tensor=2), Layout(4, tensor=4)):
        unit = unit_for(make_axes(layout))
        groups = unit.get_data_parallel_group(), unit.get_model_parallel_group()
        sizes = unit.get_data_parallel_world_size(), unit.get_model_parallel_world_size()
        assert sizes == tuple(dist.get_world_size(group) for group in groups)
        assert unit.get_data_parallel_rank() == dist.get_rank(groups[0])
        assert unit.get_model_parallel_rank() == dist.get_rank(groups[1])
        seen.append([dist.get_process_group_ranks(group) for group in groups])
    return seen, unit_for(make_axes(Layout(4, sequence=2)))


def test_deepspeed_is_told_who_reduces_with_whom():
    """Groups exist also for one rank and for all; ranks that share sequences need nothing."""
    found = run_ranks(units, 4)
    assert found[1] == ([[[1, 3], [0, 1]], [[1], [0, 1, 2, 3]]], None)
    assert found[2] == ([[[0, 2], [2, 3]], [[2], [0, 1, 2, 3]]], None)


def test_a_rank_alone_counts_every_parameter():
    """`Axes()`: no process group is needed, nor made."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    skip_infinite_updates(optimizer, [parameter], 0.0, Axes())
    optimizer.step()
    assert float(optimizer._global_grad_norm) == 5.0 and parameter.tolist() == [-3.0, -4.0]
