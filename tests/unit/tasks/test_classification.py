"""Classification: losses against torch's own mean, hits counted by hand."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torchvision.models import GoogLeNetOutputs, InceptionOutputs

from largetrain.errors import ConfigError
from largetrain.tasks.classification import Classification
from tests.unit.tasks.models import Answer, Echo, random_logits

# sums of a dozen fp64 terms of order 1
CLOSE = {"rtol": 1e-14, "atol": 1e-14}


def split(batch, sizes):
    parts = {name: value.split(sizes) for name, value in batch.items()}
    return [{name: values[i] for name, values in parts.items()} for i in range(len(sizes))]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_sums_over_micro_batches_are_the_mean_over_all_of_them(smoothing, soft):
    logits, labels = random_logits(7, 4), torch.tensor([0, 3, -100, 1, 2, -100, 3])
    batch = {"images": logits, "labels": labels}
    valid = labels != -100
    reference_target = labels[valid]
    if soft:
        batch["targets"] = 0.7 * one_hot(labels.clamp(min=0), 4).double() + 0.3 * one_hot(torch.tensor(2), 4)
        reference_target = batch["targets"][valid]
    expected = cross_entropy(logits[valid], reference_target, label_smoothing=smoothing)
    task = Classification(4, smoothing)
    parts = split(batch, [1, 2, 4])
    weight = sum(task.weight(part) for part in parts)
    loss = sum(task.loss_sum(Echo(), part) for part in parts) / weight
    assert weight == 5
    torch.testing.assert_close(loss, expected, **CLOSE)
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, logits)[0], **CLOSE)


def test_soft_targets_by_hand():
    # uniform logits: ln 4 whatever the target; then one logit 1 higher: ln(3 + e) - share of that class
    task = Classification(4, label_smoothing=0.2)
    logits = torch.tensor([[0.0, 0, 0, 0], [1.0, 0, 0, 0]], dtype=torch.float64)
    targets = torch.tensor([[0.5, 0.5, 0, 0], [0.25, 0.75, 0, 0]])
    batch = {"images": logits, "labels": torch.tensor([0, 1]), "targets": targets}
    share = 0.25 * 0.8 + 0.2 / 4
    expected = torch.tensor(4.0).double().log() + (3 + torch.tensor(1.0).double().exp()).log() - share
    torch.testing.assert_close(task.loss_sum(Echo(), batch), expected, **CLOSE)


@pytest.mark.parametrize("soft", [False, True])
def test_a_batch_without_a_sample_is_zero_on_the_graph(soft):
    logits = random_logits(3, 4)
    batch = {"images": logits, "labels": torch.full((3,), -100)}
    if soft:
        batch["targets"] = torch.full((3, 4), 0.25)
    task = Classification(4, 0.1)
    loss = task.loss_sum(Echo(), batch)
    loss.backward()
    assert loss.item() == 0.0 and task.weight(batch) == 0
    assert torch.equal(logits.grad, torch.zeros(3, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "shares"), [(InceptionOutputs, (1.0, 0.4)), (GoogLeNetOutputs, (1.0, 0.3, 0.3))], ids=["inception", "goog"]
)
def test_auxiliary_heads_add_their_share(kind, shares):
    heads = [random_logits(2, 3, seed=seed) for seed in range(len(shares))]
    labels = torch.tensor([2, 0])
    expected = sum(s * cross_entropy(h, labels, reduction="sum") for s, h in zip(shares, heads, strict=True))
    batch = {"images": torch.zeros(2, 1), "labels": labels}
    torch.testing.assert_close(Classification(3).loss_sum(Answer(kind(*heads)), batch), expected, **CLOSE)


def test_half_logits_are_reduced_in_fp32_and_half_models_get_half_images():
    class Linear(nn.Linear):
        def forward(self, images):
            self.seen = images.dtype
            return super().forward(images)

    batch = {"images": torch.randn(2, 3), "labels": torch.tensor([0, 1])}
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        model = Linear(3, 2).to(dtype)
        loss = Classification(2).loss_sum(model, batch)
        assert model.seen == dtype
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_top1_and_top5_are_counted_and_are_percent():
    logits = torch.arange(7.0).repeat(8, 1)  # best class 6, the best five are 6, 5, 4, 3, 2
    labels = torch.tensor([6, 6, 5, 2, 1, 0, -100, 6])
    logits[7, 0] = float("nan")
    task = Classification(7, label_smoothing=0.5)
    logits_ok = logits[:7]
    sums = task.evaluate(Echo(), {"images": logits, "labels": labels})
    assert {name: sums[name].item() for name in ("samples", "top1", "top5")} == {"samples": 7, "top1": 2, "top5": 4}
    assert sums["loss_sum"].dtype == torch.float64 and sums["top1"].dtype == sums["samples"].dtype == torch.int64
    assert sums["loss_sum"].isnan()
    figures = task.metrics(task.evaluate(Echo(), {"images": logits_ok, "labels": labels[:7]}))
    assert (figures["top1"], figures["top5"], figures["samples"]) == (100 * 2 / 6, 100 * 4 / 6, 6.0)
    # without smoothing; fp32 losses of order 5
    assert figures["loss"] == pytest.approx(cross_entropy(logits_ok[:6], labels[:6]).item(), rel=1e-6)


def test_nan_is_never_a_hit():
    logits = torch.full((3, 6), float("nan"))
    logits[1, 1:] = 0.0
    sums = Classification(6).evaluate(Echo(), {"images": logits, "labels": torch.tensor([0, 0, 5])})
    assert (sums["top1"].item(), sums["top5"].item(), sums["samples"].item()) == (0, 0, 3)


@pytest.mark.parametrize(("classes", "named"), [(2, False), (5, False), (6, True)])
def test_top5_needs_more_than_five_classes(classes, named):
    task = Classification(classes)
    sums = task.evaluate(Echo(), {"images": torch.zeros(1, classes), "labels": torch.tensor([0])})
    assert ("top5" in task.metrics(sums)) is named
    assert task.figures() == tuple(task.metrics(sums))


def test_batches_of_any_size_give_the_same_figures():
    batch = {"images": random_logits(8, 9).detach().float(), "labels": torch.arange(8) % 3}
    task = Classification(9)
    figures = []
    for sizes in ([8], [1] * 8, [3, 5]):
        totals: dict[str, torch.Tensor] = {}
        for part in split(batch, sizes):
            for name, value in task.evaluate(Echo(), part).items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        figures.append(task.metrics(totals))
    # fp64 sums of 8 fp32 losses are exact: 24 bits each, within a few binary orders
    assert figures[0] == figures[1] == figures[2]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"scores": torch.zeros(1, 3)}, "dict"),
        (torch.zeros(1, 2), "2"),
        (torch.zeros(1, 3, 4, 4), "3, 4, 4"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(output, said):
    with pytest.raises(ConfigError, match=rf"model: .*{said}"):
        Classification(3).loss_sum(Answer(output), {"images": torch.zeros(1), "labels": torch.tensor([0])})


def test_outputs_with_a_logits_field_are_read():
    output = namedtuple("output", "logits")(torch.zeros(1, 3))
    sums = Classification(3).evaluate(Answer(output), {"images": torch.zeros(1), "labels": torch.tensor([0])})
    assert sums["samples"].item() == 1


def test_soft_targets_of_another_width_are_refused():
    batch = {"images": torch.zeros(1, 4), "labels": torch.tensor([0]), "targets": torch.full((1, 3), 1 / 3)}
    with pytest.raises(ConfigError, match=r"model.num_classes: .*3 classes.*4 outputs"):
        Classification(3).loss_sum(Echo(), batch)
