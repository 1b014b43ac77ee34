"""Sizes: published counts, FLOPs against torch's counter, and the checks on impossible sizes."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from largetrain.config.decoder_spec import PRESETS, default_ffn_hidden, resolve_decoder, target_problems
from largetrain.config.schema import ModelConfig
from largetrain.errors import ConfigError
from largetrain.models.decoder import Decoder
from tests.unit.models.specs import small_spec

# Counts of the released weights (GPT-2: a tied table once; Llama: all matrices and norms).
PUBLISHED_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


def published(preset):
    return resolve_decoder(ModelConfig(preset=preset), PRESETS[preset]["published_vocab"])


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_builds_and_counts_on_the_meta_device(preset):
    """Every preset is a model: it holds as many parameters as announced and turns tokens into a loss."""
    spec = published(preset)
    with torch.device("meta"):
        model = Decoder(spec)
        input_ids = torch.zeros(1, 8, dtype=torch.int64)
        logits, (loss_sum, _) = model(input_ids), model(input_ids, input_ids)
    assert sum(p.numel() for p in model.parameters()) == spec.parameter_count()
    assert spec.parameter_count() == PUBLISHED_PARAMETERS.get(preset, spec.parameter_count())
    assert logits.shape == (1, 8, spec.vocab_size) and loss_sum.shape == ()


def test_demo_is_small_enough_for_two_cores():
    spec = published("demo")
    assert 1_500_000 <= spec.parameter_count() <= 2_500_000 and spec.seq_len == 256


def test_gpt3_175b_has_the_published_size():
    """The formula of Narayanan et al. 2021 (Megatron-LM), section 5.1, plus the final norm that it leaves out.

    12 L h^2 (1 + 13 / (12 h) + (V + s) / (12 L h)): blocks with biases and norms, one tied table, positions.
    The paper of GPT-3 prints 175.0B; 174.6e9 is what its table's sizes give.
    """
    layers, hidden, vocab, seq_len = 96, 12288, 50257, 2048
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq_len) * hidden
    count = published("gpt3-175b").parameter_count()
    assert count == formula + 2 * hidden == 174_604_259_328
    assert abs(count / 175.0e9 - 1) < 0.003


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "ffn_hidden", "vocab"), [(1, 1, 7, 3), (6, 2, 65, 257), (6, 6, 1, 64)])
def test_parameter_count_equals_the_model(style, tie, heads, kv_heads, ffn_hidden, vocab):
    changes = {"heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden, "vocab_size": vocab}
    spec = small_spec(style, hidden=36, layers=3, tie_embeddings=tie, **changes)
    assert sum(p.numel() for p in Decoder(spec).parameters()) == spec.parameter_count()


def counted_flops(spec, batch=3):
    """Count what torch computes in one training step, with attention as plain products."""
    model, input_ids = Decoder(spec), torch.randint(spec.vocab_size, (batch, spec.seq_len))
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        loss_sum, _ = model(input_ids, input_ids)
        loss_sum.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("tie", [True, False])
def test_flops_equal_the_counter(style, tie):
    """Products only, and the causal half not subtracted: exactly what torch counts."""
    spec = small_spec(style, tie_embeddings=tie)
    assert counted_flops(spec) == 3 * spec.seq_len * spec.flops_per_token()


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_flops_leave_out_what_is_computed_twice(style):
    """Chunks cost a second product with the head; checkpointing a second forward pass of the blocks.

    That pass ends at the last tensor that the backward pass needs: the product behind it is not repeated.
    """
    spec = small_spec(style)
    head = 2 * spec.hidden * spec.vocab_size
    forward_of_blocks = spec.flops_per_token() // 3 - head - spec.layers * 2 * spec.ffn_hidden * spec.hidden
    twice = dataclasses.replace(spec, loss_chunk_tokens=5, activation_checkpointing=True)
    assert twice.flops_per_token() == spec.flops_per_token()
    assert counted_flops(twice) == 3 * spec.seq_len * (spec.flops_per_token() + head + forward_of_blocks)


def test_explicit_keys_override_the_preset():
    model = ModelConfig(preset="llama3-8b", layers=3, seq_len=64, tie_embeddings=True, rope_theta=7.0, norm_eps=1e-3)
    spec = resolve_decoder(model, 99)
    assert (spec.vocab_size, spec.layers, spec.seq_len, spec.rope_theta) == (99, 3, 64, 7.0)
    assert (spec.tie_embeddings, spec.norm_eps, spec.hidden, spec.kv_heads) == (True, 1e-3, 4096, 8)


def test_dependent_sizes_follow_explicit_ones():
    spec = resolve_decoder(ModelConfig(preset="llama3-8b", hidden=384, heads=6), 99)
    assert (spec.kv_heads, spec.ffn_hidden) == (6, 1024)
    assert resolve_decoder(ModelConfig(preset="demo", style="gpt"), 99).ffn_hidden == 4 * 192
    assert resolve_decoder(ModelConfig(preset="demo", hidden=384, ffn_hidden=5), 99).ffn_hidden == 5


@pytest.mark.parametrize(("hidden", "width"), [(192, 512), (193, 576), (3, 64), (4096, 10944)])
def test_swiglu_width_is_two_thirds_rounded_up_to_64(hidden, width):
    assert default_ffn_hidden("llama", hidden) == width


def test_vocabulary_is_the_tokenizers_and_not_the_presets():
    assert resolve_decoder(ModelConfig(preset="gpt2"), 257).vocab_size == 257


def test_every_mistake_is_reported_at_once():
    model = ModelConfig(preset="gpt2", hidden=100, heads=7, kv_heads=3, rope_theta=1e5)
    with pytest.raises(ConfigError) as caught:
        resolve_decoder(model, 99)
    heads, kv_heads, theta = caught.value.problems
    assert "model.heads: 7 does not divide model.hidden=100" in heads and "5, 4" in heads
    assert "model.kv_heads: 3 does not divide model.heads=7" in kv_heads
    assert "model.rope_theta" in theta and "style" in theta


def test_a_size_from_the_preset_is_named_as_such():
    with pytest.raises(ConfigError, match=r"model.heads: 12 \(from preset 'gpt2'\) does not divide model.hidden=100"):
        resolve_decoder(ModelConfig(preset="gpt2", hidden=100), 99)


def test_odd_head_width_is_refused_for_rotary_only():
    sizes = {"hidden": 36, "heads": 4}
    with pytest.raises(ConfigError, match="even width"):
        resolve_decoder(ModelConfig(preset="demo", **sizes), 99)
    assert resolve_decoder(ModelConfig(preset="gpt2", **sizes), 99).head_dim == 9


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="'llama3_8b' is unknown; did you mean 'llama3-8b'"):
        resolve_decoder(ModelConfig(preset="llama3_8b"), 99)


def test_sizes_beside_a_target_are_listed():
    model = ModelConfig(target="my:Net", args={"width": 3}, seq_len=8, vocab_size=9, layers=2, dropout=0.1)
    dropout, layers = target_problems(model)
    assert dropout.startswith("model.dropout") and layers.startswith("model.layers") and "my:Net" in layers
    assert target_problems(ModelConfig(layers=2)) == []
