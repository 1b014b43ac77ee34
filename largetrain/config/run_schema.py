"""The run YAML's schema as a JSON schema, one for each task, and the check of a run document by it."""

import functools
from typing import Any

from pydantic import ValidationError

from largetrain.config.document import Document, KeyPath, nearest
from largetrain.config.engine_schema import engine_keys, key_places
from largetrain.config.schema import LanguageRun, RunConfig
from largetrain.config.schema_check import SchemaCheck
from largetrain.config.vision_schema import ClassificationRun, SegmentationRun

Node = dict[str, Any]
DEFAULT_TASK = "language_modeling"
RUNS: dict[str, type[RunConfig]] = {
    DEFAULT_TASK: LanguageRun,
    "classification": ClassificationRun,
    "segmentation": SegmentationRun,
}


@functools.cache
def run_schema(task: str = DEFAULT_TASK) -> Node:
    """The JSON schema of a task's run YAML: references resolved, unions of types joined into one node."""
    raw = RUNS[task].model_json_schema()
    schema = _flat(raw, raw.get("$defs", {}))
    schema["properties"]["task"] = {
        "type": "string",
        "enum": list(RUNS),
        "default": DEFAULT_TASK,
        "description": schema["properties"]["task"]["description"],
    }
    return schema


def run_keys() -> list[str]:
    """Every key that stands at the top of some task's run YAML."""
    return list(dict.fromkeys(key for task in RUNS for key in run_schema(task)["properties"]))


@functools.cache
def run_places(task: str = DEFAULT_TASK) -> dict[str, KeyPath]:
    """Each key name -> where it stands in the run YAML; names that stand in several sections are left out."""
    found: dict[str, list[KeyPath]] = {}
    for key, node in run_schema(task)["properties"].items():
        found.setdefault(key, []).append((key,))
        for below in node.get("properties", {}):
            found.setdefault(below, []).append((key, below))
    return {key: paths[0] for key, paths in found.items() if len(paths) == 1 and len(paths[0]) > 1}


def task_of(document: Document) -> str:
    """The task that a run document names; the default when it names none that there is."""
    task = document.get(("task",), DEFAULT_TASK)
    return task if isinstance(task, str) and task in RUNS else DEFAULT_TASK


def check_run(document: Document) -> tuple[RunConfig | None, list[str]]:
    """Check a run document and build the frozen config; None with a list of problems when it is wrong."""
    task = task_of(document)
    if document.get(("task",), task) != task:  # which keys there may be is not known: only this is said
        check = _RunCheck(document, {})
        check.check(document.get(("task",)), run_schema()["properties"]["task"], ("task",))
        return None, check.problems
    check = _RunCheck(document, run_places(task))
    data = check.check(document.data, run_schema(task))
    problems = check.problems + _rules(document)
    if problems:
        return None, problems
    try:
        return RUNS[task].model_validate(data), []
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
        here = task_of(self.document)
        others = [task for task in RUNS if task != here and _holds(run_schema(task), (*path, key))]
        if others and nearest(key, properties) is None:
            return f"is a key of task {' and '.join(others)}; the task of this run is {here}."
        return super()._unknown(key, properties, path)


def _holds(schema: Node, path: KeyPath) -> bool:
    for part in path:
        schema = schema.get("properties", {}).get(part)
        if schema is None:
            return False
    return True


def _rules(document: Document) -> list[str]:
    problems = []
    if document.get(("steps",)) is not None and document.get(("epochs",)) is not None:
        problems.append(document.problem(("epochs",), "is given beside steps; keep one."))
    for section in ("evaluation", "checkpoints"):
        if document.get((section, "every_steps")) and document.get((section, "every_epochs")) is not None:
            problems.append(document.problem((section, "every_epochs"), "is given beside every_steps; keep one."))
    for section in ("model", "data"):
        named = section == "model" and task_of(document) != DEFAULT_TASK  # torchvision's builders take arguments too
        if document.get((section, "args")) and document.get((section, "target")) is None and not named:
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
        if "enum" in flat and "boolean" in kinds:  # YAML reads on and off as these
            flat["enum"] = [*flat["enum"], True, False]
    if "properties" in node:
        flat["properties"] = {key: _flat(below, definitions) for key, below in node["properties"].items()}
    if "items" in node:
        flat["items"] = _flat(node["items"], definitions)
    return flat
