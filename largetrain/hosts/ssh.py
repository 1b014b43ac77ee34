"""What carries an agent to its host, ssh as a rule, and what its failures mean."""

import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import largetrain
from largetrain.hosts.hostfile import Host
from largetrain.hosts.processes import MARK, START

CONNECT_LIMIT_S = 8
OPTIONS = {
    "BatchMode": "yes",  # asks nobody for a password
    "ConnectTimeout": str(CONNECT_LIMIT_S),
    "ServerAliveInterval": "4",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",  # no banners, and every reason for a failure
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",  # a connection of its own, which ends with this launcher
    "ControlPath": "none",
    "RequestTTY": "no",
}
AGENT = ("-u", "-m", "largetrain.hosts.agent")
SSH_FAILED, NOT_FOUND, NOT_EXECUTABLE = 255, 127, 126
# what ssh or the remote Python says; what is wrong; the way out
FAULTS = (
    (
        r"Could not resolve hostname",
        "its name is unknown here",
        "correct it in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is another one than before",
        "if it was installed anew, `ssh-keygen -R {name}` and then `ssh {target}` once by hand; if not, somebody may "
        "be in between",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "its host key is unknown here",
        "connect once by hand and accept it: `ssh {target}`",
    ),
    (
        r"Permission denied",
        "ssh is refused without a password",
        "give it your public key: `ssh-copy-id {target}`",
    ),
    (
        r"Connection refused",
        "no ssh server listens there",
        "start sshd, or give its port in ~/.ssh/config",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it does not answer",
        "is it switched on, and does a firewall let ssh through?",
    ),
    (
        r"No module named '?largetrain",
        "largetrain is not installed there for {python}",
        "install it, or use one environment on a shared disk",
    ),
    (
        r"SyntaxError|requires Python",
        "{python} is too old there",
        "give all hosts the same environment",
    ),
)


def ssh_command(host: Host, python: str, variables: Mapping[str, str]) -> list[str]:
    """The command line that starts an agent on a host.

    What reaches the remote shell is quoted for it; what matters more goes through the agent's standard input.

    Args:
        variables: what Python itself needs before the agent is told everything: PATH, PYTHONPATH, the run's marks.
    """
    remote = shlex.join(["exec", "env", *(f"{name}={value}" for name, value in variables.items()), python, *AGENT])
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", *options, "--", host.target, remote]


def agent_command(carrier: str, host: Host, python: str, variables: Mapping[str, str]) -> list[str]:
    """The command line that starts an agent on a host: by `ssh`, SLURM's `srun`, Open MPI's `mpirun`, or `local`, here.

    All of them connect the agent's standard input and output with the launcher's.
    """
    if carrier == "local":
        return [python, *AGENT]
    if carrier == "ssh":
        return ssh_command(host, python, variables)
    agent = ["env", *(f"{name}={value}" for name, value in variables.items()), python, *AGENT]
    if carrier == "srun":
        # a step with all that the job has on that host, beside other steps
        step = ["--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--cpu-bind=none", "--unbuffered"]
        return ["srun", *step, "--quiet", "--kill-on-bad-exit=1", *agent]
    assert carrier == "mpirun", carrier
    return ["mpirun", "--host", f"{host.name}:1", "-n", "1", "--bind-to", "none", *agent]


def agent_variables(job: str, start: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for the agent's own Python."""
    found = {name: environment[name] for name in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV") if name in environment}
    folder = str(Path(largetrain.__file__).parent.parent)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if folder not in (sysconfig.get_paths()["purelib"], *paths):  # runs from a checkout
        paths.append(folder)
    if paths:
        found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths)
    return {**found, "PYTHONSAFEPATH": "1", MARK: job, START: start}  # nothing of the home folder is imported


def fault(host: Host, code: int, said: str, python: str = sys.executable, carrier: str = "ssh") -> str:
    """Why there is no agent on a host, and the way out, in one line.

    Args:
        code: exit code of ssh, which is the remote command's unless ssh itself failed.
        said: standard error of ssh.
        carrier: what was used in its place.
    """
    words = {"name": host.name, "target": host.target, "python": python}
    for pattern, wrong, way_out in FAULTS:
        if re.search(pattern, said):
            return f"{host.name}: {wrong.format(**words)}; {way_out.format(**words)}{_quoted(said)}"
    if code in (NOT_FOUND, NOT_EXECUTABLE):
        return f"{host.name}: there is no {python}; all hosts need the same environment at the same path{_quoted(said)}"
    what = f"the agent there ended with exit code {code}"
    if code == SSH_FAILED and carrier == "ssh":
        what = "ssh to it failed"
    elif code < 0:
        what = f"its {carrier} was killed by signal {-code}"
    return f"{host.name}: {what}{_quoted(said)}"


def _quoted(said: str) -> str:
    """The last line that says anything, in brackets."""
    lines = [line.strip() for line in said.splitlines() if line.strip().strip("@-=*")]
    return f" ({lines[-1][:200]})" if lines else ""
