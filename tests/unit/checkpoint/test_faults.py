"""Killed at any point of a save or a pruning, ranks leave a checkpoint to go on from."""

import os
import signal
import subprocess
import sys

import pytest

from largetrain.checkpoint.faults import POINTS
from largetrain.checkpoint.folder import find_checkpoint, pointed_at
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.retention import Retention
from tests.ranks import RankFailed, run_ranks
from tests.unit.checkpoint.test_manager import names_in, save_steps

EVERY_RANK = POINTS[: POINTS.index("before-manifest")]
KILLS = [(0, point) for point in POINTS] + [(1, point) for point in EVERY_RANK]
PUBLISHED = POINTS[POINTS.index("after-rename") :]


@pytest.mark.parametrize(("rank", "point"), KILLS)
def test_a_kill_leaves_a_checkpoint_to_go_on_from(tmp_path, rank, point):
    """The second of two saves is killed; with one kept, the first would be pruned after it."""
    folder = tmp_path / "checkpoints"
    killed = "1" if point == "mid-prune" else "2"  # the first save prunes nothing
    with pytest.raises((RankFailed, RuntimeError)):
        run_ranks(save_steps, 2, folder, [1, 2], Retention(1), env={"LARGETRAIN_TEST_KILL": f"{rank}:{point}:{killed}"})
    found, passed_over = find_checkpoint("auto", tmp_path)
    assert found == folder / ("step-00000002" if point in PUBLISHED else "step-00000001") and passed_over == []
    assert open_checkpoint(found).read("model/a").tolist() == [float(found.name[5:])] * 10
    assert pointed_at(folder / "latest") is not None
    run_ranks(save_steps, 2, folder, [3], Retention(1))
    assert names_in(folder) == ["latest", "step-00000003"]


def test_without_the_variable_nothing_is_killed_and_with_it_only_that_rank():
    code = "from largetrain.checkpoint.faults import fault; [fault('mid-pieces') for _ in range(2)]; print('alive')"
    for wanted, alive in (("", True), ("1:mid-pieces", True), ("0:before-own", True), ("0:mid-pieces:3", True),
                          ("0:mid-pieces", False), ("0:mid-pieces:2", False)):  # fmt: skip
        environment = {**os.environ, "RANK": "0", "LARGETRAIN_TEST_KILL": wanted}
        ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, env=environment)
        assert (ended.returncode, ended.stdout) == ((0, b"alive\n") if alive else (-signal.SIGKILL, b""))
