"""Real ranks on two hosts: the same numbers as on one."""

import os
import subprocess
import sys

from tests.cli.test_train_cli import run_command
from tests.cluster.fake_hosts import Cluster
from tests.cluster.launches import ROOT
from tests.distributed.tiny_run import rows_of, without_times, write_inputs
from tests.ranks import run_ranks


def test_two_hosts_train_as_one_does(can_have_hosts):
    """To the bit: sums over two ranks have one order. Their own names resolve to 127.0.1.1, as Debian sets them up."""
    with Cluster(2, own_name_is_loopback=True) as cluster:
        folder = cluster.folder / "run"
        write_inputs(folder, {"zero_optimization": {"stage": 2}}, {"logging": {"every_steps": 1}})
        words = [sys.executable, "-m", "largetrain", "launch", "--hostfile", str(cluster.hostfile(1)), "--"]
        words += ["--ds_config", "engine.json", "--config", "run.json", "--steps", "4", "--output", "out"]
        done = subprocess.run(
            cluster.command("node1", words, folder),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "node1:0: done: 4 updates" in done.stdout
        paths = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json")]
        run_ranks(run_command, 2, [*paths, "--output", str(folder / "straight"), "--steps", "4"])
        assert without_times(rows_of(folder)) == without_times(rows_of(folder, "straight"))
        assert not cluster.processes("node1") and not cluster.processes("node2")
