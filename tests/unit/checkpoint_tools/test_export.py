"""Files for other programs: what they hold, where they may be written, and that they appear whole or not at all."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from largetrain.checkpoint import export as export_module
from largetrain.checkpoint.export import export, parse_size
from largetrain.checkpoint.files import check_room
from largetrain.checkpoint.sources import in_memory, of_names
from largetrain.checkpoint.weights import weights_from
from largetrain.errors import ConfigError
from tests.unit.checkpoint.made import make

TABLE = torch.arange(20.0).view(5, 4)
STATE = {"embedding": TABLE, "norm": torch.full((4,), 1 / 3), "seen": torch.tensor(7), "half": torch.ones(3).half()}


def source(facts=None):
    made = of_names({name: in_memory(tensor) for name, tensor in STATE.items()}, "there", facts)
    made.entries["model/head"] = made.entries["model/embedding"]
    made.shared["tied"] = {"head": "embedding"}
    return made


def test_a_bare_state_dict_has_every_name_and_shares_the_tied_tensor(tmp_path):
    export(source(), tmp_path / "x.pt", "torch")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert state.keys() == {*STATE, "head"} and type(state) is dict
    assert all(torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype for name, tensor in STATE.items())
    assert state["head"].data_ptr() == state["embedding"].data_ptr()
    assert os.path.getsize(tmp_path / "x.pt") < 4000


def test_models_of_torchvision_load_strictly(tmp_path):
    """Through a checkpoint of ours, buffers of batch norm included."""
    from torchvision.models import resnet18

    from largetrain.checkpoint.reshard import write_weights

    model = resnet18(num_classes=3)
    state = model.state_dict()
    write_weights(of_names({name: in_memory(tensor) for name, tensor in state.items()}, "there"), tmp_path / "w", "x")
    export(weights_from(str(tmp_path / "w")), tmp_path / "x.pt", "torch")
    other = resnet18(num_classes=3)
    other.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True), strict=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


def test_safetensors_keep_the_tied_tensor_once(tmp_path):
    written = export(source(), tmp_path / "x.safetensors", "safetensors")
    state = load_file(tmp_path / "x.safetensors")
    assert state.keys() == STATE.keys() and all(torch.equal(state[name], tensor) for name, tensor in STATE.items())
    assert (written.tensors, written.files, written.bytes) == (4, 1, 80 + 16 + 8 + 6)


def test_shards_are_no_larger_than_asked_and_the_index_names_every_tensor(tmp_path):
    written = export(source(), tmp_path / "out", "safetensors", shard_bytes=80)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.bytes and index["weight_map"].keys() == STATE.keys()
    assert written.files == 2 == len(set(index["weight_map"].values()))
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], STATE[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floating_tensors_are_cast_and_no_others(tmp_path, dtype):
    export(source(), tmp_path / "x.pt", "torch", dtype=dtype)
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert state["seen"].dtype == torch.int64
    for name in ("embedding", "norm", "half"):
        assert torch.equal(state[name], STATE[name].to(dtype)) and state[name].dtype == dtype


def test_values_beyond_half_precision_are_refused_and_nothing_is_left(tmp_path):
    big = of_names({"a": in_memory(torch.tensor([1.0, 70000.0]))}, "there")
    with pytest.raises(ConfigError, match=r"a has values beyond torch.float16; use bf16 or fp32"):
        export(big, tmp_path / "x.safetensors", "safetensors", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    nan = of_names({"a": in_memory(torch.tensor([float("nan"), float("inf")]))}, "there")
    export(nan, tmp_path / "x.safetensors", "safetensors", dtype=torch.float16)


@pytest.mark.parametrize(("kind", "name"), [("torch", "x.pt"), ("safetensors", "x.safetensors"), ("safetensors", "x")])
def test_nothing_is_overwritten_without_force(tmp_path, kind, name):
    target = tmp_path / name
    export(source(), target, kind)
    with pytest.raises(ConfigError, match="is there already; name another place, or add --force"):
        export(source(), target, kind)
    export(of_names({"only": in_memory(torch.ones(2))}, "there"), target, kind, force=True)
    assert weights_from(str(target)).keys() == ["model/only"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_force_replaces_nothing_but_exports(tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    with pytest.raises(ConfigError, match="holds other things than this command writes"):
        export(source(), precious, "safetensors", force=True)
    link = tmp_path / "link"
    link.symlink_to(precious)
    with pytest.raises(ConfigError, match="holds other things"):
        export(source(), link, "safetensors", force=True)
    with pytest.raises(ConfigError, match="holds other things"):
        export(source(), precious, "torch", force=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        export(source(), tmp_path / "absent" / "x.pt", "torch")
    assert (precious / "thesis.tex").read_text() == "years"


def test_a_failure_leaves_what_was_there_before(tmp_path, monkeypatch):
    target = tmp_path / "out"
    export(source(), target, "safetensors")
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        export(source(), target, "safetensors", shard_bytes=80, force=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_room_is_asked_for_first(tmp_path):
    check_room(tmp_path / "x", 10, "export")
    with pytest.raises(ConfigError, match=r"needs 1000000.0 TB, and the disk has"):
        check_room(tmp_path / "x", 10**18, "export")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (None, "does not say which model it is of"),
        ({"model": {"name": "resnet18", "args": {}}}, "is of resnet18; --format safetensors or torch writes any model"),
        ({"model": {"target": "mine:Net", "style": None}}, "is of mine:Net"),
        ({"model": {"style": "gpt", "vocab_size": 5, "nonsense": 1}}, "is not one of this version"),
        ({"model": {"style": "gpt", "layers": 1, "hidden": 4, "heads": 1, "vocab_size": 5}}, "lacks "),
    ],
)
def test_only_the_decoder_goes_to_hugging_face(tmp_path, facts, words):
    with pytest.raises(ConfigError) as raised:
        export(source(facts), tmp_path / "out", "hf")
    assert words in str(raised.value) and not (tmp_path / "out").exists()


def test_without_a_moving_average(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no moving average \(ema\)"):
        weights_from(str(make(tmp_path, 3)), "export", ema=True)
    torch.save(STATE, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="is no checkpoint of largetrain, and holds no moving average"):
        weights_from(str(tmp_path / "x.pt"), "export", ema=True)


def test_sizes_as_people_write_them():
    sizes = {"5GB": 5 * 10**9, "200MB": 2 * 10**8, "1GiB": 2**30, "1.5kb": 1500, "77": 77}
    assert {text: parse_size(text) for text in sizes} == sizes
    for wrong in ("", "GB", "-1GB", "5 parsecs", "0"):
        with pytest.raises(ConfigError, match="--max-shard-size"):
            parse_size(wrong)
