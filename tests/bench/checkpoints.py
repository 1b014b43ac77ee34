"""The benchmark of checkpoints: largetrain's beside plain files, DeepSpeed's own and torch.distributed.checkpoint's.

`launch/benchmark checkpoints` calls this; it is not part of CI. The state is that of a bare DeepSpeed engine: weights
and Adam's moments in fp32 under ZeRO-1. In each round every program saves and loads it once, every other round in
reverse order, and ratios are taken within the rounds. What is loaded comes from the disk: files are taken out of the
page cache before. Numbers are worth something on an otherwise idle machine and disk only.

Saves of ours are hashed, synced and published; plain files are written and synced; DCP syncs, DeepSpeed does not, so
that its files are synced, and timed, afterwards. "Pause" is what training waits for: ours copies while the next update
computes its gradients (here matrix products, as many operations as those of one sample of 512 tokens take), and the
wait before that update's step counts. "Lost" is how much later a series of matrix products on every rank ends that has
such a save among them.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import checkpoints_report as report
from tests.bench.environments import ROOT
from tests.bench.launches import LaunchError, free_port, launch
from tests.bench.report import MIB
from tests.bench.vision_job import quiet_environment

BYTES_PER_STATE = 4 * 3
"""fp32; a weight and two moments for each parameter."""
MOST_STATES = 4
"""On the disk at a time, with room to spare."""
QUICK = {"layers": 1, "width": 128, "rounds": 1}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="launch/benchmark checkpoints",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--folder", type=Path, default=ROOT / "runs", help="on the disk to be measured (default: runs/)")
    made.add_argument("--ranks", type=int, default=2, help="processes that save (default: 2)")
    made.add_argument("--rounds", type=int, default=8, help="after one that does not count (default: 8)")
    made.add_argument("--layers", type=int, default=5, help="of the transformer that is saved (default: 5)")
    made.add_argument("--width", type=int, default=768, help="12 width^2 parameters a layer (default: 768)")
    made.add_argument("--quick", action="store_true", help="a smoke test of seconds; its numbers say nothing")
    made.add_argument("--limit", type=float, default=600.0, help="seconds after which it is given up")
    made.add_argument("--json", metavar="FILE", help="write every number of every round there")
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Launch the ranks; returns their rounds, sizes and loads.

    Raises:
        LaunchError: they failed or took longer than the limit.
    """
    port = free_port()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="largetrain-bench-", dir=options.folder.absolute()) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
        command += [f"--master-port={port}", "-m", "tests.bench.checkpoints_ranks"]
        command += ["--folder", f"{folder}/files", "--report", f"{folder}/report.json"]
        command += [word for key in ("layers", "width", "rounds") for word in (f"--{key}", str(vars(options)[key]))]
        environment = {**quiet_environment(os.environ), "DS_ACCELERATOR": "cpu"}
        try:
            launch(command, environment, folder, options.limit, port)
        except LaunchError as error:
            said = [line for line in output(folder) if line.startswith("[rank")]  # the launcher's own words come last
            raise LaunchError("\n".join([str(error), *said])) from error
        for line in output(folder):
            if line.startswith("round "):
                print(line)
        found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def output(folder: Path) -> list[str]:
    """Lines that launcher and ranks printed."""
    return (folder / "output.txt").read_text(errors="replace").splitlines()


def complaint(options: argparse.Namespace) -> str | None:
    """What keeps it from starting, if anything does."""
    if options.width % 64 or options.width % options.ranks or min(options.width, options.layers, options.rounds) < 1:
        return f"--width {options.width} must be a multiple of 64 and of --ranks; --layers and --rounds at least 1"
    existing = next(path for path in (options.folder.absolute(), *options.folder.absolute().parents) if path.exists())
    needed = MOST_STATES * BYTES_PER_STATE * 12 * options.width**2 * options.layers
    free = shutil.disk_usage(existing).free
    if free < needed:
        return f"--folder {options.folder}: {free / MIB:.0f} MiB are free, {needed / MIB:.0f} are needed"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    if problem := complaint(options):
        parser().error(problem)
    started, load_before = time.monotonic(), os.getloadavg()[0]
    try:
        found = measure(options)
    except LaunchError as error:
        print(f"launch/benchmark checkpoints: {error}", file=sys.stderr)
        return 1
    for line in ("", *report.lines(found["rounds"], found["sizes"])):
        print(line)
    loads = ", ".join(f"{load:.1f}" for load in found["loads"])
    print(
        f"{found['sizes']['parameters'] / 1e6:.1f} M parameters, ZeRO-1, fp32, {options.ranks} ranks of one thread on "
        f"{len(os.sched_getaffinity(0))} cores, {options.rounds} rounds; load before {load_before:.1f}, after each "
        f"round {loads}; {time.monotonic() - started:.0f} s in all"
    )
    if options.json:
        content = {**found, "options": {**vars(options), "folder": str(options.folder)}, "load_before": load_before}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
