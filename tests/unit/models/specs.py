"""Small decoders for the tests of this folder."""

from typing import Any

from largetrain.config.decoder_spec import DecoderSpec


def small_spec(style: str = "llama", **changes: Any) -> DecoderSpec:
    """Give a 2-layer decoder of odd sizes, with `changes` applied."""
    sizes: dict[str, Any] = {
        "style": style,
        "vocab_size": 61,
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2 if style == "llama" else 4,
        "ffn_hidden": 72,
        "seq_len": 16,
        "tie_embeddings": style == "gpt",
        "dropout": 0.0,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "activation_checkpointing": False,
        "loss_chunk_tokens": 1024,
    }
    return DecoderSpec(**{**sizes, **changes})
