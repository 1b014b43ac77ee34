"""An exponential moving average of weights and buffers (torch.optim.swa_utils), stepped by updates."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Ema:
    """Averages a model's weights and floating buffers after applied updates.

    Args:
        model: copied here, so before it is wrapped or compiled.
        decay: share of the average that each step keeps.
        every_steps: updates between steps of the average.
        warmup_steps: during the first so many updates the average is a copy of the weights.
    """

    def __init__(self, model: nn.Module, decay: float, every_steps: int, warmup_steps: int):
        self.decay, self.every_steps, self.warmup_steps = decay, every_steps, warmup_steps
        # not stored: deepcopy gives the copy its own hooks and buffers, and it never trains
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.averaged.requires_grad_(False).eval()
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        """Take the weights of `model` after an applied update."""
        self.updates += 1
        if self.updates % self.every_steps:
            return
        if self.updates <= self.warmup_steps:
            self.averaged.n_averaged.zero_()  # the next step copies
        self.averaged.update_parameters(model)

    @property
    def module(self) -> nn.Module:
        """The averaged model."""
        module: nn.Module = self.averaged.module
        return module

    def counters(self) -> dict[str, int]:
        """What the average knows beside its tensors."""
        return {"updates": self.updates, "n_averaged": int(self.averaged.n_averaged)}

    def go_to(self, counters: dict[str, int]) -> None:
        """Go on from saved counters; the tensors are the caller's."""
        self.updates = counters["updates"]
        with torch.no_grad():
            self.averaged.n_averaged.fill_(counters["n_averaged"])
