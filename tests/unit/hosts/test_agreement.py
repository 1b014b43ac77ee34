"""Whether hosts fit together, where they meet, and what an ssh that fails means."""

import pytest

from largetrain.errors import ConfigError
from largetrain.hosts.agreement import address_of_second, check_hosts, check_loopback, meeting_address
from largetrain.hosts.hostfile import Host
from largetrain.hosts.ssh import AGENT, agent_command, agent_variables, fault, ssh_command

HOSTS = [Host("a", 1, line=1), Host("b", 1, line=2), Host("c", 1, line=3)]


def facts(**changes):
    usual = {
        "problems": [], "python": "3.11.7", "versions": {"torch": "2.14.1", "deepspeed": "0.19.8"}, "package": "1",
        "gpus": 0, "resolved": {"a": ["10.0.0.1"]}, "reached_at": None,
    }  # fmt: skip
    return {host.name: {**usual, "machine": host.name, **changes.get(host.name, {})} for host in HOSTS}


def problems_of(**changes):
    with pytest.raises(ConfigError) as raised:
        check_hosts(HOSTS, facts(**changes))
    return raised.value.problems


def test_alike():
    check_hosts(HOSTS, facts())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"python": "3.12.0"}, "b: Python differs (3.12.0, a 3.11.7)"),
        ({"versions": {"torch": "2.9", "deepspeed": "0.19.8"}}, "b: torch differs (2.9, a 2.14.1)"),
        ({"versions": {"torch": "2.14.1", "deepspeed": None}}, "b: DeepSpeed differs (none, a 0.19.8)"),
        ({"package": "2"}, "b: largetrain differs (other source files)"),
        ({"machine": "a"}, "b: is the same machine as a"),
        ({"gpus": 8}, "a, c: no GPU there, and b with some"),
        ({"problems": ["no room"]}, "b: no room."),
    ],
)
def test_one_that_differs(change, told):
    [problem] = problems_of(b=change)
    assert problem.startswith(told)


def test_all_differences_together():
    assert len(problems_of(b={"python": "3", "problems": ["x", "y"]}, c={"package": "2"})) == 4


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, "10.0.0.1"),
        ({"a": {"resolved": {"a": ["127.0.1.1"]}}}, "10.0.0.1"),  # only what the others see counts
        (
            {"b": {"resolved": {"a": ["fd00::1", "10.0.0.1"]}}, "c": {"resolved": {"a": ["10.0.0.1", "fd00::1"]}}},
            "10.0.0.1",
        ),
        ({name: {"resolved": {"a": []}, "reached_at": "10.0.0.7"} for name in "abc"}, "10.0.0.7"),
        ({"c": {"resolved": {"a": ["10.9.0.1"]}}, "a": {"reached_at": "10.0.0.7"}}, "10.0.0.7"),
    ],
)
def test_the_address_where_ranks_meet(changes, address):
    assert meeting_address(HOSTS, facts(**changes)) == address


def test_one_host_and_an_address_need_nobody():
    assert meeting_address(HOSTS[:1], facts()) == "127.0.0.1"
    assert meeting_address([Host("fd00::9", 1), HOSTS[1]], facts()) == "fd00::9"


@pytest.mark.parametrize(
    ("view", "told"), [([], "b, c cannot resolve it"), (["127.0.1.1"], "they resolve it to 127.0.1.1")]
)
def test_an_address_that_nobody_knows(view, told):
    with pytest.raises(ConfigError) as raised:
        meeting_address(HOSTS, facts(b={"resolved": {"a": view}}, c={"resolved": {"a": view}}))
    assert str(raised.value).startswith("a: at which address") and told in str(raised.value)


def test_where_the_second_host_is():
    assert address_of_second(HOSTS[:1], facts()) is None
    assert address_of_second(HOSTS, facts(b={"reached_at": "10.0.0.2"})) == "10.0.0.2"
    assert address_of_second(HOSTS, facts(b={"reached_at": "127.0.0.1"})) == "b"


def test_names_that_mean_another_machine_on_each_host():
    check_loopback([Host("localhost", 2, line=1)], "hosts")
    with pytest.raises(ConfigError) as raised:
        check_loopback([Host("localhost", 1, line=1), Host("b", 1, line=2), Host("127.0.0.2", 1, line=3)], "hosts")
    assert [problem.partition(": ")[0] for problem in raised.value.problems] == ["hosts:1", "hosts:3"]


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known", "b: its name is unknown here;"),
        (255, "ssh: connect to host b port 22: Connection refused", "b: no ssh server listens there;"),
        (255, "ssh: connect to host b port 22: Connection timed out", "b: it does not answer;"),
        (255, "ssh: connect to host b port 22: No route to host", "b: it does not answer;"),
        (
            255,
            "me@b: Permission denied (publickey).",
            "b: ssh is refused without a password; give it your public key: `ssh-copy-id me@b`",
        ),
        (
            255,
            "@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@\nHost key verification failed.",
            "b: its host key is another one than before; if it was installed anew, `ssh-keygen -R b`",
        ),
        (
            255,
            "No ED25519 host key is known for b\nHost key verification failed.",
            "b: its host key is unknown here; connect once by hand and accept it: `ssh me@b`",
        ),
        (255, "kex_exchange_identification: reset", "b: ssh to it failed (kex_exchange_identification: reset)"),
        (1, "/x/python: No module named largetrain", "b: largetrain is not installed there for /x/python;"),
        (127, "env: '/x/python': No such file", "b: there is no /x/python;"),
        (1, "ImportError: bad", "b: the agent there ended with exit code 1 (ImportError: bad)"),
        (-9, "", "b: its ssh was killed by signal 9"),
    ],
)
def test_what_a_failing_ssh_means(code, said, told):
    assert fault(Host("b", 1, "me"), code, said, "/x/python").startswith(told)


def test_what_ssh_is_told():
    words = ssh_command(Host("fd00::2", 1, "me"), "/a b/python", {"PATH": "/bin:/it's"})
    assert words[0] == "ssh" and words[-3:-1] == ["--", "me@fd00::2"]
    assert words[-1] == "exec env 'PATH=/bin:/it'\"'\"'s' '/a b/python' -u -m largetrain.hosts.agent"
    assert "BatchMode=yes" in words


def test_what_the_agents_own_python_needs(monkeypatch):
    found = agent_variables("job", "start", {"PATH": "/bin", "PYTHONPATH": "lib::/x", "SECRET": "s"})
    assert found["PATH"] == "/bin" and found["LARGETRAIN_JOB"] == "job" and "SECRET" not in found
    parts = found["PYTHONPATH"].split(":")
    assert parts[1] == "/x" and parts[0].endswith("/lib") and parts[0].startswith("/")


def test_other_carriers():
    told = agent_command("srun", Host("n1", 4), "/bin/python", {"A": "b c"})
    assert told[0] == "srun" and "--nodelist=n1" in told and told[-5:] == ["A=b c", "/bin/python", *AGENT]
    told = agent_command("mpirun", Host("n1", 4), "/bin/python", {})
    assert told[:5] == ["mpirun", "--host", "n1:1", "-n", "1"] and told[-4:] == ["/bin/python", *AGENT]
    assert agent_command("local", Host("n1", 4), "/bin/python", {}) == ["/bin/python", *AGENT]
    assert fault(Host("b", 1), 255, "", carrier="srun") == "b: the agent there ended with exit code 255"
    assert fault(Host("b", 1), -9, "", carrier="srun") == "b: its srun was killed by signal 9"
