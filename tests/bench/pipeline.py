"""Efficiency of pipelines of equal layers, against the ideal of 1F1B: `launch/benchmark pipeline`.

With m micro-batches and p stages of equal cost a stage works m of m + p - 1 turns (Huang et al. 2019; Narayanan et al.
2019). Measured is the time of an update in two stages beside that of a plain loop over the same layers, in the same
processes, one after the other in every round: efficiency = time alone / (p x time in stages). The plain loop runs on
all ranks at once, so that both use all cores. Stages of unequal size are held against the slower one; DualPipeV
(two runs of layers on each stage) against its own order of passes, with backward passes twice as long as forward ones.

Two stages need two cores. Four would need four cores that nothing else uses: on two, two stages share a core and the
turns of one delay those of the other, which measures the machine.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.config.layout import Layout
from largetrain.config.world import launch_world
from largetrain.engine.environment import prepare
from largetrain.engine.pipeline import Cut, PipelineBackend
from largetrain.models.staged import staged_model
from largetrain.parallel.axes import make_axes
from tests.bench.report import GOALS
from tests.ranks import run_ranks

LAYERS, STAGES = 8, 2
CUTS = {"even": [0, 4, 8], "uneven": [0, 6, 8], "dualpipev": [0, 2, 4, 6, 8]}


class Layer(nn.Module):
    """Two products, as a feed-forward layer has."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Equal(nn.Module):
    """Layers of equal cost."""

    def __init__(self, width: int):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(LAYERS))

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)


class Regression:
    """The task: outputs near zero."""

    unit = "samples"

    def weight(self, batch: dict[str, Tensor]) -> int:
        return len(batch["images"])

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["images"]).square().mean(1).sum()


@dataclass(frozen=True)
class Size:
    width: int
    rows: int
    updates: int


def rank(size: Size, cuts: Sequence[str], micro_batches: Sequence[int], rounds: int) -> list[tuple[str, int, float]]:
    """Body of a rank: (cut, micro-batches, efficiency) of each round."""
    world = launch_world()
    device = prepare(
        rank=world.rank, local_rank=world.local_rank, world_size=world.world_size, timeout_s=300, verbose=False
    )
    layout = Layout(world.world_size, stages=STAGES)
    axes = make_axes(layout)
    found = []
    for name in cuts:
        for count in counts_of(name, micro_batches):
            plain = PlainLoop(size.width)
            torch.manual_seed(0)
            staged = staged_model(Equal(size.width))
            engine = {
                "train_batch_size": count * size.rows,
                "train_micro_batch_size_per_gpu": size.rows,
                "gradient_accumulation_steps": count,
                "gradient_clipping": 0.0,
                "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
                "zero_optimization": {"stage": 0},
                "zero_allow_untested_optimizer": True,
            }
            task: Any = Regression()
            backend = PipelineBackend(staged, Cut(layout, CUTS[name]), task, engine, device, axes=axes)
            batches = [{"images": torch.randn(size.rows, size.width)} for _ in range(count)]
            by_hand, in_stages = partial(plain.update, batches), partial(stepped, backend, batches)
            for update in (by_hand, in_stages):
                timed(update, 2)
            for _ in range(rounds):
                alone_s, staged_s = timed(by_hand, size.updates), timed(in_stages, size.updates)
                found.append((name, count, alone_s / (STAGES * staged_s)))
    return found


def stepped(backend: PipelineBackend, batches: Sequence[dict[str, Tensor]]) -> None:
    backend.train_step(iter(batches))


class PlainLoop:
    """The same layers on one rank, by hand."""

    def __init__(self, width: int):
        torch.manual_seed(0)
        self.model = nn.Sequential(*Equal(width).blocks)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def update(self, batches: Sequence[dict[str, Tensor]]) -> None:
        for batch in batches:
            (self.model(batch["images"]).square().mean(1).sum() / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(update: Callable[[], None], times: int) -> float:
    """Seconds of one of several updates, of the slower rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        update()
    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds) / times


def counts_of(name: str, micro_batches: Sequence[int]) -> list[int]:
    """Those that the schedule takes: DualPipeV wants two for each stage."""
    fewest = len(CUTS[name]) - 1 if name == "dualpipev" else 1
    return [count for count in micro_batches if count >= fewest]


def ideal(name: str, count: int) -> float:
    """Share of the turns in which a stage works, of stages that take as long as their layers."""
    bounds = CUTS[name]
    if name == "dualpipev":  # by playing its schedule through with p = 2, 4 and 8, forward 1/3, backward 2/3 of a turn
        return count / (count + (2.5 * STAGES - 3) / 3)
    parts = [(end - begin) / LAYERS for begin, end in itertools.pairwise(bounds)]
    return count / (STAGES * ((count - 1) * max(parts) + sum(parts)))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 when an efficiency is further from the ideal than the goal."""
    parser = argparse.ArgumentParser(
        prog="launch/benchmark pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--updates", type=int, default=4, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options = parser.parse_args(argv)
    size = Size(options.width, options.rows, options.updates)
    outcomes = run_ranks(rank, STAGES, size, list(CUTS), options.micro_batches, options.rounds, timeout=1800)
    word, goal = GOALS["pipeline efficiency"]
    missed = 0
    print(f"{'cut':10}{'micro-batches':>14}{'efficiency':>12}{'ideal':>8}{'of ideal':>10}   (lowest .. highest)")
    for name in CUTS:
        for count in counts_of(name, options.micro_batches):
            values = [value for cut, number, value in outcomes[0] if (cut, number) == (name, count)]
            best = ideal(name, count)
            share = statistics.median(values) / best
            missed += share < goal
            print(
                f"{name:10}{count:14}{statistics.median(values):12.3f}{best:8.3f}{share:10.2f}   "
                f"({min(values) / best:.2f} .. {max(values) / best:.2f}){'' if share >= goal else ': missed'}"
            )
    print(f"goal: {word} {goal} of the ideal; {missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
