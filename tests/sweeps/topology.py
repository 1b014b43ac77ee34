"""Every change of layout on resume: ranks, ZeRO stage, offload, backend, tensor parallelism, precision of the state.

    python -m tests.sweeps.topology [--precision fp32|bf16|fp16] [--only WORD ...]

Each cell stops a small run after update 4 on one layout and ends it on another; samples must be those of the run that
is never stopped, and loss, weights and moments equal to the rounding of sums (fp32), or near (half precision). There
is no conversion: the seconds are those of the second part with its start. Twenty-five minutes on two cores; CI runs a
core.
"""

import argparse
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tests.distributed.layouts import GLOBAL_BATCH, STEPS, Continuation, Layout, continued, prepare, straight
from tests.distributed.parity.matrix import cpu_adam_is_built
from tests.distributed.tiny_run import SEQ_LEN
from tests.reference import tolerance_for

BACKENDS = [Layout(stage=stage) for stage in range(4)] + [Layout(backend="ddp", stage=0)]
RANKS = [(2, 1), (1, 2), (2, 4), (4, 3)]
# ranks, tensor-parallel ranks and sequence parallelism, before and after
TENSOR = [
    ((2, 2, False), (1, 1, False)),
    ((1, 1, False), (2, 2, True)),
    ((4, 2, True), (4, 4, False)),
    ((4, 4, True), (2, 1, False)),
    ((4, 2, False), (4, 2, False)),
]


def changes() -> list[tuple[Layout, Layout]]:
    """All pairs of stages and backends, with every change of ranks; offload on and off; tensor parallelism."""
    cells = []
    for (one, other), (before, after) in itertools.product(itertools.product(BACKENDS, repeat=2), RANKS):
        cells.append((_on(one, before), _on(other, after)))
    for stage in (1, 2, 3) if cpu_adam_is_built() else ():
        with_offload, without = Layout(stage=stage, offload=True), Layout(stage=stage)
        cells += [(with_offload, without), (without, with_offload), (with_offload, _on(with_offload, 4))]
    stages = itertools.product(BACKENDS[:4], repeat=2)
    for (one, other), (before, after) in itertools.product(stages, TENSOR):
        cells.append((_on(one, *before), _on(other, *after)))
    return cells


def _on(layout: Layout, ranks: int, tensor: int = 1, sequence_parallel: bool = False) -> Layout:
    return replace(layout, ranks=ranks, tensor=tensor, sequence_parallel=sequence_parallel)


def worst(found: Continuation, reference: Continuation) -> tuple[float, float]:
    """Largest relative error of the loss; largest error of weights and moments, of their tensor's largest element."""
    pairs = zip(found.updates, reference.updates, strict=True)
    loss = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)
    errors = [
        float((found.tensors[key].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-3))
        for key, tensor in reference.tensors.items()
        if tensor.numel()
    ]
    return loss, max(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--only", nargs="*", default=[], help="cells whose name holds all these words")
    options = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    bound = tolerance_for(dtype, terms=GLOBAL_BATCH * SEQ_LEN, updates=STEPS)["rtol"]
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options.precision)
        reference = straight(folder, Layout(stage=0 if options.precision == "fp32" else 1, ranks=1))
        for first, second in changes():
            title = f"{first} -> {second}"
            if not all(word in title for word in options.only):
                continue
            found = continued(folder, first, second)
            loss, tensors = worst(found, reference)
            same = found.samples == reference.samples and found.tensors.keys() == reference.tensors.keys()
            passed = same and max(loss, tensors) <= bound
            failures += not passed
            verdict = "ok" if passed else "FAILED" if same else "FAILED: other samples or tensors"
            print(f"{title:<52} loss {loss:.1e}  tensors {tensors:.1e}  {found.seconds:4.1f} s  {verdict}", flush=True)
    if not cpu_adam_is_built():
        print("left out: offload, for which `largetrain setup --ops cpu_adam` compiles DeepSpeed's CPUAdam")
    print(f"bound {bound:.1e}; {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
