"""Next-token prediction: loss in nats per token, perplexity, bits per byte."""

import math
from collections.abc import Mapping

from torch import Tensor, nn

from largetrain.models.build import loss_from_output
from largetrain.tasks.base import Batch

IGNORED = -100


class LanguageModeling:
    """Causal language modeling on batches of `input_ids` and already shifted `labels`.

    Args:
        chunk_tokens: tokens whose logits are reduced at once, for models that return logits.
        bytes_per_token: UTF-8 bytes behind one validation token, for bits per byte; None when unknown.
    """

    unit = "tokens"

    def __init__(self, chunk_tokens: int = 1024, bytes_per_token: float | None = None):
        self.chunk_tokens = chunk_tokens
        self.bytes_per_token = bytes_per_token

    def weight(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._losses(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        loss_sum, count = self._losses(model, batch)
        return {"loss_sum": loss_sum.double(), "tokens": count.double()}

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        output = model(batch["input_ids"], batch["labels"])
        return loss_from_output(output, batch["labels"], self.chunk_tokens)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean loss (nats per token), perplexity and, when the bytes are known, bits per byte."""
        tokens = float(sums["tokens"])
        loss = float(sums["loss_sum"]) / max(tokens, 1.0)
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
        if self.bytes_per_token is not None:
            figures["bits_per_byte"] = loss / math.log(2.0) / self.bytes_per_token
        return figures

    def figures(self) -> tuple[str, ...]:
        """Names of `metrics`."""
        return ("loss", "perplexity", "tokens", *(["bits_per_byte"] if self.bytes_per_token is not None else []))

    def preview(self, model: nn.Module, batch: Batch) -> None:
        """None: text has no picture."""
