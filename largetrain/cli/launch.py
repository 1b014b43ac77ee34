"""`largetrain launch [flags] -- ARGUMENTS OF train`: train on the hosts of a hostfile, or on this machine.

One ssh to each host starts an agent there, which starts the host's ranks. Nothing starts before every host has
answered; the first failure ends all; with --max-restarts the run goes on from its newest checkpoint.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from largetrain.cli.arguments import Parser, load_from_args, train_parser
from largetrain.cli.config import readable
from largetrain.config.batch import ACCUMULATION, MICRO, TOTAL
from largetrain.config.resolved import Resolved
from largetrain.config.world import MAX_PORT, World
from largetrain.errors import EXIT_DONE, ConfigError
from largetrain.hosts import console
from largetrain.hosts.addresses import check_distinct
from largetrain.hosts.agreement import check_loopback, is_this_machine
from largetrain.hosts.attempt import GRACE_S, Interrupted, Part, Unreachable, Wishes, catch_signals
from largetrain.hosts.console import say
from largetrain.hosts.environment import handed_on
from largetrain.hosts.facts import gpu_count
from largetrain.hosts.hostfile import Host, first_hosts, read_hostfile
from largetrain.hosts.job import Job, with_files
from largetrain.hosts.links import Events
from largetrain.hosts.outcome import STOPPED, Outcome
from largetrain.hosts.restarts import Policy, Supervisor
from largetrain.hosts.selection import select

# --launcher -> what carries the agents to their hosts
CARRIERS = {"ssh": "ssh", "torchrun": "ssh", "slurm": "srun", "openmpi": "mpirun", "none": "local"}
PROGRAM = ("-m", "largetrain", "train")  # what Python runs as a rank


def parser() -> Parser:
    """The command's own flags."""
    made = Parser(
        prog="largetrain launch",
        usage="largetrain launch [flags] -- [arguments of `largetrain train`]",
        description=__doc__,
        allow_abbrev=False,
    )
    made.add_argument("--hostfile", metavar="FILE", help="hosts, one `NAME slots=N` a line; absent: this machine")
    made.add_argument("--num-nodes", "--num_nodes", metavar="N", type=int, help="the first N hosts of the hostfile")
    made.add_argument("--include", "-i", metavar="NAME@NAME:0,1", help="only these hosts and devices")
    made.add_argument("--exclude", "-e", metavar="NAME@NAME:0,1", help="all but these hosts and devices")
    made.add_argument("--slots", metavar="N", type=int, help="ranks on this machine, without a hostfile")
    made.add_argument(
        "--launcher",
        choices=CARRIERS,
        default="ssh",
        help="how a host is reached: ssh (default); torchrun: by ssh, and a torchrun there starts the ranks; slurm: by "
        "srun, on the hosts of the allocation; openmpi: by mpirun; none: not at all, this line runs on every host",
    )
    made.add_argument(
        "--node-rank", "--node_rank", metavar="N", type=int, help="with --launcher none: this host's place in the file"
    )
    made.add_argument("--master-addr", "--master_addr", metavar="ADDRESS", help="where the ranks meet; the first host")
    made.add_argument("--master-port", "--master_port", metavar="PORT", type=int, help="absent: a free one is found")
    made.add_argument("--max-restarts", metavar="N", type=int, default=0, help="starts after failures (0)")
    made.add_argument("--min-hosts", metavar="N", type=int, help="go on with so many when others stay away")
    made.add_argument("--host-wait", metavar="SECONDS", type=float, default=30.0, help="how long to wait for them (30)")
    made.add_argument(
        "--env", metavar="NAME[=VALUE]", action="append", default=[], help="one more variable for the ranks"
    )
    made.add_argument("--logs", metavar="DIR", help="output of the ranks, here; absent: logs/ in the output folder")
    made.add_argument("--quiet", action="store_true", help="print none of it")
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: of the ranks, or of the first that failed.

    Raises:
        ConfigError: flags, hostfile, hosts or the run's configuration are wrong; nothing was started.
    """
    own, arguments = _divided(argv)
    options = parser().parse_args(own)
    trained = train_parser("largetrain launch ... --").parse_args(arguments)
    everyone, source = _hosts(options)
    _check_numbers(options, everyone)
    resolved = load_from_args(trained, _world(everyone, source))
    hosts = everyone if options.launcher != "none" else [everyone[options.node_rank or 0]]
    if trained.dry_run:
        print(readable(resolved), end="")
        print("".join(f"# {host.target}: {host.slots} ranks\n" for host in everyone), end="")
        return EXIT_DONE
    job = _job(options, trained, resolved, arguments)
    _announce(job, hosts)
    events: Events = Events()
    supervisor = Supervisor(
        hosts=hosts,
        policy=Policy(options.max_restarts, options.min_hosts, options.host_wait),
        wishes=_wishes(options, everyone, source),
        job_for=_JobFor(job, trained, resolved, hosts, source),
        logs=Path(options.logs or Path(job.output, "logs")),
        events=events,
        quiet=options.quiet,
    )
    undo = catch_signals(events)
    try:
        return _finish(supervisor.run(), supervisor.logs)
    except Unreachable as error:
        raise ConfigError(list(error.faults.values())) from None
    except Interrupted as error:
        say(f"stopped by {signal.Signals(error.number).name} while no rank was running")
        return 128 + error.number
    finally:
        console.drain()
        undo()


def _divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of launch, and the arguments of train after the `--`."""
    words = list(argv)
    if "--" not in words:
        return words, []
    index = words.index("--")
    rest = words[index + 1 :]
    return words[:index], rest[1:] if rest[:1] == ["train"] else rest


def _hosts(options: Namespace) -> tuple[list[Host], str | None]:
    """The hosts, and the hostfile's name; None: this machine."""
    if options.launcher == "slurm" and options.hostfile is None:
        return _allocation(options.slots), "the allocation"
    if options.hostfile is None:
        given = [f"--{name}" for name in ("include", "exclude") if getattr(options, name) is not None]
        given += ["--num-nodes"] if options.num_nodes not in (None, 1) else []
        if given:
            raise ConfigError(f"{', '.join(given)}: chooses from a hostfile; add --hostfile FILE.")
        return [Host("localhost", options.slots or gpu_count() or 1)], None
    if options.slots is not None:
        raise ConfigError("--slots: is for this machine alone; a hostfile has slots=N in each line.")
    hosts = read_hostfile(options.hostfile)
    hosts = select(hosts, options.include, options.exclude)
    hosts = first_hosts(hosts, options.num_nodes, options.hostfile)
    if len(hosts) == 1 and is_this_machine(hosts[0]):
        return hosts, None
    check_loopback(hosts, options.hostfile)
    check_distinct(hosts, options.hostfile)
    return hosts, options.hostfile


def _allocation(slots: int | None) -> list[Host]:
    """The hosts that SLURM has given this job."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise ConfigError(
            "--launcher slurm: this is no job of SLURM's (SLURM_JOB_NODELIST is unset); sbatch or salloc."
        )
    if shutil.which("scontrol") is None:
        raise ConfigError("--launcher slurm: there is no scontrol here.")
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"--launcher slurm: scontrol show hostnames {nodes}: {done.stderr.strip()}")
    told = [os.environ.get(name, "") for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE")]
    ranks = slots or next((int(number) for number in told if number.isdigit() and int(number)), 1)
    return [Host(name, ranks) for name in done.stdout.split()]


def _wishes(options: Namespace, everyone: Sequence[Host], source: str | None) -> Wishes:
    carrier = "local" if source is None else CARRIERS[options.launcher]
    part = Part(everyone, options.node_rank or 0) if options.launcher == "none" and len(everyone) > 1 else None
    return Wishes(options.master_addr, options.master_port, carrier, part, _grace_s())


def _none_problems(options: Namespace, hosts: Sequence[Host]) -> list[str]:
    """What is wrong with the flags of a line that runs on every host."""
    problems = []
    if options.launcher != "none":
        return ["--node-rank: goes with --launcher none."] if options.node_rank is not None else []
    if len(hosts) > 1:
        missing = [f"--{name}" for name in ("node-rank", "master-addr", "master-port") if not _given(options, name)]
        if missing:
            problems.append(f"--launcher none: needs {', '.join(missing)}, the latter two the same on every host.")
    if options.node_rank is not None and not 0 <= options.node_rank < len(hosts):
        problems.append(f"--node-rank {options.node_rank}: there are {len(hosts)} hosts; write 0 to {len(hosts) - 1}.")
    if options.max_restarts:
        problems.append("--max-restarts: the hosts do not hear of each other with --launcher none.")
    return problems


def _given(options: Namespace, flag: str) -> bool:
    return getattr(options, flag.replace("-", "_")) is not None


def _check_numbers(options: Namespace, hosts: Sequence[Host]) -> None:
    problems = _none_problems(options, hosts)
    if options.slots is not None and options.slots < 1:
        problems.append(f"--slots {options.slots}: is not a number of ranks.")
    if options.master_port is not None and not 1 <= options.master_port <= MAX_PORT:
        problems.append(f"--master-port {options.master_port}: is no port; 1 to {MAX_PORT}.")
    if options.max_restarts < 0:
        problems.append(f"--max-restarts {options.max_restarts}: is not a number of restarts.")
    if options.min_hosts is not None and not 1 <= options.min_hosts <= len(hosts):
        problems.append(f"--min-hosts {options.min_hosts}: there are {len(hosts)} hosts; write 1 to {len(hosts)}.")
    if options.host_wait < 0:
        problems.append(f"--host-wait {options.host_wait:g}: is no time.")
    if problems:
        raise ConfigError(problems)


def _world(hosts: Sequence[Host], source: str | None) -> World:
    ranks = sum(host.slots for host in hosts)
    words = f"{ranks} slots of {len(hosts)} hosts in {source}" if source else f"{ranks} slots of this machine"
    return World(world_size=ranks, local_world_size=hosts[0].slots, source=words)


def _job(options: Namespace, trained: Namespace, resolved: Resolved, arguments: Sequence[str]) -> Job:
    words, files = with_files(arguments)
    output = resolved.run.output or _output(resolved.run.name, trained.resume)
    if resolved.run.output is None:
        words = (*words, "--output", output)
    return Job(
        folder=os.getcwd(),
        output=os.path.abspath(output),
        environment=handed_on(os.environ, options.env),
        files=files,
        arguments=words,
        python=sys.executable,
        program=PROGRAM,
        torchrun=options.launcher == "torchrun",
    )


def _output(name: str, resume: str | None) -> str:
    """The folder that the run itself would choose: all starts have to use the same one."""
    if resume not in (None, "auto", "best"):
        path = Path(str(resume)).absolute()
        for folder in (path, path.parent, path.parent.parent):
            if (folder / "checkpoints").is_dir():
                return str(folder)
    stamp = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
    earlier = [folder for folder in Path("runs").glob(f"{name}-*") if stamp.fullmatch(folder.name)]
    earlier = [folder for folder in earlier if any((folder / "checkpoints").glob("step-*"))]
    if resume is not None and earlier:
        return str(max(earlier))
    return str(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _announce(job: Job, hosts: Sequence[Host]) -> None:
    ranks = sum(host.slots for host in hosts)
    listed = ", ".join(f"{host.target} ({host.slots})" for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")
    say(f"{ranks} rank{'s' if ranks > 1 else ''} on {listed}; output {job.output}")
    for file in job.files.values():
        say(f"{file['name']}: sha256 {file['sha256'][:16]}, sent to every host")


def _grace_s() -> float:
    """How long ranks may go on after a signal, in seconds."""
    written = os.environ.get("LARGETRAIN_GRACE_S", "")
    try:
        return float(written) if written else GRACE_S
    except ValueError:
        raise ConfigError(f"environment: LARGETRAIN_GRACE_S={written} is not a number of seconds.") from None


class _JobFor:
    """The job on some of the hosts: the same global batch, and for restarts the newest checkpoint."""

    def __init__(self, job: Job, trained: Namespace, resolved: Resolved, hosts: list[Host], source: str | None):
        self.job, self.trained, self.resolved, self.hosts, self.source = job, trained, resolved, hosts, source

    def __call__(self, hosts: Sequence[Host], again: bool, saved: bool) -> Job:
        """See `restarts.Supervisor`.

        Raises:
            ConfigError: the global batch cannot be kept on these hosts.
        """
        job = self.job
        if len(hosts) < len(self.hosts):
            job = job.with_batch(self._batch(hosts))
        # a run that was to begin from another's checkpoint does so again until it has one of its own
        if again and (saved or self.trained.resume in (None, "auto")):
            job = job.resumed("auto")
        return job

    def _batch(self, hosts: Sequence[Host]) -> dict[str, int]:
        """The batch on fewer ranks: the same in all and per rank, with more accumulation."""
        batch, layout = self.resolved.batch, self.resolved.layout
        ranks = sum(host.slots for host in hosts)
        shares, rest = divmod(ranks, layout.ranks_per_replica)
        if rest or not shares or batch.global_batch % (batch.micro_batch * shares):
            raise ConfigError(
                f"--min-hosts: {ranks} ranks on {', '.join(host.name for host in hosts)} cannot keep the global batch "
                f"of {batch.global_batch}: it is no multiple of micro-batch {batch.micro_batch} x {ranks} ranks"
                + (f" / {layout.ranks_per_replica} of one model" if layout.ranks_per_replica > 1 else "")
            )
        accumulation = batch.global_batch // (batch.micro_batch * shares)
        found = {TOTAL: batch.global_batch, MICRO: batch.micro_batch, ACCUMULATION: accumulation}
        sets = [f"{key}={value}" for key, value in found.items()]
        others = [
            word for word in self.trained.overrides if word.partition("=")[0].removeprefix("engine.") not in found
        ]
        changed = Namespace(**{**vars(self.trained), "overrides": [*others, *sets]})
        load_from_args(changed, _world(hosts, self.source))  # whatever else speaks against these ranks
        return found


def _finish(outcome: Outcome, logs: Path) -> int:
    """Tell how it ended, the first failing rank's last words last; returns the exit code."""
    if outcome.code == EXIT_DONE:
        say(f"all ranks have finished; their output: {logs}")
        return EXIT_DONE
    if outcome.code in STOPPED or outcome.asked:
        say(f"stopped, exit code {outcome.code}; output of the ranks: {logs}")
        return outcome.code
    console.drain()
    words = [f"largetrain launch: {outcome.reason}; output of the ranks: {logs}"]
    if outcome.last_words:
        words += [f"its last words, exit code {outcome.code}:", *outcome.last_words]
    print("\n".join(words), file=sys.stderr, flush=True)
    return outcome.code
