"""What is sent to hosts: arguments, files, variables, and the words between launcher and agent."""

import hashlib

import pytest

from largetrain.errors import ConfigError
from largetrain.hosts.environment import handed_on, rank_variables, threads
from largetrain.hosts.hostfile import Host
from largetrain.hosts.job import Job, with_files
from largetrain.hosts.messages import Lines, encode


def job(*arguments, **more) -> Job:
    return Job("/work", "/work/out", {}, {}, tuple(arguments), "/bin/python", ("-m", "largetrain"), **more)


def test_files_are_taken_out_of_the_arguments(tmp_path):
    engine, run = tmp_path / "zero2.json", tmp_path / "run.yaml"
    engine.write_bytes(b'{"a": 1}\r\n')
    run.write_text("name: ü\n")
    words, files = with_files(["--ds-config", str(engine), "--steps", "3", f"--config={run}", "--set", "a=1"])
    place = {"file": "run", "name": "run.yaml"}
    engine_place = {"file": "engine", "name": "zero2.json"}
    assert words == ("--ds-config", engine_place, "--steps", "3", "--config", place, "--set", "a=1")
    assert files["engine"] == {
        "name": "zero2.json",
        "text": '{"a": 1}\r\n',
        "sha256": hashlib.sha256(b'{"a": 1}\r\n').hexdigest(),
    }
    assert files["run"]["text"] == "name: ü\n"
    with pytest.raises(ConfigError, match="--config /nowhere: cannot be read"):
        with_files(["--config", "/nowhere"])
    assert with_files(["--config"]) == (("--config",), {})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "3", "--resume"],
        ["--resume", "best", "--steps", "3"],
        ["--resume=auto", "--steps", "3"],
        ["--resume", "--steps", "3"],
        ["--steps", "3"],
    ],
)
def test_a_restart_resumes(arguments):
    assert job(*arguments).resumed("auto").arguments == ("--steps", "3", "--resume", "auto")


def test_a_restart_keeps_what_follows_a_file():
    place = {"file": "run", "name": "r"}
    assert job("--resume", "--config", place).resumed("auto").arguments == ("--config", place, "--resume", "auto")


def test_another_batch_takes_the_place_of_the_one_given():
    given = job("--set", "engine.train_batch_size=8", "model.layers=2", "--steps", "3")
    found = given.with_batch({"train_batch_size": 16, "gradient_accumulation_steps": 4}).arguments
    assert found[:5] == ("--set", "train_batch_size=16", "model.layers=2", "--steps", "3")
    assert found[5:] == ("--set", "gradient_accumulation_steps=4")
    alone = job("--set", "train_batch_size=8").with_batch({"train_batch_size": 16})
    assert alone.arguments == ("--set", "train_batch_size=16")


def test_what_each_host_is_told():
    hosts = [Host("a", 2), Host("b", 4, devices=(0, 1, 4, 5))]
    first, second = (job("x").message(host, hosts[0], 7) for host in hosts)
    assert (first["slots"], first["devices"], first["first"], first["port"]) == (2, None, True, 7)
    assert (second["slots"], second["devices"], second["first"], second["port"]) == (4, (0, 1, 4, 5), False, None)
    assert first["resolve"] == second["resolve"] == ["a"]
    assert first["command"] == ["/bin/python", "-m", "largetrain", "x"]
    assert job(torchrun=True).message(hosts[0], hosts[0], None)["command"] == ["-m", "largetrain"]
    assert job().number != job().number


def test_variables_that_are_handed_on():
    here = {
        "PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth1", "WANDB_API_KEY": "k", "OMP_NUM_THREADS": "3", "HOME": "/root",
        "DEEPSPEED_TIMEOUT": "9", "RANK": "3", "LARGETRAIN_JOB": "x", "LARGETRAIN_GRACE_S": "5", "MY": "a b",
    }  # fmt: skip
    kept = {name: here[name] for name in here if name not in ("HOME", "RANK", "LARGETRAIN_JOB", "MY")}
    assert handed_on(here) == kept
    assert handed_on(here, ["MY", "NEW=a=b", "PATH=/x"]) == {**kept, "MY": "a b", "NEW": "a=b", "PATH": "/x"}
    with pytest.raises(ConfigError) as raised:
        handed_on(here, ["NONE", "a b=3", "=x"])
    assert [problem.partition(":")[0] for problem in raised.value.problems] == ["--env NONE", "--env a b=3", "--env =x"]


def test_who_a_rank_is():
    assert rank_variables(rank=5, local_rank=1, ranks=8, local_ranks=4, address="10.0.0.1", port=7) == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "7",
    }  # fmt: skip
    assert [threads(8, 2), threads(2, 4), threads(7, 2)] == ["4", "1", "3"]


def test_messages_among_what_a_login_shell_prints():
    lines = Lines()
    sent = b"Welcome!\n" + encode("ready", name="ü\n\x01") + b'{"kind": "no"}\n' + encode("alive")
    found = [message for index in range(len(sent)) for message in lines.feed(sent[index : index + 1])]
    assert found == ["Welcome!", {"kind": "ready", "name": "ü\n\x01"}, '{"kind": "no"}', {"kind": "alive"}]


def test_what_only_looks_like_a_message():
    found = Lines().feed(b"\x01largetrain {broken\n\x01largetrain [1]\nsaid \x01largetrain {}\n")
    assert all(isinstance(line, str) for line in found) and len(found) == 3
