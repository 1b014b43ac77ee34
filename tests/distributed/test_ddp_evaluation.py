"""Evaluation counts each sample once: the same figures on any number of ranks, to the last bit."""

import pytest
import torch
from torch import nn

from largetrain.config.schema import ParametersConfig
from largetrain.data.loader import evaluation_batches
from largetrain.engine.ddp import DdpBackend
from largetrain.engine.ema import Ema
from largetrain.optim.groups import parameter_groups
from largetrain.tasks.classification import Classification
from largetrain.tasks.segmentation import Segmentation
from tests.distributed.test_ddp_parity import join
from tests.ranks import run_ranks

MICRO, SIDE = 2, 4
CLASSES = 8  # more than 5, so that there is a top 5
NAMES = ("sky", "road", "tree", "never seen")


class Samples(torch.utils.data.Dataset):
    """Random images with a label each, or with a mask of three classes, a fifth of it not labelled."""

    def __init__(self, count, masks):
        generator = torch.Generator().manual_seed(9)
        self.images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        size = (count, SIDE, SIDE) if masks else (count,)
        self.labels = torch.randint(len(NAMES) - 1 if masks else CLASSES, size, generator=generator)
        if masks:
            self.labels[torch.rand(size, generator=generator) < 0.2] = -100

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index]}


def make_net(masks, seed):
    torch.manual_seed(seed)
    outputs = len(NAMES) if masks else CLASSES
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, outputs, 1))
    with torch.no_grad():
        net[3].bias[-1:] = -100.0 if masks else 0.0  # the last class occurs neither in truth nor in prediction
    return net if masks else nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make_ema(masks):
    """Of another net: its figures differ, and do not depend on training."""

    def make(model):
        ema = Ema(model, 0.5, 1, 0)
        ema.module.load_state_dict(make_net(masks, 2).state_dict())
        return ema

    return make


def figures_of(counts, precision="fp32"):
    """Body of a rank: figures by task and number of samples."""
    device, found = join(), {}
    for masks in (False, True):
        task = Segmentation(NAMES) if masks else Classification(CLASSES)
        net = make_net(masks, 1)
        config = {
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            precision: {"enabled": True},
        }
        groups = parameter_groups(net, ParametersConfig())
        backend = DdpBackend(net, task, config, device, groups, ema=make_ema(masks))
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for count in counts:
            batches = evaluation_batches(Samples(count, masks), MICRO, ranks, rank)
            found[masks, count] = backend.evaluate(batches)
    return found


@pytest.fixture(scope="module")
def by_ranks():
    """The figures of every rank, by the number of ranks."""
    return {ranks: run_ranks(figures_of, ranks, (1, 5), timeout=60) for ranks in (1, 2, 3)}


def reference(masks, count, seed):
    """Figures by counting, without the task: percentages from integers."""
    data, net = Samples(count, masks), make_net(masks, seed).eval()
    with torch.no_grad():
        logits = net(data.images)
    losses = nn.functional.cross_entropy(logits.double(), data.labels, ignore_index=-100, reduction="mean")
    predicted = logits.argmax(1)
    if not masks:
        ranked = logits.argsort(1, descending=True)[:, :5]
        top5 = sum(int(label) in row.tolist() for label, row in zip(data.labels, ranked, strict=True))
        top1 = sum(int(p) == int(label) for p, label in zip(predicted, data.labels, strict=True))
        return {"loss": float(losses), "top1": 100 * top1 / count, "top5": 100 * top5 / count, "samples": count}
    valid = data.labels != -100
    ious = {}
    for index, name in enumerate(NAMES):
        truth, guess = (data.labels == index) & valid, (predicted == index) & valid
        if bool((truth | guess).any()):
            ious[f"iou/{name}"] = 100 * int((truth & guess).sum()) / int((truth | guess).sum())
    return {"loss": float(losses), "miou": sum(ious.values()) / len(ious), **ious, "pixels": int(valid.sum())}


@pytest.mark.parametrize("count", [1, 5])  # one sample: two of three ranks have none
@pytest.mark.parametrize("masks", [False, True])
def test_figures_do_not_depend_on_the_number_of_ranks(by_ranks, masks, count):
    single = by_ranks[1][0][masks, count]
    for ranks, results in by_ranks.items():
        for result in results:
            found = result[masks, count]
            assert found == results[0][masks, count]  # every rank knows them
            assert found.keys() == single.keys()
            for name, value in found.items():
                if name.endswith("loss"):  # fp32 losses of at most 80 values, added in fp64: only their order differs
                    assert value == pytest.approx(single[name], rel=80 * 2.0**-53), (ranks, name)
                else:
                    assert value == single[name], (ranks, name)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("masks", [False, True])
def test_figures_are_those_of_a_plain_count(by_ranks, masks, count):
    """Of the net and of its moving average; the loss to the rounding of an fp32 cross-entropy, a few units of 10."""
    found = by_ranks[3][0][masks, count]
    assert found["samples" if not masks else "pixels"] == reference(masks, count, 1).popitem()[1]
    for prefix, seed in (("", 1), ("ema_", 2)):
        expected = reference(masks, count, seed)
        for name, value in expected.items():
            tolerance = {"rel": 1e-5} if name == "loss" else {"rel": 1e-15}
            assert found[prefix + name] == pytest.approx(value, **tolerance), prefix + name
        assert f"{prefix}iou/never seen" not in found
    if count == 5:
        assert any(found[name] != found[f"ema_{name}"] for name in ("top1", "top5", "miou") if name in found)


def test_half_precision_counts_the_same_on_any_number_of_ranks():
    one, three = (run_ranks(figures_of, ranks, (5,), "bf16", timeout=60)[0] for ranks in (1, 3))
    for key, figures in one.items():
        exact = {name: value for name, value in figures.items() if not name.endswith("loss")}
        assert exact == {name: value for name, value in three[key].items() if not name.endswith("loss")}
