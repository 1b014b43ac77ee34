"""The command line: picks a command, and turns a mistake of the user into one message and exit code 2.

Commands are imported when they are called, so that `--help`, `config` and `check` load neither torch nor deepspeed.
"""

import importlib
import io
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from largetrain.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, LargetrainError

# Command -> its module, which has `run(argv) -> exit code`, and its line of help.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("largetrain.cli.train", "train a model (the default when no command is given)"),
    "launch": ("largetrain.cli.launch", "train on the hosts of a hostfile, watch over them, start again"),
    "config": ("largetrain.cli.config", "print the resolved configuration, the reference, or a JSON schema"),
    "check": ("largetrain.cli.check", "lint any DeepSpeed JSON, ours or not; exit code 0 or 2"),
    "checkpoint": ("largetrain.cli.checkpoint", "list, show, verify, diff, prune, reshard, export, import checkpoints"),
    "setup": ("largetrain.cli.setup", "prepare this environment: compile operators, teach `deepspeed` the -m"),
}
# What only prints: when its reader (head, less) goes, nothing is lost. A training run is never in here.
PRINTING_COMMANDS = ("config", "check")
PRINTING_FLAGS = ("-h", "--help", "--version", "--dry-run")
SILENT_WAIT_S = 2.0
LOCAL_RANK_FLAG = re.compile(r"--local[_-]rank(=.*)?")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Args:
        argv: arguments without the program's name; None: those of this process.
    """
    arguments = without_local_rank(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks is escaped, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(arguments)
    except LargetrainError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("largetrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _only_prints(arguments):
            raise
        discard_output()  # the reader (head, less) has gone: nothing is left to say
        return EXIT_DONE


def _only_prints(arguments: Sequence[str]) -> bool:
    return bool(arguments) and (arguments[0] in PRINTING_COMMANDS or any(flag in arguments for flag in PRINTING_FLAGS))


def discard_output() -> None:
    """Let nothing more be written to a standard output without a reader; Python flushes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(_help())
        return EXIT_DONE
    if arguments and arguments[0] == "--version":
        from largetrain import __version__

        print(f"largetrain {__version__}")
        return EXIT_DONE
    if not arguments or arguments[0].startswith("-"):
        command, rest = "train", arguments
    else:
        command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        from largetrain.config.document import nearest

        near = nearest(command, COMMANDS)
        hint = f" Did you mean {near}?" if near else ""
        text = f"unknown command {command!r}; commands: {', '.join(COMMANDS)}.{hint}"
        raise ConfigError(text, on_all_ranks=True)
    exit_code: int = importlib.import_module(COMMANDS[command][0]).run(rest)
    return exit_code


def _help() -> str:
    """All commands, and the flags of `train`."""
    from largetrain.cli.arguments import train_parser

    width = max(map(len, COMMANDS))
    lines = ["usage: largetrain [command] [flags]", "", "commands (largetrain COMMAND --help tells more):"]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    flags = train_parser("largetrain [train]").format_help().partition("options:\n")[2].rstrip()
    return "\n".join([*lines, "", "flags of train:", flags])


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """Drop what launchers add (`--local_rank=N`, `--local-rank N`, ...): LOCAL_RANK says the same."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        match = LOCAL_RANK_FLAG.fullmatch(argument)
        if skip or match:
            skip = bool(match) and match is not None and match[1] is None
            continue
        kept.append(argument)
    return kept


def report(error: LargetrainError, env: Mapping[str, str] = os.environ) -> None:
    """Print an error once for all ranks of a launch.

    Rank 0 prints what all ranks raise together; of the others only the first of a host does when it is a mistake,
    because the files of that host may differ. What hit one rank alone is printed by that rank. Any other rank than 0
    waits with a mistake, so that a launcher hears of rank 0 first and ends the rest.
    """
    from largetrain.config.world import task_rank

    rank, local_rank = task_rank(env), env.get("LOCAL_RANK", "0")
    mistake = isinstance(error, ConfigError)
    if mistake and rank != "0":
        time.sleep(SILENT_WAIT_S)
    if rank != "0" and error.on_all_ranks and not (mistake and env.get("RANK") and local_rank == "0"):
        return
    lines = error.problems if isinstance(error, ConfigError) else (str(error),)
    where = f" (rank {rank})" if rank != "0" else ""
    if len(lines) == 1:
        print(f"largetrain{where}: {lines[0]}", file=sys.stderr)
    else:
        print(f"largetrain{where}: {len(lines)} mistakes:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in lines), file=sys.stderr)
    sys.stderr.flush()
