"""An exponential moving average of weights and buffers (torch.optim.swa_utils), stepped by updates."""

from typing import Any

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

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types."""
        return {
            "updates": self.updates,
            "n_averaged": int(self.averaged.n_averaged),
            "module": self.module.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        with torch.no_grad():
            self.averaged.n_averaged.fill_(state["n_averaged"])
        self.module.load_state_dict(state["module"])
