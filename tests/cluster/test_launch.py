"""`largetrain launch` on two hosts: what reaches the ranks, and that every failure ends all of them in seconds."""

import hashlib
import signal
import subprocess
import time

import pytest

from tests.cluster.launches import Launch, start, until

NASTY = 'it\'s {"k": 1}; $(touch /tmp/hit) `id` %h %n \\ * ü'


def test_what_reaches_the_ranks(two_hosts):
    """Arguments and variables as they were, ranks in the order of the hostfile, one configuration for all."""
    flags = ["--hostfile", str(two_hosts.hostfile(2)), "--env", f"NASTY={NASTY}", "--env", "OMP_PROC_BIND"]
    config = two_hosts.folder / "a run.yaml"
    config.write_text("name: tried\n")
    launch = Launch(
        two_hosts,
        flags,
        [f"--config={config}", "--steps", "3"],
        output=NASTY,
        environment={"WANDB_MODE": NASTY, "SECRET": "x", "OMP_PROC_BIND": "close"},
    )
    launch.wait_for("rank 0 begins")
    config.write_text("name: changed\n")
    done = launch.done()
    assert (done.code, done.left, done.err) == (0, {}, ""), done
    assert done.wall_s < 10
    seen = [done.rank(number) for number in range(4)]
    assert [found["host"] for found in seen] == ["node1", "node1", "node2", "node2"]
    assert {found["cwd"] for found in seen} == {str(launch.folder)}
    for number, found in enumerate(seen):
        variables = found["environment"]
        assert (variables["RANK"], variables["LOCAL_RANK"]) == (str(number), str(number % 2))
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert variables["MASTER_ADDR"] == two_hosts.hosts["node1"].address
        assert variables["NASTY"] == variables["WANDB_MODE"] == NASTY and "SECRET" not in variables
        assert variables["GLOO_SOCKET_IFNAME"] == "eth0" and variables["OMP_PROC_BIND"] == "close"
        assert int(variables["OMP_NUM_THREADS"]) >= 1
        *output, flag, path, steps, three = found["arguments"]
        assert (output, flag, steps, three) == (["--output", NASTY], "--config", "--steps", "3")
        assert path.startswith("/tmp/") and path.endswith("/a run.yaml")
    assert hashlib.sha256(b"name: tried\n").hexdigest()[:16] in done.out
    for number in range(4):
        log = launch.output / "logs" / "start-1" / f"rank-{number:05d}-node{number // 2 + 1}.txt"
        assert log.read_text().splitlines()[-1] == f"rank {number} step 3"
    assert "node2:3: rank 3 step 3\n" in done.out
    assert two_hosts.run("node1", ["ls", "/tmp"]).stdout == two_hosts.run("node2", ["ls", "/tmp"]).stdout == ""


def test_users_and_addresses_of_ipv6(two_hosts):
    """DeepSpeed's pdsh takes the one and breaks over the other."""
    first, second = (host.address_6 for host in two_hosts.hosts.values())
    done = Launch(two_hosts, ["--hostfile", str(two_hosts.hostfile(1, [f"root@{first}", f"[{second}]"]))]).done()
    assert (done.code, done.left) == (0, {}), done
    assert done.rank(1)["host"] == "node2" and done.rank(1)["environment"]["MASTER_ADDR"] == first
    assert done.rank(0)["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"


def test_the_first_failure_ends_all_and_its_traceback_comes_last(two_hosts):
    done = start(two_hosts, fails=1, steps=10**6).done()
    assert (done.code, done.left) == (1, {})
    assert "rank 1 on node2 ended with exit code 1" in done.err
    assert done.err.endswith("ArithmeticError: planned\n") and "Traceback" in done.err
    assert done.wall_s < 12


@pytest.mark.parametrize(("how", "code", "told"), [("kill", 137, "was killed by SIGKILL"), ("3", 3, "exit code 3")])
def test_the_code_of_the_first_failing_rank(two_hosts, how, code, told):
    done = start(two_hosts, fails=1, how=how, steps=10**6).done()
    assert (done.code, done.left) == (code, {})
    assert "rank 1 on node2" in done.err and told in done.err
    assert done.wall_s < 12


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_lets_all_ranks_save_and_nothing_else_ends(two_hosts, number, code):
    """DeepSpeed's launcher ends every process of the same Python module on the hosts."""
    words = two_hosts.command("node2", ["python3", "-c", "import time; time.sleep(600)", "-m", "largetrain"])
    other = subprocess.Popen(words)
    launch = start(two_hosts, steps=10**6)
    launch.wait_for("rank 1 step 2")
    launch.signal(number)
    done = launch.done(left_limit_s=0.5)
    assert (done.code, done.err) == (code, ""), done
    assert (launch.output / "checkpoints" / "latest").exists()
    assert list(done.left) == ["node2"] and len(done.left["node2"]) == 1 and other.poll() is None
    launch.kill("node2", "time.sleep(600)")
    other.wait(10)


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(two_hosts):
    launch = start(two_hosts, fails=1, how="deaf", steps=10**6)
    launch.wait_for("rank 0 step 1")
    launch.signal(signal.SIGINT)
    time.sleep(4)  # sooner, it would be the same signal on another way
    launch.signal(signal.SIGINT)
    done = launch.done()
    assert (done.code, done.left) == (130, {}), done


def test_what_a_rank_leaves_behind_ends_with_it(two_hosts):
    done = start(two_hosts, fails=1, how="leave").done()
    assert (done.code, done.left) == (0, {})


def test_a_killed_launcher_is_noticed_at_once(two_hosts):
    """Its ranks save and end, instead of training on unseen."""
    launch = start(two_hosts, steps=10**6)
    launch.wait_for("rank 1 step 2")
    launch.signal(signal.SIGKILL)
    launch.process.wait(5)
    until(lambda: not launch._left(), 8)
    assert (launch.output / "checkpoints" / "latest").exists()


def test_a_killed_agent_takes_its_ranks_along(two_hosts):
    launch = start(two_hosts, steps=10**6)
    launch.wait_for("rank 1 step 2")
    launch.kill("node2", "largetrain.hosts.agent")
    assert until(lambda: not two_hosts.processes("node2", "stand_in")) < 2
    done = launch.done()
    assert (done.code, done.left) == (1, {})
    assert "node2" in done.err and done.wall_s < 15


def test_a_cut_cable_ends_both_sides(two_hosts):
    launch = start(two_hosts, steps=10**6)
    launch.wait_for("rank 1 step 2")
    cut_at = time.monotonic()
    two_hosts.cut("node2")
    try:
        launch.wait_for("node2 is lost: no sign of life")
        assert time.monotonic() - cut_at < 15
        done = launch.done(left_limit_s=10)
    finally:
        two_hosts.join("node2")
    assert (done.code, done.left) == (1, {}), done
    assert "node2: lost" in done.err
