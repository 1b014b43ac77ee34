"""Small nets with batch norms of every kind, their data, and a plain single-process loop to compare with."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3
SHAPES = {1: (6,), 2: (3, 6, 6), 3: (2, 4, 4, 4)}  # of one sample, by the dims of its batch norms


class Net(nn.Module):
    """Convolution (or linear layer), batch norm, ReLU, twice, and a linear head."""

    def __init__(self, dims: int = 2, affine: bool = True, momentum: float | None = 0.1, frozen: bool = False):
        super().__init__()
        channels = SHAPES[dims][0]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]

        def layer(inputs: int, outputs: int) -> nn.Module:
            if dims == 1:
                return nn.Linear(inputs, outputs)
            return (nn.Conv2d, nn.Conv3d)[dims - 2](inputs, outputs, 3, padding=1)

        self.first, self.norm_1 = layer(channels, 5), norm(5, affine=affine, momentum=momentum)
        self.second, self.norm_2 = layer(5, 4), norm(4, affine=affine, momentum=momentum)
        self.head = nn.Linear(4, CLASSES)
        if frozen:
            self.first.requires_grad_(False)
            self.norm_1.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_1(self.first(x)))
        x = F.relu(self.norm_2(self.second(x)))
        return self.head(x.flatten(2).mean(-1) if x.dim() > 2 else x)


def make_net(dtype: torch.dtype, **options: Any) -> Net:
    """The same initial weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Net(**options).to(dtype)


def samples(count: int, dtype: torch.dtype, dims: int = 2, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and labels; means and spreads differ from sample to sample, so that local statistics differ."""
    generator = torch.Generator().manual_seed(seed)
    size = (count, *SHAPES[dims])
    one = (count, *(1 for _ in SHAPES[dims]))
    spread = 0.5 + torch.rand(one, generator=generator, dtype=torch.float64)
    shift = torch.randn(one, generator=generator, dtype=torch.float64)
    x = torch.randn(size, generator=generator, dtype=torch.float64) * spread + shift
    return x.to(dtype), torch.randint(CLASSES, (count,), generator=generator)


def share_out(count: int, updates: int, accumulation: int, shares: Sequence[int]) -> list[list[list[int]]]:
    """Sample indices by rank, then by micro-batch; each micro-step takes the next sum(shares) samples."""
    per_step = sum(shares)
    starts = [sum(shares[:rank]) for rank in range(len(shares))]
    return [
        [
            [(step * per_step + start + offset) % count for offset in range(share)]
            for step in range(updates * accumulation)
        ]
        for start, share in zip(starts, shares, strict=True)
    ]


def train_plainly(
    net: nn.Module, optimizer: torch.optim.Optimizer, micro_steps: Sequence[tuple[Tensor, Tensor]], accumulation: int
) -> list[float]:
    """One process, plain batch norm: each micro-step is a forward pass over the samples of all ranks.

    Returns:
        mean loss of each update.
    """
    net.train()
    losses = []
    for start in range(0, len(micro_steps), accumulation):
        chunk = micro_steps[start : start + accumulation]
        count = sum(len(labels) for _, labels in chunk)
        optimizer.zero_grad()
        total = 0.0
        for x, labels in chunk:
            loss = F.cross_entropy(net(x), labels, reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses
