"""What else may change between an image run and its continuation, and what is refused."""

import pytest
import torch

from largetrain.checkpoint.folder import read_facts
from largetrain.compose import evaluate
from largetrain.config.world import launch_world
from largetrain.data.images import BadImage
from largetrain.errors import ConfigError
from tests.distributed.tiny_images import evaluation_rows, train, write_inputs
from tests.distributed.tiny_run import resolved_for
from tests.ranks import run_ranks

WITHOUT_NORM = "model.args={norm: false}"
SPLIT = "parameters={norm_weight_decay: 0.1, bias_weight_decay: 0.1}"  # the optimizer's own: other groups, same run


def regroup(folder):
    """Runs stopped and gone on with, each with and without groups of their own, on both backends."""
    found = {}
    for before in ([], [SPLIT]):
        for after in ([], [SPLIT]):
            name = f"{len(before)}{len(after)}"
            train(folder, 3, name, sets=before)
            found[name] = train(folder, 6, name, resume="auto", sets=after)
    deepspeed = [WITHOUT_NORM, "backend=deepspeed"]
    zero = []
    for name, after in (("zero", []), ("zero split", [SPLIT])):
        train(folder, 3, name, sets=deepspeed)
        zero.append(train(folder, 6, name, resume="auto", sets=[*deepspeed, *after]))
    return found, zero


def test_the_optimizers_state_follows_the_parameters_into_other_groups(tmp_path):
    write_inputs(tmp_path, {}, {"checkpoints": {"at_end": True}})
    found, (plain, split) = run_ranks(regroup, 1, tmp_path, timeout=120)[0]
    for name, outcome in found.items():
        assert outcome.updates == found["00"].updates, name
        assert outcome.state["weights"] == found["00"].state["weights"], name
    assert any("parameters.norm_weight_decay was None, now 0.1" in line for line in found["01"].lines)
    # ZeRO lays the parameters of several groups out in another order: the same numbers in the same tensors
    assert split.updates == plain.updates
    assert split.state["weights"] == plain.state["weights"]


def evaluate_on_other_classes(folder):
    train(folder / "three", 2, "out", sets=["model.num_classes=3"])
    resolved = resolved_for(folder / "two", 2, str(folder / "three" / "out"))
    with pytest.raises(ConfigError) as caught:
        evaluate(resolved, launch_world(), resume="auto", verbose=False, say=print)
    return str(caught.value), torch.distributed.get_world_size()


def test_evaluation_on_other_classes_is_refused_by_name(tmp_path):
    for name in ("three", "two"):
        write_inputs(tmp_path / name, {}, {"model": {"num_classes": 3}, "checkpoints": {"at_end": True}})
    for split in ("train", "val"):
        folder = tmp_path / "two" / "images" / split
        (folder / "rest").rename(folder / "others")
    message, _ = run_ranks(evaluate_on_other_classes, 1, tmp_path)[0]
    assert "classes of the data was ['bars', 'dots', 'rest'], now ['bars', 'dots', 'others']" in message


def fail_to_evaluate_and_go_on(folder):
    """Runs stopped after an evaluation that found a best, and one whose last evaluation meets a broken file."""
    sets = ["evaluation={every_steps: 1}", "checkpoints={every_steps: 1, best: top1}"]
    train(folder, 2, "out", sets=sets)
    saved = read_facts(folder / "out" / "checkpoints" / "step-00000001")["state"]
    broken = next((folder / "images" / "val").rglob("*.png"))
    broken.write_text("no image")
    with pytest.raises(BadImage):
        train(folder, 3, "failed", sets=["evaluation.at_end=true", "checkpoints.at_end=true"])
    return saved


def test_an_evaluation_that_fails_costs_no_checkpoint_and_one_that_succeeds_is_remembered(tmp_path):
    write_inputs(tmp_path)
    (saved,) = run_ranks(fail_to_evaluate_and_go_on, 1, tmp_path)
    assert (tmp_path / "failed" / "checkpoints" / "latest").read_text().strip() == "step-00000003"
    (first, _) = evaluation_rows(tmp_path)
    assert (saved["step"], saved["best_step"], saved["best_name"]) == (1, 1, "top1")
    assert saved["best_figure"] == first["top1"]
