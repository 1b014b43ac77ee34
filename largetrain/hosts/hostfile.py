"""The hostfile, one `NAME slots=N` a line, read strictly: every mistake with its line, all of them together.

DeepSpeed reads the same format and lets much pass: a file that is not there, `slots=0`, `slots=2.5`, names that a
shell or ssh takes for something else. What is accepted here means the same to it, but for IPv6 addresses and a byte
order mark, which it cannot handle.
"""

import ipaddress
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from largetrain.errors import ConfigError

MAX_SLOTS = 1024
MAX_BYTES = 10_000_000
MAX_NAME = 253
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
FORM = "write `NAME slots=N`"


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    """What ssh is told, without the user: a host name, an alias of ssh's configuration, or an address."""
    slots: int
    """Ranks on this host."""
    user: str | None = None
    line: int = 0
    devices: tuple[int, ...] | None = None
    """Which of its devices the ranks get; None: the first ones."""

    @property
    def target(self) -> str:
        """The destination for ssh, as it was written."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def key(self) -> str:
        """The same for two spellings of one name or address."""
        address = address_of(self.name)
        return str(address) if address is not None else self.name.lower()


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a file, in its order.

    Raises:
        ConfigError: there is no such file, it is a folder, unreadable, names no host, or has mistakes (all of them).
    """
    return parse_hostfile(_text(path), path)


def parse_hostfile(text: str, path: str) -> list[Host]:
    """The hosts that a hostfile's text names; `path` is for messages.

    Raises:
        ConfigError: all its mistakes, each with its line.
    """
    hosts: list[Host] = []
    problems: list[str] = []
    first_at: dict[str, int] = {}
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        written = raw.partition("#")[0].strip()
        if not written:
            continue
        found = _host(written)
        if isinstance(found, str):
            problems.append(f"{path}:{number}: {_shown(written)}: {found}")
            continue
        before = first_at.setdefault(found.key, number)
        if before != number:
            text_of = f"{found.name} stands in line {before} already; give each host one line with all its slots"
            problems.append(f"{path}:{number}: {text_of}.")
        hosts.append(replace(found, line=number))
    if not hosts and not problems:
        problems = [f"{path}: names no host; write `NAME slots=N` in a line for each."]
    if problems:
        raise ConfigError(problems)
    return hosts


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a name is, without asking anybody; None for a name proper."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def first_hosts(hosts: list[Host], number: int | None, path: str) -> list[Host]:
    """The first `number` hosts (`--num-nodes`); None: all.

    Raises:
        ConfigError: fewer are listed.
    """
    if number is None:
        return hosts
    if not 1 <= number <= len(hosts):
        listed = f"{path} lists {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        raise ConfigError(f"--num-nodes {number}: {listed}; ask for 1 to {len(hosts)}, or add lines.")
    return hosts[:number]


def _text(path: str) -> str:
    place = Path(os.path.expanduser(path))
    if place.is_dir():
        raise ConfigError(f"--hostfile {path}: is a folder; name the file in it.")
    try:
        with place.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"--hostfile {path}: holds more than {MAX_BYTES:,} bytes; that is no hostfile.")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"--hostfile {path}: there is no such file (looked from {os.getcwd()}); name another one, or leave "
            f"--hostfile out to train on this machine alone."
        ) from None
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is no text in UTF-8; save it as plain text.") from None


def _host(written: str) -> Host | str:
    """One line without its comment: the host, or what is wrong with it."""
    name, *fields = written.split()
    if not fields:
        if re.fullmatch(r"[^:]+:\d+", name):
            return f"{FORM}, not NAME:N."
        return f"slots are missing; {FORM}, N being the ranks on this host (its GPUs)."
    user, has_user, rest = name.rpartition("@")
    problem = _user_problem(user) if has_user else None
    problem = problem or _name_problem(rest)
    if problem:
        return problem
    slots = _slots(fields)
    if isinstance(slots, str):
        return slots
    return Host(rest.strip("[]"), slots, user or None)


def _slots(fields: list[str]) -> int | str:
    key, equals, value = fields[0].partition("=")
    if key != "slots" or not equals:
        return f"{_shown(fields[0])} is not slots=N; {FORM}."
    if len(fields) > 1:
        return f"{_shown(' '.join(fields[1:]))} after the slots; {FORM} and nothing more (a comment begins with #)."
    if not (value.isascii() and value.isdigit()):
        return f"slots={value} is not a whole number, the ranks on this host."
    number = int(value[:20])
    if number == 0:
        return "slots=0 would start nothing there; take the line out, or comment it out with #."
    if number > MAX_SLOTS:
        return f"slots={value}: more than {MAX_SLOTS} ranks on one host; write the number of its GPUs."
    return number


def _user_problem(user: str) -> str | None:
    if not user:
        return "no user before the @."
    return None if USER.fullmatch(user) else f"{_shown(user)} is no user name; ssh or a shell could take it otherwise."


def _name_problem(name: str) -> str | None:
    """Why this cannot be a host's name or address; None when it can."""
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    address = address_of(bare)
    if address is not None:
        if address.is_unspecified or address.is_multicast:
            return f"{bare} is the address of no single host."
        if address.version == 6 and address.is_link_local:
            return f"{bare} is a link-local address, which means another host on every host; write its name."
        return f"{name}: brackets are for IPv6 addresses." if bare != name and address.version == 4 else None
    if name.startswith("-"):
        return f"{_shown(name)} begins like an option of ssh; no host is called that."
    if not name or len(name) > MAX_NAME or not all(LABEL.fullmatch(part) for part in name.split(".")):
        return (
            f"{_shown(name)} is no host name: letters, digits, - and _ between dots (it would go to a shell and to "
            f"ssh); or an address."
        )
    if name.rpartition(".")[2].isdigit():
        return f"{_shown(name)} is neither a name nor a complete IPv4 address."
    return None


def _shown(text: str) -> str:
    """Quoted and short, with what no terminal should be sent escaped."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
