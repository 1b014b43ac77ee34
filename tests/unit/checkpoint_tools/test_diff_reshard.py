"""Comparing checkpoints bit for bit, and writing one anew over another number of files."""

import json
import shutil

import pytest
import torch

from largetrain.checkpoint import reshard as reshard_module
from largetrain.checkpoint.diff import compare
from largetrain.checkpoint.folder import read_facts
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.reshard import reshard, spread, write_weights
from largetrain.checkpoint.sources import in_memory, of_names
from largetrain.checkpoint.verify import problem_of
from largetrain.checkpoint.weights import weights_from
from largetrain.checkpoint.writer import write_best
from largetrain.errors import CheckpointError, ConfigError
from largetrain.parallel.pieces import Piece
from tests.unit.checkpoint.made import make

NAN, INF = float("nan"), float("inf")


def checkpoint_of(folder, values, **facts):
    """One rank's checkpoint of step 1 with these tensors."""
    pieces = [Piece(key, tuple(tensor.shape), 0, tensor.reshape(-1)) for key, tensor in values.items()]
    return open_checkpoint(make(folder, 1, ranks=1, pieces=[pieces], state=facts))


def changes_between(tmp_path, one, other):
    found = compare(checkpoint_of(tmp_path / "a", {"model/x": one}), checkpoint_of(tmp_path / "b", {"model/x": other}))
    return [(change.key, change.count, change.of, change.largest) for change in found.changed]


def test_the_same_tensors_from_other_numbers_of_ranks_are_the_same(tmp_path):
    first, second = (open_checkpoint(make(tmp_path / str(ranks), 4, ranks=ranks)) for ranks in (1, 3))
    found = compare(first, second)
    assert found.same_tensors and found.compared == 3 and found.facts == {}
    assert found.own == [1, 2], "ranks that only one of them has"


def test_what_differs_is_counted_and_measured(tmp_path):
    one = torch.arange(6.0).view(2, 3)
    other = one.clone()
    other[0, 1], other[1, 2] = 1.5, 4.0
    assert changes_between(tmp_path, one, other) == [("model/x", 2, 6, 1.0)]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, NAN], [1.0, NAN], []),
        ([0.0], [-0.0], [(1, 0.0)]),
        ([1.0], [NAN], [(1, INF)]),
        ([INF], [INF], []),
        ([INF], [-INF], [(1, INF)]),
        ([1.0], [1.0 + 2**-23], [(1, 2**-23)]),
    ],
)
def test_bits_decide_also_where_comparisons_do_not(tmp_path, one, other, expected):
    found = changes_between(tmp_path, torch.tensor(one), torch.tensor(other))
    assert [(count, largest) for _, count, _, largest in found] == expected


def test_integers_and_halves_are_compared(tmp_path):
    assert changes_between(tmp_path / "i", torch.tensor([1, 2]), torch.tensor([1, 5])) == [("model/x", 1, 2, 3.0)]
    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert changes_between(tmp_path / "h", half, half + 1) == [("model/x", 2, 2, 1.0)]
    assert changes_between(tmp_path / "b", torch.tensor([True]), torch.tensor([False])) == [("model/x", 1, 1, 1.0)]


def test_missing_and_reshaped_tensors_and_facts(tmp_path):
    first = checkpoint_of(tmp_path / "a", {"model/x": torch.zeros(2), "model/y": torch.zeros(2)}, epoch=1)
    second = checkpoint_of(tmp_path / "b", {"model/x": torch.zeros(2).half(), "model/z": torch.zeros(1)}, epoch=2)
    found = compare(first, second)
    assert not found.same_tensors
    assert found.missing == {"model/y": "B", "model/z": "A"}
    assert found.reshaped == {"model/x": ("float32 [2]", "float16 [2]")}
    assert found.facts == {"state.epoch": (1, 2)}


@pytest.mark.parametrize("files", [1, 2, 5, 100])
def test_a_resharded_checkpoint_is_the_same_to_the_bit(tmp_path, files):
    source = make(tmp_path, 4, ranks=3)
    write_best(source, {"best": 0.5})
    target = tmp_path / "out"
    written = reshard(source, target, files)
    pieces = sorted((target / "pieces").iterdir())
    assert len(pieces) == written <= files and (files > 20 or written == files)
    found = compare(open_checkpoint(source), open_checkpoint(target))
    assert found.same_tensors and found.own == [] and found.facts == {}
    assert problem_of(target, contents=True) is None
    assert open_checkpoint(target).manifest.run_id == "this run" and open_checkpoint(target).world_size == 3
    if files == 1:
        assert open_checkpoint(target).shape("model/weight") == (3, 4)
    assert not list(tmp_path.glob(".*"))


def test_files_are_about_equally_large(tmp_path):
    values = torch.arange(100_000.0)
    source = make(tmp_path, 1, ranks=1, pieces=[[Piece("model/x", (100_000,), 0, values)]])
    reshard(source, tmp_path / "out", 3)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out" / "pieces").iterdir())]
    assert len(sizes) == 3 and max(sizes) - min(sizes) < 200


def test_tensors_without_elements_are_kept(tmp_path):
    source = make(tmp_path, 1, ranks=1, pieces=[[Piece("model/x", (0, 3), 0, torch.zeros(0))]])
    assert spread(open_checkpoint(source), 1) == [[("model/x", 0, 0)]]
    reshard(source, tmp_path / "out", 2)
    assert open_checkpoint(tmp_path / "out").shape("model/x") == (0, 3)


def test_damaged_sources_and_wrong_targets_are_refused(tmp_path):
    source = make(tmp_path, 4)
    with pytest.raises(ConfigError, match="at least one file"):
        reshard(source, tmp_path / "out", 0)
    with pytest.raises(ConfigError, match="is there already"):
        reshard(source, source, 2)
    with pytest.raises(ConfigError, match="is the name of step 5, and this is step 4"):
        reshard(source, tmp_path / "step-00000005", 2)
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="holds other things"):
        reshard(source, tmp_path / "other", 2, force=True)
    path = source / "pieces" / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="rank-00001.safetensors is not what was written"):
        reshard(source, tmp_path / "out", 2)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other", "step-00000004"]


def test_force_replaces_an_earlier_result(tmp_path):
    source = make(tmp_path, 4)
    reshard(source, tmp_path / "out", 4)
    reshard(source, tmp_path / "out", 2, force=True)
    assert len(list((tmp_path / "out" / "pieces").iterdir())) == 2


def test_a_result_that_is_not_the_source_never_appears(tmp_path, monkeypatch):
    source = make(tmp_path, 4)
    right = reshard_module.write_stream

    def wrong(path, header, tensors):
        record = right(path, header, tensors)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return record

    monkeypatch.setattr(reshard_module, "write_stream", wrong)
    with pytest.raises(CheckpointError, match="is not whole"):
        reshard(source, tmp_path / "out", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_weights_become_a_checkpoint_that_holds_nothing_else(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}
    model = {"style": "gpt", "layers": 2}
    source = of_names({name: in_memory(tensor) for name, tensor in state.items()}, "elsewhere", {"model": model})
    write_weights(source, tmp_path / "w", "import")
    assert problem_of(tmp_path / "w", contents=True) is None
    reader = open_checkpoint(tmp_path / "w")
    assert reader.facts["weights_only"] is True and reader.facts["model"] == model and reader.own(0) == {}
    again = weights_from(str(tmp_path / "w"))
    assert again.facts["model"] == model
    assert all(torch.equal(again.entries[f"model/{name}"].whole(), tensor) for name, tensor in state.items())
    assert (tmp_path / "w" / "model.yaml").read_text() == "model:\n  style: gpt\n  layers: 2\n"
    with pytest.raises(ConfigError, match=r"holds weights alone; begin a run with them: init_from="):
        read_facts(tmp_path / "w")
    with pytest.raises(ConfigError, match="has the name of a run's checkpoint"):
        write_weights(source, tmp_path / "step-00000001", "import")
    # a moved one is the same
    shutil.move(tmp_path / "w", tmp_path / "elsewhere")
    assert json.loads((tmp_path / "elsewhere" / "run.json").read_text())["imported_from"] == "elsewhere"
    assert weights_from(str(tmp_path / "elsewhere")).keys() == ["model/a", "model/b"]
