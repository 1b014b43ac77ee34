"""From the `parallel` section to a `Layout`: what cannot be laid out is refused here, before anything heavy."""

from collections.abc import Iterator

from largetrain.config.decoder_spec import DecoderSpec
from largetrain.config.document import Document, KeyPath
from largetrain.config.engine_schema import optimizer_name
from largetrain.config.layout import Layout
from largetrain.config.lint import Finding, offload_device, stage_of
from largetrain.config.schema import LanguageRun, ParallelConfig, RunConfig
from largetrain.config.world import World

SECTION = "parallel"
ZERO = "zero_optimization"
PIPELINE_KEYS = (
    "partition",
    "recompute_stages",
    "pipeline_schedule",
)  # of the section, without effect on a single stage
# what they compute from a matrix, or from its norm, is another thing for a part of it
WHOLE_MATRIX = ("Muon", "Lamb", "Adafactor", "MuAdam", "MuAdamW", "MuSGD")


def lay_out(
    run: RunConfig, document: Document, decoder: DecoderSpec | None, world: World
) -> tuple[Layout | None, list[str]]:
    """The layout of the run's ranks.

    Args:
        document: where the run's keys were written.
        decoder: sizes of the built-in decoder; None for other models, or when its sizes are wrong.

    Returns:
        the layout (None when it does not come out) and problems.
    """
    wanted = run.parallel
    found = [*_idle(wanted), *_other_models(run), *_unsupported_together(wanted)]
    if decoder is not None:
        found += [*_tensor(wanted, decoder), *_ulysses(wanted, decoder), *_stages(wanted, decoder)]
    layout = None
    if world.world_size % _product(wanted):
        found.append(_undivided(wanted, world))
    else:
        layout = Layout(
            world.world_size,
            wanted.tensor_parallel,
            wanted.pipeline_stages,
            wanted.ulysses,
            wanted.sequence_parallel,
        )
    return layout, [document.problem((SECTION, key) if key else (SECTION,), text) for key, text in found]


def engine_problems(run: RunConfig, engine: Document) -> list[str]:
    """What of the engine JSON does not go with the layout; the stage as it was written.

    Returns:
        one line for each key.
    """
    wanted = run.parallel
    found: list[Finding] = []
    if wanted.pipeline_stages > 1:
        found += _with_pipeline(engine)
    if wanted.tensor_parallel > 1:
        name = optimizer_name(str(engine.get(("optimizer", "type"))))
        if name in WHOLE_MATRIX:
            text = f"{name} needs whole matrices, and parallel.tensor_parallel divides them; write AdamW, or SGD."
            found.append((("optimizer", "type"), text))
    if wanted.tensor_parallel > 1 or wanted.ulysses > 1:
        key = (ZERO, "zero_hpz_partition_size")
        if engine.get(key, 1) != 1:
            found.append((key, "is for plain data parallelism; remove it, or the parallel section."))
    return [engine.problem(path, text) for path, text in found]


def micro_batch_problems(run: RunConfig, document: Document, accumulation: int) -> list[str]:
    """What the schedule of the stages asks of `gradient_accumulation_steps`."""
    wanted = run.parallel
    if wanted.pipeline_stages == 1 or wanted.runs == wanted.pipeline_stages or accumulation >= wanted.runs:
        return []
    text = (
        f"dualpipev on {wanted.pipeline_stages} stages takes {wanted.runs} micro-batches or more, and "
        f"gradient_accumulation_steps is {accumulation}; change that, or write 1f1b."
    )
    return [document.problem((SECTION, "pipeline_schedule"), text)]


def contradictions(run: RunConfig, backend: str | None) -> Iterator[tuple[KeyPath, str]]:
    """Where `backend` and `parallel` exclude one another."""
    wanted = run.parallel
    if backend == "deepspeed" and wanted.pipeline_stages > 1:
        yield ("backend",), "deepspeed has no pipeline stages; write backend: pipeline, or auto."
    if wanted.pipeline_stages > 1 and run.sync_batch_norm_ranks != "all":
        yield ("sync_batch_norm_ranks",), "a pipeline shares statistics over all data-parallel ranks; write all."
    if backend == "ddp":
        for key in ("tensor_parallel", "pipeline_stages", "ulysses"):
            if getattr(wanted, key) > 1:
                text = f"backend ddp gives every rank the whole model; write 1, or backend: {_backend_for(key)}."
                yield (SECTION, key), text


def _backend_for(key: str) -> str:
    return "pipeline" if key == "pipeline_stages" else "deepspeed"


def _product(wanted: ParallelConfig) -> int:
    return wanted.tensor_parallel * wanted.pipeline_stages * wanted.ulysses


def _undivided(wanted: ParallelConfig, world: World) -> tuple[str, str]:
    keys = ("tensor_parallel", "pipeline_stages", "ulysses")
    above = [key for key in keys if getattr(wanted, key) > 1]
    product = " x ".join(f"{key} {getattr(wanted, key)}" for key in above)
    size = _product(wanted)
    total = f"{product} = {size}" if len(above) > 1 else product
    ranks = f"{world.world_size} rank{'s' if world.world_size > 1 else ''} ({world.source})"
    near = world.world_size // size * size
    starts = " or ".join(str(count) for count in (near, near + size) if count)
    choices = ""
    if len(above) == 1:
        divisors = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        choices = f"; with these ranks write one of {', '.join(map(str, divisors))}"
    return above[0] if len(above) == 1 else "", f"{total} does not divide {ranks}. Start {starts} ranks{choices}."


def _idle(wanted: ParallelConfig) -> Iterator[tuple[str, str]]:
    given = wanted.model_fields_set
    if wanted.sequence_parallel and wanted.tensor_parallel == 1:
        yield (
            "sequence_parallel",
            "divides over the tensor-parallel ranks, and tensor_parallel is 1; write that, or ulysses.",
        )
    for key in PIPELINE_KEYS:
        if key in given and wanted.pipeline_stages == 1:
            yield key, "has no effect with one pipeline stage; write pipeline_stages, or remove it."
    beyond = [stage for stage in wanted.recompute_stages or [] if stage >= wanted.pipeline_stages]
    if beyond and wanted.pipeline_stages > 1:
        yield "recompute_stages", f"there is no stage {beyond[0]}; the stages are 0 to {wanted.pipeline_stages - 1}."
    if isinstance(wanted.partition, list) and wanted.pipeline_stages > 1 and len(wanted.partition) != wanted.runs:
        runs = f"{wanted.runs} runs of layers, 2 for each of the" if wanted.runs > wanted.pipeline_stages else "the"
        text = f"names {len(wanted.partition)} runs of layers for {runs} {wanted.pipeline_stages} stages"
        yield "partition", f"{text} of pipeline_stages; make them agree."


def _unsupported_together(wanted: ParallelConfig) -> Iterator[tuple[str, str]]:
    for key in ("tensor_parallel", "pipeline_stages"):
        if wanted.ulysses > 1 and getattr(wanted, key) > 1:
            yield "ulysses", f"goes with data parallelism and ZeRO, not with {key}; write 1 for one of them."


def _other_models(run: RunConfig) -> Iterator[tuple[str, str]]:
    wanted = run.parallel
    if isinstance(run, LanguageRun) and run.model.target is None:
        return
    if wanted.ulysses > 1:
        yield "ulysses", "divides the attention of the built-in decoder only; remove it, or model.target."
    if wanted.sequence_parallel:
        yield "sequence_parallel", "divides the layers of the built-in decoder only; remove it, or model.target."
    if wanted.tensor_parallel == 1:
        return
    if not isinstance(run, LanguageRun):
        yield "tensor_parallel", "divides the matrices of language models only; write pipeline_stages instead."
    elif wanted.pipeline_stages > 1:
        text = "divides a model.target by a plan that knows nothing of pipeline stages; write 1 for one of the two."
        yield "tensor_parallel", text


def _tensor(wanted: ParallelConfig, spec: DecoderSpec) -> Iterator[tuple[str, str]]:
    degree = wanted.tensor_parallel
    if degree == 1:
        return
    for name, size in (("heads", spec.heads), ("ffn_hidden", spec.ffn_hidden)):
        if size % degree:
            yield "tensor_parallel", f"{degree} does not divide model.{name}={size}; {_divisors(size, spec)}."
    if spec.vocab_size < degree:
        yield "tensor_parallel", f"{degree} ranks for a vocabulary of {spec.vocab_size} tokens; write less."
    if wanted.sequence_parallel and spec.seq_len % degree:
        text = f"the {degree} tensor-parallel ranks do not divide model.seq_len={spec.seq_len}; change one of them."
        yield "sequence_parallel", text


def _ulysses(wanted: ParallelConfig, spec: DecoderSpec) -> Iterator[tuple[str, str]]:
    degree = wanted.ulysses
    if degree == 1:
        return
    if spec.heads % degree:
        yield "ulysses", f"{degree} does not divide model.heads={spec.heads}; {_divisors(spec.heads)}."
    if spec.seq_len % degree:
        yield "ulysses", f"{degree} does not divide model.seq_len={spec.seq_len}; change one of them."


def _stages(wanted: ParallelConfig, spec: DecoderSpec) -> Iterator[tuple[str, str]]:
    if wanted.pipeline_stages > spec.layers:
        text = f"{wanted.pipeline_stages} stages for {spec.layers} blocks (model.layers); write at most {spec.layers}."
        yield "pipeline_stages", text
    elif wanted.runs > spec.layers:
        text = (
            f"dualpipev cuts {spec.layers} blocks (model.layers) into {wanted.runs} runs; write 1f1b, or more layers."
        )
        yield "pipeline_schedule", text


def _divisors(size: int, spec: DecoderSpec | None = None) -> str:
    """What to write instead: common divisors with all that has to be divided."""
    sizes = [size] if spec is None else [spec.heads, spec.ffn_hidden]
    fitting = [n for n in range(1, min(sizes) + 1) if all(one % n == 0 for one in sizes)]
    return f"write one of {', '.join(map(str, fitting))}"


def _with_pipeline(engine: Document) -> Iterator[Finding]:
    stage = stage_of(engine) or 0
    if stage > 1:
        text = (
            f"{stage} divides gradients, which a pipeline adds up over its micro-batches; with "
            f"parallel.pipeline_stages write 0 or 1 (or pipeline_stages: 1 with stage {stage})."
        )
        yield (ZERO, "stage"), text
    for key in ("offload_optimizer", "offload_param"):
        if offload_device(engine, key) != "none":
            yield (ZERO, key), "is not offered with parallel.pipeline_stages; remove one of them."
    if engine.get(("torch_autocast", "enabled")) is True:
        yield ("torch_autocast", "enabled"), "is not read by DeepSpeed's pipeline; write bf16 or fp16 instead."
