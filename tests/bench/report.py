"""Medians and paired ratios of alternating runs."""

from collections.abc import Callable, Sequence
from statistics import median

from tests.bench.launches import Outcome

OURS = "largetrain"
MIB = 2**20
Rounds = Sequence[dict[str, Outcome]]

GOALS: dict[str, tuple[str, float]] = {
    "tokens/s": ("at least", 1.00),
    "peak memory": ("at most", 1.00),
    "time to first update": ("at most", 0.60),
    "half precision step time": ("at most", 2.50),
    "step rate": ("at least", 1.00),
    "SyncBN": ("at most", 1.10),
    "loader": ("at least", 1.00),
    "pause": ("at most", 0.10),
    "write": ("at least", 0.80),
    "load": ("at least", 0.80),
    "pipeline efficiency": ("at least", 0.90),
}


def paired(rounds: Rounds, name: str, base: str, of: Callable[[Outcome], float]) -> list[float]:
    """Ratio name / base within each round that has both: what slows the machine for a while slows both."""
    return [of(one[name]) / of(one[base]) for one in rounds if name in one and base in one]


def names_of(rounds: Rounds) -> list[str]:
    """Programs in the order in which they ran."""
    return list(dict.fromkeys(name for one in rounds for name in one))


def medians(rounds: Rounds) -> list[str]:
    """One line per program."""
    columns = ["tokens/s", "step ms", "peak MiB", "first s", "total s", "cpu s", "shm MiB", "loss 1"]
    lines = [" " * 34 + "".join(f"{column:>9}" for column in columns)]
    for name in names_of(rounds):
        runs = [one[name] for one in rounds if name in one]

        def mid(of: Callable[[Outcome], float], runs: Sequence[Outcome] = runs) -> float:
            return median(map(of, runs))

        lines.append(
            f"{name:34}{mid(lambda o: o.tokens_per_s):9.0f}{mid(lambda o: o.step_s * 1e3):9.0f}"
            f"{mid(lambda o: o.peak_bytes / MIB):9.0f}{mid(lambda o: o.first_update_s):9.1f}"
            f"{mid(lambda o: o.total_s):9.1f}{mid(lambda o: o.cpu_s):9.1f}{mid(lambda o: o.leftover_bytes / MIB):9.0f}"
            f"{mid(lambda o: o.first_loss):9.3f}"
        )
    return lines


def ratios(rounds: Rounds, rivals: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Figure -> rival -> ratio of largetrain to it in each round."""
    figures: dict[str, Callable[[Outcome], float]] = {
        "tokens/s": lambda o: o.tokens_per_s,
        "peak memory": lambda o: float(o.peak_bytes),
        "time to first update": lambda o: o.first_update_s,
    }
    return {
        figure: {rival: found for rival in rivals if (found := paired(rounds, OURS, rival, of))}
        for figure, of in figures.items()
    }


def half_ratios(rounds: Rounds, halves: Sequence[str]) -> dict[str, list[float]]:
    """Step time of largetrain in each half precision over its fp32 step time."""
    return {name: found for name in halves if (found := paired(rounds, name, OURS, lambda o: o.step_s))}


def lines(rounds: Rounds, rivals: Sequence[str], halves: Sequence[str]) -> list[str]:
    """The report: medians, then ratios with their range, each beside its goal."""
    text = ["medians", *medians(rounds), "", "largetrain / rival: median of the rounds' ratios (lowest .. highest)"]
    for figure, by_rival in ratios(rounds, rivals).items():
        text += [goal_line(figure, f"{figure} / {rival}", values) for rival, values in by_rival.items()]
    text += [
        goal_line("half precision step time", f"step time {n} / fp32", v)
        for n, v in half_ratios(rounds, halves).items()
    ]
    left = sum(one[OURS].leftovers for one in rounds if OURS in one)
    text.append(f"files that largetrain left in /dev/shm: {left}")
    return text


def goal_line(goal: str, label: str, values: Sequence[float]) -> str:
    """A ratio's median over rounds with its range, beside its goal."""
    middle = median(values)
    word, bound = GOALS[goal]
    met = middle >= bound if word == "at least" else middle <= bound
    spread = f"({min(values):.2f} .. {max(values):.2f})"
    return f"{label:60}{middle:6.2f} {spread:16} goal {word} {bound:.2f}: {'met' if met else 'MISSED'}"
