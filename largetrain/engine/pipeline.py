"""The `pipeline` backend: stages of layers on DeepSpeed's PipelineModule and PipelineEngine, by 1F1B or DualPipeV.

Where DeepSpeed 0.19 does not do what a run needs: its loss is a mean of means over micro-batches, here every target
weighs the same; its partition methods are replaced by `engine/partition`; it puts all modules into training mode.
"""

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.config.layout import Layout, Place
from largetrain.engine.base import MicroBatch, StepResult
from largetrain.engine.deepspeed import dtype_of, stage_of
from largetrain.engine.deepspeed_state import EngineState
from largetrain.engine.half_on_cpu import half_arithmetic
from largetrain.engine.held import whole_shape
from largetrain.engine.optimizers import Groups, check_optimizer, skip_infinite_updates, sum_norm_once, torch_adam
from largetrain.engine.pipeline_module import Stage, pipeline_module
from largetrain.engine.replicas import kept_apart, take_first_gradients
from largetrain.engine.schedules import FactorSchedule
from largetrain.engine.startup import spared_compiler_imports
from largetrain.engine.sums import UpdateSums, evaluation_sums
from largetrain.errors import ConfigError
from largetrain.models.staged import StagedModel
from largetrain.parallel.axes import Axes
from largetrain.parallel.pieces import Pieces, Snapshot
from largetrain.tasks.base import Task

INPUTS = ("input_ids", "images")  # of a batch: what the first layer takes
PIPELINE = {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0}
Grouping = Callable[[Stage], Groups]


@dataclass(frozen=True)
class Cut:
    """Where a model is cut."""

    layout: Layout
    bounds: list[int]
    """First layer of each stage, and the number of layers; twice as many runs of layers are for DualPipeV."""
    recomputed: bool = False
    """This rank's stage keeps no activations of its layers but runs them again."""


def input_of(batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What the first layer takes of a batch: tokens, or images in the dtype that it computes in."""
    value = _raw_input(batch).to(device, non_blocking=True)
    return value.to(dtype) if value.is_floating_point() else value


def _raw_input(batch: MicroBatch) -> Tensor:
    (key,) = [key for key in INPUTS if key in batch]
    value: Tensor = batch[key]
    return value


class _Ending(nn.Module):
    """What a task meets in place of the model, on the last stage: the outputs are there, the last layer may be left."""

    def __init__(self, last: nn.Module | None):
        super().__init__()
        self.last = last
        self.outputs = torch.empty(0)

    def forward(self, inputs: Tensor, *labels: Tensor) -> Any:
        outputs = self.outputs[: len(inputs)]  # a preview shows the first ones only
        return outputs if self.last is None else self.last(outputs, *labels)


OnOutput = Callable[[nn.Module, MicroBatch], Tensor]


class PipelineBackend:
    """Runs optimizer steps through DeepSpeed's pipeline engine.

    Args:
        model: layers, of which this rank builds those of its stage.
        cut: the stages.
        task: gives the weight and the loss sum of a batch.
        engine_config: the resolved engine JSON as a dict; ZeRO stage 0 or 1.
        device: where batches go.
        grouping: from this rank's stage to groups for the optimizer; None: all trainable parameters alike.
        factor: update number -> factor on the learning rate, in place of the JSON's scheduler.
        axes: this rank's groups, of the layout.
    """

    def __init__(
        self,
        model: StagedModel,
        cut: Cut,
        task: Task,
        engine_config: dict[str, Any],
        device: torch.device,
        grouping: Grouping | None = None,
        factor: Callable[[int], float] | None = None,
        axes: Axes | None = None,
    ):
        import deepspeed

        assert axes is not None
        served = {**deepcopy(engine_config), "pipeline": PIPELINE}
        self.notes = check_optimizer(served, device.type)
        self.dtype = dtype_of(served)
        self.task, self.device, self.axes, self.layout = task, device, axes, cut.layout
        self.accumulation = int(served["gradient_accumulation_steps"])
        self.bounds = cut.bounds
        """See `Cut`."""
        self._stage = Stage(model, cut.bounds, cut.layout, cut.recomputed)
        self._module = pipeline_module(self._stage, self._loss)
        zero_stage = stage_of(served)
        groups = grouping(self._stage) if grouping is not None else None
        named = self._stage.named_parameters()
        parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        tied = [] if self._stage.tied is None else [p for p in parameters if p is self._stage.tied[1].weight]
        groups = kept_apart(groups or [{"params": parameters}], axes, tied)
        trained: Any = groups if len(groups) > 1 else parameters
        clip = float(served["gradient_clipping"])
        if zero_stage == 0:
            served["gradient_clipping"] = 0.0  # engine/optimizers clips, after looking for infinite gradients
        with spared_compiler_imports(served):
            optimizer = torch_adam(served, trained)
            if optimizer is not None:
                served.pop("optimizer")
            self.engine, *_ = deepspeed.initialize(
                model=self._module,
                model_parameters=trained,
                optimizer=optimizer,
                lr_scheduler=None if factor is None else lambda made: FactorSchedule(made, factor),
                config=served,
            )
        if zero_stage == 0:
            skip_infinite_updates(self.engine.optimizer, parameters, clip, axes)
        else:
            sum_norm_once(self.engine.optimizer, axes)
        take_first_gradients(self.engine.optimizer, zero_stage, parameters, axes)
        self._arithmetic, notes = half_arithmetic(device.type, self.dtype)
        self.notes += notes
        self._state = EngineState(self.engine, zero_stage, self.dtype, named, self._stage.named_buffers, axes)
        self._shapes = self._all_shapes()
        self._tied = {f"{layer.name}.weight": f"{layer.tied_to}.weight" for layer in model.layers if layer.tied_to}
        self._ending = _Ending(self._stage.last)
        self._pending: list[MicroBatch | None] = []
        self._on_output: OnOutput | None = None

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

        The loss is the sum over valid targets divided by their count over the whole global batch. Only the last stage
        has it; all ranks are told.
        """
        batches = [next(micro_batches) for _ in range(self.accumulation)]
        self._check_alike(batches)
        sums = None
        if self._stage.is_last:
            sums = UpdateSums(sum(self.task.weight(batch) for batch in batches), self.device, self.axes.data)
        lr, scale = self.lr, self.loss_scale

        def loss(model: nn.Module, batch: MicroBatch) -> Tensor:
            assert sums is not None
            loss_sum = self.task.loss_sum(model, batch)
            sums.add(loss_sum, last=len(sums.losses) == self.accumulation - 1)
            return sums.scaled(loss_sum, self.accumulation)

        self.engine.reset_activation_shape()  # stages tell one another anew: the next update's may differ
        with self._arithmetic():
            self._run(loss, batches, self.engine.train_batch)
        mean, tokens = self._tell(sums)
        applied, exhausted = self._state.finish_update(scale)
        return StepResult(
            loss=mean,
            lr=lr,
            grad_norm=self.engine.get_global_grad_norm(),
            loss_scale=scale,
            applied=applied,
            tokens=tokens,
            scale_exhausted=exhausted,
            local_losses=tuple(sums.losses) if sums is not None else (),
            sample_ids=tuple(int(i) for batch in batches for i in batch.get("sample_id", ())) if sums else (),
        )

    def _check_alike(self, batches: list[MicroBatch]) -> None:
        """Within an update activations travel in buffers of one shape; other ones would be taken for it.

        Raises:
            ConfigError: inputs of several shapes; on the ranks that have them.
        """
        if not (self._stage.is_first or self._stage.is_last):
            return
        shapes = {str(list(_raw_input(batch).shape)) for batch in batches}
        if len(shapes) > 1:
            raise ConfigError(
                f"data: the micro-batches of one update have inputs of shapes {', '.join(sorted(shapes))}, and "
                f"pipeline stages hand on one shape in an update; pad them alike, or write "
                f"gradient_accumulation_steps: 1."
            )

    def _tell(self, sums: UpdateSums | None) -> tuple[Tensor, int]:
        """Mean loss and weight of the update, from the last stage to all."""
        told = torch.zeros(2, dtype=torch.float64, device=self.device)
        if sums is not None:
            loss, tokens = sums.finish()
            told[0], told[1] = loss, tokens
        if self.axes.stages.size > 1:
            dist.broadcast(told, self._last_rank(), group=self.axes.stages.group)
        return told[0].float(), int(told[1])

    def _from_last(self, value: Any) -> Any:
        """The last stage's object, on all stages."""
        held = [value]
        if self.axes.stages.size > 1:
            dist.broadcast_object_list(held, self._last_rank(), group=self.axes.stages.group, device=self.device)
        return held[0]

    def _last_rank(self) -> int:
        """The rank that has the last layer and works on the same samples."""
        place = self.layout.place(dist.get_rank())
        return self.layout.rank(Place(self._stage.loss_stage, place.data, place.sequence, place.tensor))

    def _run(
        self,
        on_output: OnOutput,
        batches: list[MicroBatch],
        run: Callable[[Iterator[Any]], Any],
        spare: int = 0,
    ) -> None:
        """Send micro-batches through the stages.

        Args:
            on_output: called on the last stage, in order, with what stands for the model and the batch.
            spare: how often the last one goes through once more, for nothing.
        """
        self._pending, self._on_output = [*batches, *[None] * spare], on_output
        nothing = torch.zeros(())  # the labels that DeepSpeed wants: the batch itself waits in _pending
        sent = [*batches, *batches[-1:] * spare]
        inputs = [input_of(b, self.device, self.dtype) if self._stage.is_first else nothing for b in sent]
        run(iter([(value, nothing) for value in inputs]))
        assert not self._stage.is_last or not self._pending, "a micro-batch came out that did not go in"

    def _loss(self, outputs: Tensor, nothing: Tensor) -> Tensor:
        """What DeepSpeed calls on the last stage, once for each micro-batch."""
        assert self._on_output is not None
        batch = self._pending.pop(0)
        if batch is None:
            return torch.zeros((), device=self.device)
        moved = {k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
        self._ending.outputs = outputs
        return self._on_output(self._ending, moved)

    def evaluate(self, batches: Iterator[MicroBatch]) -> dict[str, float]:
        """Sum the task's quantities over all batches and ranks; every rank must bring as many batches."""
        totals = evaluation_sums(self._evaluated(batches), lambda sums: sums, self.axes.data)
        totals = self._from_last(totals)
        return self.task.metrics(totals) if totals else {}

    def _evaluated(self, batches: Iterator[MicroBatch]) -> Iterator[dict[str, Tensor]]:
        """The task's sums of each batch; nothing where this rank is not in the last stage."""
        found: list[dict[str, Tensor]] = []

        def evaluate(model: nn.Module, batch: MicroBatch) -> Tensor:
            found.append(self.task.evaluate(model, batch))
            return torch.zeros((), device=self.device)

        at_once = self.accumulation if self._stage.folded else 2 * self.layout.stages
        while some := list(islice(batches, at_once)):
            self._infer(evaluate, some)
            yield from found
            found.clear()

    def _infer(self, on_output: OnOutput, batches: list[MicroBatch]) -> None:
        """Send batches of any shapes through the stages, those of one shape together."""
        # DualPipeV of DeepSpeed 0.19 finds its buffers only with as many micro-batches as in an update
        count = self.accumulation if self._stage.folded else 0
        for _, group in groupby(batches, lambda batch: _raw_input(batch).shape):
            alike = list(group)
            spare = max(0, count - len(alike))
            evaluate = partial(self.engine.eval_batch, num_micro_batches=len(alike) + spare)
            self.engine.reset_activation_shape()
            with torch.no_grad(), self._arithmetic():
                self._run(on_output, alike, evaluate, spare)

    def preview(self, batch: MicroBatch) -> Tensor | None:
        """The task's picture of what the model makes of `batch`, equal on the stages; called on every rank."""
        drawn: list[Tensor | None] = []

        def draw(model: nn.Module, moved: MicroBatch) -> Tensor:
            drawn.append(self.task.preview(model, moved))
            return torch.zeros((), device=self.device)

        self._infer(draw, [batch])
        picture: Tensor | None = self._from_last(drawn[0] if drawn else None)
        return picture

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights and buffers of the whole model by name, tied ones under their first name."""
        return dict(self._shapes)

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        mine = {name: whole_shape(parameter) for name, parameter in self._state.named.items()}
        mine |= {name: tuple(buffer.shape) for name, buffer in self._stage.named_buffers().items()}
        found: list[Any] = [mine] * self.axes.stages.size
        if self.axes.stages.size > 1:
            dist.all_gather_object(found, mine, group=self.axes.stages.group)
        return {name: shape for theirs in found for name, shape in theirs.items()}

    def snapshot(self) -> Snapshot:
        """This rank's part of weights, optimizer state and loss scale; collective."""
        return self._state.snapshot(self._tied)

    def restore(self, pieces: Pieces, same_layout: bool) -> None:
        """See `EngineState.restore`."""
        self._state.restore(pieces, same_layout, self.accumulation)

    def load_weights(self, pieces: Pieces, names: Collection[str] | None = None) -> None:
        """Take weights and buffers alone, of these names or all of them; collective."""
        self._state.load_weights(pieces, names)
