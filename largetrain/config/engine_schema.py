"""The stored schema of the engine JSON (generated from the installed DeepSpeed), and its lookup helpers."""

import functools
import json
from pathlib import Path
from typing import Any

from largetrain.config.document import KeyPath

PATH = Path(__file__).with_name("engine_schema.json")


@functools.cache
def engine_schema() -> dict[str, Any]:
    """The whole schema; treat it as read-only."""
    schema: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return schema


def engine_keys() -> frozenset[str]:
    """Top-level keys of the engine JSON, removed ones included: what `--set` routes to it."""
    schema = engine_schema()
    return frozenset(schema["properties"]) | frozenset(schema["x-removed"])


def optimizer_name(written: str) -> str | None:
    """The schema's name of an optimizer type: DeepSpeed's own in any case, torch's as spelt."""
    names = engine_schema()["x-optimizers"]
    if written in names:
        return written
    by_lower = {name.lower(): name for name in names if name in DEEPSPEED_OPTIMIZERS}
    return by_lower.get(written.lower())


DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")


@functools.cache
def key_places() -> dict[str, KeyPath]:
    """Each key name of a section -> where it stands, to point at a key written in the wrong section."""
    places: dict[str, KeyPath] = {}
    for section, node in engine_schema()["properties"].items():
        if node.get("deprecated"):
            continue
        for key in node.get("properties", {}):
            if key not in ("enabled", "type", "params"):
                places.setdefault(key, (section, key))
    for name in ("AdamW", "SGD"):
        for key in engine_schema()["x-optimizers"][name]["classes"]["default"]["properties"]:
            places.setdefault(key, ("optimizer", "params", key))
    for node in engine_schema()["x-schedulers"].values():
        for key in node["properties"]:
            places.setdefault(key, ("scheduler", "params", key))
    return places
