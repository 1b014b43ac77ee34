"""A run that is stopped at a random update and resumed is the run that was never stopped, to the bit.

    python -m tests.sweeps.continuation [--seed N]

Backends deepspeed 0, 1, 2, 3 and ddp x fp32, bf16, fp16 x accumulation 1, 3, on two ranks with dropout. Compared:
weights, moments and masters, random generators, sample ids, losses, learning rates, loss scales, norms, metrics file.
Three minutes on two cores; CI runs a core (tests/distributed/test_resume.py, test_ddp_resume.py).
"""

import argparse
import itertools
import random
import sys
import tempfile
from pathlib import Path

from tests.distributed.tiny_run import precision_section, rows_of, train, without_times, write_inputs
from tests.ranks import run_ranks

STEPS = 11
PER_EPOCH = 5  # 60 samples by 12


def stop_and_resume(folder: Path, sets: list[str], stop: int):
    """Straight, stopped and resumed run in the same ranks."""
    straight = train(folder, STEPS, "straight", sets=sets)
    stopped = train(folder, STEPS, "out", sets=sets, stop_after=stop)
    return straight, stopped, train(folder, STEPS, "out", resume="auto", sets=sets)


def differences(folder: Path, results, saved: int, stop: int) -> list[str]:
    """What is not the same, by rank."""
    found = []
    for rank, (straight, stopped, resumed) in enumerate(results):
        for name, is_, wanted in (
            ("updates before the stop", stopped.updates, straight.updates[:stop]),
            ("updates after the resume", resumed.updates, straight.updates[saved:]),
            *((part, resumed.state[part], value) for part, value in straight.state.items()),
        ):
            if is_ != wanted:
                found.append(f"rank {rank}: {name}")
    if without_times(rows_of(folder, "out")) != without_times(rows_of(folder, "straight")):
        found.append("metrics file")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    backends = [("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("ddp", 0)]
    failures = 0
    for (backend, stage), precision, accumulation in itertools.product(backends, ("fp32", "bf16", "fp16"), (1, 3)):
        saved = draw.choice([step for step in range(1, STEPS - 2) if step % PER_EPOCH])
        stop = draw.randint(saved, min(2 * saved - 1, STEPS - 1))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sizes = {"train_micro_batch_size_per_gpu": 6 // accumulation, "gradient_accumulation_steps": accumulation}
            engine = {"zero_optimization": {"stage": stage}, **sizes, **precision_section(precision)}
            run = {"backend": backend, "checkpoints": {"every_steps": saved, "at_end": False}}
            write_inputs(folder, engine, run)
            found = differences(folder, run_ranks(stop_and_resume, 2, folder, [], stop), saved, stop)
        failures += bool(found)
        title = f"{backend} {stage if backend == 'deepspeed' else ''} {precision} accumulation {accumulation}"
        print(f"{title:<36} saved {saved}, stopped {stop}: {'; '.join(found) or 'equal to the bit'}", flush=True)
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
