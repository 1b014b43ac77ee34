"""Which keys of the engine JSON a run honours: every accepted key changes behaviour, or is refused with the reason.

A refused key that holds what happens anyway (DeepSpeed's default, `enabled: false`) is accepted: nothing is lost.
`largetrain check` does not use this list: a file may be right for another program.
"""

from typing import Any

from largetrain.config.document import Document, KeyPath
from largetrain.config.engine_schema import engine_schema

_OTHER_BACKEND = "needs a model cut for it, which the deepspeed backend does not build; remove it."
_OWN_DATA = "configures DeepSpeed's own data loading; the data come from the run config (data.*); remove it."
_OWN_CHECKPOINTS = "changes DeepSpeed's checkpoint files, which the checkpoints of a run rely on; remove it."

# Dotted key -> why the deepspeed backend refuses it. A section stands for all keys below it.
REFUSED: dict[str, str] = {
    "pipeline": _OTHER_BACKEND,
    "tensor_parallel": _OTHER_BACKEND,
    "expert_parallel": _OTHER_BACKEND,
    "use_data_before_expert_parallelism": "needs expert parallelism, which no model here has; remove it.",
    "sequence_parallel_size": "splits sequences over ranks, which the built-in data and models do not do; remove it.",
    "seq_parallel_communication_data_type": "needs sequence parallelism; remove it.",
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "activation_checkpointing": "configures deepspeed.checkpointing, which the built-in models do not call; "
    "write model.activation_checkpointing: true in the run config.",
    "hybrid_engine": "alternates training and generation (RLHF); a run only trains. Remove it.",
    "weight_quantization": "quantizes for inference; a run trains. Remove it.",
    "autotuning": "is read by DeepSpeed's launcher (--autotuning), not by a run; remove it.",
    "model_info": "is read by DeepSpeed's autotuner, not by a run; remove it.",
    "compile": "configures engine.compile(), which a run does not call; remove it.",
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "checkpoint.writer": _OWN_CHECKPOINTS,
    "checkpoint.checkpoint_serialization": _OWN_CHECKPOINTS,
    "checkpoint.load_universal": _OWN_CHECKPOINTS,
    "checkpoint.use_node_local_storage": _OWN_CHECKPOINTS,
    "checkpoint.parallel_write": _OWN_CHECKPOINTS,
    "disable_allgather": "is read by nothing in DeepSpeed; remove it.",
    "vocabulary_size": "only makes DeepSpeed print a hint; write model.vocab_size in the run config.",
    "managed_gradient_accumulation": "leaves the counting of micro-batches to the caller; the trainer counts by "
    "gradient_accumulation_steps. Remove it.",
    "optimizer.legacy_fusion": "is read for Apex's fused optimizer only; remove it.",
    "scheduler.params.last_batch_iteration": "would start the schedule elsewhere; use --resume. Remove it.",
    "gradient_allreduce_op": 'adds gradients up over ranks, but the loss is a mean over all tokens; write "mean".',
    "zero_optimization.legacy_stage1": "selects an implementation that DeepSpeed removed; remove it.",
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _OTHER_BACKEND,
}

NVME = "nothing is offloaded to nvme, so it has no effect; remove it."


def refused_keys(engine: Document) -> list[str]:
    """One line for each key that a run with the deepspeed backend would not honour."""
    problems = []
    for key, reason in REFUSED.items():
        path = tuple(key.split("."))
        value, node = engine.get(path), _node(path)
        if value is not None and not _is_default(value, node):
            problems.append(engine.problem(_first_changed(value, node, path), reason))
    devices = [engine.get(("zero_optimization", key, "device")) for key in ("offload_param", "offload_optimizer")]
    if "aio" in engine.data and "nvme" not in devices and not _is_default(engine.data["aio"], _node(("aio",))):
        problems.append(engine.problem(("aio",), NVME))
    return problems


def ineffective_keys(engine: Document) -> list[str]:
    """Notes on keys kept for portability that this stage does not use."""
    stage = engine.get(("zero_optimization", "stage"), 0)
    zero = engine.get(("zero_optimization",), {})
    unused = [key for key in zero if key.startswith("stage3_")] if stage != 3 else []
    return [f"zero_optimization.{key} has no effect at stage {stage}" for key in unused]


def _node(path: KeyPath) -> dict[str, Any]:
    node: dict[str, Any] = engine_schema()
    if path[:2] == ("scheduler", "params"):
        return {"default": -1}
    for part in path:
        node = node["properties"][part]
    return node


def _is_default(value: Any, node: dict[str, Any]) -> bool:
    if isinstance(value, dict):
        if value.get("enabled") is False:
            return True
        if "null" in node.get("type", ()):
            return False  # absent is the default: a section that is there switches something on
        properties = node.get("properties", {})
        return all(_is_default(below, properties.get(key, {})) for key, below in value.items())
    if isinstance(value, str) and isinstance(node.get("default"), str):
        return value.lower() == node["default"].lower()
    return "default" in node and value == node["default"]


def _first_changed(value: Any, node: dict[str, Any], path: KeyPath) -> KeyPath:
    """The key below a refused section that makes the difference; the section itself when it is switched on."""
    if not isinstance(value, dict) or "enabled" in value:
        return path
    properties = node.get("properties", {})
    changed = [key for key, below in value.items() if not _is_default(below, properties.get(key, {}))]
    return (*path, changed[0]) if len(changed) == 1 else path
