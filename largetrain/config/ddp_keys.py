"""Which keys of the engine JSON the `ddp` backend honours, and the words for the others."""

from collections.abc import Iterator
from typing import Any

from largetrain.config.document import Document, KeyPath, dotted
from largetrain.config.engine_schema import engine_schema, optimizer_name
from largetrain.config.honoured import REFUSED, is_default, schema_node
from largetrain.config.lint import stage_of

SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
HONOURED: frozenset[KeyPath] = frozenset(
    {
        *((key,) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")),
        ("gradient_clipping",),
        ("optimizer",),
        ("scheduler",),
        ("bf16", "enabled"),
        ("torch_autocast", "enabled"),
        ("torch_autocast", "dtype"),
        ("fp16", "enabled"),
        ("fp16", "min_loss_scale"),
        *(("fp16", key) for key in SCALE),
    }
)
# printing and process-wide switches without a meaning here; honest to pass over in silence
SILENT = frozenset({"steps_per_print", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "log_level"})
# optimizers of DeepSpeed that need its engine, or a package that changes the model
NEEDS_DEEPSPEED = ("Muon", "MuAdam", "MuAdamW", "MuSGD")


def ddp_problems(engine: Document) -> list[str]:
    """One line for each key that would train something else than it says."""
    problems = []
    for key, reason in REFUSED.items():
        path = tuple(key.split("."))
        value = engine.get(path)
        if path[0] != "zero_optimization" and value is not None and not is_default(value, schema_node(path)):
            problems.append(engine.problem(path, reason))
    name = optimizer_name(str(engine.get(("optimizer", "type"))))
    if name in NEEDS_DEEPSPEED:
        text = f"{name} needs backend: deepspeed; for backend ddp write SGD or AdamW."
        problems.append(engine.problem(("optimizer", "type"), text))
    return problems


def ddp_notes(engine: Document) -> list[str]:
    """What the JSON asks for and this backend does not do, said once."""
    notes = []
    stage = stage_of(engine) or 0
    zero = engine.get(("zero_optimization",), {})
    if stage > 0 or any(isinstance(zero.get(key), dict) for key in ("offload_optimizer", "offload_param")):
        offload = [key for key in ("offload_optimizer", "offload_param") if isinstance(zero.get(key), dict)]
        named = f"ZeRO stage {stage}" + (f" and {', '.join(offload)}" if offload else "")
        notes.append(
            f"backend ddp: {named} ({engine.origin(('zero_optimization',))}) has no effect, every rank holds the whole "
            f"model and optimizer"
        )
    idle = [dotted(path) for path in _idle(engine)]
    if idle:
        notes.append(f"backend ddp: without effect: {', '.join(idle)}")
    return notes


def _idle(engine: Document) -> Iterator[KeyPath]:
    for section, value in engine.data.items():
        node = engine_schema()["properties"].get(section, {})
        if section in SILENT or section == "zero_optimization" or (section,) in HONOURED or section in REFUSED:
            continue
        if not isinstance(value, dict):
            if not is_default(value, node):
                yield (section,)
            continue
        if value.get("enabled") is False or ("enabled" in node.get("properties", {}) and "enabled" not in value):
            continue
        below = node.get("properties", {})
        for key, held in value.items():
            path = (section, key)
            if path not in HONOURED and ".".join(path) not in REFUSED and not is_default(held, below.get(key, {})):
                yield path


def precision_of_ddp(engine: dict[str, Any]) -> str:
    """ "fp32", "bf16" or "fp16": the dtype that products are computed in; weights and statistics stay fp32."""
    if engine.get("fp16", {}).get("enabled"):
        return "fp16"
    if engine.get("bf16", {}).get("enabled"):
        return "bf16"
    autocast = engine.get("torch_autocast", {})
    if autocast.get("enabled"):
        return "fp16" if str(autocast.get("dtype")).lower() in ("fp16", "float16", "half") else "bf16"
    return "fp32"
