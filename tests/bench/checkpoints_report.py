"""What the comparison of checkpoints measures, by name, and its medians and paired ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tests.bench.report import MIB, goal_line

OURS, OURS_FIRST = "largetrain, async", "largetrain, async, first save"
OURS_SYNC, OURS_SYNC_FIRST = "largetrain, sync", "largetrain, sync, first save"
PLAIN, PLAIN_DIRECT = "plain write + fsync", "plain write + fsync, O_DIRECT"
DEEPSPEED, DEEPSPEED_SYNC = "DeepSpeed save_checkpoint", "DeepSpeed, fsync afterwards"
DCP, DCP_ASYNC, DCP_KEPT = "DCP save", "DCP async_save", "DCP async_save, memory kept"
READ_VERIFIED, READ, RESTORE = "largetrain, verify + read", "largetrain, read", "largetrain, verify + into engine"
PLAIN_READ, DEEPSPEED_LOAD, DCP_LOAD = "plain read", "DeepSpeed load_checkpoint", "DCP load"
SAVES = (OURS, OURS_SYNC_FIRST, OURS_SYNC, PLAIN, PLAIN_DIRECT, DEEPSPEED, DCP, DCP_ASYNC, DCP_KEPT)
LOADS = (READ_VERIFIED, READ, RESTORE, PLAIN_READ, DEEPSPEED_LOAD, DCP_LOAD)
HEADLINES = (OURS_SYNC, PLAIN, DEEPSPEED, DCP, READ_VERIFIED, PLAIN_READ)
Rounds = Sequence[Mapping[str, float]]
"""Seconds by name, of each round."""


def pause(name: str) -> str:
    """How long training waits for a save in the background."""
    return f"{name}: pause"


def lost(name: str) -> str:
    """How much later a series of updates ends that has a save among them."""
    return f"{name}: lost"


@dataclass(frozen=True)
class Ratio:
    """One line: seconds of `upper` over those of `lower`; sums where they are tuples, a name after "-" subtracted."""

    words: str
    upper: str | tuple[str, ...]
    lower: str | tuple[str, ...]
    goal: str | None = None
    """Key of report.GOALS."""

    def of(self, rounds: Rounds) -> list[float]:
        return [_sum(one, self.upper) / _sum(one, self.lower) for one in rounds]


def _sum(one: Mapping[str, float], wanted: str | tuple[str, ...]) -> float:
    names = (wanted,) if isinstance(wanted, str) else wanted
    return sum(-one[name[1:]] if name.startswith("-") else one[name] for name in names)


# of the same bytes, speed is the inverse of time
RATIOS = (
    Ratio("pause of a save, async / sync", pause(OURS), OURS_SYNC, "pause"),
    Ratio("the same of the first save", pause(OURS_FIRST), OURS_SYNC_FIRST, "pause"),
    Ratio("time taken from updates by an async save / sync", lost(OURS), OURS_SYNC),
    Ratio("speed of a save, ours / plain write + fsync", PLAIN, OURS_SYNC, "write"),
    Ratio("the same, async until published", PLAIN, OURS, "write"),
    Ratio("the same without the copy that training waits for", PLAIN, (OURS, f"-{pause(OURS)}")),
    Ratio("speed of a save, ours / plain past the page cache", PLAIN_DIRECT, OURS_SYNC),
    Ratio("speed of a load, verified, ours / plain read", PLAIN_READ, READ_VERIFIED, "load"),
    Ratio("speed of a load, not verified, ours / plain read", PLAIN_READ, READ),
    Ratio("pause, ours / DCP async_save", pause(OURS), pause(DCP_ASYNC)),
    Ratio("pause, ours / DCP async_save, memory kept", pause(OURS), pause(DCP_KEPT)),
    Ratio("pause, ours / DeepSpeed save_checkpoint", pause(OURS), DEEPSPEED),
    Ratio("time taken from updates, ours / DCP async_save, memory kept", lost(OURS), lost(DCP_KEPT)),
    Ratio("time of a save, ours / DCP", OURS_SYNC, DCP),
    Ratio("time of a save, ours / DeepSpeed, nothing synced", OURS_SYNC, DEEPSPEED),
    Ratio("time of a save, ours / DeepSpeed and fsync", OURS_SYNC, (DEEPSPEED, DEEPSPEED_SYNC)),
    Ratio("time of a load into the engine, ours / DeepSpeed", RESTORE, DEEPSPEED_LOAD),
    Ratio("time of a load, verified, ours / DCP, not verified", READ_VERIFIED, DCP_LOAD),
)


def lines(rounds: Rounds, sizes: Mapping[str, int]) -> list[str]:
    """Medians, then the ratios of the rounds with their range, each beside its goal if it has one.

    Args:
        rounds: as the ranks measured them.
        sizes: bytes that a program wrote, by the first word of its names; plain files have as many as ours.
    """
    text = ["medians of the rounds", f"{'':44}{'MiB':>9}{'pause ms':>9}{'lost ms':>9}{'total s':>9}{'MiB/s':>9}"]
    for name in (*SAVES, *LOADS):
        total = median(one[name] for one in rounds)
        mib = sizes.get(name.replace(",", "").split()[0], sizes["largetrain"]) / MIB
        waits = "".join(_milliseconds(rounds, of(name)) for of in (pause, lost))
        text.append(f"{name:44}{mib:9.0f}{waits}{total:9.2f}{mib / total:9.0f}")
    synced = median(one[DEEPSPEED_SYNC] for one in rounds)
    text += [f"{DEEPSPEED_SYNC:44}{'':27}{synced:9.2f}", ""]
    text.append("ratios: median of the rounds' (lowest .. highest)")
    for ratio in RATIOS:
        values = ratio.of(rounds)
        if ratio.goal is not None:
            text.append(goal_line(ratio.goal, ratio.words, values))
        else:
            text.append(f"{ratio.words:60}{median(values):6.2f} ({min(values):.2f} .. {max(values):.2f})")
    return text


def _milliseconds(rounds: Rounds, name: str) -> str:
    found = [one[name] for one in rounds if name in one]
    return f"{median(found) * 1e3:9.0f}" if found else " " * 9
