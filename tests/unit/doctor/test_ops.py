"""Compiling operators in a worker: results, signs of life, dead workers, and locks that a killed build left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from largetrain.doctor import build_worker
from largetrain.doctor.ops import OpResult, lock_holders, run_worker
from largetrain.errors import LargetrainError


def worker(body: str) -> tuple[str, ...]:
    """A stand-in for the worker: the same protocol, without DeepSpeed."""
    return (sys.executable, "-c", f"import json, os, sys, time\nsay = lambda **m: print(json.dumps(m))\n{body}")


def test_results_come_in_order_with_signs_of_life_in_between(tmp_path):
    beats = []
    command = worker(
        "assert sys.argv[1:] == ['build', 'a', 'b'], sys.argv\n"
        "say(name='a', state='started'); time.sleep(0.7); say(name='a', state='compiled', seconds=0.7)\n"
        "say(name='b', state='unusable', detail='no such thing')"
    )
    results = list(
        run_worker(["a", "b"], lambda *beat: beats.append(beat), log=tmp_path / "log", heartbeat_s=0.2, command=command)
    )
    assert results == [OpResult("a", "compiled", seconds=0.7), OpResult("b", "unusable", "no such thing")]
    assert {name for name, _ in beats} <= {"", "a"} and any(name == "a" for name, _ in beats)
    assert [seconds for name, seconds in beats if name == "a"] == sorted(
        seconds for name, seconds in beats if name == "a"
    )


def test_the_worker_gets_ninja_of_this_environment_and_a_bound_on_jobs(tmp_path, monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    command = worker("say(name=os.environ['PATH'].split(':')[0], state='ready', detail=os.environ['MAX_JOBS'])")
    (result,) = run_worker(["a"], print, build=False, log=tmp_path / "log", command=command)
    assert result.name == os.path.join(sys.prefix, "bin")
    assert 1 <= int(result.detail) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("ending", "said"), [("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal 9")])
def test_a_dead_worker_is_an_error_that_names_the_log(tmp_path, ending, said):
    log = tmp_path / "new" / "log"
    command = worker(f"print('out of memory', file=sys.stderr, flush=True)\n{ending}")
    with pytest.raises(LargetrainError, match=f"{said}; see {log}"):
        list(run_worker(["a"], print, log=log, command=command))
    assert log.read_text() == "out of memory\n"


def test_an_interrupted_run_leaves_no_compiler_behind(tmp_path):
    command = worker(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "say(name=str(child.pid), state='compiled'); time.sleep(60)"
    )
    results = run_worker(["a"], print, log=tmp_path / "log", command=command)
    child = int(next(results).name)
    results.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the worker's child is still running"
        time.sleep(0.05)


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A lock file, and the news that `_look_at_lock` tells about it; torch's own kind of lock is switched off."""
    monkeypatch.delattr("torch.utils.cpp_extension.FileLock", raising=False)
    lock = tmp_path / "lock"
    lock.touch()
    news = []
    return lock, news, lambda **message: news.append(message)


def test_a_lock_without_a_living_builder_is_removed(locked):
    lock, news, say = locked
    build_worker._look_at_lock(lock.parent, "cpu_adam", say)
    assert not lock.exists()
    assert [(item["state"], item["final"]) for item in news] == [("unlocked", False)]


def test_a_lock_with_a_living_builder_stays_and_the_builder_is_named(locked):
    lock, news, say = locked
    program = f"f = open({str(lock)!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as builder:
        assert builder.stdout.readline() == b"open\n"
        assert lock_holders(lock) == [builder.pid]
        build_worker._look_at_lock(lock.parent, "cpu_adam", say)
        builder.communicate(b"\n")
    assert lock.exists()
    assert news == [
        {"name": "cpu_adam", "state": "waiting", "detail": f"process {builder.pid} is compiling it", "final": False}
    ]
    assert lock_holders(lock) == []


def test_no_lock_no_news(tmp_path):
    build_worker._look_at_lock(tmp_path, "cpu_adam", lambda **message: pytest.fail(json.dumps(message)))


def test_checking_compiles_nothing_and_leaves_no_folder(tmp_path, monkeypatch):
    """The real worker, on the real builders."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    names = ["cpu_adam", "no_such_op"]
    results = {item.name: item for item in run_worker(names, print, build=False, log=tmp_path / "log")}
    assert results["cpu_adam"].state == "stale"
    assert results["no_such_op"].state == "unusable" and "cpu_lion" in results["no_such_op"].detail
    assert not list((tmp_path / "extensions").iterdir())


def test_common_and_all_name_operators_of_the_installed_deepspeed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = {
        word: [item.name for item in run_worker([word], print, build=False, log=tmp_path / "log")]
        for word in ("common", "all")
    }
    assert found == {"common": ["cpu_adam"], "all": ["cpu_adam", "cpu_adagrad", "cpu_lion", "async_io"]}
