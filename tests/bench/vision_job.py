"""A training task on images that every program of the comparison reads, and how each of them is started."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.environments import ROOT

MOMENTUM, WEIGHT_DECAY, LR = 0.9, 1e-4, 0.01
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class VisionJob:
    """One task: a torchvision model on random images, fp32, SGD with momentum, cross-entropy."""

    model: str
    micro_batch: int
    """Images per rank and update."""
    image_size: int
    clip: float
    """Largest gradient norm; 0: no clipping."""
    steps: int
    seed: int
    ranks: int
    samples: int = 1024
    """Images of the made dataset, of which a tenth is held out by largetrain."""
    classes: int = 1000

    @property
    def images_per_update(self) -> int:
        return self.micro_batch * self.ranks

    def engine(self) -> dict[str, Any]:
        """largetrain's engine JSON of this task."""
        params = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "SGD", "params": params},
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": 0},
        }

    def run(self, sync: bool) -> dict[str, Any]:
        """largetrain's run YAML of this task."""
        return {
            "task": "classification",
            "backend": "ddp",
            "steps": self.steps,
            "seed": self.seed,
            "sync_batch_norm": "on" if sync else "off",
            "model": {"name": self.model},
            "data": {
                "source": "synthetic",
                "samples": self.samples,
                "classes": self.classes,
                "image_size": self.image_size,
            },
            "evaluation": {"at_end": False},
            "checkpoints": {"at_end": False},
        }

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> "VisionJob":
        """Read what `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class StepProgram:
    """A row of the report on step times."""

    name: str
    job: VisionJob
    kind: str
    """`ours`, `sync` (ours with synchronised batch norm), `bare`, or `tuned`: bare without what DDP does by default."""

    def command(self, folder: Path, port: int) -> list[str]:
        """The launch, with its files written to `folder`; torchrun starts all of them."""
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.job.ranks}"]
        line = [*launcher, f"--master-port={port}", "-m"]
        if self.kind in ("bare", "tuned"):
            self.job.write(folder / "job.json")
            tuned = ["--tuned"] if self.kind == "tuned" else []
            return [*line, "tests.bench.bare_ddp", "--job", f"{folder}/job.json", "--report", str(folder), *tuned]
        (folder / "engine.json").write_text(json.dumps(self.job.engine()))
        (folder / "run.yaml").write_text(json.dumps(self.job.run(self.kind == "sync")))
        files = ["--ds_config", f"{folder}/engine.json", "--config", f"{folder}/run.yaml"]
        return [*line, "largetrain", *files, "--output", f"{folder}/run"]


def quiet_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Variables of a launch: one thread per rank, no GPU, none of a launcher's, this checkout to import from."""
    kept = {key: value for key, value in own.items() if key not in LAUNCHER_VARIABLES}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
