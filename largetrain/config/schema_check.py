"""Checks a document against a JSON schema (the few keywords ours use) and says what to write instead.

A general validator would name the violated keyword; people need the key, the line, the reason and the way out.
Whole-number floats become integers where integers are wanted, and `Auto` becomes `auto`.
"""

import re
from collections.abc import Iterator
from typing import Any

from largetrain.config.document import Document, KeyPath, nearest, shown

Node = dict[str, Any]
JSON_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
MAX_INTEGER = 2**63 - 1
KINDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "a section {...}",
    "null": "null",
}


class SchemaCheck:
    """Walks one document; `problems` and `warnings` hold a line for each finding."""

    def __init__(self, document: Document, places: dict[str, KeyPath]) -> None:
        self.document = document
        self.places = places
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def check(self, value: Any, node: Node, path: KeyPath = ()) -> Any:
        """Collect what is wrong with `value`, and return it with integers and autos in their plain form."""
        kinds = [node["type"]] if isinstance(node.get("type"), str) else node.get("type", [])
        if isinstance(value, str) and value.lower() == "auto" and "x-auto" in node:
            return "auto"
        if not kinds:
            return value
        if "integer" in kinds and isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INTEGER:
            value = int(value)
        if not any(_is(kind, value) for kind in kinds):
            self._add(path, _wrong_kind(value, kinds, node))
            return value
        if isinstance(value, dict):
            return self._section(value, node, path) if "properties" in node else value
        if isinstance(value, list):
            return self._list(value, node, path)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if "enum" in node and not (number and _only_names(node["enum"])):
            return self._choice(value, node["enum"], path)
        if isinstance(value, str) and "pattern" in node and not re.search(node["pattern"], value):
            self._add(path, f"{shown(value)} does not match {node['pattern']}.")
        if number:
            for text in _out_of_range(value, node):
                self._add(path, text)
        return value

    def _section(self, value: dict[str, Any], node: Node, path: KeyPath) -> dict[str, Any]:
        properties, removed = node["properties"], node.get("x-removed", {})
        checked = {}
        for key, below in value.items():
            below_path = (*path, key)
            if key in removed:
                self._add(below_path, removed[key])
            elif key not in properties:
                self._add(below_path, self._unknown(key, properties, path))
            else:
                if properties[key].get("deprecated"):
                    use = properties[key]["x-use"]
                    self.warnings.append(self.document.problem(below_path, f"is an old name; write {use}."))
                    if use in value:
                        self._add(below_path, f"is an old name of {use}, which is written too. Remove {key}.")
                checked[key] = self.check(below, properties[key], below_path)
        for key in node.get("required", ()):
            if key not in value:
                self._add(path, f"the key {key} is missing.")
        return checked

    def _list(self, value: list[Any], node: Node, path: KeyPath) -> list[Any]:
        low, high = node.get("minItems", 0), node.get("maxItems", len(value))
        if not low <= len(value) <= high:
            self._add(path, f"must hold {low} values, got {len(value)}.")
        return [self.check(item, node.get("items", {}), (*path, index)) for index, item in enumerate(value)]

    def _choice(self, value: Any, choices: list[Any], path: KeyPath) -> Any:
        for choice in choices:
            same_text = isinstance(value, str) and isinstance(choice, str) and value.lower() == choice.lower()
            if same_text or (value == choice and isinstance(value, bool) == isinstance(choice, bool)):
                return value
        allowed = ", ".join(shown(choice) for choice in choices if choice is not None)
        near = (
            nearest(value, [choice for choice in choices if isinstance(choice, str)])
            if isinstance(value, str)
            else None
        )
        hint = f" Did you mean {shown(near)}?" if near else ""
        self._add(path, f"must be one of {allowed}; got {shown(value)}.{hint}")
        return value

    def _unknown(self, key: str, properties: Node, path: KeyPath) -> str:
        usual = [name for name, node in properties.items() if not node.get("deprecated")]
        if key.startswith(("_", "//", "#", "comment")):
            return "unknown key. A comment is written with // in an engine JSON and with # in a run YAML."
        place = self.places.get(key)
        near = nearest(key, usual)
        if place is not None and place[:-1] != path:
            return f"unknown key here; it belongs under {'.'.join(map(str, place[:-1]))}."
        if near:
            return f"unknown key. Did you mean {near}?"
        if len(usual) <= 12:
            return f"unknown key. Known here: {', '.join(usual)}."
        return "unknown key. `largetrain config --reference` lists all keys."

    def _add(self, path: KeyPath, text: str) -> None:
        self.problems.append(self.document.problem(path, text))


def _is(kind: str, value: Any) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    types = {"boolean": bool, "string": str, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, types[kind])


def _wrong_kind(value: Any, kinds: list[str], node: Node) -> str:
    wanted = " or ".join(KINDS[kind] for kind in kinds if kind != "null" or len(kinds) == 1)
    start = f"expected {wanted}, got {shown(value)}"
    if isinstance(value, str):
        return f"{start} (text). {_text_way_out(value, kinds)}".rstrip()
    if isinstance(value, float) and "integer" in kinds:
        return f"{start}. Write {round(value)}."
    if isinstance(value, bool) and "object" in kinds and "stage" in node.get("properties", {}):
        return f'{start}. Write {{"stage": 1}} (or 0, 2, 3).'
    if "string" in kinds and isinstance(value, bool | int | float):
        return f"{start}. Put it in quotes."
    if "boolean" in kinds and value in (0, 1):
        return f"{start}. Write {'true' if value else 'false'}."
    return f"{start}."


def _text_way_out(value: str, kinds: list[str]) -> str:
    if value.lower() == "auto":
        return '"auto" is not understood for this key; write the value.'
    if "boolean" in kinds and value.lower() in ("true", "false"):
        return f"Write {value.lower()} without quotes."
    if "integer" in kinds or "number" in kinds:
        try:
            number = float(value)
        except ValueError:
            return ""
        plain = str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
        written = value.strip() if JSON_NUMBER.fullmatch(value.strip()) else plain
        return f"Write {written} without quotes." if abs(number) < float("inf") else ""
    return ""


def _only_names(choices: list[Any]) -> bool:
    """A number beside these choices is another kind of value, with a range of its own."""
    return all(isinstance(choice, str | None) for choice in choices)


def _out_of_range(value: Any, node: Node) -> Iterator[str]:
    if "minimum" in node and value < node["minimum"]:
        yield f"must be at least {shown(node['minimum'])}, got {shown(value)}."
    if "exclusiveMinimum" in node and value <= node["exclusiveMinimum"]:
        yield f"must be greater than {shown(node['exclusiveMinimum'])}, got {shown(value)}."
    largest = node.get("maximum", MAX_INTEGER if isinstance(value, int) else None)
    if largest is not None and value > largest:
        yield f"must be at most {shown(largest)}, got {shown(value)}."
    if "exclusiveMaximum" in node and value >= node["exclusiveMaximum"]:
        yield f"must be less than {shown(node['exclusiveMaximum'])}, got {shown(value)}."
