"""What the run YAML names must be there, and every key given must change something.

Nothing of the user's is imported and no folder is made: these are the mistakes that cost nothing to find.
"""

import os
from collections.abc import Iterator
from typing import Any

from largetrain.config.decoder_spec import USED_WITH_MODEL_TARGET
from largetrain.config.document import Document, KeyPath, shown
from largetrain.config.layout_rules import PIPELINE_KEYS, contradictions
from largetrain.config.schedule_rules import schedule_problems
from largetrain.config.schema import LanguageRun, RunConfig
from largetrain.config.target import find_target
from largetrain.config.vision_rules import data_problems
from largetrain.config.vision_schema import ClassificationRun, SegmentationRun
from largetrain.config.world import World
from largetrain.errors import ConfigError

USED_WITH_DATA_TARGET = {"target", "args", "workers"}


def expand_home(run: RunConfig) -> RunConfig:
    """`~` in the output folder and the tokenizer's path becomes the home folder."""
    if run.output is not None:
        run = run.model_copy(update={"output": os.path.expanduser(run.output)})
    # text files are expanded where they are opened: there may be a list of them
    keys = ("tokenizer",) if isinstance(run, LanguageRun) else ("source", "validation")
    paths = {
        key: os.path.expanduser(value)
        for key in keys
        if isinstance(value := getattr(run.data, key, None), str) and value.startswith("~")
    }
    if paths:
        run = run.model_copy(update={"data": run.data.model_copy(update=paths)})
    return run


def run_problems(run: RunConfig, document: Document) -> list[str]:
    """One line, with its place, for each key that changes nothing and each name that leads nowhere."""
    found: list[tuple[KeyPath, str]] = []
    if isinstance(run, LanguageRun):
        found += [(("data", key), text) for key, text in _unused_data_keys(run)]
    if isinstance(run, ClassificationRun | SegmentationRun):
        found += [*data_problems(run.data), *_unused_vision_keys(run)]
    if run.schedule is not None:
        found += schedule_problems(run.schedule, run.epochs)
    for section, target in (("model", run.model.target), ("data", run.data.target)):
        if target is not None:
            found += _missing_module(section, target)
    if isinstance(run, LanguageRun) and run.data.target is None:
        found += [*_missing_texts("source", run.data.source), *_missing_texts("validation", run.data.validation or [])]
    problems = [document.problem(path, text) for path, text in found]
    if run.output is not None and (text := output_problem(run.output)):
        problems.append(document.problem(("output",), text))
    return problems


def backend_problems(run: RunConfig, document: Document, backend: str | None, world: World) -> list[str]:
    """Keys that contradict the backend, as far as it is known (None: the model decides)."""
    found: list[tuple[KeyPath, str]] = list(contradictions(run, backend))
    if backend in ("deepspeed", "pipeline") and run.ema is not None:
        found.append((("ema",), "is kept by backend ddp alone; write backend: ddp, or remove it."))
    shared = run.sync_batch_norm_ranks
    if isinstance(shared, int) and world.world_size % shared:
        text = f"{shared} does not divide the {world.world_size} ranks ({world.source}); write a divisor, or all."
        found.append((("sync_batch_norm_ranks",), text))
    if shared == 1 and isinstance(shared, int):
        found.append((("sync_batch_norm_ranks",), "1 shares nothing; write sync_batch_norm: off instead."))
    if shared != "all" and run.sync_batch_norm in ("off", False):
        found.append((("sync_batch_norm_ranks",), "has no effect with sync_batch_norm: off; remove one of them."))
    return [document.problem(path, text) for path, text in found]


def used_keys(run: RunConfig) -> dict[str, Any]:
    """The run as plain data, without keys that another one makes idle: what may be written into a run YAML.

    It goes with the resolved engine JSON, where the engine section and lr_for_batch have had their effect already.
    """
    run = run.model_copy(update={"engine": {}, "parameters": run.parameters.model_copy(update={"lr_for_batch": None})})
    content: dict[str, Any] = run.model_dump(mode="json")
    if not isinstance(run, LanguageRun):
        # which data keys have an effect depends on the source: those at their default say nothing new
        shown_keys: dict[str, Any] = run.model_dump(mode="json", exclude_defaults=True)
        for section, key in (("model", "name"), ("data", "source")):
            holder = getattr(run, section)
            if holder.target is None:
                shown_keys[section] = {key: getattr(holder, key), **shown_keys.get(section, {})}
        return {"task": run.task, "name": run.name, "seed": run.seed, **shown_keys}
    idle = {("data", key) for key, _ in _unused_data_keys(run, given_only=False)}
    if run.model.target is not None:
        idle |= {("model", key) for key in content["model"] if key not in USED_WITH_MODEL_TARGET}
    if run.parallel.pipeline_stages == 1:
        idle |= {("parallel", key) for key in PIPELINE_KEYS}
    for section, key in idle:
        del content[section][key]
    return content


def output_problem(folder: str) -> str | None:
    """Why an output folder cannot be used, as far as that shows without making it; None when it can."""
    if not folder.strip() or "\0" in folder:
        return f"{shown(folder)} is no folder; name one, or leave it out for runs/<name>-<time>/."
    place = os.path.abspath(folder)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"{place} is a file, not a folder; name another."
    if not os.access(place, os.W_OK | os.X_OK):
        return f"the folder {place} cannot be written by you; name another."
    return None


def _unused_data_keys(run: LanguageRun, given_only: bool = True) -> Iterator[tuple[str, str]]:
    """Keys of the data section without effect beside others, and why."""
    data = run.data
    keys = data.model_fields_set if given_only else type(data).model_fields
    for key in sorted(keys):
        if data.target is not None and key not in USED_WITH_DATA_TARGET:
            # with the built-in decoder the tokenizer still says how many rows vocab_size "auto" is
            if key == "tokenizer" and run.model.target is None and run.model.vocab_size == "auto":
                continue
            yield (
                key,
                (
                    f"is for the text sources and has no effect with data.target={data.target!r}; remove it, or hand "
                    f"it to your class under data.args."
                ),
            )
        elif key == "validation_fraction" and data.validation is not None:
            yield key, "has no effect beside data.validation, which names the held-out files; remove one of them."


def _unused_vision_keys(run: ClassificationRun | SegmentationRun) -> Iterator[tuple[KeyPath, str]]:
    """Keys of the model section without effect beside others, and why."""
    model = run.model
    if model.target is not None and "name" in model.model_fields_set:
        yield ("model", "name"), f"has no effect with model.target={model.target!r}; remove one of them."
    if model.pretrained_backbone and isinstance(run, ClassificationRun):
        yield ("model", "pretrained_backbone"), "is for segmentation models; write model.pretrained."
    if model.pretrained_backbone and model.pretrained:
        yield ("model", "pretrained_backbone"), "has no effect beside model.pretrained; remove one of them."


def _missing_module(section: str, target: str) -> Iterator[tuple[tuple[str, str], str]]:
    try:
        find_target(target, f"{section}.target")
    except ConfigError as error:
        yield (section, "target"), error.problems[0].partition(": ")[2]


def _missing_texts(key: str, named: str | list[str]) -> Iterator[tuple[tuple[str, str], str]]:
    for entry in [named] if isinstance(named, str) else named:
        if entry != "builtin" and not os.path.lexists(os.path.expanduser(entry)):
            text = f"{entry} does not exist (looked from {os.getcwd()}). Name a file or folder, or `builtin`."
            yield ("data", key), text
