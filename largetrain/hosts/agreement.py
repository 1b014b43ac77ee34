"""Whether hosts that have answered can run together, and at which address they meet."""

from collections.abc import Mapping, Sequence

from largetrain.errors import ConfigError
from largetrain.hosts.addresses import is_loopback
from largetrain.hosts.hostfile import Host, address_of
from largetrain.hosts.messages import Message

SAME = {"python": "Python", "versions.torch": "torch", "versions.deepspeed": "DeepSpeed", "package": "largetrain"}
LOCAL = ("localhost", "localhost.localdomain")


def check_loopback(hosts: Sequence[Host], path: str) -> None:
    """Refuse names that mean another machine on each of several hosts.

    Raises:
        ConfigError: there is one.
    """
    problems = [
        f"{path}:{host.line}: {host.name} means another machine on every host; write its name in the network."
        for host in hosts
        if len(hosts) > 1 and is_this_machine(host)
    ]
    if problems:
        raise ConfigError(problems)


def is_this_machine(host: Host) -> bool:
    """Whether a host is written as this one: localhost, or a loopback address."""
    return host.name.lower() in LOCAL or (address_of(host.name) is not None and is_loopback(host.name))


def check_hosts(hosts: Sequence[Host], facts: Mapping[str, Message]) -> None:
    """Refuse hosts that cannot do their part, or would run another program than the first.

    Raises:
        ConfigError: all problems, each with its host.
    """
    problems = [f"{host.name}: {problem}." for host in hosts for problem in facts[host.name]["problems"]]
    first = hosts[0].name
    seen: dict[object, str] = {}
    for host in hosts:
        if (before := seen.setdefault(facts[host.name]["machine"], host.name)) != host.name:
            problems.append(f"{host.name}: is the same machine as {before}; its slots belong into one line.")
    for key, word in SAME.items():
        for host in hosts[1:]:
            there, here = _value(facts[host.name], key), _value(facts[first], key)
            if there != here:
                what = "other source files" if key == "package" else f"{there or 'none'}, {first} {here or 'none'}"
                problems.append(f"{host.name}: {word} differs ({what}); give all hosts the same environment.")
    with_gpus = {host.name for host in hosts if facts[host.name]["gpus"]}
    if with_gpus and len(with_gpus) < len(hosts):
        without = [host.name for host in hosts if host.name not in with_gpus]
        problems.append(
            f"{', '.join(without)}: no GPU there, and {', '.join(sorted(with_gpus))} with some; train on one kind."
        )
    if problems:
        raise ConfigError(problems)


def meeting_address(hosts: Sequence[Host], facts: Mapping[str, Message]) -> str:
    """The first host's address as the others see it: its own view of its name may be 127.0.1.1.

    Raises:
        ConfigError: the others do not know its name, and ssh does not tell.
    """
    first = hosts[0]
    if len(hosts) == 1:
        return "127.0.0.1"
    if (address := address_of(first.name)) is not None:
        return str(address)
    views = [facts[host.name]["resolved"][first.name] for host in hosts[1:]]
    common = [view for view in views[0] if all(view in other for other in views) and not is_loopback(view)]
    if common:
        return min(common, key=lambda view: ":" in view)  # IPv4 first
    reached_at = facts[first.name]["reached_at"]
    if reached_at and not is_loopback(reached_at):
        return str(reached_at)
    unknown = [host.name for host, view in zip(hosts[1:], views, strict=True) if not view]
    found = ", ".join(sorted({address for view in views for address in view}))
    why = f"{', '.join(unknown)} cannot resolve it" if unknown else f"they resolve it to {found}"
    raise ConfigError(
        f"{first.name}: at which address the other hosts reach it is not known: {why}. Add it to /etc/hosts or DNS "
        f"there, or give --master-addr."
    )


def address_of_second(hosts: Sequence[Host], facts: Mapping[str, Message]) -> str | None:
    """An address by which the first host reaches the second, for its choice of an interface."""
    if len(hosts) < 2:
        return None
    reached_at = facts.get(hosts[1].name, {}).get("reached_at")
    return reached_at if reached_at and not is_loopback(reached_at) else hosts[1].name


def _value(message: Message, key: str) -> object:
    value: object = message
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else None
    return value
