"""The benchmark: largetrain, a hand-written DeepSpeed loop and HF Trainer on the same task, alternating in one run.

`launch/benchmark` calls this; it is not part of CI. Numbers are worth something on an otherwise idle machine only; the
ratios are taken within each round, so that a load which stays the same does not distort them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from largetrain.config.load import load
from largetrain.config.resolved import Resolved
from largetrain.config.schema import LanguageRun
from tests.bench import report
from tests.bench.environments import (
    ROOT,
    EnvironmentsError,
    compile_operators,
    extensions_folder,
    prepare_environments,
)
from tests.bench.job import Job
from tests.bench.launches import LaunchError, Outcome, free_port, largetrain_report, launch, outcome, ranks_report

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
ENGINE_FILES = {"fp32": "zero{}_fp32.json", "bf16": "zero{}_bf16.json", "fp16": "zero{}.json"}
PLAIN, HF = "plain DeepSpeed", "HF Trainer"
MODULES = {PLAIN: "tests.bench.plain_deepspeed", HF: "tests.bench.hf_trainer"}
SEED = 1234


@dataclass(frozen=True)
class Program:
    """One row of the report: what is launched, in which environment, with which numbers."""

    name: str
    environment: str
    precision: str
    threads: int | None = None
    """OMP_NUM_THREADS; None: unset, as the `deepspeed` command leaves it."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="launch/benchmark", description=__doc__, allow_abbrev=False)
    made.add_argument("--ranks", type=int, default=2, help="processes of each program (default: 2)")
    made.add_argument("--stage", type=int, choices=range(4), default=2, help="ZeRO stage (default: 2)")
    made.add_argument("--precision", choices=tuple(ENGINE_FILES), default="fp32", help="of the comparison")
    made.add_argument("--micro-batch", type=int, default=4, help="samples per rank and update (default: 4)")
    made.add_argument("--preset", default="demo", help="size of the model (default: demo, 4 layers of width 192)")
    made.add_argument("--steps", type=int, default=24, help="updates of each launch (default: 24)")
    made.add_argument("--warm", type=int, default=4, help="first updates that the rate leaves out (default: 4)")
    made.add_argument("--rounds", type=int, default=2, help="launches of each program (default: 2)")
    made.add_argument("--skip-hf", action="store_true", help="leave HF Trainer out (nothing is installed)")
    made.add_argument("--skip-half", action="store_true", help="leave out fp16 and bf16 against fp32")
    made.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="engine JSON keys")
    made.add_argument("--limit", type=float, default=300.0, help="seconds after which a launch is given up")
    made.add_argument("--json", metavar="FILE", help="write every number of every launch there")
    return made


def programs(options: argparse.Namespace, cores: int) -> list[Program]:
    """What runs in each round, in order; rivals run as typed and with the threads shared out over the ranks."""
    threads = max(1, cores // options.ranks)
    chosen = [Program(report.OURS, "largetrain", options.precision)]
    for name, environment in ((PLAIN, "plain"), *([] if options.skip_hf else [(HF, "hf")])):
        chosen.append(Program(name, environment, options.precision))
        tuned = f"{name}, OMP_NUM_THREADS={threads}"
        chosen.append(Program(tuned, environment, options.precision, threads))
    if not options.skip_half:
        halves = [p for p in ("fp16", "bf16") if p != options.precision]
        chosen += [Program(f"{report.OURS} {precision}", "largetrain", precision) for precision in halves]
    return chosen


def resolve(options: argparse.Namespace, precision: str) -> Resolved:
    """The run that all programs share, as largetrain resolves it."""
    overrides = [f"train_micro_batch_size_per_gpu={options.micro_batch}", "gradient_accumulation_steps=1"]
    flags = {
        "steps": ("--steps", options.steps),
        "seed": ("--seed", SEED),
        "model.preset": ("--preset", options.preset),
    }
    resolved = load(
        str(ROOT / "ds_configs" / ENGINE_FILES[precision].format(options.stage)),
        None,
        [*overrides, *options.set],
        flags,
        options.ranks,
        "--ranks",
        options.ranks,
    )
    return resolved.with_steps(options.steps)


def make_job(resolved: Resolved) -> Job:
    """Tokenize if need be, and write down the task for the rivals."""
    from largetrain.data.text import prepare

    assert resolved.decoder is not None and resolved.total_steps is not None
    assert isinstance(resolved.run, LanguageRun)
    train = prepare(resolved.run, resolved.decoder.seq_len, resolved.decoder.vocab_size).train
    return Job(
        decoder=asdict(resolved.decoder),
        tokens_folder=str(train.folder),
        split=train.split.to_json(),
        engine=resolved.engine,
        steps=resolved.total_steps,
        seed=resolved.run.seed,
    )


def command_of(
    program: Program, environment: Path, job: Job, folder: Path, preset: str, ranks: int, port: int
) -> list[str]:
    """The command as a user types it, with the job's files written to `folder`."""
    line = [str(environment / "bin" / "deepspeed"), f"--num_gpus={ranks}", f"--master_port={port}", "--module"]
    if not program.name.startswith(report.OURS):
        job.write(folder / "job.json")
        module = MODULES[program.name.partition(",")[0]]
        return [*line, module, "--job", str(folder / "job.json"), "--report", str(folder)]
    (folder / "engine.json").write_text(json.dumps(job.engine))
    ours = ["--ds_config", str(folder / "engine.json"), "--steps", str(job.steps), "--seed", str(job.seed)]
    rest = [f"model.preset={preset}", "evaluation.at_end=false", "checkpoints.at_end=false"]
    return [*line, "largetrain", *ours, "--output", str(folder / "run"), "--set", *rest]


def environment_of(program: Program, environment: Path) -> dict[str, str]:
    """Variables of a launch: the user's own without a launcher's, and the shared compiled operators."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    path = os.pathsep.join([str(environment / "bin"), str(Path(sys.executable).parent), kept.get("PATH", "")])
    threads = {} if program.threads is None else {"OMP_NUM_THREADS": str(program.threads)}
    return {**kept, **threads, "PATH": path, "TORCH_EXTENSIONS_DIR": str(extensions_folder())}


def measure(program: Program, environment: Path, job: Job, options: argparse.Namespace) -> Outcome:
    """Launch a program once.

    Raises:
        LaunchError: it failed or took longer than the limit.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="largetrain-bench-") as name:
        folder = Path(name)
        command = command_of(program, environment, job, folder, options.preset, options.ranks, port)
        launched = launch(command, environment_of(program, environment), folder, options.limit, port)
        ours = program.name.startswith(report.OURS)
        found = largetrain_report(folder / "run") if ours else ranks_report(folder)
    return outcome(found, launched, job.tokens_per_update, options.warm)


def alternate(
    chosen: Sequence[Program], folders: dict[str, Path], options: argparse.Namespace
) -> Iterator[dict[str, Outcome]]:
    """Yield one round after the other; a program that fails is reported and left out of the rest."""
    jobs = {precision: make_job(resolve(options, precision)) for precision in {p.precision for p in chosen}}
    failed: set[str] = set()
    for number in range(1, options.rounds + 1):
        one: dict[str, Outcome] = {}
        for program in chosen:
            if program.name in failed:
                continue
            try:
                found = measure(program, folders[program.environment], jobs[program.precision], options)
            except LaunchError as error:
                say(f"round {number}: {program.name} FAILED: {error}")
                failed.add(program.name)
                continue
            one[program.name] = found
            say(
                f"round {number}: {program.name}: {found.tokens_per_s:.0f} tokens/s, first update after "
                f"{found.first_update_s:.1f} s, load {os.getloadavg()[0]:.1f}"
            )
        yield one


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    options = parser().parse_args()
    if not 1 <= options.warm < options.steps:
        parser().error(f"--warm {options.warm} must be at least 1 and less than --steps {options.steps}")
    started, load_before, cores = time.monotonic(), os.getloadavg()[0], len(os.sched_getaffinity(0))
    try:
        folders = prepare_environments(not options.skip_hf, say)
        compile_operators(say)
    except EnvironmentsError as error:
        print(f"launch/benchmark: {error}", file=sys.stderr)
        return 1
    chosen = programs(options, cores)
    rivals = [p.name for p in chosen if not p.name.startswith(report.OURS)]
    halves = [p.name for p in chosen if p.name.startswith(report.OURS) and p.precision != options.precision]
    rounds = list(alternate(chosen, folders, options))
    say("")
    for line in report.lines(rounds, rivals, halves):
        say(line)
    say(
        f"ZeRO-{options.stage}, {options.precision}, {options.ranks} ranks on {cores} cores, preset {options.preset}, "
        f"{options.steps} updates of {options.micro_batch} samples per rank; load before {load_before:.1f}; "
        f"{time.monotonic() - started:.0f} s in all"
    )
    if options.json:
        content = {
            "options": vars(options),
            "cores": cores,
            "load_before": load_before,
            "rounds": [{name: asdict(found) for name, found in one.items()} for one in rounds],
        }
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0 if all(len(one) == len(chosen) for one in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
