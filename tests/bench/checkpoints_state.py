"""The state of a run of bare DeepSpeed, and how it is saved and loaded: by largetrain, DeepSpeed and torch's DCP.

Also what nothing can be faster than for long: the same bytes written and read from one end to the other.
"""

import mmap
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from largetrain.checkpoint.manager import CheckpointManager
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.retention import Retention
from largetrain.checkpoint.together import led_by_first
from largetrain.checkpoint.writer import sync
from largetrain.engine.gate import Gate
from largetrain.engine.held import (
    optimizer_numbers,
    optimizer_pieces,
    restore_optimizer,
    weight_pieces,
)
from largetrain.engine.zero_state import copy_into_model, held_by, owners_of, take_up_weights
from largetrain.parallel.pieces import Piece, Snapshot

STAGE, SEED, TAG = 1, 1234, "step"
CHUNK_BYTES = 32 << 20
READ_BYTES = 4 << 20
FACTS = {"run_id": "benchmark", "state": {}}


def init_deepspeed() -> None:
    """Join the ranks, without an operator that only inference needs and that would be compiled now."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", verbose=False)


class State:
    """Random weights and Adam's moments in fp32 under ZeRO-1: on each rank an equal part of each of the three."""

    def __init__(self, layers: int, width: int):
        import deepspeed

        torch.manual_seed(SEED)
        blocks = [nn.TransformerEncoderLayer(width, width // 64, 4 * width) for _ in range(layers)]
        model = nn.Sequential(*blocks)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": STAGE}}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        self.rank = dist.get_rank()
        self.engine.backward(self.engine(torch.randn(2, 1, width)).square().mean())
        self.engine.step()  # makes the moments
        for piece in self.pieces():  # numbers that no disk can pack
            piece.values.normal_()
        copy_into_model(self.engine, STAGE)
        self.gate = Gate(self.engine.optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, below ZeRO's wrapper."""
        return self.engine.optimizer.optimizer

    def pieces(self) -> list[Piece]:
        """What this rank holds."""
        held = held_by(self.engine, STAGE)
        return weight_pieces(held) + optimizer_pieces(held, self.optimizer)

    def snapshot(self) -> Snapshot:
        """As largetrain's backend takes it, with the random generator."""
        numbers = optimizer_numbers(owners_of(self.engine, STAGE), self.optimizer)
        own = {"random": torch.get_rng_state()}
        return Snapshot(self.pieces(), {"optimizer": numbers}, own, self.gate.shut)

    def sums(self) -> dict[str, float]:
        """Of each piece: tells whether a load brought back what was saved."""
        return {piece.key: piece.values.double().sum().item() for piece in self.pieces()}

    def forget(self) -> None:
        """Zeros in place of everything."""
        for piece in self.pieces():
            piece.values.zero_()


# ---------------------------------------------------------------- largetrain


def manager(folder: Path, asynchronous: bool, state: State) -> CheckpointManager:
    """As a run makes it; nothing is pruned."""
    made = CheckpointManager(folder, Retention(keep_last=0), run_id="benchmark", asynchronous=asynchronous)
    made.check_room(sum(piece.values.nbytes for piece in state.pieces()), reserve=True)
    return made


def verify(checkpoint: Path) -> None:
    """Read and hash every file, all ranks together, as `--resume` does before any of them opens it."""
    problem = led_by_first(lambda check: check(checkpoint))
    assert problem is None, problem


def read_all(checkpoint: Path, state: State) -> None:
    """Open a checkpoint and read all that this rank holds."""
    reader = open_checkpoint(checkpoint)
    for piece in state.pieces():
        reader.read(piece.key, piece.start, piece.start + len(piece.values))
    reader.own(state.rank)


def restore(checkpoint: Path, state: State) -> None:
    """Open a checkpoint and take it up into the engine, as largetrain's backend does."""
    reader = open_checkpoint(checkpoint)
    take_up_weights(state.engine, STAGE, reader)
    held = held_by(state.engine, STAGE)
    numbers = reader.shared["optimizer"]
    restore_optimizer(held, owners_of(state.engine, STAGE), state.optimizer, reader, numbers, {})
    reader.own(state.rank)


# ---------------------------------------------------------------- torch.distributed.checkpoint


class Sharded:
    """The same numbers of weights and moments as sharded tensors, of which each rank holds an equal part of each."""

    def __init__(self, state: State):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ranks = dist.get_world_size()
        self.tensors: dict[str, Any] = {}
        for name, parameter in state.engine.module.named_parameters():
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                shape = (parameter.shape[0] // ranks, *parameter.shape[1:])
                self.tensors[f"{kind}/{name}"] = DTensor.from_local(torch.randn(shape), mesh, [Shard(0)])
        group = dist.new_group(backend="gloo")  # for the thread of async_save
        self.group = group
        self.stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(self, folder: Path) -> None:
        dcp.save(self.tensors, checkpoint_id=folder)

    def save_async(self, folder: Path, keep_memory: bool) -> Future[Any]:
        """As it comes, or with host memory that is kept from save to save."""
        stager = {"async_stager": self.stager} if keep_memory else {}
        return dcp.async_save(self.tensors, checkpoint_id=folder, process_group=self.group, **stager)  # type: ignore[return-value]

    def load(self, folder: Path) -> None:
        dcp.load(self.tensors, checkpoint_id=folder)

    def sums(self) -> dict[str, float]:
        return {key: tensor.to_local().double().sum().item() for key, tensor in self.tensors.items()}

    def forget(self) -> None:
        for tensor in self.tensors.values():
            tensor.to_local().zero_()


# ---------------------------------------------------------------- files


class Plain:
    """As many bytes as this rank's part of a checkpoint, from memory to a file and back."""

    def __init__(self, count: int):
        self.memory = mmap.mmap(-1, count)  # at the start of a page, as writing past the page cache needs it
        values = torch.frombuffer(self.memory, dtype=torch.uint8)
        values.random_()
        self.buffer = memoryview(bytearray(READ_BYTES))

    def write(self, path: Path, direct: bool = False) -> None:
        """Write and sync a new file and its folder; `direct`: past the page cache, but for the odd end."""
        view, begin = memoryview(self.memory), 0
        if direct:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            whole = len(view) - len(view) % mmap.PAGESIZE
            while begin < whole:
                begin += os.write(descriptor, view[begin : min(whole, begin + CHUNK_BYTES)])
            os.close(descriptor)
        with open(path, "ab", buffering=0) as file:
            while begin < len(view):
                begin += file.write(view[begin : begin + CHUNK_BYTES])
            os.fsync(file.fileno())
        sync(path.parent)

    def read(self, path: Path) -> None:
        """Read a file into the same few MiB again and again."""
        with open(path, "rb", buffering=0) as file:
            while file.readinto(self.buffer):
                pass


def sync_files(folder: Path) -> None:
    """Bring to the disk what a program left to the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        sync(path)


def drop_from_cache(folder: Path) -> None:
    """Take files that are on the disk out of the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
