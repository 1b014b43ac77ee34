"""Bytes that a rank holds, counted from the storages of the live engine.

What is counted as what, with the places where DeepSpeed 0.19 keeps it:
- parameters: the module's parameters; under ZeRO-3 this rank's shard (`ds_tensor`), and whole ones that stay gathered.
- optimizer: the tensors of the torch optimizer's state, and the fp32 master weights, which are its parameters (at
  stage 0 in fp32 these are the module's own and are counted once, as parameters).
- gradients: `.grad` of the module's parameters and of the masters, the partitions of stages 1 and 2, the flat
  partition buffer of stage 3.
- working: buffers of a size that the engine JSON sets (`reduce_bucket_size`), which no formula of the paper holds.
- other: every other tensor that Python knows of, whoever holds it.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.config.resolved import Resolved
from largetrain.engine.deepspeed import DeepSpeedBackend
from tests.distributed.parity.harness import Batches, make_backend, rank_parts


def held_bytes(backend: DeepSpeedBackend, foreign: Iterable[Tensor]) -> dict[str, int]:
    """Bytes by kind; a storage that several tensors share counts once, for the first kind that has it.

    Args:
        foreign: tensors of the caller, not counted.
    """
    optimizer, parameters = backend.optimizer, list(backend.engine.module.parameters())
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = [master for group in _master_groups(optimizer, inner) for master in group]
    kinds: dict[str, list[Tensor]] = {
        "foreign": list(foreign),
        "parameters": parameters + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")],
        "optimizer": masters + [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t)],
        "gradients": [p.grad for p in [*parameters, *masters] if p.grad is not None]
        + _tensors(getattr(optimizer, "all_grad_tensors", None))  # stage 2, between micro-batches
        + _tensors(getattr(optimizer, "averaged_gradients", None))  # stages 1 and 2, before the update
        + _tensors(getattr(optimizer, "grad_partitions_flat_buffer", None)),  # stage 3
        "working": [t for bucket in getattr(optimizer, "ipg_buckets", {}).values() for t in _tensors(vars(bucket))],
    }
    gc.collect()
    kinds["other"] = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    counted: set[int] = set()
    sizes = {kind: _new_bytes(tensors, counted) for kind, tensors in kinds.items()}  # in this order
    return {**sizes, "elements": sum(getattr(p, "ds_numel", p.numel()) for p in parameters)}


def _master_groups(optimizer: Any, inner: Any) -> list[list[Tensor]]:
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", None) or getattr(
        optimizer, "single_partition_of_fp32_groups", None
    )
    return [list(flat)] if flat is not None else [list(group["params"]) for group in inner.param_groups]


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested lists and dicts."""
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple, set)) else []


def _new_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def measure(resolved: Resolved, batches: Batches) -> dict[str, dict[str, int]]:
    """Body of a rank: bytes between the micro-batches of the last update (gradients exist), and after it."""
    backend = make_backend(resolved)
    snapshots: dict[str, dict[str, int]] = {}
    engine_step = backend.engine.step
    parts: list[dict[str, Any]] = []

    def step() -> None:
        if not backend.engine.is_gradient_accumulation_boundary():
            inputs = [t for part in parts for t in part.values()] + [t for batch in batches for t in batch]
            snapshots["between"] = held_bytes(backend, inputs)
        engine_step()

    backend.engine.step = step
    for batch in batches:
        parts = rank_parts(resolved, batch, dist.get_rank())
        result = backend.train_step(iter(parts))
        assert result.applied
    del result
    snapshots["after"] = held_bytes(backend, [t for batch in batches for t in batch])
    return snapshots
