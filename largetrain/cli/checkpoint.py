"""`largetrain checkpoint COMMAND`: look at checkpoints, check and thin them out, and move weights in and out."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from largetrain.checkpoint.folder import step_of
from largetrain.checkpoint.locate import checkpoint_at, existing
from largetrain.checkpoint.space import in_words
from largetrain.checkpoint.verify import contents_problem_of, problem_of
from largetrain.cli import discard_output
from largetrain.cli.arguments import Parser
from largetrain.errors import EXIT_DONE, EXIT_MISTAKE, CheckpointError, ConfigError

EXIT_DIFFERENT = 1
KEY = "checkpoint"
SHOWN = 12
"""Lines of a kind that `diff` prints."""
WHICH = "a checkpoint, a run (its newest), RUN/best or RUN/latest"


class Commands(Parser):
    """A parser with a parser for each command."""

    def __init__(self) -> None:
        super().__init__(prog=f"largetrain {KEY}", description=__doc__, allow_abbrev=False)
        self.commands = self.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)


def parser() -> Commands:
    """The command's arguments."""
    made = Commands()

    def add(name: str, text: str, more: str = "") -> argparse.ArgumentParser:
        return made.commands.add_parser(name, help=text, description=f"{text}. {more}".strip(), allow_abbrev=False)

    _add_looking(add)
    _add_moving(add)
    return made


def _add_looking(add: Callable[..., argparse.ArgumentParser]) -> None:
    listed = add("list", "every checkpoint of a run: step, time, size, whether it is complete, marks, run")
    listed.add_argument("path", metavar="FOLDER", help="a run's output folder, or its checkpoints/")
    shown = add("show", "facts and tensors of one checkpoint")
    shown.add_argument("path", metavar="CHECKPOINT", help=WHICH)
    verified = add(
        "verify",
        "read every file and compare its SHA-256 with the manifest",
        "Names every file that differs. Exit code 0: all is as it was written; 2: something is not.",
    )
    verified.add_argument("path", metavar="PATH", help="a checkpoint, or a run for all of its checkpoints")
    for command in (listed, shown, verified):
        command.add_argument("--json", action="store_true", help="print JSON")
    diff = add(
        "diff",
        "how two checkpoints differ: tensors bit for bit, facts, random generators",
        "Exit code 0: both hold the same tensors, bit for bit; 1: they do not. Facts and generators are only told.",
    )
    diff.add_argument("first", metavar="A", help=WHICH)
    diff.add_argument("second", metavar="B", help=WHICH)
    prune = add(
        "prune",
        "delete old checkpoints of a run",
        "Never the newest, the best, a milestone of the run, an incomplete one, or one of another run.",
    )
    prune.add_argument("path", metavar="RUN", help="a run's output folder, or its checkpoints/")
    prune.add_argument("--keep-last", metavar="N", type=int, required=True, help="newest ones to keep, at least 1")
    prune.add_argument("--keep-every", metavar="K", type=int, default=0, help="also keep steps that K divides")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def _add_moving(add: Callable[..., argparse.ArgumentParser]) -> None:
    reshard = add(
        "reshard",
        "write a checkpoint anew over another number of files",
        "For moving checkpoints about: resuming never needs it, any number of ranks reads any checkpoint.",
    )
    reshard.add_argument("source", metavar="SRC", help=WHICH)
    reshard.add_argument("target", metavar="DST", help="the folder to make")
    reshard.add_argument("--ranks", metavar="N", type=int, required=True, help="files to spread the tensors over")
    export = add("export", "write the weights of a checkpoint for other programs")
    export.add_argument("source", metavar="SRC", help=f"{WHICH}, or whatever init_from takes")
    export.add_argument("target", metavar="DST", help="the folder to make; torch: a file; safetensors: either")
    export.add_argument(
        "--format",
        choices=("hf", "safetensors", "torch"),
        required=True,
        help="hf: a folder that transformers loads (the built-in decoder); safetensors: the model's own names, as one "
        "file where DST ends in .safetensors; torch: a bare state_dict, whole in memory for a moment",
    )
    export.add_argument("--ema", action="store_true", help="the moving average in the place of the weights")
    export.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="absent: as kept, fp32 masters")
    export.add_argument("--max-shard-size", metavar="SIZE", help="largest file in a folder: 5GB (default), 200MB, ...")
    imported = add("import", "make weights for init_from of a model from elsewhere, and print its model: section")
    imported.add_argument(
        "source", metavar="SRC", help="a Hugging Face GPT-2 or Llama folder, or a checkpoint that DeepSpeed wrote"
    )
    imported.add_argument("target", metavar="DST", help="the folder to make")
    imported.add_argument("--hf-config", metavar="FILE", help="config.json of a GPT-2 or Llama whose weights SRC holds")
    imported.add_argument(
        "--trust", action="store_true", help="unpickle DeepSpeed's files whatever is in them: runs their author's code"
    )
    for command in (reshard, export, imported):
        command.add_argument("--force", action="store_true", help="replace what this command wrote to DST before")


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a path, flag or file is wrong.
    """
    options = parser().parse_args(argv)
    try:
        code, lines = COMMANDS[options.command](options)
    except CheckpointError as error:  # here a damaged file is what was given, not what happened to a run
        raise ConfigError(f"{KEY} {options.command}: {error}.") from error
    try:
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough; the exit code still tells what was found
        discard_output()
    return code


Outcome = tuple[int, list[str]]


def _checkpoint(path: str, key: str, contents: bool = False) -> Path:
    """The complete checkpoint of ours that a path means."""
    given = existing(path, key)
    found = checkpoint_at(given, key, contents_problem_of if contents else problem_of)
    if found is None:
        raise ConfigError(f"{key}: {given} holds no checkpoint of largetrain; name {WHICH}.")
    return found


def _json(content: Any) -> list[str]:
    return [json.dumps(content, indent=2, ensure_ascii=False)]


def _list(options: argparse.Namespace) -> Outcome:
    from largetrain.checkpoint.tools import Row, checkpoints_in, rows_of

    folder, _ = checkpoints_in(existing(options.path, f"{KEY} list"), f"{KEY} list")
    rows = rows_of(folder)
    if options.json:
        return EXIT_DONE, _json([row.to_dict() for row in rows])
    newest = next((row.run_id for row in reversed(rows) if row.run_id), None)

    def line(row: Row) -> tuple[str, ...]:
        when = "-" if row.written is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.written))
        other = ("another run",) if row.run_id not in (None, newest) else ()
        return (
            Path(row.path).name,
            f"{row.step:,}",
            when,
            in_words(row.bytes),
            (row.run_id or "-")[:8],
            ", ".join((*row.marks, *other)),
            "complete" if row.problem is None else row.problem,
        )

    return EXIT_DONE, _table([("name", "step", "written", "size", "run", "marks", "state"), *map(line, rows)], {1, 3})


def _table(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Columns of equal width; those of `right` aligned to the right, the last one as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _show(options: argparse.Namespace) -> Outcome:
    from largetrain.checkpoint.manifest import read_manifest
    from largetrain.checkpoint.tools import flat_facts, tensors_of, totals_of
    from largetrain.checkpoint.verify import facts_of

    path = _checkpoint(options.path, f"{KEY} show")
    manifest, facts, tensors = read_manifest(path), facts_of(path), tensors_of(path)
    totals, size = totals_of(tensors), sum(record.bytes for record in manifest.files.values())
    if options.json:
        about = {"path": str(path), "run_id": manifest.run_id, "step": manifest.step, "ranks": manifest.world_size}
        return EXIT_DONE, _json({**about, "bytes": size, "facts": facts, "totals": totals, "tensors": tensors})
    lines = [str(path), f"step {manifest.step:,} of run {manifest.run_id}, written by {manifest.world_size} ranks"]
    lines += [f"{len(manifest.files)} files, {in_words(size)}", "", "facts"]
    lines += [f"  {name} = {value}" for name, value in flat_facts(facts).items()]
    rows = [
        (kind, f"{total['tensors']:,}", f"{total['values']:,}", in_words(total["bytes"]))
        for kind, total in totals.items()
    ]
    lines += ["", *_table([("kind", "tensors", "values", "size"), *rows], {1, 2, 3}), ""]
    each = [(t["key"], t["dtype"], str(t["shape"]), in_words(t["bytes"])) for t in tensors]
    return EXIT_DONE, lines + _table([("tensor", "dtype", "shape", "size"), *each], {3})


def _verify(options: argparse.Namespace) -> Outcome:
    from largetrain.checkpoint.tools import verify

    found = verify(existing(options.path, f"{KEY} verify"), f"{KEY} verify")
    code = EXIT_MISTAKE if any(found.values()) else EXIT_DONE
    if options.json:
        content = [{"path": path, "whole": not problems, "problems": problems} for path, problems in found.items()]
        return code, _json(content)
    return code, [line for path, problems in found.items() for line in (problems or [f"{path}: whole"])]


def _diff(options: argparse.Namespace) -> Outcome:
    first, second = (_checkpoint(path, f"{KEY} diff") for path in (options.first, options.second))
    from largetrain.checkpoint.diff import compare
    from largetrain.checkpoint.reader import open_checkpoint

    found = compare(open_checkpoint(first), open_checkpoint(second))
    verdict = "the same, bit for bit" if found.same_tensors else "different"
    counts = f"{found.compared} in both, {len(found.missing)} in one alone"
    lines = [f"tensors: {verdict} ({counts})", f"A {first}", f"B {second}"]
    lines += _some([f"only in {'B' if lacking == 'A' else 'A'}: {key}" for key, lacking in found.missing.items()])
    lines += _some([f"{key}: {one} in A, {other} in B" for key, (one, other) in found.reshaped.items()])
    lines += _some(
        [
            f"{change.key}: {change.count:,} of {change.of:,} values differ, by at most {change.largest:.3g}"
            for change in sorted(found.changed, key=lambda change: -change.largest)
        ]
    )
    if found.own:
        lines.append(f"random generators of ranks {', '.join(map(str, found.own))} differ")
    lines += _some([f"{name}: {json.dumps(a)} in A, {json.dumps(b)} in B" for name, (a, b) in found.facts.items()])
    return EXIT_DONE if found.same_tensors else EXIT_DIFFERENT, lines


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more of these"]


def _prune(options: argparse.Namespace) -> Outcome:
    from largetrain.checkpoint.retention import remove
    from largetrain.checkpoint.tools import to_prune

    key = f"{KEY} prune"
    doomed = to_prune(existing(options.path, key), options.keep_last, options.keep_every, key)
    if not doomed:
        return EXIT_DONE, ["nothing to delete"]
    if options.dry_run:
        return EXIT_DONE, [f"would delete {path}" for path in doomed]
    lines = []
    for path in sorted(doomed, key=step_of):
        try:
            remove(path)
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be deleted ({error.strerror or error}).") from error
        lines.append(f"deleted {path}")
    return EXIT_DONE, lines


def _reshard(options: argparse.Namespace) -> Outcome:
    key = f"{KEY} reshard"
    source = _checkpoint(options.source, key)
    from largetrain.checkpoint.reshard import reshard

    files = reshard(source, Path(options.target), options.ranks, force=options.force, key=key)
    return EXIT_DONE, [f"{source} -> {options.target}: {files} files of tensors, bit for bit the same"]


def _export(options: argparse.Namespace) -> Outcome:
    from largetrain.checkpoint.export import DEFAULT_SHARD_BYTES, DTYPES, export, parse_size
    from largetrain.checkpoint.weights import weights_from

    key = f"{KEY} export"
    single = options.format == "torch" or (options.format == "safetensors" and options.target.endswith(".safetensors"))
    if single and options.max_shard_size:
        raise ConfigError(f"{key} --max-shard-size: {options.target} is one file; name a folder, or leave it out.")
    size = parse_size(options.max_shard_size) if options.max_shard_size else DEFAULT_SHARD_BYTES
    source = weights_from(options.source, key, ema=options.ema)
    written = export(
        source,
        Path(options.target),
        options.format,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        shard_bytes=size,
        tokenizer=_tokenizer_of(Path(source.where)),
        force=options.force,
    )
    what = f"{written.tensors} tensors, {in_words(written.bytes)}, {written.files} file{'s' * (written.files > 1)}"
    return EXIT_DONE, [f"{source.where} -> {written.path}: {what}"]


def _tokenizer_of(checkpoint: Path) -> Path | None:
    """The tokenizer.json that the run of a checkpoint was configured with, where both are at hand."""
    try:
        config = json.loads((checkpoint.absolute().parent.parent / "config.json").read_bytes())
        written = config["run"]["data"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = Path(written) if isinstance(written, str) and written != "bytes" else None
    return found if found is not None and found.is_file() else None


def _import(options: argparse.Namespace) -> Outcome:
    from largetrain.checkpoint.importing import import_weights
    from largetrain.checkpoint.reshard import model_yaml

    if options.trust:
        print(f"largetrain: --trust: code in the files of {options.source} may run", file=sys.stderr)
    source = import_weights(
        options.source,
        Path(options.target),
        f"{KEY} import",
        hf_config=Path(options.hf_config) if options.hf_config else None,
        trust=options.trust,
        force=options.force,
    )
    lines = [f"# {source.where} -> {options.target}: {len(source.entries)} tensors", f"init_from: {options.target}"]
    model = source.facts.get("model")
    return EXIT_DONE, lines + (model_yaml(model).rstrip().splitlines() if model is not None else [])


COMMANDS: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "prune": _prune,
    "reshard": _reshard,
    "export": _export,
    "import": _import,
}
