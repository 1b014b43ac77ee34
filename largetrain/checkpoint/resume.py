"""Where a run writes, what it resumes from, and whether the two fit: decided by rank 0 for all."""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from largetrain.checkpoint.manager import complete_checkpoints, find_checkpoint, read_facts
from largetrain.errors import ConfigError

# what must be as it was for a bit-identical continuation, in the words of the message
SAME = {
    "world_size": "number of ranks",
    "zero_stage": "zero_optimization.stage",
    "dtype": "precision (fp16/bf16.enabled)",
    "batch": "batch sizes",
    "seed": "seed",
    "model": "model",
    "data": "training data, tokenizer or seq_len",
}


@dataclass(frozen=True)
class Start:
    """Where the run lives and where it goes on."""

    output: Path
    checkpoint: Path | None
    messages: tuple[str, ...]


def decide_start(name: str, output: str | None, resume: str | None, facts: dict[str, Any]) -> Start:
    """Choose output folder and checkpoint on rank 0 and give the decision to all ranks.

    Args:
        name: the run's name, for the default folder `runs/<name>-<time>`.
        output: folder asked for, or None.
        resume: None, "auto" or a path.
        facts: of this run, compared with the checkpoint's: the keys of `SAME`.

    Raises:
        ConfigError: on every rank: the folder holds another run, the checkpoint is unusable or does not fit.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = _decide(name, output, resume, facts)
        except ConfigError as error:
            outcome[1] = error.problems
        except OSError as error:
            outcome[1] = (f"output: {error}. Name a folder that can be written with --output",)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise ConfigError(outcome[1])
    start: Start = outcome[0]
    return start


def _decide(name: str, output: str | None, resume: str | None, facts: dict[str, Any]) -> Start:
    folder = Path(output) if output is not None else _default_output(name, resume)
    checkpoint, messages = None, []
    if resume is not None:
        checkpoint, skipped = find_checkpoint(resume, folder)
        messages = [f"passed over: {problem}" for problem in skipped]
        if checkpoint is None:
            messages.append(f"--resume auto: no complete checkpoint in {folder / 'checkpoints'}; starting anew")
        else:
            _check_fit(checkpoint, facts)
            messages.append(f"resuming from {checkpoint}")
    elif complete_checkpoints(folder / "checkpoints") or (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"--output {folder} already holds a run. Add --resume to go on with it, or name another folder"
        )
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Start(folder, checkpoint, tuple(messages))


def _default_output(name: str, resume: str | None) -> Path:
    """`runs/<name>-<time>`, or the run that an explicit checkpoint or `auto` belongs to."""
    if resume not in (None, "auto"):
        path = Path(str(resume))
        for folder in (path, path.parent, path.parent.parent):
            if (folder / "checkpoints").is_dir():
                return folder
    if resume == "auto":
        stamp = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
        earlier = sorted(
            folder
            for folder in Path("runs").glob(f"{name}-*")
            if stamp.fullmatch(folder.name) and complete_checkpoints(folder / "checkpoints")
        )
        if earlier:
            return earlier[-1]
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_fit(checkpoint: Path, facts: dict[str, Any]) -> None:
    saved = read_facts(checkpoint)
    problems = [
        f"--resume {checkpoint}: {words} was {saved.get(key)}, now {facts[key]}"
        for key, words in SAME.items()
        if saved.get(key) != facts[key]
    ]
    if problems:
        raise ConfigError([*problems, "A checkpoint continues on the layout that wrote it; restore the values named"])
