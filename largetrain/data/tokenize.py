"""From documents to the token files of a train and a validation split.

Two passes over the sources: the first checks every document and counts, so that the split is known and all faults
are told before anything is written; the second tokenizes.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from largetrain.data import corpora
from largetrain.data.corpora import Reading, Source
from largetrain.data.store import SplitWriter
from largetrain.data.tokenizer import Tokenizer
from largetrain.errors import ConfigError

SPLITS = ("train", "validation")
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 512
DOCUMENTS_PER_HELD_OUT = 10

Progress = Callable[[float, str], None]
"""Called with the share done, 0.0 to 1.0, and a line of text for a person."""


@dataclass
class Census:
    """What the first pass found in one list of sources."""

    reading: Reading
    sizes: array = field(default_factory=lambda: array("q"))
    """UTF-8 bytes of each document."""
    hashes: array = field(default_factory=lambda: array("Q"))
    """64 bits of each document's content hash."""

    @property
    def text_bytes(self) -> int:
        """Bytes of all documents."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Division:
    """Which documents are held out for validation: by mask, or everything from byte `cut` on."""

    held_out: np.ndarray | None = None
    cut: int | None = None

    def describe(self) -> str:
        """Say in a few words how validation text was chosen."""
        return "the end of the text" if self.held_out is None else "documents chosen by content hash"


def take_census(sources: Sequence[Source], text_key: str, skip_bad: bool) -> Census:
    """Read every document once.

    Raises:
        ConfigError: faults of the input (all of one list of sources together), or no document has text.
    """
    census = Census(Reading(text_key=text_key, skip_bad=skip_bad))
    for source in sources:
        for text in corpora.documents(source, census.reading):
            content = text.encode()
            census.sizes.append(len(content))
            census.hashes.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
    key = sources[0].key
    census.reading.raise_problems(key)
    if not census.sizes:
        names = ", ".join(source.label for source in sources[:3]) + (", ..." if len(sources) > 3 else "")
        raise ConfigError(
            f"{key}: no document of {names} has any text ({census.reading.empty} empty, {census.reading.bad} unusable "
            f"and skipped). Name files with text."
        )
    return census


def divide(census: Census, fraction: float) -> Division:
    """Choose what is held out for validation.

    With enough documents each one is decided by its own content hash, so that a document added later moves no other
    and copies of a text stay on one side. A corpus of few documents (fewer than 10 would be held out), or one where
    the choice misses the wanted share of the text by more than a factor of 3, is cut once: its last part, in the
    order of the sources, is held out.
    """
    sizes = np.array(census.sizes, dtype=np.int64)
    held_out = np.array(census.hashes, dtype=np.uint64) < np.uint64(int(fraction * (1 << 64)))
    share = float(sizes[held_out].sum() / sizes.sum())
    enough = len(sizes) * min(fraction, 1 - fraction) >= DOCUMENTS_PER_HELD_OUT
    if enough and fraction / 3 <= share <= min(3 * fraction, 1 - (1 - fraction) / 3):
        return Division(held_out=held_out)
    return Division(cut=int(sizes.sum() * (1 - fraction)))


def write_splits(
    folder: Path,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    validation: Sequence[Source] | None,
    text_key: str,
    skip_bad: bool,
    fraction: float,
    progress: Progress,
) -> dict[str, Any]:
    """Tokenize the sources into `folder` and return the content of its manifest.

    Each document is followed by the end-of-text id.

    Raises:
        ConfigError: see `take_census`; or a file changed meanwhile.
    """
    stamps = _stamps([*sources, *(validation or ())])
    progress(0.0, f"reading {len(sources) + len(validation or ())} sources")
    census = take_census(sources, text_key, skip_bad)
    other = take_census(validation, text_key, skip_bad) if validation else None
    division = Division() if other else divide(census, fraction)
    total = census.text_bytes + (other.text_bytes if other else 0)
    progress(0.0, f"tokenizing {total / 1e6:.1f} MB of text, {len(census.sizes)} documents")
    writers: list[SplitWriter] = []
    try:
        for name in SPLITS:
            writers.append(SplitWriter(folder, name, tokenizer.vocab_size))
        parts = _assign(_texts(sources, text_key, skip_bad), division)
        if validation:
            parts = _chain(parts, ((1, text) for text in _texts(validation, text_key, skip_bad)))
        _tokenize(parts, tokenizer, writers, total, progress)
        splits = {name: writer.finish().to_json() for name, writer in zip(SPLITS, writers, strict=True)}
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    if _stamps([*sources, *(validation or ())]) != stamps:
        raise ConfigError(f"{sources[0].key}: a file changed while it was read. Start again when it is complete.")
    readings = [census.reading, *([other.reading] if other else [])]
    return {
        "splits": splits,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "held_out": "separate files" if other else division.describe(),
        "empty": sum(reading.empty for reading in readings),
        "bad": sum(reading.bad for reading in readings),
    }


def _stamps(sources: Sequence[Source]) -> list[tuple[int, int]]:
    found = [source.path.stat() for source in sources if source.path]
    return [(stat.st_size, stat.st_mtime_ns) for stat in found]


def _texts(sources: Sequence[Source], text_key: str, skip_bad: bool) -> Iterator[str]:
    reading = Reading(text_key=text_key, skip_bad=skip_bad)
    for source in sources:
        yield from corpora.documents(source, reading)


def _chain(*parts: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for part in parts:
        yield from part


def _assign(texts: Iterator[str], division: Division) -> Iterator[tuple[int, str]]:
    """Pair each text with its split, 0 train or 1 validation; the text that holds the cut is divided."""
    position = 0
    for index, text in enumerate(texts):
        if division.held_out is not None:
            yield int(division.held_out[index]), text
        elif division.cut is None:
            yield 0, text
        else:
            content = text.encode()
            inside = division.cut - position
            position += len(content)
            if inside >= len(content):
                yield 0, text
            elif inside <= 0:
                yield 1, text
            else:
                inside = _cut_point(content, inside)
                yield from ((split, part.decode()) for split, part in ((0, content[:inside]), (1, content[inside:])))


def _cut_point(content: bytes, wanted: int) -> int:
    """Move a cut back to a line start if one is within 1000 bytes, else to a character's first byte."""
    line = content.rfind(b"\n", max(0, wanted - 1000), wanted) + 1
    if line > 0:
        return line
    while wanted > 0 and content[wanted] & 0xC0 == 0x80:
        wanted -= 1
    return wanted


def _tokenize(
    parts: Iterator[tuple[int, str]], tokenizer: Tokenizer, writers: list[SplitWriter], total: int, progress: Progress
) -> None:
    done = 0
    for batch in _batches(parts):
        for (split, text), ids in zip(batch, tokenizer.encode_many([text for _, text in batch]), strict=True):
            size = len(text.encode())
            writers[split].add(np.append(ids.astype(np.int64), tokenizer.eos_id), size)
            done += size
        progress(min(1.0, done / total), f"tokenized {done / 1e6:.1f} of {total / 1e6:.1f} MB")


def _batches(parts: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    characters = 0
    for split, text in parts:
        if not text:
            continue
        batch.append((split, text))
        characters += len(text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
