"""Launches on fake hosts at length: `python -m tests.sweeps.hosts [launchers] [slurm] [times] [kills --count 30]`.

launchers: the same run on two and three hosts by every way to start it; losses have to be those of one host.
slurm: a launch in an allocation, and launch/slurm stopped, requeued and resumed.
times: seconds from a failure to the end of the launch, and to the end of the last process on any host.
kills: one run that loses ranks, agents, hosts and cables at random moments, and has to end as if nothing had happened.
Needs what `tests/cluster/fake_hosts.py` needs, and for all launchers Debian's packages pdsh, openmpi-bin,
slurmctld, slurmd, slurm-client and munge.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.checkpoints import weights_of
from tests.cli.test_train_cli import run_command
from tests.cluster.fake_hosts import Cluster, why_not
from tests.cluster.fake_slurm import missing, slurm
from tests.cluster.launches import ROOT, Launch, start
from tests.distributed.tiny_run import rows_of, without_times, write_inputs
from tests.ranks import run_ranks

BIN = Path(sys.executable).parent
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu"}
ENVIRONMENT |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "GLOO_SOCKET_IFNAME": "eth0"}
FILES = ["--ds_config", "engine.json", "--config", "run.json"]
LIMIT_S = 300.0


def command_lines(name: str, cluster: Cluster, hostfile: Path, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Host -> what is started there."""
    first = cluster.hosts["node1"].address
    launch = [sys.executable, "-m", "largetrain", "launch", "--hostfile", str(hostfile)]
    if name == "largetrain launch":
        return {"node1": [*launch, "--", *arguments]}
    if name.startswith("largetrain launch --launcher "):
        return {"node1": [*launch, "--launcher", name.split()[-1], "--", *arguments]}
    if name == "launch/mpi":
        return {"node1": [str(ROOT / "launch" / "mpi"), str(hostfile), *arguments]}
    if name == "torchrun":
        words = [str(BIN / "torchrun"), f"--nnodes={len(cluster.hosts)}", "--nproc-per-node=1"]
        words += [f"--master-addr={first}", "--master-port=29555"]
        return {
            host: [*words, f"--node-rank={rank}", "-m", "largetrain", *arguments]
            for rank, host in enumerate(cluster.hosts)
        }
    words = [str(BIN / "deepspeed"), "--hostfile", str(hostfile), "--master_addr", first]
    return {"node1": [*words, "--module", "largetrain", *arguments]}


LAUNCHERS = (
    "largetrain launch",
    "largetrain launch --launcher torchrun",
    "largetrain launch --launcher openmpi",
    "torchrun",
    "launch/mpi",
    "deepspeed (pdsh)",
)


def launchers(hosts: int) -> bool:
    """One line for each way to start."""
    good = True
    with Cluster(hosts) as cluster:
        folder = cluster.folder / "run"
        write_inputs(folder, {"zero_optimization": {"stage": 2}}, {"logging": {"every_steps": 1}})
        paths = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json"), "--steps", "6"]
        run_ranks(run_command, hosts, [*paths, "--output", str(folder / "straight")])
        wanted = without_times(rows_of(folder, "straight"))
        for index, name in enumerate(LAUNCHERS):
            if (name.endswith("mpi") and not shutil.which("mpirun")) or ("pdsh" in name and not shutil.which("pdsh")):
                print(f"{hosts} hosts, {name}: not installed", flush=True)
                continue
            began = time.monotonic()
            arguments = [*FILES, "--steps", "6", "--output", f"out{index}"]
            lines = command_lines(name, cluster, cluster.hostfile(1), arguments)
            code, text = together(cluster, folder, lines)
            rows = without_times(rows_of(folder, f"out{index}")) if code == 0 else []
            same = "to the bit" if rows == wanted else f"within {largest_difference(rows, wanted):.1e}"
            left = sum(len(cluster.processes(host)) for host in cluster.hosts)
            told = f"exit code {code}, losses {same}, {time.monotonic() - began:.0f} s, {left} processes left"
            print(f"{hosts} hosts, {name}: {told}", flush=True)
            # a sum over three ranks may be taken in another order: a few roundings of fp32 in each of six updates
            if code or largest_difference(rows, wanted) > 1e-5 or left:
                good = False
                print(text[-3000:])
    return good


def largest_difference(rows: list, wanted: list) -> float:
    """Of the losses; infinite when rows are missing."""
    if len(rows) != len(wanted):
        return float("inf")
    return max(abs(row["loss"] - other["loss"]) for row, other in zip(rows, wanted, strict=True))


def together(cluster: Cluster, folder: Path, lines: dict[str, list[str]]) -> tuple[int, str]:
    """Run the lines at once; the worst exit code and all output."""
    environment = {**os.environ, **ENVIRONMENT, "PATH": f"{BIN}:{os.environ['PATH']}"}
    running = [
        subprocess.Popen(
            cluster.command(host, words, folder),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, words in lines.items()
    ]
    texts = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    return max(abs(process.returncode) for process in running), "\n".join(texts)


def slurm_jobs() -> bool:
    """The launch in an allocation, and the sbatch script: to its end, and stopped, requeued and resumed."""
    if reason := missing():
        print(f"slurm: {reason}")
        return False
    with Cluster(2) as cluster, slurm(cluster) as environment:
        folder = cluster.folder / "run"
        environment |= {**ENVIRONMENT, "PATH": f"{BIN}:{environment['PATH']}"}
        del environment["GLOO_SOCKET_IFNAME"]
        write_inputs(folder, {"zero_optimization": {"stage": 2}}, {"logging": {"every_steps": 1}})
        paths = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json")]
        run_ranks(run_command, 2, [*paths, "--steps", "400", "--output", str(folder / "straight")])
        wanted = without_times(rows_of(folder, "straight"))

        def on_first(*words: str) -> str:
            done = cluster.run("node1", words, folder, env=environment, timeout=LIMIT_S)
            return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")

        size = ["-N2", "--ntasks-per-node=1"]
        launch = [sys.executable, "-m", "largetrain", "launch", "--launcher", "slurm", "--quiet", "--"]
        text = on_first("salloc", *size, *launch, *FILES, "--steps", "400", "--output", "out")
        good = without_times(rows_of(folder)) == wanted
        print(f"largetrain launch --launcher slurm: {'to the bit' if good else text}", flush=True)
        batch = [*size, "--cpus-per-task=1", "--gpus-per-node=0", str(ROOT / "launch" / "slurm"), *FILES]
        job = on_first("sbatch", "--parsable", *batch, "--steps", "400").strip()
        log = folder / f"largetrain-{job}.log"
        deadline = time.monotonic() + LIMIT_S
        stopped_at = 0
        while (
            "done: 400 updates" not in (text := log.read_text() if log.exists() else "") and time.monotonic() < deadline
        ):
            if not stopped_at and "step 20/" in text:
                on_first("scancel", "--signal=USR1", job)
                stopped_at = 20
            time.sleep(0.2)
        rows = without_times(rows_of(folder, f"runs/largetrain-{job}"))
        resumed = rows == wanted and "saved in" in text and "resuming from" in text
        print(f"launch/slurm, stopped, requeued, resumed: {'to the bit' if resumed else text[-3000:]}", flush=True)
        return good and resumed


def times() -> bool:
    """What a failure costs until the launch has ended, and until nothing runs any more."""

    def cut(cluster: Cluster, launch: Launch) -> None:
        cluster.cut("node2")

    def kill(host: str, containing: str) -> Callable[[Cluster, Launch], None]:
        return lambda cluster, launch: launch.kill(host, containing)

    events: dict[str, Callable[[Cluster, Launch], None]] = {
        "rank on another host killed": kill("node2", "stand_in"),
        "rank 0 killed": kill("node1", "stand_in"),
        "agent on another host killed": kill("node2", "hosts.agent"),
        "launcher killed": lambda cluster, launch: launch.signal(signal.SIGKILL),
        "Ctrl-C": lambda cluster, launch: launch.signal(signal.SIGINT),
        "host reset": lambda cluster, launch: cluster.halt("node2"),
        "cable cut": cut,
        "power off": lambda cluster, launch: cluster.power_off("node2"),
    }
    good = True
    for name, event in events.items():
        with Cluster(2) as cluster:
            launch = start(cluster, steps=10**6)
            launch.wait_for("rank 1 step 2")
            began = time.monotonic()
            event(cluster, launch)
            launch.process.wait(60)
            ended = time.monotonic() - began
            while any(cluster.processes(host) for host in cluster.hosts) and time.monotonic() - began < 60:
                time.sleep(0.02)
            gone = time.monotonic() - began
        print(f"{name}: launch over after {ended:.1f} s, last process after {gone:.1f} s", flush=True)
        good = good and gone < 30
    return good


def kills(count: int, seed: int, steps: int) -> bool:
    """One run, `count` failures, and a run that has none beside it."""
    draw = random.Random(seed)
    with Cluster(2) as cluster:
        folder = cluster.folder / "run"
        checkpoints = {"every_steps": 3, "at_end": True}
        evaluation = {"every_steps": 5, "at_end": True}
        run = {"logging": {"every_steps": 1}, "checkpoints": checkpoints, "evaluation": evaluation}
        write_inputs(folder, {"zero_optimization": {"stage": 2}}, run)
        paths = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json")]
        run_ranks(run_command, 2, [*paths, "--steps", str(steps), "--output", str(folder / "straight")])
        flags = ["--hostfile", str(cluster.hostfile(1)), "--max-restarts", "1000"]
        words = [sys.executable, "-m", "largetrain", "launch", *flags, "--", *FILES]
        words += ["--steps", str(steps), "--output", "out"]
        process = subprocess.Popen(
            cluster.command("node1", words, folder),
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines: list[str] = []
        threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True).start()
        done = _disturb(cluster, process, lines, draw, count)
        code = process.wait(600)
        time.sleep(1)
        if code != 0:
            print("".join(lines[-100:]))
            return False
        left = [words for host in cluster.hosts for words in cluster.processes(host).values()]
        same_rows = without_times(rows_of(folder)) == without_times(rows_of(folder, "straight"))
        last = f"step-{steps:08}"
        ours, straight = (weights_of(folder / name / "checkpoints" / last) for name in ("out", "straight"))
        same_tensors = ours.keys() == straight.keys() and all(torch.equal(ours[key], straight[key]) for key in ours)
        told = f"exit code {code}, {done} failures, rows {'same' if same_rows else 'DIFFER'}"
        print(f"{told}, weights {'same' if same_tensors else 'DIFFER'}, {len(left)} processes left")
        return same_rows and same_tensors and not left


def _disturb(
    cluster: Cluster, process: "subprocess.Popen[str]", lines: list[str], draw: random.Random, count: int
) -> int:
    """Failures at random moments of the run, each after the one before was noticed; returns how many there were."""
    done, seen, idle = 0, 0, 0
    while process.poll() is None and done < count:
        # within a start: before, at, or after its first checkpoints; never three starts in a row without one
        wait_for = "step " if idle < 2 else "-saved-"
        marks = [index for index, line in enumerate(lines) if "node1:0: step " in line and index >= seen]
        needed = 8 if wait_for == "-saved-" else draw.choice([0, 1, 4, 8])
        if len(marks) < max(1, needed):
            time.sleep(0.05)
            continue
        time.sleep(draw.uniform(0, 1.5))
        if process.poll() is not None:
            break
        idle = 0 if len(marks) >= 4 else idle + 1
        what = draw.choice(["rank", "rank", "rank", "agent", "host", "cable"])
        seen = len(lines)
        print(f"{done + 1}: {what} after {len(marks)} updates", flush=True)
        if what in ("rank", "agent"):
            pattern = "largetrain train" if what == "rank" else "hosts.agent"
            host = draw.choice(["node1", "node2"])
            for process_id in cluster.processes(host, pattern):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
        elif what == "host":
            cluster.power_off("node2")
            time.sleep(draw.uniform(1, 5))
            cluster.power_on("node2")
        else:
            cluster.cut("node2")
            time.sleep(draw.uniform(14, 18))
            cluster.join("node2")
        done += 1
        while process.poll() is None and not any("; restart " in line for line in lines[seen:]):
            time.sleep(0.05)
        seen = len(lines)
    return done


def main() -> int:
    """Run the parts that are named, or all; exit code 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="launchers, slurm, times, kills; none: all")
    parser.add_argument("--count", type=int, default=30, help="failures in the run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--steps", type=int, default=400, help="length of the run")
    options = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 2
    parts = options.parts or ["launchers", "slurm", "times", "kills"]
    good = [launchers(hosts) for hosts in (2, 3) if "launchers" in parts]
    good += [slurm_jobs()] if "slurm" in parts else []
    good += [times()] if "times" in parts else []
    good += [kills(options.count, options.seed, options.steps)] if "kills" in parts else []
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
