"""Damage checkpoints in many ways and resume from them: `python -m tests.fuzz.checkpoints --count 500 --seed 0`.

Every outcome must be the newest checkpoint with exactly what was written, the previous one with exactly what was
written, or an error in single lines that names a file: in bounded time, without running code that a file brings, and
without touching anything outside the folder.
"""

import argparse
import hashlib
import json
import os
import pickle
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from largetrain.checkpoint.folder import find_checkpoint, leftovers, read_facts
from largetrain.checkpoint.manifest import MANIFEST, sealed
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.retention import Retention, remove, superfluous
from largetrain.checkpoint.verify import problem_of
from largetrain.checkpoint.writer import point, write_best
from largetrain.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.made import make

MAX_SECONDS = 10
LONGEST_LINE = 1000
OLDER, NEWER = "step-00000001", "step-00000002"
Random = np.random.RandomState


class Hang(BaseException):
    """The alarm went off; no `except Exception` keeps it."""


class Place:
    """One run's folder, a neighbour that must stay as it is, and a file that only foreign code would make."""

    def __init__(self, folder: Path):
        self.output = folder / "run"
        self.outside = folder / "outside"
        self.marker = folder / "code-was-run"
        self.folder = self.output / "checkpoints"
        self.outside.mkdir(parents=True)
        for step in (1, 2):
            make(self.folder, step)
        for name in (OLDER, NEWER):
            write_best(self.folder / name, {"best_step": int(name[-1])})
        point(self.folder / "latest", self.newest)
        shutil.copytree(self.newest, self.outside / NEWER)
        (self.outside / "precious").write_text("keep")

    @property
    def newest(self) -> Path:
        return self.folder / NEWER

    def files(self) -> list[Path]:
        return sorted(path for path in self.newest.rglob("*") if path.is_file())

    def some_file(self, random: Random) -> Path:
        """Any file of the newest checkpoint, or a pointer."""
        files = [*self.files(), self.folder / "best", self.folder / "latest"]
        return files[random.randint(len(files))]

    def outside_digest(self) -> str:
        parts = [f"{path} {path.read_bytes()!r}" for path in sorted(self.outside.rglob("*")) if path.is_file()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def vouch(checkpoint: Path, change: Callable[[dict[str, Any]], None] = lambda content: None) -> None:
    """Forge the manifest: digests and sizes of the files as they are now, then `change`, then the right seal."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_bytes())
    content.pop("sha256", None)
    for name, record in content["files"].items():
        if (checkpoint / name).is_file():
            data = (checkpoint / name).read_bytes()
            record.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    change(content)
    path.write_bytes(sealed(content))


# ---------------------------------------------------------------- damage without knowledge of the format


def bits_flipped(place: Place, random: Random) -> None:
    path = place.some_file(random)
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 9)):
        data[random.randint(len(data))] ^= 1 << random.randint(8)
    path.write_bytes(data)


def cut_short(place: Place, random: Random) -> None:
    path = place.some_file(random)
    with path.open("r+b") as file:
        file.truncate(random.randint(path.stat().st_size))


def lengthened(place: Place, random: Random) -> None:
    with place.some_file(random).open("ab") as file:
        file.write(random.bytes(random.randint(1, 100)))


def overwritten(place: Place, random: Random) -> None:
    path = place.some_file(random)
    size = path.stat().st_size
    path.write_bytes(bytes(size) if random.randint(2) else random.bytes(size))


def deleted(place: Place, random: Random) -> None:
    place.some_file(random).unlink()


def folder_deleted(place: Place, random: Random) -> None:
    shutil.rmtree(place.newest / ["pieces", "ranks"][random.randint(2)])


def swapped(place: Place, random: Random) -> None:
    """Two files of the newest checkpoint."""
    one, other = random.choice(len(files := place.files()), 2, replace=False)
    data = files[one].read_bytes()
    files[one].write_bytes(files[other].read_bytes())
    files[other].write_bytes(data)


def from_another_step(place: Place, random: Random) -> None:
    path = place.files()[random.randint(len(place.files()))]
    shutil.copy(place.folder / OLDER / path.relative_to(place.newest), path)


def linked(place: Place, random: Random) -> None:
    """A file, folder or checkpoint becomes a symbolic link: outside, to itself, to nothing, to a device."""
    choices = [*place.files(), place.newest / "pieces", place.newest / "ranks", place.newest, place.folder / "best"]
    path = choices[random.randint(len(choices))]
    twin = place.outside / path.relative_to(place.folder)
    target = [twin, path, Path("nowhere"), Path("/dev/zero")][random.randint(4)]
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


def piped(place: Place, random: Random) -> None:
    """A file becomes a pipe that nobody writes to, or a folder."""
    path = place.some_file(random)
    path.unlink()
    os.mkfifo(path) if random.randint(2) else path.mkdir()


def renamed(place: Place, random: Random) -> None:
    number = [3, 0, 99_999_999, 10**14][random.randint(4)]
    place.newest.rename(place.folder / f"step-{number:08d}")


def beside(place: Place, random: Random) -> None:
    """Something newer that is no checkpoint, and things that only look like leftovers."""
    path = place.folder / "step-00000009"
    [path.mkdir, path.touch, lambda: path.symlink_to(place.outside / NEWER)][random.randint(3)]()
    (place.folder / "partial-step-00000007").symlink_to(place.outside)
    (place.folder / "partial-mine").mkdir()


def best_pointed(place: Place, random: Random) -> None:
    texts = [f"../../outside/{NEWER}", f"{place.outside}/{NEWER}", "", ".", "..", "step-00000009", "\0", "x" * 10**5]
    (place.folder / "best").write_bytes([*map(str.encode, texts), b"\xff\xfe"][random.randint(len(texts) + 1)])


# ---------------------------------------------------------------- forgeries with right digests


def manifest_forged(place: Place, random: Random) -> None:
    def under(name: str) -> Callable[[dict[str, Any]], None]:
        return lambda content: content["files"].update({name: content["files"].pop("pieces/rank-00001.safetensors")})

    def record(**values: Any) -> Callable[[dict[str, Any]], None]:
        return lambda content: content["files"]["run.json"].update(values)

    changes = [
        *map(under, (f"../../../outside/{NEWER}/run.json", "/etc/passwd", "..", "", "pieces/../run.json", "a" * 9999)),
        *(record(bytes=size) for size in (-1, 10**40, 1.5, None, "9", True)),
        *(record(sha256=digest) for digest in (None, "", "0" * 64, 7)),
        *(lambda c, k=key: c.pop(k) for key in ("format", "run_id", "step", "files")),
        *(lambda c, v=value: c.update(step=v) for value in (-1, "2", 3, 10**30, None)),
        *(lambda c, v=value: c.update(files=v) for value in ([], {}, None, "x")),
        lambda c: c.update(run_id=["x"]),
        lambda c: c.update(format=99),
        lambda c: c["files"].pop("ranks/rank-00000.pt"),
        lambda c: c["files"].pop("pieces/rank-00001.safetensors"),
    ]
    vouch(place.newest, changes[random.randint(len(changes))])


def manifest_bomb(place: Place, random: Random) -> None:
    depth = 10 ** random.randint(3, 6)
    bombs = [b"[" * depth, b'{"files":' * depth, b'{"step": ' + b"9" * 10**5 + b"}", b"\xff" * 99, b"null", b"{}"]
    (place.newest / MANIFEST).write_bytes(bombs[random.randint(len(bombs))])


class Trap:
    """Unpickling it makes the marker."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.marker)!r}, 'w')",)


def hostile_pickle(place: Place, random: Random) -> None:
    path = place.newest / "ranks" / f"rank-0000{random.randint(2)}.pt"
    trap: Any = {"random": Trap(place.marker)} if random.randint(2) else Trap(place.marker)
    form = random.randint(4)
    if form == 0:
        path.write_bytes(pickle.dumps(trap))
    elif form == 3:
        torch.save(bytearray(9), path)  # no table
    else:
        torch.save(trap, path, _use_new_zipfile_serialization=form == 1)
    vouch(place.newest)


def hostile_header(place: Place, random: Random) -> None:
    path = place.newest / "pieces" / f"rank-0000{random.randint(2)}.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    content = json.loads(data[8 : 8 + length])
    name = sorted(content)[1 + random.randint(len(content) - 1)]
    values: dict[str, list[Any]] = {
        "dtype": ["F32", "F64", "F8_E5M2", 3, None, []],
        "shape": [[], [-1], [2**62, 2**62], [1.5], "ab", None, [0], [6, 1]],
        "data_offsets": [[0, 2**63], [-24, 0], [24, 0], [0], None, "ab", [0.0, 24.0]],
    }
    kind = random.randint(6)
    if kind == 0:
        path.write_bytes(struct.pack("<Q", [2**64 - 1, 2**40, len(data), 0, 7][random.randint(5)]) + data[8:])
    elif kind == 1:
        path.write_bytes(data[: 8 + length])
    else:
        if kind == 2:
            shapes = ["", "[]", '{"model/weight": 3}', '{"model/weight": [12]}', "{}", 5, "[" * 10**5]
            content["__metadata__"] = {"shapes": shapes[random.randint(len(shapes))]}
        elif kind == 3:
            cuts = ["", "[0:2/4]", "[2:4/4]", "[1:9/4]", "[0:1/12]", "[3:2/4]", "[0:2/0]", "[0:2/" + "9" * 19 + "]"]
            cut = cuts[random.randint(len(cuts))]
            content[name.split("@")[0] + f"@{random.randint(20)}{cut}"] = content.pop(name)
        else:
            key = ["dtype", "shape", "data_offsets"][random.randint(3)]
            content[name][key] = values[key][random.randint(len(values[key]))]
        text = json.dumps(content).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    vouch(place.newest)


def facts_forged(place: Place, random: Random) -> None:
    texts = ["", "[]", "{", '{"state": []}', '{"shared": 1}', "[" * 10**5, "NaN", '{"state": ' + "9" * 9999 + "}"]
    (place.newest / "run.json").write_text(texts[random.randint(len(texts))])
    vouch(place.newest)


def best_record_forged(place: Place, random: Random) -> None:
    contents = [
        b"",
        b"{}",
        sealed({}),
        sealed({"step": 2}),
        sealed({"step": 2, "state": []}),
        b"[" * 10**5,
        sealed({"x": 1}),
    ]
    (place.newest / "best.json").write_bytes(contents[random.randint(len(contents))])


def tensors_of_another_run(place: Place, random: Random) -> None:
    """Right digests for a mixture of two checkpoints; sizes agree, so that nothing can tell."""
    name = f"pieces/rank-0000{random.randint(2)}.safetensors"
    shutil.copy(place.folder / OLDER / name, place.newest / name)
    vouch(place.newest)


BLIND = (bits_flipped, cut_short, lengthened, overwritten, deleted, folder_deleted, swapped, from_another_step,
         linked, piped, renamed, beside, best_pointed)  # fmt: skip
FORGED = (manifest_forged, manifest_bomb, hostile_pickle, hostile_header, facts_forged, best_record_forged,
          tensors_of_another_run)  # fmt: skip
DAMAGES = BLIND + FORGED


# ---------------------------------------------------------------- what must come of it


def everything(checkpoint: Path) -> dict[str, Any]:
    """All that a run reads of a checkpoint, in a form that can be compared."""
    facts = read_facts(checkpoint)
    reader = open_checkpoint(checkpoint)
    tensors = {key: (reader.shape(key), reader.read(key).view(torch.uint8).tolist()) for key in reader.keys()}  # noqa: SIM118
    own = [reader.own(rank)["random"].tolist() for rank in range(reader.world_size)]
    return {"facts": facts, "shared": reader.shared, "tensors": tensors, "own": own}


def resumed(place: Place, resume: str) -> tuple[str, Any]:
    """Which checkpoint is used, by step, with what it holds; or "error" with its lines."""
    try:
        found, passed_over = find_checkpoint(resume, place.output)
        if found is None:
            return "error", passed_over
        return found.name, everything(found)
    except ConfigError as error:
        return "error", list(error.problems)
    except CheckpointError as error:
        return "error", [str(error)]


def judge(place: Place, truth: dict[str, list[Any]], outcome: tuple[str, Any], forged: bool) -> str:
    """The kind of an outcome; raises AssertionError for one that must not be."""
    name, content = outcome
    if name == "error":
        assert content, "an error without words"
        for line in content:
            assert "\n" not in line and len(line) < LONGEST_LINE, f"not one line: {line[:2000]!r}"
            line.encode()
        assert any(str(place.folder) in line for line in content), f"names no file: {content}"
        return "error"
    if name in truth and content in truth[name]:
        return "newest" if name == NEWER else "previous"
    assert forged, f"{name} is not what was written"
    return "forged"  # whoever can write right digests can write other weights


def try_one(
    place: Place, truth: dict[str, list[Any]], damage: Callable[[Place, Random], None], random: Random
) -> Counter:
    """Damage a run's checkpoints, resume in all ways, prune; returns the outcomes."""
    damage(place, random)
    before = place.outside_digest()
    outcomes = Counter()
    for resume in ("auto", "best", str(place.newest), str(place.output)):
        kind = judge(place, truth, resumed(place, resume), damage in FORGED)
        assert kind != "error" or resume != "auto" or damage in FORGED, "the previous checkpoint was not found"
        outcomes[kind] += 1
    kept = problem_of(place.folder / OLDER) is None
    for path in [*superfluous(place.folder, Retention(1), "this run"), *leftovers(place.folder)]:
        remove(path) if path.name.startswith("step-") else shutil.rmtree(path)
    assert place.outside_digest() == before, "something outside was changed"
    assert not place.marker.exists(), "code of a file was run"
    assert kept, "the older checkpoint was damaged"
    return outcomes


def run(count: int, seed: int, folder: Path, damages: tuple[Callable, ...] = DAMAGES) -> tuple[Counter, list[str]]:
    """Try `count` damages; returns how often each outcome came, and what must not be."""
    template = Place(folder / "template")
    truth = {name: [everything(template.folder / name)] for name in (OLDER, NEWER)}
    (template.newest / "best.json").unlink()
    truth[NEWER].append(everything(template.newest))  # as it was before the evaluation
    outcomes, faults = Counter(), []
    previous = signal.signal(signal.SIGALRM, _alarmed)
    warnings.simplefilter("ignore")
    for index in range(count):
        random = Random((seed * 1_000_003 + index) % 2**32)
        damage = damages[random.randint(len(damages))]
        place = Place(folder / f"case-{index}")
        signal.alarm(MAX_SECONDS)
        begin = time.monotonic()
        try:
            outcomes += try_one(place, truth, damage, random)
        except (Exception, Hang) as error:  # noqa: BLE001 (whatever came is the finding)
            told = traceback.format_exc(limit=-4)
            faults.append(f"case {index} ({damage.__name__}, {time.monotonic() - begin:.1f} s): {error!r}\n{told}")
        finally:
            signal.alarm(0)
        shutil.rmtree(folder / f"case-{index}", ignore_errors=True)
    signal.signal(signal.SIGALRM, previous)
    return outcomes, faults


def _alarmed(*args: Any) -> None:
    raise Hang(f"not done after {MAX_SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, faults = run(options.count, options.seed, Path(folder))
    for fault in faults:
        print(fault)
    print(
        f"{options.count} damages in {time.monotonic() - begin:.0f} s, four ways to resume from each: {dict(outcomes)}"
    )
    print(f"{len(faults)} that must not be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
