"""What the image tasks share: feeding a model and reading its logits."""

from typing import Any

import torch
from torch import Tensor, nn

from largetrain.errors import ConfigError
from largetrain.tasks.base import Batch

IGNORED = -100
# under autocast the parameters are fp32 and images stay fp32
PARAMETERS_DECIDE = (torch.float16, torch.bfloat16, torch.float64)


def images_for(model: nn.Module, batch: Batch) -> Tensor:
    """The images of the batch, in the dtype of a model that is held in half or double precision."""
    images: Tensor = batch["images"]
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.dtype in PARAMETERS_DECIDE:
        return images.to(parameter.dtype)
    return images


def logits_of(output: Any, num_classes: int, dim: int) -> Tensor:
    """Logits in fp32, or fp64 if they are, from a tensor or from an output with `logits`.

    Args:
        output: what the model gave: [batch, classes, ...] or an object that holds it as `logits`.
        num_classes: classes of the data; more outputs are accepted.
        dim: number of dims that the logits must have.

    Raises:
        ConfigError: there are no such logits.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    size = ", height, width" if dim == 4 else ""
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"model: its output is {type(output).__name__} instead of a tensor of logits. Return "
            f"[batch, classes{size}] from forward."
        )
    if logits.dim() != dim or logits.shape[1] < num_classes:
        raise ConfigError(
            f"model: its output has the shape {list(logits.shape)}, but {num_classes} classes need "
            f"[batch, {num_classes}{size}]. Leave model.num_classes at auto, or make your model fit."
        )
    return logits if logits.dtype == torch.float64 else logits.float()
