"""The fake hosts themselves: each is its own machine, can be cut off, shaped and switched off, and nothing is left."""

import os
import subprocess
import time
from pathlib import Path

from tests.cluster.fake_hosts import Cluster


def ssh(cluster, there: str, command: str, here: str = "node1", seconds: int = 2):
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}"]
    return cluster.run(here, ["ssh", *options, there, command])


def test_each_is_a_machine_of_its_own(two_hosts):
    done = ssh(two_hosts, "node2", "hostname; echo mark >/tmp/mark; ls /dev/shm /tmp; ps -A -o comm=")
    assert done.returncode == 0, done.stderr
    name, *rest = done.stdout.split()
    assert name == "node2" and "mark" in rest and "pytest" not in rest
    assert two_hosts.run("node1", ["test", "-e", "/tmp/mark"]).returncode == 1
    assert not Path("/tmp/mark").exists()
    assert two_hosts.run("node1", ["ip", "route", "get", "1.1.1.1"]).returncode != 0


def test_a_cut_cable_and_a_host_that_is_off(two_hosts):
    two_hosts.cut("node2")
    assert ssh(two_hosts, "node2", "true", seconds=1).returncode == 255
    two_hosts.join("node2")
    assert ssh(two_hosts, "node2", "true").returncode == 0
    sleeper = subprocess.Popen(two_hosts.command("node2", ["sleep", "1000"]))
    while not two_hosts.processes("node2", "sleep 1000"):
        time.sleep(0.01)
    [process_id] = two_hosts.processes("node2", "sleep 1000")
    two_hosts.power_off("node2")
    assert not Path(f"/proc/{process_id}").exists()
    sleeper.wait(10)
    assert ssh(two_hosts, "node2", "true", seconds=1).returncode == 255
    two_hosts.power_on("node2")
    assert ssh(two_hosts, "node2", "true").returncode == 0


def test_a_shaped_cable(two_hosts):
    two_hosts.limit_rate("20mbit")
    try:
        before, began = two_hosts.sent_bytes("node1"), time.monotonic()
        assert ssh(two_hosts, "node2", "head -c 2500000 /dev/zero", here="node1").returncode == 0
        seconds = time.monotonic() - began
    finally:
        two_hosts.limit_rate(None)
    # 2.5 MB are 1.0 s at 20 Mbit/s, of which the bucket of 256 kB passes a tenth at once
    assert seconds >= 0.9 and two_hosts.sent_bytes("node1") > before


def test_nothing_is_left(can_have_hosts):
    began = time.monotonic()
    with Cluster(2, own_name_is_loopback=True) as cluster:
        took = time.monotonic() - began
        assert "127.0.1.1 node1" in cluster.run("node1", ["cat", "/etc/hosts"]).stdout
        spaces = [cluster.switch, *(host.netns for host in cluster.hosts.values())]
        firsts = [host.first_pid for host in cluster.hosts.values()]
        folder = cluster.folder
    assert took < 5, "hosts for a test have to be there at once"
    assert not set(spaces) & set(os.listdir("/run/netns"))
    assert not folder.exists() and not any(Path(f"/proc/{process_id}").exists() for process_id in firsts)
