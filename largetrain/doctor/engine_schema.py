"""Derives the schema of the engine JSON from the installed DeepSpeed: `python -m largetrain.doctor.engine_schema`.

Written to `largetrain/config/engine_schema.json`, so that linting a config imports neither torch nor deepspeed.
Sources, in this order: DeepSpeed's pydantic models; the signatures of its optimizers, torch's, and its schedulers;
its own tables of removed keys; and `config/engine_tables.py` for what it reads key by key.
"""

import dataclasses
import enum
import inspect
import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from largetrain.config import engine_tables as tables
from largetrain.config.engine_meanings import MEANINGS
from largetrain.config.engine_schema import PATH
from largetrain.config.engine_tables import Node

SCALARS: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
# DeepSpeed's spelling in its guides -> the classes its engine may build, by the reason for choosing one.
OPTIMIZER_NAMES = {
    "Adam": {"default": "FusedAdam", "cpu": "DeepSpeedCPUAdam", "torch": "torch.optim.AdamW"},
    "AdamW": {"default": "FusedAdam", "cpu": "DeepSpeedCPUAdam", "torch": "torch.optim.AdamW"},
    "Adagrad": {"default": "torch.optim.Adagrad", "cpu": "DeepSpeedCPUAdagrad"},
    "Lamb": {"default": "FusedLamb"},
    "Lion": {"default": "FusedLion", "cpu": "DeepSpeedCPULion"},
    "Muon": {"default": "Muon"},
}
NEEDS_MUP = ("MuAdam", "MuAdamW", "MuSGD")


def build_schema() -> Node:
    """The whole schema, as it is stored; the same for the same DeepSpeed and torch."""
    import deepspeed
    import torch
    from deepspeed.runtime import config as ds

    zero = model_node(_import("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"))
    properties: dict[str, Node] = {**tables.TOP_LEVEL, **tables.SECTIONS, "zero_optimization": zero}
    for key, (module, name) in MODELS.items():
        properties[key] = model_node(_import(module, name))
    properties["bfloat16"] = {**properties["bf16"], "deprecated": True, "x-use": "bf16"}
    properties["timers"] = tables.section(throughput=properties.pop("timers"))
    properties["expert_parallel"] = _dataclass_node(_import("deepspeed.module_inject.auto_ep_config", "AutoEPConfig"))
    properties["optimizer"] = tables.section(
        type=tables.text(), params={"type": "object"}, legacy_fusion=tables.boolean(False)
    ) | {"required": ["type"]}
    properties["scheduler"] = tables.section(type=tables.text(), params={"type": "object"}) | {"required": ["type"]}
    for dotted_key, narrower in tables.NARROWER.items():
        _below(properties, dotted_key).update(narrower)
    removed = {key: _first_sentences(message) for key, message in ds._REMOVED_TOP_LEVEL_CONFIG_KEYS.items()}
    zero["x-removed"] = {key: _first_sentences(message) for key, message in ds._REMOVED_ZERO_CONFIG_KEYS.items()}
    for dotted_key, meaning in MEANINGS.items():
        _below(properties, dotted_key)["description"] = meaning
    for section, keys in tables.OLDER_BY_SECTION.items():
        properties[section].setdefault("x-removed", {}).update(keys)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed engine configuration",
        "x-versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__.split("+")[0]},
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
        "x-removed": {**removed, **tables.OLDER_TOP_LEVEL},
        "x-optimizers": _optimizers(),
        "x-schedulers": _schedulers(),
    }


def _below(properties: dict[str, Node], dotted_key: str) -> Node:
    """The node of a dotted key."""
    node: Node = {"properties": properties}
    for key in dotted_key.split("."):
        node = node["properties"][key]
    return node


MODELS = {
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "timers": ("deepspeed.utils.config", "DeepSpeedThroughputTimerConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
    "weight_quantization": ("deepspeed.inference.config", "WeightQuantConfig"),
}


def model_node(model: type[BaseModel]) -> Node:
    """The schema of a pydantic model: each field by its alias, and by its name where both are read."""
    properties: dict[str, Node] = {}
    for name, field in model.model_fields.items():
        if field.exclude or (isinstance(field.annotation, type) and _annotation_node(field.annotation) == {}):
            continue  # filled in by DeepSpeed, or a Python object that no JSON can hold (a dtype, a process group)
        node = _field_node(field)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if extra.get("deprecated"):
            new = str(extra.get("new_param", ""))
            alias = model.model_fields[new].alias if new in model.model_fields else None
            node |= {"deprecated": True, "x-use": alias or new}
        properties[field.alias or name] = node
        if field.alias:
            properties[name] = {**node, "deprecated": True, "x-use": field.alias}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _field_node(field: FieldInfo) -> Node:
    node = _annotation_node(field.annotation)
    for constraint in field.metadata:
        for attribute, keyword in (
            ("ge", "minimum"), ("gt", "exclusiveMinimum"), ("le", "maximum"), ("lt", "exclusiveMaximum"),
        ):  # fmt: skip
            if getattr(constraint, attribute, None) is not None:
                node[keyword] = getattr(constraint, attribute)
    default = _plain(field.default)
    has_default = not field.is_required() and field.default_factory is None and default is not ...
    if has_default and (default is None or "properties" not in node):
        node["default"] = default
    return node if node.get("type") == "object" else {**node, "x-auto": "default"}


def _annotation_node(annotation: Any) -> Node:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in SCALARS:
        return {"type": SCALARS[annotation]}
    if origin in (Union, types.UnionType):
        return _union_node(arguments)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if annotation is list or origin is list:
        return {"type": "array"} | ({"items": _annotation_node(arguments[0])} if arguments else {})
    if annotation is tuple or origin is tuple:
        return {"type": "array"}
    if annotation is dict or origin is dict:
        return {"type": "object"}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = [member.value for member in annotation]
        return {"type": "integer" if all(isinstance(value, int) for value in values) else "string", "enum": values}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return model_node(annotation)
    return {}


def _union_node(arguments: tuple[Any, ...]) -> Node:
    nodes = [_annotation_node(argument) for argument in arguments if argument is not type(None)]
    if any("type" not in node for node in nodes):
        return {}
    joined: Node = {}
    kinds: list[str] = []
    for node in nodes:
        kinds += [node["type"]] if isinstance(node["type"], str) else node["type"]
        joined |= {key: value for key, value in node.items() if key != "type"}
    if type(None) in arguments:
        kinds.append("null")
        if "enum" in joined:
            joined["enum"] = [*joined["enum"], None]
    return {"type": kinds if len(kinds) > 1 else kinds[0], **joined}


def _dataclass_node(kind: Any) -> Node:
    hints = typing.get_type_hints(kind)
    properties = {}
    for field in dataclasses.fields(kind):
        node = _annotation_node(hints[field.name])
        default = _plain(field.default)
        properties[field.name] = node | ({} if default is ... else {"default": default})
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _optimizers() -> dict[str, Node]:
    """Optimizer type -> {"classes": reason -> parameters of that class, "zero": whether ZeRO takes it unasked}."""
    import torch
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    found: dict[str, Node] = {}
    supported = {kind.__name__ for kind in ZERO_SUPPORTED_OPTIMIZERS} | {"Muon"}
    for name, classes in OPTIMIZER_NAMES.items():
        parameters = {reason: _optimizer_parameters(kind) for reason, kind in classes.items()}
        zero = {reason: kind.rsplit(".", 1)[-1] in supported for reason, kind in classes.items()}
        found[name] = {"classes": parameters, "zero": all(zero.values())}
    for name in NEEDS_MUP:
        found[name] = {"classes": {"default": {"type": "object"}}, "zero": False, "needs": "mup"}
    for name, kind in sorted(vars(torch.optim).items()):
        is_optimizer = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
        if is_optimizer and kind is not torch.optim.Optimizer and name not in found and name != "LBFGS":
            found[name] = {"classes": {"default": _signature_node(kind)}, "zero": name in supported}
    return found


def _optimizer_parameters(name: str) -> Node:
    from deepspeed.ops import adagrad, adam, lamb, lion
    from deepspeed.runtime.engine import DeepSpeedEngine

    if name == "Muon":
        keys = dict.fromkeys((*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"))
        properties = {key: tables.OPTIMIZER_PARAMETERS[key] for key in keys}
        return tables.section(**properties, **tables.ADAM_SWITCHES)
    if name.startswith("torch.optim."):
        import torch

        node = _signature_node(getattr(torch.optim, name.rsplit(".", 1)[1]))
    else:
        node = _signature_node(next(getattr(home, name) for home in (adam, adagrad, lamb, lion) if hasattr(home, name)))
    if "Adam" in name:
        node["properties"] = node["properties"] | tables.ADAM_SWITCHES
        if name == "DeepSpeedCPUAdam":
            del node["properties"]["adamw_mode"]  # the engine passes it, from adam_w_mode
    return node


def _schedulers() -> dict[str, Node]:
    from deepspeed.runtime import lr_schedules

    return {name: _signature_node(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}


def _signature_node(kind: Any) -> Node:
    """The keyword parameters of a class: types and ranges from the tables by name, else from the default."""
    known = {**tables.OPTIMIZER_PARAMETERS, **tables.SCHEDULER_PARAMETERS}
    properties: dict[str, Node] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name in (*tables.HIDDEN_PARAMETERS, "optimizer"):
            continue
        default = ... if parameter.default is inspect.Parameter.empty else _plain(parameter.default)
        parameter_node = known.get(name, {})
        if not parameter_node or (
            isinstance(default, list) and parameter_node["type"] != "array"
        ):  # Adafactor's eps is a pair
            parameter_node = _by_default(default)
        properties[name] = parameter_node | ({} if default is ... else {"default": default})
        if default is ...:
            required.append(name)
    node: Node = {"type": "object", "properties": properties, "additionalProperties": False}
    return node | ({"required": required} if required else {})


def _by_default(default: Any) -> Node:
    """The type that a default suggests; a switch whose default is None may also be left to the class."""
    if isinstance(default, list):
        items = {"type": ["number", "null"]}
        return {"type": "array", "items": items, "minItems": len(default), "maxItems": len(default)}
    for kind, name in ((bool, "boolean"), (int, "number"), (float, "number")):
        if isinstance(default, kind):
            return {"type": name}
    return {"type": ["boolean", "null"]} if default is None else {}


def _plain(default: Any) -> Any:
    """A default as JSON has it; `...` when it has no JSON form."""
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, tuple):
        default = list(default)
    if isinstance(default, int) and not isinstance(default, bool):
        return int(default)
    return default if isinstance(default, str | float | bool | list | type(None)) else ...


def _first_sentences(message: str) -> str:
    """DeepSpeed's reason without the reference to its tracker."""
    return message.split(" See https://")[0].strip().rstrip(".") + "."


def _import(module: str, name: str) -> Any:
    return getattr(__import__(module, fromlist=[name]), name)


def render(schema: Node) -> str:
    """The text that is stored."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the schema of the installed DeepSpeed over the stored one."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    PATH.write_text(render(build_schema()), encoding="utf-8")
    print(f"wrote {PATH.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
