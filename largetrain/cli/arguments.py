"""The flags of a run, shared by `train` and `config`, and the step from flags to a resolved configuration."""

import argparse
import os
from typing import Any, NoReturn

from largetrain.config.document import nearest
from largetrain.config.load import load
from largetrain.config.parse_run import parse_value
from largetrain.config.resolved import Resolved
from largetrain.config.world import World
from largetrain.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`, so that a launch prints them once and not once per rank."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            ConfigError: always.
        """
        text = f"{message}{self._hint(message)}. `{self.prog} --help` lists the flags."
        raise ConfigError(text, on_all_ranks=True)

    def _hint(self, message: str) -> str:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            return ""
        near = nearest(unknown.split()[0].partition("=")[0], self._option_string_actions)
        return f"; did you mean {near}?" if near else ""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is run."""
    parser.add_argument(
        "--ds_config", "--ds-config", metavar="FILE", help="engine JSON (DeepSpeed); absent: ZeRO-2 in fp32"
    )
    parser.add_argument("--config", metavar="FILE", help="run YAML: model, data, length; absent: the demo run")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        dest="overrides",
        help="any key of either file: optimizer.params.lr=3e-4 model.preset=gpt2; null takes an engine key out",
    )
    parser.add_argument("--steps", metavar="N", help="optimizer updates to run")
    parser.add_argument("--epochs", metavar="N", help="passes over the training data to run, instead of --steps")
    parser.add_argument(
        "--max-minutes",
        metavar="N",
        help="stop with a checkpoint and exit code 75 so many minutes after the start; --resume auto goes on",
    )
    parser.add_argument("--seed", metavar="N", help="seed of weights, data order, dropout and augmentation")
    parser.add_argument("--name", metavar="NAME", help="name of the run")
    parser.add_argument("--output", metavar="DIR", help="output folder; absent: runs/<name>-<time>/")


def train_parser(prog: str) -> Parser:
    """The parser of `train`."""
    parser = Parser(
        prog=prog,
        description="Train a model as an engine JSON and a run YAML describe it.",
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|best|PATH",
        nargs="?",
        const="auto",
        type=os.path.expanduser,
        help="go on from the newest or the best checkpoint, or from PATH",
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="evaluate the checkpoint of --resume, or pretrained weights, and stop"
    )
    parser.add_argument("--dry-run", action="store_true", help="resolve and print the configuration, then stop")
    parser.add_argument("--verbose", action="store_true", help="let DeepSpeed's own messages through")
    return parser


def load_from_args(namespace: argparse.Namespace, world: World) -> Resolved:
    """Resolve the configuration that the flags of `add_run_arguments` describe.

    Raises:
        ConfigError: all mistakes in the flags and the files, and a checkpoint to resume from that is not there.
    """
    problems = _resume_problems(getattr(namespace, "resume", None))
    try:
        resolved = _load(namespace, world)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems], on_all_ranks=True) from None
    if problems:
        raise ConfigError(problems, on_all_ranks=True)
    return resolved


def _resume_problems(resume: str | None) -> list[str]:
    if resume is None or resume in ("auto", "best") or (resume.strip() and os.path.lexists(resume)):
        return []
    if not resume.strip():
        return ["--resume '': names no checkpoint; write --resume alone for the newest one, or a path."]
    return [f"--resume {resume}: there is no such checkpoint or folder (looked from {os.getcwd()})."]


def _load(namespace: argparse.Namespace, world: World) -> Resolved:
    flags: dict[str, tuple[str, Any]] = {}
    for key in ("steps", "epochs", "max_minutes", "seed", "name", "output"):
        value = getattr(namespace, key)
        if value is not None:
            flags[key] = (f"--{key.replace('_', '-')}", value if key in ("name", "output") else _number(value))
    return load(
        namespace.ds_config,
        namespace.config,
        overrides=namespace.overrides,
        flags=flags,
        world_size=world.world_size,
        world_size_source=world.source,
        local_world_size=world.local_world_size,
    )


def _number(written: str) -> Any:
    """The flag's value as a file would hold it, so that a wrong one is reported like a wrong key."""
    try:
        return parse_value(written)
    except ValueError:
        return written
