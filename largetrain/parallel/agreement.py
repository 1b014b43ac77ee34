"""One small collective per update, in which ranks agree on what any of them has been asked for."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class StepAgreement:
    """Bits that are set on any rank are set on all of them; a signal may reach a single one.

    Made on all ranks together. On a group of its own, through gloo, whatever the run's backend is: the device is not
    waited for.

    Args:
        timeout_s: longest wait for the other ranks.
    """

    def __init__(self, timeout_s: float):
        self.last = 0
        """What the last exchange gave."""
        self._flags = torch.zeros(1, dtype=torch.int64)
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._alone = dist.get_world_size() == 1

    def union(self, flags: int) -> int:
        """The bits of all ranks. A collective."""
        if not self._alone:
            self._flags.fill_(flags)
            dist.all_reduce(self._flags, dist.ReduceOp.BOR, group=self._group)
            flags = int(self._flags)
        self.last = flags
        return flags
