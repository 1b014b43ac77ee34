"""What the model is decides the backend; contradictions are errors; batch norms are treated as asked or as wanted."""

import json

import pytest
import torch
from torch import nn

from largetrain.compose import model as building
from largetrain.compose.model import choose_backend, make_model, make_task, num_classes, treat_batch_norms
from largetrain.config.load import load
from largetrain.data.build import DataInfo
from largetrain.errors import ConfigError
from largetrain.models.batch_norm import count_layers, freeze_batch_norms
from largetrain.parallel import sync_batch_norm
from largetrain.parallel.axes import Axes
from largetrain.parallel.sync_batch_norm import convert_sync_batch_norm
from largetrain.tasks.classification import Classification
from largetrain.tasks.segmentation import Segmentation

SGD = {"type": "SGD", "params": {"lr": 0.1}}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ranks(monkeypatch):
    """Sets the number of ranks that the code believes in; no group is needed for a decision."""

    def set_ranks(count):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: count)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)

    set_ranks(2)
    return set_ranks


def resolved(*sets, task="classification", ranks=2, **engine):
    usual = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "optimizer": SGD}
    with open("engine.json", "w") as file:
        json.dump({**usual, **engine}, file)
    return load("engine.json", None, [f"task={task}", *sets], world_size=ranks, local_world_size=ranks)


def info(*classes):
    return DataInfo(None, None, 10, 5.0, classes, ())


def batch_norm_net(linear=1):
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 250 * linear)
    )


def share_net(conv, other):
    """`conv` parameters in a convolution and `other` in a linear layer."""
    return nn.Sequential(nn.Conv2d(1, conv, 1, bias=False), nn.Linear(1, other, bias=False))


def vit():
    """A patch embedding and two transformer layers: a few per cent convolution, no batch norm."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


# --- the choice ---


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (batch_norm_net, "ddp"),
        (lambda: batch_norm_net(100), "ddp"),  # one live batch norm is enough, whatever the share
        (lambda: share_net(50, 50), "ddp"),  # exactly half
        (lambda: share_net(49, 51), "deepspeed"),
        (lambda: share_net(51, 49), "ddp"),
        (vit, "deepspeed"),
        (lambda: freeze_batch_norms(batch_norm_net(1)), "deepspeed"),  # frozen, and mostly linear
        (lambda: convert_sync_batch_norm(batch_norm_net(), None), "ddp"),
        (lambda: nn.Linear(2, 2), "deepspeed"),
    ],
)
def test_auto(ranks, make, backend):
    counts = count_layers(make())
    assert choose_backend(resolved(), counts) == (backend, "auto")


@pytest.mark.parametrize("backend", ["ddp", "deepspeed"])
@pytest.mark.parametrize("make", [vit, lambda: share_net(9, 1)])
def test_what_is_asked_for_wins(ranks, make, backend):
    assert choose_backend(resolved(f"backend={backend}"), count_layers(make())) == (backend, "asked for")


BATCH_NORM = (
    r"backend: deepspeed does not keep the running statistics of 1 batch-norm layers equal over ranks nor in fp32\. "
    r"Write backend: ddp \(or auto\), or freeze them \(model.freeze_batch_norm: true\), or write sync_batch_norm: on "
    r"with an engine JSON in fp32\."
)


@pytest.mark.parametrize(
    ("count", "sets", "engine"),
    [
        (2, [], {}),
        (2, ["sync_batch_norm=off"], {}),
        (2, ["sync_batch_norm=on"], {"bf16": {"enabled": True}}),
        (2, ["sync_batch_norm=on"], {"fp16": {"enabled": True}}),
        (1, [], {"fp16": {"enabled": True}}),
    ],
)
def test_live_batch_norms_are_not_let_into_deepspeed(ranks, count, sets, engine):
    ranks(count)
    with pytest.raises(ConfigError, match=BATCH_NORM):
        choose_backend(resolved("backend=deepspeed", *sets, **engine), count_layers(batch_norm_net()))


@pytest.mark.parametrize(("count", "sets"), [(2, ["sync_batch_norm=on"]), (2, ['sync_batch_norm="on"']), (1, [])])
def test_but_synchronised_in_fp32_or_on_one_rank_they_are(ranks, count, sets):
    ranks(count)
    assert choose_backend(resolved("backend=deepspeed", *sets), count_layers(batch_norm_net()))[0] == "deepspeed"
    frozen = count_layers(freeze_batch_norms(batch_norm_net()))
    half = resolved("backend=deepspeed", bf16={"enabled": True})
    assert choose_backend(half, frozen)[0] == "deepspeed"


def test_a_moving_average_needs_ddp(ranks):
    with pytest.raises(ConfigError, match="ema: is kept by backend ddp alone; write backend: ddp, or remove it"):
        resolved("ema.decay=0.9", "backend=deepspeed")
    run = resolved("ema.decay=0.9")
    with pytest.raises(ConfigError, match=r"ema: is kept by backend ddp alone.*deepspeed \(auto: 0 live batch-norm"):
        choose_backend(run, count_layers(vit()))
    assert choose_backend(run, count_layers(batch_norm_net())) == ("ddp", "auto")


@pytest.mark.parametrize("make", [vit, lambda: freeze_batch_norms(batch_norm_net())])
def test_synchronising_what_is_not_there_is_a_mistake(ranks, make):
    with pytest.raises(ConfigError, match="sync_batch_norm: on, but the model has no batch norm that is trained"):
        choose_backend(resolved("sync_batch_norm=on"), count_layers(make()))


@pytest.mark.parametrize("written", ["on", "off", "auto", '"on"', "true"])
def test_sync_batch_norm_as_people_write_it(written):
    """YAML reads on and off as true and false."""
    with open("run.yaml", "w") as file:
        file.write(f"task: classification\nsync_batch_norm: {written}\n")
    run = load(None, "run.yaml").run
    assert run.sync_batch_norm == {"on": True, "off": False, "auto": "auto", '"on"': "on", "true": True}[written]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["sync_batch_norm_ranks=0"], "sync_batch_norm_ranks: must be greater than 0, got 0"),
        (["sync_batch_norm_ranks=nodes"], 'sync_batch_norm_ranks: must be one of "all", "node"; got "nodes"'),
        (["sync_batch_norm_ranks=3"], "sync_batch_norm_ranks: 3 does not divide the 2 ranks"),
        (["sync_batch_norm_ranks=node", "sync_batch_norm=off"], "sync_batch_norm_ranks: has no effect with sync_"),
    ],
)
def test_ranks_that_share_statistics(sets, said):
    with pytest.raises(ConfigError) as caught:
        resolved(*sets)
    assert said in str(caught.value)


def test_a_rank_alone_shares_nothing():
    with pytest.raises(ConfigError, match="sync_batch_norm_ranks: 1 shares nothing; write sync_batch_norm: off"):
        resolved("sync_batch_norm_ranks=1")


@pytest.mark.parametrize("shared", [2, "all", "node"])
def test_numbers_and_names_of_ranks_are_accepted(shared):
    assert resolved(f"sync_batch_norm_ranks={shared}").run.sync_batch_norm_ranks == shared


# --- from the run to the model ---


def test_the_engine_json_is_settled_by_the_choice(ranks):
    """Muon and keys of DeepSpeed's own are found out once the model has decided."""
    target = f"model.target={__name__}:Chosen"
    lines = []
    made, run = make_model(resolved(target, "backend=auto"), info("a", "b"), Axes(), lines.append)
    assert run.backend == "ddp" and made[3].out_features == 2
    assert lines == [
        "backend: ddp (auto: 1 live batch-norm layer, 48 % of 50 parameters in convolutions)",
    ]
    assert sum("ZeRO stage 2" in note and "has no effect" in note for note in run.notes) == 1
    muon = resolved(target, optimizer={"type": "Muon", "params": {"lr": 0.1}})
    with pytest.raises(ConfigError, match="Muon needs backend: deepspeed"):
        make_model(muon, info("a", "b"), Axes(), lines.append)
    _, run = make_model(resolved(f"model.target={__name__}:Linear"), info("a", "b"), Axes(), lines.append)
    assert run.backend == "deepspeed" and not any("has no effect" in note for note in run.notes)


class Chosen(nn.Sequential):
    """One live batch norm; 24 of 50 parameters in its convolution."""

    def __init__(self, num_classes):
        super().__init__(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, num_classes))


class Linear(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(6, num_classes))


def test_weights_come_from_the_seed_alone(ranks):
    def weights(*sets):
        torch.manual_seed(len(sets) + 77)  # whatever was drawn before
        made, _ = make_model(
            resolved(f"model.target={__name__}:Chosen", *sets), info("a", "b"), Axes(), lambda line: None
        )
        return made[0].weight

    assert torch.equal(weights(), weights("name=other"))
    assert not torch.equal(weights(), weights("seed=3"))


@pytest.mark.parametrize(("written", "outputs"), [("auto", 3), (3, 3), (10, 10)])
def test_outputs(written, outputs):
    assert num_classes(resolved(f"model.num_classes={written}"), info("a", "b", "c")) == outputs


def test_outputs_that_nobody_knows_or_that_are_too_few():
    with pytest.raises(ConfigError, match='model.num_classes: "auto" needs data that know their classes'):
        num_classes(resolved(), info())
    assert num_classes(resolved("model.num_classes=4"), info()) == 4
    with pytest.raises(ConfigError, match="model.num_classes: 2 is less than the 3 classes of the data"):
        num_classes(resolved("model.num_classes=2"), info("a", "b", "c"))


def test_tasks_get_the_outputs():
    task = make_task(resolved("loss.label_smoothing=0.1", "model.num_classes=5"), info("a", "b"))
    assert isinstance(task, Classification) and (task.num_classes, task.label_smoothing) == (5, 0.1)
    task = make_task(resolved("model.num_classes=4", task="segmentation"), info("sky", "road"))
    assert isinstance(task, Segmentation) and task.classes == ("sky", "road", "class_2", "class_3")


# --- batch norms ---


def said_of(run, monkeypatch, shape=(3, 8, 8), net=None):
    """Whether the batch norm was converted, and the lines."""
    net = net or batch_norm_net()
    converted, lines = [], []
    monkeypatch.setattr(sync_batch_norm, "convert_sync_batch_norm", lambda model, group: converted.append(group))
    monkeypatch.setattr(building, "batch_norm_group", lambda count, local: ("group", count, local))
    treat_batch_norms(net, run, shape, Axes(), 2, lines.append)
    return converted, lines


@pytest.mark.parametrize(
    ("sets", "task", "synced", "first"),
    [
        ([], "classification", True, "sync_batch_norm: on (auto: 4 images per rank, fewer than 16)"),
        (["train_micro_batch_size_per_gpu=16"], "classification", False, "sync_batch_norm: off (auto: 16 images per"),
        (["train_micro_batch_size_per_gpu=16"], "segmentation", True, "sync_batch_norm: on (auto: dense prediction)"),
        (["sync_batch_norm=off"], "segmentation", False, "sync_batch_norm: off (asked for)"),
        (
            ["sync_batch_norm=on", "train_micro_batch_size_per_gpu=64"],
            "classification",
            True,
            "sync_batch_norm: on (asked for)",
        ),
    ],
)
def test_batch_norms_are_synchronised_as_asked_or_wanted(ranks, monkeypatch, sets, task, synced, first):
    converted, lines = said_of(resolved(*sets, task=task), monkeypatch)
    assert bool(converted) == synced
    assert lines[0].startswith(first)
    assert any(line.startswith("batch norm: 1 trained layer") for line in lines)
    assert any("of each rank alone" in line or "synchronised over 2 ranks" in line for line in lines)
    assert any("drift apart" in line for line in lines) == (not synced)


def test_groups_of_ranks_reach_the_conversion(ranks, monkeypatch):
    converted, _ = said_of(resolved("sync_batch_norm_ranks=node"), monkeypatch)
    assert converted == [("group", "node", 2)]


def test_one_rank_needs_no_synchronisation_and_models_without_batch_norm_no_line(ranks, monkeypatch):
    ranks(1)
    converted, lines = said_of(resolved(ranks=1), monkeypatch)
    assert converted == [] and lines[0] == "sync_batch_norm: off (auto: one rank)"
    converted, lines = said_of(resolved("sync_batch_norm=on", ranks=1), monkeypatch)
    assert converted == [] and lines[0] == "sync_batch_norm: on (asked for)"
    assert said_of(resolved(ranks=1), monkeypatch, net=vit()) == ([], [])
    assert said_of(resolved(ranks=1), monkeypatch, net=freeze_batch_norms(batch_norm_net())) == ([], [])
