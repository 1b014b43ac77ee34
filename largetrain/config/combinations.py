"""Combinations of engine keys with which DeepSpeed 0.19 stops with a traceback, or trains what was not asked for.

Each was tried on 2 ranks; `honoured.REFUSED` holds the keys that are refused by themselves.
"""

from collections.abc import Iterator

from largetrain.config.document import Document, KeyPath, shown
from largetrain.config.lint import Finding, offload_device, stage_of

ZERO = "zero_optimization"
AUTOCAST: KeyPath = ("torch_autocast", "dtype")


def combination_problems(engine: Document, world_size: int) -> list[str]:
    """One line for each combination that would not train.

    Args:
        engine: linted, old names replaced, the stage as DeepSpeed is handed it.
        world_size: ranks of the run.
    """
    found = [*_autocast(engine), *_data_types(engine), *_master_weights(engine), *_division(engine)]
    group = engine.get((ZERO, "zero_hpz_partition_size"), 1)
    if stage_of(engine) == 3 and world_size % group:
        text = f"{group} does not divide the {world_size} ranks of the run; write a divisor, or remove it."
        found.append(((ZERO, "zero_hpz_partition_size"), text))
    return [engine.problem(path, text) for path, text in found]


def precision_of(engine: Document) -> str:
    """The parameter dtype by DeepSpeed's word: fp32, fp16 or bf16."""
    return next((name for name in ("fp16", "bf16") if engine.get((name, "enabled")) is True), "fp32")


def _autocast(engine: Document) -> Iterator[Finding]:
    on, dtype = engine.get(("torch_autocast", "enabled")) is True, str(engine.get(AUTOCAST)).lower()
    if on and dtype in ("fp16", "float16", "half"):
        text = (
            "scales the loss, but the gradients are clipped and reported before they are divided by the scale again, "
            "at every stage, so the updates are wrong. Write bf16, or fp16.enabled: true instead of torch_autocast."
        )
        yield AUTOCAST, text


def _data_types(engine: Document) -> Iterator[Finding]:
    model = precision_of(engine)
    parameters, gradients = (engine.get(("data_types", key)) for key in ("param_dtype", "grad_accum_dtype"))
    if parameters is not None and str(parameters).lower() != model:
        way_out = "remove it" + ("" if parameters == "fp32" else f", or write {parameters}: {{enabled: true}}")
        yield (
            ("data_types", "param_dtype"),
            f"{shown(parameters)} contradicts the precision of the run, {model}; {way_out}.",
        )
    if gradients is not None and stage_of(engine) == 0 and str(gradients).lower() != model:
        yield (
            ("data_types", "grad_accum_dtype"),
            f"{shown(gradients)} is not the precision of the run, {model}, which needs ZeRO stage 1, 2 or 3; the "
            f"stage here is 0.",
        )


def _master_weights(engine: Document) -> Iterator[Finding]:
    if offload_device(engine, "offload_optimizer") != "none":
        return
    for precision in ("fp16", "bf16"):
        path = (precision, f"{precision}_master_weights_and_grads")
        if engine.get(path) is True and engine.get((precision, "bf16_optimizer_states")) is not True:
            beside = " or bf16.bf16_optimizer_states: true" if precision == "bf16" else ""
            yield path, f'needs zero_optimization.offload_optimizer: {{"device": "cpu"}}{beside} beside it.'


def _division(engine: Document) -> Iterator[Finding]:
    stage = stage_of(engine)
    if stage not in (2, 3) or not engine.get((ZERO, "reduce_scatter"), True):
        return
    for key, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        value = engine.get((key,), usual)
        if value != usual:
            text = f"{shown(value)} at stage {stage} needs zero_optimization.reduce_scatter: false; write that, or "
            yield (key,), f"{text}{shown(usual)} here."
