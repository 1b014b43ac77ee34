"""The benchmark on images: largetrain's `ddp` backend beside a bare DDP loop, SyncBN beside BN, and timm's loader.

`launch/benchmark vision` calls this; it is not part of CI. Everything runs on the CPU, in processes of its own that
alternate: each round starts every program once, every other round in reverse order, and ratios are taken within the
rounds. Numbers are worth something on an otherwise idle machine only.

The bare loop comes in two forms: as it is usually written, and tuned (`forward_sync_buffers=False`, which spares a
broadcast of the running statistics before each forward pass, and `gradient_as_bucket_view=True`). torch's SyncBatchNorm
refuses CPU tensors, so that synchronised batch norm has no rival here but largetrain without it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.bench.environments import ROOT, EnvironmentsError, python_with_timm
from tests.bench.image_loading import make_images
from tests.bench.launches import LaunchError, free_port, largetrain_report, launch, ranks_report
from tests.bench.vision_job import StepProgram, VisionJob, quiet_environment
from tests.bench.vision_report import Comparison, StepTimes, loader_lines, loader_name, step_lines, step_times

PARTS = ("steps", "loader")
IMAGE_SIZE, SEED = 64, 1234
MICRO_BATCHES = {"resnet18": 32, "resnet50": 4}
"""Sizes at which an update takes some tenths of a second on one core."""
KINDS = {"ours": "largetrain", "bare": "bare DDP", "tuned": "tuned DDP", "sync": "largetrain SyncBN"}
LOADER_BATCH, SPARE_BATCHES = 32, 8
QUICK = {"rounds": 1, "steps": 7, "warm": 2, "models": ["resnet18"], "batches": 4, "image_size": 32, "no_clip": False}
Found = TypeVar("Found")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="launch/benchmark vision", description=__doc__, allow_abbrev=False)
    made.add_argument("--rounds", type=int, default=4, help="launches of each program (default: 4)")
    made.add_argument("--quick", action="store_true", help="a smoke test of a minute; its numbers say nothing")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    made.add_argument("--models", nargs="+", default=list(MICRO_BATCHES), help="of torchvision; batch 8 if not known")
    made.add_argument("--image-size", type=int, default=IMAGE_SIZE, help=f"side in pixels (default: {IMAGE_SIZE})")
    made.add_argument("--ranks", type=int, default=2, help="processes of each program (default: 2)")
    made.add_argument("--steps", type=int, default=41, help="updates of each launch (default: 41)")
    made.add_argument("--warm", type=int, default=11, help="first updates that do not count (default: 11)")
    made.add_argument("--workers", nargs="+", type=int, default=[0, 2], help="processes of the loaders (default: 0 2)")
    made.add_argument("--batches", type=int, default=32, help="batches of 32 that a loader is timed for (default: 32)")
    made.add_argument("--limit", type=float, default=300.0, help="seconds after which a launch is given up")
    made.add_argument("--json", metavar="FILE", help="write every number of every launch there")
    made.set_defaults(no_clip=True)
    return made


def programs(options: argparse.Namespace) -> tuple[list[StepProgram], list[Comparison]]:
    """What each round launches, and which of them are compared; the first model runs without clipping as well."""
    chosen, compared = [], []
    for model in options.models:
        cases = {1.0: tuple(KINDS)}
        if options.no_clip and model == options.models[0]:
            cases[0.0] = ("ours", "bare", "tuned")
        for clip, kinds in cases.items():
            job = VisionJob(
                model, MICRO_BATCHES.get(model, 8), options.image_size, clip, options.steps, SEED, options.ranks
            )
            suffix = "" if clip else " no clipping"
            names = {kind: f"{model} {KINDS[kind]}{suffix}" for kind in kinds}
            chosen += [StepProgram(name, job, kind) for kind, name in names.items()]
            compared += [Comparison("step rate", names[rival], names["ours"]) for rival in ("bare", "tuned")]
            if "sync" in names:
                compared.append(Comparison("SyncBN", names["sync"], names["ours"]))
    return chosen, compared


def there_and_back(items: Sequence[Found], number: int) -> Sequence[Found]:
    """The order of round `number` (from 1): what drifts over a round then favours nobody."""
    return items if number % 2 else items[::-1]


def measure_steps(program: StepProgram, options: argparse.Namespace) -> StepTimes:
    """Launch a program once.

    Raises:
        LaunchError: it failed or took longer than the limit.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="largetrain-bench-") as name:
        folder = Path(name)
        command = program.command(folder, port)
        launched = launch(command, quiet_environment(os.environ), folder, options.limit, port)
        ours = program.kind in ("ours", "sync")
        found = largetrain_report(folder / "run") if ours else ranks_report(folder)
    return step_times(found, launched, program.job.images_per_update, options.warm)


def measure_loader(python: Path, loader: str, workers: int, images: Path, options: argparse.Namespace) -> float:
    """Images per second of a loader in a process of its own.

    Raises:
        LaunchError: it failed or took longer than the limit.
    """
    counts = {"workers": workers, "batch": LOADER_BATCH, "batches": options.batches, "warm": SPARE_BATCHES}
    line = [str(python), "-m", "tests.bench.image_loading", "--loader", loader, "--folder", str(images)]
    line += [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    environment = quiet_environment(os.environ)
    try:
        done = subprocess.run(
            line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=options.limit, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"still running after {options.limit:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"exit code {error.returncode}\n{error.stderr[-1500:]}") from error
    return float(json.loads(done.stdout.splitlines()[-1])["images_per_s"])


def alternate(
    measures: Mapping[str, Callable[[], Found]], rounds: int, words: Callable[[Found], str]
) -> Iterator[dict[str, Found]]:
    """Yield one round after the other; a program that fails is reported and left out of the rest."""
    failed: set[str] = set()
    for number in range(1, rounds + 1):
        one: dict[str, Found] = {}
        for name in there_and_back([name for name in measures if name not in failed], number):
            try:
                one[name] = measures[name]()
            except LaunchError as error:
                say(f"round {number}: {name} FAILED: {error}")
                failed.add(name)
                continue
            say(f"round {number}: {name}: {words(one[name])}, load {os.getloadavg()[0]:.1f}")
        yield {name: one[name] for name in measures if name in one}


def steps_part(options: argparse.Namespace) -> tuple[list[dict[str, StepTimes]], list[str], bool]:
    """Rounds, report, and whether every program came through."""
    chosen, compared = programs(options)
    measures = {one.name: partial(measure_steps, one, options) for one in chosen}
    rounds = list(alternate(measures, options.rounds, lambda found: f"{found.median_s * 1e3:.0f} ms an update"))
    return rounds, step_lines(rounds, compared), all(len(one) == len(chosen) for one in rounds)


def loader_part(options: argparse.Namespace) -> tuple[list[dict[str, float]], list[str], bool]:
    """The same of the loaders; without timm ours run alone."""
    python, loaders = Path(sys.executable), ["ours"]
    try:
        python, loaders = python_with_timm(say), ["ours", "timm"]
    except EnvironmentsError as error:
        say(f"timm is not installed and cannot be, largetrain's loader runs alone: {str(error).splitlines()[-1]}")
    with tempfile.TemporaryDirectory(prefix="largetrain-bench-") as name:
        images = Path(name)
        make_images(images, LOADER_BATCH * (options.batches + 2 * SPARE_BATCHES))
        measures = {
            loader_name(loader, workers): partial(measure_loader, python, loader, workers, images, options)
            for workers in options.workers
            for loader in loaders
        }
        rounds = list(alternate(measures, options.rounds, lambda found: f"{found:.0f} images/s"))
    return rounds, loader_lines(rounds, options.workers), all(len(one) == len(measures) for one in rounds)


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    if not 1 <= options.warm < options.steps:
        parser().error(f"--warm {options.warm} must be at least 1 and less than --steps {options.steps}")
    started, load_before = time.monotonic(), os.getloadavg()[0]
    content: dict[str, object] = {"options": vars(options), "load_before": load_before}
    text: list[str] = []
    complete = True
    if "steps" in options.parts:
        steps, lines, through = steps_part(options)
        content["steps"] = [{name: asdict(found) for name, found in one.items()} for one in steps]
        text, complete = [*text, "", *lines], complete and through
    if "loader" in options.parts:
        rates, lines, through = loader_part(options)
        content["loader"] = rates
        text, complete = [*text, "", *lines], complete and through
    for line in text:
        say(line)
    say(
        f"fp32 on {len(os.sched_getaffinity(0))} cores, {options.ranks} ranks of one thread, images of "
        f"{options.image_size} pixels, {options.steps} updates of which {options.warm} do not count; load before "
        f"{load_before:.1f}; {time.monotonic() - started:.0f} s in all"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
