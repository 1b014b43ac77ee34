"""Files that torch.save wrote, read so that nothing in them runs: tensors, plain types, and inert stand-ins.

torch's own restricted unpickler does the reading. DeepSpeed's files also hold a few objects of DeepSpeed; for each
class that it is known to write a stand-in without behaviour takes its place, so that no code of DeepSpeed runs either.
"""

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from largetrain.errors import ConfigError


class Inert:
    """In the place of an object of DeepSpeed: keeps what it was made of, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args, self.kwargs = args, kwargs

    def __setstate__(self, state: Any) -> None:
        self.state = state


class InertNumber(int):
    """In the place of a number enum."""


# what DeepSpeed 0.10 to 0.19 put into model and optimizer files beside tensors and plain types
STAND_INS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": Inert,
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig": Inert,
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile": InertNumber,
    "deepspeed.runtime.zero.config.ZeroStageEnum": InertNumber,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
    "deepspeed.utils.tensor_fragment.tensor_fragment": Inert,
}


def read_torch_file(path: Path, key: str, *, stand_ins: bool = False, trust: bool = False, way_out: str = "") -> Any:
    """What torch.save wrote, on the CPU, mapped from the file where it can be.

    Args:
        path: the file.
        key: where it was asked for, for messages.
        stand_ins: take DeepSpeed's own objects as `STAND_INS`.
        trust: unpickle anything, which may run code of the file's author.
        way_out: end of the message about a file that holds anything else.

    Raises:
        ConfigError: it is missing, damaged, or holds what could run code; nothing of it has run.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: {path} is missing.")
    allowed: list[Any] = [(kind, name) for name, kind in STAND_INS.items()] if stand_ins else []
    try:
        mapped = zipfile.is_zipfile(path)
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=not trust, mmap=mapped)
    except pickle.UnpicklingError as error:
        held = _globals(path, allowed)
        # torch's own words advise to read it unsafely
        what = "is damaged, no file of torch.save, or holds more than tensors and plain values"
        if held:
            what = f"holds {', '.join(held)}, which could run code"
        raise ConfigError(f"{key}: {path} {what}; nothing of it was run. {way_out}".rstrip()) from error
    except Exception as error:  # bytes that are no checkpoint end in whatever the reader stumbles over first
        raise ConfigError(f"{key}: {path} is damaged or no file of torch.save ({_line(error)}).") from error


def _globals(path: Path, allowed: Sequence[Any]) -> list[str]:
    """Names in the file that are on no list; empty when they cannot be told without running it."""
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # noqa: BLE001 - it only serves the message, whatever is wrong with the file
        return []


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines() or ["no more is known"]
    return f"{type(error).__name__}: {text[0]}"
