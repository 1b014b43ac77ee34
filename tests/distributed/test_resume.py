"""A run that was stopped and resumed is the run that was never stopped, to the bit; what does not fit is refused."""

import json
import shutil

import pytest
import torch

from largetrain.compose import AlreadyComplete, build
from largetrain.config.world import launch_world
from largetrain.engine.zero_state import copy_into_model
from largetrain.errors import ConfigError
from tests.distributed.tiny_run import precision_section, resolved_for, rows_of, train, without_times, write_inputs
from tests.ranks import run_ranks

SAVED, STOPPED, STEPS = 5, 7, 11  # 60 samples by 8: the checkpoint lies within the first epoch, the end in the second


def stop_and_resume(folder, sets=()):
    """Straight run, stopped run and resumed run, one after the other in the same ranks."""
    from largetrain.engine.environment import prepare  # noqa: F401 (imports before the clock of the test)

    straight = train(folder, STEPS, "straight", sets=sets)
    stopped = train(folder, STEPS, "out", sets=sets, stop_after=STOPPED)
    resumed = train(folder, STEPS, "out", resume="auto", sets=sets)
    return straight, stopped, resumed


CASES = [  # every pair of stage x precision, stage x accumulation, precision x accumulation
    (0, "fp32", 1),
    (0, "bf16", 2),
    (0, "fp16", 1),
    (1, "fp32", 2),
    (1, "bf16", 1),
    (1, "fp16", 2),
    (2, "fp32", 1),
    (2, "bf16", 2),
    (2, "fp16", 1),
    (3, "fp32", 2),
    (3, "bf16", 1),
    (3, "fp16", 2),
]


def check_resumed(folder, results):
    for straight, stopped, resumed in results:
        assert [u["step"] for u in straight.updates] == list(range(1, STEPS + 1))
        assert stopped.updates == straight.updates[:STOPPED]
        assert resumed.updates == straight.updates[SAVED:]
        assert resumed.state == straight.state
    rows = rows_of(folder, "out")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert without_times(rows) == without_times(rows_of(folder, "straight"))


@pytest.mark.parametrize(("stage", "precision", "accumulation"), CASES)
def test_a_resumed_run_equals_the_straight_one_to_the_bit(tmp_path, stage, precision, accumulation):
    engine = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 4 // accumulation,
        "gradient_accumulation_steps": accumulation,
        **precision_section(precision),
    }
    write_inputs(tmp_path, engine, {"checkpoints": {"every_steps": SAVED, "at_end": False}})
    results = run_ranks(stop_and_resume, 2, tmp_path)
    check_resumed(tmp_path, results)
    straight = results[0][0]
    first, second = (outcome[0].updates[0] for outcome in results)
    assert set(first["samples"]).isdisjoint(second["samples"])
    assert straight.updates[-1]["loss"] < straight.updates[0]["loss"]
    if precision == "fp16":
        assert len({update["scale"] for update in straight.updates[SAVED:]}) > 1  # the scaler's count was restored


@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "sequence_parallel"), [(2, 1, "fp16", True), (4, 3, "bf16", False)]
)
def test_so_does_one_on_tensor_parallel_ranks(tmp_path, ranks, stage, precision, sequence_parallel):
    """With dropout, whose masks differ between the parts and agree between the replicas."""
    engine = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 8 // ranks,
        **precision_section(precision),
    }
    parallel = {"tensor_parallel": 2, "sequence_parallel": sequence_parallel}
    write_inputs(tmp_path, engine, {"checkpoints": {"every_steps": SAVED, "at_end": False}, "parallel": parallel})
    results = run_ranks(stop_and_resume, ranks, tmp_path, timeout=120)
    check_resumed(tmp_path, results)
    samples = [straight.updates[0]["samples"] for straight, _, _ in results]
    assert samples[0] == samples[1], "tensor-parallel ranks work on the same samples"


def weights_taken_up(folder, steps, sets):
    """After a resume: the weights that the model computes with, and what DeepSpeed's own gathering makes of them."""
    train(folder, steps, "out", sets=sets)
    resolved = resolved_for(folder, steps + 1, "out", sets)
    backend = build(resolved, launch_world(), resume="auto", verbose=False, say=lambda line: None).trainer.backend
    parameters = dict(backend.engine.module.named_parameters())
    read = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    copy_into_model(backend.engine, backend.stage)
    return read, {name: parameter.detach().clone() for name, parameter in parameters.items()}


def test_weights_read_by_every_rank_are_those_that_would_be_gathered(tmp_path):
    write_inputs(tmp_path, precision_section("bf16"), {"checkpoints": {"at_end": True}})
    for read, gathered in run_ranks(weights_taken_up, 2, tmp_path, 2, ["zero_optimization.stage=2"]):
        assert read.keys() == gathered.keys()
        for name, weights in read.items():
            assert weights.dtype == torch.bfloat16 and torch.equal(weights, gathered[name]), name


def test_loader_processes_do_not_disturb_the_continuation(tmp_path):
    write_inputs(tmp_path, {"zero_optimization": {"stage": 2}}, {"checkpoints": {"every_steps": SAVED}})
    results = run_ranks(stop_and_resume, 2, tmp_path, ["data.workers=2"], timeout=120)
    check_resumed(tmp_path, results)
    without = run_ranks(train, 2, tmp_path, STEPS, "without")
    assert [outcome.state for outcome in without] == [straight.state for straight, _, _ in results]


def resume_with(folder, sets, resume="auto", steps=STEPS, output="out"):
    return train(folder, steps, output, resume=resume, sets=sets)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run of 2 ranks at ZeRO-2, stopped after 7 updates with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("stopped")
    write_inputs(folder, {"zero_optimization": {"stage": 2}}, {"checkpoints": {"every_steps": 2, "keep_last": 0}})
    run_ranks(train, 2, folder, STEPS, "out", None, (), STOPPED)
    return folder


@pytest.fixture
def run(stopped_run, tmp_path):
    """A copy of it whose files may be broken; the configuration still names the original's texts."""
    shutil.copytree(stopped_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["model.layers=3", "model.heads=4"], "model.layers was 2, now 3"),
        (["gradient_accumulation_steps=1"], "global batch was 8, now 4"),
        (["seed=5"], "seed was 1234, now 5"),
        (["optimizer.type=Adam"], "optimizer.type was AdamW, now Adam"),
    ],
)
def test_another_run_is_refused_with_both_values(run, sets, words):
    with pytest.raises(ConfigError) as caught:
        run_ranks(resume_with, 2, run, sets)
    assert words in str(caught.value)
    assert "step-00000006" in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["zero_optimization.stage=1"], "zero_optimization.stage was 2, now 1"),
        (["bf16.enabled=true"], "precision (fp16/bf16.enabled) was float32, now bfloat16: the new value holds"),
        (["parameters.bias_weight_decay=0.0"], "parameters.bias_weight_decay was None, now 0.0"),
    ],
)
def test_another_layout_and_precision_are_announced(run, sets, words):
    resumed = run_ranks(resume_with, 2, run, sets)[0]
    assert [update["step"] for update in resumed.updates] == list(range(7, STEPS + 1))
    assert any(words in line for line in resumed.lines)


def test_other_data_are_refused(run):
    (run / "other.txt").write_text("something else entirely " * 60)
    with pytest.raises(ConfigError, match=r"data \(content, split, and how samples are made of it\) was \w+, now \w+"):
        run_ranks(resume_with, 2, run, [f"data.source={run / 'other.txt'}"])


def test_all_differences_are_told_together(run):
    with pytest.raises(ConfigError) as caught:
        run_ranks(resume_with, 2, run, ["model.layers=3", "model.heads=4", "seed=5"])
    assert len([line for line in caught.value.problems if " was " in line]) == 3


def breakages():
    def without_manifest(checkpoint):
        (checkpoint / "manifest.json").unlink()
        return "manifest.json"

    def without_a_file(checkpoint):
        (checkpoint / "pieces" / "rank-00001.safetensors").unlink()
        return "rank-00001.safetensors"

    def with_a_cut_file(checkpoint):
        file = checkpoint / "ranks" / "rank-00001.pt"
        file.write_bytes(file.read_bytes()[:-1])
        return "rank-00001.pt"

    def with_an_empty_file(checkpoint):
        (checkpoint / "pieces" / "rank-00000.safetensors").write_bytes(b"")
        return "rank-00000.safetensors"

    def with_a_flipped_bit(checkpoint):
        file = checkpoint / "pieces" / "rank-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
        return "rank-00001.safetensors"

    return [without_manifest, without_a_file, with_a_cut_file, with_an_empty_file, with_a_flipped_bit]


@pytest.mark.parametrize("damage", breakages(), ids=lambda damage: damage.__name__)
def test_an_incomplete_checkpoint_is_passed_over_by_auto_and_an_error_by_path(run, damage):
    broken = run / "out" / "checkpoints" / "step-00000006"
    file = damage(broken)
    with pytest.raises(ConfigError) as caught:
        run_ranks(resume_with, 2, run, [], str(broken))
    assert file in str(caught.value)
    resumed = run_ranks(resume_with, 2, run, [])[0]
    assert [update["step"] for update in resumed.updates] == list(range(5, STEPS + 1))
    passed_over = [line for line in resumed.lines if line.startswith("passed over:")]
    assert len(passed_over) == 1
    assert file in passed_over[0]


def test_auto_without_any_checkpoint_starts_anew_and_says_so(tmp_path):
    write_inputs(tmp_path)
    outcome = run_ranks(resume_with, 1, tmp_path, [], "auto", 2)[0]
    assert [update["step"] for update in outcome.updates] == [1, 2]
    assert any("no complete checkpoint" in line and "starting anew" in line for line in outcome.lines)


def test_a_path_without_any_checkpoint_is_an_error(tmp_path):
    write_inputs(tmp_path)
    with pytest.raises(ConfigError, match="no complete checkpoint there"):
        run_ranks(resume_with, 1, tmp_path, [], str(tmp_path), 2)


def test_an_output_folder_with_a_run_is_not_written_over(run):
    before = rows_of(run)
    with pytest.raises(ConfigError, match="already holds a run.*--resume"):
        run_ranks(resume_with, 2, run, [], None)
    assert rows_of(run) == before


def test_a_checkpoint_does_not_continue_in_another_runs_folder(run):
    (run / "foreign").mkdir()
    (run / "foreign" / "metrics.jsonl").write_text('{"step": 99}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        run_ranks(resume_with, 2, run, [], str(run / "out"), STEPS, "foreign")
    assert (run / "foreign" / "metrics.jsonl").read_text() == '{"step": 99}\n'


def test_a_complete_run_says_so_and_can_be_extended(tmp_path):
    write_inputs(tmp_path, {"scheduler": {"type": "WarmupLR"}}, {"checkpoints": {"at_end": True}})
    engine = json.loads((tmp_path / "engine.json").read_text())
    engine["scheduler"]["params"] = {"warmup_num_steps": 3}
    (tmp_path / "engine.json").write_text(json.dumps(engine))
    straight = run_ranks(train, 2, tmp_path, 6, "straight")[0]
    run_ranks(train, 2, tmp_path, 4)
    with pytest.raises(AlreadyComplete, match="all 4 updates are done.*--steps") as caught:
        run_ranks(resume_with, 2, tmp_path, [], "auto", 4)
    assert caught.value.exit_code == 0
    with pytest.raises(ConfigError, match="4 updates are done, more than the 3 asked for"):
        run_ranks(resume_with, 2, tmp_path, [], "auto", 3)
    extended = run_ranks(resume_with, 2, tmp_path, [], "auto", 6)[0]
    assert extended.updates == straight.updates[4:]
    assert extended.state == straight.state


def test_an_extended_run_follows_the_schedule_of_the_new_length(tmp_path):
    """`total_num_steps: auto` is the length asked for now; the change is announced."""
    write_inputs(tmp_path, {}, {"checkpoints": {"at_end": True}})
    long = run_ranks(train, 1, tmp_path, 8, "long")[0]
    run_ranks(train, 1, tmp_path, 4)
    extended = run_ranks(resume_with, 1, tmp_path, [], "auto", 8)[0]
    assert [u["lr"] for u in extended.updates] == [u["lr"] for u in long.updates[4:]]
    assert any("scheduler.params.total_num_steps was 4, now 8" in line for line in extended.lines)


@pytest.mark.parametrize("scheduler", [None, "WarmupLR"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_new_learning_rate_holds_after_resume(tmp_path, stage, scheduler):
    """The user's way out of a diverging run; the checkpoint's own rate must not come back silently."""
    write_inputs(tmp_path, {"zero_optimization": {"stage": stage}}, {"checkpoints": {"at_end": True}})
    engine = json.loads((tmp_path / "engine.json").read_text())
    engine.pop("scheduler")
    if scheduler:
        engine["scheduler"] = {"type": scheduler, "params": {"warmup_num_steps": 2}}
    (tmp_path / "engine.json").write_text(json.dumps(engine))
    run_ranks(train, 1, tmp_path, 3)
    resumed = run_ranks(resume_with, 1, tmp_path, ["optimizer.params.lr=0.0005"], "auto", 5)[0]
    assert [update["lr"] for update in resumed.updates] == pytest.approx([5e-4, 5e-4])
    assert any("optimizer.params.lr was 0.003, now 0.0005" in line for line in resumed.lines)


def test_going_back_sets_the_abandoned_checkpoints_aside(run):
    earlier = run / "out" / "checkpoints" / "step-00000002"
    resumed = run_ranks(resume_with, 2, run, ["checkpoints.every_steps=3"], str(earlier))[0]
    assert [update["step"] for update in resumed.updates] == list(range(3, STEPS + 1))
    assert any("step-00000004, step-00000006: left behind" in line for line in resumed.lines)
    names = sorted(path.name for path in (run / "out" / "checkpoints").iterdir() if path.is_dir())
    assert names == [
        "abandoned-step-00000004",
        "abandoned-step-00000006",
        "step-00000002",
        "step-00000003",
        "step-00000006",
        "step-00000009",
    ]
    assert [row["step"] for row in rows_of(run)] == list(range(1, STEPS + 1))
