"""`largetrain config`: the resolved run as it would train, the reference of both files, or their JSON schemas."""

import json
import sys
from collections.abc import Sequence

import yaml

from largetrain.cli.arguments import Parser, add_run_arguments, load_from_args
from largetrain.config.resolved import Resolved
from largetrain.config.run_rules import used_keys
from largetrain.config.world import World, launch_world
from largetrain.errors import EXIT_DONE, ConfigError


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(prog="largetrain config", description=__doc__, allow_abbrev=False)
    add_run_arguments(made)
    made.add_argument(
        "--world-size", metavar="N", type=int, help="resolve for N ranks; absent: those of the launcher, or 1"
    )
    made.add_argument("--json", action="store_true", help="print what a run saves as config.json")
    made.add_argument("--reference", action="store_true", help="print every key of both files and what it means")
    made.add_argument(
        "--json-schema",
        nargs="?",
        const="run",
        choices=("engine", "run"),
        help="print the JSON schema of a file, for editors",
    )
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: what is wrong with the flags or the files.
    """
    options = parser().parse_args(argv)
    if options.reference:
        from largetrain.config.reference import reference

        print(reference())
    elif options.json_schema:
        from largetrain.config.reference import json_schema

        print(json.dumps(json_schema(options.json_schema), indent=2, ensure_ascii=False))
    else:
        resolved = load_from_args(options, _world(options.world_size))
        sys.stdout.write(resolved.to_json() if options.json else readable(resolved))
    sys.stdout.flush()
    return EXIT_DONE


def _world(size: int | None) -> World:
    if size is None:
        return launch_world()
    if size < 1:
        raise ConfigError(f"--world-size {size}: must be at least 1.")
    return World(world_size=size, local_world_size=size, source=f"--world-size {size}")


def readable(resolved: Resolved) -> str:
    """The notes, then the run YAML, then the engine JSON."""
    batch, decoder = resolved.batch, resolved.decoder
    lines = ["# What was derived or overridden"]
    lines += [f"#   {note}" for note in resolved.notes] or ["#   nothing"]
    if decoder is not None:
        tokens = batch.global_batch * decoder.seq_len
        lines += [
            "# Size",
            f"#   {decoder.parameter_count():,} parameters",
            f"#   {decoder.flops_per_token() / 1e6:,.1f} MFLOP per trained token",
            f"#   {tokens:,} tokens per update",
        ]
    run_yaml = yaml.safe_dump(used_keys(resolved.run), sort_keys=False, allow_unicode=True, default_flow_style=False)
    lines += ["", "# Run (YAML)", run_yaml.rstrip(), "", "# Engine (JSON), as DeepSpeed is handed it"]
    return "\n".join([*lines, json.dumps(resolved.engine, indent=2, ensure_ascii=False)]) + "\n"
