"""The benchmark of checkpoints: a round of it at the smallest size, its arithmetic, its command."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.bench import checkpoints
from tests.bench import checkpoints_report as report
from tests.bench.checkpoints_ranks import Clock, compare
from tests.bench.checkpoints_state import Plain, State, bytes_of, drop_from_cache, init_deepspeed, sync_files
from tests.bench.environments import ROOT
from tests.bench.launches import LaunchError
from tests.ranks import run_ranks

PARAMETERS = 12 * 64**2 + 13 * 64  # of one layer of width 64
MEASURED = {
    *(*report.SAVES, *report.LOADS, report.DEEPSPEED_SYNC),
    *map(report.pause, (report.OURS_FIRST, report.OURS, report.DCP_ASYNC, report.DCP_KEPT)),
    *map(report.lost, (report.OURS, report.DCP_KEPT)),
}


def one_round(folder):
    lines = []
    return compare(folder, 1, 64, 1, lines.append), lines


def test_a_round_measures_everything_and_loads_what_it_saved(tmp_path):
    """That each load brings back what was saved is asserted by the ranks themselves."""
    (found, lines), (other, silent) = run_ranks(one_round, 2, tmp_path / "files", timeout=120)
    [measured] = found["rounds"]
    assert set(measured) == MEASURED
    assert all(seconds > 0 for name, seconds in measured.items() if not name.endswith(": lost"))
    assert measured[report.pause(report.OURS)] <= measured[report.OURS]
    assert other["rounds"] == found["rounds"]
    sizes, state = found["sizes"], 12 * PARAMETERS
    assert sizes["parameters"] == PARAMETERS
    assert state < sizes["largetrain"] < state + 60_000  # two headers that fill pages, run.json, manifest
    assert sizes["DeepSpeed"] > 16 * PARAMETERS and state < sizes["DCP"]
    assert [line.split(":")[0] for line in lines] == ["round to warm up", "round 1"] and silent == []
    assert list((tmp_path / "files").iterdir()) == []
    text = report.lines(found["rounds"], sizes)
    assert sum("goal" in line for line in text) == 5


def state_forgets():
    init_deepspeed()
    state = State(1, 64)
    before, again = state.sums(), state.sums()
    state.forget()
    return before == again, sorted(before), set(state.sums().values())


def test_what_was_not_loaded_would_be_noticed():
    for same, keys, forgotten in run_ranks(state_forgets, 2):
        assert same and forgotten == {0.0}
        assert {key.split("/0.")[0] for key in keys} == {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq"}


def times(**others):
    """A second for everything, of which training waits for a half."""
    return {name: 0.5 if name.endswith(": pause") else 1.0 for name in MEASURED} | others


def test_ratios_are_taken_within_rounds_and_judged_in_their_direction():
    rounds = [
        times(**{report.pause(report.OURS): 0.09 * slow, report.OURS_SYNC: slow, report.PLAIN: 0.75 * slow})
        for slow in (1.0, 3.0)
    ]
    goals = {line[:60].strip(): line[60:].split() for line in report.lines(rounds, {"largetrain": 1}) if "goal" in line}
    assert goals["pause of a save, async / sync"] == "0.09 (0.09 .. 0.09) goal at most 0.10: met".split()
    assert goals["the same of the first save"][0] == "0.50" and goals["the same of the first save"][-1] == "MISSED"
    assert goals["speed of a save, ours / plain write + fsync"][0] == "0.75"
    assert goals["speed of a save, ours / plain write + fsync"][-1] == "MISSED"
    assert goals["speed of a load, verified, ours / plain read"][-1] == "met"


def test_speeds_are_of_the_bytes_that_each_program_wrote():
    sizes = {"largetrain": 300 << 20, "DeepSpeed": 400 << 20, "DCP": 310 << 20}
    text = {line[:44].strip(): line[44:].split() for line in report.lines([times(), times()], sizes)}
    assert text[report.DEEPSPEED] == ["400", "1.00", "400"] and text[report.PLAIN] == ["300", "1.00", "300"]
    assert text[report.OURS] == ["300", "500", "1000", "1.00", "300"] and text[report.DCP_LOAD][0] == "310"
    summed = next(ratio for ratio in report.RATIOS if ratio.words.endswith("DeepSpeed and fsync"))
    assert summed.of([times()]) == [0.5]
    apart = next(ratio for ratio in report.RATIOS if "without the copy" in ratio.words)
    assert apart.of([times()]) == [2.0]


def one_clock():
    dist.init_process_group("gloo")
    clock, mine = Clock(), 0.05 if dist.get_rank() == 1 else 0.0
    clock.time_save("save", lambda: time.sleep(mine), lambda started: time.sleep(0.1))
    return clock.seconds


def test_the_slowest_rank_counts():
    first, second = run_ranks(one_clock, 2)
    assert first == second
    assert 0.05 <= first["save: pause"] < first["save"] and first["save"] >= 0.15


@pytest.mark.parametrize("direct", [False, True])
def test_plain_files_hold_all_bytes(tmp_path, direct):
    plain = Plain(10_000_123)
    plain.write(tmp_path / "file", direct)
    assert (tmp_path / "file").read_bytes() == bytes(plain.memory)
    assert bytes_of(tmp_path) == 10_000_123
    sync_files(tmp_path)
    drop_from_cache(tmp_path)
    assert (tmp_path / "file").read_bytes() == bytes(plain.memory)


def test_the_command_reports_and_fails_with_the_ranks(tmp_path, monkeypatch, capsys):
    found = {"rounds": [times()], "sizes": {"largetrain": 1, "parameters": 1}, "loads": [0.5, 0.25]}
    monkeypatch.setattr(
        checkpoints, "measure", lambda options: {**found, "sizes": {**found["sizes"], "DCP": options.rounds}}
    )
    line = ["--folder", str(tmp_path), "--quick", "--json", str(tmp_path / "all.json")]
    assert checkpoints.main(line) == 0
    assert json.loads((tmp_path / "all.json").read_text())["sizes"]["DCP"] == checkpoints.QUICK["rounds"]
    assert "after each round 0.5, 0.2" in capsys.readouterr().out

    def fails(options):
        raise LaunchError("rank 1 is out of luck")

    monkeypatch.setattr(checkpoints, "measure", fails)
    assert checkpoints.main(line) == 1
    assert "launch/benchmark checkpoints: rank 1 is out of luck" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--width", "100"], "multiple of 64"),
        (["--rounds", "0"], "at least 1"),
        (["--layers", "100000000"], "are free"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, words, complaint):
    with pytest.raises(SystemExit):
        checkpoints.main(["--folder", str(tmp_path / "not" / "there"), *words])
    assert complaint in capsys.readouterr().err


def test_failing_ranks_are_quoted_and_leave_nothing(tmp_path):
    options = checkpoints.parser().parse_args(["--folder", str(tmp_path), "--limit", "0.01"])
    with pytest.raises(LaunchError, match="still running after 0 s"):
        checkpoints.measure(options)
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_knows_it(tmp_path):
    """With a stand-in for the environment: which module it starts, with which arguments."""
    (tmp_path / "lib.sh").write_text('ROOT=.\nneed_compiler() { :; }\nmake_venv() { VENV="$HERE"; }\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    script = tmp_path / "benchmark"
    script.write_text(Path(ROOT / "launch" / "benchmark").read_text())
    for words, expected in (
        (["checkpoints", "--quick"], "-m tests.bench.checkpoints --quick"),
        (["vision"], "-m tests.bench.vision"),
        (["--steps", "3"], "-m tests.bench --steps 3"),
    ):
        done = subprocess.run(
            ["bash", str(script), *words],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "HERE": str(tmp_path)},
        )
        assert done.stdout.strip() == expected
