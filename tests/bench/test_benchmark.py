"""The benchmark's plumbing: rates, ratios, time limits, leftovers. The benchmark itself is not part of CI."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.__main__ import HF, PLAIN, command_of, environment_of, parser, programs, resolve
from tests.bench.environments import borrowing_environment
from tests.bench.job import Job
from tests.bench.launches import (
    Launched,
    LaunchError,
    Outcome,
    free_port,
    largetrain_report,
    launch,
    outcome,
    ranks_report,
    remove_leftovers,
    run_watched,
    session_processes,
)

JOB = Job({"seq_len": 8}, "tokens", {}, {"train_batch_size": 4, "zero_optimization": {"stage": 2}}, 3, 1)


def made(tokens_per_s: float, peak: int = 100, first: float = 10.0, step_s: float = 1.0) -> Outcome:
    return Outcome(first, 20.0, 9.0, tokens_per_s, step_s, peak, 0, 0, 5.5)


def test_the_rate_leaves_the_first_updates_out():
    found = outcome(
        ([100.0, 109.0, 110.0, 112.0], 7, 5.5), Launched(90.0, 30.0, 8.0, (5, 6)), JOB.tokens_per_update, warm=2
    )
    assert (found.step_s, found.tokens_per_s) == (1.5, 32 / 1.5)
    assert (found.first_update_s, found.total_s, found.leftover_bytes, found.leftovers) == (10.0, 30.0, 11, 2)


def test_ratios_are_taken_within_rounds():
    """A machine that is half as fast in one round changes no ratio."""
    rounds = [
        {report.OURS: made(100, 50, 5.0), PLAIN: made(80)},
        {report.OURS: made(50, 50, 10.0), PLAIN: made(40, first=20.0)},
        {PLAIN: made(80)},
    ]
    assert report.ratios(rounds, [PLAIN, HF]) == {
        "tokens/s": {PLAIN: [1.25, 1.25]},
        "peak memory": {PLAIN: [0.5, 0.5]},
        "time to first update": {PLAIN: [0.5, 0.5]},
    }


def test_goals_are_judged_in_their_direction():
    half = f"{report.OURS} bf16"
    rounds = [{report.OURS: made(90, 101, 6.0), PLAIN: made(100), half: made(1, step_s=2.4)}]
    lines = [line for line in report.lines(rounds, [PLAIN], [half]) if "goal" in line]
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["MISSED", "MISSED", "met", "met"]


def test_reports_of_ranks_and_of_largetrain(tmp_path):
    for rank, peak in enumerate((5, 9)):
        (tmp_path / f"rank-{rank}.json").write_text(
            json.dumps({"times": [rank + 1.0], "peak_bytes": peak, "losses": {"1": 5.5, "10": 4.0}})
        )
    assert ranks_report(tmp_path) == ([1.0], 9, 5.5)
    rows = [{"time": 1.0, "loss": 5.5}, {"time": 2.0, "loss": 5.0, "memory_bytes": [3, 4]}, {"eval/loss": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert largetrain_report(tmp_path) == ([1.0, 2.0], 4, 5.5)


def test_nothing_survives_the_time_limit(tmp_path):
    """The launcher's children are in its session and end with it."""
    started = time.monotonic()
    with pytest.raises(LaunchError, match="still running after 1 s"):
        run_watched(["sh", "-c", "sleep 60 & echo $$ > session; sleep 60"], os.environ, tmp_path, limit_s=1.0)
    assert time.monotonic() - started < 20
    assert session_processes(int((tmp_path / "session").read_text())) == []


def test_a_failure_shows_its_last_lines(tmp_path):
    with pytest.raises(LaunchError, match="exit code 3\nout of luck"):
        run_watched(["sh", "-c", "echo out of luck; exit 3"], os.environ, tmp_path, limit_s=60)


MAPS_AND_LEAVES = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(8192)
    held = mmap.mmap(file.fileno(), 8192)
    time.sleep(2)
    while time.process_time() < 0.3:
        pass
"""


def test_only_files_of_the_run_are_removed_from_shared_memory(tmp_path):
    mine = Path(f"/dev/shm/largetrain-test-{os.getpid()}")
    others = mine.with_name(mine.name + "-others")
    program = f"{MAPS_AND_LEAVES}\nopen({str(others)!r}, 'w').close()"
    try:
        found = launch([sys.executable, "-c", program, str(mine)], os.environ, tmp_path, 60, free_port())
        assert found.leftovers == (8192,)
        assert 0.2 < found.cpu_s < found.seconds
        assert not mine.exists() and others.exists()
    finally:
        mine.unlink(missing_ok=True)
        others.unlink(missing_ok=True)


def test_deepspeeds_buffers_are_known_by_the_port():
    port = free_port()
    mine = Path(f"/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_{port}_0")
    others = Path(f"/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_{port}0_0")
    before = set(Path("/dev/shm").iterdir())
    try:
        mine.write_bytes(b"123")
        others.touch()
        assert remove_leftovers(before, set(), port) == [3]
        assert not mine.exists() and others.exists()
    finally:
        mine.unlink(missing_ok=True)
        others.unlink(missing_ok=True)


def test_programs_of_a_round():
    options = parser().parse_args(["--precision", "bf16", "--ranks", "2"])
    names = [(p.name, p.precision, p.threads) for p in programs(options, cores=8)]
    assert names == [
        ("largetrain", "bf16", None),
        ("plain DeepSpeed", "bf16", None),
        ("plain DeepSpeed, OMP_NUM_THREADS=4", "bf16", 4),
        ("HF Trainer", "bf16", None),
        ("HF Trainer, OMP_NUM_THREADS=4", "bf16", 4),
        ("largetrain fp16", "fp16", None),
    ]
    options = parser().parse_args(["--skip-hf", "--skip-half"])
    assert len(programs(options, cores=2)) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_program_gets_the_same_explicit_engine_json(tmp_path, precision, monkeypatch):
    options = parser().parse_args(["--stage", "3", "--micro-batch", "5", "--steps", "7"])
    resolved = resolve(options, precision)
    assert "auto" not in json.dumps(resolved.engine)
    assert resolved.engine["train_batch_size"] == 10
    job = Job({"seq_len": 8}, "tokens", {}, resolved.engine, 7, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    seen = []
    for program in programs(options, cores=2)[:3]:
        line = command_of(program, tmp_path / "env", job, tmp_path, "demo", 2, 1234)
        assert line[:4] == [f"{tmp_path}/env/bin/deepspeed", "--num_gpus=2", "--master_port=1234", "--module"]
        seen.append((line[4], environment_of(program, tmp_path / "env").get("OMP_NUM_THREADS")))
    assert seen == [("largetrain", None), ("tests.bench.plain_deepspeed", None), ("tests.bench.plain_deepspeed", "1")]
    assert json.loads((tmp_path / "engine.json").read_text()) == Job.read(tmp_path / "job.json").engine


def test_a_borrowing_environment_has_our_packages_and_no_hook(tmp_path):
    site = borrowing_environment(tmp_path / "plain")
    assert borrowing_environment(tmp_path / "plain") == site  # again
    code = "import importlib.util as u, largetrain, sys; print(u.find_spec('deepspeed').origin, sys.prefix)"
    done = subprocess.run(
        [tmp_path / "plain" / "bin" / "python", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    origin, prefix = done.stdout.split()
    assert prefix == str(tmp_path / "plain") and "site-packages/deepspeed/" in origin
    assert sorted(path.name for path in site.glob("*.pth")) == ["000_largetrain_bench.pth"]
