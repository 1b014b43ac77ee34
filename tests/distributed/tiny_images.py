"""A whole image run, small: a conv net on folders of 8x8 PNGs, composed by `largetrain.compose` as the command is."""

import hashlib
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from largetrain.callbacks.base import Callback
from largetrain.compose import build, evaluate
from largetrain.config.world import launch_world
from largetrain.train.state import random_state
from tests.distributed import tiny_run
from tests.distributed.tiny_run import Outcome, Probe, Stopped, _digest, resolved_for, rows_of

SIDE, CLASSES = 8, ("bars", "dots", "rest")
TRAIN, VALIDATION = 24, 7
TIMES = {"images_per_s", "step_s", "data_wait_share", "time", "memory_bytes"}


class Net(nn.Module):
    """Convolution, batch norm, ReLU, twice, with dropout, global pooling and a linear head.

    Args:
        num_classes: outputs.
        norm: with batch norms, over per-channel shifts that differ with the data of a rank.
        pooled: a third batch norm after the pooling, on one value per image and channel.
        dropout: share of the channels dropped.
    """

    def __init__(self, num_classes: int, norm: bool = True, pooled: bool = False, dropout: float = 0.2):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.norm_1, self.norm_2 = (nn.BatchNorm2d(6), nn.BatchNorm2d(8)) if norm else (nn.Identity(), nn.Identity())
        self.dropout = nn.Dropout2d(dropout)
        self.last_norm = nn.BatchNorm2d(8) if pooled else nn.Identity()
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.norm_1(self.first(images))))
        x = torch.relu(self.norm_2(self.second(x))).mean((2, 3), keepdim=True)
        return self.head(self.last_norm(x).flatten(1))


class Switched(Net):
    """With a branch `extra` that is used on the given ranks only.

    Args:
        used_on: ranks whose forward pass uses the branch.
    """

    def __init__(self, num_classes: int, used_on: Sequence[int] = (), dropout: float = 0.0):
        super().__init__(num_classes, dropout=dropout)
        self.used_on = tuple(used_on)
        self.extra = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm_2(self.second(torch.relu(self.norm_1(self.first(images)))))).mean((2, 3))
        used = not torch.distributed.is_initialized() or torch.distributed.get_rank() in self.used_on
        return self.head(x) + self.extra(x) if used else self.head(x)


def write_images(folder: Path, train: int = TRAIN, validation: int = VALIDATION) -> None:
    """`images/train` and `images/val`, one folder per class: noise with a brightness of the class and of the image."""
    generator = np.random.default_rng(5)
    for split, count in (("train", train), ("val", validation)):
        for index in range(count):
            label = index % len(CLASSES)
            place = folder / "images" / split / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 160, (SIDE, SIDE, 3)) + 40 * label
            pixels[:, :, label] += 5 * (index % 4)  # ranks see means that differ
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{index}.png")


def write_inputs(
    folder: Path,
    engine: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    **images: int,
) -> None:
    """`engine.json`, `run.json` (YAML reads it) and the images; sections given are merged into the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    write_images(folder, **images)
    base_engine: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 3}},
    }
    base_run: dict[str, Any] = {
        "task": "classification",
        "model": {"target": "tests.distributed.tiny_images:Net"},
        "data": {
            "source": str(folder / "images"),
            "image_size": SIDE,
            "eval_resize": SIDE,
            "augment": {"flip": 0.5, "color_jitter": 0.2, "crop": "pad", "crop_padding": 1},
        },
        "logging": {"tensorboard": False, "every_steps": 3},
        "evaluation": {"at_end": False},
        "checkpoints": {"at_end": False},
    }
    for base, given in ((base_engine, engine or {}), (base_run, run or {})):
        for key, value in given.items():
            base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    (folder / "engine.json").write_text(json.dumps(base_engine))
    (folder / "run.json").write_text(json.dumps(base_run))


def train(
    folder: Path,
    steps: int,
    output: str = "out",
    resume: str | None = None,
    sets: Sequence[str] = (),
    stop_after: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Run on this rank until `steps`, an error or `stop_after`."""
    multiprocessing.set_start_method("fork", force=True)  # see tiny_run
    outcome = Outcome()
    resolved = resolved_for(folder, steps, output, sets)
    built = build(resolved, launch_world(), resume=resume, verbose=False, say=outcome.lines.append)
    # last, so that the checkpoint of the step at which it stops has been written
    built.trainer.callbacks = [*built.trainer.callbacks, *callbacks, Probe(outcome.updates, stop_after)]
    try:
        built.trainer.fit()
    except Stopped:
        return outcome
    outcome.state = digests(built.trainer.backend)
    outcome.state["counters"] = str(built.trainer.state.to_dict())
    return outcome


def evaluate_run(
    folder: Path, output: str = "out", resume: str | None = "auto", sets: Sequence[str] = ()
) -> tuple[dict[str, float], list[str]]:
    """What `--evaluate` gives on this rank, and what was said."""
    lines: list[str] = []
    resolved = resolved_for(folder, 1, output, sets)
    figures = evaluate(resolved, launch_world(), resume=resume, verbose=False, say=lines.append)
    return figures, lines


def digests(backend: Any) -> dict[str, str]:
    """SHA-256 of all that this rank's next update depends on."""
    if hasattr(backend, "engine"):
        return tiny_run.digests(backend)
    parts = {
        "weights": dict(backend.module.named_parameters()),
        "statistics": dict(backend.module.named_buffers()),
        "average": {**backend.ema.module.state_dict(), **backend.ema.counters()} if backend.ema is not None else {},
        "optimizer": backend.optimizer.state_dict(),
        "schedule": backend.scheduler.state_dict() if backend.scheduler is not None else {},
        "loss_scale": vars(backend._scales) if backend._scales is not None else {},
        "random": random_state(torch.device("cpu")),
    }
    return {name: _digest(part) for name, part in parts.items()}


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def training_rows(folder: Path, output: str = "out") -> list[dict[str, Any]]:
    """Rows of updates, without what the clock and the machine put into them."""
    rows = [row for row in rows_of(folder, output) if "loss" in row]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def evaluation_rows(folder: Path, output: str = "out") -> list[dict[str, float]]:
    """Figures of evaluations, with their `step`."""
    rows = [row for row in rows_of(folder, output) if "loss" not in row]
    return [{key.removeprefix("eval/"): value for key, value in row.items() if key != "time"} for row in rows]
