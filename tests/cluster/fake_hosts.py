"""Hosts made of Linux namespaces, joined by a bridge without a way out; each has an sshd and throw-away keys.

A host has its own network, name, process table, /tmp, /run, /dev/shm, /etc/hosts and /etc/ssh; all other files are the
machine's. Needs root, a kernel with network namespaces, and Debian's packages iproute2, openssh-server and procps.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client"}
SBIN = "/usr/sbin:/sbin"
OWN = ("/tmp", "/run", "/dev/shm")  # places that every host has anew
NETWORK = "192.0.2"  # RFC 5737: for documentation, never routed
NETWORK_6 = "fd00:7474:"  # RFC 4193: of this machine's own
START_LIMIT_S = 10.0
END_LIMIT_S = 10.0

# The first process of a host; $1 is its name, $2 the cluster's folder. It ends with the namespace's every process.
FIRST_PROCESS = r"""
set -eu
hostname "$1"
mount --make-rprivate /
mount -t sysfs sysfs /sys
for place in /tmp /run /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $place; done
mkdir -m 755 /run/sshd
mount --bind "$2/$1/hosts" /etc/hosts
mount --bind "$2/ssh" /etc/ssh
test ! -d /root/.ssh || mount -t tmpfs -o mode=700 tmpfs /root/.ssh
ip link set lo up
exec /usr/sbin/sshd -D -e -f "$2/sshd_config"
"""
SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
UseDNS no
PidFile none
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""
SSH_CONFIG = """
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


def why_not() -> str | None:
    """Why this machine cannot make such hosts; None when it can."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    for what, place in (("this Python", Path(sys.executable).absolute()), ("the checkout", Path(__file__).resolve())):
        if any(place.is_relative_to(own) for own in OWN):
            return f"{what} is in {place.parent}, where every host sees files of its own"
    path = f"{os.environ.get('PATH', os.defpath)}:{SBIN}"
    missing = [program for program in PACKAGES if shutil.which(program, path=path) is None]
    if missing:
        packages = sorted({PACKAGES[program] for program in missing})
        return f"needs {', '.join(missing)} (Debian, Ubuntu: apt-get install {' '.join(packages)})"
    links = "ip link add end1 type veth peer name end2 && ip link add switch type bridge"
    words = ["unshare", "--net", "--mount", "--uts", "--pid", "--ipc", "--fork", "sh", "-c", links]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=_environment())
    if done.returncode:
        return f"the kernel or this container allows no namespaces or links between them: {done.stderr.strip()[:200]}"
    return None


@dataclass
class FakeHost:
    """One of them; `first_pid` and `unshare_pid` as this machine counts."""

    name: str
    address: str
    netns: str
    port: str
    address_6: str = ""
    first_pid: int = 0
    unshare: "subprocess.Popen[bytes] | None" = None


class Cluster:
    """`count` hosts named node1, node2, ...; a context manager that leaves nothing behind.

    Args:
        own_name_is_loopback: each host's /etc/hosts gives its own name 127.0.1.1, as Debian's installer does.
    """

    def __init__(self, count: int, own_name_is_loopback: bool = False):
        # not below /tmp, of which each host has its own
        self.folder = Path(tempfile.mkdtemp(prefix="largetrain-hosts-", dir="/var/tmp"))
        mark = f"lt{secrets.token_hex(3)}"
        self.switch = f"{mark}-switch"
        self.hosts = {
            f"node{i}": FakeHost(
                f"node{i}", f"{NETWORK}.{10 + i}", f"{mark}-node{i}", f"port{i}", f"{NETWORK_6}:{10 + i}"
            )
            for i in range(1, count + 1)
        }
        self._own_name_is_loopback = own_name_is_loopback

    def __enter__(self) -> "Cluster":
        try:
            self._make_files()
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
            _ip("-n", self.switch, "link", "set", "bridge", "up")
            for host in self.hosts.values():
                self._plug_in(host)
                self._boot(host)
            for host in self.hosts.values():
                self._await_sshd(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            self._switch_off(host)
        there = _ip("netns", "list").split()
        for name in (self.switch, *(host.netns for host in self.hosts.values())):
            if name in there:
                _ip("netns", "delete", name)
        shutil.rmtree(self.folder)

    # what tests do with hosts

    def command(self, name: str, words: Sequence[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `words` on a host, from this machine."""
        place = [f"--wdns={cwd}"] if cwd is not None else []
        spaces = ["--net", "--mount", "--uts", "--pid", "--ipc"]
        return ["nsenter", f"--target={self.hosts[name].first_pid}", *spaces, *place, "--", *words]

    def run(self, name: str, words: Sequence[str], cwd: Path | str | None = None, **options: Any) -> Any:
        """`subprocess.run` on a host, with captured text."""
        options = {"capture_output": True, "text": True, "timeout": 60} | options
        return subprocess.run(self.command(name, words, cwd), check=False, **options)

    def hostfile(self, slots: int = 1, names: Sequence[str] | None = None) -> Path:
        """A hostfile that all hosts can read."""
        path = self.folder / f"hosts-{secrets.token_hex(2)}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in names or self.hosts))
        return path

    def processes(self, name: str, containing: str = "") -> dict[int, str]:
        """Command lines of a host's processes but its sshd, by this machine's numbers."""
        host = self.hosts[name]
        found = {}
        for entry in _in_namespace(host.first_pid):
            with contextlib.suppress(OSError):
                words = Path("/proc", str(entry), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words and containing in words and not words.startswith(("sshd", "/usr/sbin/sshd")):
                    found[entry] = words
        return found

    def cut(self, name: str) -> None:
        """Pull the cable at the switch's end: the host notices nothing, and every packet is lost."""
        _ip("-n", self.switch, "link", "set", self.hosts[name].port, "nomaster")

    def join(self, name: str) -> None:
        """Plug it in again."""
        _ip("-n", self.switch, "link", "set", self.hosts[name].port, "master", "bridge")

    def halt(self, name: str) -> None:
        """Kill all processes of a host; its kernel still answers, with refusals."""
        self._switch_off(self.hosts[name])

    def power_off(self, name: str) -> None:
        """No goodbye: the cable is cut before its processes are killed."""
        self.cut(name)
        self._switch_off(self.hosts[name])

    def power_on(self, name: str) -> None:
        """Start a host that is off, and wait for its sshd."""
        self.join(name)
        self._boot(self.hosts[name])
        self._await_sshd(self.hosts[name])

    def limit_rate(self, rate: str | None) -> None:
        """Shape every cable in both directions, like "100mbit"; None: as fast as it goes."""
        for host in self.hosts.values():
            for space, device in ((host.netns, "eth0"), (self.switch, host.port)):
                have = _run("tc", "-n", space, "qdisc", "show", "dev", device)
                if "tbf" in have:
                    _run("tc", "-n", space, "qdisc", "delete", "dev", device, "root")
                if rate is not None:
                    shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                    _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shape)

    def sent_bytes(self, name: str) -> int:
        """Bytes that a host has sent over its cable."""
        shown = _ip("-n", self.hosts[name].netns, "-json", "-statistics", "link", "show", "eth0")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    # building and removing

    def _make_files(self) -> None:
        for key in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(self.folder / key))
        public = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        known = [f"{host.name},{host.address},{host.address_6} {public}\n" for host in self.hosts.values()]
        (self.folder / "known_hosts").write_text("".join(known))
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder))
        (self.folder / "ssh").mkdir()
        (self.folder / "ssh" / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        for host in self.hosts.values():
            (self.folder / host.name).mkdir()
            lines = ["127.0.0.1 localhost\n", "::1 localhost\n"]
            lines += [
                f"{'127.0.1.1' if other is host and self._own_name_is_loopback else other.address} {other.name}\n"
                for other in self.hosts.values()
            ]
            (self.folder / host.name / "hosts").write_text("".join(lines))

    def _plug_in(self, host: FakeHost) -> None:
        _ip("netns", "add", host.netns)
        cable = ["type", "veth", "peer", "name", "eth0", "netns", host.netns]
        _ip("-n", self.switch, "link", "add", host.port, *cable)
        _ip("-n", self.switch, "link", "set", host.port, "master", "bridge", "up")
        _ip("-n", host.netns, "address", "add", f"{host.address}/24", "dev", "eth0")
        # without a search for duplicates, which takes seconds
        _ip("-n", host.netns, "-6", "address", "add", f"{host.address_6}/64", "dev", "eth0", "nodad")
        _ip("-n", host.netns, "link", "set", "eth0", "up")

    def _boot(self, host: FakeHost) -> None:
        spaces = ["--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        first = ["sh", "-c", FIRST_PROCESS, "sh", host.name, str(self.folder)]
        with open(self.folder / host.name / "log", "ab") as log:
            host.unshare = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{host.netns}", "unshare", *spaces, "--", *first],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_sshd(self, host: FakeHost) -> None:
        assert host.unshare is not None
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and host.unshare.poll() is None:
            below = Path(f"/proc/{host.unshare.pid}/task/{host.unshare.pid}/children").read_text().split()
            if below and "sshd" in Path(f"/proc/{below[0]}/cmdline").read_text() and self._answers(host):
                host.first_pid = int(below[0])
                return
            time.sleep(0.02)
        raise RuntimeError(f"{host.name} did not start: {(self.folder / host.name / 'log').read_text()}")

    def _answers(self, host: FakeHost) -> bool:
        """Whether sshd listens: port 22 in state 0A of the kernel's table, which is per network namespace."""
        assert host.unshare is not None
        rows = Path(f"/proc/{host.unshare.pid}/net/tcp").read_text().splitlines()[1:]
        return any(row.split()[1].endswith(":0016") and row.split()[3] == "0A" for row in rows)

    def _switch_off(self, host: FakeHost) -> None:
        """Kill the first process, with which the kernel ends all others of the host."""
        if host.unshare is None:
            return
        left = _in_namespace(host.first_pid) if host.first_pid else []
        if host.first_pid:  # unshare, its parent, then takes note of its end and ends as well
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.first_pid, signal.SIGKILL)
        else:
            host.unshare.kill()
        host.unshare.wait(END_LIMIT_S)
        deadline = time.monotonic() + END_LIMIT_S
        while any(_alive(process_id) for process_id in left) and time.monotonic() < deadline:
            time.sleep(0.02)
        host.unshare, host.first_pid = None, 0


def _alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _in_namespace(first_pid: int) -> list[int]:
    """Processes of the same process table as this one, but itself."""
    if not first_pid:
        return []
    wanted = os.stat(f"/proc/{first_pid}/ns/pid").st_ino
    return [entry for entry in _numbers() if entry != first_pid and _namespace_of(entry) == wanted]


def _numbers() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _namespace_of(process_id: int) -> int:
    try:
        return os.stat(f"/proc/{process_id}/ns/pid").st_ino
    except OSError:
        return 0


def _environment() -> dict[str, str]:
    return {"HOME": "/root", "LANG": "C.UTF-8", "PATH": f"/usr/local/bin:/usr/bin:/bin:{SBIN}"}


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=_environment())
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
