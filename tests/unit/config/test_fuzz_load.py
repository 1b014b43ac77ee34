"""Random values at random keys of both files: a resolved run without "auto", or a `ConfigError`, and nothing else."""

import json
import random

import pytest

from largetrain.config.document import Document
from largetrain.config.engine_schema import engine_schema
from largetrain.config.load import load
from largetrain.config.run_schema import run_schema
from largetrain.errors import ConfigError

JUNK = ["x", "5", -1, 0, 1, 2, 3, 8, 1.5, True, False, None, [], ["x"], {}, "auto", 2.0, 1e9, 1e-3, [0.9, 0.99], "cpu"]


def leaves(node: dict, path: tuple[str, ...] = ()):
    for key, below in node.get("properties", {}).items():
        yield (*path, key), below
        yield from leaves(below, (*path, key))


def engine_leaves() -> list:
    schema = engine_schema()
    classes = [node for entry in schema["x-optimizers"].values() for node in entry["classes"].values()]
    found = list(leaves(schema))
    found += [leaf for node in classes for leaf in leaves(node, ("optimizer", "params"))]
    return found + [leaf for node in schema["x-schedulers"].values() for leaf in leaves(node, ("scheduler", "params"))]


def scatter(rng: random.Random, places: list, count: int) -> dict:
    data: dict = {}
    for _ in range(count):
        path, node = rng.choice(places)
        borders = [node[key] for key in ("default", "minimum") if key in node]
        try:
            Document("", data).set(path, rng.choice([*node.get("enum", []), *borders, *JUNK]))
        except KeyError:
            continue  # a section above it is already a scalar
    return data


def autos(value, path=()) -> list:
    if isinstance(value, dict):
        return [found for key, below in value.items() for found in autos(below, (*path, key))]
    return [path] if value == "auto" and path[0] != "expert_parallel" else []


@pytest.mark.parametrize("seed", range(4))
def test_a_resolved_run_or_a_config_error(tmp_path, seed):
    rng = random.Random(seed)
    engine_places, run_places = engine_leaves(), list(leaves(run_schema()))
    types = [*engine_schema()["x-optimizers"], *engine_schema()["x-schedulers"]]
    ds, run = tmp_path / "ds.json", tmp_path / "run.yaml"
    resolved_count = 0
    for _ in range(320):
        engine = scatter(rng, engine_places, rng.randint(0, 4))
        for section in ("optimizer", "scheduler"):
            held = engine.get(section, {} if rng.random() < 0.3 else None)
            if isinstance(held, dict):
                engine[section] = {**held, "type": rng.choice(types)}
        ds.write_text(json.dumps(engine))
        run.write_text(json.dumps(scatter(rng, run_places, rng.randint(0, 2))))
        try:
            resolved = load(str(ds), str(run), world_size=rng.choice([1, 2, 3, 8])).with_steps(10)
        except ConfigError as error:
            assert error.problems and not [problem for problem in error.problems if "\n" in problem]
            continue
        resolved_count += 1
        assert autos(resolved.engine) == []
        assert json.loads(resolved.to_json())["engine"] == resolved.engine
    assert resolved_count > 5
