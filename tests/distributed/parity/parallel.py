"""Parity of divided models: cells of layouts and decoders, and how one is measured against the single-process loop.

A cell trains the decoder for some updates on a layout, by the same global batches as the reference loop, and compares
losses, gradient norms and the weights, gathered from all ranks. `BACKENDS` says how a cell is run.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.config.load import launch_world, load
from largetrain.config.resolved import Resolved
from largetrain.engine.deepspeed import DeepSpeedBackend, sharded_construction
from largetrain.engine.environment import prepare
from largetrain.models.build import build_model
from largetrain.models.decoder import Decoder
from largetrain.parallel.axes import Axes, Axis, make_axes
from largetrain.parallel.shards import shard_of
from largetrain.tasks.language_modeling import LanguageModeling
from tests.distributed.parity.harness import engine_json
from tests.distributed.parity.matrix import ADAM, MOMENTUM
from tests.ranks import run_ranks
from tests.reference import (
    DTYPES,
    LossScale,
    Optimizer,
    ReferenceRun,
    movement_error,
    tolerance_for,
    toy_batches,
    train_reference,
)

VOCAB, SEQ_LEN, GLOBAL_BATCH, UPDATES = 65, 8, 8, 10
LR, CLIP, SCALE_POWER = {"SGD": 0.5, "AdamW": 0.02}, 0.5, 8
SHAPES = {
    "6x2": {"hidden": 24, "heads": 6, "kv_heads": 2, "ffn_hidden": 48},
    "8x2": {"hidden": 32, "heads": 8, "kv_heads": 2, "ffn_hidden": 64},
    "6x3": {"hidden": 24, "heads": 6, "kv_heads": 3, "ffn_hidden": 48},
}


@dataclass(frozen=True)
class Cell:
    """A decoder, and the layout and engine that train it."""

    backend: str = "deepspeed"
    tensor: int = 1
    stages: int = 1
    ulysses: int = 1
    data: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    precision: str = "fp32"
    accumulation: int = 2
    optimizer: str = "AdamW"
    style: str = "llama"
    shape: str = "6x2"
    tied: bool = False
    recompute: bool = False
    chunk: int = 1024
    partition: str = ""
    layers: int = 2
    schedule: str = "1f1b"

    def __str__(self) -> str:
        degrees = [("tp", self.tensor), ("pp", self.stages), ("ulysses", self.ulysses), ("dp", self.data)]
        words = [f"{name}{degree}" for name, degree in degrees if degree > 1]
        words += ["sp"] if self.sequence_parallel else []
        words += [f"zero{self.zero}", self.precision, f"accumulate{self.accumulation}", self.optimizer]
        words += [self.style, self.shape, "tied" if self.tied else "untied"]
        words += [self.schedule] if self.schedule != "1f1b" else []
        words += ["recompute"] if self.recompute else []
        words += [f"chunk{self.chunk}"] if self.chunk != 1024 else []
        words += [f"layers{self.layers}"] if self.layers != 2 else []
        return "-".join([self.backend, *words])

    @property
    def world_size(self) -> int:
        return self.tensor * self.stages * self.ulysses * self.data

    @property
    def pieces(self) -> int:
        """Gradients that are added up in the dtype of the model, over micro-batches and replicas."""
        return self.accumulation * self.data * self.ulysses

    @property
    def model(self) -> dict[str, Any]:
        """The model section of the run."""
        sizes = {"style": self.style, "layers": self.layers, "seq_len": SEQ_LEN, **SHAPES[self.shape]}
        ways = {"activation_checkpointing": self.recompute, "loss_chunk_tokens": self.chunk}
        return {**sizes, **ways, "tie_embeddings": self.tied}

    def resolve(self) -> Resolved:
        """What `largetrain` makes of it, with a vocabulary that is smaller than any tokenizer's."""
        settings = {"momentum": MOMENTUM} if self.optimizer == "SGD" else ADAM
        micro = GLOBAL_BATCH // (self.accumulation * self.data)
        optimizer = (self.optimizer, {"lr": LR[self.optimizer], **settings})
        engine = engine_json(self.zero, self.precision, self.accumulation, micro, optimizer, gradient_clipping=CLIP)
        parallel: dict[str, Any] = {"tensor_parallel": self.tensor, "pipeline_stages": self.stages}
        parallel |= {"ulysses": self.ulysses, "sequence_parallel": self.sequence_parallel}
        if self.partition:
            parallel["partition"] = self.partition
        if self.stages > 1:
            parallel["pipeline_schedule"] = self.schedule
        resolved = resolve(engine, {"model": self.model, "parallel": parallel}, self.world_size)
        assert resolved.decoder is not None
        return replace(resolved, decoder=replace(resolved.decoder, vocab_size=VOCAB))


def resolve(engine: Mapping[str, Any], run: Mapping[str, Any], world_size: int) -> Resolved:
    """What `largetrain` makes of an engine JSON and sections of a run."""
    with tempfile.TemporaryDirectory() as folder:
        engine_file, run_file = Path(folder) / "engine.json", Path(folder) / "run.yaml"
        engine_file.write_text(json.dumps(engine))
        run_file.write_text(json.dumps({"steps": 1000, **run}))
        return load(str(engine_file), str(run_file), world_size=world_size, local_world_size=world_size)


# ---------------------------------------------------------------- running a cell on a rank


@dataclass
class Outcome:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    evaluated: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)  # fp32 masters of the whole model
    initial: dict[str, Tensor] = field(default_factory=dict)
    replicas_equal: bool = True  # what several tensor ranks hold alike


def join(resolved: Resolved) -> tuple[Axes, torch.device]:
    """Be a rank of this layout; collective, and repeatable in one process."""
    world = launch_world()
    device = prepare(
        rank=world.rank, local_rank=world.local_rank, world_size=world.world_size, timeout_s=60, verbose=False
    )
    from deepspeed.utils import groups

    groups.mpu = None  # DeepSpeed keeps that of the last engine
    return make_axes(resolved.layout), device


def deepspeed_backend(resolved: Resolved, task: LanguageModeling | None = None) -> DeepSpeedBackend:
    """The backend on this rank; collective."""
    axes, device = join(resolved)
    with sharded_construction(resolved.engine, axes):
        model = seeded_decoder(resolved, axes)
    task = task or LanguageModeling(resolved.run.model.loss_chunk_tokens)
    return DeepSpeedBackend(model, task, resolved.engine, device, axes=axes)


def seeded_decoder(resolved: Resolved, axes: Axes) -> Decoder:
    torch.manual_seed(0)
    assert resolved.decoder is not None
    return Decoder(resolved.decoder, axes)


def rank_parts(resolved: Resolved, batch: tuple[Tensor, Tensor], rank: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of one global batch: those of its data-parallel rank, whole sequences."""
    sizes, layout = resolved.batch, resolved.layout
    shares = [part.chunk(layout.data) for part in (batch[0], batch[1])]
    ids, labels = (share[layout.place(rank).data].split(sizes.micro_batch) for share in shares)
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def gathered_weights(backend: DeepSpeedBackend) -> tuple[dict[str, Tensor], bool]:
    """fp32 weights of the whole model by name on every rank, and whether replicas are equal; collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    axis: Axis = backend.axes.tensor
    weights, equal = {}, True
    for name, parameter in backend.engine.module.named_parameters():
        own = parameter.detach() if backend.stage == 0 else safe_get_full_fp32_param(parameter)
        parts: list[Any] = [None] * axis.size
        if axis.size == 1:
            parts = [own.clone()]
        else:
            dist.all_gather_object(parts, own.clone(), group=axis.group)
        shard = shard_of(parameter)
        weights[name] = parts[0] if shard is None else torch.cat(parts, dim=shard.dim)
        equal = equal and (shard is not None or all(torch.equal(part, parts[0]) for part in parts))
    return weights, equal


def train_cell(cell: Cell, updates: int = UPDATES) -> Outcome:
    """Body of a rank: one update for each global batch, and an evaluation of the last one before it is trained on."""
    resolved = cell.resolve()
    backend, gather = BACKENDS[cell.backend](resolved)
    outcome = Outcome(initial=gather()[0])
    batches = toy_batches(updates, GLOBAL_BATCH, SEQ_LEN, VOCAB)
    for index, batch in enumerate(batches):
        if index == len(batches) - 1:
            outcome.evaluated = backend.evaluate(iter(rank_parts(resolved, batch, dist.get_rank())))
        result = backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank())))
        outcome.losses.append(float(result.loss))
        outcome.grad_norms.append(float(result.grad_norm))
        outcome.tokens.append(result.tokens)
        outcome.applied.append(result.applied)
    outcome.weights, outcome.replicas_equal = gather()
    return outcome


def _on_deepspeed(resolved: Resolved) -> tuple[Any, Callable[[], tuple[dict[str, Tensor], bool]]]:
    backend = deepspeed_backend(resolved)
    return backend, lambda: gathered_weights(backend)


def _on_pipeline(resolved: Resolved) -> tuple[Any, Callable[[], tuple[dict[str, Tensor], bool]]]:
    from tests.distributed.parity.pipeline import gathered_weights, pipeline_backend

    backend = pipeline_backend(resolved, join)
    return backend, lambda: gathered_weights(backend)


BACKENDS: dict[str, Callable[[Resolved], tuple[Any, Callable[[], tuple[dict[str, Tensor], bool]]]]] = {
    "deepspeed": _on_deepspeed,
    "pipeline": _on_pipeline,
}
"""Name -> from a resolved run to the backend of this rank, and what gathers its whole weights as `gathered_weights`."""


def train_cells(cells: Sequence[Cell], updates: int = UPDATES) -> list[Outcome]:
    """Body of a rank: several cells of as many ranks, to pay for its start once."""
    return [train_cell(cell, updates) for cell in cells]


# ---------------------------------------------------------------- comparing it


@dataclass(frozen=True)
class Errors:
    """Differences of a cell from the reference, each with its bound; what has to be equal is asserted."""

    loss: float
    norm: float
    weights: float
    evaluation: float
    bounds: dict[str, float]

    def failures(self) -> list[str]:
        """One line for each error above its bound."""
        return [
            f"{name}: {getattr(self, name):.3g} is not below {bound:.3g}"
            for name, bound in self.bounds.items()
            if not getattr(self, name) < bound
        ]


def measure(cells: Sequence[Cell], timeout: float = 300) -> list[Errors]:
    """Run cells of one world size, and their references."""
    outcomes = run_ranks(train_cells, cells[0].world_size, list(cells), timeout=timeout)
    return [compare(cell, [rank[index] for rank in outcomes], reference(cell)) for index, cell in enumerate(cells)]


def reference(cell: Cell) -> ReferenceRun:
    """The reference run of a cell, shared by all that differ in their layout only."""
    return _reference(
        Cell(
            precision=cell.precision,
            accumulation=cell.pieces if cell.precision != "fp32" else 1,
            optimizer=cell.optimizer,
            style=cell.style,
            shape=cell.shape,
            tied=cell.tied,
            layers=cell.layers,
        )
    )


@cache
def _reference(cell: Cell) -> ReferenceRun:
    return run_ranks(_reference_in_rank, 1, cell)[0]


def _reference_in_rank(cell: Cell) -> ReferenceRun:
    resolved = cell.resolve()
    settings = Optimizer("sgd", momentum=MOMENTUM) if cell.optimizer == "SGD" else Optimizer("adamw", **ADAM)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return build_model(resolved)

    return train_reference(
        model,
        toy_batches(UPDATES, GLOBAL_BATCH, SEQ_LEN, VOCAB),
        [LR[cell.optimizer]] * UPDATES,
        settings,
        precision=cell.precision,
        pieces=cell.accumulation,
        clip=CLIP,
        loss_scale=LossScale(initial_power=SCALE_POWER),
    )


def bounds(cell: Cell) -> dict[str, float]:
    """How far two right programs may be apart.

    fp32: sums over the tokens of the global batch, and over features, are ordered differently; the longer of them is
    the tokens' (`tolerance_for`), and the errors of the updates add up. An evaluation is a loss.

    Half precision, u = eps / 2: as in `matrix.bounds`, a gradient is rounded once where it is produced and once for
    each piece that is added; a tensor rank's summand of an activation, or of its gradient, is rounded on its own, and
    the sum once more for each rank. So one standard deviation is sqrt(2 (pieces + 1 + ranks) / 3) u, ranks = 0 on one.
    Over these updates the norm changes by its own size (it falls by a third and doubles), so it inherits the relative
    error of the weights.
    """
    dtype = DTYPES[cell.precision]
    if dtype == torch.float32:
        bound = tolerance_for(dtype, GLOBAL_BATCH * SEQ_LEN, UPDATES)["rtol"]
        return {"loss": bound, "norm": bound, "weights": bound, "evaluation": bound}
    unit_roundoff = torch.finfo(dtype).eps / 2
    ranks = cell.tensor if cell.tensor > 1 else 0
    deviation = math.sqrt(2 * (cell.pieces + 1 + ranks) / 3) * unit_roundoff
    return {"loss": unit_roundoff, "norm": 3 * deviation, "weights": 3 * deviation, "evaluation": unit_roundoff}


def compare(cell: Cell, outcomes: Sequence[Outcome], expected: ReferenceRun) -> Errors:
    """Errors of the worst rank."""
    first = outcomes[0]
    for rank, outcome in enumerate(outcomes):
        assert outcome.replicas_equal, f"{cell}: tensor ranks hold different replicas"
        assert outcome.losses == first.losses and outcome.grad_norms == first.grad_norms, f"{cell}: rank {rank} differs"
        assert outcome.tokens == first.tokens and all(outcome.applied), cell
        assert outcome.weights.keys() == expected.weights.keys(), cell
        other = [name for name, weight in expected.initial.items() if not torch.equal(outcome.initial[name], weight)]
        assert not other, f"{cell}: other initial weights: {other}"
        moved = [name for name, weight in first.weights.items() if not torch.equal(outcome.weights[name], weight)]
        assert not moved, f"{cell}: rank {rank} has other weights: {moved}"
    return Errors(
        loss=_relative(first.losses, expected.losses),
        norm=_relative(first.grad_norms, expected.grad_norms),
        weights=movement_error(first.weights, expected.weights, expected.initial),
        evaluation=_relative([first.evaluated["loss"]], expected.losses[-1:]),
        bounds=bounds(cell),
    )


def _relative(actual: Sequence[float], expected: Sequence[float]) -> float:
    assert len(actual) == len(expected), (len(actual), len(expected))
    return max(abs(a - e) / abs(e) for a, e in zip(actual, expected, strict=True))
