"""Image runs as a person starts them: both launchers, the flags that launchers add, --evaluate, mistakes."""

import json

import pytest

from tests.checkpoints import weights_of
from tests.cli.test_launches import launch
from tests.distributed.tiny_images import Net, file_digests, write_inputs

RUN = ["--ds_config", "engine.json", "--config", "run.json", "--output", "out"]


@pytest.fixture
def folder(tmp_path):
    engine = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 8}}
    write_inputs(
        tmp_path,
        engine,
        {"logging": {"every_steps": 1}, "checkpoints": {"at_end": True}, "evaluation": {"at_end": True}},
    )
    return tmp_path


def test_deepspeed_trains_a_conv_net_and_one_process_evaluates_it(folder):
    result = launch(folder, "deepspeed", *RUN, "--steps", "2")
    assert result.code == 0
    assert result.left == [] and result.shared_memory == set()
    for line in (
        "backend: ddp (auto: 2 live batch-norm layers, ",
        "sync_batch_norm: on (auto: 2 images per rank, fewer than 16)",
        "backend ddp: ZeRO stage 2 (engine.json:",
        "step 1/2  loss ",
        "step 2/2  loss ",
        "step 2/2  validation: loss ",
        "done: 2 updates, 8 images",
    ):
        assert result.count(line) == 1, line
    assert "Traceback" not in result.output
    checkpoint = folder / "out" / "checkpoints" / "step-00000002"
    Net(3).load_state_dict(weights_of(checkpoint), strict=True)
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 2]

    before = file_digests(folder)
    evaluated = launch(folder, "python", "--local-rank=0", *RUN, "--resume", "--evaluate", "--set", "data.workers=0")
    assert evaluated.code == 0
    lines = [line.partition(": ") for line in evaluated.output.splitlines()]
    printed = {name: float(value) for name, colon, value in lines if name in ("loss", "top1", "samples")}
    # as the run saw them, to the six digits that are printed
    assert printed == pytest.approx({name: rows[2][f"eval/{name}"] for name in printed}, rel=1e-5)
    assert printed["samples"] == 7
    assert file_digests(folder) == before


def test_torchrun_trains_on_synthetic_images(folder):
    sets = ["data={source: synthetic, samples: 8, classes: 4, image_size: 8}", "zero_optimization.stage=0"]
    result = launch(folder, "torchrun", *RUN, "--steps", "2", "--set", *sets, "fp16.enabled=false")
    assert result.code == 0
    assert result.left == []
    assert result.count("backend: ddp (auto: ") == result.count("done: 2 updates, 8 images") == 1
    assert "ZeRO stage" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("flags", [["--local_rank", "0"], ["--local_rank=0"], ["--local-rank=0"]])
def test_flags_that_launchers_add_are_accepted(folder, flags):
    result = launch(folder, "python", *flags, *RUN, "--dry-run")
    assert result.code == 0
    assert "task: classification" in result.output
    assert not (folder / "out").exists()


def test_random_weights_are_not_evaluated(folder):
    result = launch(folder, "python", *RUN, "--evaluate")
    assert result.code == 2
    assert result.count("largetrain: --evaluate: the model has random weights; add --resume") == 1
    assert "Traceback" not in result.output
    assert not (folder / "out").exists()
