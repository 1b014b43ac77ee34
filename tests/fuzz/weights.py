"""Damaged weights from elsewhere: `init_from` either refuses them in words that name them, or reads whole tensors.

python -m tests.fuzz.weights --count 2000
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from largetrain.checkpoint.weights import weights_from
from largetrain.errors import ConfigError
from tests.unit.checkpoint_tools.test_hf import write_theirs
from tests.unit.checkpoint_tools.test_restricted import deepspeed_files
from tests.unit.models.specs import small_spec

VALUES: list[Any] = [None, True, -1, 0, 3, 1.5, "x", [], {}, [1], {"a": 1}, 10**30, "../x"]
HEADS_BYTES = 3000  # where headers and pickles are, which half of the flips hit


def seeds(folder: Path) -> list[Path]:
    """A GPT-2 and a Llama of Hugging Face's, a checkpoint of DeepSpeed, and a file of torch.save."""
    write_theirs(folder / "gpt", small_spec("gpt"))
    write_theirs(folder / "llama", small_spec("llama"), name="pytorch_model.bin")
    for name in ("gpt", "llama"):
        shutil.rmtree(folder / name / "tmp")
    deepspeed_files(folder / "deepspeed" / "global_step1")
    (folder / "plain").mkdir()
    torch.save({"model": {"a": torch.ones(3)}}, folder / "plain" / "x.pt")
    return sorted(folder.iterdir())


def damage(folder: Path, chance: random.Random) -> str:
    """Harm one file; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file, how = chance.choice(files), chance.choice(["flip", "flip", "cut", "value", "delete", "empty"])
    content = bytearray(file.read_bytes())
    if how == "flip":
        for _ in range(chance.choice([1, 1, 5])):
            place = chance.randrange(min(len(content), HEADS_BYTES) if chance.random() < 0.5 else len(content))
            content[place] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif how == "value" and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
        config[chance.choice(sorted(config))] = chance.choice(VALUES)
        (folder / "config.json").write_text(json.dumps(config))
    elif how == "delete":
        file.unlink()
    else:
        file.write_bytes(b"")
    return f"{how} {file.relative_to(folder)}"


def attempt(path: Path) -> str:
    """Read everything; what came of it.

    Raises:
        AssertionError: the refusal names neither the weights nor a key of their model.
    """
    try:
        source = weights_from(str(path))
    except ConfigError as error:
        assert all(str(path) in line or "model" in line for line in error.problems), error
        return "refused"
    for key in source.keys():  # noqa: SIM118 (it is no mapping)
        source.read(key).view(source.shape(key))
    return "read"


def run(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Outcomes, and a line for everything that must not be."""
    chance, outcomes, faults = random.Random(seed), Counter[str](), []
    (folder / "seeds").mkdir()
    whole = seeds(folder / "seeds")
    for number in range(count):
        source, victim = chance.choice(whole), folder / "victim"
        shutil.copytree(source, victim)
        done = damage(victim, chance)
        try:
            outcomes[attempt(victim / "x.pt" if source.name == "plain" else victim)] += 1
        except Exception as error:  # noqa: BLE001 (what it may be is what is looked for)
            faults.append(f"{number}: {source.name}, {done}: {type(error).__name__}: {error}")
        shutil.rmtree(victim)
    return outcomes, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, faults = run(arguments.count, arguments.seed, Path(folder))
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{arguments.count} files, seed {arguments.seed}: {dict(outcomes)}, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
