"""A whole run, small: the built-in decoder on a short text, composed by `largetrain.compose` as the command does it."""

import hashlib
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from largetrain.callbacks.base import Callback
from largetrain.compose import build
from largetrain.config.load import load
from largetrain.config.world import launch_world
from largetrain.train.state import random_state

SEQ_LEN = 16
TRAIN_SAMPLES, VALIDATION_SAMPLES = 60, 11
MODEL = {"style": "gpt", "layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "seq_len": SEQ_LEN, "dropout": 0.2}


class Stopped(Exception):
    """What ends a run early in these tests, as a failing machine would."""


@dataclass
class Outcome:
    """What one rank saw."""

    lines: list[str] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)  # samples, loss, lr, scale, ... of each update
    state: dict[str, str] = field(default_factory=dict)  # digests of everything that the next update depends on
    error: str = ""


class Probe(Callback):
    """Notes every update of this rank and ends the run at one."""

    def __init__(self, updates: list[dict[str, Any]], stop_after: int | None):
        self.updates, self.stop_after = updates, stop_after

    def on_step(self, moment):
        result = moment.result
        self.updates.append(
            {
                "step": moment.step,
                "samples": result.sample_ids,
                "loss": float(result.loss),
                "lr": result.lr,
                "scale": result.loss_scale,
                "norm": float(result.grad_norm),
                "applied": result.applied,
                "local": [float(loss) for loss in result.local_losses],
            }
        )
        if moment.step == self.stop_after:
            raise Stopped


def write_inputs(
    folder: Path, engine: Mapping[str, Any] | None = None, run: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """`engine.json`, `run.json` (YAML reads it) and two texts; sections given are merged into the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, samples in (("train", TRAIN_SAMPLES), ("validation", VALIDATION_SAMPLES)):
        characters = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(samples * SEQ_LEN))
        (folder / f"{name}.txt").write_text(characters)  # the end-of-text token makes it one token more
    base_engine = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 3}},
    }
    base_run: dict[str, Any] = {
        "model": MODEL,
        "data": {
            "source": str(folder / "train.txt"),
            "validation": str(folder / "validation.txt"),
            "cache": str(folder / "cache"),
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


def precision_section(precision: str) -> dict[str, Any]:
    """A section of the engine JSON; fp16 with a scale that moves within a few updates."""
    if precision == "fp32":
        return {}
    return {
        precision: {
            "enabled": True,
            **({"initial_scale_power": 10, "loss_scale_window": 2} if precision == "fp16" else {}),
        }
    }


def resolved_for(folder: Path, steps: int, output: str = "out", sets: Sequence[str] = ()) -> Any:
    """The configuration of this rank, from `folder`'s files."""
    world = launch_world()
    return load(
        str(folder / "engine.json"),
        str(folder / "run.json"),
        overrides=sets,
        flags={"steps": ("--steps", steps), "output": ("--output", str(folder / output))},
        world_size=world.world_size,
        local_world_size=world.local_world_size,
    )


def train(
    folder: Path,
    steps: int,
    output: str = "out",
    resume: str | None = None,
    sets: Sequence[str] = (),
    stop_after: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Run on this rank, from `folder`'s files, until `steps`, an error or `stop_after`."""
    # a rank inherits the harness's way to start processes, in which each loader process would import torch again
    multiprocessing.set_start_method("fork", force=True)
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


def digests(backend: Any) -> dict[str, str]:
    """SHA-256 of this rank's weights, optimizer state (moments, masters, loss scale) and random generators."""
    wrapped = getattr(backend, "engine", backend)
    schedule = wrapped.scheduler if wrapped is backend else wrapped.lr_scheduler
    parts = {
        "weights": {name: getattr(p, "ds_tensor", p) for name, p in wrapped.module.named_parameters()},
        "optimizer": wrapped.optimizer.state_dict(),
        "loss_scale": backend.loss_scale,
        "schedule": schedule.state_dict() if schedule is not None else {},
        "random": random_state(torch.device("cpu")),
    }
    return {name: _digest(part) for name, part in parts.items()}


def _digest(value: Any) -> str:
    sha = hashlib.sha256()

    def feed(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            plain = item.detach().contiguous().reshape(-1)
            sha.update(str((item.dtype, tuple(item.shape))).encode())
            sha.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        elif isinstance(item, Mapping):
            for key, below in sorted(item.items(), key=lambda pair: str(pair[0])):
                sha.update(str(key).encode())
                feed(below)
        elif isinstance(item, list | tuple):
            for below in item:
                feed(below)
        elif hasattr(item, "__dict__"):
            feed({key: below for key, below in vars(item).items() if isinstance(below, int | float | bool)})
        else:
            sha.update(repr(item).encode())

    feed(value)
    return sha.hexdigest()


def rows_of(folder: Path, output: str = "out") -> list[dict[str, Any]]:
    """The metrics file."""
    return [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]


TIMES = {"tokens_per_s", "step_s", "data_wait_share", "time", "model_flops_per_s", "mfu", "memory_bytes"}


def without_times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what the clock and the machine put into them."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
