"""Text to token ids and back: plain bytes, or a Hugging Face `tokenizer.json`.

Imports no torch, and numpy and `tokenizers` only when text is encoded, so that a command which needs just the
vocabulary size stays fast.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from largetrain.config.vocab import BYTE_VOCAB, vocab_size_of
from largetrain.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

KEY = "data.tokenizer"
EOS_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>", "<|im_end|>",
    "<end_of_text>", "[SEP]",
)  # fmt: skip
PIECE_CHARACTERS = 1 << 20


class Tokenizer(Protocol):
    """Encodes documents; `eos_id` is put after each document by the caller.

    `fingerprint` changes whenever the ids that a text gets may change.
    """

    vocab_size: int
    eos_id: int
    name: str
    fingerprint: str

    def encode(self, text: str) -> "np.ndarray":
        """Return the ids of one text, an integer array [tokens] without the end-of-text id."""
        ...

    def encode_many(self, texts: Sequence[str]) -> "list[np.ndarray]":
        """Return `encode` of each text; a batch may use several threads."""
        ...

    def decode(self, ids: "Sequence[int] | np.ndarray") -> str:
        """Return the text of ids; what is no text (end-of-text, broken UTF-8) is left out or replaced."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a text."""

    vocab_size = BYTE_VOCAB
    eos_id = 256
    name = "bytes"
    fingerprint = "bytes 1"

    def encode(self, text: str) -> "np.ndarray":
        import numpy as np

        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> "list[np.ndarray]":
        return [self.encode(text) for text in texts]

    def decode(self, ids: "Sequence[int] | np.ndarray") -> str:
        return bytes(int(i) for i in ids if int(i) < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library.

    A text longer than 2**20 characters is encoded in pieces cut after a line break, which bounds memory.

    Raises:
        ConfigError: the library is missing, the file cannot be read, or no end-of-text token is found.
    """

    def __init__(self, path: str):
        self.name = path
        self.vocab_size = vocab_size_of(path)
        content = Path(path).read_bytes()
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ConfigError(
                f"{KEY}: {path} needs the package `tokenizers`, which cannot be imported ({error}). "
                f"Run `pip install tokenizers`, or set {KEY}=bytes."
            ) from error
        try:
            self._backend = Backend.from_str(content.decode())
        except Exception as error:  # the library raises a bare Exception for every fault of the file
            raise ConfigError(f"{KEY}: {path} is not a usable tokenizer.json: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_id = _find_eos(self._backend.get_vocab(with_added_tokens=True), path)
        self.fingerprint = f"tokenizer.json {hashlib.sha256(content).hexdigest()} eos {self.eos_id}"

    def encode(self, text: str) -> "np.ndarray":
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> "list[np.ndarray]":
        import numpy as np

        pieces: list[str] = []
        owners: list[int] = []
        for index, text in enumerate(texts):
            cut = _pieces(text)
            pieces += cut
            owners += [index] * len(cut)
        parts: list[list[int]] = [[] for _ in texts]
        for owner, encoding in zip(owners, self._backend.encode_batch(pieces, add_special_tokens=False), strict=True):
            parts[owner] += encoding.ids
        return [np.array(ids, dtype=np.int64) for ids in parts]

    def decode(self, ids: "Sequence[int] | np.ndarray") -> str:
        return self._backend.decode([int(i) for i in ids])


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: `bytes`, or the path of a tokenizer.json.

    Raises:
        ConfigError: see `FileTokenizer`.
    """
    return ByteTokenizer() if spec == "bytes" else FileTokenizer(spec)


def tokenizer_vocab_size(spec: str) -> int:
    """Return the ids that the tokenizer may produce (highest + 1) from its file alone, without loading a library.

    Raises:
        ConfigError: the file is missing or is no tokenizer.json.
    """
    return vocab_size_of(spec)


def _find_eos(vocab: dict[str, int], path: str) -> int:
    """Take the end-of-text token named by a tokenizer_config.json beside the file, else the first usual name."""
    names = list(EOS_NAMES)
    beside = Path(path).with_name("tokenizer_config.json")
    if beside.is_file():
        try:
            named = json.loads(beside.read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{KEY}: cannot read {beside}, which names the end-of-text token: {error}") from error
        named = named.get("content") if isinstance(named, dict) else named
        names = [named, *names] if isinstance(named, str) else names
    for name in names:
        if name in vocab:
            return vocab[name]
    raise ConfigError(
        f"{KEY}: {path} has no end-of-text token (looked for {', '.join(names)}). "
        f'Name it as "eos_token" in {beside}, or add <|endoftext|> to the tokenizer.'
    )


def _pieces(text: str) -> list[str]:
    if len(text) <= PIECE_CHARACTERS:
        return [text]
    pieces, start = [], 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        line_end = text.rfind("\n", start, end) + 1
        end = line_end if line_end > start and end < len(text) else end
        pieces.append(text[start:end])
        start = end
    return pieces
