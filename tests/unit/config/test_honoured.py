"""Every accepted key of the engine JSON changes behaviour, is noted as idle, or is refused; and what DeepSpeed gets."""

import pytest

from largetrain.config.engine_schema import engine_schema
from largetrain.config.honoured import IDLE, REFUSED, SCALE_KEYS, STAGES
from largetrain.config.load import load
from largetrain.errors import ConfigError

ON = ("enabled",)
MONITOR = ("enabled", "output_path", "job_name")
# What a run honours: a section's keys, or () for a key without a section. Conditions (the stage, a section that is
# switched off, a fixed loss scale) are noted by `ineffective_keys`.
HONOURED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), ()),
    **dict.fromkeys(("gradient_clipping", "prescale_gradients", "gradient_predivide_factor"), ()),
    **dict.fromkeys(("communication_data_type", "disable_python_gc", "log_level", "zero_allow_untested_optimizer"), ()),
    "optimizer": ("type", "params"),
    "scheduler": ("type", "params"),
    "fp16": ("enabled", "auto_cast", "loss_scale", *SCALE_KEYS, "fp16_master_weights_and_grads"),
    "bf16": ("enabled", "immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "torch_autocast": ("enabled", "dtype", "lower_precision_safe_modules"),
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "flops_profiler": (
        *("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed"),
        "output_file",
    ),
    "checkpoint": ("tag_validation",),
    "aio": ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"),
    "tensorboard": MONITOR,
    "csv_monitor": MONITOR,
    "wandb": ("enabled", "group", "team", "project"),
    "comet": (
        *("enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key"),
        *("online", "mode"),
    ),
    "zero_optimization": (
        "stage",
        *STAGES,
        *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
        *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
    ),
    "zero_optimization.leaf_module": ("classes", "names", "name_suffixes"),
    "zero_optimization.offload_param": (
        *("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    ),
    "zero_optimization.offload_optimizer": (
        *("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init"),
        "ratio",
    ),
}


def leaves(node: dict, path: tuple[str, ...] = ()):
    """Keys without further keys below; old names are left out, a run replaces them."""
    for key, below in node["properties"].items():
        if below.get("deprecated"):
            continue
        if below.get("properties"):
            yield from leaves(below, (*path, key))
        else:
            yield ".".join((*path, key))


def test_every_key_of_the_schema_is_honoured_or_idle_or_refused_and_only_one_of_them():
    """A new DeepSpeed brings new keys: each has to be looked at."""
    honoured = {f"{section}.{key}" if key else section for section, keys in HONOURED.items() for key in keys or ("",)}
    known = set(leaves(engine_schema()))
    wrong = {}
    for key in known:
        listed = [name for name, table in (("refused", REFUSED), ("idle", IDLE)) if under(key, table)]
        listed += ["honoured"] if key in honoured else []
        if len(listed) != 1:
            wrong[key] = listed
    assert wrong == {}
    sections = {key.rpartition(".")[0] for key in known}
    assert honoured - known - sections == set()


def under(key: str, table: dict[str, str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:length]) in table for length in range(1, len(parts) + 1))


def mistakes(*sets: str, ranks: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(None, None, list(sets), world_size=ranks)
    return list(caught.value.problems)


def idle_notes(*sets: str) -> list[str]:
    return [note for note in load(None, None, list(sets)).notes if "has no effect" in note]


@pytest.mark.parametrize(
    "written",
    [
        "pipeline.stages=2",
        "tensor_parallel.autotp_size=2",
        "sequence_parallel_size=2",
        "expert_parallel.enabled=true",
        "data_efficiency.enabled=true",
        "hybrid_engine.enabled=true",
        "compile.deepcompile=true",
        "dataloader_drop_last=true",
        "activation_checkpointing.partition_activations=true",
        "checkpoint.load_universal=true",
        "vocabulary_size=100",
        "checkpoint.writer={type: fast}",
        "disable_allgather=true",
        "managed_gradient_accumulation=false",
        "gradient_allreduce_op=sum",
        "aio.block_size=4096",
        "weight_quantization={num_bits: 4}",
        "autotuning.enabled=true",
        "scheduler.params.last_batch_iteration=5",
        "zero_optimization.legacy_stage1=true",
        "datastates_ckpt=true",
        "zero_optimization.compute_grad_norm=false",
        "bf16.check_grad_overflow=false",
        "bfloat16.check_grad_overflow=false",
        "zero_optimization.zenflow={topk_ratio: 0.1}",
        "zero_optimization.offload_optimizer={device: cpu, super_offload: true}",
        "zero_optimization.zero_quantized_weights=true",
        "zero_optimization.zero_quantized_nontrainable_weights=true",
        "zero_optimization.zero_quantized_gradients=true",
    ],
)
def test_keys_that_a_run_cannot_honour_are_refused_with_a_reason(written):
    (problem,) = mistakes(written)
    section = written.partition("=")[0].partition(".")[0].replace("bfloat16", "bf16")
    assert problem.startswith(f"--set {written}: {section}")
    assert problem.endswith(("remove it.", "Remove it.", 'write "mean".', "in the run config."))


@pytest.mark.parametrize(
    "written",
    [
        "hybrid_engine.enabled=false",
        "activation_checkpointing.profile=false",
        "sequence_parallel_size=1",
        "gradient_allreduce_op=mean",
        "pipeline.stages=auto",
        "checkpoint.tag_validation=Fail",
        "compile={}",
        "zero_optimization.compute_grad_norm=true",
        "bf16.check_grad_overflow=true",
        "zero_optimization.zero_quantized_weights=false",
    ],
)
def test_a_refused_key_that_says_what_happens_anyway_is_accepted(written):
    load(None, None, [written])


# --- combinations that would not train, or not rightly ---


FP16_AUTOCAST = "torch_autocast={enabled: true, dtype: fp16}"
MASTER = "needs zero_optimization.offload_optimizer"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        *(([FP16_AUTOCAST, f"zero_optimization.stage={s}"], "torch_autocast.dtype: scales the loss") for s in range(4)),
        (["torch_autocast={enabled: true, dtype: Half}"], "torch_autocast.dtype: scales the loss"),
        (["data_types.param_dtype=bf16"], 'data_types.param_dtype: "bf16" contradicts the precision of the run, fp32'),
        (
            ["data_types.param_dtype=fp32", "fp16.enabled=true"],
            'param_dtype: "fp32" contradicts the precision of the run',
        ),
        (
            ["data_types.grad_accum_dtype=bf16", "zero_optimization.stage=0"],
            'grad_accum_dtype: "bf16" is not the precision of the run, fp32, which needs ZeRO stage 1, 2 or 3',
        ),
        (["zero_optimization={stage: 3, zero_hpz_partition_size: 3}"], "partition_size: 3 does not divide the 4 ranks"),
        (["fp16={enabled: true, fp16_master_weights_and_grads: true}"], MASTER),
        (["bf16={enabled: true, bf16_master_weights_and_grads: true}"], MASTER),
        (
            ["gradient_predivide_factor=2"],
            "gradient_predivide_factor: 2 at stage 2 needs zero_optimization.reduce_scatter",
        ),
        (["prescale_gradients=true", "zero_optimization.stage=3"], "prescale_gradients: true at stage 3 needs"),
    ],
)
def test_combinations_that_deepspeed_does_not_train_are_refused(sets, said):
    (problem,) = mistakes(*sets, ranks=4)
    assert said in problem and problem.startswith("--set ")


@pytest.mark.parametrize(
    "sets",
    [
        ["torch_autocast={enabled: true, dtype: bf16}"],
        ["torch_autocast={enabled: false, dtype: fp16}"],
        ["data_types.param_dtype=bf16", "bf16.enabled=true"],
        ["data_types.grad_accum_dtype=fp32", "bf16.enabled=true", "zero_optimization.stage=0"],
        ["data_types.grad_accum_dtype=bf16"],
        ["zero_optimization={stage: 3, zero_hpz_partition_size: 2}"],
        ["bf16={enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}"],
        [
            "fp16={enabled: true, fp16_master_weights_and_grads: true}",
            "zero_optimization={stage: 2, offload_optimizer: {device: cpu}}",
        ],
        ["gradient_predivide_factor=2", "zero_optimization.reduce_scatter=false"],
        ["prescale_gradients=true", "zero_optimization.stage=1"],
    ],
)
def test_their_neighbours_are_accepted(sets):
    load(None, None, sets, world_size=4)


# --- keys that change nothing ---


@pytest.mark.parametrize(
    ("sets", "notes"),
    [
        (
            ["zero_optimization={stage: 2, stage3_max_live_parameters: 1e6, sub_group_size: 5}"],
            [
                "stage3_max_live_parameters has no effect: the stage is 2",
                "sub_group_size has no effect: the stage is 2",
            ],
        ),
        (["zero_optimization={stage: 0, reduce_bucket_size: 5}"], ["reduce_bucket_size has no effect: the stage is 0"]),
        (["zero_optimization={stage: 0, reduce_bucket_size: 5}", "fp16.enabled=true"], []),
        (["zero_optimization={stage: 3, round_robin_gradients: true}"], ["gradients has no effect: the stage is 3"]),
        (
            ["fp16={enabled: true, loss_scale: 128, loss_scale_window: 5, hysteresis: 2}"],
            [f"fp16.{key} has no effect: it belongs to the dynamic" for key in ("loss_scale_window", "hysteresis")],
        ),
        (["fp16={enabled: true, loss_scale: 0, loss_scale_window: 5}"], []),
        (["fp16={loss_scale: 128}"], ['fp16 has no effect: it is not switched on ("enabled": true)']),
        (["fp16={enabled: false, loss_scale: 0}"], []),
        (["comms_logger.enabled=true"], ["comms_logger has no effect: a run does not ask"]),
        (["dump_state=true"], ["dump_state has no effect: it only prints, and only with --verbose"]),
        (["steps_per_print=50"], ["steps_per_print has no effect: it only prints"]),
        (["timers.throughput.enabled=false"], ["timers has no effect: it only prints"]),
        (["wall_clock_breakdown=false"], []),
        (
            ["zero_optimization={stage: 3, stage3_gather_16bit_weights_on_model_save: true}"],
            ["stage3_gather_16bit_weights_on_model_save has no effect: a run writes checkpoints"],
        ),
        (
            ["bf16={enabled: true, immediate_grad_update: true}"],
            ["bf16.immediate_grad_update has no effect: it is read"],
        ),
    ],
)
def test_keys_that_change_nothing_are_noted(sets, notes):
    found = idle_notes(*sets)
    assert len(found) == len(notes)
    for note, said in zip(found, notes, strict=True):
        assert said in note


# --- what DeepSpeed is handed ---


@pytest.mark.parametrize("precision", ["fp16", "bf16", "bfloat16"])
def test_half_precision_at_stage_0_is_handed_over_as_stage_1(precision):
    for zero in ("zero_optimization=null", "zero_optimization={stage: 0, reduce_bucket_size: 7}"):
        resolved = load(None, None, [zero, f"{precision}.enabled=true"])
        assert resolved.engine["zero_optimization"]["stage"] == 1
        (note,) = [note for note in resolved.notes if note.startswith("zero_optimization.stage = 1 (stage 0 with ")]
        assert "does not scale the fp16 loss" in note
    assert resolved.engine["zero_optimization"]["reduce_bucket_size"] == 7


def test_fp32_at_stage_0_stays_there():
    engine = load(None, None, ["zero_optimization={stage: 0}"]).engine
    assert engine["zero_optimization"] == {"stage": 0} and "zero_allow_untested_optimizer" not in engine


@pytest.mark.parametrize("given", [[], ["zero_allow_untested_optimizer=false"], ["zero_allow_untested_optimizer=true"]])
def test_zero_is_let_to_take_any_optimizer(given):
    assert load(None, None, given).engine["zero_allow_untested_optimizer"] is True
    untested = load(None, None, ["optimizer={type: SGD, params: {lr: 0.1}}"])
    assert untested.engine["zero_allow_untested_optimizer"] is True
    (problem,) = mistakes("optimizer={type: SGD, params: {lr: 0.1}}", "zero_allow_untested_optimizer=false")
    assert "false refuses SGD with ZeRO" in problem


def test_deepspeeds_progress_line_is_silenced_unless_asked_for():
    assert load(None, None).engine["steps_per_print"] == 10**9
    assert load(None, None, ["steps_per_print=5"]).engine["steps_per_print"] == 5


def test_a_schedule_without_an_optimizer_gets_the_usual_one():
    resolved = load(None, None, ["optimizer=null"])
    assert resolved.engine["optimizer"]["type"] == "AdamW" and "scheduler" in resolved.engine
    assert "optimizer = AdamW (not given)" in resolved.notes
