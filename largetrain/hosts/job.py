"""What a launch sends to every host: where, with which variables, files and arguments the ranks run."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from largetrain.errors import ConfigError
from largetrain.hosts.hostfile import Host

FILE_FLAGS = {"--ds_config": "engine", "--ds-config": "engine", "--config": "run"}
Word = str | dict[str, str]
"""An argument; {"file": ..., "name": ...} stands for the path of a file that the host was sent."""


@dataclass(frozen=True)
class Job:
    """One run; the same for all hosts and all of its starts, but for `arguments`."""

    folder: str
    """Working folder, on every host."""
    output: str
    """The run's output folder, absolute."""
    environment: dict[str, str]
    files: dict[str, dict[str, str]]
    """engine, run -> name, text and sha256 of the file."""
    arguments: tuple[Word, ...]
    """Of `largetrain train`."""
    python: str
    program: tuple[str, ...]
    """What Python runs as a rank, before the arguments."""
    number: str = field(default_factory=lambda: secrets.token_hex(8))
    torchrun: bool = False
    """Each host gets one torchrun that starts its ranks."""

    def message(self, host: Host, first: Host, port: int | None) -> dict[str, Any]:
        """What one host's agent is told."""
        return {
            "job": self.number,
            "folder": self.folder,
            "output": self.output,
            "environment": self.environment,
            "files": self.files,
            "command": [*([] if self.torchrun else [self.python]), *self.program, *self.arguments],
            "torchrun": self.torchrun,
            "slots": host.slots,
            "devices": host.devices,
            "first": host == first,
            "port": port if host == first else None,
            "resolve": [first.name],
        }

    def resumed(self, resume: str) -> "Job":
        """The same run with another `--resume` in the place of its own."""
        return replace(self, arguments=(*_without_resume(self.arguments), "--resume", resume))

    def with_batch(self, batch: Mapping[str, int]) -> "Job":
        """The same run with these keys of the batch, whatever the arguments or the files say."""
        words, left = list(self.arguments), dict(batch)
        for index, word in enumerate(words):
            key = word.partition("=")[0].removeprefix("engine.") if isinstance(word, str) else ""
            if key in batch:
                words[index] = f"{key}={batch[key]}"
                left.pop(key, None)
        return replace(self, arguments=(*words, *(("--set", *(f"{k}={v}" for k, v in left.items())) if left else ())))


def with_files(arguments: Sequence[str]) -> tuple[tuple[Word, ...], dict[str, dict[str, str]]]:
    """The arguments with the two configuration files taken out of them, and these files.

    Raises:
        ConfigError: a file cannot be read.
    """
    words: list[Word] = []
    files: dict[str, dict[str, str]] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if flag not in FILE_FLAGS or not (equals or rest):
            words.append(argument)
            continue
        path = value if equals else rest.pop(0)
        files[FILE_FLAGS[flag]] = found = _file(flag, path)
        words += [flag, {"file": FILE_FLAGS[flag], "name": found["name"]}]
    return tuple(words), files


def _file(flag: str, path: str) -> dict[str, str]:
    try:
        content = Path(path).read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error}).") from None
    return {"name": Path(path).name, "text": text, "sha256": hashlib.sha256(content).hexdigest()}


def _without_resume(words: Sequence[Word]) -> list[Word]:
    """Arguments without `--resume`, `--resume=X` or `--resume X`."""
    kept: list[Word] = []
    after = False
    for word in words:
        if after and isinstance(word, str) and not word.startswith("--"):
            after = False
            continue
        after = word == "--resume"
        if not after and not (isinstance(word, str) and word.startswith("--resume=")):
            kept.append(word)
    return kept
