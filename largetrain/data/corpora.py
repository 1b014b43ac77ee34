"""Documents of text, from files and folders.

A `.txt` file is one document, a line of `.jsonl` or `.jsonl.gz` is one. Every fault of the input is told with file
and line; a document without any text is skipped and counted.
"""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largetrain.data.builtin import builtin_documents
from largetrain.errors import ConfigError

KINDS = (".jsonl.gz", ".jsonl", ".txt")
MAX_PROBLEMS = 20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """One file, or the built-in corpus (`path` None); `key` is the run key that named it."""

    kind: str
    path: Path | None
    key: str

    @property
    def label(self) -> str:
        """How messages name it."""
        return "builtin" if self.path is None else str(self.path)


@dataclass
class Reading:
    """How to read, and what was met on the way."""

    text_key: str = "text"
    skip_bad: bool = False
    empty: int = 0
    bad: int = 0
    problems: list[str] = field(default_factory=list)

    def fault(self, source: Source, line: int, why: str) -> None:
        """Count a fault that may be skipped, or keep it for the report; too many end the reading."""
        if self.skip_bad:
            self.bad += 1
            return
        self.problems.append(f"{source.label}:{line}: {why}")
        if len(self.problems) >= MAX_PROBLEMS:
            self.raise_problems(source.key, more=True)

    def raise_problems(self, key: str, more: bool = False) -> None:
        """Raise one ConfigError with every fault kept so far, if any."""
        if self.problems:
            last = f"{key}: " + ("the first " if more else "") + f"{len(self.problems)} faults of the input are above. "
            raise ConfigError([*self.problems, last + "Mend them, or set data.on_bad_input=skip to leave them out."])


def find_sources(value: str | Sequence[str], key: str) -> list[Source]:
    """Turn `builtin`, files and folders into files, in the order given; folders recursively, sorted by path.

    A file that is named twice is taken once. Hidden files and folders inside a folder are left out.

    Raises:
        ConfigError: all paths that are missing, of unknown kind, empty, unreadable or without text files.
    """
    sources: dict[Path | None, Source] = {}
    problems: list[str] = []
    for entry in [value] if isinstance(value, str) else value:
        if entry == "builtin":
            sources.setdefault(None, Source("builtin", None, key))
            continue
        path = Path(entry).expanduser()
        try:
            found = _files_of(path, key)
        except ConfigError as error:
            problems += error.problems
            continue
        for file in found:
            sources.setdefault(file.resolve(), Source(_kind(file), file, key))
    if not sources and not problems:
        problems.append(f"{key}: the list is empty. Name files or folders, or `builtin`.")
    if problems:
        raise ConfigError(problems)
    return list(sources.values())


def _files_of(path: Path, key: str) -> list[Path]:
    accepted = ", ".join(reversed(KINDS))
    if path.is_dir():
        files = [
            Path(folder, name)
            for folder, folders, names in _walk(path, key)
            for name in names
            if not name.startswith(".") and _kind(Path(name))
        ]
        if not files:
            raise ConfigError(f"{key}: the folder {path} holds no {accepted} file. Name another, or single files.")
        return sorted(files)
    if not os.path.lexists(path):
        raise ConfigError(
            f"{key}: {path} does not exist (looked from {Path.cwd()}). Name a file or folder, or `builtin`."
        )
    if not path.is_file():
        raise ConfigError(f"{key}: {path} is neither a file nor a folder, or a link to nothing.")
    if not _kind(path):
        raise ConfigError(f"{key}: {path} has an unknown extension. Accepted: {accepted}, and folders of them.")
    if path.stat().st_size == 0:
        raise ConfigError(f"{key}: {path} is empty (0 bytes). Name a file with text.")
    return [path]


def _walk(path: Path, key: str) -> Iterator[tuple[str, list[str], list[str]]]:
    def stop(error: OSError) -> None:
        raise ConfigError(f"{key}: cannot list {error.filename}: {error.strerror}.")

    for folder, folders, names in os.walk(path, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield folder, folders, names


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.lower().endswith(kind)), "")


def digest(source: Source) -> str:
    """Return the sha256 of a source's content, in hex.

    Raises:
        ConfigError: the file cannot be read.
    """
    hasher = hashlib.sha256(source.kind.encode())
    if source.path is None:
        with _reading(source):
            for document in builtin_documents():
                content = document.encode()
                hasher.update(len(content).to_bytes(8, "little") + content)
        return hasher.hexdigest()
    with _reading(source), source.path.open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    """Turn faults of the file itself, which cannot be skipped, into the user's error."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{source.key}: {source.label} is a damaged or truncated gzip file ({error}). Fetch or pack it again."
        ) from error
    except OSError as error:
        raise ConfigError(f"{source.key}: cannot read {source.label}: {error.strerror or error}.") from error


def documents(source: Source, reading: Reading) -> Iterator[str]:
    """Yield the documents of a source that have text; count the others in `reading`.

    Line ends CR LF become LF in text files; a byte-order mark is dropped.

    Raises:
        ConfigError: the file cannot be read, or too many faults (`Reading.fault`); the caller ends with
            `reading.raise_problems`.
    """
    for text in _raw_documents(source, reading):
        if text.strip():
            yield text
        else:
            reading.empty += 1


def _raw_documents(source: Source, reading: Reading) -> Iterator[str]:
    if source.path is None:
        with _reading(source):
            yield from builtin_documents()
    elif source.kind == ".txt":
        with _reading(source):
            content = source.path.read_bytes()
        text = _decode(content.removeprefix(BOM), source, 1, reading)
        if text is not None:
            yield text.replace("\r\n", "\n")
    else:
        yield from _json_lines(source, reading)


def _json_lines(source: Source, reading: Reading) -> Iterator[str]:
    for number, line in enumerate(_lines(source), start=1):
        complete = line.endswith(b"\n")
        line = line.removeprefix(BOM) if number == 1 else line
        if not line.strip():
            reading.empty += 1
            continue
        text = _decode(line, source, number, reading)
        if text is None:
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            cut = "" if complete else " The last line has no line end, so the file may be cut off."
            reading.fault(source, number, f"not valid JSON ({_reason(error)}).{cut}")
            continue
        why = _why_unusable(value, reading.text_key)
        if why:
            reading.fault(source, number, why)
        else:
            yield value[reading.text_key]


def _lines(source: Source) -> Iterator[bytes]:
    assert source.path is not None
    # faults raised by the consumer of a generator do not pass through it, so only reading is watched here
    with _reading(source):
        if source.kind == ".jsonl.gz":
            with gzip.open(source.path, "rb") as packed:
                yield from packed
        else:
            with source.path.open("rb") as file:
                yield from file


def _decode(content: bytes, source: Source, first_line: int, reading: Reading) -> str | None:
    """Decode UTF-8; a fault is told with the line it lies in, and None comes back."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1)
        hint = " The file looks like UTF-16: convert it." if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        why = (
            f"not valid UTF-8: byte 0x{content[error.start]:02X} at offset {column} of the line ({error.reason}).{hint}"
        )
        reading.fault(source, line, why)
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _why_unusable(value: Any, text_key: str) -> str | None:
    if not isinstance(value, dict):
        return f"the line is a JSON {_type_name(value)}, not an object."
    if text_key not in value:
        names = ", ".join(sorted(value)[:8]) or "none"
        return f'key "{text_key}" is missing (keys here: {names}). Set data.text_key to the key that holds the text.'
    text = value[text_key]
    if not isinstance(text, str):
        return f'key "{text_key}" holds a {_type_name(text)}, not a string.'
    try:
        text.encode()
    except UnicodeEncodeError:
        return f'key "{text_key}" holds half of a surrogate pair, which is not a character.'
    return None


def _type_name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
