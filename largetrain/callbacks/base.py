"""The callback protocol: everything periodic hangs on these moments, on every rank."""

from dataclasses import dataclass

from torch import Tensor

from largetrain.engine.base import StepResult


@dataclass(frozen=True)
class Moment:
    """What a callback is told after an update."""

    step: int
    """Updates done."""
    total_steps: int
    consumed_samples: int
    skipped: int
    """Skipped updates so far."""
    skipped_in_a_row: int
    step_s: float
    """Wall-clock seconds of this update, waiting for data included."""
    data_s: float
    """Of these, seconds spent waiting for data."""
    result: StepResult

    @property
    def last(self) -> bool:
        """Whether this was the final update of the run."""
        return self.step >= self.total_steps


class Callback:
    """Does nothing; subclasses override the moments that they need. Collectives are allowed: all ranks call."""

    def on_start(self, step: int) -> None:
        """Before the first update; `step` updates are done already (a resumed run)."""

    def on_step(self, moment: Moment) -> None:
        """After every update."""

    def on_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """After an evaluation; figures are equal on all ranks."""

    def on_picture(self, step: int, picture: Tensor) -> None:
        """After an evaluation whose task draws one: this rank's predictions beside the truth, uint8 [3, H, W]."""

    def on_end(self, step: int) -> None:
        """After the last update."""

    def on_failure(self, step: int) -> None:
        """The run ends early with an exception, perhaps on this rank alone: no collectives."""
