"""`largetrain check FILE...`: lint any DeepSpeed JSON. Nothing of it is executed."""

from collections.abc import Sequence

from largetrain.cli import discard_output
from largetrain.cli.arguments import Parser
from largetrain.config.lint import lint_engine
from largetrain.config.load import in_file_order
from largetrain.config.parse import read_engine_file
from largetrain.errors import EXIT_DONE, EXIT_MISTAKE, ConfigError


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(prog="largetrain check", description=__doc__, allow_abbrev=False)
    made.add_argument("files", nargs="+", metavar="FILE", help="a DeepSpeed config")
    made.add_argument("--quiet", action="store_true", help="print only what is wrong")
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command: 0 when every file is clean (warnings allowed), 2 otherwise."""
    options = parser().parse_args(argv)
    wrong, lines = 0, []
    for file in options.files:
        problems, warnings = check_file(file)
        wrong += bool(problems)
        lines += in_file_order(problems)
        if not options.quiet:
            lines += [f"{line} (warning)" for line in warnings]
            lines += [] if problems else [f"{file}: ok"]
    try:
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough; the exit code still tells what was found
        discard_output()
    return EXIT_MISTAKE if wrong else EXIT_DONE


def check_file(file: str) -> tuple[list[str], list[str]]:
    """Problems and warnings of one engine JSON."""
    try:
        result = lint_engine(read_engine_file(file))
    except ConfigError as error:
        return list(error.problems), []
    return list(result.problems), list(result.warnings)
