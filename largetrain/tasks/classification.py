"""Image classification: cross-entropy per image, top-1 and top-5 in percent."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from largetrain.errors import ConfigError
from largetrain.tasks.base import Batch
from largetrain.tasks.vision import IGNORED, images_for, logits_of

# Weights of auxiliary heads: Szegedy et al. 2014 (GoogLeNet) give 0.3, torchvision trains Inception v3 with 0.4.
AUXILIARY_WEIGHTS = {"aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}
TOP = 5


class Classification:
    """Single-label classification on batches of `images`, `labels` and, with mixup or cutmix, soft `targets`.

    Args:
        num_classes: classes of the data; labels are in [0, num_classes), or -100: not a sample.
        label_smoothing: share of the target that is spread over all classes, in training alone.
    """

    unit = "images"

    def __init__(self, num_classes: int, label_smoothing: float = 0.0):
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing

    def weight(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy summed over the images, with those of the auxiliary heads by their weights."""
        output = model(images_for(model, batch))
        loss = self._head_loss(output, batch)
        for name, share in AUXILIARY_WEIGHTS.items():
            auxiliary = getattr(output, name, None)
            if auxiliary is not None:
                loss = loss + share * self._head_loss(auxiliary, batch)
        return loss

    def _head_loss(self, output: Any, batch: Batch) -> Tensor:
        logits, labels = logits_of(output, self.num_classes, dim=2), batch["labels"]
        targets = batch.get("targets")
        if targets is None:
            return cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        if targets.shape != logits.shape:
            raise ConfigError(
                f"model.num_classes: mixup and cutmix mix {targets.shape[1]} classes, but the model has "
                f"{logits.shape[1]} outputs. Leave model.num_classes at auto."
            )
        losses = cross_entropy(logits, targets.to(logits.dtype), reduction="none", label_smoothing=self.label_smoothing)
        return losses.masked_fill(labels == IGNORED, 0.0).sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss without label smoothing (float64) and counts of images and of correct predictions (int64)."""
        logits, labels = logits_of(model(images_for(model, batch)), self.num_classes, dim=2), batch["labels"]
        top = logits.topk(min(TOP, logits.shape[1]), dim=1)
        hits = top.indices == labels[:, None]
        # NaN is the largest value to topk; a row that holds one predicts nothing
        hits &= ~top.values[:, :1].isnan()
        return {
            "loss_sum": cross_entropy(logits, labels, reduction="none").double().sum(),
            "samples": (labels != IGNORED).sum(),
            "top1": hits[:, 0].sum(),
            "top5": hits.sum(),
        }

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean loss (nats per image), top1 and, for more than 5 classes, top5 in percent (0..100), samples."""
        samples = int(sums["samples"])
        figures = {
            "loss": float(sums["loss_sum"]) / max(samples, 1),
            "top1": 100 * int(sums["top1"]) / max(samples, 1),
        }
        if self.num_classes > TOP:
            figures["top5"] = 100 * int(sums["top5"]) / max(samples, 1)
        return {**figures, "samples": float(samples)}

    def figures(self) -> tuple[str, ...]:
        """Names of `metrics`."""
        return ("loss", "top1", *(["top5"] if self.num_classes > TOP else []), "samples")

    def preview(self, model: nn.Module, batch: Batch) -> None:
        """None: there is no picture of a class."""
