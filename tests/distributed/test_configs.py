"""Every file of `ds_configs/` trains: engine JSONs as they are, run YAMLs with their models shrunk to a CPU's size."""

import math
import shutil
from pathlib import Path

import pytest

from largetrain.checkpoint.verify import problem_of
from largetrain.compose import build
from largetrain.config.load import load
from largetrain.config.world import launch_world
from tests.distributed.parity.matrix import cpu_adam_is_built
from tests.distributed.tiny_run import rows_of, train, write_inputs
from tests.ranks import run_ranks

CONFIGS = Path(__file__).parents[2] / "ds_configs"
STEPS = 3
SHRUNK = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.ffn_hidden=64", "model.seq_len=16"]


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


RANKS = {"demo_parallel": 4}  # where a run asks for several
RUNS = sorted((CONFIGS / "runs").glob("*.yaml"))
IMAGE_RUNS = [path for path in RUNS if "\ntask: " in path.read_text()]
# the user's folders are replaced by made-up images, large models and images by small ones; the recipe stays
SMALL_IMAGES = {
    "digits_resnet": ["data.image_size=16"],
    "digits_deeplab": ["data.samples=16"],
    "voc_deeplabv3": [
        *("data.source=synthetic", "data.samples=8", "data.image_size=32", "data.base_size=32", "data.workers=0"),
        *("model.name=lraspp_mobilenet_v3_large", "model.pretrained_backbone=false"),
        "parameters.lr_factors={classifier: 10}",
    ],
}
SMALL_IMAGENET = [
    *("data.source=synthetic", "data.classes=10", "data.samples=32", "data.image_size=32", "data.eval_size=32"),
    *("data.eval_resize=32", "data.workers=0", "model.name=shufflenet_v2_x0_5"),
]


def train_images(folder: Path, sets: list[str]) -> None:
    world = launch_world()
    few = ["train_micro_batch_size_per_gpu=2", "evaluation.max_samples=3", "checkpoints.every_epochs=null"]
    resolved = load(
        str(CONFIGS / "zero2.json"),
        str(folder / "run.yaml"),
        [*sets, *few],
        {"steps": ("--steps", STEPS), "output": ("--output", str(folder / "out"))},
        world.world_size,
    )
    build(resolved, world, resume=None, verbose=False, say=print).trainer.fit()


@pytest.mark.parametrize("path", IMAGE_RUNS, ids=lambda path: path.stem)
def test_image_run_trains(path, tmp_path):
    shutil.copy(path, tmp_path / "run.yaml")
    run_ranks(train_images, 2, tmp_path, SMALL_IMAGES.get(path.stem, SMALL_IMAGENET), timeout=120)
    rows = rows_of(tmp_path)
    trained, best = [row for row in rows if "loss" in row], (tmp_path / "out" / "checkpoints" / "best").read_text()
    assert [row["step"] for row in trained] == [1, 2, 3] and all(math.isfinite(row["loss"]) for row in trained)
    assert {"eval/top1", "eval/miou"} & rows[-1].keys()
    assert problem_of(tmp_path / "out" / "checkpoints" / best.strip(), contents=True) is None


@pytest.mark.parametrize("path", [path for path in RUNS if path not in IMAGE_RUNS], ids=lambda path: path.stem)
def test_run_config_trains(path, tmp_path):
    write_inputs(tmp_path)
    shutil.copy(path, tmp_path / "run.json")
    run_ranks(train_run, RANKS.get(path.stem, 1), tmp_path, timeout=120)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert "eval/loss" in rows[-1]
