"""Which checkpoints go when a newer one is whole. No torch."""

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from largetrain.checkpoint.faults import fault
from largetrain.checkpoint.folder import PARTIAL, best_checkpoint, complete_checkpoints, step_of
from largetrain.checkpoint.manifest import read_manifest


@dataclass(frozen=True)
class Retention:
    """What is kept of a run; the newest and the best always are."""

    keep_last: int = 2
    """So many of the newest; 0: all."""
    keep_every_steps: int = 0
    """Also those whose step is a multiple of this; 0: none for this reason."""
    milestones: Collection[int] = ()
    """Also those of these steps."""

    def superfluous(self, steps: Sequence[int], keep: Collection[int] = ()) -> list[int]:
        """The steps to delete, smallest first.

        Args:
            steps: of the run's complete checkpoints.
            keep: not these.
        """
        if self.keep_last == 0:
            return []
        return [
            step
            for step in sorted(steps)[: -self.keep_last]
            if step not in keep
            and step not in self.milestones
            and not (self.keep_every_steps and step % self.keep_every_steps == 0)
        ]


def superfluous(folder: Path, retention: Retention, run_id: str, keep: Collection[Path] = ()) -> list[Path]:
    """Checkpoints of a run in `folder` that are not kept, oldest first; incomplete ones do not count.

    Args:
        keep: never these.
    """
    own = {step_of(path): path for path in complete_checkpoints(folder) if read_manifest(path).run_id == run_id}
    kept = {path.absolute() for path in (*keep, best_checkpoint(folder)) if path is not None}
    steps = retention.superfluous(list(own), [step for step, path in own.items() if path.absolute() in kept])
    return [own[step] for step in steps]


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; a kill half-way leaves nothing that looks like one."""
    doomed = checkpoint.rename(checkpoint.with_name(PARTIAL + checkpoint.name))
    fault("mid-prune")
    shutil.rmtree(doomed)
