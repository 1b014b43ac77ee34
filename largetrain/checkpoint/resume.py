"""Where a run writes, what it resumes from, and whether the two fit: decided by rank 0 for all.

What has to be as it was (`SAME`) is refused when it differs, with both values. The layout may change: checkpoints do
not depend on it. Optimizer parameters, schedule and length may change: the configuration holds, not what the
checkpoint remembers. Every change is announced.
"""

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largetrain.checkpoint.folder import (
    complete_checkpoints,
    find_checkpoint,
    newer_than,
    pointed_at,
    read_facts,
    step_of,
)
from largetrain.checkpoint.together import led_by_first
from largetrain.checkpoint.verify import Check, read_best_record
from largetrain.checkpoint.writer import point
from largetrain.errors import ConfigError

# what must be as it was -> its name in messages
SAME = {
    "global_batch": "global batch",
    "optimizer_type": "optimizer.type",
    "seed": "seed",
    "model": "model",
    "data": "data (content, split, and how samples are made of it)",
}
# what an evaluation needs of it
SAME_WEIGHTS = {"model": SAME["model"], "classes": "classes of the data"}
# what a bit-identical continuation needs; on another layout it is the same up to the rounding of sums
LAYOUT = {
    "backend": "backend",
    "world_size": "number of ranks",
    "tensor_parallel": "parallel.tensor_parallel",
    "pipeline_stages": "parallel.pipeline_stages",
    "stage_bounds": "first layers of the pipeline stages",
    "sequence_parallel": "parallel.sequence_parallel",
    "ulysses": "parallel.ulysses",
    "zero_stage": "zero_optimization.stage",
    "offload": "offload",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "groups": "parameters",
}
# what checkpoints from before there was such a key were trained with
ABSENT = {"tensor_parallel": 1, "pipeline_stages": 1, "stage_bounds": [], "sequence_parallel": False, "ulysses": 1}
# what may change -> its name in messages
FREE = {
    "dtype": "precision (fp16/bf16.enabled)",
    "optimizer": "optimizer.params",
    "scheduler": "scheduler",
    "schedule": "schedule",
    "parameters": "parameters",
    "ema": "ema",
}


@dataclass(frozen=True)
class Start:
    """Where the run lives and where it goes on."""

    output: Path
    checkpoint: Path | None
    saved: dict[str, Any] | None
    """Facts of the checkpoint, as `CheckpointManager.save` was given them."""
    messages: tuple[str, ...]
    run_id: str
    """Of the run that writes; a run that goes on in its own folder keeps it."""
    evaluated: bool = True
    """False: the run goes on in its own folder, and its metrics have no evaluation after the checkpoint's update."""


def decide_start(name: str, output: str | None, resume: str | None, *, writes: bool = True) -> Start:
    """Choose output folder and checkpoint on rank 0 and give the decision to all ranks, which read it together.

    Args:
        name: the run's name, for the default folder `runs/<name>-<time>`.
        output: folder asked for, or None.
        resume: None, "auto", "best" or a path.
        writes: False: the checkpoint is only read; no folder is made, and there must be one to resume from.

    Raises:
        ConfigError: on every rank: the folder holds another run or cannot be written, the checkpoint is unusable.
    """
    decide = _decide if writes else _found
    return led_by_first(lambda check: decide(name, output, resume, check))


def check_fit(start: Start, facts: dict[str, Any], same: Mapping[str, str] = SAME) -> list[str]:
    """Compare this run's facts with the checkpoint's; one line for each difference that is allowed.

    Args:
        facts: the keys of `SAME`, `LAYOUT` and `FREE`, plain JSON types.
        same: what has to be as it was, with its words.

    Raises:
        ConfigError: what must be as it was is not; names every value then and now.
    """
    if start.saved is None:
        return []
    saved = start.saved
    problems = [
        f"--resume {start.checkpoint}: {where} was {then}, now {now}"
        for key, words in same.items()
        for where, then, now in _differences(words, saved.get(key), facts[key])
    ]
    if problems:
        problems[-1] += f". {_advice(saved, facts, same)}"
        raise ConfigError(problems, on_all_ranks=True)
    moved = [f"resume: {line}" for line in _changes(LAYOUT, saved, facts)]
    if moved:
        moved.append("resume: on this layout the run goes on up to the rounding of sums, no longer to the bit")
    return moved + [f"resume: {line}: the new value holds from here on" for line in _changes(FREE, saved, facts)]


def same_layout(start: Start, facts: dict[str, Any]) -> bool:
    """Whether the run goes on exactly as it was laid out."""
    return start.saved is not None and not _changes(LAYOUT, start.saved, facts)


def _changes(keys: Mapping[str, str], saved: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    return [
        f"{where} was {then}, now {now}"
        for key, words in keys.items()
        for where, then, now in _differences(words, saved.get(key, ABSENT.get(key)), facts[key])
    ]


def _advice(saved: dict[str, Any], facts: dict[str, Any], same: Mapping[str, str]) -> str:
    """The way out of a refusal."""
    if "global_batch" in same and saved.get("global_batch") != facts["global_batch"]:
        micro_batch, ranks = facts["micro_batch"], facts["world_size"]
        rounds, rest = divmod(saved["global_batch"], micro_batch * ranks)
        if not rest and rounds:
            return (
                f"Samples are taken in the order of the global batch: keep it with --set "
                f"gradient_accumulation_steps={rounds}, and without train_batch_size; restore what else is named"
            )
        return (
            f"Samples are taken in the order of the global batch, and micro-batch {micro_batch} x {ranks} ranks does "
            f"not divide {saved['global_batch']}: change train_micro_batch_size_per_gpu or the number of ranks; "
            f"restore what else is named"
        )
    return "Restore the values named, or begin anew from the weights alone with init_from"


def _differences(where: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each value that differs, by its path; absent ones are None."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _differences(f"{where}.{key}", then.get(key), now.get(key))
    elif then != now:
        yield where, then, now


def _found(name: str, output: str | None, resume: str | None, check: Check) -> Start:
    """The checkpoint to read, where nothing is written."""
    folder = Path(output) if output is not None else _default_output(name, resume)
    if resume is None:
        return Start(folder, None, None, (), "")
    checkpoint, skipped = find_checkpoint(resume, folder, check)
    if checkpoint is None:
        raise ConfigError(f"--resume {resume}: no complete checkpoint in {folder / 'checkpoints'}; name one")
    messages = tuple(f"passed over: {problem}" for problem in skipped)
    return Start(folder, checkpoint, read_facts(checkpoint), messages, "")


def _decide(name: str, output: str | None, resume: str | None, check: Check) -> Start:
    folder = Path(output) if output is not None else _default_output(name, resume)
    checkpoint, saved, messages = None, None, []
    if resume is not None:
        checkpoint, skipped = find_checkpoint(resume, folder, check)
        messages = [f"passed over: {problem}" for problem in skipped]
        if checkpoint is None:
            messages.append(f"--resume auto: no complete checkpoint in {folder / 'checkpoints'}; starting anew")
        else:
            saved = read_facts(checkpoint)
            messages.append(f"resuming from {checkpoint}")
            messages += _left_behind(checkpoint, folder)
            messages += _pointed_at_again(checkpoint, folder)
    own = checkpoint is not None and (folder / "checkpoints").absolute() == checkpoint.absolute().parent
    if not own and resume != "auto" and _holds_run(folder):
        go_on = "Add --resume to go on with it, or name" if resume is None else "The checkpoint is not its own; name"
        raise ConfigError(f"--output {folder} already holds a run. {go_on} another folder")
    _make_writable(folder)
    run_id = str(saved["run_id"]) if own and saved is not None else uuid.uuid4().hex
    evaluated = not own or saved is None or _is_evaluated(folder / "metrics.jsonl", saved["state"]["step"])
    return Start(folder, checkpoint, saved, tuple(messages), run_id, evaluated)


def _is_evaluated(metrics: Path, step: int) -> bool:
    """Whether the metrics have an evaluation after this update; it may have been given up, or cut short by a kill."""
    if not metrics.is_file():
        return False
    with metrics.open("rb") as rows:
        return any(b'"eval/' in row and re.match(rb'\{"step": %d,' % step, row) and row[-2:] == b"}\n" for row in rows)


def _pointed_at_again(checkpoint: Path, folder: Path) -> list[str]:
    """Let `latest` name the run's newest checkpoint, and `best` if it has a record of that; a kill may come between.

    A run that is complete writes no other. Returns what could not be done.
    """
    place, checkpoint = (folder / "checkpoints").absolute(), checkpoint.absolute()
    step = step_of(checkpoint)
    if place != checkpoint.parent or newer_than(place, step):
        return []
    try:
        for name in ("latest", *(["best"] if read_best_record(checkpoint, step) else [])):
            if pointed_at(place / name) != checkpoint:
                point(place / name, checkpoint)
    except OSError as error:
        return [f"warning: checkpoints/{name} cannot name {checkpoint.name}: {error}"]
    return []


def _left_behind(checkpoint: Path, folder: Path) -> list[str]:
    if (folder / "checkpoints").absolute() != checkpoint.absolute().parent:
        return []
    newer = [path.name for path in newer_than(folder / "checkpoints", step_of(checkpoint.absolute()))]
    if not newer:
        return []
    return [f"{', '.join(newer)}: left behind by this resume; renamed abandoned-... at the next checkpoint"]


def _holds_run(folder: Path) -> bool:
    return bool(complete_checkpoints(folder / "checkpoints")) or (folder / "metrics.jsonl").exists()


def _make_writable(folder: Path) -> None:
    """Make the run's folders, and find out now whether they can be written.

    Raises:
        ConfigError: they cannot.
    """
    probe = folder / "checkpoints" / ".writable"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        at = f" ({error.filename})" if error.filename not in (None, str(folder), str(probe)) else ""
        raise ConfigError(
            f"--output {folder}: cannot be written: {reason}{at}. Name a folder that can be made or written"
        ) from error


def _default_output(name: str, resume: str | None) -> Path:
    """`runs/<name>-<time>`, or the run that an explicit checkpoint or `auto` belongs to."""
    if resume not in (None, "auto", "best"):
        path = Path(str(resume)).absolute()
        for folder in (path, path.parent, path.parent.parent):
            if (folder / "checkpoints").is_dir():
                return folder
    if resume in ("auto", "best"):
        stamp = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
        earlier = sorted(
            folder
            for folder in Path("runs").glob(f"{name}-*")
            if stamp.fullmatch(folder.name) and complete_checkpoints(folder / "checkpoints")
        )
        if earlier:
            return earlier[-1]
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
