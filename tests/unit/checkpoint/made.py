"""A small checkpoint, written by one process as several ranks would have: for tests and for the fuzzer."""

import io
import json
from pathlib import Path

import torch

from largetrain.checkpoint.folder import step_folder
from largetrain.checkpoint.manifest import MANIFEST, sealed
from largetrain.checkpoint.staging import Staging, plan
from largetrain.checkpoint.writer import facts_bytes, prepare, publish, write_rank
from largetrain.parallel.pieces import Piece

WEIGHT = torch.arange(12, dtype=torch.float32).reshape(3, 4)
MOMENT = WEIGHT.to(torch.bfloat16) / 2


def pieces_of(rank, ranks, step=0):
    """Each rank's range of two partial tensors, and one whole tensor of rank 0."""
    cut = [12 * r // ranks for r in range(ranks + 1)]
    begin, end = cut[rank], cut[rank + 1]
    pieces = [
        Piece("model/weight", (3, 4), begin, (WEIGHT + step).flatten()[begin:end]),
        Piece("optimizer/exp_avg/weight", (3, 4), begin, MOMENT.flatten()[begin:end]),
    ]
    if rank == 0:
        pieces.append(Piece("model/count", (), 0, torch.tensor([step])))
    return pieces


def make(folder, step, *, ranks=2, run_id="this run", state=None, pieces=None):
    """Write the checkpoint of `step` into `folder` and return it.

    Args:
        pieces: by rank; absent: `pieces_of`.
    """
    folder = Path(folder)
    partial = folder / f"partial-{step_folder(step)}"
    prepare(partial)
    files = {}
    for rank in range(ranks):
        image = Staging().fill(plan(pieces_of(rank, ranks, step) if pieces is None else pieces[rank]))
        own = io.BytesIO()
        torch.save({"random": torch.tensor([rank, step])}, own)
        files |= write_rank(partial, rank, image, own.getvalue())
    facts = facts_bytes({"state": {"step": step, **(state or {})}}, {"scale": 8.0})
    publish(partial, folder / step_folder(step), run_id, facts, files, ranks)
    return folder / step_folder(step)


def forge(checkpoint, change):
    """Rewrite a manifest with a right digest after `change` has had its content."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_bytes())
    del content["sha256"]
    change(content)
    path.write_bytes(sealed(content))
