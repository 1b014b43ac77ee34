"""What ranks tell one another while they write in the background, over a process group of their own."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

REPORT_BYTES = 8192
LONGEST_REASON_BYTES = 1000  # JSON may make six of one
PAUSES_S = (0.0005, 0.02)


class Reports:
    """Exchanges small JSON objects between all ranks; made on all ranks together.

    A thread that waited inside a collective could not be told that the process ends, and would be torn down in the
    midst of C++. So it only looks from time to time whether the collective is done.
    """

    def __init__(self, timeout_s: float | None) -> None:
        timeout = timedelta(seconds=timeout_s) if timeout_s is not None else None
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # of all ranks, so that this one is in it
        self.group = group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def exchange(self, report: dict[str, Any], going: Callable[[], None]) -> list[dict[str, Any]]:
        """Give this rank's report and return those of all, in rank order.

        Args:
            going: called again and again while waiting; raises to give up.

        Raises:
            RuntimeError: a rank is gone, or has not come within the timeout.
        """
        content = json.dumps(report, ensure_ascii=False).encode(errors="replace")
        assert len(content) <= REPORT_BYTES, len(content)
        own = torch.frombuffer(bytearray(content.ljust(REPORT_BYTES)), dtype=torch.uint8)
        rows = torch.empty(self.world_size * REPORT_BYTES, dtype=torch.uint8)
        work = dist.all_gather_single(rows, own, group=self.group, async_op=True)
        assert work is not None
        pause = PAUSES_S[0]
        while not work.is_completed():
            going()
            time.sleep(pause)
            pause = min(1.5 * pause, PAUSES_S[1])
        work.wait()
        return [json.loads(row.numpy().tobytes()) for row in rows.view(self.world_size, REPORT_BYTES)]


def shortened(reason: str) -> str:
    """A reason in one line that fits a report."""
    return " ".join(reason.split()).encode(errors="replace")[:LONGEST_REASON_BYTES].decode(errors="ignore")
