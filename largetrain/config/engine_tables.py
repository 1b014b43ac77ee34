"""What the engine JSON's schema takes from no DeepSpeed model: sections read key by key, and meanings.

Written by hand from DeepSpeed's reading code; `python -m largetrain.doctor.engine_schema` joins it with the
models and signatures of the installed version into `engine_schema.json`. Pure data: imports nothing.

A node is a JSON-schema fragment. Own keywords: `x-auto` ("run": resolved from the run's numbers; "default":
DeepSpeed takes its default), `x-removed` (key -> why it is gone), `x-use` (the key that replaces a deprecated one).
"""

from typing import Any

Node = dict[str, Any]


def integer(low: int | None = None, **extra: Any) -> Node:
    """A whole number, at least `low`."""
    return {"type": "integer"} | ({} if low is None else {"minimum": low}) | extra


def number(low: float | None = None, **extra: Any) -> Node:
    """A number, at least `low`."""
    return {"type": "number"} | ({} if low is None else {"minimum": low}) | extra


def boolean(default: bool | None = None, **extra: Any) -> Node:
    """true or false."""
    return {"type": "boolean"} | ({} if default is None else {"default": default}) | extra


def text(*choices: str, **extra: Any) -> Node:
    """Text, one of `choices` when there are any."""
    return {"type": "string"} | ({"enum": list(choices)} if choices else {}) | extra


def section(**properties: Node) -> Node:
    """An object that takes these keys and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


def anything(**extra: Any) -> Node:
    """A value whose shape DeepSpeed leaves to the code that uses it."""
    return dict(extra)


RUN = {"x-auto": "run"}
DTYPE = ("fp32", "fp16", "bf16")
POSITIVE: Node = {"type": "number", "exclusiveMinimum": 0}
SHARE: Node = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
BETAS: Node = {"type": "array", "items": SHARE, "minItems": 2, "maxItems": 2}

TOP_LEVEL: dict[str, Node] = {
    "train_batch_size": integer(1, **RUN),
    "train_micro_batch_size_per_gpu": integer(1, **RUN),
    "gradient_accumulation_steps": integer(1, **RUN),
    "managed_gradient_accumulation": boolean(True),
    "gradient_clipping": number(0, default=1.0, **RUN),
    "steps_per_print": {"type": ["integer", "null"], "minimum": 1},
    "wall_clock_breakdown": boolean(False),
    "memory_breakdown": boolean(False),
    "dump_state": boolean(False),
    "disable_python_gc": boolean(False),
    "disable_allgather": boolean(False),
    "prescale_gradients": boolean(False),
    "gradient_predivide_factor": {**POSITIVE, "default": 1.0},
    "gradient_allreduce_op": text("mean", "sum", default="mean"),
    "communication_data_type": {"type": ["string", "null"], "enum": [*DTYPE, None]},
    "seq_parallel_communication_data_type": text(*DTYPE, default="fp32"),
    "sequence_parallel_size": integer(1, default=1),
    "use_data_before_expert_parallelism": boolean(False),
    "zero_allow_untested_optimizer": boolean(False),
    "zero_force_ds_cpu_optimizer": boolean(True),
    "vocabulary_size": {"type": ["integer", "null"], "minimum": 1},
    "dataloader_drop_last": boolean(False),
    "log_level": {
        "type": ["string", "null"],
        "enum": ["debug", "info", "warning", "error", "critical", None],
    },
}

SECTIONS: dict[str, Node] = {
    "torch_autocast": section(
        enabled=boolean(False),
        dtype=text("fp16", "float16", "half", "bf16", "bfloat16", "fp32", "float32", "float"),
        lower_precision_safe_modules={"type": "array", "items": {"type": "string"}},
    ),
    "activation_checkpointing": section(
        partition_activations=boolean(False),
        contiguous_memory_optimization=boolean(False),
        cpu_checkpointing=boolean(False),
        number_checkpoints={"type": ["integer", "null"], "minimum": 1, "default": None},
        synchronize_checkpoint_boundary=boolean(False),
        profile=boolean(False),
    ),
    "flops_profiler": section(
        enabled=boolean(False),
        recompute_fwd_factor=number(0, default=0.0),
        profile_step=integer(1, default=1),
        module_depth=integer(-1, default=-1),
        top_modules=integer(1, default=1),
        detailed=boolean(True),
        output_file={"type": ["string", "null"], "default": None},
    ),
    "checkpoint": section(
        tag_validation=text("Warn", "Ignore", "Fail", default="Warn"),
        load_universal=boolean(False),
        use_node_local_storage=boolean(False, **RUN),
        parallel_write=section(pipeline_stage=boolean(False)),
        checkpoint_serialization=boolean(True),
        writer={
            "type": ["object", "null"],
            "properties": {
                "type": text("mock", "python", "fast", default="fast"),
                "io_buffer_size": integer(1),
                "io_buffer_double": boolean(True),
                "io_multiplier": integer(1),
                "show_statistics": boolean(False),
                "data_parallel": {"type": ["string", "null"], "enum": ["replica", "socket", "machine", None]},
                "decoupled": boolean(False),
            },
            "additionalProperties": False,
        },
    ),
    "data_types": section(
        grad_accum_dtype={"type": ["string", "null"], "enum": [*DTYPE, None], "default": None},
        param_dtype={"type": ["string", "null"], "enum": [*DTYPE, None], "default": None},
        buffer_dtype={"type": ["string", "null"], "enum": [*DTYPE, None], "default": None},
        keep_in_fp32_modules={"type": "array", "items": {"type": "string"}, "x-auto": "default"},
    ),
    "pipeline": section(
        stages={"type": ["string", "integer"], "default": "auto"},
        partition=text(default="best"),
        seed_layers=boolean(False),
        activation_checkpoint_interval=integer(0, default=0),
        pipe_partitioned=boolean(True),
        grad_partitioned=boolean(True),
        use_reentrant=boolean(True),
    ),
    "aio": section(
        block_size=integer(1, default=1048576),
        queue_depth=integer(1, default=8),
        intra_op_parallelism=integer(1, default=1),
        single_submit=boolean(False),
        overlap_events=boolean(True),
        use_gds=boolean(False),
    ),
    "data_efficiency": section(
        enabled=boolean(False),
        seed=integer(default=1234),
        data_sampling=section(
            enabled=boolean(False),
            num_epochs=integer(1),
            num_workers=integer(0),
            pin_memory=boolean(False),
            curriculum_learning={"type": "object"},
            dynamic_batching={"type": "object"},
        ),
        data_routing=section(enabled=boolean(False), random_ltd={"type": "object"}),
    ),
    "autotuning": {"type": "object"},
    "model_info": section(
        profile=boolean(False),
        num_params={"type": ["integer", "null"]},
        hidden_size={"type": ["integer", "null"]},
        num_layers={"type": ["integer", "null"]},
    ),
    "datastates_ckpt": {"type": ["object", "boolean", "null"]},
}

# Types and ranges of optimizer parameters by name; names and defaults come from the classes' signatures.
OPTIMIZER_PARAMETERS: dict[str, Node] = {
    "lr": {**POSITIVE, **RUN},
    "muon_lr": POSITIVE,
    "adam_lr": POSITIVE,
    "betas": {**BETAS, **RUN},
    "eps": {"type": "number", "exclusiveMinimum": 0, **RUN},
    "weight_decay": number(0, **RUN),
    "momentum": SHARE,
    "dampening": number(0),
    "lr_decay": number(0),
    "momentum_decay": number(0),
    "initial_accumulator_value": number(0),
    "rho": SHARE,
    "alpha": SHARE,
    "lambd": number(0),
    "t0": number(0),
    "beta2_decay": {"type": "number", "maximum": 0},
    "d": number(1),
    "etas": {"type": "array", "items": POSITIVE, "minItems": 2, "maxItems": 2},
    "step_sizes": {"type": "array", "items": POSITIVE, "minItems": 2, "maxItems": 2},
    "max_coeff": POSITIVE,
    "min_coeff": POSITIVE,
    "ns_method": text("gram", "standard"),
}
# Parameters that DeepSpeed's engine takes out before it calls the class.
ADAM_SWITCHES: dict[str, Node] = {
    "torch_adam": boolean(False),
    "adam_w_mode": boolean(True),
    "fp32_optimizer_states": boolean(),
}
# max_grad_norm is gradient_clipping's old place: the lint points there, so no class offers it.
HIDDEN_PARAMETERS = {"params", "model_params", "param_groups", "self", "max_grad_norm"}

# Types and ranges of scheduler parameters by name; names, defaults and what is required come from the signatures.
SCHEDULER_PARAMETERS: dict[str, Node] = {
    "warmup_min_lr": number(0, **RUN),
    "warmup_max_lr": {**POSITIVE, **RUN},
    "warmup_num_steps": integer(1, **RUN),
    "warmup_type": text("log", "linear"),
    "warmup_min_ratio": number(0, maximum=1),
    "cos_min_ratio": number(0, maximum=1),
    "total_num_steps": integer(1, **RUN),
    "last_batch_iteration": integer(-1),
    "lr_range_test_min_lr": POSITIVE,
    "lr_range_test_step_size": integer(1),
    "lr_range_test_step_rate": number(0),
    "lr_range_test_staircase": boolean(),
    "cycle_min_lr": number(0),
    "cycle_max_lr": POSITIVE,
    "decay_lr_rate": number(0),
    "cycle_first_step_size": integer(1),
    "cycle_second_step_size": {"type": ["integer", "null"], "minimum": 1},
    "cycle_first_stair_count": integer(0),
    "cycle_second_stair_count": {"type": ["integer", "null"], "minimum": 0},
    "decay_step_size": integer(0),
    "cycle_momentum": boolean(),
    "cycle_min_mom": SHARE,
    "cycle_max_mom": SHARE,
    "decay_mom_rate": number(0),
}

# Tighter than DeepSpeed's models, which let meaningless values pass.
NARROWER: dict[str, Node] = {
    "zero_optimization.stage": {"type": "integer", "enum": [0, 1, 2, 3]},
    "zero_optimization.reduce_bucket_size": {"x-auto": "run"},
    "zero_optimization.allgather_bucket_size": {"minimum": 1},
    "zero_optimization.sub_group_size": {"minimum": 1},
    "zero_optimization.stage3_prefetch_bucket_size": {"x-auto": "run"},
    "zero_optimization.stage3_param_persistence_threshold": {"x-auto": "run"},
    "zero_optimization.zero_hpz_partition_size": {"minimum": 1},
    "zero_optimization.stage3_module_granularity_threshold": {"minimum": 0},
    "zero_optimization.zenflow.select_strategy": {"type": "string", "enum": ["auto", "step", "epoch"]},
    "zero_optimization.zenflow.select_interval": {"type": "integer", "minimum": 1},
    "zero_optimization.zenflow.update_interval": {"type": "integer", "minimum": 1},
    "zero_optimization.zenflow.full_warm_up_rounds": {"minimum": 0},
    "fp16.enabled": {"x-auto": "run"},
    "fp16.loss_scale": {"minimum": 0},
    "fp16.initial_scale_power": {"minimum": 0, "maximum": 127},
    "fp16.loss_scale_window": {"minimum": 1},
    "fp16.hysteresis": {"minimum": 1},
    "fp16.min_loss_scale": {"minimum": 1},
    "bf16.enabled": {"x-auto": "run"},
    "tensor_parallel.autotp_size": {"minimum": 0},
    "expert_parallel.load_balance_coeff": {"type": "null"},
}

_GONE = "removed from DeepSpeed; "
# Keys that older guides and configs still hold, beside those DeepSpeed itself lists as removed.
OLDER_TOP_LEVEL: dict[str, str] = {
    "max_grad_norm": "is not an engine key; write gradient_clipping.",
    "allgather_size": _GONE + "write zero_optimization.allgather_bucket_size.",
    "fp32_allreduce": _GONE + 'write "communication_data_type": "fp32".',
    "nvme_offload": "belongs under zero_optimization.offload_param or offload_optimizer.",
    "cpu_offload": 'belongs under zero_optimization: "offload_optimizer": {"device": "cpu"}.',
}
OLDER_BY_SECTION: dict[str, dict[str, str]] = {
    "fp16": {
        "opt_level": "belonged to Apex AMP, which DeepSpeed removed; remove it.",
        "loss_scaler": "is not a key; write loss_scale (0 means dynamic).",
    },
    "aio": {"thread_count": "is no longer read; write intra_op_parallelism."},
    "zero_optimization": {
        "cpu_offload_use_pin_memory": "has no effect any more; write pin_memory in offload_param or offload_optimizer.",
        "offload_params": "is not a key; write offload_param.",
        "offload_optimiser": "is not a key; write offload_optimizer.",
    },
}
OLDER_OPTIMIZERS: dict[str, str] = dict.fromkeys(
    ("onebitadam", "zerooneadam", "onebitlamb"),
    "the 1-bit optimizers were removed from DeepSpeed; use AdamW (or Lamb).",
)
