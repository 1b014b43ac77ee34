"""From two checked documents to one `Resolved`: vocabulary, decoder sizes, batch, autos, threads, length."""

import copy
import os
from typing import Any, TypeVar

from largetrain.config.autos import Autos, complete_schedule
from largetrain.config.batch import ACCUMULATION, MICRO, TOTAL, resolve_batch
from largetrain.config.decoder_spec import DecoderSpec, loss_chunk_tokens, resolve_decoder, target_problems
from largetrain.config.document import Document
from largetrain.config.layout_rules import engine_problems, lay_out, micro_batch_problems
from largetrain.config.new_names import use_new_names
from largetrain.config.resolved import Resolved
from largetrain.config.run_rules import backend_problems, expand_home, run_problems
from largetrain.config.schema import LanguageRun, RunConfig
from largetrain.config.settle import settle
from largetrain.config.vocab import vocab_size_of
from largetrain.config.world import World
from largetrain.errors import ConfigError

DEFAULT_STEPS = 300


def resolve(engine: Document, run_document: Document, run: RunConfig, world: World) -> Resolved:
    """Derive every number of the run.

    Args:
        engine: the linted engine JSON.
        run_document: where the run's keys were written, for error messages.
        run: the checked run config.
        world: ranks, and where their number came from.

    Raises:
        ConfigError: all that does not fit together.
    """
    engine = Document(engine.file, copy.deepcopy(engine.data), engine.origins)
    notes = use_new_names(engine)
    run = expand_home(run)
    problems = run_problems(run, run_document)
    decoder = None
    if isinstance(run, LanguageRun):
        run, decoder = _model(run, run_document, problems, notes)
    layout, layout_problems = lay_out(run, run_document, decoder, world)
    problems += layout_problems + engine_problems(run, engine)
    # with a layout that does not come out the triple of plain data parallelism would only confuse
    batch, batch_problems, batch_notes = (
        resolve_batch(engine, layout, world.source) if layout is not None else (None, [], [])
    )
    if batch is not None:
        problems += micro_batch_problems(run, run_document, batch.gradient_accumulation_steps)
        notes += _scale_learning_rate(engine, run, run_document, batch.global_batch, problems)
    autos = Autos(engine, decoder, own_optimizer_needed=not isinstance(run, LanguageRun))
    autos.resolve()
    if decoder is None and isinstance(run, LanguageRun) and run.model.target is None:
        autos.problems = []  # the sizes are wrong: what depends on them is not known yet
    problems += batch_problems + autos.problems
    notes += batch_notes + autos.notes
    backend = _backend(run, decoder)
    if backend is not None:
        settle_problems, settle_notes = settle(engine, backend, world.world_size)
        problems += settle_problems
        notes += settle_notes
    else:
        notes.append("backend = auto: the model decides at the start (ddp for a conv net, else deepspeed)")
    problems += backend_problems(run, run_document, backend, world)
    if problems or batch is None or layout is None:
        raise ConfigError(problems)
    for key, value in ((TOTAL, batch.global_batch), (MICRO, batch.micro_batch)):
        engine.set((key,), value)
    engine.set((ACCUMULATION,), batch.gradient_accumulation_steps)
    run = _threads(run, world, notes)
    if run.steps is None and run.epochs is None:
        run = run.model_copy(update={"steps": DEFAULT_STEPS})
        notes.append(f"steps = {DEFAULT_STEPS} (neither steps nor epochs is given)")
    if run.steps is not None:
        notes += complete_schedule(engine.data, run.steps)
    return Resolved(run, engine.data, batch, run.steps, decoder, tuple(notes), backend, engine, layout)


def _backend(run: RunConfig, decoder: DecoderSpec | None) -> str | None:
    """The backend as far as it is known without the model; the built-in decoder has neither convolutions nor BN."""
    if run.backend != "auto":
        return run.backend
    if run.parallel.pipeline_stages > 1:
        return "pipeline"
    is_decoder = decoder is not None or (isinstance(run, LanguageRun) and run.model.target is None)
    return "deepspeed" if is_decoder else None


def _scale_learning_rate(
    engine: Document, run: RunConfig, document: Document, global_batch: int, problems: list[str]
) -> list[str]:
    """`parameters.lr_for_batch`: the linear rule, on the optimizer's rate before anything is derived from it."""
    meant_for, path = run.parameters.lr_for_batch, ("optimizer", "params", "lr")
    if meant_for is None:
        return []
    rate = engine.get(path)
    if not isinstance(rate, int | float):
        text = "scales optimizer.params.lr, which must be a number then; write it in the engine JSON."
        problems.append(document.problem(("parameters", "lr_for_batch"), text))
        return []
    if rate * global_batch == rate * meant_for:
        return []
    scaled = rate * global_batch / meant_for
    engine.set(path, scaled)
    return [f"optimizer.params.lr = {scaled:.6g} ({rate:g} x global batch {global_batch} / {meant_for})"]


def _model(
    run: LanguageRun, document: Document, problems: list[str], notes: list[str]
) -> tuple[LanguageRun, DecoderSpec | None]:
    """The vocabulary's size and the decoder's; problems carry the place of the key that they name."""
    try:
        size = run.model.vocab_size
        if size == "auto":
            if run.model.target is not None and run.data.target is not None:
                raise ConfigError(
                    'model.vocab_size: "auto" needs a tokenizer, but model and data are your own; write it.'
                )
            size = vocab_size_of(run.data.tokenizer)
            notes.append(f"model.vocab_size = {size} (auto: the tokenizer {run.data.tokenizer})")
            run = _with(run, "model", vocab_size=size)
        run = _with(run, "model", loss_chunk_tokens=loss_chunk_tokens(run.model, size))
        _check_vocabulary(run, size)
        if run.model.target is not None:
            problems += [_placed(document, line) for line in target_problems(run.model)]
            return run, None
        return run, resolve_decoder(run.model, size)
    except ConfigError as error:
        problems += [_placed(document, line) for line in error.problems]
        return run, None


def _check_vocabulary(run: LanguageRun, size: int) -> None:
    """Rows for every token id: fewer would index past the embedding."""
    if run.data.target is None and size < (needed := vocab_size_of(run.data.tokenizer)):
        raise ConfigError(
            f"model.vocab_size: {size} is less than the {needed} token ids of data.tokenizer={run.data.tokenizer}; "
            f'write at least {needed}, or "auto".'
        )


def _placed(document: Document, line: str) -> str:
    """Put the file and line in front of a message that begins with the key path."""
    key, colon, text = line.partition(": ")
    if not colon:
        return f"{document.file}: {line}"
    return document.problem(tuple(key.split(".")), text)


def _threads(run: RunConfig, world: World, notes: list[str]) -> RunConfig:
    if run.runtime.threads != "auto":
        return run
    written = os.environ.get("OMP_NUM_THREADS", "")
    if written == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        written = ""  # torchrun's own default, not the user's wish
    if written.isascii() and written.isdigit() and int(written) > 0:
        threads, why = int(written), "auto: OMP_NUM_THREADS"
    else:
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // world.local_world_size)
        why = f"auto: {cores} cores / {world.local_world_size} ranks on this host"
    notes.append(f"runtime.threads = {threads} ({why})")
    return _with(run, "runtime", threads=threads)


AnyRun = TypeVar("AnyRun", bound=RunConfig)


def _with(run: AnyRun, section: str, **values: Any) -> AnyRun:
    return run.model_copy(update={section: getattr(run, section).model_copy(update=values)})
