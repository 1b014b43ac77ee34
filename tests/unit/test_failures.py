"""Exceptions from below, told in one line with a way out."""

import errno

import pytest
import torch

from largetrain.cli.failures import NoMemoryError, PeerLostError, StoppedError, explained
from largetrain.config.load import load
from largetrain.config.world import World
from largetrain.engine.signals import Stop
from largetrain.errors import ConfigError, LargetrainError

NOTHING = Stop(0)


def told(error: Exception, *overrides: str, ranks: int = 1, asked: Stop = NOTHING) -> LargetrainError | None:
    return explained(error, load(None, None, overrides, world_size=ranks), World(world_size=ranks), asked)


def too_large() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    return caught.value


def test_no_memory_names_what_takes_less():
    found = told(too_large(), "zero_optimization.stage=1")
    assert isinstance(found, NoMemoryError) and "\n" not in str(found)
    for word in (
        "4,294,967,296 MiB",
        "train_micro_batch_size_per_gpu below 8",
        "model.activation_checkpointing: true",
        "bf16.enabled: true",
        "zero_optimization.stage above 1",
        "parallel.tensor_parallel above 1",
        "parallel.pipeline_stages above 1",
    ):
        assert word in str(found)


def test_what_is_on_already_is_not_advised():
    found = told(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of 1 GiB"),
        "zero_optimization.stage=3",
        "bf16.enabled=true",
        "model.activation_checkpointing=true",
        "train_micro_batch_size_per_gpu=1",
    )
    assert "20.00 MiB" in str(found)
    for word in ("stage above", "bf16", "activation_checkpointing", "train_micro_batch"):
        assert word not in str(found)


def test_pythons_own_memory_error_counts():
    assert isinstance(told(MemoryError()), NoMemoryError)


def test_a_full_disk():
    assert "Free space" in str(told(OSError(errno.ENOSPC, "No space left on device")))


def test_a_lone_value_names_the_micro_batch():
    found = told(ValueError("Expected more than 1 value per channel when training, got input size [1, 3, 1, 1]"))
    assert isinstance(found, ConfigError) and found.problems[0].startswith("train_micro_batch_size_per_gpu: 8")


def test_a_lost_peer_and_a_signal():
    error = RuntimeError("gloo: Connection closed by peer [127.0.0.1]:4711")
    assert isinstance(told(error, ranks=2), PeerLostError)
    assert told(error) is None  # a single rank has no peer
    stopped = told(error, ranks=2, asked=Stop.SIGTERM)
    assert isinstance(stopped, StoppedError) and stopped.exit_code == 128 + 15


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("no"), OSError(errno.ENOENT, "gone")])
def test_anything_else_keeps_its_traceback(error):
    assert told(error, ranks=2) is None
