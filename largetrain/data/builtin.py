"""The text that any Python brings along: its language reference and the sources of its standard library."""

import os
import sysconfig
from collections.abc import Iterator

from largetrain.errors import ConfigError

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "ensurepip"}  # tests and bundled tools
    | {"encodings", "__phello__", "__pycache__"}  # tables and generated files
    | {"site-packages", "dist-packages"}  # installed later
    | {"pydoc_data"}  # taken as topics
)
MAX_FILE_BYTES = 1 << 20


def builtin_documents() -> Iterator[str]:
    """Yield each topic of `pydoc_data.topics`, then each standard-library source file, sorted by name (about 10 MB).

    Test suites, bundled tools and generated tables are left out, so the text is much the same on every system.

    Raises:
        ConfigError: this Python was installed without both.
    """
    found = False
    for text in _topics():
        found = True
        yield text
    for text in _library():
        found = True
        yield text
    if not found:
        raise ConfigError(
            "data.source: this Python has neither pydoc_data nor the sources of its standard library, so there is no "
            "builtin corpus. Name your own .txt or .jsonl files."
        )


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions pack it separately; the library sources remain
        return
    for name in sorted(topics):
        yield topics[name]


def _library() -> Iterator[str]:
    root = sysconfig.get_path("stdlib")
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-"))
        for name in sorted(names):
            path = os.path.join(folder, name)
            # build-time tables of this installation differ between machines
            if not name.endswith(".py") or name.startswith("_sysconfigdata") or os.path.getsize(path) > MAX_FILE_BYTES:
                continue
            with open(path, "rb") as file:
                content = file.read()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:  # a few sources declare another encoding
                continue
            yield text.replace("\r\n", "\n")
