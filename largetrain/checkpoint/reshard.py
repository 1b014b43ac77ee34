"""A checkpoint written anew over another number of files, and weights of any origin as a checkpoint."""

import io
import json
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from largetrain import __version__
from largetrain.checkpoint.diff import compare
from largetrain.checkpoint.files import (
    Planned,
    appearing,
    check_free,
    check_room,
    dtype_name,
    write_bytes,
    write_stream,
)
from largetrain.checkpoint.header import Stored, header
from largetrain.checkpoint.manifest import (
    BEST_RECORD,
    FACTS,
    MANIFEST,
    OWN_NAME,
    STEP_NAME,
    FileRecord,
    Manifest,
    own_name,
    pieces_name,
)
from largetrain.checkpoint.reader import CheckpointReader, open_checkpoint
from largetrain.checkpoint.sources import MODEL, Source
from largetrain.checkpoint.verify import problem_of
from largetrain.errors import CheckpointError, ConfigError
from largetrain.parallel.pieces import Pieces

MODEL_FILE = "model.yaml"
PIECE_BYTES = 5 * 10**9
"""Of one file of imported weights."""
SPARE_BYTES = 1 << 20
Range = tuple[str, int, int]
"""Key, first element, and the one after the last."""


def reshard(checkpoint: Path, target: Path, files: int, *, force: bool = False, key: str = "reshard") -> int:
    """Write a checkpoint anew with its tensors spread evenly over `files` files; returns how many there are.

    Source and result are compared bit for bit before the result appears under its name.

    Raises:
        ConfigError: the source is not whole, or the target is taken, or is no place for it.
        CheckpointError: what was written is not what was read.
    """
    if files < 1:
        raise ConfigError(f"{key} --ranks {files}: at least one file is needed.")
    if problem := problem_of(checkpoint, contents=True):
        raise ConfigError(f"{key}: {problem}.")
    reader = open_checkpoint(checkpoint)
    named = STEP_NAME.fullmatch(target.absolute().name)
    if named and int(named[1]) != reader.step:
        raise ConfigError(f"{key} {target}: is the name of step {int(named[1])}, and this is step {reader.step}.")
    check_free(target, key, force, is_weights_folder)
    size = sum(_bytes_of(reader, name) for name in reader.keys())  # noqa: SIM118 (it is no mapping)
    check_room(target, size + SPARE_BYTES, key)
    cut = spread(reader, files)
    with appearing(target, key) as partial:
        records = _write_pieces(partial, cut, reader)
        for name in sorted(filter(OWN_NAME.fullmatch, reader.manifest.files)):
            records[name] = write_bytes(partial / name, (checkpoint / name).read_bytes())
        facts = (checkpoint / FACTS).read_bytes()
        _write_manifest(partial, reader.manifest.run_id, reader.step, facts, records)
        if (checkpoint / BEST_RECORD).is_file():
            shutil.copyfile(checkpoint / BEST_RECORD, partial / BEST_RECORD)
        _check(partial, reader)
    return len(cut)


def _check(partial: Path, reader: CheckpointReader) -> None:
    if problem := problem_of(partial, contents=True):
        raise CheckpointError(f"what was written is not whole: {problem}")
    found = compare(reader, open_checkpoint(partial))
    if not found.same_tensors or found.own or found.facts:
        raise CheckpointError(f"what was written to {partial} is not what {reader.folder} holds")


def _bytes_of(pieces: Any, key: str) -> int:
    return int(torch.Size(pieces.shape(key)).numel() * pieces.dtype(key).itemsize)


def spread(pieces: Any, files: int, keys: Sequence[str] | None = None) -> list[list[Range]]:
    """Cut tensors into at most `files` files of about equally many bytes.

    Args:
        pieces: with `keys`, `shape` and `dtype`.
        keys: those to take; None: all.
    """
    chosen = list(pieces.keys() if keys is None else keys)
    total = sum(_bytes_of(pieces, key) for key in chosen)
    cut: list[list[Range]] = [[] for _ in range(files)]
    offset = 0  # in bytes, of what has been given out
    for key in chosen:
        width, count, start = pieces.dtype(key).itemsize, torch.Size(pieces.shape(key)).numel(), 0
        if count == 0:
            cut[0].append((key, 0, 0))
        while start < count:
            index = offset * files // total
            end_of_file = -(-total * (index + 1) // files)
            stop = min(count, start - (offset - end_of_file) // width)  # the element at the boundary belongs before it
            cut[index].append((key, start, stop))
            offset += (stop - start) * width
            start = stop
    return [ranges for ranges in cut if ranges]


def _write_pieces(partial: Path, cut: Sequence[Sequence[Range]], pieces: Any) -> dict[str, FileRecord]:
    """One file for each list of ranges."""
    records = {}
    for name in ("pieces", "ranks"):
        (partial / name).mkdir(parents=True)
    for index, ranges in enumerate(cut):
        stored, planned = [], []
        for key, start, stop in sorted(ranges, key=lambda place: (-pieces.dtype(place[0]).itemsize, place)):
            dtype = pieces.dtype(key)
            stored.append(Stored(key, tuple(pieces.shape(key)), dtype_name(key, dtype), start, stop - start, 0))
            planned.append(Planned(key, (stop - start,), dtype, _shifted(pieces, key, start)))
        records[pieces_name(index)] = write_stream(partial / pieces_name(index), header(stored), planned)
    return records


def _shifted(pieces: Pieces, key: str, offset: int) -> Callable[[int, int], Tensor]:
    return lambda start, stop: pieces.read(key, offset + start, offset + stop)


def _write_manifest(partial: Path, run_id: str, step: int, facts: bytes, records: Mapping[str, FileRecord]) -> None:
    files = {FACTS: write_bytes(partial / FACTS, facts), **dict(sorted(records.items()))}
    write_bytes(partial / MANIFEST, Manifest(run_id, step, files).to_json())


def write_weights(source: Source, target: Path, key: str, *, force: bool = False) -> None:
    """Write weights as a checkpoint of ours that holds nothing else, with their `model:` section in `model.yaml`.

    Raises:
        ConfigError: the target is taken, or there is no room.
    """
    tied = source.shared.get("tied") or {}
    keys = [name for name in source.keys() if name.removeprefix(MODEL) not in tied]  # noqa: SIM118 (it is no mapping)
    if STEP_NAME.fullmatch(target.absolute().name):
        raise ConfigError(f"{key} {target}: has the name of a run's checkpoint; give imported weights another name.")
    check_free(target, key, force, is_weights_folder)
    size = sum(_bytes_of(source, name) for name in keys)
    check_room(target, size + SPARE_BYTES, key)
    model = source.facts.get("model")
    facts = {
        "weights_only": True,
        "imported_from": source.where,
        "world_size": 1,
        **({"model": model} if model is not None else {}),
        "versions": {"largetrain": __version__, "torch": torch.__version__},
        "shared": {"tied": tied},
    }
    with appearing(target, key) as partial:
        records = _write_pieces(partial, spread(source, max(1, -(-size // PIECE_BYTES)), keys), source)
        torch.save({}, own := io.BytesIO())
        records[own_name(0)] = write_bytes(partial / own_name(0), own.getvalue())
        _write_manifest(partial, uuid.uuid4().hex, 0, json.dumps(facts, indent=1).encode(), records)
        if model is not None:
            write_bytes(partial / MODEL_FILE, model_yaml(model).encode())
        if problem := problem_of(partial, contents=True):
            raise CheckpointError(f"what was written is not whole: {problem}")


def model_yaml(section: Mapping[str, Any]) -> str:
    """The `model:` section of a run YAML."""
    return str(yaml.safe_dump({"model": dict(section)}, sort_keys=False))


def is_weights_folder(path: Path) -> bool:
    """Whether a folder is what `reshard` and `import` write, and nothing else lies in it."""
    if not (path / MANIFEST).is_file():
        return False
    known = {MANIFEST, FACTS, BEST_RECORD, MODEL_FILE, "pieces", "ranks"}
    return all(found.name in known and not found.is_symlink() for found in path.iterdir())
