"""Which checkpoint of ours a path means, for the tools and for `init_from`. No torch."""

import os
from pathlib import Path

from largetrain.checkpoint.folder import all_checkpoints, pointed_at
from largetrain.checkpoint.manifest import MANIFEST, STEP_NAME
from largetrain.checkpoint.verify import Check, contents_problem_of
from largetrain.errors import ConfigError

POINTERS = ("best", "latest")


def checkpoint_at(path: Path, key: str, check: Check = contents_problem_of) -> Path | None:
    """The complete checkpoint that `path` means; None when there is nothing of ours.

    Args:
        path: a checkpoint, a run's output folder, its `checkpoints/` (the newest complete one of either), or
            `RUN/best`, `RUN/latest`, `RUN/checkpoints/best`.
        key: where the path was written, for messages.
        check: of one of ours; `problem_of` leaves the contents of its files out.

    Raises:
        ConfigError: it is one of ours and not complete, or a run without any.
    """
    if path.name in POINTERS and not path.is_dir():
        return _pointed(path, key, check)
    if is_checkpoint(path):
        if problem := check(path):
            raise ConfigError(f"{key}: {problem}.")
        return path
    folder = checkpoints_folder(path)
    if folder is None:
        return None
    problems = []
    for found in reversed(all_checkpoints(folder)):
        problem = check(found)
        if problem is None:
            return found
        problems.append(f"{key}: {problem}.")
    raise ConfigError([f"{key}: {folder} holds no complete checkpoint.", *problems])


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is meant as one checkpoint, complete or not."""
    return path.is_dir() and bool(STEP_NAME.fullmatch(path.absolute().name) or os.path.lexists(path / MANIFEST))


def checkpoints_folder(path: Path) -> Path | None:
    """The `checkpoints/` of a run's output folder, or `path` itself when checkpoints lie in it; else None."""
    if (path / "checkpoints").is_dir():
        return path / "checkpoints"
    if path.is_dir() and (path.absolute().name == "checkpoints" or all_checkpoints(path)):
        return path
    return None


def existing(path: str, key: str) -> Path:
    """The path, which has to be there.

    Raises:
        ConfigError: it is not.
    """
    given = Path(os.path.expanduser(path)) if path.strip() else None
    if given is None:
        raise ConfigError(f"{key}: an empty path; name a checkpoint, a run, or a file of weights.")
    if not os.path.lexists(given) and not (given.name in POINTERS and (given.parent / "checkpoints").is_dir()):
        raise ConfigError(f"{key}: there is no {given} (looked from {os.getcwd()}).")
    return given


def _pointed(path: Path, key: str, check: Check) -> Path | None:
    pointer = path.parent / "checkpoints" / path.name if (path.parent / "checkpoints").is_dir() else path
    if not pointer.is_file():
        raise ConfigError(f"{key}: {pointer.parent} names no {path.name} checkpoint.")
    found = pointed_at(pointer)
    if found is None:
        raise ConfigError(f"{key}: {pointer} names no checkpoint that is there.")
    if problem := check(found):
        raise ConfigError(f"{key}: {problem}.")
    return found
