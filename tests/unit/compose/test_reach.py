"""What a checkpoint cannot reach is refused before training."""

from types import SimpleNamespace

import pytest

from largetrain.compose.checkpoints import check_within_reach
from largetrain.errors import ConfigError


def resolved(device, backend="deepspeed"):
    zero = {"stage": 3, "offload_optimizer": {"device": device}}
    return SimpleNamespace(backend=backend, engine={"zero_optimization": zero})


def test_an_optimizer_on_nvme_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"offload_optimizer.device: nvme.*write cpu") as caught:
        check_within_reach(resolved("nvme"))
    assert caught.value.on_all_ranks
    check_within_reach(resolved("cpu"))
    check_within_reach(resolved("nvme", "ddp"))  # which offloads nothing
