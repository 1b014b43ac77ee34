"""Whether a checkpoint is what was written. No torch."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
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

CHUNK_BYTES = 4 << 20
MOST_THREADS = 8
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def problem_of(checkpoint: Path, *, contents: bool = False) -> str | None:
    """What is wrong with a checkpoint folder, in one line, or None when every file of its manifest is whole.

    Args:
        contents: also read every file and compare its SHA-256, several at a time.
    """
    try:
        manifest = read_manifest(checkpoint)
        for name, record in manifest.files.items():
            _check_size(checkpoint, name, record)
        read_best_record(checkpoint)
        if contents:
            _check_contents(checkpoint, manifest)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{checkpoint} cannot be read ({error})"
    return None


def problems_of(checkpoint: Path) -> list[str]:
    """Every file of a checkpoint that is not what was written, contents included, one line each; none: it is whole."""
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name, record in sorted(manifest.files.items()):
        try:
            _check_size(checkpoint, name, record)
            _check_contents(checkpoint, Manifest(manifest.run_id, manifest.step, {name: record}))
        except (CheckpointError, OSError) as error:
            found.append(str(error))
    try:
        read_best_record(checkpoint)
    except CheckpointError as error:
        found.append(str(error))
    return found


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint, its `state` with what an evaluation after it found.

    Raises:
        CheckpointError: it is not what was written.
    """
    path = checkpoint / FACTS
    record = read_manifest(checkpoint).files[FACTS]
    _check_size(checkpoint, FACTS, record)
    content = read_small(path)
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise damaged(path, "is not what was written (its SHA-256 differs)")
    facts = parsed_json(path, content)
    if not isinstance(facts, dict):
        raise damaged(path, "is not what was written (no JSON object)")
    best = read_best_record(checkpoint)
    if best:
        state = facts.setdefault("state", {})
        if not isinstance(state, dict):
            raise damaged(path, "is not what was written (its state is no JSON object)")
        state.update(best)
    return facts


def read_best_record(checkpoint: Path) -> dict[str, Any]:
    """What `best.json` says; empty without one.

    Raises:
        CheckpointError: it is not what was written.
    """
    path = checkpoint / BEST_RECORD
    if not os.path.lexists(path):
        return {}
    record = unsealed(path, read_json(path)).get("state")
    if not isinstance(record, dict):
        raise damaged(path, "is not what was written")
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


def _check_contents(checkpoint: Path, manifest: Manifest) -> None:
    """Raises CheckpointError for the first file, by name, that differs."""
    names = sorted(manifest.files)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for name, digest in zip(names, pool.map(lambda name: _hashed(checkpoint / name), names), strict=True):
            if digest != manifest.files[name].sha256:
                raise damaged(checkpoint / name, "is not what was written (its SHA-256 differs)")


def _hashed(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | NO_FOLLOW)) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    return digest.hexdigest()
