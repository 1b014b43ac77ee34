"""What a piece of code sends: every collective that goes through torch, counted at the dispatcher.

Counted there and not by wrapping functions, so that it makes no difference whether our code, autograd or DeepSpeed
calls, nor by which of torch's many names.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operator of the dispatcher -> the name that papers use, and which argument is the message: a rank's whole input of a
# reduction, a rank's whole output of a gather
OPS = {
    "allreduce_": ("all_reduce", 0),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "barrier": ("barrier", 0),
}


@dataclass(frozen=True)
class Message:
    """One call of a collective."""

    kind: str
    elements: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    """Of the group."""

    @property
    def n_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Traffic(TorchDispatchMode):
    """Lists the messages of the code within, as this rank takes part in them."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple) -> None:
        assert name in OPS, f"a collective that nobody counts: {name}"
        kind, message = OPS[name]
        tensors = [leaf for leaf in tree_leaves(args[message]) if isinstance(leaf, Tensor)]
        (group,) = [
            dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)
        ]
        ranks = tuple(dist.get_process_group_ranks(group))
        self.messages += [Message(kind, tensor.numel(), tensor.dtype, ranks) for tensor in tensors]

    def of(self, kind: str, ranks: tuple[int, ...] | None = None, above: int = 0) -> list[Message]:
        """The messages of a kind, within a group of ranks, of more than `above` elements."""
        return [
            message
            for message in self.messages
            if message.kind == kind and ranks in (None, message.ranks) and message.elements > above
        ]

    def table(self) -> dict[tuple[str, int, int], int]:
        """(kind, ranks in the group, elements) -> how often."""
        return dict(Counter((message.kind, len(message.ranks), message.elements) for message in self.messages))


def _is_group(value: Any) -> bool:
    return "ProcessGroup" in str(value._type())


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is sent within the block."""
    with Traffic() as traffic:
        yield traffic
