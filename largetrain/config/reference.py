"""The reference of both files as text, and their JSON schemas for editors."""

import copy
from typing import Any

from largetrain.config.decoder_spec import PRESETS
from largetrain.config.document import shown
from largetrain.config.engine_schema import engine_schema
from largetrain.config.honoured import REFUSED
from largetrain.config.run_schema import DEFAULT_TASK, RUNS, run_schema

Node = dict[str, Any]
KIND_WORDS = {"boolean": "true/false", "integer": "integer", "number": "number", "string": "text", "array": "list"}


def reference() -> str:
    """Every key of both files: type, range, default, meaning, and whether a run takes it."""
    schema = engine_schema()
    lines = ["RUN YAML (--config FILE)", ""]
    lines += _section(run_schema(), ())
    lines += ["", f"Presets of model.preset: {', '.join(PRESETS)}."]
    for task in RUNS:
        if task != DEFAULT_TASK:
            sections = {key: run_schema(task)["properties"][key] for key in ("model", "data", "loss")}
            lines += ["", f"RUN YAML, with task: {task}", "", *_section({"properties": sections}, ())]
    versions = schema["x-versions"]
    lines += ["", "", f"ENGINE JSON (--ds_config FILE), of DeepSpeed {versions['deepspeed']}", ""]
    lines += _section(schema, ())
    lines += ["", "optimizer.type and the optimizer.params of each (torch's own optimizers below DeepSpeed's):", ""]
    for name, entry in schema["x-optimizers"].items():
        keys = dict.fromkeys(key for node in entry["classes"].values() for key in node.get("properties", {}))
        needs = f" (needs the package {entry['needs']})" if "needs" in entry else ""
        lines.append(f"  {name}{needs}: {', '.join(keys) or 'passed on unchecked'}")
    lines += ["", "scheduler.type and the scheduler.params of each:", ""]
    for name, node in schema["x-schedulers"].items():
        lines.append(f"  {name}: {', '.join(node['properties'])}")
    lines += ["", "Removed or renamed:", ""]
    lines += [f"  {key}: {why}" for key, why in _removed(schema, ())]
    return "\n".join(lines)


def json_schema(which: str) -> Node:
    """The JSON schema (draft 2020-12) of the `engine` JSON or the `run` YAML, without our own keywords."""
    if which == "run":
        schema = {"$schema": engine_schema()["$schema"], "title": "largetrain run configuration", "type": "object"}
        choices = [_of_task(task) for task in RUNS]
        return {**schema, "anyOf": choices}
    schema = copy.deepcopy(engine_schema())
    optimizer, scheduler = schema["properties"]["optimizer"], schema["properties"]["scheduler"]
    optimizer["properties"]["type"]["examples"] = list(schema["x-optimizers"])
    scheduler["properties"]["type"]["enum"] = list(schema["x-schedulers"])
    optimizer["allOf"] = [_when(name, _joined(entry)) for name, entry in schema["x-optimizers"].items()]
    scheduler["allOf"] = [_when(name, node) for name, node in schema["x-schedulers"].items()]
    return _plain(schema)


def _of_task(task: str) -> Node:
    schema = _plain(run_schema(task))
    schema["properties"]["task"] = {**schema["properties"]["task"], "enum": [task], "default": task}
    return schema if task == DEFAULT_TASK else {**schema, "required": ["task"]}


def _section(node: Node, path: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for key, below in node["properties"].items():
        if below.get("deprecated"):
            continue
        here = (*path, key)
        dotted = ".".join(here)
        refused = " Refused in a run: " + REFUSED[dotted] if dotted in REFUSED else ""
        meaning = (below.get("description", "").strip() + refused).strip()
        lines.append(f"{'  ' * len(path)}{key}: {_kind(below)}")
        if meaning:
            lines.append(f"{'  ' * len(path)}    {' '.join(meaning.split())}")
        if "properties" in below:
            lines += _section(below, here)
    return lines


def _kind(node: Node) -> str:
    """Type, range and default of a key in a few words."""
    if "properties" in node:
        return "section"
    kinds = [node["type"]] if isinstance(node.get("type"), str) else node.get("type", [])
    words = [KIND_WORDS.get(kind, "section") for kind in kinds if kind != "null"]
    text = " or ".join(words) if words else "any"
    if "enum" in node:
        numbers = [KIND_WORDS[kind] for kind in kinds if kind in ("integer", "number")]
        text = " | ".join([*(shown(choice) for choice in node["enum"] if choice is not None), *numbers])
    for keyword, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<")):
        if keyword in node:
            text += f" {sign} {shown(node[keyword])}"
    if node.get("x-auto") == "run":
        text += ' or "auto"'
    if node.get("default") is not None:
        text += f", default {shown(node['default'])}"
    return text


def _removed(node: Node, path: tuple[str, ...]) -> list[tuple[str, str]]:
    found = [(".".join((*path, key)), why) for key, why in node.get("x-removed", {}).items()]
    for key, below in node.get("properties", {}).items():
        found += _removed(below, (*path, key))
    return found


def _joined(entry: Node) -> Node:
    """One node for all classes that a type may stand for."""
    joined: Node = {"type": "object", "properties": {}}
    for node in entry["classes"].values():
        joined["properties"] |= node.get("properties", {})
    return joined | ({"additionalProperties": False} if joined["properties"] else {})


def _when(name: str, params: Node) -> Node:
    condition = {"properties": {"type": {"enum": sorted({name, name.lower()})}}, "required": ["type"]}
    return {"if": condition, "then": {"properties": {"params": params}}}


def _plain(node: Any) -> Any:
    """A node without `x-...` keywords; where "auto" is read it is a choice."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _plain(below) for key, below in node.items() if not key.startswith("x-")}
    if "x-auto" not in node:
        return plain
    outer = {key: plain.pop(key) for key in ("default", "description", "deprecated") if key in plain}
    return {**outer, "anyOf": [plain, {"const": "auto"}]}
