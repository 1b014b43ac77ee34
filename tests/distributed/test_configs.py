"""Every file of `ds_configs/` trains: engine JSONs as they are, run YAMLs with their models shrunk to a CPU's size."""

import math
import shutil
from pathlib import Path

import pytest

from tests.distributed.parity.matrix import cpu_adam_is_built
from tests.distributed.tiny_run import rows_of, train, write_inputs
from tests.ranks import run_ranks

CONFIGS = Path(__file__).parents[2] / "ds_configs"
STEPS = 3
SHRUNK = ["model.layers=1", "model.hidden=32", "model.heads=2", "model.ffn_hidden=64", "model.seq_len=16"]


def train_engine(folder: Path) -> None:
    # 60 samples fill the shipped micro-batch and accumulation on two ranks
    train(folder, STEPS, sets=["train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2"])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_engine_config_trains(path, tmp_path):
    if "offload" in path.stem and not cpu_adam_is_built():
        pytest.skip("largetrain setup --ops cpu_adam has not been run")
    write_inputs(tmp_path)
    shutil.copy(path, tmp_path / "engine.json")
    run_ranks(train_engine, 2, tmp_path, timeout=120)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["applied"] for row in rows)
    assert rows[0]["loss_scale"] == (2.0**16 if '"fp16"' in path.read_text() else 1.0)


def train_run(folder: Path) -> None:
    texts = [f"data.source={folder}/train.txt", f"data.validation={folder}/validation.txt"]
    train(folder, STEPS, sets=[*SHRUNK, *texts, f"data.cache={folder}/cache", "data.tokenizer=bytes"])


@pytest.mark.parametrize("path", sorted((CONFIGS / "runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_run_config_trains(path, tmp_path):
    write_inputs(tmp_path)
    shutil.copy(path, tmp_path / "run.json")
    run_ranks(train_run, 1, tmp_path, timeout=120)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert "eval/loss" in rows[-1]
