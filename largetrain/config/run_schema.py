"""The run YAML's schema as a JSON schema, derived from `schema.RunConfig`, and the check of a run document by it."""

import functools
from typing import Any

from pydantic import ValidationError

from largetrain.config.document import Document, KeyPath
from largetrain.config.engine_schema import engine_keys, key_places
from largetrain.config.schema import RunConfig
from largetrain.config.schema_check import SchemaCheck

Node = dict[str, Any]


@functools.cache
def run_schema() -> Node:
    """The JSON schema of the run YAML: references resolved, unions of types joined into one node."""
    raw = RunConfig.model_json_schema()
    return _flat(raw, raw.get("$defs", {}))


@functools.cache
def run_places() -> dict[str, KeyPath]:
    """Each key name -> where it stands in the run YAML; names that stand in several sections are left out."""
    found: dict[str, list[KeyPath]] = {}
    for key, node in run_schema()["properties"].items():
        found.setdefault(key, []).append((key,))
        for below in node.get("properties", {}):
            found.setdefault(below, []).append((key, below))
    return {key: paths[0] for key, paths in found.items() if len(paths) == 1 and len(paths[0]) > 1}


def check_run(document: Document) -> tuple[RunConfig | None, list[str]]:
    """Check a run document and build the frozen config; None with a list of problems when it is wrong."""
    check = _RunCheck(document, run_places())
    data = check.check(document.data, run_schema())
    problems = check.problems + _rules(document)
    if problems:
        return None, problems
    try:
        return RunConfig.model_validate(data), []
    except ValidationError as error:  # a rule of pydantic that the schema does not carry
        return None, [
            document.problem(tuple(part for part in item["loc"] if part != "auto"), f"{item['msg']}.")
            for item in error.errors(include_url=False)
        ]


class _RunCheck(SchemaCheck):
    """A key of the other file is named as such."""

    def _unknown(self, key: str, properties: Node, path: KeyPath) -> str:
        if key in engine_keys() and not path:
            return "is a key of the engine JSON; write it in the file of --ds_config."
        if key in key_places() and key not in self.places:
            place = ".".join(map(str, key_places()[key]))
            return f"is a key of the engine JSON ({place}); write it in the file of --ds_config."
        return super()._unknown(key, properties, path)


def _rules(document: Document) -> list[str]:
    problems = []
    if document.get(("steps",)) is not None and document.get(("epochs",)) is not None:
        problems.append(document.problem(("epochs",), "is given beside steps; keep one."))
    for section in ("model", "data"):
        if document.get((section, "args")) and document.get((section, "target")) is None:
            problems.append(document.problem((section, "args"), f"has no effect without {section}.target."))
    return problems


def _flat(node: Node, definitions: Node) -> Node:
    """One node without `$ref` and `anyOf`; a const "auto" becomes `x-auto`."""
    if "$ref" in node:
        below = {key: value for key, value in node.items() if key != "$ref"}
        return _flat(definitions[node["$ref"].rsplit("/", 1)[1]] | below, definitions)
    flat = {key: value for key, value in node.items() if key not in ("anyOf", "$defs", "title", "properties", "items")}
    kinds: list[str] = []
    for option in node.get("anyOf", ()):
        option = _flat(option, definitions)
        if option.get("const") == "auto":
            flat["x-auto"] = "run"
            continue
        kinds.append(option["type"])
        flat |= {key: value for key, value in option.items() if key != "type"}
    if kinds:
        flat["type"] = kinds if len(kinds) > 1 else kinds[0]
        if "enum" in flat and "null" in kinds:
            flat["enum"] = [*flat["enum"], None]
    if "properties" in node:
        flat["properties"] = {key: _flat(below, definitions) for key, below in node["properties"].items()}
    if "items" in node:
        flat["items"] = _flat(node["items"], definitions)
    return flat
