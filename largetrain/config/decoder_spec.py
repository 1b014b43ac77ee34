"""Sizes of the built-in decoder: presets, what they cost, and the checks on them.

Pure Python: `largetrain config` reports parameters and FLOPs of a 175B model without torch.
"""

import difflib
import math
from dataclasses import dataclass
from typing import Any

from largetrain.config.schema import ModelConfig
from largetrain.errors import ConfigError


@dataclass(frozen=True)
class DecoderSpec:
    """Every size of a decoder-only transformer; nothing left to derive."""

    style: str
    """`gpt` (learned positions, LayerNorm, GELU, biases) or `llama` (rotary, RMSNorm, SwiGLU, no biases)."""
    vocab_size: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    seq_len: int
    tie_embeddings: bool
    dropout: float
    norm_eps: float
    rope_theta: float
    activation_checkpointing: bool
    loss_chunk_tokens: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def matrix_parameters(self) -> int:
        """Count the weights that take part in a matrix product: blocks and output head.

        Leaves out what costs no product: the looked-up embedding tables, biases and norms.
        With tied embeddings the one table is counted, as the head.
        """
        kv_width = self.kv_heads * self.head_dim
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv_width
        feed_forward = (3 if self.style == "llama" else 2) * self.hidden * self.ffn_hidden
        return self.layers * (attention + feed_forward) + self.vocab_size * self.hidden

    def parameter_count(self) -> int:
        """Count all trainable parameters, a tied table once."""
        total = self.matrix_parameters()
        if not self.tie_embeddings:
            total += self.vocab_size * self.hidden
        norms = 2 * self.layers + 1
        if self.style == "llama":
            return total + norms * self.hidden
        kv_width = self.kv_heads * self.head_dim
        biases = 2 * self.hidden + 2 * kv_width + self.ffn_hidden + self.hidden  # query, output; key, value; up; down
        return total + norms * 2 * self.hidden + self.layers * biases + self.seq_len * self.hidden

    def flops_per_token(self) -> int:
        """Count the model FLOPs of one trained token, forward and backward: 6 N + 12 L d T.

        The formula of PaLM (Chowdhery et al. 2022, appendix B). N is `matrix_parameters()`: each weight
        costs one multiply-add forward and two backward. The second term is the two products of attention,
        over the whole sequence of T = seq_len tokens: the saving of the causal mask is not subtracted, nor is
        what is computed twice (activation checkpointing, attention's backward, the chunked head) added, so that
        MFU compares between implementations.
        """
        return 6 * self.matrix_parameters() + 12 * self.layers * self.hidden * self.seq_len


def _gpt(layers: int, hidden: int, heads: int, seq_len: int) -> dict[str, Any]:
    return {
        "style": "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn_hidden": 4 * hidden,
        "seq_len": seq_len,
        "tie_embeddings": True,
        "norm_eps": 1e-5,
        "published_vocab": 50257,
    }


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn_hidden: int, seq_len: int, vocab: int, theta: float
) -> dict[str, Any]:
    return {
        "style": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_hidden": ffn_hidden,
        "seq_len": seq_len,
        "tie_embeddings": False,
        "norm_eps": 1e-5,
        "rope_theta": theta,
        "published_vocab": vocab,
    }


# `published_vocab` is what the published count includes. It sizes no model: vocab_size `auto` is the tokenizer's,
# so that a preset cannot silently train rows that no token reaches, or miss tokens.
PRESETS: dict[str, dict[str, Any]] = {
    "demo": _llama(4, 192, 3, 3, 512, 256, 257, 1e4),
    # Radford et al. 2019, table 2, with the sizes of the released weights.
    "gpt2": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    # Brown et al. 2020, table 2.1; attention is dense here, not alternating with sparse bands. Where the table
    # contradicts itself (heads x head width != width), the width of a head decides: 1.3B 16 heads, 13B width 5120.
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    # Zhang et al. 2024.
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 2048, 32000, 1e4),
    # Touvron et al. 2023 (Llama 2); Grattafiori et al. 2024 (Llama 3), at their pre-training context.
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 4096, 32000, 1e4),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 4096, 32000, 1e4),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 4096, 32000, 1e4),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 8192, 128256, 5e5),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 8192, 128256, 5e5),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 8192, 128256, 5e5),
}

_SIZE_KEYS = (
    "style",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn_hidden",
    "seq_len",
    "tie_embeddings",
    "norm_eps",
    "rope_theta",
)
CHUNK_LOGITS = 2**26  # 256 MiB in fp32
# With `target`, the data still need the sample length and the vocabulary, and logits are still reduced in chunks.
USED_WITH_MODEL_TARGET = {"target", "args", "seq_len", "vocab_size", "loss_chunk_tokens"}


def default_ffn_hidden(style: str, hidden: int) -> int:
    """Give the usual feed-forward width: 4 x hidden, or for SwiGLU 8/3 x hidden rounded up to a multiple of 64.

    Two thirds, so that three matrices weigh what two did (Shazeer 2020).
    """
    if style == "llama":
        return (8 * hidden + 3 * 64 - 1) // (3 * 64) * 64
    return 4 * hidden


def loss_chunk_tokens(model: ModelConfig, vocab_size: int) -> int:
    """Tokens per chunk of head and loss: as written, or for `auto` as many as keep a chunk at CHUNK_LOGITS."""
    if model.loss_chunk_tokens != "auto":
        return model.loss_chunk_tokens
    return max(1, CHUNK_LOGITS // vocab_size)


def resolve_decoder(model: ModelConfig, vocab_size: int) -> DecoderSpec:
    """Complete the model section from its preset and check that the sizes fit together.

    A key that is given overrides the preset. Two sizes follow others instead of keeping the preset's value:
    `ffn_hidden` when `hidden` or `style` is given (`default_ffn_hidden`), `kv_heads` when `heads` is (equal to it).

    Args:
        model: the `model` section.
        vocab_size: the resolved vocabulary (`model.vocab_size`, or the tokenizer's size for `auto`).

    Raises:
        ConfigError: every mistake of the section, one line each.
    """
    if model.preset not in PRESETS:
        nearest = difflib.get_close_matches(model.preset, PRESETS, n=1, cutoff=0.3)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(f"model.preset: {model.preset!r} is unknown; {hint}Presets: {', '.join(PRESETS)}.")
    given = {key: value for key in _SIZE_KEYS if (value := getattr(model, key)) is not None}
    sizes = {"rope_theta": 1e4, **PRESETS[model.preset], **given}
    del sizes["published_vocab"]
    if ("hidden" in given or "style" in given) and "ffn_hidden" not in given:
        sizes["ffn_hidden"] = default_ffn_hidden(sizes["style"], sizes["hidden"])
    if "heads" in given and "kv_heads" not in given:
        sizes["kv_heads"] = sizes["heads"]
    if problems := _problems(sizes, given, model.preset):
        raise ConfigError(problems)
    return DecoderSpec(
        vocab_size=vocab_size,
        dropout=model.dropout,
        activation_checkpointing=model.activation_checkpointing,
        loss_chunk_tokens=loss_chunk_tokens(model, vocab_size),
        **sizes,
    )


def _problems(sizes: dict[str, Any], given: dict[str, Any], preset: str) -> list[str]:
    def origin(key: str) -> str:
        return "" if key in given else f" (from preset {preset!r})"

    hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    problems = []
    if hidden % heads:
        near = _nearest_divisors(hidden, heads)
        problems.append(
            f"model.heads: {heads}{origin('heads')} does not divide model.hidden={hidden}{origin('hidden')}; "
            f"nearest heads that do: {', '.join(map(str, near))}."
        )
    elif sizes["style"] == "llama" and (hidden // heads) % 2:
        problems.append(
            f"model.heads: {heads}{origin('heads')} of hidden={hidden}{origin('hidden')} makes heads of width "
            f"{hidden // heads}, but rotary positions turn pairs and need an even width; change heads or hidden."
        )
    if heads % kv_heads:
        near = _nearest_divisors(heads, kv_heads)
        problems.append(
            f"model.kv_heads: {kv_heads}{origin('kv_heads')} does not divide model.heads={heads}{origin('heads')}; "
            f"nearest kv_heads that do: {', '.join(map(str, near))}."
        )
    if sizes["style"] == "gpt" and "rope_theta" in given:
        problems.append(
            "model.rope_theta: has no effect with style 'gpt', whose positions are learned; "
            "remove it or set model.style: llama."
        )
    return problems


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The two divisors of `number` nearest to `wanted`, the smaller first where both are as near."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)}, key=lambda count: (abs(count - wanted), count))[:2]


def target_problems(model: ModelConfig) -> list[str]:
    """List the keys of the model section that would be ignored beside `model.target`, one line each."""
    ignored = sorted(model.model_fields_set - USED_WITH_MODEL_TARGET) if model.target is not None else []
    return [
        f"model.{key}: sizes the built-in decoder and has no effect with model.target={model.target!r}; "
        f"remove it, or hand it to your class under model.args."
        for key in ignored
    ]
