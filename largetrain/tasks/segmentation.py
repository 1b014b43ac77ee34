"""Semantic segmentation: cross-entropy per labelled pixel, mean intersection over union from a confusion matrix."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad

from largetrain.errors import ConfigError
from largetrain.tasks.base import Batch
from largetrain.tasks.vision import IGNORED, images_for, logits_of

PREVIEW_SAMPLES = 4


class Segmentation:
    """Semantic segmentation on batches of `images` and `labels` [batch, height, width].

    Args:
        classes: names, in the order of the class indices; labels are indices, or -100: not labelled.
        aux_weight: weight of the auxiliary head's loss.
        class_weights: weight of each class in the loss of training; the sum of losses is divided by that of weights.

    Raises:
        ConfigError: class_weights has not one weight per class, or only zeros.
    """

    unit = "pixels"

    def __init__(self, classes: Sequence[str], aux_weight: float = 0.5, class_weights: Sequence[float] | None = None):
        self.classes = tuple(classes)
        self.aux_weight = aux_weight
        self.class_weights: Tensor | None = None
        if class_weights is not None:
            if len(class_weights) != len(self.classes) or not any(class_weights):
                raise ConfigError(
                    f"loss.class_weights: needs one weight for each of the {len(self.classes)} classes, not all 0; "
                    f"got {list(class_weights)}."
                )
            self.class_weights = torch.tensor(class_weights, dtype=torch.float32)

    def weight(self, batch: Batch) -> float:
        """Labelled pixels, or the sum of their class weights."""
        labels: Tensor = batch["labels"]
        valid = labels != IGNORED
        if self.class_weights is None:
            return int(valid.sum())
        counts = torch.bincount(labels[valid], minlength=len(self.classes))
        return float(counts.double() @ self.class_weights.double())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Weighted cross-entropy summed over the labelled pixels, of the main head and the auxiliary one."""
        output, labels = model(images_for(model, batch)), batch["labels"]
        loss = self._pixel_losses(self._main(output, labels), labels, self.class_weights).sum()
        auxiliary = output.get("aux") if isinstance(output, Mapping) else None
        if auxiliary is not None:  # with weight 0 as well: its parameters get a gradient, as DDP wants
            losses = self._pixel_losses(self._at_size(auxiliary, labels), labels, self.class_weights)
            loss = loss + self.aux_weight * losses.sum()
        return loss

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Unweighted loss of the main head (float64) and the confusion matrix.

        The matrix is int64 [classes, classes + 1]: rows are the truth, columns the prediction, the last one pixels
        whose logits hold a NaN or whose prediction is no class of the data.
        """
        labels = batch["labels"]
        logits = self._main(model(images_for(model, batch)), labels)
        return {
            "loss_sum": self._pixel_losses(logits, labels, None).double().sum(),
            "confusion": confusion_matrix(logits, labels, len(self.classes)),
        }

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean loss (nats per pixel) and, in percent (0..100), mIoU, accuracies and IoU of each class; pixels.

        Classes that occur neither in truth nor in prediction are left out of `miou` and have no `iou/<name>`;
        `mean_class_accuracy` is over the classes that occur in the truth.
        """
        confusion = sums["confusion"]
        hits, truth = confusion.diagonal(), confusion.sum(1)
        predicted = confusion[:, : len(self.classes)].sum(0)
        union = truth + predicted - hits
        pixels = int(truth.sum())
        figures = {
            "loss": float(sums["loss_sum"]) / max(pixels, 1),
            "miou": _mean_percent(hits, union),
            "pixel_accuracy": 100 * int(hits.sum()) / max(pixels, 1),
            "mean_class_accuracy": _mean_percent(hits, truth),
        }
        for name, part, whole in zip(self.classes, hits.tolist(), union.tolist(), strict=True):
            if whole:
                figures[f"iou/{name}"] = 100 * part / whole
        return {**figures, "pixels": float(pixels)}

    def figures(self) -> tuple[str, ...]:
        """Names of `metrics`; an evaluation lacks `iou/<name>` of classes that do not occur in it."""
        ious = [f"iou/{name}" for name in self.classes]
        return ("loss", "miou", "pixel_accuracy", "mean_class_accuracy", *ious, "pixels")

    def preview(self, model: nn.Module, batch: Batch) -> Tensor | None:
        """First samples as rows: image, truth, prediction; uint8 [3, rows x height, 3 x width], on the CPU."""
        first = {name: batch[name][:PREVIEW_SAMPLES] for name in ("images", "labels")}
        labels: Tensor = first["labels"]
        with torch.no_grad():
            predicted = self._main(model(images_for(model, first)), labels).argmax(1)
        colours = palette(int(predicted.max()) + 1 + len(self.classes))
        columns = [_visible(first["images"].float().cpu())]
        for indices in (labels.cpu(), predicted.cpu()):
            columns.append(colours[indices.clamp(min=-1)].movedim(-1, 1))
        return torch.cat([torch.cat(list(column), dim=1) for column in columns], dim=2)

    def _main(self, output: Any, labels: Tensor) -> Tensor:
        return self._at_size(output.get("out", output) if isinstance(output, Mapping) else output, labels)

    def _at_size(self, output: Any, labels: Tensor) -> Tensor:
        logits = logits_of(output, len(self.classes), dim=4)
        if logits.shape[-2:] == labels.shape[-2:]:
            return logits
        return interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)

    def _pixel_losses(self, logits: Tensor, labels: Tensor, class_weights: Tensor | None) -> Tensor:
        # per pixel and then summed: torch's own sum over pixels is not deterministic on CUDA
        if class_weights is not None:
            extra = logits.shape[1] - len(class_weights)
            class_weights = pad(class_weights, (0, extra)).to(logits)
        return cross_entropy(logits, labels, weight=class_weights, reduction="none")


def confusion_matrix(logits: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Pixels of each truth (rows) and prediction (columns), int64 [num_classes, num_classes + 1].

    The last column counts pixels without a prediction: logits with a NaN, or an output beyond the classes.
    """
    best = logits.max(dim=1)
    predicted = best.indices.masked_fill(best.values.isnan(), num_classes).clamp(max=num_classes)
    valid = labels != IGNORED
    cells = labels[valid] * (num_classes + 1) + predicted[valid]
    counts = torch.bincount(cells, minlength=num_classes * (num_classes + 1))
    return counts.view(num_classes, num_classes + 1)


def palette(count: int) -> Tensor:
    """Colours of indices 0.. as in PASCAL VOC, and white in the last row (index -1: ignored); uint8 [count + 1, 3].

    VOC spreads the bits of the index over the channels, lowest bits first to the highest bits of red, green, blue.
    """
    index = torch.arange(count)
    colours = torch.zeros(count + 1, 3, dtype=torch.int64)
    for place in range(8):
        for channel in range(3):
            colours[:count, channel] |= ((index >> (3 * place + channel)) & 1) << (7 - place)
    colours[count] = 255
    return colours.to(torch.uint8)


def _visible(images: Tensor) -> Tensor:
    """Each image stretched from its smallest to its largest value; uint8 of the same shape."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return ((images - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)


def _mean_percent(parts: Tensor, wholes: Tensor) -> float:
    """Mean over the classes whose whole is not empty of part / whole, in percent; 0 without any."""
    occurs = wholes > 0
    shares = parts[occurs].double() / wholes[occurs].double()
    return 100 * float(shares.mean()) if len(shares) else 0.0
