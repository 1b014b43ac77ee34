"""`largetrain setup` end to end: a real environment, DeepSpeed's real command, two ranks."""

import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from largetrain.cli import setup
from largetrain.doctor.ops import OpResult
from largetrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
RANK_PROGRAM = """\
import os, sys
sys.stdout.write(f"rank {os.environ['RANK']} {sys.argv[1:]}\\n")  # in one piece: two ranks share the pipe
sys.exit(int(os.environ.get("RANK_EXIT", "0")))
"""


@pytest.fixture
def environment(tmp_path) -> Path:
    """A new virtual environment that sees the packages of this one, with DeepSpeed's own command script."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    packages = Path(importlib.util.find_spec("deepspeed").origin).parents[1]
    (site / "a_packages_of_the_tests.pth").write_text(f"{packages}\n{ROOT}\n")
    command = folder / "bin" / "deepspeed"
    command.write_text(f"#!{folder}/bin/python\nfrom deepspeed.launcher.runner import main\nmain()\n")
    command.chmod(0o755)
    (tmp_path / "toy.py").write_text(RANK_PROGRAM)
    return folder


def run(environment: Path, *command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment in the folder that holds toy.py."""
    return subprocess.run(
        [str(environment / "bin" / command[0]), *command[1:]],
        cwd=environment.parent,
        env=os.environ | extra,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_setup(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from largetrain.cli.setup import run; sys.exit(run(sys.argv[1:]))"
    return run(environment, "python", "-c", program, *arguments)


def test_deepspeed_learns_m_and_forgets_it_again(environment):
    line = ("deepspeed", "--master_port=29617", "--num_gpus=2", "-m", "toy", "--steps", "1", "-m", "kept")
    site = next(environment.glob("lib/python*/site-packages"))
    before = sorted(path.name for path in site.iterdir())

    first = run_setup(environment, "--ops", "none")
    assert first.returncode == 0 and "deepspeed -m: added" in first.stdout
    assert str(site / "largetrain_launcher.pth") in first.stdout and "--undo" in first.stdout
    assert "already there" in run_setup(environment, "--ops", "none").stdout

    trained = run(environment, *line)
    assert trained.returncode == 0 and "Error processing" not in trained.stderr, trained.stderr
    for rank in (0, 1):
        assert f"rank {rank} ['--local_rank={rank}', '--steps', '1', '-m', 'kept']" in trained.stdout
    assert run(environment, *line, RANK_EXIT="3").returncode == 3

    undone = run_setup(environment, "--undo")
    assert undone.returncode == 0 and f"removed {site / 'largetrain_launcher.pth'}" in undone.stdout
    assert sorted(path.name for path in site.iterdir() if path.name != "__pycache__") == before
    assert "nothing to undo" in run_setup(environment, "--undo").stdout
    refused = run(environment, *line)
    assert refused.returncode == 2 and "unrecognized arguments: -m" in refused.stderr


def test_check_reports_and_writes_nothing(environment):
    site = next(environment.glob("lib/python*/site-packages"))
    before = sorted(site.iterdir())
    absent = run_setup(environment, "--check", "--ops", "none")
    assert absent.returncode == 1 and "MISS deepspeed -m: absent" in absent.stdout
    assert sorted(site.iterdir()) == before
    run_setup(environment, "--ops", "none")
    present = run_setup(environment, "--check", "--ops", "none")
    assert present.returncode == 0 and "ok   deepspeed -m: installed" in present.stdout


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """`setup.run` in this process, on folders of the test."""
    monkeypatch.setattr(setup, "site_packages", lambda: tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path


def with_results(monkeypatch, *results: OpResult) -> list[list[str]]:
    """Put results in the place of the worker; returns the list that will hold the operators asked for."""
    asked = []

    def stand_in(names, heartbeat, *, build, log):
        asked.append([*names, build])
        heartbeat("cpu_adam", 10.4)
        yield from results

    monkeypatch.setattr(setup, "run_worker", stand_in)
    return asked


def test_no_compiler_is_one_line_and_the_command_is_prepared_all_the_same(here, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError) as caught:
        setup.run([])
    (problem,) = caught.value.problems
    assert problem.startswith("setup: no C++ compiler: `no-such-compiler` is not on PATH; install g++")
    assert "--ops none" in problem
    assert (here / "largetrain_launcher.pth").exists()


def test_operators_are_reported_one_by_one(here, monkeypatch, capsys):
    asked = with_results(
        monkeypatch,
        OpResult("cpu_adam", "waiting", "process 7 is compiling it", final=False),
        OpResult("cpu_adam", "compiled", "/folder", 61.2),
        OpResult("cpu_lion", "ready", "/folder"),
        OpResult("async_io", "unusable", "libaio's headers are missing"),
    )
    assert setup.run(["--ops", "all"]) == 0
    assert asked == [["all", True]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6:-1] == [
        "     ... cpu_adam: 10 s",
        "...  cpu_adam: waiting: process 7 is compiling it",
        "ok   cpu_adam: compiled in 61 s",
        "ok   cpu_lion: ready",
        "--   async_io: not on this machine: libaio's headers are missing",
    ]
    assert any(str(here / "extensions") in line for line in lines)


def test_a_failed_operator_is_exit_code_1(here, monkeypatch, capsys):
    asked = with_results(monkeypatch, OpResult("cpu_adam", "failed", "RuntimeError: no space", 3.0))
    assert setup.run(["--ops", "cpu_adam, cpu_lion"]) == 1
    assert asked == [["cpu_adam", "cpu_lion", True]]
    assert "FAIL cpu_adam: failed in 3 s: RuntimeError: no space" in capsys.readouterr().out


def test_an_operator_that_was_asked_for_by_name_must_be_usable(here, monkeypatch):
    with_results(monkeypatch, OpResult("cpu_adamm", "unusable", "no such operator for cpu"))
    with pytest.raises(ConfigError, match="--ops: cpu_adamm: cannot be used here"):
        setup.run(["--ops", "cpu_adamm"])


def test_setup_itself_imports_neither_torch_nor_deepspeed():
    program = (
        "import sys; from largetrain.cli.setup import run; run(['--check', '--ops', 'none']);"
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_terminated_setup_takes_its_compilers_along(environment, tmp_path):
    stand_in = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        "import functools, sys; from largetrain.cli import setup;"
        f"setup.run_worker = functools.partial(setup.run_worker, command=(sys.executable, '-c', {stand_in!r}));"
        "sys.exit(setup.run([]))"
    )
    extensions = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    with subprocess.Popen([str(environment / "bin" / "python"), "-c", program], env=os.environ | extensions) as process:
        pid = tmp_path / "pid"
        deadline = time.monotonic() + 30
        while not (pid.exists() and pid.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid.read_text()}").exists()
