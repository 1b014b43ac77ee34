"""The vocabulary size of a tokenizer, without loading the tokenizer."""

import json

from largetrain.config.document import shown
from largetrain.errors import ConfigError

BYTE_VOCAB = 257
"""256 byte values and the end-of-text token."""
MAX_VOCAB = 10**8


def vocab_size_of(tokenizer: str) -> int:
    """Rows that the embedding needs: one more than the highest token id.

    Args:
        tokenizer: `bytes`, or the path of a Hugging Face `tokenizer.json`.

    Raises:
        ConfigError: the file is missing or is no tokenizer.json, or an id is negative or beyond `MAX_VOCAB`.
    """
    if tokenizer == "bytes":
        return BYTE_VOCAB
    try:
        with open(tokenizer, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f'data.tokenizer: {tokenizer}: no such file; write "bytes" or the path of a tokenizer.json.'
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"data.tokenizer: {tokenizer}: cannot be read as a tokenizer.json: {error}.") from None
    ids = _token_ids(content)
    if not ids:
        raise ConfigError(f"data.tokenizer: {tokenizer}: holds no vocabulary; a Hugging Face tokenizer.json is needed.")
    if min(ids) < 0 or max(ids) >= MAX_VOCAB:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ConfigError(
            f"data.tokenizer: {tokenizer}: holds the token id {shown(wrong)}; ids go from 0 to {MAX_VOCAB - 1:,}."
        )
    return max(ids) + 1


def _token_ids(content: object) -> list[int]:
    """All ids: `model.vocab` is a map (BPE, WordPiece, WordLevel) or a list of pairs (Unigram); added tokens beside."""
    if not isinstance(content, dict):
        return []
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: list[object] = list(vocab.values()) if isinstance(vocab, dict) else []
    if isinstance(vocab, list):
        ids = list(range(len(vocab)))
    added = content.get("added_tokens")
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    return [token_id for token_id in ids if isinstance(token_id, int) and not isinstance(token_id, bool)]
