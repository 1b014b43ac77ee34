"""Hosts that cannot take part: each is named with its fault and a way out, before any rank is started."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.launches import ROOT, Launch, start

LIMIT_S = 20.0


def refused(launch: Launch) -> str:
    """What a launch says that ends with a mistake; nothing was started."""
    done = launch.done()
    assert (done.code, done.left) == (2, {}), done
    assert done.wall_s < LIMIT_S and "begins with step" not in done.out
    return done.err


def test_all_unreachable_hosts_are_named_together(two_hosts):
    hostfile = two_hosts.hostfile(1, ["node1", "nowhere", "192.0.2.99", "node2"])
    told = refused(Launch(two_hosts, ["--hostfile", str(hostfile)]))
    lines = told.splitlines()
    assert lines[0] == "largetrain: 2 mistakes:" and len(lines) == 3
    assert "nowhere: its name is unknown here; correct it in the hostfile, or add it to DNS" in told
    assert "192.0.2.99: it does not answer; is it switched on" in told


def test_a_host_that_knows_no_key_of_ours(two_hosts):
    key = Path(two_hosts.folder, "user_key.pub")
    ours = key.read_text()
    key.write_text("")
    try:
        told = refused(start(two_hosts))
    finally:
        key.write_text(ours)
    assert "node2: ssh is refused without a password; give it your public key: `ssh-copy-id node2`" in told


def test_a_host_whose_key_has_changed(two_hosts):
    known = Path(two_hosts.folder, "known_hosts")
    ours = known.read_text()
    known.write_text(ours.replace(ours.splitlines()[1].split()[2][-8:], "AAAAAAAA"))
    try:
        told = refused(start(two_hosts))
    finally:
        known.write_text(ours)
    assert "node2: its host key is another one than before" in told


def test_a_port_that_another_program_has(two_hosts):
    serve = "import socket, time; s = socket.create_server(('', 23456)); print('.', flush=True); time.sleep(600)"
    other = subprocess.Popen(two_hosts.command("node1", [sys.executable, "-c", serve]), stdout=subprocess.PIPE)
    assert other.stdout.readline() == b".\n"
    launch = start(two_hosts, "--master-port", "23456")
    launch.process.wait(LIMIT_S)
    launch.kill("node1", "23456")
    other.wait(10)
    told = refused(launch)
    assert "node1: port 23456 cannot be used (Address already in use)" in told


def test_an_address_that_the_others_cannot_reach(two_hosts):
    told = refused(start(two_hosts, "--master-addr", "127.0.0.1"))
    assert "node2: cannot reach node1 at 127.0.0.1 port" in told and "--master-addr" in told


def test_a_working_folder_that_one_host_does_not_have(two_hosts):
    launch = start(two_hosts)
    assert launch.done().code == 0
    two_hosts.run("node1", ["mkdir", "-p", "/tmp/only-here"])
    launch = Launch(two_hosts, ["--hostfile", str(two_hosts.hostfile())], folder=Path("/tmp/only-here"))
    assert "node2: the working folder /tmp/only-here cannot be entered here" in refused(launch)


def test_a_host_with_another_program(two_hosts):
    """One of its source files is another one there: found without importing anything of it."""
    other = Path(two_hosts.folder, "other.py")
    other.write_text((ROOT / "largetrain" / "errors.py").read_text() + "# changed\n")
    two_hosts.run("node2", ["mount", "--bind", str(other), str(ROOT / "largetrain" / "errors.py")])
    try:
        told = refused(start(two_hosts))
    finally:
        two_hosts.run("node2", ["umount", str(ROOT / "largetrain" / "errors.py")])
    assert "node2: largetrain differs (other source files); give all hosts the same environment" in told


def test_python_that_is_not_there(two_hosts):
    empty = Path(two_hosts.folder, "empty")
    empty.mkdir()
    place = str(Path(sys.executable).parent)
    two_hosts.run("node2", ["mount", "--bind", str(empty), place])
    try:
        told = refused(start(two_hosts))
    finally:
        two_hosts.run("node2", ["umount", place])
    assert f"node2: there is no {sys.executable}; all hosts need the same environment at the same path" in told
