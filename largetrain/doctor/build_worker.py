"""The process that imports DeepSpeed and runs its operator builders: `python -m largetrain.doctor.build_worker`.

Arguments: `build` or `check`, then operator names, `all` or `common`. Standard output carries one JSON object per line
(the fields of `ops.OpResult`, or `{"name", "state": "started"}`); whatever DeepSpeed and the compiler print goes to
standard error.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from largetrain.doctor.ops import lock_holders

# What training can reach: optimizers and their offload to CPU and NVMe. The inference operators are left out, and so
# are two that CPU training goes around: `deepspeed_shm_comm` (only DeepSpeed's inference all-reduce uses it, and it
# leaves 66 MiB in /dev/shm for each rank) and the CPU's `fused_adam` (torch's own fused AdamW stands in).
TRAINING_OPS = {
    "cpu": ("cpu_adam", "cpu_adagrad", "cpu_lion", "async_io"),
    "cuda": ("fused_adam", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_lamb", "fused_lion", "async_io"),
}
# Adam and AdamW, with and without offload: what the engine JSONs in ds_configs use.
COMMON_OPS = {"cpu": ("cpu_adam",), "cuda": ("cpu_adam",)}
ERROR_TAIL_LINES = 6


def main() -> int:
    """Work through the operators; each one's failure is reported and the next one tried."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of DeepSpeed and the compiler must not mix with the answers

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    build, names = sys.argv[1] == "build", sys.argv[2:]
    say(name="DeepSpeed's import", state="started")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    device = get_accelerator().device_name()
    for word, groups in (("all", TRAINING_OPS), ("common", COMMON_OPS)):
        if names == [word]:
            names = list(groups.get(device, groups["cuda"]))
    for name in names:
        say(name=name, state="started")
        if name not in ALL_OPS:
            say(name=name, state="unusable", detail=f"no such operator for {device}; there are {', '.join(ALL_OPS)}")
            continue
        _one(name, ALL_OPS[name], build, say)
    return 0


def _one(name: str, builder: Any, build: bool, say: Any) -> None:
    start = time.monotonic()
    if not builder.is_compatible(verbose=True):
        say(name=name, state="unusable", detail=_lacking(name, builder.error_log))
        return
    folder = _build_folder(name)
    before = _library_time(folder, name)
    if not build:
        state = "ready" if before and _nothing_to_compile(folder) else "stale"
        if not any(folder.iterdir()):
            folder.rmdir()  # torch's look-up made it
        say(name=name, state=state, detail=str(folder))
        return
    _look_at_lock(folder, name, say)
    try:
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001  # whatever a compiler or a builder may raise is this operator's result
        tail = "\n".join(str(error).strip().splitlines()[-ERROR_TAIL_LINES:])
        print(error, file=sys.stderr)
        say(name=name, state="failed", detail=f"{type(error).__name__}: {tail}", seconds=time.monotonic() - start)
        return
    state = "ready" if before and before == _library_time(folder, name) else "compiled"
    say(name=name, state=state, detail=str(folder), seconds=time.monotonic() - start)


def _lacking(name: str, deepspeed_says: str | None) -> str:
    if name == "async_io":
        return "libaio's headers are missing (Debian, Ubuntu: apt-get install libaio-dev); only NVMe offload needs it"
    return deepspeed_says or "DeepSpeed says that this machine cannot use it"


def _build_folder(name: str) -> Path:
    """Where torch builds this extension; the version in the folder's name is torch's own affair."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False)).resolve()


def _library_time(folder: Path, name: str) -> int:
    """Modification time of the compiled library in ns; 0 where there is none."""
    library = folder / f"{name}.so"
    return library.stat().st_mtime_ns if library.exists() else 0


def _nothing_to_compile(folder: Path) -> bool:
    """Whether the build was made with this environment's torch, and ninja finds every file up to date (a dry run)."""
    import torch

    if f"{Path(torch.__file__).parent}/include" not in (folder / "build.ninja").read_text():
        return False
    done = subprocess.run(["ninja", "-n"], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode == 0 and "no work to do" in done.stdout


def _look_at_lock(folder: Path, name: str, say: Any) -> None:
    """Say who holds the lock, or take away one whose builder is gone.

    Torch before 2.14 locks by the mere existence of the file, so that a killed build blocks all later ones for ever;
    torch since then uses the kernel's file locks, whose leftover file means nothing.
    """
    from torch.utils import cpp_extension

    lock = folder / "lock"
    if not lock.exists():
        return
    if holders := lock_holders(lock):
        say(name=name, state="waiting", detail=f"process {holders[0]} is compiling it", final=False)
    elif not hasattr(cpp_extension, "FileLock"):
        lock.unlink()
        say(name=name, state="unlocked", detail=f"{lock}: left by a build that was killed; removed", final=False)


if __name__ == "__main__":
    sys.exit(main())
