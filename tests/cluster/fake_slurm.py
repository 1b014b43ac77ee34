"""SLURM on fake hosts: a controller on the first, a daemon on each. Debian's packages slurmctld, slurmd, munge."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.fake_hosts import Cluster

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
START_LIMIT_S = 20.0
# everything that may be in a namespace of its own, and no control groups, which here belong to the machine
CONFIGURATION = """
ClusterName=fake
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,requeue_delay=0
SlurmdParameters=config_overrides
StateSaveLocation=/run/slurm
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={names} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What would have to be installed; None when all is there."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    absent = sorted({package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None})
    return f"needs Debian's {' '.join(absent)}" if absent else None


@contextmanager
def slurm(cluster: Cluster) -> Iterator[dict[str, str]]:
    """SLURM on all hosts of a cluster until the end; yields the environment in which its commands find it."""
    first, *_ = cluster.hosts
    configuration, key = cluster.folder / "slurm.conf", cluster.folder / "munge.key"
    names = ",".join(cluster.hosts)
    configuration.write_text(CONFIGURATION.format(first=first, folder=cluster.folder, names=names))
    (cluster.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster.folder.chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    daemons = []
    try:
        for name in cluster.hosts:
            places = ["--socket=/run/munge.socket", "--pid-file=/run/munged.pid", "--seed-file=/run/munged.seed"]
            words = ["munged", "--foreground", "--force", f"--key-file={key}", "--log-file=/run/munged.log", *places]
            daemons.append(subprocess.Popen(cluster.command(name, words), env=environment, stderr=subprocess.DEVNULL))
        cluster.run(first, ["mkdir", "-p", "/run/slurm"])
        servers = [
            (first, ["slurmctld", "-D", "-i"]),
            *((name, ["slurmd", "-D", "-N", name]) for name in cluster.hosts),
        ]
        for name, words in servers:
            daemons.append(subprocess.Popen(cluster.command(name, words), env=environment, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + START_LIMIT_S
        wanted = f"idle {len(cluster.hosts)}"
        while (state := cluster.run(first, ["sinfo", "-h", "-o", "%T %D"], env=environment)).stdout.strip() != wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"SLURM did not start: {state.stdout} {state.stderr}")
            time.sleep(0.1)
        yield environment
    finally:
        for name in cluster.hosts:
            cluster.halt(name)
        for daemon in daemons:
            daemon.wait(20)
