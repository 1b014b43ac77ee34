"""The benchmark on images: its arithmetic and what it launches. The benchmark itself is not part of CI."""

import json
import math
from functools import partial

import pytest
import torch
from PIL import Image

from largetrain.config.load import load
from largetrain.config.vision_schema import ClassificationRun
from tests.bench import vision
from tests.bench.image_loading import IMAGE_SIZE, images_per_s, make_images, our_batches
from tests.bench.launches import Launched, LaunchError
from tests.bench.vision import PARTS, QUICK, alternate, main, parser, programs, there_and_back
from tests.bench.vision_job import StepProgram, VisionJob, quiet_environment
from tests.bench.vision_report import (
    Comparison,
    StepTimes,
    loader_lines,
    loader_name,
    paired,
    step_lines,
    step_times,
)

JOB = VisionJob("resnet18", 8, 64, 1.0, 5, 7, 2)


def made(median_s: float, mean_s: float = 1.0) -> StepTimes:
    return StepTimes(median_s, mean_s, 16 / mean_s, 100, 5.0, 20.0, 1, math.log(1000))


def test_step_times_leave_the_first_updates_out():
    """Updates 3, 4 and 5 took 2, 3 and 10 s."""
    found = step_times(
        ([50.0, 90.0, 92.0, 95.0, 105.0], 7, 6.9), Launched(40.0, 80.0, 9.0, (5, 6)), JOB.images_per_update, warm=2
    )
    assert (found.median_s, found.mean_s, found.images_per_s) == (3.0, 5.0, 16 / 5)
    assert (found.first_update_s, found.total_s, found.peak_bytes, found.leftovers) == (10.0, 80.0, 7, 2)


def test_ratios_are_taken_within_rounds():
    """A machine that is half as fast in one round changes no ratio; a program that is missing in one leaves it out."""
    rounds = [
        {"ours": made(1.0), "bare": made(1.25)},
        {"ours": made(2.0), "bare": made(2.5)},
        {"ours": made(9.0)},
    ]
    assert paired(rounds, "bare", "ours", lambda run: run.median_s) == [1.25, 1.25]


def test_goals_are_judged_in_their_direction():
    """Rivals must take at least as long as ours; synchronising may cost a tenth."""
    rounds = [{"ours": made(1.0, 1.0), "bare": made(1.01, 0.99), "sync": made(1.09, 1.11)}]
    compared = [Comparison("step rate", "bare", "ours"), Comparison("SyncBN", "sync", "ours")]
    lines = [line for line in step_lines(rounds, compared) if "goal" in line]
    assert [(line.split(",")[0], line.rsplit(": ", 1)[1]) for line in lines] == [
        ("bare / ours", "met"),
        ("bare / ours", "MISSED"),
        ("sync / ours", "met"),
        ("sync / ours", "MISSED"),
    ]
    assert step_lines(rounds, compared)[-1] == "files left in /dev/shm: 3"


def test_loaders_are_compared_by_number_of_workers():
    rounds = [{loader_name("ours", 0): 110.0, loader_name("timm", 0): 100.0, loader_name("ours", 2): 150.0}] * 2
    goals = [line for line in loader_lines(rounds, [0, 2]) if "goal" in line]
    assert len(goals) == 1 and "1.10 (1.10 .. 1.10)" in goals[0] and goals[0].endswith("met")


def test_every_other_round_runs_backwards_and_a_failure_ends_one_program_alone(capsys):
    seen: list[str] = []

    def measure(name: str) -> float:
        seen.append(name)
        if name == "b":
            raise LaunchError("out of luck")
        return 1.0

    measures = {name: partial(measure, name) for name in "abc"}
    assert [list(one) for one in alternate(measures, 3, str)] == [["a", "c"]] * 3
    assert "".join(seen) == "abc" + "ca" + "ac"
    assert "round 1: b FAILED: out of luck" in capsys.readouterr().out
    assert there_and_back("abc", 2) == "cba"


def test_programs_of_a_round():
    chosen, compared = programs(parser().parse_args([]))
    assert [(p.job.model, p.job.clip, p.kind) for p in chosen] == [
        *[("resnet18", 1.0, kind) for kind in ("ours", "bare", "tuned", "sync")],
        *[("resnet18", 0.0, kind) for kind in ("ours", "bare", "tuned")],
        *[("resnet50", 1.0, kind) for kind in ("ours", "bare", "tuned", "sync")],
    ]
    names = [p.name for p in chosen]
    assert len(set(names)) == len(names) and {c.upper for c in compared} | {c.lower for c in compared} == set(names)
    assert sum(c.goal == "SyncBN" for c in compared) == 2


def test_both_sides_get_the_same_task(tmp_path):
    """largetrain resolves its files to the numbers that the bare loop reads."""
    for kind, sync in (("ours", "off"), ("sync", "on")):
        line = StepProgram("ours", JOB, kind).command(tmp_path, 1234)
        assert line[line.index("-m", 3) + 1] == "largetrain" and "--nproc-per-node=2" in line
        resolved = load(f"{tmp_path}/engine.json", f"{tmp_path}/run.yaml", [], {}, 2, "test", 2)
        engine, run = resolved.engine, resolved.run
        assert (engine["train_batch_size"], engine["gradient_clipping"], run.steps) == (16, 1.0, 5)
        assert isinstance(run, ClassificationRun)
        assert (run.sync_batch_norm, run.model.name, run.data.image_size) == (sync, "resnet18", 64)
    line = StepProgram("tuned", JOB, "tuned").command(tmp_path, 1234)
    assert line[-1] == "--tuned" and VisionJob.read(line[line.index("--job") + 1]) == JOB
    assert "--tuned" not in StepProgram("bare", JOB, "bare").command(tmp_path, 1234)


def test_launches_have_one_thread_per_rank_and_nothing_of_a_launcher():
    found = quiet_environment({"RANK": "1", "OMP_NUM_THREADS": "9", "HOME": "/home", "PYTHONPATH": "/mine"})
    assert "RANK" not in found and found["OMP_NUM_THREADS"] == "1" and found["HOME"] == "/home"
    assert found["PYTHONPATH"].endswith(":/mine")


def test_rate_of_a_loader_counts_from_the_last_warm_batch(monkeypatch):
    times = iter([100.0, 108.0])
    monkeypatch.setattr("tests.bench.image_loading.time.perf_counter", lambda: next(times))
    drawn = iter([torch.zeros(4, 3, 224, 224)] * 5)
    assert images_per_s(drawn, batch=4, warm=3, measured=2) == 1.0


def test_our_loader_reads_the_made_images(tmp_path):
    make_images(tmp_path, 20)
    files = sorted(tmp_path.rglob("*.jpg"))
    assert len(files) == 20 and len({file.parent for file in files}) == 10
    assert Image.open(files[0]).size == (IMAGE_SIZE, IMAGE_SIZE)
    assert next(our_batches(tmp_path, 0, 4)).shape == (4, 3, 224, 224)


def test_the_report_and_the_exit_code_say_what_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vision, "measure_steps", lambda program, options: made(options.steps))
    monkeypatch.setattr(vision, "make_images", lambda folder, count: None)

    def rate(python, loader, workers, images, options):
        if loader == "timm":
            raise LaunchError("no timm")
        return 100.0

    monkeypatch.setattr(vision, "measure_loader", rate)
    monkeypatch.setattr(vision, "python_with_timm", lambda say: "python")
    assert main(["--quick", "--parts", "steps", "--json", str(tmp_path / "all.json")]) == 0
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["steps"][0]["resnet18 largetrain"]["median_s"] == QUICK["steps"]
    assert main(["--quick", "--parts", *PARTS]) == 1
    assert "timm, 0 workers FAILED: no timm" in capsys.readouterr().out


def test_a_warm_up_as_long_as_the_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "5", "--warm", "5"])
    assert "--warm 5" in capsys.readouterr().err
