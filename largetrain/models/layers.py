"""Layers of the decoder that draw their own initial weights.

Each module initialises its parameters inside its own constructor and uses them only inside its own forward.
ZeRO-3 relies on both: it shards a module's parameters as soon as its constructor returns (a later `apply(init)`
would meet empty tensors), and gathers them around its forward.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from largetrain.models.loss import linear_cross_entropy


def draw_normal_(weight: Tensor, std: float) -> None:
    """Fill `weight` in place from N(0, std) by torch's current generator, drawn in fp32 and rounded once.

    So a model built in half precision (`zero.Init` does) starts from the rounded weights of the fp32 model.
    """
    with torch.no_grad():
        weight.copy_(weight.to(torch.float32, copy=True).normal_(0.0, std))


class Linear(nn.Linear):
    """A linear layer with weights from N(0, std) and zero biases."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float):
        self.std = std  # read by reset_parameters, which the parent's constructor calls
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weights, zero the biases."""
        draw_normal_(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TokenEmbedding(nn.Embedding):
    """The token table, from N(0, std)."""

    def __init__(self, vocab_size: int, width: int, *, std: float):
        self.std = std
        super().__init__(vocab_size, width)

    def reset_parameters(self) -> None:
        """Draw the table."""
        draw_normal_(self.weight, self.std)


class LearnedPositions(nn.Module):
    """Adds a learned vector to each position; weights from N(0, std)."""

    def __init__(self, seq_len: int, width: int, *, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(seq_len, width))
        draw_normal_(self.weight, std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add positions 0, 1, ...: hidden [batch, seq_len, width], same shape out."""
        return hidden + self.weight[: hidden.shape[1]]


class Head(nn.Module):
    """The output projection, and with labels the loss: bias-free, its own weight or the token embedding's.

    The loss is computed in here, and not by a function that takes the weight, so that ZeRO-3 has the weight gathered
    whenever a chunk of logits is made.
    """

    def __init__(self, vocab_size: int, width: int, *, std: float, chunk_tokens: int, tied: Tensor | None = None):
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.weight: Tensor = nn.Parameter(torch.empty(vocab_size, width)) if tied is None else tied
        if tied is None:
            draw_normal_(self.weight, std)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Give logits [..., vocab] in the dtype of `hidden`, or with labels loss_sum and token_count."""
        if labels is None:
            return F.linear(hidden, self.weight)
        return linear_cross_entropy(hidden, self.weight, labels, self.chunk_tokens)
