"""One rank of the comparison of checkpoints: every program saves and loads once per round, in alternating order.

torchrun --nproc-per-node 2 -m tests.bench.checkpoints_ranks --folder FOLDER --report FILE
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from largetrain.checkpoint.writer import sync
from largetrain.engine.gate import Gate
from tests.bench import checkpoints_report as names
from tests.bench.checkpoints_state import (
    FACTS,
    TAG,
    Plain,
    Sharded,
    State,
    bytes_of,
    drop_from_cache,
    init_deepspeed,
    manager,
    read_all,
    restore,
    sync_files,
    verify,
)
from tests.bench.vision import there_and_back

PRODUCT_SIDE, PRODUCTS = 512, 4
SAMPLE_TOKENS = 512
COVER = 1.5
"""So many times as long as a save takes do the updates go on that are timed beside one."""


@dataclass
class Clock:
    """Seconds of one round by what they were spent on, each until the last rank was done."""

    seconds: dict[str, float] = field(default_factory=dict)

    def time(self, name: str, action: Callable[[], Any]) -> Any:
        dist.barrier()
        begin = time.perf_counter()
        result = action()
        self.seconds[name] = latest(time.perf_counter() - begin)
        return result

    def time_save(self, name: str, start: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        """A save in the background: how long the call takes, and how long until it is done."""
        dist.barrier()
        begin = time.perf_counter()
        started = start()
        pause = time.perf_counter() - begin
        finish(started)
        self.seconds[name] = latest(time.perf_counter() - begin)
        self.seconds[names.pause(name)] = latest(pause)

    def time_pause(self, name: str, start: Callable[[], Any], gradients: Callable[[], None], gate: Gate) -> None:
        """How long training waits for a save: in the call, and before the step that follows on the next gradients."""
        dist.barrier()
        begin = time.perf_counter()
        start()
        called = time.perf_counter()
        gradients()
        computed = time.perf_counter()
        gate.open()
        waited = time.perf_counter() - computed
        self.seconds[names.pause(name)] = latest(called - begin + waited)


def latest(value: float) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


class Round:
    """One round: every part makes and removes its own files."""

    def __init__(self, folder: Path, state: State, sharded: Sharded, plain: Plain, sizes: dict[str, int]):
        self.folder, self.state, self.sharded, self.plain, self.sizes = folder, state, sharded, plain, sizes
        self.rank, self.clock = state.rank, Clock()
        self.factor = torch.randn(PRODUCT_SIDE, PRODUCT_SIDE)

    def clear(self) -> None:
        """Begin the next measurement with an empty folder, and a disk that has nothing left to do."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            sync(self.folder)
        dist.barrier()

    def parts(self) -> list[Callable[[], None]]:
        return [self.plain_files, self.ours_async, self.ours_sync, self.deepspeed, self.dcp]

    def ours_async(self) -> None:
        self.clear()
        writing = manager(self.folder, True, self.state)
        self.gradients()  # what a run does before its first save

        def start(step: int) -> Callable[[], Any]:
            return lambda: writing.save(step, FACTS, self.state.snapshot)

        def finish(_: Any) -> None:
            writing.finish()

        for step, name in ((1, names.OURS_FIRST), (2, names.OURS)):
            self.clock.time_pause(name, start(step), self.gradients, self.state.gate)
            writing.finish()
        pause = self.clock.seconds[names.pause(names.OURS)]
        self.clock.time_save(names.OURS, start(3), finish)
        self.clock.seconds[names.pause(names.OURS)] = pause
        self.beside_updates(names.OURS, start(4), finish)
        writing.close()

    def ours_sync(self) -> None:
        self.clear()
        writing = manager(self.folder, False, self.state)
        for step, name in ((1, names.OURS_SYNC_FIRST), (2, names.OURS_SYNC)):
            checkpoint = self.clock.time(name, lambda step=step: writing.save(step, FACTS, self.state.snapshot))
        writing.close()
        self.sizes["largetrain"] = bytes_of(checkpoint)
        before = self.state.sums()

        def verified(load: Callable[[], None]) -> Callable[[], None]:
            return lambda: (verify(checkpoint), load())[-1]

        loads = {
            names.READ_VERIFIED: verified(lambda: read_all(checkpoint, self.state)),
            names.READ: lambda: read_all(checkpoint, self.state),
            names.RESTORE: verified(lambda: restore(checkpoint, self.state)),
        }
        for name, load in loads.items():
            if name == names.RESTORE:
                self.state.forget()
            self.cold(checkpoint)
            self.clock.time(name, load)
        assert self.state.sums() == before

    def plain_files(self) -> None:
        path = self.folder / f"rank-{self.rank}"
        for name, direct in ((names.PLAIN_DIRECT, True), (names.PLAIN, False)):
            self.clear()
            self.clock.time(name, lambda direct=direct: self.plain.write(path, direct))
        self.cold(self.folder)
        self.clock.time(names.PLAIN_READ, lambda: self.plain.read(path))

    def deepspeed(self) -> None:
        self.clear()
        before = self.state.sums()
        self.clock.time(names.DEEPSPEED, lambda: self.state.engine.save_checkpoint(str(self.folder), TAG))
        self.clock.time(names.DEEPSPEED_SYNC, lambda: sync_files(self.folder))
        self.sizes["DeepSpeed"] = bytes_of(self.folder)
        self.state.forget()
        self.cold(self.folder)
        self.clock.time(names.DEEPSPEED_LOAD, lambda: self.state.engine.load_checkpoint(str(self.folder), TAG))
        assert self.state.sums() == before

    def dcp(self) -> None:
        for name, keep in ((names.DCP_ASYNC, False), (names.DCP_KEPT, True)):
            self.clear()
            self.clock.time_save(
                name, lambda keep=keep: self.sharded.save_async(self.folder / TAG, keep), lambda future: future.result()
            )
        self.clear()
        self.beside_updates(
            names.DCP_KEPT, lambda: self.sharded.save_async(self.folder / TAG, True), lambda future: future.result()
        )
        self.clear()
        before = self.sharded.sums()
        self.clock.time(names.DCP, lambda: self.sharded.save(self.folder / TAG))
        self.sizes["DCP"] = bytes_of(self.folder)
        self.sharded.forget()
        self.cold(self.folder)
        self.clock.time(names.DCP_LOAD, lambda: self.sharded.load(self.folder / TAG))
        assert self.sharded.sums() == before

    def cold(self, folder: Path) -> None:
        """Have the next reads come from the disk."""
        dist.barrier()
        if self.rank == 0:
            drop_from_cache(folder)

    def beside_updates(self, name: str, start: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        """How much longer updates take with a save among them: the pause, and what the background takes from them."""
        begin = time.perf_counter()
        self.update()
        enough = latest(COVER * self.clock.seconds[name] / (time.perf_counter() - begin))
        count = math.ceil(enough)
        idle = Clock()
        idle.time("updates", lambda: [self.update() for _ in range(count)])

        def with_save() -> None:
            started = start()
            for _ in range(count):
                self.update()
            finish(started)

        idle.time("with a save", with_save)
        self.clock.seconds[names.lost(name)] = idle.seconds["with a save"] - idle.seconds["updates"]

    def update(self, products: int = PRODUCTS) -> None:
        """Keeps this rank's core busy for some milliseconds."""
        for _ in range(products):
            self.factor @ self.factor

    def gradients(self) -> None:
        """As many operations as the gradients of one sample take: forward and backward pass, 6 a token and weight."""
        self.update(math.ceil(6 * SAMPLE_TOKENS * self.sizes["parameters"] / (2 * PRODUCT_SIDE**3)))


def compare(folder: Path, layers: int, width: int, rounds: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure on all ranks together.

    Args:
        folder: is made, and empty at the end.
        rounds: after a first one that warms up: imports, and the first memory of DeepSpeed and DCP.
        say: told of each round on rank 0.

    Returns:
        `rounds`, `sizes` and `loads`, the same on all ranks.
    """
    init_deepspeed()
    state = State(layers, width)
    sharded = Sharded(state)
    plain = Plain(sum(piece.values.nbytes for piece in state.pieces()))
    sizes = {"parameters": sum(parameter.numel() for parameter in state.engine.module.parameters())}
    found, loads = [], []
    for number in range(rounds + 1):
        one = Round(folder, state, sharded, plain, sizes)
        for part in there_and_back(one.parts(), number):
            part()
        one.clear()
        loads.append(os.getloadavg()[0])
        if state.rank == 0:
            words = ", ".join(f"{name} {one.clock.seconds[name]:.2f} s" for name in names.HEADLINES)
            say(f"round {number or 'to warm up'}: {words}, load {loads[-1]:.1f}")
        found.append(one.clock.seconds)
    return {"rounds": found[1:], "sizes": sizes, "loads": loads}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("folder", "report"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("layers", "width", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    found = compare(args.folder, args.layers, args.width, args.rounds)
    if dist.get_rank() == 0:
        args.report.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
