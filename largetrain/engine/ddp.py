"""The `ddp` backend: DistributedDataParallel driven by the engine JSON, for models that ZeRO does not serve.

Weights, gradients, optimizer state and running statistics are fp32 (or what the model was built in) always; fp16 and
bf16 are the dtype of products, through torch.autocast. Loss-scale decisions are DeepSpeed's own class's, so that both
backends go through the same sequence; torch.amp.GradScaler scales and unscales.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largetrain.config.ddp_keys import precision_of_ddp
from largetrain.engine import schedules
from largetrain.engine.base import MicroBatch, StepResult
from largetrain.engine.buffers import (
    BufferGuard,
    buffer_pieces,
    equal_buffers,
    floating_buffers,
    restore_buffers,
    saved_buffers,
)
from largetrain.engine.ema import Ema
from largetrain.engine.gate import Gate
from largetrain.engine.half_on_cpu import half_arithmetic
from largetrain.engine.held import (
    EMA,
    layout_bound,
    optimizer_numbers,
    optimizer_pieces,
    own_part,
    restore_optimizer,
    restore_weights,
    tied_names,
    weight_pieces,
    whole_parameters,
)
from largetrain.engine.loss_scale import moving_scale, restore_scale
from largetrain.engine.modes import evaluation_mode
from largetrain.engine.optimizers import Groups, optimizer_by_name, skip_infinite_updates
from largetrain.engine.startup import spared_compiler_imports
from largetrain.engine.sums import Sums, UpdateSums, evaluation_sums
from largetrain.errors import LargetrainError
from largetrain.parallel.pieces import Pieces, Snapshot, share_out
from largetrain.tasks.base import Task

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
EMA_PREFIX = "ema_"


class UnusedParametersError(LargetrainError):
    """Parameters got no gradient; DistributedDataParallel cannot go on without them."""


class DdpBackend:
    """Runs optimizer steps with gradients averaged by DistributedDataParallel.

    Args:
        model: with synchronised batch norms where wanted; moved to `device` here.
        task: gives the weight and the loss sum of a batch.
        engine_config: the resolved engine JSON as a dict; `config/ddp_keys` says which keys count.
        device: where batches go.
        groups: parameter groups for the optimizer, with a `lr_factor` each.
        factor: update number -> factor on the learning rate, in place of the JSON's scheduler.
        ema: makes the moving average of the model, or None.
        compiled: run the model through torch.compile.
        channels_last: hand 4-d inputs over in NHWC order.
        allow_unused: accept parameters without gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        engine_config: dict[str, Any],
        device: torch.device,
        groups: Groups,
        factor: Callable[[int], float] | None = None,
        *,
        ema: Callable[[nn.Module], Ema] | None = None,
        compiled: bool = False,
        channels_last: bool = False,
        allow_unused: bool = False,
    ):
        self.task, self.device = task, device
        self.notes: list[str] = []
        self.accumulation = int(engine_config["gradient_accumulation_steps"])
        self.precision = precision_of_ddp(engine_config)
        self.dtype = DTYPES[self.precision]
        self.channels_last = channels_last
        self.module = model.to(device)
        self.ema = ema(self.module) if ema is not None else None
        if compiled:
            self.module.compile()
        with spared_compiler_imports(engine_config if not compiled else {**engine_config, "compile": {}}):
            self.optimizer = optimizer_by_name(engine_config["optimizer"], groups, device.type)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        skip_infinite_updates(self.optimizer, parameters, float(engine_config["gradient_clipping"]))
        if factor is not None:
            self.scheduler: Any = schedules.FactorSchedule(self.optimizer, factor)
        else:
            self.scheduler = schedules.made_by_name(engine_config.get("scheduler"), self.optimizer)
        schedules.start(self.scheduler, self.optimizer)
        self._gate = Gate(self.optimizer)
        self.model = DistributedDataParallel(
            self.module,
            device_ids=[device.index] if device.type == "cuda" else None,
            forward_sync_buffers=False,  # see engine/buffers
            gradient_as_bucket_view=True,
            find_unused_parameters=allow_unused,
        )
        self.allow_unused = allow_unused
        self._named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._buffers = BufferGuard(self.module)
        self._half, notes = half_arithmetic(device.type, self.dtype)
        self.notes += notes
        self.updates = 0
        """Updates, skipped ones included."""
        self.applied = 0
        """Updates that were not skipped: what schedules count."""
        self.scaler, self._scales = _loss_scaling(engine_config.get("fp16", {}), self.precision, device.type)

    @property
    def lr(self) -> float:
        """Learning rate of the next update, of parameters without a factor."""
        return schedules.base_rate(self.optimizer)

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next update; 1.0 without fp16."""
        return float(self._scales.cur_scale) if self._scales is not None else 1.0

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """Pull exactly gradient_accumulation_steps items, then update once.

        DistributedDataParallel averages over ranks: the loss sums are divided by the weight of the global batch and
        multiplied by the ranks, so that every micro-batch counts by what it holds.

        Raises:
            UnusedParametersError: on the rank where parameters got no gradient.
        """
        batches = [next(micro_batches) for _ in range(self.accumulation)]
        sums = UpdateSums(sum(self.task.weight(batch) for batch in batches), self.device)
        lr, scale = self.lr, self.loss_scale
        self._buffers.keep()
        self.optimizer.zero_grad()
        for index, batch in enumerate(batches):
            last = index == self.accumulation - 1
            # one all-reduce per update: DDP sends gradients with the backward pass of the last micro-batch
            with nullcontext() if last else self.model.no_sync():
                with self._forward(), self._unused_named():
                    loss_sum = self.task.loss_sum(self.model, self._to_device(batch))
                sums.add(loss_sum, last)
                loss = sums.scaled(loss_sum)
                with self._half():
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._check_used()
        applied = self._update()
        mean, weight = sums.finish()
        if not applied:
            self._buffers.restore_if_spoilt(float(mean))
        exhausted = not applied and self._scales is not None and scale <= self._floor
        self._move_scale(applied)
        return StepResult(
            loss=mean,
            lr=lr,
            grad_norm=self.optimizer._global_grad_norm,  # type: ignore[attr-defined]
            loss_scale=scale,
            applied=applied,
            tokens=weight,
            scale_exhausted=exhausted,
            local_losses=tuple(sums.losses),
            sample_ids=tuple(int(i) for batch in batches for i in batch.get("sample_id", ())),
        )

    def evaluate(self, batches: Iterator[MicroBatch]) -> dict[str, float]:
        """Sum the task's quantities over all batches and ranks; every rank must bring as many batches.

        With a moving average its figures come along, under the same names with `ema_` in front.
        """
        with self._evaluating() as models:

            def evaluate(batch: MicroBatch) -> Sums:
                moved = self._to_device(batch)
                return {
                    prefix + name: value
                    for prefix, model in models.items()
                    for name, value in self.task.evaluate(model, moved).items()
                }

            totals = evaluation_sums(batches, evaluate)
        if not totals:
            return {}
        figures: dict[str, float] = {}
        for prefix in models:
            own = {name: value for name, value in totals.items() if name.startswith(EMA_PREFIX) == bool(prefix)}
            named = self.task.metrics({name.removeprefix(prefix): value for name, value in own.items()})
            figures.update({prefix + name: value for name, value in named.items()})
        return figures

    def preview(self, batch: MicroBatch) -> Tensor | None:
        """The task's picture of predictions on `batch`, of the moving average where there is one."""
        with self._evaluating() as models:
            return self.task.preview(models.get(EMA_PREFIX, models[""]), self._to_device(batch))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights and buffers by name, tied ones under their first name."""
        named = [*self.module.named_parameters(), *saved_buffers(self.module)]
        return {name: tuple(tensor.shape) for name, tensor in named}

    def snapshot(self) -> Snapshot:
        """This rank's share of what all ranks hold, and its own buffers where those differ; collective."""
        own = {"buffers": [[buffer.clone() for buffer in floating_buffers(model)] for model in self._averaged()]}
        with ExitStack() as stack:
            differ = [stack.enter_context(equal_buffers(model)) for model in self._averaged()]
            pieces = buffer_pieces(saved_buffers(self.module))
            if self.ema is not None:
                pieces += buffer_pieces(saved_buffers(self.ema.module), EMA)
        held = list(whole_parameters(self._named))
        frozen = list(whole_parameters(p for p in self.module.named_parameters() if not p[1].requires_grad))
        pieces += weight_pieces([*held, *frozen]) + optimizer_pieces(held, self.optimizer)
        if self.ema is not None:
            averages = whole_parameters(self.ema.module.named_parameters())
            pieces += [part.piece(EMA + part.name, part.owner) for part in averages]
        bound = layout_bound(dict(self._named), self.optimizer)
        shared = {
            "updates": self.updates,
            "applied": self.applied,
            "loss_scale": moving_scale(self._scales),
            "optimizer": optimizer_numbers(dict(self._named), self.optimizer),
            "layout_bound": bool(bound),
            "tied": tied_names(self.module.named_parameters(remove_duplicate=False)),
            "ema": self.ema.counters() if self.ema is not None else None,
        }
        mine = {**(own if any(differ) else {}), **({"optimizer": bound} if bound else {})}
        return Snapshot(share_out(pieces, dist.get_rank(), dist.get_world_size()), shared, mine, self._gate.shut)

    def restore(self, pieces: Pieces, same_layout: bool) -> None:
        """Take up what `snapshot` gave, of any layout; the run's optimizer parameters, groups and schedule hold.

        Raises:
            CheckpointError: the checkpoint lacks something, or only the layout that wrote it can use it.
        """
        shared = pieces.shared
        own = own_part(pieces, same_layout)
        self.load_weights(pieces)
        held = list(whole_parameters(self._named))
        bound = own.get("optimizer", {})
        restore_optimizer(held, dict(self._named), self.optimizer, pieces, shared["optimizer"], bound)
        self.updates, self.applied = shared["updates"], shared["applied"]
        if self.scheduler is not None:
            schedules.go_to(self.scheduler, self.applied)
        restore_scale(self._scales, shared["loss_scale"])
        if self.scaler is not None and self._scales.dynamic:
            # not `update`: before its first use the scaler has no tensor to set
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": float(self._scales.cur_scale)})
        # not strict: a moving average may have been taken out of the run, or put in
        for model, kept in zip(self._averaged(), own.get("buffers", []), strict=False):
            for buffer, value in zip(floating_buffers(model), kept, strict=True):
                buffer.copy_(value)

    def load_weights(self, pieces: Pieces, names: Collection[str] | None = None) -> None:
        """Take weights, buffers and moving average alone, of these names or all of them, on any number of ranks."""
        chosen = [part for part in self.module.named_parameters() if names is None or part[0] in names]
        restore_weights(whole_parameters(chosen), pieces)
        restore_buffers(saved_buffers(self.module), pieces, names)
        if self.ema is None:
            return
        if pieces.shared.get("ema") is None or names is not None:  # it begins with the weights as they are
            self.ema.module.load_state_dict(self.module.state_dict())
            return
        for part in whole_parameters(self.ema.module.named_parameters()):
            part.fill(part.owner, part.read(pieces, EMA + part.name))
        restore_buffers(saved_buffers(self.ema.module), pieces, prefix=EMA)
        self.ema.go_to(pieces.shared["ema"])

    def _averaged(self) -> list[nn.Module]:
        """The model and its moving average."""
        return [self.module, *([self.ema.module] if self.ema else [])]

    def _update(self) -> bool:
        """Unscale, clip and step, or skip when gradients are not finite; the same decision on all ranks."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.optimizer.step()
        self.updates += 1
        if self.optimizer.overflow:  # type: ignore[attr-defined]
            return False
        self.applied += 1
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update(self.module)
        return True

    @property
    def _floor(self) -> float:
        """Smallest loss scale; a fixed one is never exhausted."""
        return float(getattr(self._scales, "min_scale", 0.0))

    def _move_scale(self, applied: bool) -> None:
        if self._scales is not None:
            assert self.scaler is not None
            self._scales.update_scale(not applied)
            self.scaler.update(new_scale=float(self._scales.cur_scale))

    @contextmanager
    def _forward(self) -> Iterator[None]:
        half = self.precision != "fp32"
        with torch.autocast(self.device.type, self.dtype) if half else nullcontext(), self._half():
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[dict[str, nn.Module]]:
        """The models to evaluate by prefix, in evaluation mode, with buffers that are equal on all ranks."""
        models = {"": self.module, **({EMA_PREFIX: self.ema.module} if self.ema is not None else {})}
        with ExitStack() as stack:
            for model in models.values():
                stack.enter_context(equal_buffers(model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._forward())
            stack.enter_context(evaluation_mode(self.module))
            yield models

    def _check_used(self) -> None:
        """Name the parameters without gradient before DDP stops with indices, or other ranks wait for ever."""
        if not self.allow_unused and (unused := [name for name, p in self._named if p.grad is None]):
            raise _unused(unused)
        with self._unused_named():  # used in an earlier micro-batch, not in the last: such gradients are not averaged
            self.model._check_reducer_finalized()

    @contextmanager
    def _unused_named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            found = WITHOUT_GRADIENT.search(str(error))
            if found is None:
                raise
            raise _unused([self._named[int(index)][0] for index in found[1].split()]) from error

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        moved = {k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
        if self.channels_last and isinstance(images := moved.get("images"), Tensor):
            moved["images"] = images.contiguous(memory_format=torch.channels_last)
        return moved


def _unused(names: list[str]) -> UnusedParametersError:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return UnusedParametersError(
        f"{len(names)} parameters got no gradient on rank {dist.get_rank()}: {shown}. Freeze them (model.freeze), take "
        f"them out of the model, or write model.allow_unused_parameters: true"
    )


def _loss_scaling(fp16: dict[str, Any], precision: str, device: str) -> tuple[torch.amp.GradScaler | None, Any]:
    """torch's scaler and DeepSpeed's rule for the scale, from the fp16 section; both None without fp16."""
    if precision != "fp16":
        return None, None
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    fixed = float(fp16.get("loss_scale", 0))
    if fixed > 0:
        return torch.amp.GradScaler(device, init_scale=fixed), LossScaler(scale=fixed)
    rule = DynamicLossScaler(
        init_scale=2.0 ** fp16.get("initial_scale_power", 16),
        scale_window=fp16.get("loss_scale_window", 1000),
        min_scale=fp16.get("min_loss_scale", 1),
        delayed_shift=fp16.get("hysteresis", 2),
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=False,
        dtype=torch.float16,
    )
    return torch.amp.GradScaler(device, init_scale=rule.cur_scale, growth_interval=rule.scale_window), rule
