"""Every key of the engine JSON is honoured by the ddp backend, noted as idle, or refused: none is dropped silently."""

from typing import Any

import pytest

from largetrain.config.ddp_keys import HONOURED, SILENT, ddp_notes, ddp_problems, precision_of_ddp
from largetrain.config.document import Document
from largetrain.config.engine_schema import engine_schema
from largetrain.config.load import load
from largetrain.errors import ConfigError
from tests.unit.config.test_honoured import leaves

DDP = ["task=classification", "backend=ddp"]


def node_of(key: str) -> dict[str, Any]:
    node = engine_schema()
    for part in key.split("."):
        node = node["properties"][part]
    return node


def other_than_default(node: dict[str, Any]) -> Any:
    """Some value that asks for something else than what happens anyway."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    kinds = node.get("type", [])
    for value in [*node.get("enum", ()), True, False, 3, 0.3, "other", {"some": 1}, [1]]:
        if names.get(type(value)) in ([kinds] if isinstance(kinds, str) else kinds) and value != node.get("default"):
            return value
    return "other"  # the schema does not say what it may hold


def document(key: str) -> Document:
    """An engine JSON with this key set, and the sections around it switched on; at ZeRO stage 2."""
    data: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    held, path = data, ""
    *sections, last = key.split(".")
    for section in sections:
        path = f"{path}.{section}".lstrip(".")
        held = held.setdefault(section, {})
        if "enabled" in node_of(path).get("properties", {}) and last != "enabled":
            held["enabled"] = True
    held[last] = other_than_default(node_of(key))
    return Document("engine.json", data)


def fates(key: str) -> list[str]:
    """What becomes of a key: of one the list has one entry."""
    doc, parts = document(key), tuple(key.split("."))
    found = ["refused"] if any(f": {parts[0]}" in problem for problem in ddp_problems(doc)) else []
    zero, *idle = ddp_notes(doc)
    assert zero.startswith("backend ddp: ZeRO stage ")
    named = idle[0].partition("without effect: ")[2].split(", ") if idle else []
    assert len(idle) <= 1  # said once
    here = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    if here & set(named) and not found:
        found.append("noted")
    if parts[0] == "zero_optimization":
        found = ["noted"]  # by the line on ZeRO
    if found != ["refused"] and any(parts[:length] in HONOURED for length in range(1, len(parts) + 1)):
        found.append("honoured")
    if parts[0] in SILENT:
        found.append("silent")
    return found


def test_every_key_of_the_schema_has_one_fate():
    """A new DeepSpeed brings new keys: each has to be looked at."""
    wrong = {key: found for key in leaves(engine_schema()) if len(found := fates(key)) != 1}
    assert wrong == {}


def test_what_is_honoured_is_there():
    known = {tuple(key.split(".")) for key in leaves(engine_schema())}
    for path in HONOURED:
        assert any(key[: len(path)] == path for key in known), path


@pytest.mark.parametrize(
    "written",
    [
        "pipeline.stages=2",
        "activation_checkpointing.partition_activations=true",
        "gradient_allreduce_op=sum",
        "data_efficiency.enabled=true",
        "compile.deepcompile=true",
        "bf16={enabled: true, check_grad_overflow: false}",
        "scheduler.params.last_batch_iteration=5",
    ],
)
def test_keys_that_would_train_otherwise_are_refused(written):
    with pytest.raises(ConfigError) as caught:
        load(None, None, [*DDP, written])
    assert caught.value.problems[0].startswith(f"--set {written}: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["Muon", "MuAdam", "MuAdamW", "MuSGD"])
def test_optimizers_of_deepspeeds_engine_are_refused(name):
    with pytest.raises(ConfigError, match=f"optimizer.type: {name} needs backend: deepspeed.*write SGD or AdamW"):
        load(None, None, [*DDP, f"optimizer={{type: {name}, params: {{lr: 0.1}}}}"])


def notes(*sets: str) -> list[str]:
    return [note for note in load(None, None, [*DDP, *sets]).notes if note.startswith("backend ddp: ")]


def test_zero_and_offload_are_said_once():
    (plain,) = notes()
    assert "ZeRO stage 2 (built-in engine config" in plain and "has no effect" in plain
    offload = "zero_optimization={stage: 3, offload_optimizer: {device: cpu}, offload_param: {device: cpu}}"
    (both,) = notes(offload)
    assert f"ZeRO stage 3 and offload_optimizer, offload_param (--set {offload}) has no effect" in both
    assert notes("zero_optimization={stage: 0}") == []


def test_idle_keys_are_said_in_one_line():
    sets = ["zero_optimization={stage: 0}", "comms_logger.enabled=true", "communication_data_type=fp16"]
    (line,) = notes(*sets, "bf16={enabled: true, immediate_grad_update: true}", "steps_per_print=5")
    assert line.startswith("backend ddp: without effect: ")
    assert set(line.partition("effect: ")[2].split(", ")) == {
        "comms_logger.enabled",
        "communication_data_type",
        "bf16.immediate_grad_update",
    }


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        ({}, "fp32"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "Half"}}, "fp16"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16"),
        ({"torch_autocast": {"enabled": True}}, "bf16"),
        ({"torch_autocast": {"enabled": False, "dtype": "fp16"}}, "fp32"),
    ],
)
def test_precision(engine, precision):
    assert precision_of_ddp(engine) == precision
