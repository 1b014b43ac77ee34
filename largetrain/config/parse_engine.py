"""The engine JSON's dialect: HJSON, as DeepSpeed reads it, with the line of every key.

Drives the decoder of the `hjson` package (the one that DeepSpeed uses) through its hooks: objects are collected
here, so that repeated keys are seen and positions kept; numbers and quoteless text are checked as they are read.
"""

import json
import math
import re
import unicodedata
from typing import Any

from hjson.decoder import HjsonDecoder, getNext, make_scanner, scanKeyName, scantfnns
from hjson.scanner import HjsonDecodeError, linecol

from largetrain.config.document import Document, KeyPath, dotted, one_line
from largetrain.errors import ConfigError

QUOTELESS_TEXT = re.compile(r"[A-Za-z_./~$][\w ./~:+$-]*")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
CONTROL = "Invalid control character"
NOT_FINITE = {"nan", "infinity", "inf"}
KIND = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}


class _NotFiniteError(ValueError):
    """A number beyond the range of a double."""


class _Object(dict[str, Any]):
    """An object that remembers the offset of each key."""

    offsets: dict[str, int]


def parse_engine_text(file: str, text: str) -> Document:
    """Parse an engine JSON.

    Raises:
        ConfigError: a syntax error, repeated keys (all of them), a non-finite number, or no object at the top.
    """
    decoder = _Decoder()
    try:
        root = decoder.decode(text)
    except HjsonDecodeError as error:
        behind = error.msg.startswith(CONTROL)  # hjson points behind a control character
        line, column = linecol(error.doc, error.pos - behind)
        raise ConfigError(f"{file}:{line}:{column}: {_plain(error)}") from None
    except IndexError:  # hjson runs off the end inside /* or '''
        raise ConfigError(f"{file}:{text.count(chr(10)) + 1}: the file ends inside a comment or a text.") from None
    if not isinstance(root, _Object):
        raise ConfigError(f"{file}: holds {KIND.get(type(root), 'no object')} at the top; an object {{...}} is needed.")
    if decoder.repeated:
        raise ConfigError(_repeated(file, text, root, decoder.repeated))
    origins: dict[KeyPath, str] = {}
    return Document(file, _settle(root, (), text, file, origins), origins)


class _Decoder(HjsonDecoder):
    """hjson's decoder with our object and scalar readers in place of its own."""

    def __init__(self) -> None:
        super().__init__(parse_float=_finite)
        self.repeated: list[tuple[_Object, str, int, int]] = []
        self.parse_object = self._read_object
        self.parse_tfnns = _read_scalar
        self.scan_once, self.scan_object_once = make_scanner(self)

    def _read_object(self, state: Any, encoding: Any, strict: bool, scan_once: Any, *rest: Any) -> tuple[_Object, int]:
        """Read `key: value` pairs up to the closing brace, or to the end of the file for a root without braces."""
        text, end = state
        closing = "" if len(rest) > 3 and rest[3] else "}"
        found = _Object()
        found.offsets = {}
        char, end = getNext(text, end)
        while char != closing:
            if char == "":
                raise HjsonDecodeError("the file ends inside an object; is a closing } missing?", text, end)
            key_at = end
            key, end = scanKeyName(text, end, encoding, strict)
            char, end = getNext(text, end)
            if char != ":":
                raise HjsonDecodeError(f'a ":" is expected after the key "{key}"', text, end)
            _, end = getNext(text, end + 1)
            value, end = scan_once(text, end)
            if key in found:
                self.repeated.append((found, key, found.offsets[key], key_at))
            else:
                found.offsets[key] = key_at
            found[key] = value
            char, end = getNext(text, end)
            if char == ",":
                char, end = getNext(text, end + 1)
        return found, end + len(closing)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFiniteError(digits)
    return number


def _read_scalar(context: Any, text: str, end: int) -> tuple[Any, int]:
    """A number, true, false, null or quoteless text; what HJSON would misread silently is refused here."""
    try:
        value, stop = scantfnns(context, text, end)
    except _NotFiniteError as error:
        raise HjsonDecodeError(f"the number {error} is not finite", text, end) from None
    except HjsonDecodeError as error:
        raise HjsonDecodeError(f"a value is expected, found {text[error.pos : error.pos + 1]!r}", text, end) from None
    except ValueError:  # Python's limit on the digits of an integer
        raise HjsonDecodeError("the number has too many digits", text, end) from None
    if not isinstance(value, str) and not text[end:stop].isascii():  # hjson reads the digits of any script
        raise HjsonDecodeError(_other_digits(text[end:stop]), text, end)
    if isinstance(value, str) and not (QUOTELESS_TEXT.fullmatch(value) and _is_word(value)):
        raise HjsonDecodeError(_quoteless(value), text, end)
    return value, stop


def _is_word(value: str) -> bool:
    return value not in PYTHON_WORDS and value.lower() not in NOT_FINITE


def _quoteless(value: str) -> str:
    word = value.rstrip(" ,}]")
    if word.lstrip("-+").lower() in NOT_FINITE:
        return f"{word} is not a finite number"
    if word in PYTHON_WORDS:
        return f"write {PYTHON_WORDS[word]} instead of {word}"
    if unicodedata.digit(value[:1] or "x", None) is not None and not value[0].isascii():
        return _other_digits(word)
    shown = value if len(value) <= 40 else value[:37] + "..."
    return f"cannot read {shown!r}: text without quotes reaches to the end of its line; quote it, or add the comma"


def _other_digits(written: str) -> str:
    """Advice for full-width and other digits than 0 to 9."""
    plain = "".join(str(unicodedata.digit(char, char)) for char in written)
    return f"the digits of {written} are not those of a number; write {plain}"


def _plain(error: HjsonDecodeError) -> str:
    if error.msg.startswith(CONTROL):
        char = error.doc[error.pos - 1]
        escape = json.dumps(char)[1:-1]
        return f"a text in quotes holds a control character (or is not closed on its line); write it as {escape}."
    if error.msg.startswith("Unterminated string"):
        return "a text that starts here is not closed."
    message = one_line(error.msg.replace("%r", repr(error.doc[error.pos : error.pos + 1]))).rstrip(".; ")
    return message if message.endswith("?") else f"{message}."


def _repeated(file: str, text: str, root: _Object, repeated: list[tuple[_Object, str, int, int]]) -> list[str]:
    problems = []
    paths = {id(found): path for found, path in _objects(root, ())}
    for found, key, first, second in repeated:
        path = dotted((*paths.get(id(found), ()), key))
        line, column = linecol(text, second)
        first_line = linecol(text, first)[0]
        problems.append(f"{file}:{line}:{column}: {path}: written twice (first in line {first_line}). Remove one.")
    return problems


def _objects(value: Any, path: KeyPath) -> list[tuple[_Object, KeyPath]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(value, path)] if isinstance(value, _Object) else []
    for key, below in items:
        found += _objects(below, (*path, key))
    return found


def _settle(value: Any, path: KeyPath, text: str, file: str, origins: dict[KeyPath, str]) -> Any:
    """Plain dicts and lists from the decoder's objects, filling `origins` with `FILE:LINE`."""
    if isinstance(value, _Object):
        settled = {}
        for key, below in value.items():
            if not _encodable(key):
                raise ConfigError(f"{file}: {dotted(path)}: a key holds half of a surrogate pair; it cannot be used.")
            place = (*path, key)
            origins[place] = f"{file}:{linecol(text, value.offsets[key])[0]}"
            settled[key] = _settle(below, place, text, file, origins)
        return settled
    if isinstance(value, str) and not _encodable(value):
        raise ConfigError(f"{file}: {dotted(path)}: the text holds half of a surrogate pair; it cannot be used.")
    if isinstance(value, list):
        return [_settle(below, (*path, index), text, file, origins) for index, below in enumerate(value)]
    return value


def _encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
