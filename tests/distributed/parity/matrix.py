"""The parity matrix: its cases, their bounds, and how one is measured.

Each case trains the decoder for a few updates through the engine and through the reference loop, on the same global
batches with ragged masks, and compares losses, gradient norms, learning rates and the final fp32 weights.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from largetrain.config.resolved import Resolved
from tests.distributed.parity.harness import SEQ_LEN, VOCAB, Outcome, engine_json, make_model, resolve, train
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

UPDATES, GLOBAL_BATCH, WARMUP, PEAK = 4, 12, 3, {"SGD": 0.5, "AdamW": 0.02}
CLIP = 0.5  # less than the norm of the first gradients, which is about 0.9, so that clipping counts
SCALE_POWER = 8
# eps far above the rounding noise of a gradient: Adam would make steps of size lr out of that noise
ADAM = {"betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1}
MOMENTUM = 0.9
AXES = {
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "world_size": (1, 2, 4),
    "optimizer": ("SGD", "AdamW"),
}
OFFLOADS = {"optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    stage: int
    precision: str
    accumulation: int
    world_size: int
    optimizer: str
    offload: str = ""  # a key of OFFLOADS, or nothing

    def __str__(self) -> str:
        name = f"zero{self.stage}-{self.precision}-accumulate{self.accumulation}-ranks{self.world_size}"
        return f"{name}-{self.optimizer}" + (f"-offload_{self.offload}" if self.offload else "")

    @property
    def pieces(self) -> int:
        """Micro-batches of one update over all ranks."""
        return self.accumulation * self.world_size

    def engine(self) -> dict[str, Any]:
        """The engine JSON."""
        lr = PEAK[self.optimizer]
        params = {"lr": lr, "momentum": MOMENTUM} if self.optimizer == "SGD" else {"lr": lr, **ADAM}
        schedule = {"warmup_num_steps": WARMUP, "warmup_type": "linear", "warmup_min_lr": 0, "warmup_max_lr": lr}
        offload = {key: {"device": "cpu"} for key in OFFLOADS.get(self.offload, ())}
        plain = {"zero_force_ds_cpu_optimizer": False} if offload and self.optimizer == "SGD" else {}
        return engine_json(
            self.stage,
            self.precision,
            self.accumulation,
            GLOBAL_BATCH // self.pieces,
            (self.optimizer, params),
            gradient_clipping=CLIP,
            scheduler={"type": "WarmupLR", "params": schedule},
            zero_optimization=offload,
            **plain,
        )


def core() -> list[Case]:
    """A few cases in which every two values of different axes meet (a greedy covering design)."""
    cells = [Case(*values) for values in itertools.product(*AXES.values())]
    missing = set().union(*(_pairs(case) for case in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda case: len(_pairs(case) & missing))  # the first of equals: always the same cases
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def full() -> list[Case]:
    """Every cell."""
    return [Case(*values) for values in itertools.product(*AXES.values())]


def offloaded(everything: bool) -> list[Case]:
    """CPU offload: the optimizer's state at stages 2 and 3, the parameters as well at stage 3.

    SGD is torch's own, AdamW is DeepSpeed's CPUAdam, a compiled operator.
    """
    places = [(2, "optimizer"), (3, "optimizer"), (3, "all")]
    if not everything:
        shapes = [("fp32", 3, 2, "SGD"), ("bf16", 1, 2, "SGD"), ("fp16", 3, 1, "SGD"), ("bf16", 3, 2, "AdamW")]
        picked = [(2, "optimizer", 0), (3, "all", 1), (3, "optimizer", 2), (3, "all", 0), (2, "optimizer", 3)]
        return [Case(stage, *shapes[shape], offload) for stage, offload, shape in picked]
    shapes = itertools.product(("fp32", "bf16", "fp16"), (1, 3), (1, 2), ("SGD", "AdamW"))
    return [Case(stage, *shape, offload) for shape in shapes for stage, offload in places]


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations([(axis, getattr(case, axis)) for axis in AXES], 2))


def cpu_adam_is_built() -> bool:
    """Whether DeepSpeed's CPUAdam was compiled here (`largetrain setup --ops cpu_adam`); a test never compiles."""
    from torch.utils.cpp_extension import _get_build_directory

    return (Path(_get_build_directory("cpu_adam", verbose=False)) / "cpu_adam.so").exists()


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Errors:
    """Differences of the engine from the reference, each with its bound."""

    loss: float  # largest, relative
    norm: float  # largest, relative
    weights: float  # movement_error
    initial_equal: bool
    lrs_equal: bool
    scales_equal: bool
    bounds: dict[str, float]


def measure(case: Case, native: bool | None = None) -> Errors:
    """Run one case and its reference.

    Args:
        native: pretend that this CPU has, or has not, native half precision; None: as it is.
    """
    resolved = resolve(case.engine(), case.world_size)
    batches = toy_batches(UPDATES, GLOBAL_BATCH, SEQ_LEN, VOCAB)
    outcomes = run_ranks(train_on, case.world_size, resolved, batches, native)
    expected = reference(case.precision, case.pieces, case.optimizer)
    return compare(outcomes, expected, bounds(case))


def train_on(resolved: Resolved, batches: Sequence[Any], native: bool | None) -> Outcome:
    """Body of a rank."""
    if native is not None:
        from largetrain.engine import half_on_cpu

        # read when the backend is made; the rank ends with the case
        half_on_cpu.computes_natively = lambda dtype: native
    return train(resolved, batches)


@cache
def reference(precision: str, pieces: int, optimizer: str) -> ReferenceRun:
    """The reference run that all cases with these values share."""
    return run_ranks(_reference_in_rank, 1, precision, pieces, optimizer)[0]


def _reference_in_rank(precision: str, pieces: int, optimizer: str) -> ReferenceRun:
    resolved = resolve(Case(0, "fp32", 1, 1, optimizer).engine(), 1)
    settings = Optimizer("sgd", momentum=MOMENTUM) if optimizer == "SGD" else Optimizer("adamw", **ADAM)
    return train_reference(
        lambda: make_model(resolved),
        toy_batches(UPDATES, GLOBAL_BATCH, SEQ_LEN, VOCAB),
        [PEAK[optimizer] * min(1.0, update / WARMUP) for update in range(1, UPDATES + 1)],
        settings,
        precision=precision,
        pieces=pieces,
        clip=CLIP,
        loss_scale=LossScale(initial_power=SCALE_POWER),
    )


def bounds(case: Case) -> dict[str, float]:
    """How far two right programs may be apart.

    fp32: the sum over the tokens of the global batch is ordered differently; the errors of the updates add up
    (`tolerance_for`).

    Half precision, u = eps / 2. Weights: a gradient is rounded once where it is produced and once for each piece that
    is added to it, in each program, so it differs by sqrt(2 (pieces + 1) / 3) u of its size, one standard deviation.
    The movement error is a mean over thousands of weights and stays near that; a factor of 3 covers the roundings of
    the activations, which two programs also do in different places (torch's own half kernels round inside attention).
    Norm: errors of single entries average out, so it stays below the one standard deviation. Loss: it comes from
    logits that are rounded to half and are, here, smaller than itself.
    """
    dtype = DTYPES[case.precision]
    if dtype == torch.float32:
        bound = tolerance_for(dtype, GLOBAL_BATCH * SEQ_LEN, UPDATES)["rtol"]
        return {"loss": bound, "norm": bound, "weights": bound}
    unit_roundoff = torch.finfo(dtype).eps / 2
    deviation = math.sqrt(2 * (case.pieces + 1) / 3) * unit_roundoff
    return {"loss": unit_roundoff, "norm": deviation, "weights": 3 * deviation}


def compare(outcomes: Sequence[Outcome], expected: ReferenceRun, limits: dict[str, float]) -> Errors:
    """Errors of the worst rank."""
    first = outcomes[0]
    same_weights = all(
        torch.equal(weight, other.weights[name]) for other in outcomes for name, weight in first.weights.items()
    )
    assert same_weights, "ranks hold different weights"
    return Errors(
        loss=max(_relative(outcome.losses, expected.losses) for outcome in outcomes),
        norm=max(_relative(outcome.grad_norms, expected.grad_norms) for outcome in outcomes),
        weights=movement_error(first.weights, expected.weights, expected.initial),
        initial_equal=all(torch.equal(first.initial[name], weight) for name, weight in expected.initial.items()),
        lrs_equal=all(_relative(outcome.lrs, expected.lrs) < 1e-12 for outcome in outcomes),
        scales_equal=all(outcome.scales == expected.scales for outcome in outcomes),
        bounds=limits,
    )


def _relative(actual: Sequence[float], expected: Sequence[float]) -> float:
    assert len(actual) == len(expected), (len(actual), len(expected))
    return max(abs(a - e) / abs(e) for a, e in zip(actual, expected, strict=True))
