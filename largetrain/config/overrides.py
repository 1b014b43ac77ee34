"""`--set KEY=VALUE` and the flags: laid over the two files, with each disagreement named."""

from collections.abc import Mapping, Sequence
from typing import Any

from largetrain.config.document import Document, dotted, nearest, shown
from largetrain.config.engine_schema import engine_keys, key_places
from largetrain.config.parse_run import parse_value
from largetrain.config.run_schema import run_keys, run_places, task_of

Flags = Mapping[str, tuple[str, Any]]


class Overrides:
    """Applies flags and `--set` to an engine and a run document; `problems` and `notes` tell what happened."""

    def __init__(self, engine: Document, run: Document) -> None:
        self.engine = engine
        self.run = run
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.explicit: dict[tuple[str, str], tuple[str, Any]] = {}

    def apply(self, flags: Flags, sets: Sequence[str]) -> None:
        """Lay flags over the files, then `--set` over both; two of them that disagree are a problem."""
        for key, (flag, value) in flags.items():
            self._put("run", key, value, f"{flag} {value}" if value != "" else f"{flag} ''")
        for written in sets:
            self._set(written)

    def _set(self, written: str) -> None:
        key, equals, text = written.partition("=")
        key = key.strip()
        if not equals or not key or not all(part for part in key.split(".")):
            self.problems.append(f"--set {written}: write it as KEY=VALUE, for instance optimizer.params.lr=3e-4.")
            return
        try:
            value = parse_value(text)
        except ValueError as error:
            self.problems.append(f"--set {written}: the value cannot be read: {error}")
            return
        home, key = self._home(key, written)
        if home:
            self._put(home, key, value, f"--set {written}")

    def _home(self, key: str, written: str) -> tuple[str, str]:
        """Which file a key belongs to, and the key without an explicit `engine.` or `run.`."""
        first, _, rest = key.partition(".")
        if first in ("engine", "run") and rest:
            return first, rest
        if first in engine_keys():
            return "engine", key
        if first in run_keys():
            return "run", key
        places = {**key_places(), **run_places(task_of(self.run))}
        near = dotted(places[first]) if first in places else nearest(first, [*engine_keys(), *run_keys()])
        hint = (
            f" Did you mean {near}{'.' + rest if rest else ''}?"
            if near
            else " `largetrain config --reference` lists all."
        )
        self.problems.append(f"--set {written}: {first} is a key of neither file.{hint}")
        return "", key

    def _put(self, home: str, key: str, value: Any, origin: str) -> None:
        document = self.engine if home == "engine" else self.run
        path = tuple(key.split("."))
        before = self.explicit.get((home, key))
        if before is not None and before[1] != value:
            self.problems.append(f"{origin}: {key} is also given by {before[0]}. Keep one of them.")
            return
        self.explicit[(home, key)] = (origin, value)
        if before is None:
            self._note(document, path, value, origin)
        self._choose_length(document, path, value, origin)
        if value is None and home == "engine":
            document.remove(path)
            return
        try:
            document.set(path, value, origin)
        except KeyError as error:
            self.problems.append(f"{origin}: {error.args[0]} is {shown(_parent(document, path))}, not a section.")

    def _note(self, document: Document, path: tuple[str, ...], value: Any, origin: str) -> None:
        in_file = document.get(path)
        if in_file is not None and in_file != value:
            self.notes.append(
                f"{dotted(path)} = {shown(value)} ({origin}), over {shown(in_file)} in {document.origin(path)}"
            )

    def _choose_length(self, document: Document, path: tuple[str, ...], value: Any, origin: str) -> None:
        """`--steps` over a file that says `epochs` (or the other way round) replaces it."""
        other = {"steps": "epochs", "epochs": "steps"}.get(dotted(path)) if document is self.run else None
        if value is None or other is None or document.get((other,)) is None or ("run", other) in self.explicit:
            return
        self.notes.append(f"{dotted(path)} = {shown(value)} ({origin}) replaces {other} in {document.origin((other,))}")
        document.remove((other,))


def _parent(document: Document, path: tuple[str, ...]) -> Any:
    for length in range(1, len(path)):
        value = document.get(path[:length])
        if value is not None and not isinstance(value, dict):
            return value
    return None
