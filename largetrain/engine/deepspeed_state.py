"""What a DeepSpeed engine carries from update to update: shared by the backends that run on one."""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.engine import schedules
from largetrain.engine.buffers import buffer_pieces, restore_buffers
from largetrain.engine.gate import gate_of
from largetrain.engine.held import (
    layout_bound,
    optimizer_numbers,
    optimizer_pieces,
    own_part,
    restore_optimizer,
    share_of,
    weight_pieces,
)
from largetrain.engine.loss_scale import moving_scale, restore_scale
from largetrain.engine.zero_state import frozen_pieces, held_by, owners_of, restore_frozen, take_up_weights
from largetrain.parallel.axes import Axes
from largetrain.parallel.pieces import Pieces, Snapshot


class EngineState:
    """Counters, loss scale, weights and optimizer state of one engine.

    Args:
        engine: DeepSpeed's, initialised.
        stage: of ZeRO.
        dtype: of the weights that it computes with.
        named: this rank's parameters by their names in the whole model, each once.
        buffers: gives this rank's buffers likewise; asked anew each time.
        axes: this rank's groups.
    """

    def __init__(
        self,
        engine: Any,
        stage: int,
        dtype: torch.dtype,
        named: dict[str, nn.Parameter],
        buffers: Callable[[], dict[str, Tensor]],
        axes: Axes,
    ):
        self.engine, self.stage, self.dtype, self.axes = engine, stage, dtype, axes
        self.named, self.buffers = named, buffers
        self.optimizer, self.scheduler = engine.optimizer, engine.lr_scheduler
        self._scale_is_dynamic = self._defer_loss_scale()
        schedules.start(self.scheduler, self.optimizer)
        self._gate = gate_of(self.optimizer, self._inner)

    def _defer_loss_scale(self) -> bool:
        """Move the loss scale after each update instead of within it, and keep it at its floor without an exception.

        DeepSpeed 0.19 grows the scale between computing the gradients and dividing them by it, which halves the
        gradient of every update at which it grows. At the floor it raises a bare Exception; here the guard stops.
        """
        scaler = self._scaler
        if scaler is None or not getattr(scaler, "dynamic", False):
            return False
        scaler.raise_error_at_min_scale = False
        self.optimizer._update_scale = lambda has_overflow: None  # not on the scaler: DeepSpeed pickles that
        return True

    @property
    def lr(self) -> float:
        """Learning rate of the next update, of parameters without a factor."""
        return schedules.base_rate(self.optimizer)

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next update; 1.0 without fp16."""
        return float(self.optimizer.loss_scale) if self.dtype == torch.float16 else 1.0

    def finish_update(self, scale: float) -> tuple[bool, bool]:
        """Move the loss scale after an update.

        Args:
            scale: that the update used.

        Returns:
            whether the update was applied, and whether it overflowed at the smallest scale.
        """
        applied = bool(self.engine.was_step_applied())
        exhausted = False
        if self._scale_is_dynamic:
            exhausted = not applied and scale <= self.optimizer.loss_scaler.min_scale
            self.optimizer.loss_scaler.update_scale(not applied)
        return applied, exhausted

    def snapshot(self, tied: dict[str, str]) -> Snapshot:
        """This rank's part of weights, optimizer state and loss scale; collective.

        Args:
            tied: further names of parameters of the whole model -> the names that they are saved under.
        """
        # the copy of a tied weight is written by the stage that has the first
        named = {name: p for name, p in self.named.items() if not getattr(p, "ds_pipe_replicated", False)}
        held = held_by(self.engine, self.stage, named.items())
        owners = owners_of(self.engine, self.stage, named.items())
        mine = weight_pieces(held) + optimizer_pieces(held, self._inner)
        alike, sharded = frozen_pieces(named.items())
        alike += buffer_pieces(self.buffers().items())
        if self.stage == 0:  # every replica holds everything
            alike, mine = mine + alike, []
        bound = layout_bound(owners, self._inner)
        shared = {
            "updates": self.engine.global_steps,
            "applied": self.engine.global_steps - self.engine.skipped_steps,
            "loss_scale": moving_scale(self._scaler),
            "optimizer": self._of_all_stages(optimizer_numbers(owners, self._inner)),
            # Muon's momentum follows DeepSpeed's own order of whole matrices
            "layout_bound": bool(bound) or type(self._inner).__name__.lower().startswith("muon"),
            "tied": tied,
        }
        pieces = share_of(alike, [*mine, *sharded], self.axes)
        before_change = None if self._gate is None else self._gate.shut
        return Snapshot(pieces, shared, {"optimizer": bound} if bound else {}, before_change)

    def _of_all_stages(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Numbers of the optimizer, equal on all ranks; stages that have trained alike agree on one for all."""
        if self.axes.stages.size == 1:
            return numbers
        found: list[Any] = [None] * self.axes.stages.size
        dist.all_gather_object(found, numbers, group=self.axes.stages.group)
        merged: dict[str, Any] = {}
        for kind in sorted({kind for theirs in found for kind in theirs}):
            theirs = [numbers[kind] for numbers in found if kind in numbers]
            alls = {entry.get("all") for entry in theirs}
            assert len(alls) == 1 and None not in alls, f"stages disagree on {kind} of the optimizer: {theirs}"
            merged[kind] = theirs[0]
        return merged

    def restore(self, pieces: Pieces, same_layout: bool, accumulation: int) -> None:
        """Take up weights, optimizer state, counters and loss scale, whatever layout wrote them; collective.

        Optimizer parameters and the schedule are those of the engine JSON: with an unchanged one the same bits,
        with another learning rate or length the new ones, and not silently what the checkpoint remembers.

        Raises:
            CheckpointError: the checkpoint lacks something, or only the layout that wrote it can use it.
        """
        shared = pieces.shared
        own = own_part(pieces, same_layout)
        self._fill(pieces)
        named = self.named.items()
        held, owners = held_by(self.engine, self.stage, named), owners_of(self.engine, self.stage, named)
        restore_optimizer(held, owners, self._inner, pieces, shared["optimizer"], own.get("optimizer", {}))
        if self.stage in (1, 2):
            self.optimizer._hp_optimizer_states_linked = False  # DeepSpeed's views of the state are made anew
        updates = shared["updates"]
        self.engine.global_steps, self.engine.skipped_steps = updates, updates - shared["applied"]
        self.engine.micro_steps = updates * accumulation
        self.engine.global_samples = updates * self.engine.train_batch_size()
        restore_scale(self._scaler, shared["loss_scale"])
        if self.scheduler is not None:
            schedules.go_to(self.scheduler, shared["applied"])

    def load_weights(self, pieces: Pieces, names: Collection[str] | None = None) -> None:
        """Take weights and buffers alone, of these names or all of them; collective."""
        self._fill(pieces, names)

    def _fill(self, pieces: Pieces, names: Collection[str] | None = None) -> None:
        take_up_weights(self.engine, self.stage, pieces, self.named, names)
        restore_frozen(self.named.items(), pieces, names)
        restore_buffers(self.buffers().items(), pieces, names)

    @property
    def _inner(self) -> Any:
        """The optimizer that updates tensors, below DeepSpeed's wrapper."""
        return self.optimizer if self.stage == 0 else self.optimizer.optimizer

    @property
    def _scaler(self) -> Any:
        return getattr(self.optimizer, "loss_scaler", None) if self.dtype == torch.float16 else None
