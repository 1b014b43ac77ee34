"""Whether the disk has room for checkpoints. No torch."""

import shutil
from pathlib import Path

from largetrain.checkpoint.folder import complete_checkpoints
from largetrain.checkpoint.retention import Retention
from largetrain.errors import ConfigError

SPARE_BYTES = 1 << 16
"""For manifest, facts, folders and the file system's own blocks."""
ADVICE = "Make room, name an --output on another disk"


def lacking(folder: Path, needed_bytes: int) -> str | None:
    """Why a checkpoint of so many bytes does not fit into `folder` now, or None."""
    free = shutil.disk_usage(folder).free
    if free >= needed_bytes + SPARE_BYTES:
        return None
    return f"it takes {in_words(needed_bytes + SPARE_BYTES)}, and {folder} has {in_words(free)} free"


def room_at_start(folder: Path, needed_bytes: int, retention: Retention) -> str | None:
    """A warning when the run will not have room for the checkpoints that it is to keep; None when it has.

    Args:
        folder: the run's `checkpoints/`, which is there.
        needed_bytes: of one checkpoint, all ranks together.

    Raises:
        ConfigError: there is not room for one.
    """
    if problem := lacking(folder, needed_bytes):
        raise ConfigError(f"--output {folder.parent}: there is no room for a checkpoint: {problem}. {ADVICE}")
    one = needed_bytes + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    # a new one is whole before the oldest goes; those that are there already will have to go first
    wanted = max(1, (retention.keep_last or 1) + 1 - len(complete_checkpoints(folder)))
    if free >= wanted * one:
        return None
    keeping = f"checkpoints.keep_last: {retention.keep_last} takes {wanted} of" if retention.keep_last else "Each takes"
    return (
        f"warning: {folder} has {in_words(free)} free, room for {free // one} more checkpoints. {keeping} "
        f"{in_words(one)}. {ADVICE}, or lower checkpoints.keep_last"
    )


def in_words(count: int) -> str:
    """A number of bytes as people write it."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
