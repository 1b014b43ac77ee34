"""What the compared programs share: the task (model, tokens, engine JSON) and how they report what they did."""

import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One training task, the same for every program; written to a file that each of them reads."""

    decoder: dict[str, Any]
    """Fields of DecoderSpec."""
    tokens_folder: str
    """The token cache entry."""
    split: dict[str, Any]
    """Its training split, as the manifest records it."""
    engine: dict[str, Any]
    """The engine JSON, nothing left to derive."""
    steps: int
    """Optimizer updates."""
    seed: int

    @property
    def tokens_per_update(self) -> int:
        """Targets in one global batch; no label is masked."""
        return int(self.engine["train_batch_size"]) * int(self.decoder["seq_len"])

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> "Job":
        """Read what `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))

    def build_model(self) -> Any:
        """The decoder, with weights from the job's seed; under ZeRO-3 the caller provides `zero.Init`."""
        import torch

        from largetrain.config.decoder_spec import DecoderSpec
        from largetrain.models.decoder import Decoder

        torch.manual_seed(self.seed)
        return Decoder(DecoderSpec(**self.decoder))

    def open_data(self) -> Any:
        """The training split as a map-style dataset of {"input_ids", "labels", "sample_id"}."""
        from largetrain.data.store import Split
        from largetrain.data.text import TokenDataset

        return TokenDataset(
            Path(self.tokens_folder), "train", Split.from_json(self.split), int(self.decoder["seq_len"])
        )


class Meter:
    """Notes when each update of this rank ended; `close` writes that and the peak memory into `folder`."""

    def __init__(self, folder: str):
        self.path = Path(folder) / f"rank-{os.environ['RANK']}.json"
        self.times: list[float] = []

    def update_done(self) -> None:
        """Call after each optimizer update; on CUDA the caller need not wait, since losses are read now and then."""
        self.times.append(time.time())

    def close(self, losses: dict[int, float]) -> None:
        """Write the report.

        Args:
            losses: step -> loss, whatever the program logged.
        """
        report = {"times": self.times, "peak_bytes": peak_bytes(), "losses": losses}
        self.path.write_text(json.dumps(report))


def peak_bytes() -> int:
    """Peak memory of this rank as largetrain reports it: the device's allocator on CUDA, resident set on a CPU."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
