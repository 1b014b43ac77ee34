"""What is copied while the next update computes its gradients is what was there after the last: bit for bit."""

import time

import pytest
import torch

from largetrain.checkpoint import manager
from tests.distributed.layouts import tensors_of
from tests.distributed.tiny_run import train, write_inputs
from tests.ranks import run_ranks

STEPS, LATE_S = 3, 0.2
RUNS = {  # name -> --set values
    "zero0": ["zero_optimization.stage=0"],
    "zero1 bf16": ["zero_optimization.stage=1", "bf16.enabled=true"],
    "zero2": ["zero_optimization.stage=2"],
    "zero3": ["zero_optimization.stage=3"],
    "pipeline": ["parallel.pipeline_stages=2", "zero_optimization.stage=1", "backend=pipeline"],
    "ddp": ["backend=ddp", "zero_optimization.stage=0", "ema.decay=0.9"],
}


class Late(manager.Staging):
    """Begins to copy only when the next update's forward pass has long begun."""

    def fill(self, planned):
        time.sleep(LATE_S)
        return super().fill(planned)


def train_all(folder, names):
    """Each run twice: saved at once, and late."""
    real = manager.Staging
    for name in names:
        train(folder, STEPS, f"{name} plain", sets=[*RUNS[name], "checkpoints.asynchronous=false"])
        manager.Staging = Late
        train(folder, STEPS, f"{name} late", sets=RUNS[name])
        manager.Staging = real


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    write_inputs(folder, None, {"checkpoints": {"every_steps": 1, "at_end": True, "keep_last": 0}})
    run_ranks(train_all, 2, folder, list(RUNS), timeout=180)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_late_copies_are_what_was_saved(folder, name):
    for step in range(1, STEPS + 1):
        plain, late = (tensors_of(folder / f"{name} {kind}", step) for kind in ("plain", "late"))
        assert plain.keys() == late.keys()
        for key, tensor in plain.items():
            assert torch.equal(tensor, late[key]), f"step {step}: {key}"
