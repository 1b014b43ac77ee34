"""Writing a checkpoint's files: hashed while they are written, synced, then published by one rename."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from largetrain.checkpoint.faults import fault
from largetrain.checkpoint.folder import ABANDONED, newer_than, step_of
from largetrain.checkpoint.header import ALIGNMENT
from largetrain.checkpoint.manifest import (
    BEST_RECORD,
    FACTS,
    MANIFEST,
    FileRecord,
    Manifest,
    own_name,
    pieces_name,
    read_manifest,
    sealed,
)
from largetrain.errors import CheckpointError

CHUNK_BYTES = 32 << 20
LEAST_DIRECT_BYTES = 1 << 20
Going = Callable[[], None]
"""Called between chunks; raises to give up."""


def prepare(partial: Path) -> None:
    """Make the folder that a checkpoint is written to."""
    for name in ("pieces", "ranks"):
        (partial / name).mkdir(parents=True)


def write_rank(
    partial: Path, rank: int, image: memoryview, own: bytes, going: Going = lambda: None
) -> dict[str, FileRecord]:
    """Write and sync one rank's files; returns what the manifest says of them.

    Args:
        image: of the safetensors file; empty for a rank that holds no pieces.
        own: `torch.save` of the snapshot's own part.

    Raises:
        OSError: a file could not be written.
    """
    if not (partial / "ranks").is_dir():
        raise FileNotFoundError(f"{partial} is not there: --output must be on storage shared by all hosts")
    files = {}
    fault("before-pieces")
    if image:
        files[pieces_name(rank)] = write_file(partial / pieces_name(rank), image, "mid-pieces", going)
    fault("before-own")
    files[own_name(rank)] = write_file(partial / own_name(rank), own)
    return files


def write_file(path: Path, content: bytes | memoryview, halfway: str = "", going: Going = lambda: None) -> FileRecord:
    """Write a new file, hash it meanwhile on a second thread, and sync it.

    Args:
        halfway: the fault point in its middle.
    """
    view = memoryview(content)
    with ThreadPoolExecutor(1) as pool, open(path, "xb", buffering=0) as file:
        digest = pool.submit(_digest, view, going)
        half = len(view) // 2
        half -= half % ALIGNMENT if half > ALIGNMENT else 0
        _write(file.fileno(), view, 0, half, going)
        if halfway:
            fault(halfway)
        _write(file.fileno(), view, half, len(view), going)
        os.fsync(file.fileno())
    return FileRecord(len(view), digest.result())


def _write(descriptor: int, view: memoryview, begin: int, end: int, going: Going) -> None:
    """Write view[begin:end], at that place of the file."""
    begin = _write_direct(descriptor, view, begin, end - end % ALIGNMENT, going)
    while begin < end:
        going()
        begin += os.write(descriptor, view[begin : min(end, begin + CHUNK_BYTES)])


def _write_direct(descriptor: int, view: memoryview, begin: int, end: int, going: Going) -> int:
    """Write view[begin:end] past the page cache, which would cost more processor time than all else of a save.

    Returns:
        How far it came: not at all where the file system or the memory does not allow it.
    """
    if end - begin < LEAST_DIRECT_BYTES or not hasattr(os, "O_DIRECT"):
        return begin
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while begin < end:
            going()
            begin += os.write(descriptor, view[begin : min(end, begin + CHUNK_BYTES)])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return begin


def _digest(view: memoryview, going: Going) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(view), CHUNK_BYTES):
        going()
        digest.update(view[start : start + CHUNK_BYTES])  # without the interpreter lock, as the write
    return digest.hexdigest()


def publish(
    partial: Path,
    final: Path,
    run_id: str,
    facts: bytes,
    files: Mapping[str, FileRecord],
    world_size: int,
    best: Mapping[str, Any] | None = None,
) -> None:
    """Turn the written folder into the checkpoint `final`, once every file of every rank is seen to be there.

    Args:
        best: what an evaluation has found by now, see `write_best`; so that it cannot be there without.

    Raises:
        OSError: a file is absent, or nothing more can be written; `final` is not there then.
    """
    absent = [rank for rank in range(world_size) if not _has(partial, own_name(rank), files)]
    absent += [int(Path(name).stem[5:]) for name in files if not _has(partial, name, files)]
    if absent:
        ranks = sorted(set(absent))
        raise OSError(f"files of ranks {ranks} are not in {partial}: --output must be on storage shared by all hosts")
    facts_record = write_file(partial / FACTS, facts)
    if best is not None:
        write_file(partial / BEST_RECORD, _record(final, best))
    for name in ("pieces", "ranks"):
        sync(partial / name)
    fault("before-manifest")
    manifest = Manifest(run_id, step_of(final), {FACTS: facts_record, **dict(sorted(files.items()))})
    write_file(partial / MANIFEST, manifest.to_json(), "mid-manifest")
    sync(partial)
    _set_aside_abandoned(final, run_id)
    fault("before-rename")
    partial.rename(final)
    sync(final.parent)
    fault("after-rename")


def _has(partial: Path, name: str, files: Mapping[str, FileRecord]) -> bool:
    try:
        return name in files and (partial / name).stat().st_size == files[name].bytes
    except FileNotFoundError:
        return False


def _set_aside_abandoned(final: Path, run_id: str) -> None:
    """Rename what a run that was resumed from an earlier step leaves ahead: `auto` must not go back to it.

    Under `final`'s own name lies either an incomplete leftover or the same step of the abandoned run. What had been
    set aside under the new name before goes, unless it may be another run's.
    """
    for path in (*newer_than(final.parent, step_of(final)), final):
        if not path.exists():
            continue
        aside = path.with_name(ABANDONED + path.name)
        number = 1
        while os.path.lexists(aside) and _run_of(aside) != run_id:
            number += 1
            aside = path.with_name(f"{ABANDONED}{path.name}-{number}")
        if os.path.lexists(aside):
            shutil.rmtree(aside)
        path.rename(aside)


def _run_of(checkpoint: Path) -> str | None:
    try:
        return read_manifest(checkpoint).run_id
    except CheckpointError:
        return None


def write_best(checkpoint: Path, record: Mapping[str, Any]) -> None:
    """Put what an evaluation found beside a checkpoint, and let `best` name it."""
    path, content = checkpoint / BEST_RECORD, _record(checkpoint, record)
    if not path.exists() or path.read_bytes() != content:
        replace(path, content)
    point(checkpoint.parent / "best", checkpoint)


def _record(checkpoint: Path, record: Mapping[str, Any]) -> bytes:
    return sealed({"step": step_of(checkpoint), "state": dict(record)})


def point(pointer: Path, checkpoint: Path) -> None:
    """Let a file name a checkpoint."""
    replace(pointer, f"{checkpoint.name}\n".encode())


def partial_name(name: str) -> str:
    """What a small file is called while it is written."""
    return f"{name}.partial"


def replace(path: Path, content: bytes) -> None:
    """Give a small file new content by one rename."""
    partial = path.with_name(partial_name(path.name))
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    write_file(partial, content)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def facts_bytes(facts: Mapping[str, Any], shared: Mapping[str, Any]) -> bytes:
    """`run.json`: the facts, with the part of the snapshot that all ranks share."""
    return json.dumps({**facts, "shared": dict(shared)}, indent=1).encode()
