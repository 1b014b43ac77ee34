"""The hostfile: what is accepted, and that every mistake is named with its line, all together."""

import pytest

from largetrain.errors import ConfigError
from largetrain.hosts.hostfile import Host, first_hosts, parse_hostfile, read_hostfile


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        parse_hostfile(text, "hosts")
    return raised.value.problems


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1 slots=4\nnode2 slots=8\n", [Host("node1", 4, line=1), Host("node2", 8, line=2)]),
        ("node1 slots=4", [Host("node1", 4, line=1)]),
        ("\ufeffnode1 slots=4\n", [Host("node1", 4, line=1)]),
        ("# ours\r\n\r\n  node1\tslots=4 # eight? no\r\n", [Host("node1", 4, line=3)]),
        ("#old slots=1\nnode1 slots=04\n", [Host("node1", 4, line=2)]),
        ("me@node1 slots=1\n", [Host("node1", 1, "me", 1)]),
        ("gpu_1.rack-2.example slots=1\n", [Host("gpu_1.rack-2.example", 1, line=1)]),
        ("10.0.0.1 slots=1\n", [Host("10.0.0.1", 1, line=1)]),
        ("fd00::1 slots=1\n[fd00::2] slots=2\n", [Host("fd00::1", 1, line=1), Host("fd00::2", 2, line=2)]),
        ("node1 slots=1024\n", [Host("node1", 1024, line=1)]),
    ],
)
def test_accepted(text, hosts):
    assert parse_hostfile(text, "hosts") == hosts


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("node1", "slots are missing"),
        ("node1:4", "write `NAME slots=N`, not NAME:N"),
        ("node1 4", "'4' is not slots=N"),
        ("node1 slot=4", "'slot=4' is not slots=N"),
        ("node1 slots 4", "'slots' is not slots=N"),
        ("node1 slots =4", "'slots' is not slots=N"),
        ("slots=4", "slots are missing"),
        ("node1 slots=", "slots= is not a whole number"),
        ("node1 slots=0", "slots=0 would start nothing there"),
        ("node1 slots=000", "slots=0 would start nothing there"),
        ("node1 slots=-1", "slots=-1 is not a whole number"),
        ("node1 slots=2.5", "slots=2.5 is not a whole number"),
        ("node1 slots=4x", "slots=4x is not a whole number"),
        ("node1 slots=four", "slots=four is not a whole number"),
        ("node1 slots=\uff12", "slots=\uff12 is not a whole number"),
        ("node1 slots=1_0", "slots=1_0 is not a whole number"),
        ("node1 slots=1025", "more than 1024 ranks on one host"),
        ("node1 slots=99999999999999999999999", "more than 1024 ranks on one host"),
        ("node1 slots=4 max_slots=8", "'max_slots=8' after the slots"),
        ("node1 slots=4, node2 slots=4", "'node2 slots=4' after the slots"),
        ("-oProxyCommand=x slots=1", "begins like an option of ssh"),
        ("me@-oProxyCommand=x slots=1", "begins like an option of ssh"),
        ("-l@node1 slots=1", "'-l' is no user name"),
        ("@node1 slots=1", "no user before the @"),
        ("a;b@node1 slots=1", "'a;b' is no user name"),
        ("a;reboot slots=1", "'a;reboot' is no host name"),
        ("$(reboot) slots=1", "'$(reboot)' is no host name"),
        ("`id` slots=1", "'`id`' is no host name"),
        ("node[1-4] slots=1", "'node[1-4]' is no host name"),
        ("node%h slots=1", "'node%h' is no host name"),
        ("node1, slots=1", "'node1,' is no host name"),
        ("nöde slots=1", "'nöde' is no host name"),
        ("node1. slots=1", "'node1.' is no host name"),
        ("node..1 slots=1", "'node..1' is no host name"),
        ("no\x1bde slots=1", r"'no\x1bde' is no host name"),
        ("\ufeff\ufeffnode slots=1", r"'\ufeffnode' is no host name"),
        (f"{'a' * 64} slots=1", "is no host name"),
        (f"{'a.' * 126}aa slots=1", "is no host name"),
        ("10.0.0 slots=1", "neither a name nor a complete IPv4 address"),
        ("10.0.0.256 slots=1", "neither a name nor a complete IPv4 address"),
        ("3232235777 slots=1", "neither a name nor a complete IPv4 address"),
        ("0.0.0.0 slots=1", "the address of no single host"),
        ("224.0.0.1 slots=1", "the address of no single host"),
        ("fe80::1 slots=1", "link-local address"),
        ("fe80::1%eth0 slots=1", "link-local address"),
        ("[10.0.0.1] slots=1", "brackets are for IPv6 addresses"),
        ("[node1] slots=1", "'[node1]' is no host name"),
        ("fd00:::1 slots=1", "'fd00:::1' is no host name"),
    ],
)
def test_a_mistake_is_named_with_its_line(line, told):
    [problem] = problems_of(f"# hosts\ngood slots=1\n{line}\n" if "\ufeff" not in line else f"{line}\n")
    number = 1 if "\ufeff" in line else 3
    assert problem.startswith(f"hosts:{number}: ") and told in problem


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("node1", "node1"),
        ("node1", "NODE1"),
        ("node1", "me@node1"),
        ("fd00::1", "[fd00:0:0::1]"),
    ],
)
def test_a_host_written_twice(first, second):
    [problem] = problems_of(f"{first} slots=1\nother slots=1\n{second} slots=2\n")
    assert problem.startswith("hosts:3: ") and "stands in line 1 already" in problem


def test_all_mistakes_together_in_the_order_of_lines():
    found = problems_of("a;b slots=1\nnode1 slots=1\nnode1 slots=2\n\nnode2 slots=0\nnode3\n")
    assert [problem.partition(": ")[0] for problem in found] == ["hosts:1", "hosts:3", "hosts:5", "hosts:6"]


@pytest.mark.parametrize("text", ["", "\n\n", "# node1 slots=4\n", "\ufeff"])
def test_a_file_without_hosts(text):
    assert problems_of(text) == ("hosts: names no host; write `NAME slots=N` in a line for each.",)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.write_bytes(b"node1 slots=1\n\xff\xfe slots=1\n"), ":2: is no text in UTF-8"),
        (lambda path: path.write_bytes(b"#" * 10_000_001), "more than 10,000,000 bytes"),
        (lambda path: path.symlink_to("nowhere"), "there is no such file"),
    ],
)
def test_what_is_not_a_hostfile(tmp_path, make, told):
    path = tmp_path / "hosts"
    make(path)
    with pytest.raises(ConfigError, match=told):
        read_hostfile(str(path))


def test_a_file_is_read_from_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode1 slots=1\r\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_hostfile("~/hosts") == [Host("node1", 1, line=1)]


def test_the_first_hosts():
    hosts = parse_hostfile("a slots=1\nb slots=1\n", "hosts")
    assert first_hosts(hosts, None, "hosts") == hosts
    assert first_hosts(hosts, 1, "hosts") == hosts[:1]
    for number in (0, 3):
        with pytest.raises(ConfigError, match=f"--num-nodes {number}: hosts lists 2 hosts; ask for 1 to 2"):
            first_hosts(hosts, number, "hosts")
