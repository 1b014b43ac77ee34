"""The decoder in parts, without an engine: layers, loss, heads, random numbers, against the whole in fp64."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from largetrain.config.layout import Layout
from largetrain.models.decoder import Decoder
from largetrain.models.layers import Dropout, TokenEmbedding
from largetrain.models.loss import linear_cross_entropy
from largetrain.models.tensor_parallel import head_share
from largetrain.models.tensor_parallel_loss import divided_cross_entropy
from largetrain.parallel.axes import Axes, make_axes
from largetrain.parallel.regions import gradient_summed
from largetrain.parallel.shards import Shard, even_part, shard_of
from tests.ranks import run_ranks
from tests.unit.models.specs import small_spec

# whole sums of up to 72 terms of order one in fp64, ordered differently: 72 x 1e-16, and a factor for their growth
BOUND = 1e-11
HEADS = [(6, 2), (6, 3), (12, 4), (12, 2), (12, 12), (6, 1)]


def ids_and_labels(vocab=61, seq_len=12, batch=2):
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(vocab, (batch, seq_len), generator=generator) for _ in range(2))
    labels[0, 3:6] = -100
    return ids, labels


def build(spec, axes):
    """In fp64 with every parameter random, biases and norms too, alike on all ranks."""
    torch.manual_seed(3)
    model = Decoder(spec, axes).double()
    for index, parameter in enumerate(model.parameters()):
        shard = shard_of(parameter)
        shape = parameter.shape if shard is None else shard.shape
        noise = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(index)) * 0.3
        with torch.no_grad():
            parameter.add_(noise if shard is None else noise.narrow(shard.dim, shard.start, shard.size))
    return model


def gradients(spec, axes):
    model = build(spec, axes)
    ids, labels = ids_and_labels()
    loss, count = model(ids, labels)
    loss.backward()
    return float(loss.detach()), int(count), {name: p.grad for name, p in model.named_parameters()}, model


def compare_with_whole(specs, sequence_parallel):
    """Body of a rank: loss, logits and every part of every gradient equal those of the whole model."""
    dist.init_process_group("gloo")
    axes = make_axes(Layout(dist.get_world_size(), tensor=dist.get_world_size(), sequence_parallel=sequence_parallel))
    for spec in specs:
        loss, count, grads, model = gradients(spec, axes)
        whole = gradients(spec, Axes())
        assert (loss, count) == pytest.approx(whole[:2], rel=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(
                model(ids_and_labels()[0]), whole[3](ids_and_labels()[0]), rtol=BOUND, atol=BOUND
            )
        for name, parameter in model.named_parameters():
            expected, shard = whole[2][name], shard_of(parameter)
            if shard is not None:
                assert shard.shape == expected.shape, name
                expected = expected.narrow(shard.dim, shard.start, shard.size)
            scale = max(float(expected.abs().max()), 0.1)  # softmax does not see the keys' bias: its gradient is 0
            error = float((grads[name] - expected).abs().max()) / scale
            assert error < BOUND, (spec, name, error)
            if shard is None:
                parts = [torch.empty_like(grads[name]) for _ in range(axes.tensor.size)]
                dist.all_gather(parts, grads[name])
                assert all(torch.equal(part, parts[0]) for part in parts), f"{name}: replicas get other gradients"
    return sorted(name for name, p in model.named_parameters() if shard_of(p) is None)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parts_of_the_decoder_give_loss_logits_and_gradients_of_the_whole(sequence_parallel):
    """With 3 ranks: heads in groups that divide, that do not, and that are of several sizes on one rank."""
    specs = [
        small_spec(style, hidden=96, heads=heads, kv_heads=kv, tie_embeddings=tie, activation_checkpointing=recompute)
        for style in ("gpt", "llama")
        for (heads, kv), tie, recompute in zip(HEADS, [True, False] * 3, [False, False, True] * 2, strict=True)
    ]
    specs.append(small_spec("gpt", hidden=96, heads=6, loss_chunk_tokens=5))
    assert any(not head_share(12, 4, rank, 3).grouped for rank in range(3))
    replicated = run_ranks(compare_with_whole, 3, specs, sequence_parallel, timeout=120)[0]
    assert "blocks.0.attention_norm.weight" in replicated and "blocks.0.attention.output.bias" in replicated
    assert "position_embedding.weight" in replicated and "blocks.0.attention.query.weight" not in replicated


@pytest.mark.parametrize("heads", range(1, 13))
def test_heads_are_shared_out_in_order(heads):
    """Every query head once, and beside it the key/value head of its group, whatever divides."""
    for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
        for ranks in (n for n in range(1, heads + 1) if heads % n == 0):
            shares = [head_share(heads, kv_heads, rank, ranks) for rank in range(ranks)]
            looked_at = [share.first + head for share in shares for head in share.of_query]
            assert looked_at == [head // (heads // kv_heads) for head in range(heads)]
            assert all(max(share.of_query) == share.count - 1 for share in shares)
            if kv_heads % ranks == 0 or ranks % kv_heads == 0:
                assert all(share.grouped for share in shares)


# ---------------------------------------------------------------- the loss


def losses_in_parts(dtype, scale):
    """Body of a rank: the loss over a vocabulary in uneven parts against the whole; errors relative to their bounds."""
    dist.init_process_group("gloo")
    axis = make_axes(Layout(dist.get_world_size(), tensor=dist.get_world_size())).tensor
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((2, 9, 8), (29, 8)))
    hidden, weight = (hidden * scale).to(dtype), weight.to(dtype)
    masked = torch.rand(2, 9, generator=generator) < 0.3
    labels = torch.randint(29, (2, 9), generator=generator).masked_fill(masked, -100)
    start, size = even_part(29, axis.rank, axis.size)
    found = []
    for chunk_tokens in (1, 4, 18, 100):
        whole = [t.clone().requires_grad_() for t in (hidden, weight)]
        expected, _ = linear_cross_entropy(*whole, labels, chunk_tokens)
        parts = (hidden, weight[start : start + size])
        part_hidden, part_weight = (t.clone().requires_grad_() for t in parts)
        shard = Shard((29, 8), 0, start, size)
        summed = gradient_summed(axis, part_hidden)[0]
        loss, count = divided_cross_entropy(summed, part_weight, labels, chunk_tokens, shard, axis)
        (loss * 3).backward()
        (expected * 3).backward()
        assert count == (labels != -100).sum() and loss.dtype == torch.promote_types(dtype, torch.float32)
        losses = [torch.zeros_like(loss.detach()) for _ in range(axis.size)]
        dist.all_gather(losses, loss.detach())
        assert all(torch.equal(other, losses[0]) for other in losses)
        pairs = [(loss, expected), (part_hidden.grad, whole[0].grad), (part_weight.grad, whole[1].grad[start:][:size])]
        found.append([float((a - b).abs().max() / b.abs().max()) for a, b in pairs])
        assert (part_hidden.grad[labels == -100] == 0).all()
    return found


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1.0), (torch.float64, 200.0), (torch.float32, 30.0)])
def test_the_loss_over_parts_of_the_vocabulary_is_that_of_the_whole(dtype, scale):
    """29 tokens on 3 ranks are 10, 10, 9; logits of 30 and 200 times the usual size overflow no exponential."""
    bound = 100 * torch.finfo(dtype).eps * max(1.0, scale / 10)  # exp turns an error of a logit into a relative one
    for errors in sum(run_ranks(losses_in_parts, 3, dtype, scale), []):
        assert max(errors) < bound


def infinite_and_unknown():
    """Body of a rank: an overflow in one rank's logits makes the loss not finite on all, unless the token is masked."""
    dist.init_process_group("gloo")
    axis = make_axes(Layout(2, tensor=2)).tensor
    hidden = torch.tensor([[1e30, 0.0], [0.0, 1.0]], requires_grad=True)
    weight = torch.full((3, 2), 1e30 if axis.rank else 1.0, requires_grad=True)
    shard = Shard((6, 2), 0, 3 * axis.rank, 3)
    seen = {}
    for name, labels in (("valid", [4, 1]), ("masked", [-100, 1])):
        loss, _ = divided_cross_entropy(hidden, weight, torch.tensor(labels), 8, shard, axis)
        (grad,) = torch.autograd.grad(loss, hidden)
        seen[name] = math.isfinite(loss) if name == "valid" else bool((grad[0] == 0).all())
    errors = []
    for label in (6, -1):
        try:
            divided_cross_entropy(hidden, weight, torch.tensor([label, 1]), 8, shard, axis)
        except (IndexError, RuntimeError) as error:
            errors.append(str(error))
    return seen, errors


def test_what_is_not_finite_or_no_token_does_not_pass_unseen():
    for seen, errors in run_ranks(infinite_and_unknown, 2):
        assert seen == {"valid": False, "masked": True}
        assert len(errors) == 2 and all("out of bounds" in error for error in errors)


def look_up(ids):
    dist.init_process_group("gloo")
    table = TokenEmbedding(7, 2, std=1.0, axes=make_axes(Layout(2, tensor=2)))
    try:
        return table(torch.tensor([ids])).shape
    except IndexError as error:
        return str(error)


def test_an_id_outside_the_vocabulary_is_refused_on_every_rank():
    assert run_ranks(look_up, 2, [0, 6]) == [torch.Size([1, 2, 2])] * 2
    for ids in ([0, 7], [0, -1]):
        assert all("out of range" in str(found) for found in run_ranks(look_up, 2, ids))


# ---------------------------------------------------------------- random numbers


def masks(sequence_parallel):
    """Body of a rank: which elements dropout leaves, in attention and between layers, and the stream afterwards."""
    dist.init_process_group("gloo")
    axes = make_axes(Layout(2, tensor=2, sequence_parallel=sequence_parallel))
    torch.manual_seed(11)
    dropout = Dropout(0.5, axes)
    between = [dropout(torch.ones(4, 64)) > 0 for _ in range(2)]
    attention = Decoder(small_spec("gpt", dropout=0.5, heads=4), axes).blocks[0].attention
    seen = []
    kernel = F.scaled_dot_product_attention

    def probe(query, key, value, **options):
        seen.append(kernel(torch.zeros_like(query), torch.zeros_like(key), torch.ones_like(value), **options))
        return seen[-1]

    F.scaled_dot_product_attention = probe
    attention(torch.zeros(1, 16 // (2 if sequence_parallel else 1), 32))
    return between, seen[0], torch.get_rng_state()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_differs_where_ranks_hold_parts_and_agrees_where_they_hold_the_same(sequence_parallel):
    (between, heads, state), (others, other_heads, other_state) = run_ranks(masks, 2, sequence_parallel)
    assert torch.equal(state, other_state)  # the common stream goes on alike
    assert not torch.equal(heads, other_heads)
    assert torch.equal(between[0], others[0]) == (not sequence_parallel)
    assert not torch.equal(between[0], between[1])
    agreement = (between[0] == others[0]).float().mean().item()
    assert agreement == 1.0 or 0.3 < agreement < 0.7  # 256 places: 0.5 +- 6 x 0.03


def recomputed(sequence_parallel):
    """Body of a rank: gradients with dropout, with and without activation checkpointing."""
    dist.init_process_group("gloo")
    axes = make_axes(Layout(2, tensor=2, sequence_parallel=sequence_parallel))
    found = []
    for activation_checkpointing in (False, True):
        spec = small_spec("gpt", dropout=0.3, activation_checkpointing=activation_checkpointing)
        model = build(spec, axes)
        torch.manual_seed(7)
        loss, _ = model(*ids_and_labels(seq_len=12))
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()], torch.get_rng_state()))
    (loss, grads, state), (loss_again, grads_again, state_again) = found
    assert torch.equal(loss, loss_again) and torch.equal(state, state_again)
    return all(torch.equal(one, other) for one, other in zip(grads, grads_again, strict=True))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_drops_the_same_elements(sequence_parallel):
    assert run_ranks(recomputed, 2, sequence_parallel) == [True, True]
