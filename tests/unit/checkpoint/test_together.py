"""All ranks read a checkpoint together before it is used, each a share of it, and decide as one."""

import pytest
import torch
import torch.distributed as dist

from largetrain.checkpoint import verify
from largetrain.checkpoint.manifest import read_manifest
from largetrain.checkpoint.reshard import reshard
from largetrain.checkpoint.resume import decide_start
from largetrain.checkpoint.together import led_by_first
from largetrain.checkpoint.verify import contents_problem_of, problems_in_share, shares
from largetrain.checkpoint.weights import weights_together
from largetrain.errors import CheckpointError, ConfigError
from tests.ranks import run_ranks
from tests.unit.checkpoint.made import WEIGHT, make

FILE = "pieces/rank-00001.safetensors"


def damage(checkpoint, name=FILE):
    content = bytearray((checkpoint / name).read_bytes())
    content[-1] ^= 1
    (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("files", [None, 4])
def test_shares_together_are_every_file_once(tmp_path, ranks, files):
    checkpoint = make(tmp_path, 1, ranks=3)
    if files is not None:
        reshard(checkpoint, tmp_path / "resharded", files)
        checkpoint = tmp_path / "resharded"
    manifest = read_manifest(checkpoint)
    found = shares(manifest, ranks)
    assert sorted(name for share in found for name in share) == sorted(manifest.files)
    if files is None and ranks == 3:
        for rank, share in enumerate(found):
            assert {f"pieces/rank-0000{rank}.safetensors", f"ranks/rank-0000{rank}.pt"} <= set(share)
    damage(checkpoint)
    problems = [problems_in_share(checkpoint, rank, ranks) for rank in range(ranks)]
    assert [name for share in problems for name in share] == [FILE]
    assert [text for share in problems for text in share.values()] == [contents_problem_of(checkpoint)]


def watched():
    """Names of files that this rank hashes from here on."""
    dist.init_process_group("gloo")
    hashed, real = [], verify._hashed
    verify._hashed = lambda path: (hashed.append(path.name), real(path))[1]
    return hashed


def start(output):
    hashed = watched()
    found = decide_start("name", str(output), "auto", writes=False)
    return found.checkpoint, found.messages, sorted(hashed)


def test_a_run_passes_over_what_any_rank_finds_damaged(tmp_path):
    older, newer = (make(tmp_path / "checkpoints", step, ranks=3) for step in (1, 2))
    damage(newer)
    starts = run_ranks(start, 3, tmp_path)
    for rank, (checkpoint, messages, hashed) in enumerate(starts):
        assert checkpoint == older
        assert messages[0] == f"passed over: {newer / FILE} is not what was written (its SHA-256 differs)"
        own = [f"rank-0000{rank}.pt", f"rank-0000{rank}.safetensors"] * 2  # of both checkpoints, and no others
        assert hashed == sorted([*own, *(["run.json"] * 2 if rank == 0 else [])])


def refused(path):
    dist.init_process_group("gloo")
    with pytest.raises(ConfigError) as caught:
        weights_together(str(path))
    return caught.value.problems, caught.value.on_all_ranks


def test_weights_of_a_damaged_checkpoint_are_refused_on_all_ranks(tmp_path):
    checkpoint = make(tmp_path, 1, ranks=2)
    damage(checkpoint)
    words = f"init_from: {checkpoint / FILE} is not what was written (its SHA-256 differs)."
    assert run_ranks(refused, 2, checkpoint) == [((words,), True)] * 2


def begin_with(paths):
    hashed = watched()
    found = [weights_together(str(path)) for path in paths]
    return [source.read("model/weight").tolist() for source in found], hashed


def test_weights_are_read_once_by_all_together(tmp_path):
    make(tmp_path / "checkpoints", 1, ranks=2)
    torch.save({"weight": WEIGHT}, tmp_path / "weights.pt")  # nothing of ours: every rank reads it
    for rank, (values, hashed) in enumerate(run_ranks(begin_with, 2, [tmp_path, tmp_path / "weights.pt"])):
        assert values == [(WEIGHT + 1).flatten().tolist(), WEIGHT.flatten().tolist()]
        assert sum(name.endswith(".safetensors") for name in hashed) == 1
        assert f"rank-0000{rank}.safetensors" in hashed


def raising(error):
    dist.init_process_group("gloo")

    def action(check):
        raise error

    with pytest.raises(type(error), match="no such thing"):
        led_by_first(action)
    return led_by_first(lambda check: "found")  # all ranks are in step again


@pytest.mark.parametrize("error", [ConfigError("no such thing"), CheckpointError("no such thing")])
def test_what_the_first_rank_raises_all_raise(error):
    assert run_ranks(raising, 2, error) == ["found", "found"]
