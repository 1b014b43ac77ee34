"""Tensors are read back in any ranges, from files that the safetensors library reads as well."""

import itertools
import json
import struct

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from largetrain.checkpoint.header import ALIGNMENT, read_header
from largetrain.checkpoint.reader import MOST_OPEN, open_checkpoint
from largetrain.checkpoint.staging import DTYPES, Staging, plan
from largetrain.checkpoint.verify import problem_of
from largetrain.errors import CheckpointError
from largetrain.parallel.pieces import Piece
from tests.unit.checkpoint.made import MOMENT, WEIGHT, forge, make


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_range_is_put_together_from_the_ranks_files(tmp_path, ranks):
    reader = open_checkpoint(make(tmp_path, 3, ranks=ranks))
    assert reader.keys() == ["model/count", "model/weight", "optimizer/exp_avg/weight"]
    assert (reader.step, reader.world_size, reader.shared) == (3, ranks, {"scale": 8.0})
    assert reader.facts["state"] == {"step": 3}
    for key, whole in (("model/weight", WEIGHT + 3), ("optimizer/exp_avg/weight", MOMENT)):
        assert (reader.shape(key), reader.dtype(key)) == ((3, 4), whole.dtype)
        assert torch.equal(reader.read(key).view(3, 4), whole)
        for start, stop in itertools.combinations_with_replacement(range(13), 2):
            assert torch.equal(reader.read(key, start, stop), whole.flatten()[start:stop])
    assert reader.shape("model/count") == () and reader.read("model/count").tolist() == [3]
    with pytest.raises(KeyError):
        reader.read("model/other")
    assert [reader.own(rank)["random"].tolist() for rank in range(ranks)] == [[rank, 3] for rank in range(ranks)]
    assert reader.own(ranks) == {}


def test_a_rank_without_pieces_has_no_file_of_them(tmp_path):
    path = make(tmp_path, 3, ranks=2, pieces=[[Piece("model/a", (2,), 0, torch.ones(2))], []])
    assert [file.name for file in (path / "pieces").iterdir()] == ["rank-00000.safetensors"]
    assert open_checkpoint(path).world_size == 2


def all_dtypes():
    torch.manual_seed(0)
    bits = torch.randint(0, 2, (7, 3))
    tensors = {f"model/{name}": (bits * 1.5).to(dtype) for dtype, name in DTYPES.items()}
    tensors["model/none"] = torch.zeros(0, 3, dtype=torch.float16)
    tensors["model/nan"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    tensors["model/scalar"] = torch.tensor(5)
    return tensors


def test_the_library_reads_every_dtype_and_shape_to_the_bit(tmp_path):
    tensors = all_dtypes()
    pieces = [Piece(key, tuple(t.shape), 0, t.flatten()) for key, t in tensors.items()]
    path = make(tmp_path, 1, ranks=1, pieces=[pieces])
    loaded = load_file(path / "pieces" / "rank-00000.safetensors")
    reader = open_checkpoint(path)
    assert set(loaded) == set(tensors) == set(reader.keys())
    for key, tensor in tensors.items():
        assert loaded[key].shape == tensor.shape and loaded[key].dtype == tensor.dtype
        for read in (loaded[key].flatten(), reader.read(key)):
            assert torch.equal(read.view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_the_library_finds_parts_with_their_place_and_the_whole_shape(tmp_path):
    path = make(tmp_path, 3, ranks=2)
    with safetensors.safe_open(path / "pieces" / "rank-00001.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["model/weight@6", "optimizer/exp_avg/weight@6"]
        assert json.loads(file.metadata()["shapes"])["model/weight"] == [3, 4]
        assert torch.equal(file.get_tensor("model/weight@6"), (WEIGHT + 3).flatten()[6:])


def test_a_name_that_looks_like_a_part_is_a_name(tmp_path):
    values = torch.tensor([1.0, 2.0])
    pieces = [Piece("model/a@3", (2,), 0, values), Piece("model/@", (1,), 0, values[:1])]
    path = make(tmp_path, 1, ranks=1, pieces=[pieces])
    reader = open_checkpoint(path)
    assert reader.keys() == ["model/@", "model/a@3"] and torch.equal(reader.read("model/a@3"), values)


def test_two_pieces_at_one_place_are_refused_when_they_are_written():
    with pytest.raises(ValueError, match="model/a@1 is there twice"):
        plan([Piece("model/a", (4,), 1, torch.ones(2)), Piece("model/a", (4,), 1, torch.ones(1))])


def test_empty_ranges_leave_no_trace():
    assert plan([Piece("model/a", (4,), 2, torch.ones(0))]).pieces == []


def ranges(*cuts, shape=(10,), dtype=torch.float32, key="model/a"):
    """A rank for each (start, stop) of one tensor."""
    return [[Piece(key, shape, start, torch.ones(stop - start, dtype=dtype))] for start, stop in cuts]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (ranges((0, 4), (5, 10)), r"rank-00001.safetensors does not fit: .*'model/a' is missing between"),
        (ranges((1, 10)), r"rank-00000.safetensors does not fit: .*is missing between"),
        (ranges((0, 4), (3, 10)), r"rank-00001.safetensors does not fit: .*is there twice"),
        (ranges((0, 10), (0, 10)), r"does not fit: .*is there twice"),
        (ranges((0, 4), (4, 9)), r"rank-00001.safetensors and others hold 9 elements of 'model/a', which has 10"),
        (ranges((0, 4)) + ranges((4, 10), shape=(2, 5)), "rank-00001.safetensors and other files disagree on shape"),
        (ranges((0, 4)) + ranges((4, 10), dtype=torch.float16), "rank-00001.safetensors and other files disagree"),
    ],
)
def test_tensors_that_are_not_whole_are_refused_with_the_file(tmp_path, pieces, words):
    path = make(tmp_path, 1, ranks=len(pieces), pieces=pieces)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert not caught.value.on_all_ranks  # so that a rank that finds it alone prints it


def file_of(entries, data=b"", length=None, tail=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data + tail


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "empty": (b"", "ends before its header"),
    "short": (b"\0" * 7, "ends before its header"),
    "longer than the file": (file_of({}, length=100), "ends before its header"),
    "oversized": (file_of({}, length=2**63), "ends before its header"),
    "no JSON": (file_of(b"{]"), "cannot be read"),
    "no object": (file_of([]), "no JSON object"),
    "deep": (file_of(b"[" * 100_000), "nested too deeply"),
    "entry is no object": (file_of({"a": 1}), "says nothing of 'a'"),
    "unknown type": (file_of({"a": entry("F8_E4M3")}, b"\0" * 8), "of a type that no checkpoint has"),
    "type is no text": (file_of({"a": entry([])}, b"\0" * 8), "of a type that no checkpoint has"),
    "beyond the end": (file_of({"a": entry()}, b"\0" * 7), "is where it cannot be"),
    "before the start": (file_of({"a": entry(offsets=(-8, 0))}, b"\0" * 8), "is where it cannot be"),
    "backwards": (file_of({"a": entry(offsets=(8, 0))}, b"\0" * 8), "is where it cannot be"),
    "other size": (file_of({"a": entry(shape=(3,))}, b"\0" * 8), "is where it cannot be"),
    "offsets in words": (file_of({"a": entry(offsets="ab")}, b"\0" * 8), "is where it cannot be"),
    "one offset": (file_of({"a": entry(offsets=(1,))}, b"\0" * 8), "does not say where 'a' is"),
    "negative dim": (file_of({"a": entry(shape=(-2, -1))}, b"\0" * 8), "gives no shape"),
    "true as dim": (file_of({"a": entry(shape=(True, 2))}, b"\0" * 8), "gives no shape"),
    "huge dims": (file_of({"a": entry(shape=(2**40, 2**40))}, b"\0" * 8), "a shape beyond any tensor"),
    "metadata": (file_of({"__metadata__": {"shapes": "[]"}}), "lacks the shapes"),
    "metadata is no object": (file_of({"__metadata__": 3}), "lacks the shapes"),
    "shapes": (file_of({"__metadata__": {"shapes": '{"a": 3}'}}), "gives no shape of 'a'"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_no_header_is_trusted(tmp_path, case):
    content, words = HEADERS[case]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"a.safetensors .*{words}") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_while_it_is_open_is_an_error(tmp_path):
    path = make(tmp_path, 1, ranks=1)
    reader = open_checkpoint(path)
    file = path / "pieces" / "rank-00000.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 40)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors is shorter than it was written"):
        for key in reader.keys():  # noqa: SIM118 (it is no mapping)
            reader.read(key)


def test_more_files_than_may_be_open(tmp_path):
    ranks = MOST_OPEN + 9
    path = make(tmp_path, 1, ranks=ranks, pieces=ranges(*((i, i + 1) for i in range(ranks)), shape=(ranks,)))
    reader = open_checkpoint(path)
    for _ in range(2):
        assert torch.equal(reader.read("model/a"), torch.ones(ranks))
    assert len(reader._open) <= MOST_OPEN


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w')",)


def replace_own(path, value):
    """Put another object where rank 0's own part was, and let the manifest vouch for it."""
    file = path / "ranks" / "rank-00000.pt"
    torch.save(value, file)
    size, digest = file.stat().st_size, __import__("hashlib").sha256(file.read_bytes()).hexdigest()
    forge(path, lambda content: content["files"]["ranks/rank-00000.pt"].update(bytes=size, sha256=digest))
    assert problem_of(path, contents=True) is None


def test_no_code_of_a_ranks_own_file_is_run(tmp_path):
    path = make(tmp_path, 1)
    replace_own(path, {"random": Trap(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match=r"ranks/rank-00000.pt cannot be read \(Weights only load failed"):
        open_checkpoint(path).own(0)
    assert not (tmp_path / "ran").exists()
    replace_own(path, [1])
    with pytest.raises(CheckpointError, match=r"ranks/rank-00000.pt is not what was written"):
        open_checkpoint(path).own(0)


def staged_data(staging, values):
    planned = plan([Piece("a", tuple(values.shape), 0, values)])
    image = bytes(staging.fill(planned))
    assert image.startswith(planned.header) and len(planned.header) % ALIGNMENT == 0
    return image[len(planned.header) :]


def test_staging_memory_is_kept_and_grows(tmp_path):
    staging = Staging()

    def staged(count, value):
        return staged_data(staging, torch.full((count,), float(value)))

    first = staged(1000, 1)
    memory = staging._memory
    assert first == bytes(torch.full((1000,), 1.0).numpy())
    assert staged(500, 2) == bytes(torch.full((500,), 2.0).numpy()) and staging._memory is memory
    assert staged(100_000, 3) == bytes(torch.full((100_000,), 3.0).numpy()) and staging._memory is not memory
    staging.close()
    assert staged(10, 4) == bytes(torch.full((10,), 4.0).numpy())


def test_memory_that_was_reserved_is_what_is_filled(tmp_path):
    staging = Staging()
    staging.reserve(ALIGNMENT + 4000)
    memory = staging._memory
    assert staged_data(staging, torch.full((1000,), 1.0)) == bytes(torch.full((1000,), 1.0).numpy())
    assert staging._memory is memory


def test_what_is_copied_may_be_strided():
    table = torch.arange(12.0).view(3, 4)
    data = staged_data(Staging(), table[:, 1])
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [1, 5, 9]
