"""What `largetrain checkpoint list`, `show`, `verify` and `prune` find. No torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from largetrain.checkpoint.folder import ABANDONED, all_checkpoints, best_checkpoint, pointed_at, step_of
from largetrain.checkpoint.header import ITEM_BYTES, read_header
from largetrain.checkpoint.locate import checkpoints_folder, is_checkpoint
from largetrain.checkpoint.manifest import MANIFEST, PIECES_NAME, STEP_NAME, read_manifest
from largetrain.checkpoint.retention import Retention, superfluous
from largetrain.checkpoint.verify import problem_of, problems_of
from largetrain.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Row:
    """A checkpoint in a list."""

    path: str
    step: int
    written: float | None
    """Seconds since 1970, of the manifest; None without one."""
    bytes: int
    """Of all files in the folder."""
    problem: str | None
    """None: every file of the manifest is there with its size."""
    run_id: str | None
    marks: tuple[str, ...]
    """`best`, `latest`, `abandoned`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "marks": list(self.marks)}


def rows_of(folder: Path) -> list[Row]:
    """Every checkpoint in a `checkpoints/` folder in order of steps, then those that were left behind by a resume."""
    best, latest = best_checkpoint(folder), pointed_at(folder / "latest")
    rows = []
    for path in all_checkpoints(folder):
        marks = [word for word, named in (("best", best), ("latest", latest)) if named is not None and path == named]
        rows.append(_row(path, step_of(path), tuple(marks)))
    for path in sorted(folder.glob(f"{ABANDONED}*")):
        match = STEP_NAME.match(path.name.removeprefix(ABANDONED))
        if match and path.is_dir():
            rows.append(_row(path, int(match[1]), ("abandoned",)))
    return rows


def _row(path: Path, step: int, marks: tuple[str, ...]) -> Row:
    manifest = path / MANIFEST
    try:
        run_id: str | None = read_manifest(path).run_id
    except CheckpointError:
        run_id = None
    files = (found.lstat() for found in path.rglob("*") if not found.is_dir())
    written = manifest.stat().st_mtime if manifest.is_file() else None
    return Row(str(path), step, written, sum(status.st_size for status in files), problem_of(path), run_id, marks)


def checkpoints_in(path: Path, key: str) -> tuple[Path, list[Path]]:
    """The `checkpoints/` folder that `path` means, and what lies in it.

    Raises:
        ConfigError: there is none, or none with a checkpoint.
    """
    folder = checkpoints_folder(path)
    if folder is None:
        what = "is a checkpoint, not the folder of a run" if is_checkpoint(path) else "holds no checkpoints"
        raise ConfigError(f"{key}: {path} {what}; name a run's output folder, or its checkpoints/.")
    found = all_checkpoints(folder)
    if not found and not any(folder.glob(f"{ABANDONED}*")):
        raise ConfigError(f"{key}: {folder} holds no checkpoints.")
    return folder, found


def verify(path: Path, key: str) -> dict[str, list[str]]:
    """Checkpoint -> every file of it that is not what was written, with its reason; all of a run, or one.

    Raises:
        ConfigError: there is no checkpoint.
    """
    found = [path] if is_checkpoint(path) else checkpoints_in(path, key)[1]
    return {str(checkpoint): problems_of(checkpoint) for checkpoint in found}


def to_prune(path: Path, keep_last: int, keep_every: int, key: str) -> list[Path]:
    """Checkpoints of the newest run in a folder that the rules do not keep; never the newest or the best.

    Milestones are those that the run's own configuration names.

    Raises:
        ConfigError: there is no complete checkpoint, or `keep_last` keeps none.
    """
    if keep_last < 1:
        raise ConfigError(f"{key} --keep-last {keep_last}: at least the newest one is kept; write 1 or more.")
    if keep_every < 0:
        raise ConfigError(f"{key} --keep-every {keep_every}: must not be negative.")
    folder, found = checkpoints_in(path, key)
    whole = [checkpoint for checkpoint in found if problem_of(checkpoint) is None]
    if not whole:
        raise ConfigError(f"{key}: {folder} holds no complete checkpoint; nothing is deleted.")
    retention = Retention(keep_last, keep_every, _milestones(folder.parent / "config.json"))
    return superfluous(folder, retention, read_manifest(whole[-1]).run_id)


def _milestones(config: Path) -> tuple[int, ...]:
    """Of the run that wrote into the folder; none where its configuration is not at hand."""
    try:
        written = json.loads(config.read_bytes())["run"]["checkpoints"]["milestones"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(step for step in written if isinstance(step, int)) if isinstance(written, list) else ()


def tensors_of(checkpoint: Path) -> list[dict[str, Any]]:
    """Key, dtype, shape and bytes of every tensor, by key, from the headers of its files.

    Raises:
        CheckpointError: it is not whole.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(filter(PIECES_NAME.fullmatch, read_manifest(checkpoint).files)):
        for piece in read_header(checkpoint / name):
            blank = {"key": piece.key, "dtype": piece.dtype, "shape": list(piece.shape), "bytes": 0}
            found.setdefault(piece.key, blank)["bytes"] += piece.count * ITEM_BYTES[piece.dtype]
    return [found[key] for key in sorted(found)]


def kind_of(key: str) -> str:
    """What a tensor is: `model`, `ema`, or `optimizer/KIND`."""
    first, _, rest = key.partition("/")
    return f"{first}/{rest.partition('/')[0]}" if first == "optimizer" else first


def totals_of(tensors: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Kind -> how many tensors, values and bytes."""
    totals: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        total = totals.setdefault(kind_of(tensor["key"]), {"tensors": 0, "values": 0, "bytes": 0})
        values = 1
        for dim in tensor["shape"]:
            values *= dim
        for name, amount in (("tensors", 1), ("values", values), ("bytes", tensor["bytes"])):
            total[name] += amount
    return totals


def flat_facts(facts: dict[str, Any], prefix: str = "", longest: int = 24) -> dict[str, str]:
    """Dotted name -> value in words; tables of more than `longest` entries are counted."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found.update(flat_facts(value, f"{path}.", longest) if len(value) <= longest else _counted(path, value))
        elif isinstance(value, list) and len(value) > longest:
            found.update(_counted(path, value))
        else:
            found[path] = json.dumps(value, ensure_ascii=False)
    return found


def _counted(path: str, value: Any) -> dict[str, str]:
    return {path: f"({len(value)} entries)"}
