"""Turn updates into rows, once, and hand them to every sink: metrics file, TensorBoard, terminal.

Losses and norms stay on the device until a batch of rows is due, so that logging costs one host
synchronisation per interval. Rank 0 writes; the x axis is optimizer updates.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from largetrain.callbacks.base import Callback, Moment

Row = dict[str, Any]


class Sink(Protocol):
    """Where rows go; exists on rank 0 only."""

    def start(self, step: int) -> None:
        """Forget whatever an earlier run wrote after `step`."""

    def tick(self, step: int) -> None:
        """An update is done; its row follows later."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows in order of steps: training rows, or one row with `eval/...` keys."""

    def picture(self, step: int, picture: torch.Tensor) -> None:
        """Take a picture, uint8 [3, H, W]."""

    def close(self) -> None:
        """The run is over."""


class Recorder(Callback):
    """Collects one row per optimizer update and flushes them every `every_steps`.

    Args:
        sinks: rank 0's sinks; empty on other ranks.
        flops_per_token: model FLOPs of one trained token, or None for a model of unknown cost.
        peak_flops: FLOP/s of one device at its best, or None when unknown (then no MFU).
        clip: gradient_clipping, to report the coefficient beside the norm before clipping; 0 is off.
        unit: what the task counts, for the rows' names.
        global_batch: samples per update, for a rate in samples where that is another one; None: no such rate.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        every_steps: int,
        clip: float,
        flops_per_token: int | None = None,
        peak_flops: float | None = None,
        unit: str = "tokens",
        global_batch: int | None = None,
    ):
        self.sinks, self.every_steps, self.clip = sinks, every_steps, clip
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.unit, self.global_batch = unit, global_batch
        self.world_size = dist.get_world_size()
        self._pending: list[tuple[Moment, float]] = []

    def on_start(self, step: int) -> None:
        for sink in self.sinks:
            sink.start(step)

    def on_step(self, moment: Moment) -> None:
        self._pending.append((moment, time.time()))
        for sink in self.sinks:
            sink.tick(moment.step)
        if moment.step % self.every_steps == 0 or moment.last:
            self.flush()

    def on_evaluation(self, step: int, figures: dict[str, float]) -> None:
        self.flush()
        row = {"step": step, "time": time.time(), **{f"eval/{name}": value for name, value in figures.items()}}
        for sink in self.sinks:
            sink.write([row])

    def on_picture(self, step: int, picture: torch.Tensor) -> None:
        for sink in self.sinks:
            sink.picture(step, picture.cpu())

    def on_end(self, step: int) -> None:
        self.flush()
        self._close()

    def on_failure(self, step: int) -> None:
        self._write_pending(memory_bytes=None)  # what led to the failure is what one wants to see
        self._close()

    def flush(self) -> None:
        """Write the rows of all updates since the last flush; collective, all ranks call it at the same step."""
        if self._pending:
            self._write_pending(_memory_of_ranks(self._pending[0][0].result.loss.device))

    def _write_pending(self, memory_bytes: list[int] | None) -> None:
        pending, self._pending = self._pending, []
        if not self.sinks or not pending:
            return
        results = [moment.result for moment, _ in pending]
        losses = torch.stack([result.loss for result in results]).tolist()
        norms = [float(result.grad_norm) for result in results]
        rows = [
            self._row(moment, when, loss, norm)
            for (moment, when), loss, norm in zip(pending, losses, norms, strict=True)
        ]
        if memory_bytes is not None:
            rows[-1]["memory_bytes"] = memory_bytes
        for sink in self.sinks:
            sink.write(rows)

    def _close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def _row(self, moment: Moment, when: float, loss: float, norm: float) -> Row:
        result = moment.result
        rate = result.tokens / moment.step_s
        row: Row = {
            "step": moment.step,
            "loss": loss,
            "lr": result.lr,
            "grad_norm": norm,
            "clip_coefficient": min(1.0, self.clip / (norm + 1e-6)) if self.clip > 0 and math.isfinite(norm) else 1.0,
            "loss_scale": result.loss_scale,
            "applied": result.applied,
            "skipped": moment.skipped,
            self.unit: result.tokens,
            f"{self.unit}_per_s": rate,
            "consumed_samples": moment.consumed_samples,
            "step_s": moment.step_s,
            "data_wait_share": moment.data_s / moment.step_s,
            "time": when,
        }
        if self.global_batch is not None and self.unit not in ("tokens", "images"):
            row["images_per_s"] = self.global_batch / moment.step_s
        if self.flops_per_token is not None:
            per_device = rate * self.flops_per_token / self.world_size
            row["model_flops_per_s"] = per_device * self.world_size
            if self.peak_flops is not None:
                row["mfu"] = per_device / self.peak_flops
        return row


def _memory_of_ranks(device: torch.device) -> list[int]:
    """Peak bytes of each rank: of the device's allocator on CUDA, resident set of the process on a CPU."""
    if device.type == "cuda":
        mine = torch.tensor([torch.cuda.max_memory_allocated(device)], dtype=torch.int64, device=device)
    else:
        import resource

        mine = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024], dtype=torch.int64)
    everyone = torch.empty(dist.get_world_size(), dtype=torch.int64, device=mine.device)
    dist.all_gather_into_tensor(everyone, mine)
    return [int(value) for value in everyone.tolist()]
