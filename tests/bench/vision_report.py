"""Medians and paired ratios of the comparison on images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from tests.bench.launches import Launched
from tests.bench.report import MIB, goal_line


@dataclass(frozen=True)
class StepTimes:
    """One launch: what its updates took after the first ones, which warm up."""

    median_s: float
    """The middle update, what lies between two updates included."""
    mean_s: float
    """The same on average: logging every so many updates counts here."""
    images_per_s: float
    """Of all ranks, from `mean_s`."""
    peak_bytes: int
    first_update_s: float
    """From starting the launcher."""
    total_s: float
    leftovers: int
    """Files left in shared memory."""
    first_loss: float
    """Shows that all programs train the same model: about the logarithm of the classes."""


StepRounds = Sequence[Mapping[str, StepTimes]]
RateRounds = Sequence[Mapping[str, float]]


def step_times(
    report: tuple[list[float], int, float], launched: Launched, images_per_update: int, warm: int
) -> StepTimes:
    """Put together what a program reported and what was seen from outside.

    Args:
        report: times at which updates ended, peak bytes, first loss.
        launched: what was seen from outside.
        images_per_update: over all ranks.
        warm: updates at the beginning that do not count.
    """
    times, peak, loss = report
    steps = [later - earlier for earlier, later in pairwise(times[warm - 1 :])]
    return StepTimes(
        median_s=median(steps),
        mean_s=fmean(steps),
        images_per_s=images_per_update / fmean(steps),
        peak_bytes=peak,
        first_update_s=times[0] - launched.started,
        total_s=launched.seconds,
        leftovers=len(launched.leftovers),
        first_loss=loss,
    )


def paired(rounds: StepRounds, name: str, base: str, of: Callable[[StepTimes], float]) -> list[float]:
    """Ratio name / base within each round that has both."""
    return [of(one[name]) / of(one[base]) for one in rounds if name in one and base in one]


@dataclass(frozen=True)
class Comparison:
    """One line of ratios: `upper` over `lower`, of the middle update."""

    goal: str
    """Key of report.GOALS."""
    upper: str
    lower: str


def step_lines(rounds: StepRounds, comparisons: Sequence[Comparison]) -> list[str]:
    """The report on step times: medians, then ratios with their range, each beside its goal."""
    columns = ["step ms", "mean ms", "images/s", "peak MiB", "first s", "total s", "loss 1"]
    text = ["medians of the rounds", " " * 44 + "".join(f"{column:>9}" for column in columns)]
    for name in dict.fromkeys(name for one in rounds for name in one):
        runs = [one[name] for one in rounds if name in one]
        figures = [
            *(median(run.median_s * 1e3 for run in runs), median(run.mean_s * 1e3 for run in runs)),
            *(median(run.images_per_s for run in runs), median(run.peak_bytes / MIB for run in runs)),
            *(median(run.first_update_s for run in runs), median(run.total_s for run in runs)),
        ]
        loss = median(run.first_loss for run in runs)
        text.append(f"{name:44}" + "".join(f"{figure:9.1f}" for figure in figures) + f"{loss:9.3f}")
    text += ["", "time of an update, upper / lower: median of the rounds' ratios (lowest .. highest)"]
    for one in comparisons:
        for kind, of in (("middle", _middle), ("mean", _mean)):
            if ratios := paired(rounds, one.upper, one.lower, of):
                text.append(goal_line(one.goal, f"{one.upper} / {one.lower}, {kind}", ratios))
    ours = [run for one in rounds for run in one.values()]
    text.append(f"files left in /dev/shm: {sum(run.leftovers for run in ours)}")
    return text


def _middle(run: StepTimes) -> float:
    return run.median_s


def _mean(run: StepTimes) -> float:
    return run.mean_s


def loader_lines(rounds: RateRounds, workers: Sequence[int]) -> list[str]:
    """The report on loaders: images per second, then ours over timm's by number of worker processes."""
    text = ["images/s of the loaders (decode, crop 224, flip, normalise): median of the rounds"]
    for name in dict.fromkeys(name for one in rounds for name in one):
        text.append(f"{name:44}{median(one[name] for one in rounds if name in one):9.0f}")
    for count in workers:
        ours, theirs = loader_name("ours", count), loader_name("timm", count)
        if ratios := [one[ours] / one[theirs] for one in rounds if ours in one and theirs in one]:
            text.append(goal_line("loader", f"{ours} / {theirs}", ratios))
    return text


def loader_name(loader: str, workers: int) -> str:
    """The row of a loader with so many worker processes."""
    return f"{'largetrain' if loader == 'ours' else loader}, {workers} workers"
