"""Which keys of the engine JSON a run honours: every accepted key changes behaviour, is noted as idle, or is refused.

A refused or idle key that holds what happens anyway (DeepSpeed's default, `enabled: false`) is accepted silently.
`largetrain check` does not use these lists: a file may be right for another program.
"""

from collections.abc import Iterator
from typing import Any

from largetrain.config.document import Document, KeyPath, dotted
from largetrain.config.engine_schema import engine_schema
from largetrain.config.lint import offload_device, stage_of
from largetrain.config.served import NEVER

_OTHER_BACKEND = "needs a model cut for it, which the deepspeed backend does not build; remove it."
_OWN_DATA = "configures DeepSpeed's own data loading; the data come from the run config (data.*); remove it."
_OWN_CHECKPOINTS = "changes DeepSpeed's checkpoint files, which the checkpoints of a run rely on; remove it."
_UNTRIED = "needs CUDA kernels with which no run of this program has been checked yet; remove it."
_VERBOSE = "it only prints, and only with --verbose"

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
    "zero_optimization.compute_grad_norm": "false takes away the gradient norm, the only thing that tells a non-finite "
    "update from a good one; remove it.",
    "bf16.check_grad_overflow": "false lets non-finite gradients into the weights, unseen by the guard; remove it.",
    "zero_optimization.zenflow": "does not train rightly with DeepSpeed 0.19: stages 2 and 3 stop with a traceback, "
    "stage 1 hardly learns; remove it.",
    "zero_optimization.offload_optimizer.super_offload": _UNTRIED,
    "zero_optimization.zero_quantized_weights": _UNTRIED,
    "zero_optimization.zero_quantized_nontrainable_weights": _UNTRIED,
    "zero_optimization.zero_quantized_gradients": _UNTRIED,
}

# Dotted key -> why it changes nothing in a run: noted, not refused, because files for several programs hold it.
IDLE: dict[str, str] = {
    "comms_logger": "a run does not ask DeepSpeed for the summary",
    "dump_state": _VERBOSE,
    "steps_per_print": _VERBOSE,
    "timers": _VERBOSE,
    "wall_clock_breakdown": _VERBOSE,
    "memory_breakdown": _VERBOSE,
    "zero_force_ds_cpu_optimizer": "it concerns optimizers that a program makes itself",
    "zero_optimization.allgather_partitions": "DeepSpeed no longer reads it",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "a run writes checkpoints by save_checkpoint()",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "it belongs to super_offload",
}
# Keys of zero_optimization, beside those that begin with stage3_, that only some stages read.
STAGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "load_from_fp32_weights"),
        (1, 2, 3),
    ),
    **dict.fromkeys(
        ("allgather_bucket_size", "ignore_unused_parameters", "parameter_alignment", "use_multi_rank_bucket_allreduce"),
        (1, 2),
    ),
    "round_robin_gradients": (2,),
    **dict.fromkeys(
        ("enable_sanity_checks", "leaf_module", "log_trace_cache_warnings", "memory_efficient_linear"), (3,)
    ),
    **dict.fromkeys(
        ("override_module_apply", "save_muon_momentum_buffer_in_memory", "sub_group_size", "zero_hpz_partition_size"),
        (3,),
    ),
}
SCALE_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")

NVME = "nothing is offloaded to nvme, so it has no effect; remove it."


def refused_keys(engine: Document) -> list[str]:
    """One line for each key that a run with the deepspeed backend would not honour."""
    problems = []
    for key, reason in REFUSED.items():
        path = tuple(key.split("."))
        value, node = engine.get(path), schema_node(path)
        if value is not None and not is_default(value, node):
            problems.append(engine.problem(_first_changed(value, node, path), reason))
    devices = [engine.get(("zero_optimization", key, "device")) for key in ("offload_param", "offload_optimizer")]
    if "aio" in engine.data and "nvme" not in devices and not is_default(engine.data["aio"], schema_node(("aio",))):
        problems.append(engine.problem(("aio",), NVME))
    return problems


def ineffective_keys(engine: Document) -> list[str]:
    """Notes on keys that are kept for portability and change nothing in this run."""
    return [f"{dotted(path)} has no effect: {why}" for path, why in _idle(engine)]


def _idle(engine: Document) -> Iterator[tuple[KeyPath, str]]:
    """Each key given that changes nothing, and why."""
    for key, why in IDLE.items():
        path = tuple(key.split("."))
        value = engine.get(path)
        if value not in (None, NEVER) and not is_default(value, schema_node(path)):
            yield path, why
    for section, held in engine.data.items():
        has_switch = "enabled" in schema_node((section,)).get("properties", {}) and section not in REFUSED
        if has_switch and isinstance(held, dict) and held and "enabled" not in held:
            yield (section,), 'it is not switched on ("enabled": true)'
    zero, stage = engine.get(("zero_optimization",), {}), stage_of(engine)
    for key in zero:
        stages = (3,) if key.startswith("stage3_") else STAGES.get(key, (stage,))
        if stage not in stages and f"zero_optimization.{key}" not in IDLE:
            yield ("zero_optimization", key), f"the stage is {stage}"
    if engine.get(("fp16", "loss_scale"), 0) != 0:
        for key in SCALE_KEYS:
            if key in engine.data["fp16"]:
                yield ("fp16", key), "it belongs to the dynamic loss scale, and fp16.loss_scale is fixed"
    dtypes = engine.get(("bf16", "enabled")), engine.get(("data_types", "grad_accum_dtype"))
    one_part = dtypes == (True, "fp32") and stage == 1 and offload_device(engine, "offload_optimizer") == "none"
    if engine.get(("bf16", "immediate_grad_update")) is True and not one_part:
        yield ("bf16", "immediate_grad_update"), 'it is read at stage 1 with data_types.grad_accum_dtype "fp32" only'


def schema_node(path: KeyPath) -> dict[str, Any]:
    """The schema of one key of the engine JSON."""
    node: dict[str, Any] = engine_schema()
    if path[:2] == ("scheduler", "params"):
        return {"default": -1}
    for part in path:
        node = node["properties"][part]
    return node


def is_default(value: Any, node: dict[str, Any]) -> bool:
    """Whether a key that holds `value` asks for nothing but what happens anyway."""
    if isinstance(value, dict):
        if value.get("enabled") is False and node.get("properties", {}).get("enabled", {}).get("default") is not True:
            return True
        if "null" in node.get("type", ()):
            return False  # absent is the default: a section that is there switches something on
        properties = node.get("properties", {})
        return all(is_default(below, properties.get(key, {})) for key, below in value.items())
    if isinstance(value, str) and isinstance(node.get("default"), str):
        return value.lower() == node["default"].lower()
    return "default" in node and value == node["default"]


def _first_changed(value: Any, node: dict[str, Any], path: KeyPath) -> KeyPath:
    """The key below a refused section that makes the difference; the section itself when it is switched on."""
    if not isinstance(value, dict) or "enabled" in value:
        return path
    properties = node.get("properties", {})
    changed = [key for key, below in value.items() if not is_default(below, properties.get(key, {}))]
    return (*path, changed[0]) if len(changed) == 1 else path
