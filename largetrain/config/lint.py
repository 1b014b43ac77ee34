"""Lints an engine JSON: everything that can be known without a run, for any tool's DeepSpeed config.

The schema settles keys, types and ranges; this file adds what needs more than one key.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from largetrain.config.batch import ACCUMULATION, MICRO, TOTAL
from largetrain.config.document import Document, KeyPath, nearest, shown
from largetrain.config.engine_schema import engine_schema, key_places, optimizer_name
from largetrain.config.engine_tables import OLDER_OPTIMIZERS
from largetrain.config.schema_check import SchemaCheck

Finding = tuple[KeyPath, str]
ZERO = "zero_optimization"


@dataclass(frozen=True)
class LintResult:
    """What a lint found: `problems` refuse the file, `warnings` do not; `data` has integers and autos normalised."""

    data: dict[str, Any]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def lint_engine(document: Document, *, for_a_run: bool = False) -> LintResult:
    """Check one engine JSON; "auto" is allowed where DeepSpeed's integrations resolve it.

    Args:
        document: the parsed file.
        for_a_run: the number of ranks is known, so the batch triple is left to `resolve_batch`, which says more; and
            what a run adds by itself (`autos`, `served`) is not missed.
    """
    check = SchemaCheck(document, key_places())
    data = check.check(document.data, engine_schema())
    checked = Document(document.file, data, document.origins)
    data = _typed_section(check, checked, "optimizer", _optimizer_node)
    data = _typed_section(check, checked, "scheduler", _scheduler_node)
    rules = RULES if for_a_run else (*RULES, _batch)
    found = [checked.problem(path, text) for rule in rules for path, text in rule(checked)]
    warnings = [*check.warnings]
    if not for_a_run:
        warnings += [checked.problem(path, text) for path, text in _missing(checked)]
    return LintResult(data, tuple(dict.fromkeys(check.problems + found)), tuple(dict.fromkeys(warnings)))


def _typed_section(check: SchemaCheck, document: Document, section: str, node_of: Any) -> dict[str, Any]:
    """Check `params` of the optimizer or scheduler against the class that its `type` names."""
    kind, params = document.get((section, "type")), document.get((section, "params"), {})
    if isinstance(kind, str) and isinstance(params, dict):
        node, problem = node_of(document, kind)
        if problem:
            check.problems.append(document.problem((section, "type"), problem))
        elif node.get("properties"):
            checked = check.check(params, {**node, "required": []}, (section, "params"))
            missing = [key for key in node.get("required", ()) if key not in params]
            for key in missing:
                text = f"{kind} needs {key}; write a value" + (
                    ' or "auto".' if "x-auto" in node["properties"][key] else "."
                )
                check.problems.append(document.problem((section, "params"), text))
            if "params" in document.data[section]:
                document.data[section] = {**document.data[section], "params": checked}
    return document.data


def _optimizer_node(document: Document, kind: str) -> tuple[dict[str, Any], str | None]:
    known = engine_schema()["x-optimizers"]
    if kind.lower() in OLDER_OPTIMIZERS:
        return {}, OLDER_OPTIMIZERS[kind.lower()]
    name = optimizer_name(kind)
    if name is None:
        near = nearest(kind, known)
        hint = f" Did you mean {near}?" if near else f" Known: {', '.join(known)}."
        return {}, f"unknown optimizer {shown(kind)}.{hint}"
    return _classes(document, known[name]), None


def _classes(document: Document, entry: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the class that the engine will build: offload asks for the CPU class, torch_adam for torch's."""
    classes: dict[str, dict[str, Any]] = entry["classes"]
    if document.get(("optimizer", "params", "torch_adam")) is True and "torch" in classes:
        return _pointing_to_clipping(classes["torch"])
    if offload_device(document, "offload_optimizer") != "none" and "cpu" in classes:
        return _pointing_to_clipping(classes["cpu"])
    return _pointing_to_clipping(classes["default"])


def _pointing_to_clipping(node: dict[str, Any]) -> dict[str, Any]:
    clipping = "is refused by DeepSpeed as an optimizer parameter; write gradient_clipping at the top level."
    return {**node, "x-removed": {"max_grad_norm": clipping}}


def _scheduler_node(document: Document, kind: str) -> tuple[dict[str, Any], str | None]:
    known = engine_schema()["x-schedulers"]
    if kind in known:
        return known[kind], None
    near = nearest(kind, known)
    hint = f" Did you mean {near}?" if near else ""
    return {}, f"unknown scheduler {shown(kind)}; known: {', '.join(known)}.{hint}"


def stage_of(document: Document) -> int | None:
    """The ZeRO stage, 0 when absent; None when it is no number (which is reported as such)."""
    if not isinstance(document.get((ZERO,), {}), dict):
        return None
    stage = document.get((ZERO, "stage"), 0)
    if stage == "auto":
        return 0
    return stage if isinstance(stage, int) and not isinstance(stage, bool) else None


def offload_device(document: Document, key: str) -> str:
    """Where `offload_param` or `offload_optimizer` puts things: none, cpu or nvme."""
    section = document.get((ZERO, key))
    if isinstance(section, dict):
        return str(section.get("device", "none")).lower()
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[key]
    return "cpu" if document.get((ZERO, old)) is True else "none"


def _precision(document: Document) -> Iterator[Finding]:
    on = [key for key in ("fp16", "bf16", "bfloat16") if document.get((key, "enabled")) is True]
    if "fp16" in on and len(on) > 1:
        yield (on[1], "enabled"), "fp16 and bf16 are both enabled; keep one."
    if document.get(("torch_autocast", "enabled")) is True and on:
        yield ("torch_autocast", "enabled"), f"autocast and {on[0]} are both enabled; keep one."
    if "bf16" in document.data and "bfloat16" in document.data:
        yield ("bfloat16",), "is the old name of bf16, which is written too; remove it."
    bf16 = "bfloat16" if "bfloat16" in document.data else "bf16"
    states, master = (bf16, "bf16_optimizer_states"), (bf16, "bf16_master_weights_and_grads")
    for path in (("fp16", "fp16_master_weights_and_grads"), master, states):
        if document.get(path) is True and stage_of(document) == 0:
            yield path, "needs ZeRO stage 1, 2 or 3; the stage here is 0."
    if document.get(states) is True and document.get(master) is not True:
        yield states, "needs bf16_master_weights_and_grads: true."


def _batch(document: Document) -> Iterator[Finding]:
    total, micro, accumulation = (document.get((key,)) for key in (TOTAL, MICRO, ACCUMULATION))
    factors = {key: value for key, value in ((MICRO, micro), (ACCUMULATION, accumulation)) if isinstance(value, int)}
    unit = math.prod(factors.values())
    if isinstance(total, int) and unit > 0 and total % unit:
        product = " x ".join(f"{value} ({key})" for key, value in factors.items())
        yield (TOTAL,), f"{total} is no multiple of {product}, so no number of ranks fits."


def _zero(document: Document) -> Iterator[Finding]:
    stage = stage_of(document)
    if stage is None:
        return
    if offload_device(document, "offload_param") != "none" and stage != 3:
        yield (ZERO, "offload_param"), f"needs ZeRO stage 3; the stage here is {stage}, where DeepSpeed ignores it."
    if offload_device(document, "offload_optimizer") != "none" and stage == 0:
        yield (
            (ZERO, "offload_optimizer"),
            "needs ZeRO stage 1, 2 or 3; the stage here is 0, where DeepSpeed ignores it.",
        )
    for key in ("offload_param", "offload_optimizer"):
        if offload_device(document, key) == "nvme" and not document.get((ZERO, key, "nvme_path")):
            yield (ZERO, key, "nvme_path"), "is needed with device nvme: the folder on the NVMe disk."
    ratio = document.get((ZERO, "offload_optimizer", "ratio"), 1.0)
    if isinstance(ratio, int | float) and ratio < 1 and stage != 3:
        yield (ZERO, "offload_optimizer", "ratio"), f"below 1.0 needs ZeRO stage 3; the stage here is {stage}."
    if document.get((ZERO, "compute_grad_norm")) is False and stage not in (1, 2):
        yield (ZERO, "compute_grad_norm"), f"false needs ZeRO stage 1 or 2; the stage here is {stage}."
    if document.get(("gradient_allreduce_op",)) == "sum" and stage == 3:
        yield ("gradient_allreduce_op",), '"sum" is not supported with ZeRO stage 3; write "mean".'


def _optimizer(document: Document) -> Iterator[Finding]:
    name = optimizer_name(str(document.get(("optimizer", "type"), "")))
    if name is None:
        return
    if _untested(document, name) and document.get(("zero_allow_untested_optimizer",)) is False:
        yield ("zero_allow_untested_optimizer",), f"false refuses {name} with ZeRO; write true, or use AdamW."
    momentum, dampening = (document.get(("optimizer", "params", key), 0) for key in ("momentum", "dampening"))
    if (
        name == "SGD"
        and document.get(("optimizer", "params", "nesterov")) is True
        and (momentum == 0 or dampening != 0)
    ):
        yield ("optimizer", "params", "nesterov"), "needs a momentum above 0 and no dampening."
    amsgrad, torch_adam = (document.get(("optimizer", "params", key)) for key in ("amsgrad", "torch_adam"))
    if amsgrad is True and torch_adam is not True and name in ("Adam", "AdamW", "Lamb"):
        text = "is not supported by DeepSpeed's own Adam and Lamb; remove it (with Adam: or add torch_adam: true)."
        yield ("optimizer", "params", "amsgrad"), text


def _untested(document: Document, name: str) -> bool:
    return stage_of(document) in (1, 2, 3) and not engine_schema()["x-optimizers"][name]["zero"]


def _missing(document: Document) -> Iterator[Finding]:
    """What DeepSpeed misses when the program around it does not add it."""
    if "scheduler" in document.data and "optimizer" not in document.data:
        text = "needs an optimizer: without this section, or one from the program, DeepSpeed fails at the first step."
        yield ("scheduler",), text
    name = optimizer_name(str(document.get(("optimizer", "type"), "")))
    if name and _untested(document, name) and document.get(("zero_allow_untested_optimizer",)) is None:
        text = f'{name} with ZeRO needs "zero_allow_untested_optimizer": true at the top level (a run adds it).'
        yield ("optimizer", "type"), text


def _scheduler(document: Document) -> Iterator[Finding]:
    def number(key: str) -> float | None:
        value = document.get(("scheduler", "params", key))
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    for low, high in (
        ("warmup_num_steps", "total_num_steps"),
        ("warmup_min_lr", "warmup_max_lr"),
        ("cycle_min_lr", "cycle_max_lr"),
    ):
        small, large = number(low), number(high)
        if small is not None and large is not None and small > large:
            yield ("scheduler", "params", low), f"{shown(small)} is more than {high} = {shown(large)}."


RULES = (_precision, _zero, _optimizer, _scheduler)
