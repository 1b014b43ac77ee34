"""A folder of finished entries: each is built once, appears whole or not at all, and is checked before use."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from largetrain.data.store import DamagedError
from largetrain.errors import ConfigError

KEY = "data.cache"
MANIFEST = "manifest.json"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}

Notice = Callable[[str], None]
T = TypeVar("T")


def cache_root(configured: str | None) -> Path:
    """Return the cache folder: `data.cache`, else $XDG_CACHE_HOME/largetrain, else ~/.cache/largetrain."""
    if configured:
        return Path(configured).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")  # the standard says: a relative path is to be ignored
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "largetrain"


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest of an entry with a checksum of itself."""
    text = json.dumps(content, sort_keys=True)
    record = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}
    with (folder / MANIFEST).open("x") as file:
        json.dump(record, file, sort_keys=True, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what `write_manifest` wrote.

    Raises:
        DamagedError: it is missing or differs.
    """
    try:
        record = json.loads((folder / MANIFEST).read_bytes())
        content, sha256 = record["content"], record["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{MANIFEST}: {error}") from error
    if hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() != sha256:
        raise DamagedError(f"{MANIFEST}: checksum differs")
    return content


def open_or_build(root: Path, key: str, load: Callable[[Path], T], build: Callable[[Path], None], notice: Notice) -> T:
    """Return `load(entry)`; where the entry is absent or damaged, `build` it first, one process at a time.

    Args:
        root: the cache folder; made if absent.
        key: name of the entry.
        load: reads and checks a finished entry; raises DamagedError.
        build: fills an empty folder, which is then renamed to the entry.
        notice: told of a wait and of a damaged entry.

    Raises:
        ConfigError: the folder cannot be written, or its disk is full.
    """
    entry = root / key
    if entry.is_dir():
        try:
            return load(entry)
        except DamagedError:
            pass  # told below, by the process that rebuilds it
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock", notice):
            if entry.is_dir():
                try:
                    return load(entry)
                except DamagedError as error:
                    notice(f"cached tokens in {entry} are damaged ({error}); building them again")
                    _discard(entry)
            for stale in root.glob(f"{key}.tmp-*"):  # of a killed build: we hold the lock
                shutil.rmtree(stale)
            _build_entry(root, entry, build)
            return load(entry)


def _build_entry(root: Path, entry: Path, build: Callable[[Path], None]) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=root))
    try:
        folder.chmod(0o755)
        build(folder)
        folder.rename(entry)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _discard(entry: Path) -> None:
    """Take a damaged entry out of sight in one step; processes that have it open keep their files."""
    away = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
    entry.rename(away / "damaged")
    shutil.rmtree(away)


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn failures to write below the cache folder into the user's error, naming the folder and the way out."""
    try:
        yield
    except OSError as error:
        hint = f"set {KEY} (or XDG_CACHE_HOME) to a folder that can be written."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"{KEY}: no space left for tokenized data in {root}. Free some, or {hint}") from error
        raise ConfigError(
            f"{KEY}: cannot write {error.filename or root}: {error.strerror or error}. Instead, {hint}"
        ) from error


@contextmanager
def _locked(path: Path, notice: Notice) -> Iterator[None]:
    """Hold an exclusive lock on `path`; a file system without locks gets none, the rename is still atomic."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice("waiting for another process that prepares the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
