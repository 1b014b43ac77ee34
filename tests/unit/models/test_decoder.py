"""The decoder: parity with a plain reference, initial weights, causality, rotary, ties, checkpointing."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from largetrain.models.decoder import Decoder, decoder_layers
from largetrain.models.rotary import rotate
from largetrain.parallel.axes import Axes
from largetrain.parallel.streams import draw_seed
from tests.unit.models.specs import small_spec

STYLES = ["gpt", "llama"]


def tokens(batch=3, seq_len=16, seed=0):
    return torch.randint(61, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def seeded(spec, seed=0):
    torch.manual_seed(seed)
    return Decoder(spec)


def scrambled(spec):
    """Give a decoder in fp64 whose every parameter is random, biases and norms too, so that each one counts."""
    model = seeded(spec).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def plain_rotary(x, theta):
    """Rotary positions as complex products: pair i is (x[i], x[i + width / 2]), turned by position x theta^(-2i/d)."""
    seq_len, width = x.shape[-2:]
    angle = torch.arange(seq_len).double()[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_logits(w, spec, input_ids):
    """The decoder written out from its weights: explicit norms, repeated key/value heads, a masked softmax."""

    def norm(x, name):
        if spec.style == "llama":
            return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w[f"{name}.weight"]
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def heads(x, name, count):
        x = linear(x, name).unflatten(-1, (count, spec.head_dim)).movedim(-2, 1)
        if spec.style == "llama" and not name.endswith("value"):
            x = plain_rotary(x, spec.rope_theta)
        return x.repeat_interleave(spec.heads // count, dim=1)

    seq_len = input_ids.shape[1]
    mask = torch.full((seq_len, seq_len), -math.inf).triu(1)
    x = w["token_embedding.weight"][input_ids]
    if spec.style == "gpt":
        x = x + w["position_embedding.weight"][:seq_len]
    for i in range(spec.layers):
        h, name = norm(x, f"blocks.{i}.attention_norm"), f"blocks.{i}.attention"
        q, k = heads(h, f"{name}.query", spec.heads), heads(h, f"{name}.key", spec.kv_heads)
        weights = (q @ k.mT / math.sqrt(spec.head_dim) + mask).softmax(-1)
        mixed = weights @ heads(h, f"{name}.value", spec.kv_heads)
        x = x + linear(mixed.movedim(1, 2).flatten(-2), f"{name}.output")
        h, name = norm(x, f"blocks.{i}.feed_forward_norm"), f"blocks.{i}.feed_forward"
        up = linear(h, f"{name}.up")
        if spec.style == "gpt":
            inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            gate = linear(h, f"{name}.gate")
            inner = gate * torch.sigmoid(gate) * up
        x = x + linear(inner, f"{name}.down")
    return norm(x, "final_norm") @ w["head.weight"].T


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tie", [True, False])
def test_logits_equal_the_plain_formula(style, kv_heads, tie):
    """In fp64, where only the order of sums differs."""
    spec = small_spec(style, kv_heads=kv_heads, tie_embeddings=tie, norm_eps=1e-3, rope_theta=50.0)
    model = scrambled(spec)
    expected = plain_logits(model.state_dict(), spec, tokens())
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("style", STYLES)
def test_initial_weights_as_published(style):
    """Standard deviation and mean of every tensor, within 5 standard errors of a normal sample."""
    spec = small_spec(style, vocab_size=301, hidden=96, heads=4, ffn_hidden=200, layers=8, tie_embeddings=False)
    residual = 0.02 / math.sqrt(2 * 8) if style == "gpt" else 0.02
    for name, weight in seeded(spec).named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (weight == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        std = 0.01 if "position" in name else residual if name.endswith(("output.weight", "down.weight")) else 0.02
        samples = weight.numel()
        assert abs(weight.std() / std - 1) < 5 / math.sqrt(2 * samples), name
        assert abs(weight.mean()) < 5 * std / math.sqrt(samples), name


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tie", [True, False])
def test_layers_built_alone_and_in_any_order_have_the_weights_of_the_whole_model(style, tie):
    """So that a pipeline stage builds only its own; parameters are listed in the order of the layers."""
    spec = small_spec(style, tie_embeddings=tie)
    torch.manual_seed(5)
    model = Decoder(spec)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    layers = decoder_layers(spec, Axes(), draw_seed())
    assert torch.equal(torch.get_rng_state(), after)  # one number is all that the construction draws
    alone = {}
    for layer in reversed(layers):
        table = next((other for other in layers if other.name == layer.tied_to), None)
        built = layer.build() if table is None else layer.build(table.build().weight)
        alone = {f"{layer.name}.{name}": weight for name, weight in built.state_dict().items()} | alone
    assert torch.equal(torch.get_rng_state(), after)  # nor does building a layer
    assert [layer.tied_to for layer in layers] == [None] * (len(layers) - 1) + (["token_embedding"] if tie else [None])
    whole = model.state_dict()
    assert list(alone) == list(whole)
    assert all(torch.equal(alone[name], weight) for name, weight in whole.items())
    assert not torch.equal(whole["blocks.0.attention.query.weight"], whole["blocks.1.attention.query.weight"])


@pytest.mark.parametrize("style", STYLES)
def test_half_precision_starts_from_the_rounded_fp32_weights(style):
    """As under zero.Init, which builds the model in half precision."""
    spec = small_spec(style)
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = seeded(spec)
    finally:
        torch.set_default_dtype(torch.float32)
    for (name, half), full in zip(built.named_parameters(), seeded(spec).parameters(), strict=True):
        assert half.dtype == torch.bfloat16 and torch.equal(half, full.bfloat16()), name


@pytest.mark.parametrize("style", STYLES)
def test_a_module_initialises_its_own_parameters(style):
    """No module touches another's weights after construction: ZeRO-3 has sharded them by then."""
    spec = small_spec(style, tie_embeddings=False)
    versions = {}

    def constructed(module, name, submodule):
        for parameter in () if submodule is None else submodule.parameters():
            versions.setdefault(id(parameter), parameter._version)

    handle = torch.nn.modules.module.register_module_module_registration_hook(constructed)
    try:
        model = Decoder(spec)
    finally:
        handle.remove()
    assert len(versions) == len(list(model.parameters()))
    assert all(versions[id(parameter)] == parameter._version for parameter in model.parameters())


@pytest.mark.parametrize("style", STYLES)
def test_changing_a_token_leaves_earlier_logits_bit_equal(style):
    model = scrambled(small_spec(style)).float()
    before, changed = tokens(), tokens()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    old, new = model(before), model(changed)
    assert torch.equal(old[:, :9], new[:, :9])
    assert not torch.isclose(old[:, 9:], new[:, 9:]).all(-1).any()


def test_grouped_heads_equal_repeated_heads():
    spec = small_spec("llama", kv_heads=2)
    grouped, full = scrambled(spec), Decoder(dataclasses.replace(spec, kv_heads=4)).double()
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if ".key." in name or ".value." in name:
            weights[name] = weight.unflatten(0, (2, spec.head_dim)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=1e-10, atol=1e-10)


def test_rotary_scores_depend_on_the_distance_only():
    query, key = torch.randn(2, 8, dtype=torch.float64).unbind()
    turned_query, turned_key = (rotate(x.expand(40, 8), 100.0) for x in (query, key))
    scores = turned_query @ turned_key.T
    for distance in range(-39, 40):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert not torch.isclose(scores[0], scores[0, 0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotary_is_rounded_once_at_far_positions(dtype):
    """An angle kept in bf16 would be off by whole turns at position 8191."""
    x = torch.randn(8192, 16).to(dtype)
    exact = plain_rotary(x, 1e4)
    # One rounding to dtype (eps / 2), and 3 fp32 roundings of two products of the pair's length with the table.
    length = x.double().unflatten(-1, (2, 8)).norm(dim=-2).repeat(1, 2)
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 4 * torch.finfo(torch.float32).eps * length
    assert rotate(x, 1e4).dtype == dtype
    assert ((rotate(x, 1e4).double() - exact).abs() <= bound + torch.finfo(dtype).smallest_normal).all()


def test_nothing_but_parameters_is_cast_with_the_module():
    """DeepSpeed casts modules, buffers included: a rotary table in a buffer would lose its precision."""
    assert list(Decoder(small_spec("llama")).buffers()) == []


def test_rotary_table_made_in_inference_serves_training():
    model = Decoder(small_spec("llama", rope_theta=321.0))
    with torch.inference_mode():
        model(tokens())
    loss_sum, _ = model(tokens(), tokens())
    loss_sum.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("style", STYLES)
def test_tied_weights_are_one_tensor(style):
    tied, untied = (Decoder(small_spec(style, tie_embeddings=tie)) for tie in (True, False))
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    tied(tokens(), tokens())[0].backward()
    # Both uses reach the one gradient: rows of tokens that never occur get theirs from the head.
    absent = torch.tensor(sorted(set(range(61)) - set(tokens().flatten().tolist())))
    assert len(absent) and (tied.token_embedding.weight.grad[absent] != 0).any(dim=1).all()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_gives_bit_equal_gradients(style, dropout):
    results = []
    for activation_checkpointing in (False, True):
        spec = small_spec(style, dropout=dropout, activation_checkpointing=activation_checkpointing)
        model = seeded(spec)
        torch.manual_seed(7)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            loss_sum, _ = model(tokens(), tokens())
        loss_sum.backward()
        results.append((loss_sum, [p.grad for p in model.parameters()], sum(kept), torch.get_rng_state()))
    (loss, grads, kept, state), (loss_again, grads_again, kept_less, state_again) = results
    assert torch.equal(loss, loss_again) and torch.equal(state, state_again)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, grads_again, strict=True))
    assert kept_less < kept / 3


@pytest.mark.parametrize("style", STYLES)
def test_dropout_is_off_in_evaluation_and_random_in_training(style):
    model = seeded(small_spec(style, dropout=0.3))
    plain = seeded(small_spec(style, dropout=0.0))
    assert not torch.equal(model(tokens()), model(tokens()))
    assert torch.equal(model.eval()(tokens()), plain(tokens()))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("site", ["embedding", "attention", "residual"])
def test_dropout_acts_where_the_reference_says(style, site):
    """On the embedding, the attention weights and each residual branch: each one alone changes the output."""
    model = seeded(small_spec(style, dropout=0.3))
    model.eval()
    if site == "embedding":
        model.dropout.train()
    for block in model.blocks:
        if site == "attention":
            block.attention.training = True
        if site == "residual":
            block.dropout.train()
    assert not torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize("style", STYLES)
def test_shorter_sequences_are_fine_and_longer_ones_refused(style):
    model = seeded(small_spec(style))
    torch.testing.assert_close(model(tokens()[:, :5]), model(tokens())[:, :5])
    with pytest.raises(ValueError, match="17 tokens per sample, but the context is 16"):
        model(tokens(seq_len=17))


@pytest.mark.parametrize("style", STYLES)
def test_layers_called_in_turn_are_the_model(style):
    """And hold every parameter, so that a pipeline that cuts them loses nothing."""
    model = seeded(small_spec(style))
    x = tokens()
    *body, head = model.layers()
    for layer in body:
        x = layer(x)
    loss_sum, count = head(x, tokens())
    assert torch.equal(loss_sum, model(tokens(), tokens())[0]) and count == 48
    held = {id(parameter) for layer in model.layers() for parameter in layer.parameters()}
    assert held == {id(parameter) for parameter in model.parameters()}


def test_names_of_the_weights_are_stable():
    """Checkpoints and exports hold these names."""
    common = {"token_embedding.weight", "head.weight", "final_norm.weight"}
    for kind in ("attention_norm", "feed_forward_norm", *(f"attention.{part}" for part in ("query", "key", "value"))):
        common.add(f"blocks.0.{kind}.weight")
    common |= {
        "blocks.0.attention.output.weight",
        "blocks.0.feed_forward.up.weight",
        "blocks.0.feed_forward.down.weight",
    }
    llama = common | {"blocks.0.feed_forward.gate.weight"}
    biases = {name.replace("weight", "bias") for name in common if "embedding" not in name and "head" not in name}
    assert set(Decoder(small_spec("llama", layers=1)).state_dict()) == llama
    assert set(Decoder(small_spec("gpt", layers=1)).state_dict()) == common | biases | {"position_embedding.weight"}


@pytest.mark.parametrize("style", STYLES)
def test_it_learns(style):
    """Twenty updates on one batch halve the loss: every piece passes its gradient on."""
    model = seeded(small_spec(style))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(21):
        loss_sum, count = model(tokens(), tokens(seed=1))
        (loss_sum / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum.item() / 48)
    assert abs(losses[0] - math.log(61)) < 0.2 and losses[-1] < losses[0] / 2
    assert F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=1).flatten()).item() < losses[0] / 2
