"""Reading back what a run has saved."""

from pathlib import Path

from torch import Tensor

from largetrain.checkpoint.reader import open_checkpoint


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """Weights and buffers of a checkpoint folder by name, tied ones once."""
    pieces = open_checkpoint(checkpoint)
    keys = [key for key in pieces.keys() if key.startswith("model/")]  # noqa: SIM118 (a Pieces is no mapping)
    return {key.removeprefix("model/"): pieces.read(key).view(pieces.shape(key)) for key in keys}
