"""Segmentation: losses against torch's own mean, confusion matrix and figures by hand."""

import pytest
import torch
from torch.nn.functional import cross_entropy, interpolate, one_hot

from largetrain.errors import ConfigError
from largetrain.tasks.segmentation import Segmentation, confusion_matrix, palette
from tests.unit.tasks.models import Answer, Echo, random_logits

# sums of some dozen fp64 terms of order 1
CLOSE = {"rtol": 1e-13, "atol": 1e-13}
NAMES = ("sky", "road", "tree")


def random_labels(*shape, classes=3, ignored=0.3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


@pytest.mark.parametrize("class_weights", [None, (0.5, 2.0, 1.0)])
def test_sums_over_micro_batches_are_the_mean_over_all_of_them(class_weights):
    logits, labels = random_logits(4, 3, 5, 6), random_labels(4, 5, 6)
    aux = random_logits(4, 3, 5, 6, seed=2)
    weights = None if class_weights is None else torch.tensor(class_weights).double()
    mean = [cross_entropy(head, labels, weight=weights) for head in (logits, aux)]
    task = Segmentation(NAMES, 0.5, class_weights)
    loss, weight = 0.0, 0.0
    for part in (slice(0, 1), slice(1, 4)):
        batch = {"images": torch.zeros(1), "labels": labels[part]}
        loss = loss + task.loss_sum(Answer({"out": logits[part], "aux": aux[part]}), batch)
        weight += task.weight(batch)
    torch.testing.assert_close(loss / weight, mean[0] + 0.5 * mean[1], **CLOSE)


def test_weight_counts_labelled_pixels_or_their_class_weights():
    batch = {"labels": torch.tensor([[[0, 1, 1, -100, 2, 2]]])}
    assert Segmentation(NAMES).weight(batch) == 5
    assert Segmentation(NAMES, class_weights=(0.5, 2.0, 0.0)).weight(batch) == 4.5


@pytest.mark.parametrize("class_weights", [None, (1.0, 2.0, 3.0)])
def test_a_batch_without_a_label_is_zero_on_the_graph(class_weights):
    logits = random_logits(2, 3, 4, 4)
    batch = {"images": logits, "labels": torch.full((2, 4, 4), -100)}
    task = Segmentation(NAMES, class_weights=class_weights)
    loss = task.loss_sum(Echo(), batch)
    loss.backward()
    assert loss.item() == 0.0 and task.weight(batch) == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_an_auxiliary_head_of_weight_zero_still_gets_a_gradient():
    out, aux = random_logits(1, 3, 2, 2), random_logits(1, 3, 2, 2, seed=1)
    labels = torch.zeros(1, 2, 2, dtype=torch.int64)
    batch = {"images": torch.zeros(1), "labels": labels}
    loss = Segmentation(NAMES, aux_weight=0.0).loss_sum(Answer({"out": out, "aux": aux}), batch)
    loss.backward()
    torch.testing.assert_close(loss, cross_entropy(out, labels, reduction="sum"), **CLOSE)
    assert torch.equal(aux.grad, torch.zeros_like(aux))


def test_small_logits_are_scaled_to_the_labels():
    logits, labels = random_logits(1, 3, 2, 3), random_labels(1, 8, 9)
    scaled = interpolate(logits, size=(8, 9), mode="bilinear", align_corners=False)
    expected = cross_entropy(scaled, labels, reduction="sum")
    torch.testing.assert_close(Segmentation(NAMES).loss_sum(Echo(), {"images": logits, "labels": labels}), expected)


def one_hot_logits(predicted):
    return one_hot(torch.tensor(predicted), 3).movedim(-1, 1).float()


def test_confusion_and_figures_by_hand_with_an_absent_class():
    # truth      0 0 0 1 1 -      prediction 0 0 1 1 0 1; class 2 occurs in neither
    labels = torch.tensor([[[0, 0, 0, 1, 1, -100]]])
    sums = Segmentation(NAMES).evaluate(Echo(), {"images": one_hot_logits([[[0, 0, 1, 1, 0, 1]]]), "labels": labels})
    assert sums["confusion"].tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert sums["confusion"].dtype == torch.int64 and sums["loss_sum"].dtype == torch.float64
    figures = Segmentation(NAMES).metrics(sums)
    assert [name for name in Segmentation(NAMES).figures() if name not in figures] == [f"iou/{NAMES[2]}"]
    loss = figures.pop("loss")
    assert figures == {
        "miou": pytest.approx(100 * (2 / 4 + 1 / 3) / 2, rel=1e-14),
        "pixel_accuracy": 100 * 3 / 5,
        "mean_class_accuracy": pytest.approx(100 * (2 / 3 + 1 / 2) / 2, rel=1e-14),
        "iou/sky": 50.0,
        "iou/road": 100 / 3,
        "pixels": 5.0,
    }
    # three hits lose ln(2 + e) - 1 each, two misses ln(2 + e); fp32
    assert loss == pytest.approx(torch.tensor(2 + 2.718281828459045).log().item() - 3 / 5, rel=1e-6)


def test_a_class_that_is_only_predicted_counts_as_zero():
    labels = torch.tensor([[[0, 0]]])
    figures = Segmentation(NAMES).metrics(
        Segmentation(NAMES).evaluate(Echo(), {"images": one_hot_logits([[[0, 2]]]), "labels": labels})
    )
    assert (figures["miou"], figures["iou/tree"], figures["mean_class_accuracy"]) == (25.0, 0.0, 50.0)
    assert "iou/road" not in figures


def test_nan_and_outputs_beyond_the_classes_predict_nothing():
    logits = torch.zeros(1, 4, 1, 3)
    logits[0, 0, 0, 0], logits[0, 3, 0, 1], logits[0, 0, 0, 2] = float("nan"), 1.0, 1.0
    confusion = confusion_matrix(logits, torch.tensor([[[0, 0, 0]]]), 3)
    assert confusion.tolist() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    figures = Segmentation(NAMES).metrics({"confusion": confusion, "loss_sum": torch.tensor(1.0)})
    assert (figures["miou"], figures["pixel_accuracy"]) == pytest.approx((100 / 3, 100 / 3), rel=1e-14)


def test_figures_do_not_depend_on_the_batches():
    logits, labels = random_logits(5, 3, 4, 4).detach().float(), random_labels(5, 4, 4, classes=2)
    task, figures = Segmentation(NAMES), []
    for sizes in ([5], [1] * 5, [4, 1]):
        totals: dict[str, torch.Tensor] = {}
        for images, truth in zip(logits.split(sizes), labels.split(sizes), strict=True):
            for name, value in task.evaluate(Echo(), {"images": images, "labels": truth}).items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        figures.append(task.metrics(totals))
    assert figures[0] == figures[1] == figures[2]  # fp64 sums of 80 fp32 losses are exact


def test_no_labelled_pixel_at_all_is_zero_and_not_nan():
    labels = torch.full((1, 2, 2), -100)
    figures = Segmentation(NAMES).metrics(
        Segmentation(NAMES).evaluate(Echo(), {"images": torch.zeros(1, 3, 2, 2), "labels": labels})
    )
    assert figures == {"loss": 0.0, "miou": 0.0, "pixel_accuracy": 0.0, "mean_class_accuracy": 0.0, "pixels": 0.0}


@pytest.mark.parametrize("class_weights", [(1.0, 2.0), (0.0, 0.0, 0.0)])
def test_wrong_class_weights_are_refused(class_weights):
    with pytest.raises(ConfigError, match=r"loss.class_weights: .*3 classes"):
        Segmentation(NAMES, class_weights=class_weights)


def test_an_output_without_out_is_refused():
    batch = {"images": torch.zeros(1), "labels": torch.zeros(1, 2, 2, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=r"model: its output is dict .*height, width"):
        Segmentation(NAMES).loss_sum(Answer({"mask": torch.zeros(1)}), batch)


def test_palette_is_that_of_voc():
    colours = palette(21)
    assert colours.dtype == torch.uint8
    # background, aeroplane, bicycle, person, tv monitor; the last row is for ignored pixels
    assert colours[[0, 1, 2, 15, 20, -1]].tolist() == [
        [0, 0, 0],
        [128, 0, 0],
        [0, 128, 0],
        [192, 128, 128],
        [0, 64, 128],
        [255, 255, 255],
    ]


def test_preview_shows_image_truth_and_prediction_side_by_side():
    images = torch.zeros(5, 3, 2, 2)
    images[:, 1] = 1.0  # green, stretched to 0..255; as logits: class 1 everywhere
    labels = torch.tensor([[[0, 1], [2, -100]]]).repeat(5, 1, 1)
    picture = Segmentation(NAMES).preview(Echo(), {"images": images, "labels": labels})
    assert picture.shape == (3, 4 * 2, 3 * 2) and picture.dtype == torch.uint8
    pixels = picture.movedim(0, -1).tolist()
    green, black, red, dark_green, white = [0, 255, 0], [0, 0, 0], [128, 0, 0], [0, 128, 0], [255, 255, 255]
    assert pixels[6] == [green, green, black, red, red, red]
    assert pixels[7] == [green, green, dark_green, white, red, red]
