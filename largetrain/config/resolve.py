"""From two checked documents to one `Resolved`: vocabulary, decoder sizes, batch, autos, threads, length."""

import copy
import os
from typing import Any

from largetrain.config.autos import Autos, complete_schedule
from largetrain.config.batch import ACCUMULATION, MICRO, TOTAL, resolve_batch
from largetrain.config.combinations import combination_problems
from largetrain.config.decoder_spec import DecoderSpec, loss_chunk_tokens, resolve_decoder, target_problems
from largetrain.config.document import Document
from largetrain.config.honoured import ineffective_keys, refused_keys
from largetrain.config.new_names import use_new_names
from largetrain.config.resolved import Resolved
from largetrain.config.run_rules import expand_home, run_problems
from largetrain.config.schema import RunConfig
from largetrain.config.served import serve
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
    problems = [*run_problems(run, run_document), *refused_keys(engine)]
    run, decoder = _model(run, run_document, problems, notes)
    batch, batch_problems, batch_notes = resolve_batch(engine, world.world_size, world.source)
    autos = Autos(engine, decoder)
    autos.resolve()
    if decoder is None and run.model.target is None:
        autos.problems = []  # the sizes are wrong: what depends on them is not known yet
    problems += batch_problems + autos.problems
    notes += batch_notes + autos.notes + serve(engine) + ineffective_keys(engine)
    problems += combination_problems(engine, world.world_size)
    if problems or batch is None:
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
    return Resolved(run, engine.data, batch, run.steps, decoder, tuple(notes))


def _model(
    run: RunConfig, document: Document, problems: list[str], notes: list[str]
) -> tuple[RunConfig, DecoderSpec | None]:
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


def _check_vocabulary(run: RunConfig, size: int) -> None:
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


def _with(run: RunConfig, section: str, **values: Any) -> RunConfig:
    return run.model_copy(update={section: getattr(run, section).model_copy(update=values)})
