"""Reading a configuration file: bytes to text to a `Document`, one clear line for each way that can fail."""

import errno
import os
from collections.abc import Callable

from largetrain.config.document import Document, nearest
from largetrain.config.parse_engine import parse_engine_text
from largetrain.config.parse_run import parse_run_text
from largetrain.errors import ConfigError

MAX_BYTES = 10_000_000


def read_engine_file(path: str) -> Document:
    """Read an engine JSON in DeepSpeed's dialect (HJSON).

    Raises:
        ConfigError: unreadable, not text, a syntax error, a repeated key or a non-finite number, with line and column.
    """
    return _parse(path, read_text(path), parse_engine_text)


def read_run_file(path: str) -> Document:
    """Read a run YAML (safe tags only).

    Raises:
        ConfigError: as `read_engine_file`.
    """
    return _parse(path, read_text(path), parse_run_text)


def read_text(path: str) -> str:
    """The file's text: UTF-8 with or without a byte-order mark, any line ending.

    Raises:
        ConfigError: missing, a folder, unreadable, empty, too large or not UTF-8 text.
    """
    if not path.strip():
        raise ConfigError(f"{path!r}: names no file.")
    try:
        if os.path.isdir(path):
            raise ConfigError(f"{path}: is a folder; name a file in it.")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_neighbour(path)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r}: cannot be read: {_reason(error)}.") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES:,} bytes; this is not a configuration file.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text (byte {content[error.start]:#04x}).") from None
    if "\0" in text:
        raise ConfigError(
            f"{path}:{text.count(chr(10), 0, text.index(chr(0))) + 1}: holds a NUL byte: not a text file."
        )
    if not text.strip():
        raise ConfigError(f"{path}: is empty.")
    return text


def _parse(path: str, text: str, parser: Callable[[str, str], Document]) -> Document:
    try:
        return parser(path, text)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply.") from None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno != errno.ENAMETOOLONG else "the name is too long"
    return str(error)


def _neighbour(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f" (the folder {folder} does not exist)."
    found = nearest(os.path.basename(path), os.listdir(folder))
    return f"; did you mean {os.path.join(os.path.dirname(path), found)}?" if found else "."
