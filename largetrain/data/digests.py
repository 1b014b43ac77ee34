"""Content digests of sources, remembered for large files so that a restart does not read them all again."""

import hashlib
import os
import string
import tempfile
import time
from pathlib import Path

from largetrain.data.corpora import Source, digest

REMEMBERED_BYTES = 64 << 20
SETTLED_S = 2.0


def remembered_digest(source: Source, root: Path) -> str:
    """Return `corpora.digest` of a source; that of a file from 64 MiB on is kept in `root`/digests.

    A kept digest holds for one path, size, inode, modification and change time. Files touched in the last 2 s are
    not remembered: a further write within the clock's resolution would not show.

    Raises:
        ConfigError: the file cannot be read.
        OSError: `root` cannot be written.
    """
    before = _state(source)
    if before is None:
        return digest(source)
    memo = root / "digests" / hashlib.sha256(repr(before).encode()).hexdigest()
    if memo.is_file():
        value = memo.read_text()
        if len(value) == 64 and set(value) <= set(string.hexdigits):
            return value
    value = digest(source)
    newest = max(before[-2:]) / 1e9
    if _state(source) == before and time.time() - newest > SETTLED_S:
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False) as file:
            file.write(value)
        os.replace(file.name, memo)
    return value


def _state(source: Source) -> tuple[str, str, int, int, int, int, int] | None:
    """What identifies a large file's content without reading it; None for what is read each time."""
    if source.path is None or not source.path.is_file():
        return None
    stat = source.path.stat()
    if stat.st_size < REMEMBERED_BYTES:
        return None
    path = str(source.path.resolve())
    return source.kind, path, stat.st_size, stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns
