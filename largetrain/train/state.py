"""Where a run stands: the plain numbers that a checkpoint carries beside weights and optimizer."""

import random
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch

NumpyState = tuple[str, np.ndarray, int, int, float]


@dataclass
class TrainState:
    """Counters of a run; equal on all ranks."""

    step: int = 0
    """Optimizer updates done, skipped ones included: the x axis of every log."""
    consumed_samples: int = 0
    """Position in the endless sample order, in samples."""
    skipped: int = 0
    """Updates skipped for non-finite loss or gradients, since the start of the run."""
    skipped_in_a_row: int = 0
    """Of these, the ones since the last applied update."""
    tokens: int = 0
    """Valid targets trained on."""

    best_figure: float | None = None
    """Best value so far of the figure that `checkpoints.best` names."""
    best_step: int = 0
    """Update after which it was reached."""
    best_name: str = ""
    """The figure that it is of."""

    def advance(self, *, applied: bool, samples: int, tokens: int) -> None:
        """Count one update."""
        self.step += 1
        self.consumed_samples += samples
        self.tokens += tokens
        self.skipped += not applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1

    @property
    def best(self) -> dict[str, Any]:
        """What an evaluation changes."""
        return {name: value for name, value in asdict(self).items() if name.startswith("best_")}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def random_state(device: torch.device) -> dict[str, Any]:
    """This rank's random generators, as tensors and plain types that torch.load(weights_only=True) reads."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(NumpyState, np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_rank(seed: int, data_parallel_rank: int, step: int = 0) -> None:
    """Give each data-parallel rank its own dropout stream; initial weights were drawn from the common one.

    Args:
        step: updates done, where a run goes on with another number of ranks.
    """
    mixed = np.random.SeedSequence([seed, data_parallel_rank + 1, *([step] if step else [])])
    first, second, third = (int(word) for word in mixed.generate_state(3))
    torch.manual_seed(first)
    np.random.seed(second)
    random.seed(third)
