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
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from largetrain.config.decoder_spec import DecoderSpec
from largetrain.models.layers import (
    ALONE,
    Dropout,
    Head,
    LearnedPositions,
    PartLayerNorm,
    PartRMSNorm,
    TokenEmbedding,
)
from largetrain.models.rotary import rotate
from largetrain.models.stages import NamedLayer, layer_stream
from largetrain.models.tensor_parallel import ColumnLinear, RowLinear, entered, head_share, key_value_linear
from largetrain.models.ulysses import HeadExchange
from largetrain.parallel.axes import Axes
from largetrain.parallel.streams import draw_seed, own_stream

STD = 0.02
GPT_POSITIONS_STD = 0.01


def _residual_std(spec: DecoderSpec) -> float:
    return STD / math.sqrt(2 * spec.layers) if spec.style == "gpt" else STD


def _norm(spec: DecoderSpec, axes: Axes) -> nn.Module:
    if axes.sequence_parallel and axes.tensor.size > 1:
        return (PartLayerNorm if spec.style == "gpt" else PartRMSNorm)(spec.hidden, eps=spec.norm_eps, axes=axes)
    return (nn.LayerNorm if spec.style == "gpt" else nn.RMSNorm)(spec.hidden, eps=spec.norm_eps)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, and rotary positions in Llama style.

    Tensor-parallel ranks, and ranks that share a sequence (`models/ulysses`), have some heads of all positions each.
    """

    def __init__(self, spec: DecoderSpec, axes: Axes):
        super().__init__()
        self.axes, self.head_dim = axes, spec.head_dim
        self.share = head_share(spec.heads, spec.kv_heads, axes.tensor.rank, axes.tensor.size)
        self.exchange = HeadExchange(spec.heads, spec.kv_heads, axes.sequence)
        self.rope_theta = spec.rope_theta if spec.style == "llama" else None
        self.dropout = spec.dropout
        part: dict[str, Any] = {"bias": spec.style == "gpt", "std": STD, "axes": axes}
        self.query = ColumnLinear(spec.hidden, spec.hidden, **part)
        self.key = key_value_linear(spec.hidden, spec.kv_heads, spec.head_dim, self.share, **part)
        self.value = key_value_linear(spec.hidden, spec.kv_heads, spec.head_dim, self.share, **part)
        self.output = RowLinear(spec.hidden, spec.hidden, **{**part, "std": _residual_std(spec)})

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions: x [batch, seq_len, hidden], same shape out; seq_len is of this rank's part."""
        taken = entered(x, self.axes)
        query, key, value = (self._heads(linear(taken)) for linear in (self.query, self.key, self.value))
        if not self.share.grouped:
            key, value = (heads[:, list(self.share.of_query)] for heads in (key, value))
        query, key, value = self.exchange.to_heads(query, key, value)
        if self.rope_theta is not None:
            query, key = rotate(query, self.rope_theta), rotate(key, self.rope_theta)
        dropout = self.dropout if self.training else 0.0
        parted = dropout > 0 and self.axes.tensor.size > 1
        with own_stream(self.axes.tensor, x.device) if parted else nullcontext():
            mixed = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
            )
        return self.output(self.exchange.to_sequence(mixed).transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        """[batch, seq_len, heads x head_dim] -> [batch, heads, seq_len, head_dim]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GeluFeedForward(nn.Module):
    """down(gelu(up(x))), with GELU's tanh form as in GPT-2."""

    def __init__(self, spec: DecoderSpec, axes: Axes):
        super().__init__()
        self.axes = axes
        self.up = ColumnLinear(spec.hidden, spec.ffn_hidden, bias=True, std=STD, axes=axes)
        self.down = RowLinear(spec.ffn_hidden, spec.hidden, bias=True, std=_residual_std(spec), axes=axes)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: x [..., hidden], same shape out."""
        return self.down(F.gelu(self.up(entered(x, self.axes)), approximate="tanh"))


class SwigluFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, spec: DecoderSpec, axes: Axes):
        super().__init__()
        self.axes = axes
        self.gate = ColumnLinear(spec.hidden, spec.ffn_hidden, bias=False, std=STD, axes=axes)
        self.up = ColumnLinear(spec.hidden, spec.ffn_hidden, bias=False, std=STD, axes=axes)
        self.down = RowLinear(spec.ffn_hidden, spec.hidden, bias=False, std=_residual_std(spec), axes=axes)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: x [..., hidden], same shape out."""
        taken = entered(x, self.axes)
        return self.down(F.silu(self.gate(taken)) * self.up(taken))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); recomputed in the backward pass if asked."""

    def __init__(self, spec: DecoderSpec, axes: Axes = ALONE):
        super().__init__()
        self.recompute = spec.activation_checkpointing
        self.attention_norm = _norm(spec, axes)
        self.attention = Attention(spec, axes)
        self.feed_forward_norm = _norm(spec, axes)
        self.feed_forward = (SwigluFeedForward if spec.style == "llama" else GeluFeedForward)(spec, axes)
        self.dropout = Dropout(spec.dropout, axes)

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
            return LearnedPositions(spec.seq_len, spec.hidden, std=GPT_POSITIONS_STD, axes=axes)
        return nn.Identity()

    def head(tied: Tensor | None = None) -> nn.Module:
        chunk = spec.loss_chunk_tokens
        return Head(spec.vocab_size, spec.hidden, std=STD, chunk_tokens=chunk, tied=tied, axes=axes)

    builds: dict[str, Callable[..., nn.Module]] = {
        "token_embedding": lambda: TokenEmbedding(spec.vocab_size, spec.hidden, std=STD, axes=axes),
        "position_embedding": positions,
        "dropout": lambda: Dropout(spec.dropout, axes),
        **{f"blocks.{index}": lambda: Block(spec, axes) for index in range(spec.layers)},
        "final_norm": lambda: _norm(spec, axes),
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
        self.spec, self.sequence_ranks = spec, axes.sequence.size
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
        tokens = input_ids.shape[1] * self.sequence_ranks
        if tokens > self.spec.seq_len:
            raise ValueError(f"input_ids has {tokens} tokens per sample, but the context is {self.spec.seq_len}")
        hidden = input_ids
        *body, head = self.layers()
        for layer in body:
            hidden = layer(hidden)
        return head(hidden, labels)

    def layers(self) -> list[nn.Module]:
        """The layers of `decoder_layers`, built."""
        embedding = [self.token_embedding, self.position_embedding, self.dropout]
        return [*embedding, *self.blocks, self.final_norm, self.head]
