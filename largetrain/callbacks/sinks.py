"""The three sinks of rank 0: metrics.jsonl, TensorBoard and the terminal."""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from largetrain.callbacks.recorder import Row

FLUSH_S = 5
# written to the metrics file only: bookkeeping, not curves
COUNTS = frozenset({"tokens", "images", "pixels", "samples"})
NOT_PLOTTED = frozenset({"step", "time", "applied", "memory_bytes", *COUNTS})


class MetricsFile:
    """`metrics.jsonl`: one JSON object per optimizer update, and one per evaluation; not-a-number is null."""

    def __init__(self, path: Path):
        self.path = path
        self._file: TextIO | None = None

    def start(self, step: int) -> None:
        kept = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the half line of a killed writer
                if isinstance(row, dict) and row.get("step", step + 1) <= step:
                    kept.append(line)
        replacement = self.path.with_suffix(".partial")
        replacement.write_text("".join(line + "\n" for line in kept))
        replacement.replace(self.path)
        self._file = self.path.open("a")

    def tick(self, step: int) -> None:
        pass

    def write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        for row in rows:
            self._file.write(json.dumps({key: _plain(value) for key, value in row.items()}) + "\n")
        self._file.flush()

    def picture(self, step: int, picture: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Event files; the writer is imported with the first row, so that it does not delay the first update."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._purge_step = 0
        self._writer: Any = None

    def start(self, step: int) -> None:
        self._purge_step = step + 1

    def tick(self, step: int) -> None:
        pass

    def write(self, rows: Sequence[Row]) -> None:
        writer = self._open()
        for row in rows:
            for key, value in row.items():
                if key not in NOT_PLOTTED:
                    name = key if "/" in key else f"train/{key}"
                    writer.add_scalar(name, value, row["step"], walltime=row["time"])
            for rank, size in enumerate(row.get("memory_bytes", ())):
                writer.add_scalar(f"memory_bytes/rank-{rank}", size, row["step"], walltime=row["time"])
        writer.flush()

    def picture(self, step: int, picture: torch.Tensor) -> None:
        writer = self._open()
        writer.add_image("eval/predictions", picture, step)
        writer.flush()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # a Ctrl-C in the middle of a write can leave the writer's thread asleep until its next flush is due
            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step, flush_secs=FLUSH_S)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Terminal:
    """A live line on a terminal, plain lines when redirected."""

    def __init__(self, total_steps: int, stream: TextIO | None = None):
        self.total_steps = total_steps
        self.stream = stream or sys.stdout
        self._bar: Any = None

    def start(self, step: int) -> None:
        if self.stream.isatty():
            # some terminals (containers, serial lines) say that they are 0 columns wide; tqdm would show nothing
            width = {"dynamic_ncols": True} if os.get_terminal_size(self.stream.fileno()).columns else {"ncols": 100}
            self._bar = tqdm(total=self.total_steps, initial=step, file=self.stream, unit="step", **width)

    def tick(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def write(self, rows: Sequence[Row]) -> None:
        row = rows[-1]
        if any(key.startswith("eval/") for key in row):
            shown = {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
            # counts and the figures of single classes are for the files
            shown = {name: value for name, value in shown.items() if name.removeprefix("ema_") not in COUNTS}
            figures = "  ".join(f"{name} {value:.4f}" for name, value in shown.items() if "/" not in name)
            self.say(f"step {row['step']}/{self.total_steps}  validation: {figures}")
        elif self._bar is not None:
            self._bar.set_postfix_str(_figures(row))
        else:
            self.say(f"step {row['step']}/{self.total_steps}  {_figures(row)}")

    def picture(self, step: int, picture: torch.Tensor) -> None:
        pass

    def say(self, line: str) -> None:
        """Print a line, above the live one if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _figures(row: Row) -> str:
    parts = [f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}", f"norm {row['grad_norm']:.2f}"]
    if row["loss_scale"] != 1.0:
        parts.append(f"scale {row['loss_scale']:.0f}")
    if row["skipped"]:
        parts.append(f"skipped {row['skipped']}")
    rate = "images" if "images_per_s" in row else "tokens"
    parts.append(f"{row[f'{rate}_per_s']:,.0f} {rate}/s")
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts.append(f"data {row['data_wait_share']:.0%}")
    return "  ".join(parts)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
