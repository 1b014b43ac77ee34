"""Runs of the `deepspeed` backend on hand-made global batches, next to the same runs of the reference loop.

A run is the decoder, the language-modeling task and the backend, composed as `largetrain.compose` composes them, from
an engine JSON and a run YAML that went through `config.load`. Only the data are made by hand.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.config.load import load
from largetrain.config.resolved import Resolved
from largetrain.data.order import SampleOrder
from largetrain.engine.deepspeed import DeepSpeedBackend, sharded_construction
from largetrain.engine.environment import prepare
from largetrain.models.build import build_model
from largetrain.tasks.language_modeling import LanguageModeling

VOCAB, SEQ_LEN = 257, 8
# Small, with every kind of layer: grouped-query attention, rotary positions, SwiGLU, RMSNorm, tied embeddings off.
MODEL = {"style": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "seq_len": SEQ_LEN}
Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass
class Outcome:
    """What one rank saw, one entry per update, and the weights at the end."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    exhausted: list[bool] = field(default_factory=list)
    final_scale: float = 1.0
    final_lr: float = 0.0
    notes: list[str] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # fp32 masters by parameter name, whole
    initial: dict[str, Tensor] = field(default_factory=dict)


def resolve(
    engine: Mapping[str, Any], world_size: int, model: Mapping[str, Any] | None = None, steps: int = 1000
) -> Resolved:
    """What `largetrain` makes of this engine JSON and model section."""
    sizes = " ".join(f"{key}: {json.dumps(value)}," for key, value in (MODEL if model is None else model).items())
    with tempfile.TemporaryDirectory() as folder:
        engine_file, run_file = Path(folder) / "engine.json", Path(folder) / "run.yaml"
        engine_file.write_text(json.dumps(engine))
        run_file.write_text(f"steps: {steps}\nmodel: {{{sizes}}}\n")
        return load(str(engine_file), str(run_file), world_size=world_size, local_world_size=world_size)


def engine_json(
    stage: int = 0,
    precision: str = "fp32",
    accumulation: int = 1,
    micro: int = 1,
    optimizer: tuple[str, dict[str, Any]] = ("SGD", {"lr": 0.1}),
    **sections: Any,
) -> dict[str, Any]:
    """An engine JSON of the usual form; `sections` are merged into it, section by section."""
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer[0], "params": optimizer[1]},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if precision == "fp16":
        content["fp16"] = {"enabled": True, "initial_scale_power": 8}
    elif precision == "bf16":
        content["bf16"] = {"enabled": True}
    for key, value in sections.items():
        if isinstance(value, dict):
            content[key] = {**content.get(key, {}), **value}
        else:
            content[key] = value
    return content


def make_model(resolved: Resolved, seed: int = 0) -> torch.nn.Module:
    """The decoder with the run's initial weights; for the engine (inside `sharded_construction`) and the reference."""
    torch.manual_seed(seed)
    return build_model(resolved)


def make_backend(resolved: Resolved, task: LanguageModeling | None = None) -> DeepSpeedBackend:
    """The backend on this rank; collective."""
    from largetrain.config.load import launch_world

    world = launch_world()
    device = prepare(
        rank=world.rank, local_rank=world.local_rank, world_size=world.world_size, timeout_s=60, verbose=False
    )
    with sharded_construction(resolved.engine):
        model = make_model(resolved)
    task = task or LanguageModeling(resolved.run.model.loss_chunk_tokens)
    return DeepSpeedBackend(model, task, resolved.engine, device)


def rank_parts(resolved: Resolved, batch: tuple[Tensor, Tensor], rank: int) -> list[dict[str, Any]]:
    """This rank's micro-batches of one global batch, shared out as the loader does."""
    sizes = resolved.batch
    order = SampleOrder(sizes.global_batch, sizes.global_batch, seed=0, shuffle=False)
    parts = []
    for micro_step in range(sizes.gradient_accumulation_steps):
        ids, _ = order.rank_ids(0, micro_step, sizes.micro_batch, sizes.data_parallel, rank)
        rows = torch.from_numpy(ids)
        parts.append({"input_ids": batch[0][rows], "labels": batch[1][rows], "sample_id": rows})
    return parts


def whole_weights(backend: DeepSpeedBackend) -> dict[str, Tensor]:
    """fp32 weights by name, gathered on every rank; collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = backend.engine.module.named_parameters()
    if backend.stage == 0:
        return {name: parameter.detach().clone() for name, parameter in parameters}
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in parameters}


class Disturbed(LanguageModeling):
    """The task with the loss of chosen updates multiplied, on all ranks or on one.

    Args:
        factors: update -> factor; `nan` makes a NaN loss whose gradients stay finite.
        only_rank: the rank that is disturbed; None: all.
    """

    def __init__(self, factors: Mapping[int, float], accumulation: int = 1, only_rank: int | None = None):
        super().__init__()
        self.factors, self.accumulation, self.only_rank = factors, accumulation, only_rank
        self.calls = 0

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
        update, self.calls = self.calls // self.accumulation, self.calls + 1
        loss = super().loss_sum(model, batch)
        factor = self.factors.get(update, 1.0)
        if factor == 1.0 or (self.only_rank is not None and self.only_rank != dist.get_rank()):
            return loss
        return loss + factor if factor != factor else loss * factor


def train(resolved: Resolved, batches: Batches, task: LanguageModeling | None = None) -> Outcome:
    """Body of a rank: one update for each global batch."""
    backend = make_backend(resolved, task)
    outcome = Outcome(initial=whole_weights(backend), notes=list(backend.notes))
    for batch in batches:
        result = backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank())))
        outcome.losses.append(float(result.loss))
        outcome.grad_norms.append(float(result.grad_norm))
        outcome.lrs.append(result.lr)
        outcome.scales.append(result.loss_scale)
        outcome.applied.append(result.applied)
        outcome.tokens.append(result.tokens)
        outcome.exhausted.append(result.scale_exhausted)
    outcome.final_scale, outcome.final_lr = backend.loss_scale, backend.lr
    outcome.weights = whole_weights(backend)
    return outcome


def call_all(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Body of a rank that makes several calls one after the other, to pay for its start once."""
    return [function(*arguments) for function, arguments in calls]
