"""Text as training samples: tokenized once into the cache, then memory-mapped."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from largetrain.config.schema import LanguageRun
from largetrain.data.cache import cache_root, open_or_build, read_manifest, write_manifest, writing
from largetrain.data.corpora import Source, find_sources
from largetrain.data.digests import remembered_digest
from largetrain.data.store import DamagedError, Split, map_tokens, verify
from largetrain.data.tokenize import SPLITS, Progress, write_splits
from largetrain.data.tokenizer import Tokenizer, load_tokenizer
from largetrain.errors import ConfigError

FORMAT = 1


class TokenDataset(Dataset):
    """Samples of seq_len tokens cut one after the other from a split's token file.

    Sample i holds tokens i * seq_len ... (i + 1) * seq_len, one more than seq_len, so that the labels are the inputs
    shifted by one and every token but the first is a target once. The tail that fills no sample is left out.

    Args:
        folder: the cache entry.
        name: `train` or `validation`.
        split: its record in the manifest.
        seq_len: tokens per sample.
    """

    def __init__(self, folder: Path, name: str, split: Split, seq_len: int):
        self.folder, self.name, self.split, self.seq_len = folder, name, split, seq_len
        self._rows: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the split, end-of-text tokens included."""
        return self.split.tokens

    def __len__(self) -> int:
        return max(0, self.split.tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return {"input_ids": int64 [seq_len], "labels": int64 [seq_len], "sample_id": int}."""
        batch = self.get_batch(np.array([index]))
        return {"input_ids": batch["input_ids"][0], "labels": batch["labels"][0], "sample_id": index}

    def get_batch(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Return the samples of ids (int64 [n], each in [0, len)) stacked: one copy for the whole micro-batch.

        Returns:
            {"input_ids": int64 [n, seq_len], "labels": int64 [n, seq_len], "sample_id": int64 [n]}.
        """
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"sample ids {ids.min()}..{ids.max()} of the {self.name} split with {len(self)} samples")
        rows = self._view()[ids].astype(np.int64)
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows[:, :-1])),
            "labels": torch.from_numpy(np.ascontiguousarray(rows[:, 1:])),
            "sample_id": torch.from_numpy(ids.astype(np.int64)),
        }

    def _view(self) -> np.ndarray:
        """Map the file on first use in this process and lay overlapping rows [samples, seq_len + 1] over it."""
        if self._rows is None:
            tokens = map_tokens(self.folder, self.name, self.split)
            shape, step = (len(self), self.seq_len + 1), tokens.itemsize
            self._rows = np.lib.stride_tricks.as_strided(
                np.asarray(tokens), shape, (self.seq_len * step, step), writeable=False
            )
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        # a pickled map would carry the whole file to a spawned worker
        return {**self.__dict__, "_rows": None}


@dataclass(frozen=True)
class TextData:
    """Both splits and what is known about them."""

    train: TokenDataset
    validation: TokenDataset
    fingerprint: str
    """Changes whenever the ids of any sample may change (content, tokenizer, split, seq_len)."""
    bytes_per_token: float
    """UTF-8 bytes of the validation text per token, end-of-text tokens counted as tokens: bits per byte are
    loss / ln(2) / bytes_per_token."""
    report: tuple[str, ...]
    """Lines for a person: documents, tokens, what was skipped."""


def prepare(
    run: LanguageRun, spec_seq_len: int, vocab_size: int, *, is_writer: bool = True, progress: Progress | None = None
) -> TextData:
    """Tokenize the sources of `run.data` into the cache, once, and open both splits.

    Every rank calls this: whichever takes the entry's lock first builds it, the others wait and open it, so it
    makes no difference whether the cache folder is shared between hosts.

    Args:
        run: the run; `data` and nothing else is used.
        spec_seq_len: tokens per sample.
        vocab_size: rows of the model's embedding.
        is_writer: False silences `progress`.
        progress: told of the work, and not called when the tokens are in the cache already.

    Raises:
        ConfigError: faults of the input, the tokenizer or the cache folder, or a split too short for one sample.
    """
    data = run.data
    tokenizer = load_tokenizer(data.tokenizer)
    _check_vocab(tokenizer, vocab_size)
    told: Progress = progress if progress and is_writer else lambda share, line: None
    sources = find_sources(data.source, "data.source")
    validation = find_sources(data.validation, "data.validation") if data.validation is not None else None
    _check_apart(sources, validation)
    skip_bad = data.on_bad_input == "skip"
    root = cache_root(data.cache)
    with writing(root):
        key = _key(root, tokenizer, sources, validation, data.text_key, skip_bad, data.validation_fraction)

    def build(folder: Path) -> None:
        manifest = write_splits(
            folder, tokenizer, sources, validation, data.text_key, skip_bad, data.validation_fraction, told
        )
        write_manifest(folder, {**manifest, "format": FORMAT})

    folder, manifest, splits = open_or_build(
        root, key, lambda entry: _load(entry, tokenizer.vocab_size), build, lambda line: told(0.0, line)
    )
    train, held_out = (TokenDataset(folder, name, splits[name], spec_seq_len) for name in SPLITS)
    _check_length(train, sources)
    _check_length(held_out, validation or sources)
    return TextData(
        train=train,
        validation=held_out,
        fingerprint=hashlib.sha256(f"{key} {spec_seq_len}".encode()).hexdigest()[:32],
        bytes_per_token=splits["validation"].text_bytes / splits["validation"].tokens,
        report=_report(manifest, train, held_out, folder),
    )


def _key(
    root: Path,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    validation: Sequence[Source] | None,
    text_key: str,
    skip_bad: bool,
    fraction: float,
) -> str:
    """Name the cache entry by everything that decides the tokens, and by content rather than by path."""
    parts = [str(FORMAT), tokenizer.fingerprint, text_key, str(skip_bad), repr(fraction) if validation is None else ""]
    parts += [remembered_digest(source, root) for source in sources]
    parts += ["validation", *(remembered_digest(source, root) for source in validation)] if validation else []
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _load(folder: Path, vocab_size: int) -> tuple[Path, dict[str, Any], dict[str, Split]]:
    manifest = read_manifest(folder)
    if manifest.get("format") != FORMAT or manifest.get("vocab_size") != vocab_size:
        raise DamagedError("manifest: another format or vocabulary")
    splits = {name: Split.from_json(manifest["splits"][name]) for name in SPLITS}
    for name, split in splits.items():
        verify(folder, name, split, vocab_size)
    return folder, manifest, splits


def _check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} ids of "
            f"data.tokenizer={tokenizer.name}. Set model.vocab_size to at least {tokenizer.vocab_size}, or to auto."
        )


def _check_apart(sources: Sequence[Source], validation: Sequence[Source] | None) -> None:
    resolved = {source.path.resolve() if source.path else None for source in sources}
    shared = [s.label for s in validation or () if (s.path.resolve() if s.path else None) in resolved]
    if shared:
        raise ConfigError(
            f"data.validation: {', '.join(shared[:3])} is also in data.source, so the model would be judged by text it "
            f"trained on. Name other files, or leave data.validation out."
        )


def _check_length(dataset: TokenDataset, sources: Sequence[Source]) -> None:
    if len(dataset):
        return
    held_out = dataset.name == "validation" and sources[0].key == "data.source"
    more = "Add text, raise data.validation_fraction" if held_out else "Add text"
    raise ConfigError(
        f"{sources[0].key}: the {dataset.name} split has {dataset.tokens} tokens, but one sample needs "
        f"{dataset.seq_len + 1} (model.seq_len={dataset.seq_len} and the next token). {more}, or lower model.seq_len."
    )


def _report(manifest: dict[str, Any], train: TokenDataset, held_out: TokenDataset, folder: Path) -> tuple[str, ...]:
    lines = [
        f"{dataset.name}: {dataset.split.documents} documents, {dataset.tokens} tokens, {len(dataset)} samples"
        for dataset in (train, held_out)
    ]
    lines[1] += f" (held out: {manifest['held_out']})"
    if manifest["empty"]:
        lines.append(f"skipped {manifest['empty']} empty documents")
    if manifest["bad"]:
        lines.append(f"skipped {manifest['bad']} documents that are not valid UTF-8 or JSON with a text (on_bad_input)")
    return (*lines, f"tokens: {folder}")
