"""The run YAML's `engine` and `schedule` sections, laid over the engine JSON before it is linted."""

from collections.abc import Iterator
from typing import Any

from largetrain.config.document import Document, KeyPath, dotted, shown

TYPED = ("optimizer", "scheduler")


def lay_over(engine: Document, run: Document) -> tuple[list[str], list[str]]:
    """Put the keys of the run's `engine` section into the engine document, in place.

    An optimizer or scheduler that names its type replaces the file's section: parameters of another class would be
    left over otherwise. null takes a key out.

    Returns:
        problems and notes; a note for each key that the file had otherwise.
    """
    wanted = run.get(("engine",))
    if not isinstance(wanted, dict):  # absent, or the schema will say what is wrong
        return [], []
    notes: list[str] = []
    for section in TYPED:
        given, before = wanted.get(section), engine.get((section, "type"))
        if isinstance(given, dict) and "type" in given:
            if before is not None and before != given["type"]:
                place = run.origin(("engine", section, "type"))
                notes.append(
                    f"{section} = {shown(given['type'])} ({place}), over {shown(before)} in {engine.origin((section,))}"
                )
            _forget(engine, (section,))
    problems = []
    for path, value in list(_leaves(wanted, ())):
        place, before = run.origin(("engine", *path)), engine.get(path)
        if value is None:
            _forget(engine, path)
            continue
        if before is not None and before != value and path[0] not in TYPED:
            notes.append(f"{dotted(path)} = {shown(value)} ({place}), over {shown(before)} in {engine.origin(path)}")
        try:
            engine.set(path, value, place)
        except KeyError as error:
            problems.append(f"{place}: engine.{dotted(path)}: {error.args[0]} is not a section in {engine.file}.")
    return problems, notes


def schedule_over(engine: Document, run: Document) -> tuple[list[str], list[str]]:
    """Take the engine JSON's scheduler out where the run brings its own `schedule`; problems and notes."""
    if not isinstance(run.get(("schedule",)), dict) or "scheduler" not in engine.data:
        return [], []
    place = engine.origin(("scheduler",))
    if place.startswith("--set") or run.get(("engine", "scheduler")) is not None:
        return [run.problem(("schedule",), f"is given beside the scheduler of {place}; keep one of them.")], []
    kind = engine.get(("scheduler", "type"))
    _forget(engine, ("scheduler",))
    return [], [f"schedule ({run.origin(('schedule',))}) takes the place of the scheduler {kind} in {place}"]


def _forget(engine: Document, path: KeyPath) -> None:
    engine.remove(path)
    for other in [other for other in engine.origins if other[: len(path)] == path]:
        del engine.origins[other]


def _leaves(value: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, below in value.items():
        if isinstance(below, dict) and below:
            yield from _leaves(below, (*path, key))
        else:
            yield (*path, key), below
