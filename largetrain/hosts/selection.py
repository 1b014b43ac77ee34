"""Which of a hostfile's hosts and devices a run takes: `--include` and `--exclude`, in DeepSpeed's syntax.

`node1@node2:0,2` means all devices of node1, and devices 0 and 2 of node2. An IPv6 address stands in brackets.
"""

import re
from dataclasses import replace

from largetrain.errors import ConfigError
from largetrain.hosts.hostfile import Host

PART = re.compile(r"(\[[^\]]*\]|[^:\[\]]+)(?::([0-9,]*))?")


def select(hosts: list[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts that are left, in the hostfile's order, each with the devices that it gives.

    Raises:
        ConfigError: both are given, one names what the hostfile does not, or nothing is left.
    """
    if include is None and exclude is None:
        return hosts
    if include is not None and exclude is not None:
        raise ConfigError("--include, --exclude: give one of them.")
    flag, text = ("--include", include) if include is not None else ("--exclude", exclude or "")
    assert text is not None
    named = _named(text, flag, hosts)
    left = []
    for host in hosts:
        chosen = named.get(host.key)
        if flag == "--include":
            kept = () if chosen is None else chosen or tuple(range(host.slots))
        else:
            gone = () if chosen is None else chosen or tuple(range(host.slots))
            kept = tuple(device for device in range(host.slots) if device not in gone)
        if kept:
            whole = kept == tuple(range(host.slots))
            left.append(host if whole else replace(host, slots=len(kept), devices=kept))
    if not left:
        raise ConfigError(f"{flag} {text}: leaves no host.")
    return left


def _named(text: str, flag: str, hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    """Key of a host -> devices named with it; () stands for all."""
    by_key = {host.key: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for part in text.split("@"):
        match = PART.fullmatch(part.strip())
        if match is None or match[2] == "":
            problems.append(f"{flag} {text}: {part!r} is not NAME or NAME:0,1; parts are divided by @.")
            continue
        name = match[1].strip("[]")
        host = by_key.get(Host(name, 1).key)
        if host is None:
            listed = ", ".join(host.name for host in hosts)
            problems.append(f"{flag} {text}: the hostfile has no {name!r}; it lists {listed}.")
            continue
        devices = tuple(int(number) for number in match[2].split(",") if number) if match[2] else ()
        if beyond := [device for device in devices if device >= host.slots]:
            problems.append(f"{flag} {text}: {name} has slots={host.slots}, there is no device {beyond[0]}.")
        if host.key in found or len(set(devices)) < len(devices):
            problems.append(f"{flag} {text}: names {name} or one of its devices twice.")
        found[host.key] = tuple(sorted(set(devices)))
    if problems:
        raise ConfigError(problems)
    return found
