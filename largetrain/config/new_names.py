"""Old key names that DeepSpeed still reads, written as the new ones, so that the program knows one name for each."""

from typing import Any

from largetrain.config.document import Document, KeyPath, dotted, shown
from largetrain.config.engine_schema import engine_schema

ON_CPU = {"device": "cpu"}


def use_new_names(engine: Document) -> list[str]:
    """Rename in place; one note for each. A switch that became a section (`cpu_offload`) turns into that section."""
    return _rename(engine, engine.data, engine_schema(), ())


def _rename(engine: Document, value: dict[str, Any], node: dict[str, Any], path: KeyPath) -> list[str]:
    notes: list[str] = []
    properties = node.get("properties", {})
    for key in list(value):
        below_node = properties.get(key, {})
        new = below_node.get("x-use")
        if new:
            held = value.pop(key)
            if properties[new].get("properties") and not isinstance(held, dict):
                held = dict(ON_CPU) if held is True else None
            old_place = (*path, key)
            if held is not None:
                engine.set((*path, new), held, engine.origin(old_place))
            notes.append(f"{dotted((*path, new))} = {shown(held)} (written under its old name {key})")
            key, below_node = new, properties[new]
        if isinstance(value.get(key), dict):
            notes += _rename(engine, value[key], below_node, (*path, key))
    return notes
