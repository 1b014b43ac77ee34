"""Reading a run's configuration: two files, flags and `--set` in; one frozen `Resolved` out, or all mistakes."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from largetrain.config.document import Document
from largetrain.config.lint import lint_engine
from largetrain.config.overrides import Overrides
from largetrain.config.parse import read_engine_file, read_run_file
from largetrain.config.parse_engine import parse_engine_text
from largetrain.config.resolve import resolve
from largetrain.config.resolved import Resolved
from largetrain.config.run_engine import lay_over, schedule_over
from largetrain.config.run_schema import check_run
from largetrain.config.schema import RunConfig
from largetrain.config.world import World, launch_world
from largetrain.errors import ConfigError, on_every_rank

__all__ = ["World", "launch_world", "load"]

DEFAULT_ENGINE = Path(__file__).with_name("default_engine.json")
DEFAULT_ENGINE_NAME = "built-in engine config"
DEFAULT_RUN_NAME = "built-in run config"
NO_FLAGS: Mapping[str, tuple[str, Any]] = MappingProxyType({})


@on_every_rank()
def load(
    ds_config: str | None,
    config: str | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] = NO_FLAGS,
    world_size: int = 1,
    world_size_source: str = "no launcher",
    local_world_size: int = 1,
) -> Resolved:
    """Read, check and resolve the configuration of a run.

    Precedence, highest first: `overrides` (`--set`), `flags`, the run YAML, the engine JSON, defaults.

    Args:
        ds_config: path of the engine JSON; None: ZeRO-2 in fp32, as shipped.
        config: path of the run YAML; None: the demo run.
        overrides: `KEY=VALUE`, as typed after `--set`.
        flags: dotted run key -> (the flag as typed, its value).
        world_size: ranks of the run.
        world_size_source: where that number came from, for error messages.
        local_world_size: ranks on this host, for the default number of threads.

    Raises:
        ConfigError: all mistakes found, each with file, line and key path.
    """
    problems: list[str] = []
    engine = _read(lambda: _engine_document(ds_config), problems)
    run = _read(lambda: read_run_file(config) if config is not None else Document(DEFAULT_RUN_NAME, {}), problems)
    if engine is None or run is None:
        raise ConfigError(problems)
    laid_problems, laid_notes = lay_over(engine, run)
    over = Overrides(engine, run)
    over.apply(flags, overrides)
    schedule_problems, schedule_notes = schedule_over(engine, run)
    lint = lint_engine(engine, for_a_run=True)
    run_config, run_problems = check_run(run)
    problems += [*laid_problems, *over.problems, *schedule_problems, *lint.problems, *run_problems]
    if problems or run_config is None:
        raise ConfigError(in_file_order(problems))
    engine.data = lint.data
    built_in_notes = _suit_built_in(engine, run_config) if ds_config is None else []
    world = World(world_size=world_size, local_world_size=local_world_size, source=world_size_source)
    resolved = resolve(engine, run, run_config, world)
    notes = (*laid_notes, *over.notes, *schedule_notes, *built_in_notes, *lint.warnings, *resolved.notes)
    return dataclasses.replace(resolved, notes=notes)


def in_file_order(problems: Sequence[str]) -> list[str]:
    """Problems of one file together and by line; the order of the files is kept."""
    files: list[str] = []
    keyed = []
    for problem in problems:
        match = re.match(r"(.+?):(\d+): ", problem)
        file, line = (match[1], int(match[2])) if match else (problem.partition(": ")[0], 0)
        if file not in files:
            files.append(file)
        keyed.append((files.index(file), line, problem))
    return [problem for _, _, problem in sorted(keyed, key=lambda item: item[:2])]


def _engine_document(path: str | None) -> Document:
    if path is not None:
        return read_engine_file(path)
    return parse_engine_text(DEFAULT_ENGINE_NAME, DEFAULT_ENGINE.read_text(encoding="utf-8"))


def _suit_built_in(engine: Document, run: RunConfig) -> list[str]:
    """A pipeline goes with ZeRO-1 at most: who names no engine JSON has not asked for the stage of the built-in one."""
    path = ("zero_optimization", "stage")
    if run.parallel.pipeline_stages == 1 or not engine.origin(path).startswith(DEFAULT_ENGINE_NAME):
        return []
    engine.set(path, 1)
    return ["zero_optimization.stage = 1 (built-in engine config, with pipeline stages)"]


def _read(reader: Callable[[], Document], problems: list[str]) -> Document | None:
    try:
        return reader()
    except ConfigError as error:
        problems += error.problems
        return None
