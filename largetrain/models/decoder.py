"""The decoder-only transformer, GPT-2 style and Llama style.

Query, key and value are separate matrices, and so are gate and up: a tensor-parallel rank then owns whole heads as a
plain slice of rows of each, also with fewer key/value heads than query heads, and Llama's published weights load name
by name. One fused product would save two kernel launches per block.

Initial weights, as published:
- gpt: N(0, 0.02), positions N(0, 0.01), biases zero, LayerNorm one and zero (OpenAI's released src/model.py; ports
  often draw positions from 0.02); projections into the residual stream N(0, 0.02 / sqrt(2 x layers)) (Radford et al.
  2019, section 2.3: scaled by 1 / sqrt(residual layers), two per block).
- llama: N(0, 0.02) for every matrix, RMSNorm one. The papers name no scheme; this is Hugging Face's
  `LlamaConfig.initializer_range`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from largetrain.config.decoder_spec import DecoderSpec
from largetrain.models.layers import Head, LearnedPositions, Linear, TokenEmbedding
from largetrain.models.rotary import rotate
from largetrain.models.stages import NamedLayer, layer_stream
from largetrain.parallel.axes import Axes
from largetrain.parallel.streams import draw_seed

STD = 0.02
GPT_POSITIONS_STD = 0.01
ALONE = Axes()


def _residual_std(spec: DecoderSpec) -> float:
    return STD / math.sqrt(2 * spec.layers) if spec.style == "gpt" else STD


def _norm(spec: DecoderSpec) -> nn.Module:
    return (nn.LayerNorm if spec.style == "gpt" else nn.RMSNorm)(spec.hidden, eps=spec.norm_eps)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, and rotary positions in Llama style."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.rope_theta = spec.rope_theta if spec.style == "llama" else None
        self.dropout = spec.dropout
        bias, kv_width = spec.style == "gpt", spec.kv_heads * spec.head_dim
        self.query = Linear(spec.hidden, spec.hidden, bias=bias, std=STD)
        self.key = Linear(spec.hidden, kv_width, bias=bias, std=STD)
        self.value = Linear(spec.hidden, kv_width, bias=bias, std=STD)
        self.output = Linear(spec.hidden, spec.hidden, bias=bias, std=_residual_std(spec))

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions: x [batch, seq_len, hidden], same shape out."""
        batch, seq_len, _ = x.shape
        query = self.query(x).view(batch, seq_len, self.heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.rope_theta is not None:
            query, key = rotate(query, self.rope_theta), rotate(key, self.rope_theta)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, seq_len, self.heads * self.head_dim))


class GeluFeedForward(nn.Module):
    """down(gelu(up(x))), with GELU's tanh form as in GPT-2."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.up = Linear(spec.hidden, spec.ffn_hidden, bias=True, std=STD)
        self.down = Linear(spec.ffn_hidden, spec.hidden, bias=True, std=_residual_std(spec))

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: x [..., hidden], same shape out."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwigluFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.gate = Linear(spec.hidden, spec.ffn_hidden, bias=False, std=STD)
        self.up = Linear(spec.hidden, spec.ffn_hidden, bias=False, std=STD)
        self.down = Linear(spec.ffn_hidden, spec.hidden, bias=False, std=_residual_std(spec))

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: x [..., hidden], same shape out."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); recomputed in the backward pass if asked."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.recompute = spec.activation_checkpointing
        self.attention_norm = _norm(spec)
        self.attention = Attention(spec)
        self.feed_forward_norm = _norm(spec)
        self.feed_forward = SwigluFeedForward(spec) if spec.style == "llama" else GeluFeedForward(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both branches: x [batch, seq_len, hidden], same shape out."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._branches, x, use_reentrant=False)
        return self._branches(x)

    def _branches(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def decoder_layers(spec: DecoderSpec, axes: Axes, base_seed: int) -> list[NamedLayer]:
    """List the decoder's layers, to be called one after the other, which is what a pipeline cuts.

    The first takes input_ids, all others hidden states [batch, seq_len, hidden]; `head`, the last, also takes labels.
    With tied embeddings its `build` takes the table, which is the whole of `token_embedding`'s parameters.

    Args:
        axes: this rank's groups, which decide what part of each layer it holds.
        base_seed: every layer draws its weights from a stream seeded by this and its place in the list.
    """

    def positions() -> nn.Module:
        if spec.style == "gpt":
            return LearnedPositions(spec.seq_len, spec.hidden, std=GPT_POSITIONS_STD)
        return nn.Identity()

    def head(tied: Tensor | None = None) -> nn.Module:
        return Head(spec.vocab_size, spec.hidden, std=STD, chunk_tokens=spec.loss_chunk_tokens, tied=tied)

    builds: dict[str, Callable[..., nn.Module]] = {
        "token_embedding": lambda: TokenEmbedding(spec.vocab_size, spec.hidden, std=STD),
        "position_embedding": positions,
        "dropout": lambda: nn.Dropout(spec.dropout),
        **{f"blocks.{index}": lambda: Block(spec) for index in range(spec.layers)},
        "final_norm": lambda: _norm(spec),
        "head": head,
    }

    def seeded(index: int, build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def build_seeded(*arguments: Any) -> nn.Module:
            with layer_stream(base_seed, index):
                return build(*arguments)

        return build_seeded

    tied_to = "token_embedding" if spec.tie_embeddings else None
    return [
        NamedLayer(name, seeded(index, build), tied_to if name == "head" else None)
        for index, (name, build) in enumerate(builds.items())
    ]


class Decoder(nn.Module):
    """A language model: token ids in, logits or summed loss out.

    One number is drawn from torch's current generator; it seeds the streams of all layers.

    Args:
        axes: this rank's groups.
    """

    def __init__(self, spec: DecoderSpec, axes: Axes = ALONE):
        super().__init__()
        self.spec = spec
        for layer in decoder_layers(spec, axes, draw_seed()):
            tied = [] if layer.tied_to is None else [self.get_submodule(layer.tied_to).weight]
            if layer.name == "blocks.0":
                self.blocks = nn.ModuleList()  # here, so that parameters are listed in the order of the layers
            container, _, name = layer.name.rpartition(".")
            self.get_submodule(container).add_module(name, layer.build(*tied))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Give the logits, or with labels the loss.

        Args:
            input_ids: [micro_batch, seq_len] int64.
            labels: same shape, already shifted (labels[t] is the target of input_ids[t]); -100 is masked.

        Returns:
            Logits [micro_batch, seq_len, vocab_size] in the model's dtype, or loss_sum (0-d fp32, nats) and
            token_count (0-d int64).

        Raises:
            ValueError: the sequence is longer than the model's context.
        """
        if input_ids.shape[1] > self.spec.seq_len:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens per sample, but the context is {self.spec.seq_len}"
            )
        hidden = input_ids
        *body, head = self.layers()
        for layer in body:
            hidden = layer(hidden)
        return head(hidden, labels)

    def layers(self) -> list[nn.Module]:
        """The layers of `decoder_layers`, built."""
        embedding = [self.token_embedding, self.position_embedding, self.dropout]
        return [*embedding, *self.blocks, self.final_norm, self.head]
