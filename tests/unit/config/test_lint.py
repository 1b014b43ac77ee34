"""The engine JSON's lint: every kind of mistake, by key path and line, with the way out."""

import pytest

from largetrain.config.lint import lint_engine
from largetrain.config.parse_engine import parse_engine_text


def lint(text: str):
    return lint_engine(parse_engine_text("f", text))


def only_problem(text: str) -> str:
    (problem,) = lint(text).problems
    return problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # misspelt keys at any depth
        (
            '{"gradient_acumulation_steps": 4}',
            "gradient_acumulation_steps: unknown key. Did you mean gradient_accumulation_steps?",
        ),
        ('{"gradient_clippingg": 0.1}', "gradient_clippingg: unknown key. Did you mean gradient_clipping?"),
        ('{"zero_optimisation": {"stage": 2}}', "zero_optimisation: unknown key. Did you mean zero_optimization?"),
        (
            '{"zero_optimization": {"overlap_com": true}}',
            "zero_optimization.overlap_com: unknown key. Did you mean overlap_comm?",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}}',
            "zero_optimization.offload_param.devise: unknown key. Did you mean device?",
        ),
        ('{"flops_profiler": {"enable": true}}', "flops_profiler.enable: unknown key. Did you mean enabled?"),
        ('{"optimizer": {"type": "AdamW", "parms": {}}}', "optimizer.parms: unknown key. Did you mean params?"),
        (
            '{"optimizer": {"type": "AdamW", "params": {"wieght_decay": 0}}}',
            "optimizer.params.wieght_decay: unknown key. Did you mean weight_decay?",
        ),
        ('{"checkpoint": {"writer": {"typ": "fast"}}}', "checkpoint.writer.typ: unknown key. Did you mean type?"),
        (
            '{"data_efficiency": {"data_sampling": {"num_epoch": 1}}}',
            "data_efficiency.data_sampling.num_epoch: unknown key. Did you mean num_epochs?",
        ),
        ('{"stage": 2}', "stage: unknown key here; it belongs under zero_optimization."),
        ('{"lr": 0.1}', "lr: unknown key here; it belongs under optimizer.params."),
        (
            '{"_comment": "x"}',
            "_comment: unknown key. A comment is written with // in an engine JSON and with # in a run YAML.",
        ),
        # removed features
        ('{"elasticity": {}}', "elasticity: Elastic training has been removed;"),
        ('{"amp": {"enabled": true}}', "amp: NVIDIA Apex AMP integration has been removed."),
        (
            '{"zero_optimization": {"mics_shard_size": 8}}',
            "zero_optimization.mics_shard_size: MiCS ZeRO-3 sharding has been removed;",
        ),
        ('{"fp16": {"opt_level": "O2"}}', "fp16.opt_level: belonged to Apex AMP"),
        ('{"optimizer": {"type": "OneBitAdam"}}', "optimizer.type: the 1-bit optimizers were removed"),
        # numbers as text and fractions
        (
            '{"zero_optimization": {"reduce_bucket_size": "5e8"}}',
            'zero_optimization.reduce_bucket_size: expected a whole number, got "5e8" (text). Write '
            "5e8 without quotes.",
        ),
        (
            '{"zero_optimization": {"reduce_bucket_size": 15099494.4}}',
            "zero_optimization.reduce_bucket_size: expected a whole number, got 15099494.4. Write 15099494.",
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"lr": "5e-5"}}}',
            'optimizer.params.lr: expected a number, got "5e-5" (text). Write 5e-5 without quotes.',
        ),
        (
            '{"zero_optimization": {"stage": "2"}}',
            'zero_optimization.stage: expected a whole number, got "2" (text). Write 2 ',
        ),
        (
            '{"train_micro_batch_size_per_gpu": 2.5}',
            "train_micro_batch_size_per_gpu: expected a whole number, got 2.5. Write 2.",
        ),
        # right type, no meaning
        (
            '{"zero_optimization": {"reduce_bucket_size": 0}}',
            "zero_optimization.reduce_bucket_size: must be greater than 0, got 0.",
        ),
        ('{"gradient_clipping": -1}', "gradient_clipping: must be at least 0, got -1."),
        (
            '{"zero_optimization": true}',
            'zero_optimization: expected a section {...}, got true. Write {"stage": 1} (or 0, 2, 3).',
        ),
        ('{"zero_optimization": {"stage": true}}', "zero_optimization.stage: expected a whole number, got true."),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage: must be one of 0, 1, 2, 3; got 4."),
        (
            '{"fp16": {"enabled": "false"}}',
            'fp16.enabled: expected true or false, got "false" (text). Write false without quotes.',
        ),
        ('{"fp16": {"enabled": 1}}', "fp16.enabled: expected true or false, got 1. Write true."),
        (
            '{"optimizer": {"type": "AdamW", "params": {"lr": -1}}}',
            "optimizer.params.lr: must be greater than 0, got -1.",
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"lr": 0}}}',
            "optimizer.params.lr: must be greater than 0, got 0.",
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.5]}}}',
            "optimizer.params.betas[1]: must be less than 1, got 1.5.",
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}',
            "optimizer.params.betas: must hold 2 values, got 1.",
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"weight_decay": -1}}}',
            "optimizer.params.weight_decay: must be at least 0, got -1.",
        ),
        ('{"fp16": {"hysteresis": 0}}', "fp16.hysteresis: must be at least 1, got 0."),
        ('{"fp16": {"initial_scale_power": -3}}', "fp16.initial_scale_power: must be at least 0, got -3."),
        ('{"fp16": {"loss_scale_window": 0}}', "fp16.loss_scale_window: must be at least 1, got 0."),
        ('{"steps_per_print": 0}', "steps_per_print: must be at least 1, got 0."),
        ('{"train_micro_batch_size_per_gpu": 0}', "train_micro_batch_size_per_gpu: must be at least 1, got 0."),
        ('{"gradient_accumulation_steps": true}', "gradient_accumulation_steps: expected a whole number, got true."),
        (
            '{"communication_data_type": "fp8"}',
            'communication_data_type: must be one of "fp32", "fp16", "bf16"; got "fp8".',
        ),
        # more than one key
        (
            '{"optimizer": {"type": "SGD", "params": {"lr": 1, "nesterov": true}}}',
            "optimizer.params.nesterov: needs a momentum above 0 and no dampening.",
        ),
        (
            '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
            "train_batch_size: 10 is no multiple of 4 (train_micro_batch_size_per_gpu) x "
            "2 (gradient_accumulation_steps), so no number of ranks fits.",
        ),
        (
            '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
            "bf16.enabled: fp16 and bf16 are both enabled; keep one.",
        ),
        (
            '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
            "zero_optimization.offload_param: needs ZeRO stage 3; the stage here is 2",
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
            "zero_optimization.offload_optimizer: needs ZeRO stage 1, 2 or 3; the stage here is 0",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            "zero_optimization.offload_param.nvme_path: is needed with device nvme",
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}',
            "optimizer.params.max_grad_norm: is refused by DeepSpeed as an optimizer parameter; write "
            "gradient_clipping",
        ),
        ('{"optimizer": {"type": "AdamX"}}', 'optimizer.type: unknown optimizer "AdamX". Did you mean Adam'),
        ('{"optimizer": {"type": "sgd"}}', 'optimizer.type: unknown optimizer "sgd". Did you mean SGD?'),
        ('{"optimizer": {"params": {"lr": 1}}}', "optimizer: the key type is missing."),
        (
            '{"optimizer": {"type": "SGD", "params": {"lr": 1}}, "zero_optimization": {"stage": 1}, '
            '"zero_allow_untested_optimizer": false}',
            "zero_allow_untested_optimizer: false refuses SGD with ZeRO; write true, or use AdamW.",
        ),
        (
            '{"torch_autocast": {"enabled": true, "dtype": "bf16"}, "fp16": {"enabled": true}}',
            "torch_autocast.enabled: autocast and fp16 are both enabled; keep one.",
        ),
        (
            '{"torch_autocast": {"enabled": true}, "bfloat16": {"enabled": true}}',
            "torch_autocast.enabled: autocast and bfloat16 are both enabled; keep one.",
        ),
        (
            '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "NVMe"}}}',
            "zero_optimization.offload_optimizer.nvme_path: is needed with device nvme",
        ),
        ('{"optimizer": {"type": "AdamW", "params": {"amsgrad": true}}}', "optimizer.params.amsgrad: is not supported"),
        (
            '{"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR", "params": {}}}',
            'scheduler.params: WarmupDecayLR needs total_num_steps; write a value or "auto".',
        ),
        (
            '{"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}}',
            "scheduler.params.total_num_steps: unknown key",
        ),
        (
            '{"optimizer": {"type": "AdamW"}, "scheduler": {"type": "CosineLR"}}',
            'scheduler.type: unknown scheduler "CosineLR"; known: LR',
        ),
        (
            '{"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR", "params": '
            '{"total_num_steps": 5, "warmup_num_steps": 9}}}',
            "scheduler.params.warmup_num_steps: 9 is more than total_num_steps = 5.",
        ),
        (
            '{"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}',
            'gradient_allreduce_op: "sum" is not supported',
        ),
        ('{"gradient_accumulation_steps": "automatic"}', "gradient_accumulation_steps: expected a whole number"),
        (
            '{"wall_clock_breakdown": "auto"}',
            'wall_clock_breakdown: expected true or false, got "auto" (text). "auto" is not understood',
        ),
    ],
)
def test_one_mistake_is_one_line(text, said):
    assert only_problem(text).startswith(f"f:1: {said}")


def test_all_mistakes_are_reported_together_with_their_lines():
    result = lint('{\n"gradient_clipping": -1,\n"fp16": {"enabled": "yes",\n"hysteresis": 0},\n"nebula": {}\n}')
    assert [problem.split(":")[1] for problem in result.problems] == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("kind", "param", "known"),
    [
        ("AdamW", '"set_grad_none": true', True),
        ("AdamW", '"fused": true', False),
        ("AdamW", '"torch_adam": true, "fused": true', True),
        ("adamw", '"torch_adam": true, "set_grad_none": true', False),
        ("Adagrad", '"lr_decay": 0.1', True),
        ("Lamb", '"max_coeff": 10.0', True),
        ("Lion", '"eps": 1e-8', False),
        ("Muon", '"momentum": 0.95, "adam_lr": 1e-3, "ns_method": "gram"', True),
        ("SGD", '"momentum": 0.9, "nesterov": true', True),
        ("Adafactor", '"eps": [null, 1e-3]', True),
    ],
)
def test_parameters_are_those_of_the_class_that_the_engine_builds(kind, param, known):
    result = lint(f'{{"optimizer": {{"type": "{kind}", "params": {{{param}}}}}}}')
    assert bool(result.problems) is not known, result.problems


def test_offload_asks_for_the_cpu_class():
    optimizer = '"optimizer": {"type": "AdamW", "params": {"set_grad_none": true}}'
    zero = '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}'
    assert only_problem(f"{{{optimizer}, {zero}}}").startswith("f:1: optimizer.params.set_grad_none: unknown key")


def test_what_transformers_writes_is_accepted():
    """The "auto" keys that the Hugging Face integration fills in."""
    result = lint("""{
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "Auto"},
        "optimizer": {"type": "AdamW",
                      "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                      "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "overlap_comm": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                      "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                      "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto",
                      "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "none"}},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false }""")
    assert result.problems == () and result.warnings == ()
    assert result.data["bf16"]["enabled"] == "auto"
    assert result.data["zero_optimization"]["sub_group_size"] == 1_000_000_000


def test_what_the_program_around_deepspeed_may_add_is_a_warning():
    """A lint of a file for any program; a run adds both by itself."""
    text = '{"scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 1}}'
    assert lint(text).problems == ()
    assert lint(text).warnings[0].startswith("f:1: scheduler: needs an optimizer: ")
    text = '{"optimizer": {"type": "SGD", "params": {"lr": 1}}, "zero_optimization": {"stage": 1}}'
    assert lint(text).problems == ()
    assert lint(text).warnings == (
        'f:1: optimizer.type: SGD with ZeRO needs "zero_allow_untested_optimizer": true at the top level '
        "(a run adds it).",
    )
    assert lint_engine(parse_engine_text("f", text), for_a_run=True).warnings == ()


def test_old_names_still_read_by_deepspeed_are_a_warning():
    result = lint('{"zero_optimization": {"stage": 2, "cpu_offload": true}, "bfloat16": {"enabled": true}}')
    assert result.problems == ()
    assert result.warnings == (
        "f:1: zero_optimization.cpu_offload: is an old name; write offload_optimizer.",
        "f:1: bfloat16: is an old name; write bf16.",
    )
    problems = lint('{"zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {}}}').problems
    assert problems == (
        "f:1: zero_optimization.cpu_offload: is an old name of offload_optimizer, which is written "
        "too. Remove cpu_offload.",
    )


def test_values_are_never_shown_beyond_one_line():
    problem = only_problem('{"gradient_clipping": "' + "x" * 500 + '\\n"}')
    assert "\n" not in problem and len(problem) < 200
