"""Tensor-parallel parts: written along one dim, read back whole or in any other parts, by every tool."""

import math
import os
import random

import pytest
import torch

from largetrain.checkpoint import reader as reader_module
from largetrain.checkpoint import regions
from largetrain.checkpoint.diff import compare
from largetrain.checkpoint.export import export
from largetrain.checkpoint.header import read_header
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.reshard import reshard
from largetrain.checkpoint.sources import MODEL, in_memory, of_names
from largetrain.checkpoint.staging import Staging, plan
from largetrain.checkpoint.tools import tensors_of
from largetrain.checkpoint.verify import problems_of
from largetrain.checkpoint.weights import weights_from
from largetrain.errors import CheckpointError
from largetrain.parallel.columns import Columns
from largetrain.parallel.pieces import Piece
from largetrain.parallel.shards import Shard, even_part
from tests.unit.checkpoint.made import make
from tests.unit.checkpoint.test_reader import entry, file_of

KEY = "model/w"
SHAPES = [(7,), (5, 6), (6, 5), (1, 8), (9, 1), (4, 3, 2, 2), (3, 7, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def tensor_of(shape, dtype=torch.float32):
    """Every element another one, as far as the dtype can tell."""
    return torch.arange(math.prod(shape)).reshape(shape).remainder(251).to(dtype)


def part_of(whole, dim, rank, ranks):
    """What a tensor rank holds, and where it lies."""
    start, size = even_part(whole.shape[dim], rank, ranks)
    return whole.narrow(dim, start, size), Shard(tuple(whole.shape), dim, start, size)


def pieces_of(whole, dim, ranks, replicas, key=KEY):
    """By rank: the parts of `ranks` tensor ranks, each cut over replicas as ZeRO does (the last may get nothing)."""
    found = []
    for rank in range(ranks):
        part, shard = part_of(whole, dim, rank, ranks)
        flat = part.reshape(-1)
        share = -(-len(flat) // replicas)
        for replica in range(replicas):
            start = min(replica * share, len(flat))
            values = flat[start : start + share]
            found.append([Piece(key, shard.shape, start, values, shard.columns)])
    return found


def written(folder, pieces):
    return open_checkpoint(make(folder, 1, ranks=len(pieces), pieces=pieces))


def check_reads(reader, whole, draw, key=KEY):
    """The whole, and parts along every dim by every number of ranks, whole and in random ranges."""
    assert torch.equal(reader.read(key), whole.flatten())
    cuts = [(dim, ranks) for dim, size in enumerate(whole.shape) for ranks in range(1, min(size, 4) + 1)]
    for dim, ranks in cuts:
        for rank in range(ranks):
            part, shard = part_of(whole, dim, rank, ranks)
            expected = part.reshape(-1)
            assert torch.equal(reader.read(key, columns=shard.columns), expected), (dim, ranks, rank)
            for _ in range(4):
                start, stop = sorted(draw.choices(range(len(expected) + 1), k=2))
                found = reader.read(key, start, stop, shard.columns)
                assert found.dtype == whole.dtype and torch.equal(found, expected[start:stop]), (dim, rank, start, stop)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("replicas", [1, 3])
def test_parts_along_any_dim_are_read_in_any_others(tmp_path, shape, replicas, monkeypatch):
    draw = random.Random(str((shape, replicas)))
    # from one row at a time to everything at once
    monkeypatch.setattr(regions, "CHUNK_BYTES", draw.choice([16, 64, 1 << 20]))
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", regions.CHUNK_BYTES)
    monkeypatch.setattr(regions, "LARGEST_GAP_BYTES", draw.choice([0, 8, 1 << 20]))
    for dim, size in enumerate(shape):
        for ranks in range(1, min(size, 4) + 1):
            whole = tensor_of(shape, draw.choice(DTYPES))
            reader = written(tmp_path / f"{dim}-{ranks}", pieces_of(whole, dim, ranks, replicas))
            assert reader.shape(KEY) == shape
            check_reads(reader, whole, draw)


def test_ranges_of_everything_and_of_some_columns_may_stand_together(tmp_path):
    whole = tensor_of((6, 8))
    left, right = Columns(8, 0, 3), Columns(8, 3, 8)
    pieces = [
        [Piece(KEY, (6, 8), 0, whole[:2].reshape(-1)), Piece(KEY, (6, 8), 6, whole[2:, :3].reshape(-1), left)],
        [Piece(KEY, (6, 8), 10, whole[2:5, 3:].reshape(-1), right), Piece(KEY, (6, 8), 43, whole[5, 3:])],
    ]
    check_reads(written(tmp_path, pieces), whole, random.Random(0))


def test_a_slice_of_rows_is_written_as_before(tmp_path):
    """So are columns that are all there are: only true columns need a mark, and older checkpoints had none."""
    whole = tensor_of((6, 4))
    _, shard = part_of(whole, 0, 1, 2)
    bare = plan([Piece(KEY, (6, 4), 12, whole[3:].reshape(-1))])
    assert plan([Piece(KEY, (6, 4), 0, whole[3:].reshape(-1), shard.columns)]).header == bare.header
    bare = plan([Piece(KEY, (6, 4), 0, whole.reshape(-1))])
    assert plan([Piece(KEY, (6, 4), 0, whole.reshape(-1), Columns(4, 0, 4))]).header == bare.header
    empty = Piece(KEY, (6, 4), 2, whole.reshape(-1)[:0], Columns(4, 1, 2))
    reader = written(tmp_path, [[empty], *pieces_of(whole, 1, 2, 1)])
    files = sorted((tmp_path / "step-00000001" / "pieces").iterdir())
    assert [piece.name for file in files for piece in read_header(file)] == ["model/w@0[0:2/4]", "model/w@0[2:4/4]"]
    assert torch.equal(reader.read(KEY), whole.flatten())


def grid(*places, shape=(4, 6)):
    """A rank for each (columns, start, stop)."""
    return [
        [Piece(KEY, shape, start, torch.ones(stop - start), Columns(shape[1], *columns) if columns else None)]
        for columns, start, stop in places
    ]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (grid(((0, 3), 0, 12), ((3, 5), 0, 8)), "is missing between"),
        (grid(((0, 3), 0, 12), ((4, 6), 0, 8)), "is missing between"),
        (grid(((0, 3), 0, 12), ((3, 6), 0, 11)), "is missing between"),
        (grid(((0, 3), 0, 12), ((3, 6), 1, 12)), "is missing between"),
        (grid(((0, 3), 0, 12), ((3, 6), 0, 5), ((3, 6), 6, 12)), "is missing between"),
        (grid(((0, 3), 0, 12), ((3, 6), 0, 12), (None, 6, 12)), "is there twice"),
        (grid(((0, 3), 0, 12), ((2, 6), 0, 16)), "is there twice"),
        (grid(((0, 3), 0, 12), ((0, 3), 0, 12), ((3, 6), 0, 12)), "is there twice"),
        (grid(((0, 3), 0, 12), (None, 0, 24)), "is there twice"),
        (grid(((0, 3), 0, 12)), "is missing between"),
        (grid(((0, 3), 0, 12), ((3, 6), 0, 12), (None, 24, 30)), r"rank-0000\d.safetensors does not fit"),
    ],
)
def test_parts_that_are_missing_or_there_twice_are_refused_with_the_file(tmp_path, pieces, words):
    path = make(tmp_path, 1, ranks=len(pieces), pieces=pieces)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert ".safetensors" in str(caught.value) and not caught.value.on_all_ranks


def test_parts_along_different_dims_are_refused(tmp_path):
    pieces = [
        [Piece(KEY, (2, 3, 4), 0, torch.ones(8), Columns(12, 0, 4))],
        [Piece(KEY, (2, 3, 4), 0, torch.ones(12), Columns(4, 0, 2))],
    ]
    with pytest.raises(CheckpointError, match="rank-00001.safetensors and other files disagree on how"):
        written(tmp_path, pieces)


@pytest.mark.parametrize(
    "place",
    ["0[0:2/6]", "0[4:2/4]", "0[2:2/4]", "0[0:4/4]", "0[3:5/4]", "0[0:2/0]", "1[0:2/4]", "0[0:1/2]", "0[0:1/8]"],
)
def test_no_columns_of_a_header_are_trusted(tmp_path, place):
    path = tmp_path / "a.safetensors"
    entries = {"__metadata__": {"shapes": '{"a": [2, 4]}'}, f"a@{place}": entry(shape=(4,), offsets=(0, 16))}
    path.write_bytes(file_of(entries, b"\0" * 16))
    with pytest.raises(
        CheckpointError, match=r"a.safetensors gives 'a@.*' columns that a tensor of shape \[2, 4\] has not"
    ):
        read_header(path)


def counted(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "preadv", lambda *args, real=os.preadv: calls.append(len(args[1][0])) or real(*args))
    return calls


@pytest.mark.parametrize("stored", [1, 2])
def test_rows_that_lie_close_are_read_together(tmp_path, stored, monkeypatch):
    whole = torch.randn(3000, 32)
    reader = written(tmp_path, pieces_of(whole, 1, stored, 1))
    calls = counted(monkeypatch)
    assert torch.equal(reader.read(KEY, columns=Columns(32, 3, 20)).view(3000, 17), whole[:, 3:20])
    assert len(calls) == stored
    calls.clear()
    assert torch.equal(reader.read(KEY), whole.flatten())
    assert len(calls) == stored


def test_rows_that_lie_far_apart_are_read_alone(tmp_path, monkeypatch):
    whole = torch.randn(4, 2 * regions.LARGEST_GAP_BYTES // 4)
    reader = written(tmp_path, pieces_of(whole, 1, 1, 1))
    calls = counted(monkeypatch)
    assert torch.equal(reader.read(KEY, columns=Columns(whole.shape[1], 10, 90)).view(4, 80), whole[:, 10:90])
    assert calls == [320] * 4


def test_every_tool_works_on_parts(tmp_path):
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(6, 8), "a.bias": torch.randn(6), "conv": torch.randn(4, 6, 3, 3)}
    cut = [[], []]
    for name, tensor in weights.items():
        for rank, found in enumerate(pieces_of(tensor, int(tensor.ndim > 1), 2, 1, MODEL + name)):
            cut[rank] += found
    path = make(tmp_path / "parts", 1, ranks=2, pieces=cut)
    reader = open_checkpoint(path)
    plain = [Piece(MODEL + name, tuple(tensor.shape), 0, tensor.reshape(-1)) for name, tensor in weights.items()]
    whole = written(tmp_path / "whole", [plain])
    assert problems_of(path) == []
    assert compare(reader, whole).same_tensors
    shown = {row["key"]: (tuple(row["shape"]), row["bytes"]) for row in tensors_of(path)}
    assert shown == {MODEL + name: (tuple(t.shape), t.nbytes) for name, t in weights.items()}
    reshard(path, tmp_path / "resharded", 3)
    assert compare(open_checkpoint(tmp_path / "resharded"), whole).same_tensors
    export(weights_from(str(path)), tmp_path / "out.pt", "torch")
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    for source in (weights_from(str(path)), of_names({n: in_memory(t) for n, t in weights.items()}, "memory")):
        for name, tensor in weights.items():
            check_reads(source, tensor, random.Random(name), MODEL + name)


def test_staging_takes_columns_from_a_strided_view(tmp_path):
    whole = tensor_of((3, 4))
    planned = plan([Piece(KEY, (3, 4), 1, whole[:, 1:3].reshape(-1)[1:], Columns(4, 1, 3))])
    image = bytes(Staging().fill(planned))[len(planned.header) :]
    assert torch.frombuffer(bytearray(image), dtype=torch.float32).tolist() == [2, 5, 6, 9, 10]
