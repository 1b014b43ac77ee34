"""Copies of weights and optimizer state that go on while the next update's gradients are computed."""

from collections.abc import Callable
from functools import wraps
from typing import Any


class Gate:
    """Holds an optimizer's next step back until what still reads its tensors is done: nothing else changes them.

    Args:
        optimizer: whose `step` the engine calls, DeepSpeed's around torch's where there is one.
    """

    def __init__(self, optimizer: Any):
        self._wait: Callable[[], Any] | None = None
        step = optimizer.step

        @wraps(step)
        def after_waiting(*args: Any, **kwargs: Any) -> Any:
            self.open()
            return step(*args, **kwargs)

        optimizer.step = after_waiting

    def shut(self, wait: Callable[[], Any]) -> None:
        """Have `wait` called before the next step."""
        self._wait = wait

    def open(self) -> None:
        """Wait now, if there is something to wait for."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


def gate_of(optimizer: Any, inner: Any) -> Gate | None:
    """The gate of an engine's optimizer; None where more than its step changes what it keeps.

    Args:
        optimizer: whose `step` the engine calls.
        inner: torch's optimizer in it.
    """
    if type(inner).__name__.lower().startswith("muon"):  # under ZeRO its momentum moves with the backward pass
        return None
    return Gate(optimizer)
