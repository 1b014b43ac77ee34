"""Failures of one rank while DeepSpeed saves, kept until no other rank waits for it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def failures_kept(engine: Any) -> Iterator[None]:
    """Call `engine.save_checkpoint` inside: a write that fails is raised at the end of the block.

    `save_checkpoint` holds barriers between its writes; a rank that left it early would leave the others in them
    until the collective timeout.

    Raises:
        OSError: the first write that failed; torch.save's RuntimeError of a full disk becomes one, with the path.
    """
    failures: list[OSError] = []
    with ExitStack() as stack:
        stack.enter_context(_kept(engine.checkpoint_engine, "save", failures))
        stack.enter_context(_kept(engine.checkpoint_engine, "makedirs", failures))
        stack.enter_context(_kept(engine, "_copy_recovery_script", failures))
        yield
    if failures:
        raise failures[0]


@contextmanager
def _kept(owner: Any, name: str, failures: list[OSError]) -> Iterator[None]:
    method: Callable[..., Any] = getattr(owner, name)

    def careful(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            failures.append(error)
        except RuntimeError as error:
            failure = OSError(f"{kwargs.get('path', args[-1] if args else name)}: {error}")
            failure.__cause__ = error
            failures.append(failure)

    setattr(owner, name, careful)
    try:
        yield
    finally:
        delattr(owner, name)
