"""The manifest of a checkpoint: which files belong to it and what was in them. Nothing in a folder is trusted.

    step-00000100/
      manifest.json                    format, run_id, step, files with size and SHA-256, and a digest of all that
      run.json                         facts of the run
      pieces/rank-00000.safetensors    tensors that a rank held, for each rank that held any
      ranks/rank-00000.pt              what only the same rank of the same layout can use, for each rank
      best.json                        what an evaluation after the checkpoint found; not in the manifest

Names other than these are refused, so that no name can lead out of the folder; symbolic links are refused too.
"""

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largetrain.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
FACTS = "run.json"
BEST_RECORD = "best.json"  # beside what the manifest vouches for: the evaluation comes after the checkpoint
STEP_NAME = re.compile(r"step-(\d{8,15})", re.ASCII)
OWN_NAME = re.compile(r"ranks/rank-(\d{5,9})\.pt", re.ASCII)
PIECES_NAME = re.compile(r"pieces/rank-(\d{5,9})\.safetensors", re.ASCII)
LARGEST_JSON_BYTES = 1 << 28
LARGEST_STEP = 10**15


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    run_id: str
    step: int
    files: dict[str, FileRecord]
    """By name relative to the checkpoint."""

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return sum(OWN_NAME.fullmatch(name) is not None for name in self.files)

    @property
    def total_bytes(self) -> int:
        """Of all its files."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> bytes:
        files = {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in self.files.items()}
        return sealed({"format": FORMAT, "run_id": self.run_id, "step": self.step, "files": files})


def damaged(path: Path, what: str) -> CheckpointError:
    """The error of a file that is not what was written; found by one rank alone, as a rule."""
    error = CheckpointError(f"{path} {what}")
    error.on_all_ranks = False
    return error


def pieces_name(rank: int) -> str:
    return f"pieces/rank-{rank:05d}.safetensors"


def own_name(rank: int) -> str:
    return f"ranks/rank-{rank:05d}.pt"


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint folder; the files that it names are not looked at.

    Raises:
        CheckpointError: there is none, or it is not one that was written as it is; names the file.
    """
    path = checkpoint / MANIFEST
    if checkpoint.is_symlink():
        raise damaged(checkpoint, "is a symbolic link; give the folder that it points to")
    if not checkpoint.is_dir():
        raise damaged(checkpoint, "is not there" if not checkpoint.exists() else "is not a folder")
    if not path.exists() and not path.is_symlink():
        raise damaged(checkpoint, f"is not a complete checkpoint ({MANIFEST} is missing)")
    content = unsealed(path, read_json(path), allow_unsealed=True)
    written = _format_of(content)
    if written != FORMAT:
        when = "an earlier" if written < FORMAT else "a later"
        raise damaged(
            checkpoint, f"was written by {when} version of largetrain (format {written}; this one reads {FORMAT})"
        )
    if "sha256" not in content:
        raise damaged(path, "is not a manifest: its digest is missing")
    return _parsed(checkpoint, content)


def read_json(path: Path) -> Any:
    """The content of a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is no regular file, or not JSON.
    """
    return parsed_json(path, read_small(path))


def read_small(path: Path) -> bytes:
    """The bytes of a file that is read whole.

    Raises:
        CheckpointError: it is no regular file, larger than such files are, or cannot be read.
    """
    try:
        size = regular_size(path)
        if size > LARGEST_JSON_BYTES:
            raise damaged(path, f"has {size:,} bytes, far more than were ever written")
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error


def regular_size(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        OSError: it is not there.
        CheckpointError: it is a symbolic link, a pipe or the like, which reading could follow or hang in.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise damaged(path, "is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise damaged(path, "is not a regular file")
    return status.st_size


def parsed_json(path: Path, content: bytes) -> Any:
    """`content` of `path`, parsed.

    Raises:
        CheckpointError: it is not JSON.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise damaged(path, "cannot be read (nested too deeply)") from error
    except ValueError as error:  # JSON, UTF-8, numbers of thousands of digits
        raise damaged(path, f"cannot be read ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """An error in one line: those of libraries may run over many."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def sealed(content: dict[str, Any]) -> bytes:
    """JSON with a digest of itself under `sha256`."""
    return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


def unsealed(path: Path, content: Any, *, allow_unsealed: bool = False) -> dict[str, Any]:
    """What `sealed` was given, and its digest.

    Raises:
        CheckpointError: it has been changed.
    """
    if not isinstance(content, dict):
        raise damaged(path, "is not what was written (no JSON object)")
    if "sha256" not in content and allow_unsealed:
        return content
    rest = {key: value for key, value in content.items() if key != "sha256"}
    try:
        digest = _digest(rest)
    except RecursionError as error:
        raise damaged(path, "cannot be read (nested too deeply)") from error
    if content.get("sha256") != digest:
        raise damaged(path, "is not what was written (its own digest differs)")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _format_of(content: dict[str, Any]) -> int:
    """The format of a manifest; the first one was a bare table of sizes. -1: of none."""
    if "format" not in content:
        return 1 if isinstance(content.get(FACTS), int) else FORMAT
    written = content["format"]
    return written if type(written) is int and 0 < written < 10**6 else FORMAT


def _parsed(checkpoint: Path, content: dict[str, Any]) -> Manifest:
    path = checkpoint / MANIFEST
    run_id, step, files = content.get("run_id"), content.get("step"), content.get("files")
    if content.get("format") != FORMAT or not isinstance(run_id, str) or not isinstance(files, dict):
        raise damaged(path, "is not a manifest")
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        raise damaged(path, "is not a manifest: its step is no number of updates")
    named = STEP_NAME.fullmatch(checkpoint.absolute().name)
    if named and int(named.group(1)) != step:
        raise damaged(path, f"is of another checkpoint (step {step})")
    manifest = Manifest(run_id, step, {name: _record(path, name, record) for name, record in files.items()})
    ranks = sorted(int(match.group(1)) for match in map(OWN_NAME.fullmatch, files) if match)
    if FACTS not in files or not ranks or ranks != list(range(len(ranks))):
        raise damaged(path, f"is not a manifest: it lacks {FACTS} or the files of a rank")
    return manifest


def _record(path: Path, name: str, record: Any) -> FileRecord:
    if name != FACTS and not OWN_NAME.fullmatch(name) and not PIECES_NAME.fullmatch(name):
        raise damaged(path, f"names {name[:80]!r}, which is no file of a checkpoint")
    size, digest = (record.get("bytes"), record.get("sha256")) if isinstance(record, dict) else (None, None)
    if type(size) is not int or not 0 <= size < 2**63 or not isinstance(digest, str):
        raise damaged(path, f"is not a manifest: no size and digest of {name!r}")
    return FileRecord(size, digest)
