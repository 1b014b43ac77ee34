"""One run laid out in many ways, for the tests and the sweep of continuing on another layout."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from largetrain.checkpoint.reader import open_checkpoint
from tests.distributed.tiny_run import Outcome, precision_section, train, write_inputs
from tests.ranks import run_ranks

GLOBAL_BATCH, SAVED, STEPS = 12, 4, 9  # 60 samples: five updates an epoch, so the checkpoint lies within the first
# an epsilon well above the rounding of gradients that are zero but for it (the attention keys' biases)
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4}}


@dataclass(frozen=True)
class Layout:
    """How one run is spread over ranks."""

    backend: str = "deepspeed"
    stage: int = 2
    ranks: int = 2
    accumulation: int = 1
    offload: bool = False
    tensor: int = 1
    sequence_parallel: bool = False

    def __str__(self) -> str:
        name = "ddp" if self.backend == "ddp" else f"zero{self.stage}{'+offload' if self.offload else ''}"
        tensor = f" tensor {self.tensor}{' +sp' if self.sequence_parallel else ''}" if self.tensor > 1 else ""
        return f"{name} x{self.ranks}{tensor}" + (f" acc {self.accumulation}" if self.accumulation > 1 else "")

    @property
    def sets(self) -> list[str]:
        """--set values."""
        chosen = [
            f"backend={self.backend}",
            f"zero_optimization.stage={0 if self.backend == 'ddp' else self.stage}",
            f"gradient_accumulation_steps={self.accumulation}",
            f"train_micro_batch_size_per_gpu={GLOBAL_BATCH * self.tensor // (self.ranks * self.accumulation)}",
        ]
        if self.tensor > 1:
            chosen += [
                f"parallel.tensor_parallel={self.tensor}",
                f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            ]
        return [*chosen, "zero_optimization.offload_optimizer.device=cpu"] if self.offload else chosen


@dataclass
class Continuation:
    """A run on one layout whose end was trained on another."""

    updates: list[dict] = field(default_factory=list)
    """Of rank 0, all of them."""
    samples: list[set[int]] = field(default_factory=list)
    """Of each update, over all ranks."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the last checkpoint: weights and optimizer state."""
    lines: list[str] = field(default_factory=list)
    """What rank 0 was told at the resume."""
    seconds: float = 0.0
    """From the start of the ranks of the second layout to its last update."""


def prepare(folder: Path, precision: str = "fp32") -> None:
    """Inputs of a run that is the same on all layouts: dropout has a stream for each rank, so it is off."""
    engine = {**precision_section(precision), "optimizer": ADAM}
    # four heads, two of keys and values: four tensor ranks divide the first and hold the others whole
    run = {
        "model": {"dropout": 0.0, "heads": 4, "kv_heads": 2},
        "checkpoints": {"every_steps": SAVED, "at_end": True, "keep_last": 0},
    }
    write_inputs(folder, engine, run)


def straight(folder: Path, layout: Layout) -> Continuation:
    """The run that is never interrupted."""
    output = f"straight {layout}"
    return _told(folder / output, [], run_ranks(train, layout.ranks, folder, STEPS, output, None, layout.sets))


def continued(folder: Path, first: Layout, second: Layout) -> Continuation:
    """Stopped after update `SAVED`'s checkpoint on the first layout, ended on the second."""
    output = f"{first} to {second}"
    stopped = run_ranks(train, first.ranks, folder, STEPS, output, None, first.sets, SAVED)
    began = time.perf_counter()
    ended = run_ranks(train, second.ranks, folder, STEPS, output, "auto", second.sets)
    told = _told(folder / output, stopped, ended)
    told.seconds = time.perf_counter() - began
    return told


def _told(output: Path, stopped: list[Outcome], ended: list[Outcome]) -> Continuation:
    updates = [u for part in (stopped, ended) if part for u in part[0].updates]
    samples = [
        {i for outcome in part for i in outcome.updates[index]["samples"]}
        for part in (stopped, ended)
        if part
        for index in range(len(part[0].updates))
    ]
    return Continuation(updates, samples, tensors_of(output, STEPS), ended[0].lines)


def tensors_of(output: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything that the checkpoint after `step` holds, whole and flat."""
    pieces = open_checkpoint(output / "checkpoints" / f"step-{step:08d}")
    return {key: pieces.read(key) for key in pieces.keys()}  # noqa: SIM118 (a Pieces is no mapping)
