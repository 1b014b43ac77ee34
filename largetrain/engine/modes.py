"""Evaluation mode and the way back."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within it every module is in evaluation mode, afterwards in the mode that it was in.

    `model.train()` would also put those in training mode that the model keeps out of it, such as a frozen stem: the
    run would become another one with its first evaluation.
    """
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
