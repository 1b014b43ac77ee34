"""The `deepspeed` backend: ZeRO 0-3, offload, fp32, bf16, fp16, through `deepspeed.initialize`.

Where DeepSpeed 0.19 does not do what its JSON says, the mend is here, and in `config/served`.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.config.layout import Layout
from largetrain.engine.auto_tensor import AutoTensor, needs_auto_tensor
from largetrain.engine.base import MicroBatch, StepResult
from largetrain.engine.buffers import saved_buffers
from largetrain.engine.deepspeed_state import EngineState
from largetrain.engine.half_on_cpu import half_arithmetic
from largetrain.engine.held import tied_names, whole_shape
from largetrain.engine.modes import evaluation_mode
from largetrain.engine.mpu import unit_for
from largetrain.engine.optimizers import Groups, check_optimizer, skip_infinite_updates, torch_adam
from largetrain.engine.replicas import kept_apart, take_first_gradients
from largetrain.engine.schedules import FactorSchedule
from largetrain.engine.startup import spared_compiler_imports
from largetrain.engine.sums import Sums, UpdateSums, evaluation_sums
from largetrain.models.ulysses import sequence_batch
from largetrain.parallel.axes import Axes, Axis, make_axes
from largetrain.parallel.pieces import Pieces, Snapshot
from largetrain.tasks.base import Task


def dtype_of(engine_config: dict[str, Any]) -> torch.dtype:
    """Parameter dtype that the engine JSON asks for."""
    if engine_config.get("fp16", {}).get("enabled"):
        return torch.float16
    if engine_config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float32


def stage_of(engine_config: dict[str, Any]) -> int:
    """ZeRO stage that the engine JSON asks for."""
    return int(engine_config.get("zero_optimization", {}).get("stage", 0))


def offload_of(engine_config: dict[str, Any]) -> dict[str, str]:
    """Device that each kind of state is offloaded to, of those that are."""
    zero = engine_config.get("zero_optimization", {})
    devices = {kind: (zero.get(f"offload_{kind}") or {}).get("device", "none") for kind in ("optimizer", "param")}
    return {kind: device for kind, device in devices.items() if device != "none"}


def sharded_construction(engine_config: dict[str, Any], axes: Axes | None = None) -> AbstractContextManager[Any]:
    """Context in which a ZeRO-3 model is born sharded, so that no rank ever holds it whole; else does nothing.

    A collective over all ranks.

    Args:
        axes: as for `DeepSpeedBackend`.
    """
    if stage_of(engine_config) != 3:
        return nullcontext()
    import deepspeed

    axes = axes or make_axes(Layout(dist.get_world_size()))
    unit = unit_for(axes)
    return deepspeed.zero.Init(
        config_dict_or_path=with_batch_of(engine_config, axes.replicas),
        dtype=dtype_of(engine_config),
        mpu=unit,
        data_parallel_group=None if unit is None else unit.get_data_parallel_group(),
    )


def with_batch_of(engine_config: dict[str, Any], replicas: Axis) -> dict[str, Any]:
    """A copy with the train_batch_size that DeepSpeed computes from the other two sizes.

    It takes every rank that reduces gradients for one with samples of its own, also those that share a sequence.
    """
    served = deepcopy(engine_config)
    per_rank = int(served["train_micro_batch_size_per_gpu"]) * int(served["gradient_accumulation_steps"])
    served["train_batch_size"] = per_rank * replicas.size
    return served


class DeepSpeedBackend:
    """Runs optimizer steps through a DeepSpeed engine.

    Args:
        model: built on this rank; under ZeRO-3 inside `sharded_construction`.
        task: gives the weight and the loss sum of a batch.
        engine_config: the resolved engine JSON as a dict.
        device: where batches go.
        groups: parameter groups for the optimizer, with a `lr_factor` each; None: all trainable parameters alike.
        factor: update number -> factor on the learning rate, in place of the JSON's scheduler.
        axes: this rank's groups, those that the model was built for; None: every rank has the whole model and samples
            of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        engine_config: dict[str, Any],
        device: torch.device,
        groups: Groups | None = None,
        factor: Callable[[int], float] | None = None,
        axes: Axes | None = None,
    ):
        import deepspeed

        self.axes = axes or make_axes(Layout(dist.get_world_size()))
        served = with_batch_of(engine_config, self.axes.replicas)
        self.notes = check_optimizer(served, device.type)
        self.dtype, self.stage = dtype_of(served), stage_of(served)
        self.task, self.device = task, device
        self.accumulation = int(served["gradient_accumulation_steps"])
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        clip = float(served["gradient_clipping"])
        divided = AutoTensor(model, self.axes.tensor) if needs_auto_tensor(model, self.axes.tensor) else None
        if divided is not None:
            served["tensor_parallel"] = divided.section
        else:
            groups = kept_apart(groups or [{"params": parameters}], self.axes)
        # a single group goes as a plain list: that is what DeepSpeed's optimizers and offload were tried with
        several = groups is not None and len(groups) > 1
        trained: Any = groups if several else parameters
        if self.stage == 0:
            served["gradient_clipping"] = 0.0  # engine/optimizers clips, after looking for infinite gradients
        with spared_compiler_imports(served):
            optimizer = torch_adam(served, trained)
            if optimizer is not None:
                served.pop("optimizer")
            self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
                model=model,
                model_parameters=trained,
                optimizer=optimizer,
                lr_scheduler=None if factor is None else lambda made: FactorSchedule(made, factor),
                config=served,
                mpu=unit_for(self.axes),
            )
        if divided is not None:
            self.notes.append(f"parallel.tensor_parallel: {divided.mark_shards(model)} matrices divided by their plan")
        if self.stage == 0:
            skip_infinite_updates(self.optimizer, parameters, clip, self.axes)
        take_first_gradients(self.optimizer, self.stage, parameters, self.axes)
        self._arithmetic, notes = half_arithmetic(device.type, self.dtype)
        self.notes += notes
        named = dict(self.engine.module.named_parameters())
        self._state = EngineState(self.engine, self.stage, self.dtype, named, self._buffers, self.axes)

    def _buffers(self) -> dict[str, Tensor]:
        return dict(saved_buffers(self.engine.module))

    @property
    def lr(self) -> float:
        """Learning rate of the next update, of parameters without a factor."""
        return self._state.lr

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next update; 1.0 without fp16."""
        return self._state.loss_scale

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """Pull exactly gradient_accumulation_steps items, then update once.

        The loss is the sum over valid targets divided by their count over the whole global batch, so every
        micro-batch weighs by what it holds. DeepSpeed divides by accumulation and by replicas; the factor undoes both.
        """
        batches = [sequence_batch(next(micro_batches), self.axes.sequence) for _ in range(self.accumulation)]
        weight = sum(self.task.weight(batch) for batch in batches)
        sums = UpdateSums(weight, self.device, self.axes.replicas)
        lr, scale = self.lr, self.loss_scale
        for index, batch in enumerate(batches):
            with self._arithmetic():
                loss_sum = self.task.loss_sum(self.engine, self._to_device(batch))
            sums.add(loss_sum, last=index == self.accumulation - 1)
            with self._arithmetic():
                self.engine.backward(sums.scaled(loss_sum, self.accumulation))
            self.engine.step()
        loss, tokens = sums.finish()
        applied, exhausted = self._state.finish_update(scale)
        return StepResult(
            loss=loss,
            lr=lr,
            grad_norm=self.engine.get_global_grad_norm(),
            loss_scale=scale,
            applied=applied,
            tokens=tokens,
            scale_exhausted=exhausted,
            local_losses=tuple(sums.losses),
            sample_ids=tuple(int(i) for batch in batches for i in batch.get("sample_id", ())),
        )

    def evaluate(self, batches: Iterator[MicroBatch]) -> dict[str, float]:
        """Sum the task's quantities over all batches and ranks; every rank must bring as many batches."""
        with evaluation_mode(self.engine), torch.no_grad(), self._arithmetic():
            totals = evaluation_sums(batches, self._evaluate_batch, self.axes.replicas)
        return self.task.metrics(totals) if totals else {}

    def _evaluate_batch(self, batch: MicroBatch) -> Sums:
        return self.task.evaluate(self.engine, self._to_device(sequence_batch(batch, self.axes.sequence)))

    def preview(self, batch: MicroBatch) -> Tensor | None:
        """The task's picture of what the model makes of `batch`; called on every rank."""
        with evaluation_mode(self.engine), torch.no_grad(), self._arithmetic():
            return self.task.preview(self.engine, self._to_device(sequence_batch(batch, self.axes.sequence)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights and buffers by name, tied ones under their first name."""
        whole = {name: whole_shape(parameter) for name, parameter in self._state.named.items()}
        return whole | {name: tuple(buffer.shape) for name, buffer in self._buffers().items()}

    def snapshot(self) -> Snapshot:
        """This rank's part of weights, optimizer state and loss scale; collective."""
        return self._state.snapshot(tied_names(self.engine.module.named_parameters(remove_duplicate=False)))

    def restore(self, pieces: Pieces, same_layout: bool) -> None:
        """See `EngineState.restore`."""
        self._state.restore(pieces, same_layout, self.accumulation)

    def load_weights(self, pieces: Pieces, names: Collection[str] | None = None) -> None:
        """Take weights and buffers alone, of these names or all of them; collective."""
        self._state.load_weights(pieces, names)

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        return {k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
