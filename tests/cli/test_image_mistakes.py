"""What a user of image runs may get wrong and only the running model can tell: one line, exit code 2."""

import pytest

from largetrain.cli import report
from largetrain.cli.failures import PeerLostError
from tests.cli.test_train_cli import run_command
from tests.distributed.tiny_images import write_inputs
from tests.ranks import run_ranks


def files(folder, *more):
    names = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json")]
    return [*names, "--output", str(folder / "out"), "--steps", "2", *more]


def test_a_batch_norm_with_one_value_per_channel(tmp_path):
    write_inputs(tmp_path, {"train_micro_batch_size_per_gpu": 1}, {"model": {"args": {"pooled": True}}})
    ((code, out, err),) = run_ranks(run_command, 1, files(tmp_path))
    assert code == 2
    assert "batch norm: last_norm would get one value per channel" in out  # said before, with the layer
    assert err.startswith("largetrain: train_micro_batch_size_per_gpu: 1 leaves a batch norm one value per channel")
    assert "sync_batch_norm: on" in err and err.count("\n") == 1


def test_a_best_figure_that_no_evaluation_gives_is_found_before_the_first_update(tmp_path):
    write_inputs(tmp_path, {}, {"evaluation": {"at_end": True}, "ema": {"decay": 0.5}})
    ((code, out, err),) = run_ranks(run_command, 1, files(tmp_path, "--set", "checkpoints.best=top5"))
    assert code == 2
    names = "loss, top1, samples, ema_loss, ema_top1, ema_samples"
    assert err == f"largetrain: checkpoints.best: the evaluation gives no 'top5'; it gives {names}. Name one of them\n"
    assert "step 1/2" not in out and not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_best_figure_without_any_evaluation_is_told(tmp_path):
    write_inputs(tmp_path)
    ((code, out, _),) = run_ranks(run_command, 1, files(tmp_path, "--set", "checkpoints.best=top1"))
    assert code == 0
    assert "note: checkpoints.best has no effect: this run is never evaluated" in out


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 1), (2, 0), (15, 0)])
def test_a_lost_peer_is_told_by_rank_0_or_should_that_be_the_lost_one_by_rank_1(capsys, rank, lines):
    report(PeerLostError("this rank stops because another one has ended", rank), {"RANK": str(rank)})
    assert capsys.readouterr().err.count("this rank stops") == lines
