"""What a host says of itself before anything is started on it. No torch: the answer comes in a tenth of a second."""

import array
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import random
import socket
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import largetrain
from largetrain.hosts.addresses import addresses_of

PACKAGES = ("torch", "deepspeed")
SIOCGIFADDR = 0x8915  # linux/sockios.h: address of an interface
PORTS = range(20000, 30000)  # below those that the kernel gives to outgoing connections


def host_facts(resolve: Iterable[str] = ()) -> dict[str, Any]:
    """Versions, cores, GPUs, clock, and addresses: how the names in `resolve` resolve here."""
    return {
        "name": platform.node(),
        "machine": _machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: _version(name) for name in PACKAGES},
        "package": package_digest(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_count(),
        "time": time.time(),
        "resolved": {name: sorted(addresses_of(name)) for name in resolve},
        "reached_at": _reached_at(),
    }


def _machine() -> str:
    """The same for two connections to one host, under whatever names: its kernel's start and table of processes."""
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{started}/{os.stat('/proc/self/ns/pid').st_ino}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_digest(folder: Path | None = None) -> str:
    """Digest of largetrain's own source files: hosts that differ in it would run different programs."""
    root = folder or Path(largetrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def gpu_count(devices: Path = Path("/dev")) -> int:
    """NVIDIA devices, without asking their driver."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def _reached_at() -> str | None:
    """The address of this host that ssh came in by; None without ssh."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else None


def free_port() -> int:
    """A port on which nothing listens, and which no outgoing connection will be given meanwhile."""
    for port in random.sample(PORTS, len(PORTS)):
        if port_problem(port) is None:
            return port
    raise OSError(errno.EADDRINUSE, f"no free port from {PORTS.start} to {PORTS.stop - 1}")


def port_problem(port: int) -> str | None:
    """Why a server could not listen on a port of this host; None when it could."""
    try:
        listener(port).close()
    except OSError as error:
        return reason(error)
    return None


def reason(error: OSError) -> str:
    """The system's words for an error, without Python's additions."""
    return os.strerror(error.errno) if error.errno else str(error)


def listener(port: int) -> socket.socket:
    """A server on all addresses of this host.

    Raises:
        OSError: another program has the port.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)


def reach_problem(address: str, port: int, limit_s: float) -> str | None:
    """Why no connection to a port of another host comes about; None when it does."""
    try:
        socket.create_connection((address, port), timeout=limit_s).close()
    except TimeoutError:
        return f"no answer within {limit_s:.0f} s"
    except OSError as error:
        return reason(error)
    return None


def interface_towards(address: str) -> str | None:
    """The network interface by which packets to an address leave this host; None when that cannot be told."""
    try:
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    names = _ipv6_interfaces() if ":" in own else _ipv4_interfaces()
    return names.get(own)


def _ipv4_interfaces() -> dict[str, str]:
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            names[socket.inet_ntoa(request.tobytes()[20:24])] = name
    return names


def _ipv6_interfaces() -> dict[str, str]:
    names = {}
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        fields = line.split()
        names[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))] = fields[5]
    return names
