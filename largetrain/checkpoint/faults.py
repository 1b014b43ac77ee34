"""Deaths at chosen points of a save, for tests: no effect unless `LARGETRAIN_TEST_KILL` is set.

`LARGETRAIN_TEST_KILL=RANK:POINT[:N]` kills that rank, as `kill -9` does, when it comes to POINT for the Nth time (1).
"""

import os
import signal
from collections import Counter

POINTS = (
    *("before-pieces", "mid-pieces", "before-own", "before-report"),  # every rank
    *("before-manifest", "mid-manifest", "before-rename", "after-rename"),  # rank 0
    *("before-pointer", "before-prune", "mid-prune", "after-prune"),
)

_passed: Counter[str] = Counter()


def fault(point: str) -> None:
    """End this process here if the environment asks for it."""
    wanted = os.environ.get("LARGETRAIN_TEST_KILL")
    if not wanted:
        return
    assert point in POINTS, point
    rank, name, *time = wanted.split(":")
    if name == point and rank == os.environ.get("RANK", "0"):
        _passed[point] += 1
        if _passed[point] == int(time[0] if time else 1):
            os.kill(os.getpid(), signal.SIGKILL)
