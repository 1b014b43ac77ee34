"""DualPipeV, and stages that differ in what they hold: four of them, groups of parameters that some lack."""

import pytest

from tests.distributed.parity.parallel import Cell, measure
from tests.distributed.test_pipeline import both_ways
from tests.distributed.tiny_run import precision_section, train, write_inputs
from tests.ranks import run_ranks

FOLDED = {"backend": "pipeline", "stages": 2, "layers": 4, "schedule": "dualpipev", "accumulation": 4}
CELLS = {
    2: [Cell(**FOLDED, tied=True), Cell(**{**FOLDED, "accumulation": 8}, zero=1, precision="fp16", style="gpt")],
    4: [
        Cell(**FOLDED, data=2, zero=1, tied=True, style="gpt", recompute=True),
        Cell(backend="pipeline", stages=4, layers=4, zero=1, tied=True),  # the tied table is on two of four stages
    ],
}


@pytest.mark.parametrize("ranks", CELLS)
def test_stages_train_as_one_process_does(ranks):
    """As in test_pipeline; an evaluation is of fewer batches than DualPipeV takes."""
    for cell, errors in zip(CELLS[ranks], measure(CELLS[ranks]), strict=True):
        assert not errors.failures(), f"{cell}: {errors.failures()}"


def losses_and_norms(folder, sets):
    """Body of a rank."""
    outcome = train(folder, 5, "stages" if sets else "alone", None, sets)
    return [(update["loss"], update["norm"], update["lr"]) for update in outcome.updates]


@pytest.mark.parametrize("zero", [0, 1])
def test_groups_that_some_stages_lack(tmp_path, zero):
    """Only the first stage has positions, and so one group more; ZeRO-1 would wait for it on the second."""
    parameters = {"lr_factors": {"position_embedding": 0.1}, "norm_weight_decay": 0.0}
    write_inputs(tmp_path, {}, {"parameters": parameters, "model": {"dropout": 0.0}})
    (expected,) = run_ranks(losses_and_norms, 1, tmp_path, ())
    sets = ["parallel.pipeline_stages=2", f"zero_optimization.stage={zero}"]
    for seen in run_ranks(losses_and_norms, 2, tmp_path, sets, timeout=100):
        for update, other in zip(seen, expected, strict=True):
            assert update == pytest.approx(other, rel=1e-5)  # sums of 64 tokens, over five updates


LAYOUT = ["parallel.pipeline_stages=2", "parallel.pipeline_schedule=dualpipev", "zero_optimization.stage=1"]


def test_a_resumed_run_goes_on_to_the_bit_with_dropout_and_half_precision(tmp_path):
    engine = {**precision_section("fp16"), "gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 1}
    write_inputs(tmp_path, engine, {"model": {"layers": 4}})
    for straight, first, second in run_ranks(both_ways, 2, tmp_path, LAYOUT, timeout=200):
        for key in ("loss", "norm"):
            assert [u[key] for u in [*first.updates, *second.updates]] == [u[key] for u in straight.updates]
        assert second.state == straight.state
        assert not any("up to the rounding" in line for line in second.lines)


def other_schedule(folder):
    """Body of a rank: a run by 1F1B, and one that DualPipeV ends."""
    straight = train(folder, 6, "straight", None, LAYOUT[:1])
    first = train(folder, 6, "changed", None, [*LAYOUT[:1], "checkpoints.every_steps=3"], stop_after=3)
    second = train(folder, 6, "changed", "auto", LAYOUT)
    return straight, first, second


def test_a_run_changes_its_schedule_on_resume(tmp_path):
    write_inputs(tmp_path, {"gradient_accumulation_steps": 4}, {"model": {"layers": 4, "dropout": 0.0}})
    for straight, first, second in run_ranks(other_schedule, 2, tmp_path, timeout=200):
        assert [u["loss"] for u in first.updates] == [u["loss"] for u in straight.updates[:3]]
        losses = [u["loss"] for u in straight.updates[3:]]
        assert [u["loss"] for u in second.updates] == pytest.approx(losses, rel=1e-5)
