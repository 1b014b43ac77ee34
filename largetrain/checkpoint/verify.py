"""Whether a checkpoint is what was written. No torch."""

import hashlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from largetrain.checkpoint.manifest import (
    BEST_RECORD,
    FACTS,
    FileRecord,
    Manifest,
    damaged,
    parsed_json,
    read_json,
    read_manifest,
    read_small,
    regular_size,
    unsealed,
)
from largetrain.errors import CheckpointError

CHUNK_BYTES = 1 << 20
MOST_THREADS = 8
Check = Callable[[Path], str | None]
"""Says what is wrong with a checkpoint folder, in one line; None: nothing."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def problem_of(checkpoint: Path, *, contents: bool = False) -> str | None:
    """What is wrong with a checkpoint folder, in one line, or None when every file of its manifest is whole.

    Args:
        contents: also read every file and compare its SHA-256, several at a time.
    """
    with closing(_problems(checkpoint, contents)) as problems:
        return next(problems, None)


def contents_problem_of(checkpoint: Path) -> str | None:
    """As `problem_of`, contents included."""
    return problem_of(checkpoint, contents=True)


def problems_of(checkpoint: Path) -> list[str]:
    """Every file of a checkpoint that is not what was written, contents included, one line each; none: it is whole."""
    return list(_problems(checkpoint, contents=True))


def _problems(checkpoint: Path, contents: bool) -> Generator[str, None, None]:
    """What is wrong, file by file in order of names; nothing beyond a manifest that is wrong itself."""
    try:
        manifest = read_manifest(checkpoint)
    except (CheckpointError, OSError) as error:
        yield _words(checkpoint, error)
        return

    names = sorted({BEST_RECORD, *manifest.files})
    with closing(_checked(checkpoint, manifest, names, contents)) as problems:
        yield from (problem for _, problem in problems)


def problems_in_share(checkpoint: Path, rank: int, ranks: int) -> dict[str, str]:
    """Of the files that one of several ranks reads: the name of each that is not what was written -> what is wrong.

    The ranks' shares together are all files that the manifest names; a rank's own, where as many ranks wrote it.
    """
    try:
        manifest = read_manifest(checkpoint)
    except (CheckpointError, OSError) as error:
        return {"": _words(checkpoint, error)}
    return dict(_checked(checkpoint, manifest, shares(manifest, ranks)[rank], contents=True))


def shares(manifest: Manifest, ranks: int) -> list[list[str]]:
    """Names of the files that each of so many ranks reads."""
    found: list[list[str]] = [[] for _ in range(ranks)]
    if ranks == manifest.world_size:
        for name in manifest.files:
            found[0 if name == FACTS else int(Path(name).stem[5:]) % ranks].append(name)
        return found
    loads = [0] * ranks
    for name in sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name)):
        least = loads.index(min(loads))
        loads[least] += manifest.files[name].bytes
        found[least].append(name)
    return found


def _checked(
    checkpoint: Path, manifest: Manifest, names: Sequence[str], contents: bool
) -> Generator[tuple[str, str], None, None]:
    """Name and problem of each of these files that has one, in the given order."""

    def check(name: str) -> str | None:
        try:
            if name == BEST_RECORD:
                read_best_record(checkpoint, manifest.step)
                return None
            _check_size(checkpoint, name, manifest.files[name])
            if contents:
                _check_contents(checkpoint, name, manifest.files[name])
        except (CheckpointError, OSError) as error:
            return _words(checkpoint, error)
        return None

    if not contents:
        for name in names:
            if problem := check(name):
                yield name, problem
        return
    pool = ThreadPoolExecutor(max(1, min(MOST_THREADS, (os.cpu_count() or 1) // _neighbours())))
    try:
        for name, problem in zip(names, pool.map(check, names), strict=True):
            if problem:
                yield name, problem
    finally:
        pool.shutdown(cancel_futures=True)


def _neighbours() -> int:
    """Ranks of this host, which may read at the same time."""
    written = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(written) if written.isascii() and written.isdecimal() and int(written) else 1


def _words(checkpoint: Path, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{checkpoint} cannot be read ({error})"


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint, its `state` with what an evaluation after it found.

    Raises:
        CheckpointError: it is not what was written.
    """
    path = checkpoint / FACTS
    manifest = read_manifest(checkpoint)
    record = manifest.files[FACTS]
    _check_size(checkpoint, FACTS, record)
    content = read_small(path)
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise damaged(path, "is not what was written (its SHA-256 differs)")
    facts = parsed_json(path, content)
    if not isinstance(facts, dict):
        raise damaged(path, "is not what was written (no JSON object)")
    for key in ("state", "shared"):
        if not isinstance(facts.setdefault(key, {}), dict):
            raise damaged(path, f"is not what was written ({key} is no JSON object)")
    facts["state"].update(read_best_record(checkpoint, manifest.step))
    return facts


def read_best_record(checkpoint: Path, step: int) -> dict[str, Any]:
    """What `best.json` says; empty without one.

    Raises:
        CheckpointError: it is not what was written.
    """
    path = checkpoint / BEST_RECORD
    if not os.path.lexists(path):
        return {}
    content = unsealed(path, read_json(path))
    record = content.get("state")
    if not isinstance(record, dict):
        raise damaged(path, "is not what was written")
    if content.get("step") != step:
        raise damaged(path, f"is of another checkpoint than that of step {step}")
    return record


def _check_size(checkpoint: Path, name: str, record: FileRecord) -> None:
    path = checkpoint / name
    if path.parent != checkpoint and path.parent.is_symlink():
        raise damaged(path.parent, "is a symbolic link")
    try:
        size = regular_size(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(path, "is missing") from error
    if size != record.bytes:
        raise damaged(path, f"has {size} bytes, {record.bytes} were written")


def _check_contents(checkpoint: Path, name: str, record: FileRecord) -> None:
    if _hashed(checkpoint / name) != record.sha256:
        raise damaged(checkpoint / name, "is not what was written (its SHA-256 differs)")


def _hashed(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | NO_FOLLOW)) as file:
            if hasattr(os, "posix_fadvise"):  # the disk reads further ahead while this is hashed
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    return digest.hexdigest()
