"""Hosts that are one: two lines of a hostfile whose names lead to the same address. Asks the network."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence

from largetrain.errors import ConfigError
from largetrain.hosts.hostfile import Host

RESOLVE_LIMIT_S = 5.0
Resolve = Callable[[str], set[str]]


def addresses_of(name: str) -> set[str]:
    """All addresses of a name as this machine resolves it; none when it does not.

    A name that only ssh's configuration knows has none here, and that is no mistake.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(entry[4][0]) for entry in found}


def check_distinct(hosts: Sequence[Host], path: str, resolve: Resolve = addresses_of) -> None:
    """Refuse one host under two names; names that do not resolve here, or not in time, are passed over.

    Loopback addresses count as one: `localhost` and, in Debian's /etc/hosts, the machine's own name.

    Raises:
        ConfigError: for each line that repeats an earlier one's address.
    """
    problems = []
    first: dict[str, Host] = {}
    for host, found in zip(hosts, _all_addresses(hosts, resolve), strict=True):
        same = next((first[address] for address in sorted(found) if address in first), None)
        if same is not None:
            problems.append(
                f"{path}:{host.line}: {host.name} is the host of line {same.line}, {same.name}, under another name "
                f"({', '.join(sorted(found))}); its slots belong into one line."
            )
        for address in found:
            first.setdefault(address, host)
    if problems:
        raise ConfigError(problems)


def is_loopback(address: str) -> bool:
    """Whether an address reaches no further than the host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _all_addresses(hosts: Sequence[Host], resolve: Resolve) -> list[set[str]]:
    """Of each host, at once, since a name server that does not answer takes its time with each."""
    found: list[set[str]] = [set() for _ in hosts]

    def look_up(index: int) -> None:
        found[index] = {"loopback" if is_loopback(address) else address for address in resolve(hosts[index].name)}

    # daemons, so that one that still waits does not keep this process from ending
    threads = [threading.Thread(target=look_up, args=(index,), daemon=True) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESOLVE_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return found
