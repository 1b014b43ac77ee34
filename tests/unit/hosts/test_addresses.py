"""One host under two names."""

import time

import pytest

from largetrain.errors import ConfigError
from largetrain.hosts import addresses
from largetrain.hosts.addresses import addresses_of, check_distinct
from largetrain.hosts.hostfile import Host

KNOWN = {
    "a": {"10.0.0.1"},
    "b": {"10.0.0.2", "fd00::2"},
    "b-too": {"fd00::2"},
    "localhost": {"::1", "127.0.0.1"},
    "me": {"127.0.1.1"},
}


def resolve(name: str) -> set[str]:
    return KNOWN.get(name, set())


def hosts(*names: str) -> list[Host]:
    return [Host(name, 1, line=number) for number, name in enumerate(names, start=1)]


def test_different_hosts_and_names_that_only_ssh_knows_pass():
    check_distinct(hosts("a", "b", "alias", "alias2", "localhost"), "hosts", resolve)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("a", "b", "b-too"), "hosts:3: b-too is the host of line 2, b, under another name (fd00::2)"),
        (("localhost", "a", "me"), "hosts:3: me is the host of line 1, localhost, under another name (loopback)"),
    ],
)
def test_one_host_under_two_names(names, told):
    with pytest.raises(ConfigError) as raised:
        check_distinct(hosts(*names), "hosts", resolve)
    [problem] = raised.value.problems
    assert problem.startswith(told)


def test_a_name_server_that_does_not_answer_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(addresses, "RESOLVE_LIMIT_S", 0.1)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="hosts:3"):
        check_distinct(
            hosts("slow", "b", "b-too"), "hosts", lambda n: time.sleep(20) or set() if n == "slow" else KNOWN[n]
        )
    assert time.monotonic() - began < 10


def test_addresses_of_this_machine():
    assert addresses_of("127.0.0.1") == {"127.0.0.1"}
    assert addresses_of("no-such-host.invalid") == set()
