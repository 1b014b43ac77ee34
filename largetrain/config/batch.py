"""The batch triple: train_batch_size = micro-batch x accumulation x data-parallel ranks, any two give the third."""

from dataclasses import dataclass

from largetrain.config.document import Document
from largetrain.config.layout import Layout

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples per optimizer update; `global_batch` = micro_batch x gradient_accumulation_steps x data_parallel."""

    world_size: int
    data_parallel: int
    micro_batch: int
    gradient_accumulation_steps: int
    global_batch: int


def resolve_batch(engine: Document, layout: Layout, world_source: str) -> tuple[Batch | None, list[str], list[str]]:
    """Complete the triple; absent and "auto" are the same. Ranks that work on the same samples count once.

    The rule for what is not given: accumulation 1; then, without train_batch_size either, micro-batch 1.

    Returns:
        the batch (None when it does not come out), problems, notes.
    """
    given = {key: engine.get((key,)) for key in (TOTAL, MICRO, ACCUMULATION)}
    total, micro, accumulation = (value if isinstance(value, int) else None for value in given.values())
    shares = layout.data
    ranks = f"{shares} rank{'s' if shares > 1 else ''}"
    if layout.ranks_per_replica > 1:
        ranks = f"{shares} data-parallel {ranks.partition(' ')[2]}"
        world_source = f"{layout.world_size} in all, {layout.ranks_per_replica} for one model; {world_source}"
    triple = _Triple(engine, layout, f"{ranks} ({world_source})")
    notes: list[str] = []
    if accumulation is None and (total is None or micro is None):
        accumulation = 1
        notes.append(f"{ACCUMULATION} = 1 (not given)")
    if total is None:
        if micro is None:
            micro = 1
            notes.append(f"{MICRO} = 1 (neither it nor {TOTAL} is given)")
        assert accumulation is not None
        total = micro * accumulation * shares
        notes.append(f"{TOTAL} = {total} ({micro} per rank x {accumulation} accumulation x {ranks})")
    elif micro is None:
        assert accumulation is not None
        if problem := triple.undivided(total, accumulation, ACCUMULATION, MICRO):
            return None, [problem], []
        micro = total // (accumulation * shares)
        notes.append(f"{MICRO} = {micro} ({total} / ({accumulation} accumulation x {ranks}))")
    elif accumulation is None:
        if problem := triple.undivided(total, micro, MICRO, ACCUMULATION):
            return None, [problem], []
        accumulation = total // (micro * shares)
        notes.append(f"{ACCUMULATION} = {accumulation} ({total} / ({micro} per rank x {ranks}))")
    elif total != micro * accumulation * shares:
        return None, [triple.mismatch(total, micro, accumulation)], []
    return Batch(layout.world_size, shares, micro, accumulation, total), [], notes


@dataclass(frozen=True)
class _Triple:
    """Words for a triple that does not come out."""

    engine: Document
    layout: Layout
    ranks: str

    def undivided(self, total: int, factor: int, factor_key: str, derived: str) -> str | None:
        """The problem when `total` is no multiple of factor x ranks; None when it is."""
        unit = factor * self.layout.data
        if total % unit == 0:
            return None
        text = (
            f"{total} cannot be divided by {factor} ({factor_key}) x {self.ranks} = {unit}, so {derived} cannot be "
            f"derived. Nearest {TOTAL}: {_nearest(total, unit)}{self._other_ranks(total, factor)}."
        )
        return self.engine.problem((TOTAL,), text)

    def mismatch(self, total: int, micro: int, accumulation: int) -> str:
        """The problem of three numbers that disagree, with what would agree."""
        product = micro * accumulation * self.layout.data
        choices = [f"{TOTAL}: {product}"]
        if total % (micro * self.layout.data) == 0:
            choices.append(f"{ACCUMULATION}: {total // (micro * self.layout.data)}")
        if total % (accumulation * self.layout.data) == 0:
            choices.append(f"{MICRO}: {total // (accumulation * self.layout.data)}")
        text = (
            f"{total} is not {micro} ({MICRO}) x {accumulation} ({ACCUMULATION}) x {self.ranks} = {product}. "
            f"Write {' or '.join(choices)}{self._other_ranks(total, micro * accumulation)}; "
            f"or leave one of the three out, it is derived."
        )
        return self.engine.problem((TOTAL,), text)

    def _other_ranks(self, total: int, factor: int) -> str:
        fitting = total // factor * self.layout.ranks_per_replica if total % factor == 0 else None
        return f", or start {fitting} rank{'s' if fitting > 1 else ''}" if fitting else ""


def _nearest(total: int, unit: int) -> str:
    below = total // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
