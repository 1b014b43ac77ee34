"""Which rank does what on which host, as a table for a person."""

from collections.abc import Sequence

from largetrain.config.layout import Layout, Place

AXES = {"stage": "stages", "data": "data", "sequence": "sequence", "tensor": "tensor"}  # of a Place -> of a Layout
MOST_ROWS = 32


def placement_report(layout: Layout, hosts: Sequence[str]) -> list[str]:
    """The table of ranks, hosts and coordinates, and what of it makes a run slow; empty for plain data parallelism.

    Args:
        hosts: host name of each rank.
    """
    if layout.ranks_per_replica == 1:
        return []
    axes = [axis for axis, degree in AXES.items() if getattr(layout, degree) > 1]
    rows = [_row(rank, hosts[rank], layout.place(rank), axes) for rank in range(layout.world_size)]
    shown = rows if len(rows) <= MOST_ROWS else [*rows[: MOST_ROWS - 2], ["..."] * len(rows[0]), rows[-1]]
    lines = _aligned([["rank", "host", *axes], *shown])
    return [f"layout: {layout.describe()}", *lines, *_far_apart(layout, hosts)]


def _row(rank: int, host: str, place: Place, axes: Sequence[str]) -> list[str]:
    return [str(rank), host, *(str(getattr(place, axis)) for axis in axes)]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _far_apart(layout: Layout, hosts: Sequence[str]) -> list[str]:
    """A note for each axis that talks within every layer and crosses hosts."""
    notes = []
    for axis, key in (("tensor", "tensor_parallel"), ("sequence", "ulysses")):
        apart = [group for group in layout.groups(axis) if len({hosts[rank] for rank in group}) > 1]
        if apart:
            names = ", ".join(sorted({hosts[rank] for rank in apart[0]}))
            notes.append(
                f"note: ranks {apart[0][0]} to {apart[0][-1]} share every layer (parallel.{key}) across hosts {names}, "
                f"which is slow; start ranks per host in multiples of {len(apart[0])}"
            )
    return notes
