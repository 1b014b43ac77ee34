"""The flags of `largetrain launch`, the batch on fewer hosts, and a launch on this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from largetrain.cli import launch, main
from largetrain.cli.arguments import load_from_args, train_parser
from largetrain.errors import ConfigError
from largetrain.hosts import facts, processes
from largetrain.hosts.hostfile import Host
from largetrain.hosts.job import Job

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hostfile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a.invalid slots=2\nb.invalid slots=2\n")
    return "hosts"


def test_a_dry_run_asks_no_host(hostfile, capsys):
    assert main(["launch", "--hostfile", hostfile, "--", "train", "--dry-run", "--steps", "3"]) == 0
    shown = capsys.readouterr().out
    assert "x 4 ranks)" in shown and shown.endswith("# a.invalid: 2 ranks\n# b.invalid: 2 ranks\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--hostfile", "nope"], "--hostfile nope: there is no such file"),
        (["--hostfile", "hosts", "--num-nodes", "3"], "--num-nodes 3: hosts lists 2 hosts"),
        (["--hostfile", "hosts", "--include", "c"], "the hostfile has no 'c'"),
        (["--hostfile", "hosts", "--slots", "2"], "--slots: is for this machine alone"),
        (["--hostfile", "hosts", "--min-hosts", "3"], "--min-hosts 3: there are 2 hosts"),
        (["--hostfile", "hosts", "--master-port", "70000"], "--master-port 70000: is no port"),
        (["--hostfile", "hosts", "--max-restarts", "-1"], "--max-restarts -1"),
        (["--hostfile", "hosts", "--host-wait", "-1"], "--host-wait -1"),
        (["--hostfile", "hosts", "--env", "NOT_SET_HERE"], "--env NOT_SET_HERE"),
        (["--include", "a"], "--include: chooses from a hostfile"),
        (["--num-nodes", "2"], "--num-nodes: chooses from a hostfile"),
        (["--slots", "0"], "--slots 0"),
        (["--max-restart", "3"], "did you mean --max-restarts?"),
        (["--steps", "3"], "--steps"),
        (["--node-rank", "0"], "--node-rank: goes with --launcher none"),
        (["--hostfile", "hosts", "--launcher", "none"], "needs --node-rank, --master-addr, --master-port"),
        (["--hostfile", "hosts", "--launcher", "none", "--node-rank", "2"], "--node-rank 2: there are 2 hosts"),
        (["--launcher", "none", "--max-restarts", "2"], "do not hear of each other"),
        (["--launcher", "slurm"], "this is no job of SLURM's"),
    ],
)
def test_mistakes(hostfile, capsys, flags, told):
    assert main(["launch", *flags, "--"]) == 2
    assert told in capsys.readouterr().err


def test_mistakes_of_the_training_are_found_before_any_host_is_asked(hostfile, capsys):
    assert main(["launch", "--hostfile", hostfile, "--", "--set", "train_batch_size=3"]) == 2
    assert "train_batch_size" in capsys.readouterr().err


def job_for(arguments, hosts, left, again=True, saved=True):
    trained = train_parser("t").parse_args(arguments)
    resolved = load_from_args(trained, launch._world(hosts, "hosts"))
    job = Job("/", "/out", {}, {}, tuple(arguments), "python", ())
    return launch._JobFor(job, trained, resolved, hosts, "hosts")(left, again, saved).arguments


HOSTS = [Host(name, 2) for name in "abcd"]


@pytest.mark.parametrize(
    ("sets", "left", "batch"),
    [
        (["train_micro_batch_size_per_gpu=3", "gradient_accumulation_steps=1"], 2, (24, 3, 2)),
        (["train_micro_batch_size_per_gpu=3", "gradient_accumulation_steps=3"], 3, (72, 3, 4)),
        # not micro-batches four times as large
        (["train_batch_size=32", "train_micro_batch_size_per_gpu=4"], 1, (32, 4, 4)),
        (["engine.train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2"], 2, (32, 2, 4)),
    ],
)
def test_the_batch_on_fewer_hosts(sets, left, batch):
    found = job_for(["--set", *sets], HOSTS, HOSTS[:left])
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key, value in zip(keys, batch, strict=True):
        assert [word for word in found if key in word] == [f"{key}={value}"]


def test_a_batch_that_cannot_be_kept():
    with pytest.raises(ConfigError, match="6 ranks on a, b, c cannot keep the global batch of 8"):
        job_for(["--set", "train_micro_batch_size_per_gpu=1"], HOSTS, HOSTS[:3])


def test_ranks_that_cannot_hold_the_model():
    arguments = [
        "--set",
        "parallel.tensor_parallel=4",
        "train_micro_batch_size_per_gpu=1",
        "model.heads=4",
        "model.hidden=64",
    ]
    assert "train_batch_size=2" in job_for(arguments, HOSTS, HOSTS[:2])
    with pytest.raises(ConfigError, match="/ 4 of one model"):
        job_for(arguments, HOSTS, HOSTS[:3])


@pytest.mark.parametrize(
    ("resume", "again", "saved", "words"),
    [
        ([], False, False, []),
        ([], True, False, ["--resume", "auto"]),  # begins anew, in a folder that holds rows already
        (["--resume"], False, True, ["--resume"]),
        (["--resume", "best"], True, False, ["--resume", "best"]),
        (["--resume", "best"], True, True, ["--resume", "auto"]),
    ],
)
def test_where_a_restart_goes_on(resume, again, saved, words):
    assert list(job_for(resume, HOSTS, HOSTS, again, saved)) == words


def test_the_output_folder_of_all_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch._output("demo", "auto").startswith("runs/demo-20")
    for name in ("demo-20250101-000000", "demo-20250102-000000", "demo-x-20990101-000000"):
        (tmp_path / "runs" / name / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert launch._output("demo", "auto") == "runs/demo-20250102-000000"
    assert not launch._output("demo", None).startswith("runs/demo-20250102")
    other = tmp_path / "runs" / "demo-20250101-000000"
    assert launch._output("demo", str(other / "checkpoints" / "step-00000001")) == str(other)


def start(folder: Path, *flags: str, plan: str = "{}", **variables: str) -> "subprocess.Popen[str]":
    """A launch with stand-ins as ranks, on this machine."""
    words = [sys.executable, "-m", "tests.cluster.start", *flags, "--env", f"STAND_IN={plan}", "--", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_on_this_machine(tmp_path):
    """Without a hostfile there is no ssh; the ranks' variables, output and exit code are as anywhere."""
    process = start(tmp_path, "--slots", "2", plan='{"fails": 1, "how": "7"}')
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7, out + err
    assert "localhost:1: rank 1 step 1\n" in out and "rank 1 on localhost ended with exit code 7" in err


def test_a_killed_launcher_lets_the_ranks_save(tmp_path):
    process = start(tmp_path, "--slots", "2", plan='{"steps": 1000000, "slow_save_s": 0.5}')
    assert process.stdout is not None
    while "rank 1 step 2" not in process.stdout.readline():
        assert process.poll() is None
    ranks = processes.descendants(process.pid)
    assert len(ranks) == 3  # and their agent
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while (left := [number for number in ranks if Path(f"/proc/{number}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left and (tmp_path / "out" / "checkpoints" / "latest").exists()


def test_a_line_for_every_host(tmp_path):
    """`--launcher none`: each starts its own ranks, which find each other."""
    (tmp_path / "hosts").write_text("a.invalid slots=1\nb.invalid slots=2\n")
    where = ["--launcher", "none", "--hostfile", "hosts", "--master-addr", "127.0.0.1"]
    where += ["--master-port", str(facts.free_port())]
    both = [start(tmp_path, *where, "--node-rank", node, "--logs", f"logs{node}") for node in "01"]
    texts = ["".join(process.communicate(timeout=60)) for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    assert "a.invalid:0: rank 0 step 3\n" in texts[0] and "rank 1" not in texts[0]
    assert "b.invalid:1: rank 1 step 3\n" in texts[1] and "b.invalid:2: rank 2 step 3\n" in texts[1]
    seen = json.loads((tmp_path / "out" / "rank-2.json").read_text())["environment"]
    assert (seen["LOCAL_RANK"], seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("1", "3", "2")


def test_the_hosts_of_an_allocation(tmp_path):
    """`--launcher slurm`: one srun for each host carries its agent."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\n[[ $3 == 'n[1-2]' ]] && printf \"$NODES\"\n")
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$*" >>sruns\nwhile [[ $1 != env ]]; do shift; done; exec "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}
    variables["SLURM_NTASKS_PER_NODE"] = "2"
    process = start(tmp_path, "--launcher", "slurm", NODES="n1\n", **variables)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert all(f"n1:{rank}: rank {rank} step 3\n" in out for rank in range(2))
    assert "--nodelist=n1 " in (tmp_path / "sruns").read_text()
    process = start(tmp_path, "--launcher", "slurm", NODES="n1\nn2\n", **variables)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (
        2,
        "largetrain: n2: is the same machine as n1; its slots belong into one line.\n",
    )


def test_the_command_needs_no_torch():
    code = "import sys, largetrain.cli.launch, largetrain.hosts.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_a_host_says_of_itself():
    found = facts.host_facts(["localhost", "no-such-host.invalid"])
    assert found["versions"]["torch"] and found["cores"] >= 1 and found["resolved"]["no-such-host.invalid"] == []
    assert found["package"] == facts.package_digest() and len(found["package"]) == 16


def test_other_source_files_have_another_digest(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = facts.package_digest(tmp_path)
    (tmp_path / "b.py").write_text("")
    assert facts.package_digest(tmp_path) != first


def test_gpus_are_counted_by_their_devices(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert facts.gpu_count(tmp_path) == 2


def test_ports():
    with facts.listener(facts.free_port()) as server:
        port = server.getsockname()[1]
        assert facts.port_problem(port) == "Address already in use"
        assert facts.reach_problem("127.0.0.1", port, 5) is None
    assert facts.port_problem(port) is None
    assert facts.reach_problem("127.0.0.1", port, 5) == "Connection refused"


def test_the_interface_towards_an_address():
    assert facts.interface_towards("127.0.0.1") == "lo"
    assert facts.interface_towards("no-such-host.invalid") is None


def test_what_earlier_starts_of_a_run_have_left_is_known_by_its_marks():
    def child(**marks: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sleep", "60"], env={**os.environ, **marks})

    old = child(LARGETRAIN_JOB="mine", LARGETRAIN_START="1")
    others = [child(LARGETRAIN_JOB="mine", LARGETRAIN_START="2"), child(LARGETRAIN_JOB="mine2"), child()]
    try:
        assert processes.left_over("mine", "2") == [old.pid]
        assert {process.pid for process in (old, *others)} <= set(processes.descendants(os.getpid()))
    finally:
        for process in (old, *others):
            process.kill()
            process.wait()
