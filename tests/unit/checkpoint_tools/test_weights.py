"""`init_from`: every source of weights, and the strict report on how they fit (case 64)."""

import json

import pytest
import torch
from safetensors.torch import save_file

from largetrain.checkpoint.export import export
from largetrain.checkpoint.sources import MODEL, in_memory, is_plain_name, of_names
from largetrain.checkpoint.weights import match_report, weights_from
from largetrain.checkpoint.writer import point, write_best
from largetrain.errors import ConfigError
from tests.unit.checkpoint.made import WEIGHT, make

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2), "steps": torch.tensor(3)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in STATE.items()}


def assert_holds_state(source):
    assert source.keys() == sorted(MODEL + name for name in STATE)
    for name, tensor in STATE.items():
        assert source.shape(MODEL + name) == tuple(tensor.shape) and source.dtype(MODEL + name) == tensor.dtype
        assert torch.equal(source.read(MODEL + name), tensor.reshape(-1))
    assert source.read(f"{MODEL}a.weight", 1, 4).tolist() == [1, 2, 3]
    with pytest.raises(KeyError):
        source.read(f"{MODEL}absent")


@pytest.mark.parametrize("wrapper", ["", "model", "state_dict", "module", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_state_dict_under_any_wrapper_and_prefix(tmp_path, wrapper, prefix):
    state = {prefix + name: tensor for name, tensor in STATE.items()}
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "weights.pt")
    source = weights_from(str(tmp_path / "weights.pt"))
    assert_holds_state(source)
    report = match_report(SHAPES, source)
    assert sorted(report.names) == sorted(STATE)
    assert report.lines == [f"loaded 3 of 3 tensors, 9 values, from {tmp_path / 'weights.pt'}"]


def test_an_averaged_model_with_its_counter(tmp_path):
    state = {"n_averaged": torch.tensor(4), **{f"module.{name}": tensor for name, tensor in STATE.items()}}
    torch.save(state, tmp_path / "weights.pth")
    assert_holds_state(weights_from(str(tmp_path / "weights.pth")))


def test_a_part_named_module_is_no_prefix(tmp_path):
    """Only what stands before every name is one."""
    torch.save({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "weights.pt")
    assert weights_from(str(tmp_path / "weights.pt")).keys() == ["model/b", "model/module.a"]


def test_safetensors_as_one_file_as_shards_and_as_their_folder(tmp_path):
    save_file(STATE, tmp_path / "one.safetensors")
    assert_holds_state(weights_from(str(tmp_path / "one.safetensors")))
    (tmp_path / "folder").mkdir()
    save_file(STATE, tmp_path / "folder" / "any.safetensors")
    assert_holds_state(weights_from(str(tmp_path / "folder")))
    state = {name: in_memory(tensor) for name, tensor in STATE.items()}
    export(of_names(state, "here"), tmp_path / "shards", "safetensors", shard_bytes=20)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 2
    assert_holds_state(weights_from(str(tmp_path / "shards")))
    assert_holds_state(weights_from(str(tmp_path / "shards" / "model.safetensors.index.json")))


def test_a_run_a_pointer_and_a_checkpoint_of_ours(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    first, second = make(folder, 5, ranks=3), make(folder, 10, ranks=2)
    write_best(first, {})
    point(folder / "latest", second)
    for path, step in (
        (tmp_path / "run", 10),
        (folder, 10),
        (first, 5),
        (tmp_path / "run" / "best", 5),
        (folder / "best", 5),
        (folder / "latest", 10),
    ):
        source = weights_from(str(path))
        assert source.keys() == ["model/count", "model/weight"], "no moments"
        assert source.read("model/count").tolist() == [step]
        assert torch.equal(source.read("model/weight"), (WEIGHT + step).flatten())
    (second / "pieces" / "rank-00001.safetensors").unlink()
    assert weights_from(str(tmp_path / "run")).read("model/count").tolist() == [5], "the newest complete one"
    with pytest.raises(ConfigError, match=r"init_from: .*step-00000010/pieces/rank-00001.safetensors is missing"):
        weights_from(str(second))


def test_a_flipped_bit_is_found_unless_contents_are_not_asked_for(tmp_path):
    checkpoint = make(tmp_path, 1)
    path = checkpoint / "pieces" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rank-00000.safetensors is not what was written"):
        weights_from(str(checkpoint))
    assert weights_from(str(checkpoint), contents=False).keys() == ["model/count", "model/weight"]


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda f: f / "nowhere", "there is no "),
        (lambda f: f, "is empty; give a checkpoint or run"),
        (lambda f: _file(f / "notes.txt").parent, "holds nothing that is known"),
        (lambda f: _folder(f / "checkpoints").parent, "holds no complete checkpoint"),
        (lambda f: _folder(f / "step-00000004"), "is not a complete checkpoint"),
        (lambda f: _first_format(f / "step-00000004"), "earlier version of largetrain (format 1"),
        (lambda f: _file(f / "x.safetensors"), "cannot be read as safetensors"),
        (lambda f: _file(f / "x.safetensors.index.json"), "cannot be read"),
        (lambda f: _saved(f / "x.pt", {}), "is empty"),
        (lambda f: _saved(f / "x.pt", [1]), "holds a list"),
        (lambda f: _saved(f / "x.pt", {"a": torch.ones(1), "lr": 3}), "holds more than tensors: lr"),
        (lambda f: f / "best", "there is no "),
    ],
)
def test_what_holds_no_weights(tmp_path, prepare, words):
    with pytest.raises(ConfigError) as raised:
        weights_from(str(prepare(tmp_path)))
    assert words in str(raised.value) and all(line.startswith("init_from: ") for line in raised.value.problems)


def _file(path, content="nothing"):
    path.write_text(content)
    return path


def _folder(path):
    path.mkdir()
    return path


def _saved(path, content):
    torch.save(content, path)
    return path


def _first_format(path):
    """What the first version wrote: a bare table of sizes."""
    _folder(path)
    _file(path / "run.json", "{}")
    _file(path / "manifest.json", json.dumps({"run.json": 2}))
    return path


def test_deepspeeds_files_in_a_first_checkpoint_have_a_way_out(tmp_path):
    path = _first_format(tmp_path / "step-00000004")
    _file(path / "mp_rank_00_model_states.pt")
    with pytest.raises(ConfigError, match=r"format 1.*`largetrain checkpoint import` makes weights of them"):
        weights_from(str(path))


def source_of(state, tied=None):
    source = of_names({name: in_memory(tensor) for name, tensor in state.items()}, "there")
    source.shared["tied"] = tied or {}
    return source


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({**SHAPES, "b.weight": (2,)}, "lacks 1 of the model's tensors: b.weight"),
        (
            {name: shape for name, shape in SHAPES.items() if name != "a.bias"},
            "1 tensors that the model has not: a.bias",
        ),
        ({**SHAPES, "a.bias": (3,)}, "1 tensors of another shape: a.bias ([2] there, [3] here)"),
        ({f"module.{name}": shape for name, shape in SHAPES.items()}, "none of its 3 names is one of the model's"),
    ],
)
def test_any_difference_is_an_error_that_names_it(wanted, words):
    with pytest.raises(ConfigError) as raised:
        match_report(wanted, source_of(STATE))
    assert words in str(raised.value) and str(raised.value).startswith("init_from: there")


def test_every_kind_of_difference_is_told_at_once():
    with pytest.raises(ConfigError) as raised:
        match_report({"a.weight": (2, 3), "a.bias": (5,), "b": (1,)}, source_of(STATE))
    assert len(raised.value.problems) == 3


def test_named_parts_may_differ():
    """`a` is a whole part of a name, and no beginning of one."""
    wanted = {"a.weight": (2, 3), "a.bias": (9,), "a.scale": (1,), "steps": ()}
    state = {**STATE, "a.old": torch.ones(1)}
    report = match_report(wanted, source_of(state), ("a.bias", "a.scale", "a.old"))
    assert report.names == ["a.weight", "steps"]
    assert report.lines[1:] == [
        "kept as initialised (init_missing): a.scale, a.bias",
        "left out, of a part that is replaced (init_missing): a.old",
    ]
    with pytest.raises(ConfigError, match=r"another shape: a.bias"):
        match_report(wanted, source_of(state), ("a.sc", "a.b", "a.old", "a.scale"))


def test_tied_tensors_count_once_whatever_the_source_calls_them():
    table = torch.randn(5, 4)
    wanted = {"embedding": (5, 4)}
    both = source_of({"embedding": table, "head": table.clone()})
    assert match_report(wanted, both).names == ["embedding"]
    with pytest.raises(ConfigError, match="has not: head"):
        match_report(wanted, source_of({"embedding": table, "head": table + 1}))
    # a vector of ones is like any other
    with pytest.raises(ConfigError, match="has not: scale"):
        match_report({"norm": (4,)}, source_of({"norm": torch.ones(4), "scale": torch.ones(4)}))


def test_an_untied_model_begins_with_both_from_a_tied_one(tmp_path):
    table = torch.randn(5, 4)
    export(source_of({"embedding": table}, {"head": "embedding"}), tmp_path / "x.safetensors", "safetensors")
    source = weights_from(str(tmp_path / "x.safetensors"))
    assert match_report({"embedding": (5, 4), "head": (5, 4)}, source).names == ["embedding", "head"]
    assert torch.equal(source.read("model/head"), table.flatten())
    assert match_report({"embedding": (5, 4)}, source).names == ["embedding"]


def test_only_names_beside_an_index_are_followed():
    assert is_plain_name("model-00001-of-00002.safetensors")
    assert not any(map(is_plain_name, ("", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0b")))
