"""A parsed file as the loader carries it: the data, and where each key was written."""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]


def one_line(text: str) -> str:
    """Text from a file as part of a message: line ends and other control characters are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def dotted(path: KeyPath) -> str:
    """`("optimizer", "params", "betas", 1)` as people read it: `optimizer.params.betas[1]`."""
    text = ""
    for part in (part if isinstance(part, int) else one_line(str(part)) for part in path):
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def shown(value: Any) -> str:
    """A value as it would stand in the file, shortened to one line."""
    try:
        text = one_line(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        text = one_line(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name` (case ignored), or None when none is near."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


@dataclass
class Document:
    """One configuration file, with overrides applied to it.

    `origins` maps a key path to the place that set it: `FILE:LINE`, a flag, or `--set KEY=VALUE`.
    """

    file: str
    data: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """The place that set this key, or something below it, or its nearest ancestor; else the file."""
        if path not in self.origins:
            for other, origin in self.origins.items():
                if other[: len(path)] == path:
                    return origin
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.file

    def problem(self, path: KeyPath, text: str) -> str:
        """One line of an error report: place, key path, what is wrong and the way out."""
        return f"{self.origin(path)}: {dotted(path)}: {text}" if path else f"{self.file}: {text}"

    def get(self, path: KeyPath, default: Any = None) -> Any:
        """The value at a path of keys, or `default` when a part of the path is absent."""
        value: Any = self.data
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def set(self, path: KeyPath, value: Any, origin: str | None = None) -> None:
        """Put a value, creating the sections above it; sections replaced by a scalar are lost.

        Raises:
            KeyError: a part of the path above the last is there and is not a section.
        """
        target = self.data
        for index, part in enumerate(path[:-1]):
            below = target.setdefault(str(part), {})
            if not isinstance(below, dict):
                raise KeyError(dotted(path[: index + 1]))
            target = below
        target[str(path[-1])] = value
        if origin is not None:
            self._own(path, origin)

    def remove(self, path: KeyPath) -> None:
        """Take a key out; nothing happens when it is absent."""
        parent = self.get(path[:-1])
        if isinstance(parent, dict):
            parent.pop(path[-1], None)

    def _own(self, path: KeyPath, origin: str) -> None:
        for other in [other for other in self.origins if other[: len(path)] == path]:
            del self.origins[other]
        self.origins[path] = origin
