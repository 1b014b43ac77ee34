"""The resolved configuration of one run: all that the rest of the program sees of the two files."""

import copy
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from largetrain.config.autos import complete_schedule
from largetrain.config.batch import Batch
from largetrain.config.decoder_spec import DecoderSpec
from largetrain.config.document import Document
from largetrain.config.layout import Layout
from largetrain.config.schema import RunConfig
from largetrain.config.settle import settle
from largetrain.errors import ConfigError


@dataclass(frozen=True)
class Resolved:
    """Both files with every derived number in place; nothing changes it afterwards."""

    run: RunConfig
    """No "auto" left: `model.vocab_size` and `runtime.threads` are integers."""
    engine: dict[str, Any]
    """What DeepSpeed is handed: plain JSON types, batch triple complete, gradient_clipping explicit, no "auto" except
    `total_num_steps` and `warmup_num_steps` of the scheduler while `total_steps` is None."""
    batch: Batch
    total_steps: int | None
    """Optimizer updates of the run; None while it depends on the data (`epochs`)."""
    decoder: DecoderSpec | None
    """Sizes of the built-in decoder; None with `model.target`."""
    notes: tuple[str, ...]
    """One line for each number that was derived or overridden."""
    backend: str | None = None
    """"deepspeed", "pipeline" or "ddp"; None while it waits for the model (`backend: auto`, and not the decoder)."""
    document: Document | None = None
    """The engine JSON with the places of its keys, for the messages of `with_backend`."""
    layout: Layout = field(default_factory=lambda: Layout(1))
    """Which rank does what."""

    def with_steps(self, total_steps: int) -> "Resolved":
        """The same run once the number of updates is known; completes the scheduler's autos.

        Args:
            total_steps: optimizer updates of the whole run, at least 1.
        """
        assert total_steps >= 1, total_steps
        if total_steps == self.total_steps:
            return self
        engine = copy.deepcopy(self.engine)
        notes = (f"steps = {total_steps}", *complete_schedule(engine, total_steps))
        return dataclasses.replace(self, engine=engine, total_steps=total_steps, notes=(*self.notes, *notes))

    def with_backend(self, backend: str) -> "Resolved":
        """The same run once the model has decided what runs it.

        Raises:
            ConfigError: keys of the engine JSON that this backend cannot train with, on all ranks.
        """
        if self.backend is not None:
            assert backend == self.backend, (backend, self.backend)
            return self
        assert self.document is not None
        document = Document(self.document.file, copy.deepcopy(self.engine), self.document.origins)
        problems, notes = settle(document, backend, self.batch.world_size)
        if problems:
            raise ConfigError(problems, on_all_ranks=True)
        return dataclasses.replace(self, engine=document.data, backend=backend, notes=(*self.notes, *notes))

    def to_json(self) -> str:
        """Everything, as it is saved with the run in `config.json`."""
        content = {
            "run": self.run.model_dump(mode="json"),
            "engine": self.engine,
            "batch": dataclasses.asdict(self.batch),
            "layout": dataclasses.asdict(self.layout),
            "total_steps": self.total_steps,
            "backend": self.backend,
            "decoder": dataclasses.asdict(self.decoder) if self.decoder is not None else None,
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
