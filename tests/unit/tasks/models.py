"""Models for the tests of image tasks: what they answer is in the image, or held as it is given."""

from typing import Any

import torch
from torch import Tensor, nn


class Echo(nn.Module):
    """Answers its input: the images are the logits."""

    def forward(self, images: Tensor) -> Tensor:
        return images


class Answer(nn.Module):
    """Answers what it was given, whatever it is asked."""

    def __init__(self, answer: Any):
        super().__init__()
        self.answer = answer

    def forward(self, *inputs: Tensor) -> Any:
        return self.answer


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that want a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()
