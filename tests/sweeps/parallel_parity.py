"""Every layout of the decoder against the single-process loop: tensor, sequence, pipeline and data parallelism, ZeRO.

    python -m tests.sweeps.parallel_parity [--backend NAME ...] [--only WORD ...] [--list]

Each cell makes 10 updates on 2 to 8 ranks and compares losses, gradient norms, an evaluation and the gathered weights
with the loop; initial weights and the ranks' replicas must be equal to the bit. Cells of one world size share their
ranks' start. An hour on two cores; CI runs a core (test_tensor_parallel.py, test_pipeline.py and others).
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from tests.distributed.parity.parallel import Cell, Errors, measure

TOGETHER = 8
"""Cells that one start of the ranks trains."""
LOOKS = ({"style": "llama", "tied": False}, {"style": "gpt", "tied": True}, {"style": "gpt", "tied": False})


def tensor_cells() -> Iterator[Cell]:
    """Tensor 2 and 4, alone and with data parallelism: every ZeRO stage, style, precision, sequence parallelism."""
    layouts = [{"tensor": 2}, {"tensor": 2, "data": 2}, {"tensor": 4, "shape": "8x2"}]
    for layout, zero, sequence_parallel in itertools.product(layouts, range(4), (False, True)):
        common = {**layout, "zero": zero, "sequence_parallel": sequence_parallel}
        for look, accumulation in itertools.product(LOOKS, (2, 4)):
            yield Cell(**common, **look, accumulation=accumulation)
        yield Cell(**common, style="llama", tied=True, chunk=5, recompute=True)
        yield Cell(**common, style="gpt", recompute=True, optimizer="SGD")
        for precision in ("bf16", "fp16") if zero > 0 else ():
            yield Cell(**common, precision=precision)
            yield Cell(**common, precision=precision, style="gpt", tied=True, recompute=True)
    for layout in ({"tensor": 2, "shape": "6x3"}, {"tensor": 3, "shape": "6x3"}, {"tensor": 3, "shape": "6x2"}):
        for zero in range(4):
            yield Cell(**layout, zero=zero, style="gpt")


def ulysses_cells() -> Iterator[Cell]:
    """Ranks that share sequences, 2 and 4 of them, alone and with data parallelism."""
    layouts = [
        {"ulysses": 2},
        {"ulysses": 2, "data": 2},
        {"ulysses": 4, "shape": "8x2"},
        {"ulysses": 2, "shape": "6x3"},
    ]
    for layout, zero in itertools.product(layouts, range(4)):
        for look in LOOKS:
            yield Cell(**layout, zero=zero, **look)
        yield Cell(**layout, zero=zero, chunk=5, recompute=True, optimizer="SGD", accumulation=4)
        for precision in ("bf16", "fp16") if zero > 0 else ():
            yield Cell(**layout, zero=zero, precision=precision)


def pipeline_cells() -> Iterator[Cell]:
    """2 and 4 stages, alone and with data and tensor parallelism; fewer micro-batches than stages, and more."""
    for layout, zero in itertools.product(({}, {"data": 2}, {"tensor": 2}), (0, 1)):
        common = {"backend": "pipeline", "stages": 2, **layout, "zero": zero}
        looks = itertools.product((*LOOKS, {"style": "llama", "tied": True}), (1, 2, 4))
        yield from (Cell(**common, **look, accumulation=accumulation) for look, accumulation in looks)
        yield Cell(**common, tied=True, chunk=5, recompute=True, optimizer="SGD", accumulation=4)
        for precision, accumulation in itertools.product(("bf16", "fp16") if zero > 0 else (), (1, 4)):
            yield Cell(**common, precision=precision, accumulation=accumulation)
            yield Cell(**common, precision=precision, style="gpt", tied=True, accumulation=accumulation)
    for layout, zero in itertools.product(({}, {"data": 2}), (0, 1)):
        common = {"backend": "pipeline", "stages": 4, "layers": 4, **layout, "zero": zero}
        looks = itertools.product(LOOKS, (1, 2, 4))
        yield from (Cell(**common, **look, accumulation=accumulation) for look, accumulation in looks)
        for precision in ("bf16", "fp16") if zero > 0 else ():
            yield Cell(**common, precision=precision, style="gpt", tied=True, accumulation=4)
    for layout, zero in itertools.product(({"stages": 2}, {"stages": 2, "data": 2}, {"stages": 4}), (0, 1)):
        runs = 2 * layout["stages"]
        common = {"backend": "pipeline", "schedule": "dualpipev", **layout, "layers": runs, "zero": zero}
        accumulation = 4 if "data" in layout else 8
        looks = itertools.product((*LOOKS, {"style": "llama", "tied": True}), {runs, accumulation})
        # eight blocks under AdamW are far enough from linear that one rank, too, is off by 5e-5 in the norm
        optimizer = "SGD" if runs == 8 else "AdamW"
        yield from (Cell(**common, **look, accumulation=some, optimizer=optimizer) for look, some in looks)
        yield Cell(**common, tied=True, chunk=5, recompute=True, optimizer="SGD", accumulation=accumulation)
        for precision in ("bf16", "fp16") if zero > 0 else ():
            yield Cell(**common, precision=precision, style="gpt", tied=True, accumulation=accumulation)
    for zero, sequence_parallel in itertools.product((0, 1), (False, True)):
        common = {"backend": "pipeline", "stages": 2, "tensor": 2, "accumulation": 4, "layers": 4, "zero": zero}
        yield Cell(**common, sequence_parallel=sequence_parallel, schedule="dualpipev", style="gpt", tied=True)
    for zero, sequence_parallel in itertools.product((0, 1), (False, True)):
        common = {"backend": "pipeline", "stages": 2, "tensor": 2, "zero": zero, "accumulation": 4}
        yield Cell(**common, sequence_parallel=sequence_parallel, style="gpt", tied=True, recompute=True)
        yield Cell(**common, sequence_parallel=sequence_parallel, data=2)


CELLS = {"deepspeed": (tensor_cells, ulysses_cells), "pipeline": (pipeline_cells,)}
"""Backend -> what lists its cells; `tests/distributed/parity/parallel.py: BACKENDS` says how they are run."""


def report(cell: Cell, errors: Errors) -> str:
    """One line."""
    parts = "  ".join(f"{name} {getattr(errors, name):.1e}/{bound:.1e}" for name, bound in errors.bounds.items())
    return f"{cell!s:<78} {parts}  {'FAILED' if errors.failures() else 'ok'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="*", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--only", nargs="*", default=[], help="cells whose name holds all these words")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    options = parser.parse_args()
    listed = [cell for name in options.backend for cells in CELLS[name] for cell in cells()]
    chosen = [cell for cell in dict.fromkeys(listed) if all(word in str(cell) for word in options.only)]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    started, failures, worst = time.monotonic(), 0, dict.fromkeys(("loss", "norm", "weights", "evaluation"), 0.0)
    for _, group in itertools.groupby(sorted(chosen, key=lambda cell: cell.world_size), lambda cell: cell.world_size):
        for some in _batched(list(group)):
            for cell, errors in zip(some, measure(some), strict=True):
                failures += bool(errors.failures())
                worst = {name: max(was, getattr(errors, name) / errors.bounds[name]) for name, was in worst.items()}
                print(report(cell, errors), flush=True)
    near = ", ".join(f"{name} {share:.2f}" for name, share in worst.items())
    seconds = time.monotonic() - started
    print(f"{len(chosen)} cells, {failures} failed, in {seconds:.0f} s; largest share of a bound: {near}")
    return 1 if failures else 0


def _batched(cells: list[Cell]) -> Iterator[list[Cell]]:
    return (cells[start : start + TOGETHER] for start in range(0, len(cells), TOGETHER))


if __name__ == "__main__":
    sys.exit(main())
