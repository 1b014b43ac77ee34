"""Case 82: files whose unpickling would run code: nothing runs, messages name file and way out. And genuine ones."""

import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch

from largetrain.checkpoint.deepspeed_files import deepspeed_folder, deepspeed_weights
from largetrain.checkpoint.importing import import_weights
from largetrain.checkpoint.restricted import STAND_INS, Inert, InertNumber, read_torch_file
from largetrain.checkpoint.weights import weights_from
from largetrain.errors import ConfigError


class Call:
    """Unpickling it calls a function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def hostile(marker):
    """Ways to make a marker file while being unpickled."""
    return {
        "os.system": Call(os.system, f"touch {marker}"),
        "open": Call(open, str(marker), "w"),
        "exec": Call(exec, f"open({str(marker)!r}, 'w')"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
    }


def write(path, content, how):
    if how == "zip":
        torch.save(content, path)
    elif how == "legacy":
        torch.save(content, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(content, protocol=int(how)))


@pytest.mark.parametrize("how", ["zip", "legacy", "2", "4"])
@pytest.mark.parametrize("name", ["os.system", "open", "exec", "getattr"])
def test_a_state_dict_that_would_run_code(tmp_path, name, how):
    marker, path = tmp_path / "marker", tmp_path / "weights.pt"
    write(path, {"model": {"weight": torch.zeros(2), "extra": hostile(marker)[name]}}, how)
    with pytest.raises(ConfigError) as raised:
        weights_from(str(path))
    assert str(path) in str(raised.value) and "nothing of it was run" in str(raised.value)
    assert not marker.exists()


def deepspeed_files(folder, extra=None):
    """A checkpoint of one rank at stage 2, as DeepSpeed writes it."""
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    weight = torch.arange(6.0).view(2, 3)
    model = {
        "module": OrderedDict(weight=weight.half()),
        "buffer_names": [],
        "param_shapes": [OrderedDict(weight=torch.Size([2, 3]))],
        "shared_params": {},
    }
    optimizer = {
        "zero_stage": 2,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [weight.flatten() + 0.25],
        **({"loss_scaler": extra} if extra is not None else {}),
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": optimizer}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


@pytest.mark.parametrize("name", ["os.system", "open", "exec", "getattr"])
def test_a_deepspeed_checkpoint_that_would_run_code(tmp_path, name):
    marker = tmp_path / "marker"
    folder = deepspeed_files(tmp_path / "run" / "global_step1", hostile(marker)[name])
    with pytest.raises(ConfigError) as raised:
        import_weights(str(tmp_path / "run"), tmp_path / "out", "checkpoint import")
    file = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert str(file) in str(raised.value) and "--trust" in str(raised.value)
    assert not marker.exists() and not (tmp_path / "out").exists()
    if name == "open":  # the flag does what it says
        with pytest.raises(ConfigError):
            deepspeed_weights(folder, "import", trust=False)
        assert not marker.exists()
        torch.load(file, weights_only=False)["optimizer_state_dict"]["loss_scaler"].close()
        assert marker.exists()


def test_trust_reads_objects_of_the_authors_program(tmp_path):
    folder = deepspeed_files(tmp_path / "run" / "global_step1", Call(OrderedDict))
    assert deepspeed_weights(folder, "import").read("model/weight").tolist() == [0.25, 1.25, 2.25, 3.25, 4.25, 5.25]
    odd = deepspeed_files(tmp_path / "other" / "global_step1", Call(complex, Call(float, "1.0")))
    with pytest.raises(ConfigError, match=r"float.*--trust"):
        import_weights(str(odd), tmp_path / "out", "import")
    source = import_weights(str(odd), tmp_path / "out", "import", trust=True)
    assert source.read("model/weight")[0] == 0.25
    assert weights_from(str(tmp_path / "out")).read("model/weight").tolist() == source.read("model/weight").tolist()
    with pytest.raises(ConfigError, match="--trust: is for checkpoints of DeepSpeed"):
        import_weights(str(tmp_path / "out"), tmp_path / "out2", "import", trust=True)


def test_deepspeeds_own_objects_become_inert_stand_ins(tmp_path):
    """Written by name, as a pickle does, so that DeepSpeed is not imported."""
    path = tmp_path / "file.pt"
    torch.save({"scaler": "PLACE", "stage": "OTHER", "weight": torch.ones(2)}, path)
    scaler = b"cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n)\x81}X\x03\x00\x00\x00argX\x01\x00\x00\x00vsb"
    stage = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\x02\x85R"
    copy = tmp_path / "copy.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            if info.filename.endswith("data.pkl"):
                for place, code in ((b"X\x05\x00\x00\x00PLACE", scaler), (b"X\x05\x00\x00\x00OTHER", stage)):
                    assert content.count(place) == 1
                    content = content.replace(place, code)
            target.writestr(info, content)
    held = read_torch_file(copy, "import", stand_ins=True)
    assert type(held["scaler"]) is Inert and held["scaler"].state == {"arg": "v"}
    assert type(held["stage"]) is InertNumber and held["stage"] == 2 and held["weight"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="DynamicLossScaler"):
        read_torch_file(copy, "import")
    assert all(name.startswith("deepspeed.") for name in STAND_INS)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x80\x02.", bytes(range(256))])
def test_bytes_that_are_no_file_of_torch_save(tmp_path, content):
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="init_from: .*weights.pt"):
        weights_from(str(path))


def test_a_cut_file_names_itself(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ConfigError, match="weights.pt is damaged"):
        weights_from(str(path))


OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def with_optimizer(stage, count, elements):
    """Put another optimizer file in the place of the one that is there."""
    state = {"zero_stage": stage, "partition_count": [count]}
    state["single_partition_of_fp32_groups"] = [torch.zeros(elements)]
    return lambda f: torch.save({"optimizer_state_dict": state}, f / OPTIMIZER.format(0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / OPTIMIZER.format(0)).rename(f / OPTIMIZER.format(1)), "lacks the optimizer file of rank 0"),
        (lambda f: (f / "mp_rank_01_model_states.pt").write_bytes(b""), "cut over 2 model-parallel ranks"),
        (lambda f: (f / "layer_00-model_states.pt").write_bytes(b""), "is of a pipeline"),
        (lambda f: (f / "layer_0_expert_0_mp_rank_00_model_states.pt").write_bytes(b""), "has experts"),
        (lambda f: torch.save({"module": {}}, f / "mp_rank_00_model_states.pt"), "holds no param_shapes"),
        (lambda f: torch.save([1], f / "mp_rank_00_model_states.pt"), "holds a list"),
        (with_optimizer(2, 2, 6), "has 1 optimizer files, 2 ranks wrote it"),
        (with_optimizer(2, 1, 5), "holds 5 elements"),
        (with_optimizer(7, 1, 6), "of ZeRO stage 7"),
    ],
)
def test_incomplete_and_other_checkpoints_of_deepspeed(tmp_path, change, words):
    folder = deepspeed_files(tmp_path / "run" / "global_step1")
    change(folder)
    with pytest.raises(ConfigError, match=words):
        deepspeed_weights(folder, "import")


def test_latest_never_leads_out_of_its_folder(tmp_path):
    folder = deepspeed_files(tmp_path / "outside" / "global_step1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("../outside/global_step1")
    assert deepspeed_folder(tmp_path / "run") is None
    assert deepspeed_folder(tmp_path / "outside") == folder == deepspeed_folder(folder)
