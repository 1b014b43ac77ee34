"""launch/quickstart and launch/test: what stops them, in one line and exit code 2, and what they call.

Programs that the scripts start are replaced by small stand-ins on PATH or in the environment; pip is the real one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART, TEST = ROOT / "launch" / "quickstart", ROOT / "launch" / "test"


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def launch(script: Path, *arguments: str, timeout: float = 60, **environment: object):
    """Run a script with extra environment variables; PIP_* and PYTHON of the test's own environment are dropped."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") and name != "PYTHON"}
    env = kept | {"CXX": "true"} | {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        ["bash", str(script), *arguments], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def complete_environment(venv: Path, extras: str = "") -> Path:
    """A stand-in for an installed environment: its programs write down how they were called."""
    program(venv / "bin" / "python", "exit 0")
    for name in ("largetrain", "deepspeed", "ruff", "mypy", "lint-imports", "pytest"):
        program(venv / "bin" / name, f'echo "{name} $*" >>"{venv}/calls"; exit "${{EXIT_{name.replace("-", "_")}:-0}}"')
    lib = ROOT / "launch" / "lib.sh"
    mark = subprocess.run(["bash", "-c", f"source {lib}; fingerprint '{extras}'"], capture_output=True, check=True)
    (venv / ".largetrain-installed").write_bytes(mark.stdout)
    return venv


def calls(venv: Path) -> list[str]:
    return (venv / "calls").read_text().splitlines()


@pytest.mark.parametrize("script", [QUICKSTART, TEST])
def test_no_compiler(script, tmp_path):
    done = launch(script, VENV=tmp_path / "venv", CXX="no-such-compiler")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{script.name}: no C++ compiler:") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("script", [QUICKSTART, TEST])
def test_too_little_disk(script, tmp_path):
    program(tmp_path / "bin" / "df", "printf 'Filesystem 1024-blocks Used Available\\n/dev/x 9 9 3145728\\n'")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = launch(script, VENV=tmp_path / "venv", PATH=path, PYTHON=sys.executable)
    assert done.returncode == 2
    assert done.stderr == (
        f"{script.name}: too little disk at {tmp_path}: 3 GB free, 9 GB needed for the environment; "
        "free some, or set VENV=/roomy/folder\n"
    )


def test_the_needed_disk_can_be_set(tmp_path):
    done = launch(QUICKSTART, VENV=tmp_path / "venv", PYTHON=sys.executable, LARGETRAIN_NEED_GB=9_000_000)
    assert done.returncode == 2
    assert "9000000 GB needed" in done.stderr


def test_python_too_old(tmp_path):
    old = program(tmp_path / "old python", '[[ "$2" == *platform* ]] && echo 3.9.2')
    done = launch(QUICKSTART, VENV=tmp_path / "venv", PYTHON=old)
    assert done.returncode == 2
    assert done.stderr.startswith(f"quickstart: needs Python 3.10 or newer ({old} is 3.9.2")
    assert len(done.stderr.splitlines()) == 1


def test_no_python_on_path(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "cksum", "grep", "true"):
        (tools / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
    done = subprocess.run(
        [str(tools / "bash"), str(QUICKSTART)],
        env={"PATH": str(tools), "CXX": "true", "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("quickstart: needs Python 3.10 or newer (no python3 on PATH, ")


def test_no_network_and_the_next_start_begins_anew(tmp_path):
    nowhere = {
        "VENV": tmp_path / "venv",
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": 0,
        "LARGETRAIN_NEED_GB": 0,
    }
    first = launch(QUICKSTART, timeout=300, **nowhere)
    assert first.returncode == 2
    assert first.stderr.splitlines()[-1].startswith("quickstart: no network: pip cannot reach its package index")
    (tmp_path / "venv" / "rubbish").touch()
    second = launch(QUICKSTART, timeout=300, **nowhere)
    assert second.returncode == 2
    assert "an earlier installation was cut short; making it anew" in second.stdout
    assert not (tmp_path / "venv" / "rubbish").exists()


def test_a_folder_that_is_not_ours_is_kept(tmp_path):
    precious = tmp_path / "venv" / "thesis.tex"
    precious.parent.mkdir()
    precious.touch()
    done = launch(QUICKSTART, VENV=precious.parent, PYTHON=sys.executable)
    assert done.returncode == 2
    assert "is not a working Python environment; move it away or set VENV" in done.stderr
    assert precious.exists()


@pytest.mark.parametrize("extras", ["", "[dev]"])
def test_quickstart_prepares_then_trains_and_says_what_is_next(tmp_path, extras):
    venv = complete_environment(tmp_path / "venv", extras)
    done = launch(QUICKSTART, "--steps", "5", "--set", "data.source=my texts", VENV=venv)
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(venv) == [
        "largetrain setup --ops common",
        "deepspeed --num_gpus=2 -m largetrain --ds_config ds_configs/zero2_fp32.json "
        "--config ds_configs/runs/demo.yaml --steps 5 --set data.source=my texts",
    ]
    assert done.stdout.splitlines()[-1].startswith("Next: ")


def test_an_environment_of_another_state_of_the_checkout_is_installed_again(tmp_path):
    venv = complete_environment(tmp_path / "venv")
    for script in (TEST, QUICKSTART):  # the dev extra is missing; then the note of what was installed is another one
        program(venv / "bin" / "python", '[[ $1 == -c ]] && exit 0; echo "pip ran: $*"; exit 4')
        done = launch(script, VENV=venv, PYTHON=sys.executable)
        assert done.returncode == 2
        assert "pip ran: -m pip install" in done.stdout
        (venv / ".largetrain-installing").unlink()
        (venv / ".largetrain-installed").write_text("another\n")


@pytest.mark.parametrize(("gpus", "processes"), [(0, 2), (1, 1), (8, 2)])
def test_a_single_gpu_gets_a_single_process(tmp_path, gpus, processes):
    venv = complete_environment(tmp_path / "venv")
    program(
        tmp_path / "bin" / "nvidia-smi", "\n".join([f"echo 'GPU {index}: x'" for index in range(gpus)] or ["exit 9"])
    )
    done = launch(QUICKSTART, VENV=venv, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0
    assert calls(venv)[1].startswith(f"deepspeed --num_gpus={processes} ")


@pytest.mark.parametrize(("variable", "trained"), [("EXIT_largetrain", False), ("EXIT_deepspeed", True)])
def test_quickstart_passes_failures_on(tmp_path, variable, trained):
    venv = complete_environment(tmp_path / "venv")
    done = launch(QUICKSTART, VENV=venv, PROCESSES=4, **{variable: 3})
    assert done.returncode == 3
    assert any(call.startswith("deepspeed --num_gpus=4 ") for call in calls(venv)) == trained
    assert "Next: " not in done.stdout


def test_the_checks_run_in_order_and_the_first_failure_ends_them(tmp_path):
    venv = complete_environment(tmp_path / "venv", "[dev]")
    assert launch(TEST, "-k", "one", VENV=venv).returncode == 0
    names = [call.split()[0] for call in calls(venv)]
    assert names == ["ruff", "ruff", "mypy", "lint-imports", "largetrain", "pytest"]
    assert calls(venv)[-1] == "pytest --reruns 1 -k one"
    (venv / "calls").unlink()
    done = launch(TEST, VENV=venv, EXIT_mypy=1)
    assert done.returncode == 1
    assert "mypy: FAILED with exit code 1" in done.stderr
    assert not any(call.startswith("pytest") for call in calls(venv))


def test_ci_uses_a_fresh_environment_and_removes_it(tmp_path):
    """The script as it is, beside a `launch/test` that only says where it would install."""
    for name in (".ci/run",):
        copy = tmp_path / "repo" / name
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / name).read_text())
    program(tmp_path / "repo" / "launch" / "test", 'mkdir "$VENV"; echo "$VENV $TORCH_EXTENSIONS_DIR"; exit 5')
    done = launch(tmp_path / "repo" / ".ci" / "run", TMPDIR=tmp_path, VENV="/left/over")
    venv, extensions = map(Path, done.stdout.split())
    assert done.returncode == 5
    assert venv.parent == extensions.parent and venv.is_relative_to(tmp_path)
    assert not venv.parent.exists()
