"""The stored schema is that of the installed DeepSpeed; these tests fail when a new version moves under it."""

import ast
import copy
import inspect
import json
import os

import pytest

from largetrain.config.autos import GPT3_ADAM
from largetrain.config.document import Document, dotted
from largetrain.config.engine_meanings import MEANINGS
from largetrain.config.engine_schema import PATH, engine_keys, engine_schema, key_places, optimizer_name
from largetrain.config.honoured import REFUSED
from largetrain.config.lint import lint_engine
from largetrain.config.new_names import use_new_names


@pytest.fixture(scope="module", autouse=True)
def deepspeed_on_cpu():
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"
    yield
    if before is None:
        del os.environ["DS_ACCELERATOR"]
    else:
        os.environ["DS_ACCELERATOR"] = before


def test_the_stored_schema_is_what_the_installed_version_gives():
    from largetrain.doctor.engine_schema import build_schema, render

    stored, built = json.loads(PATH.read_text(encoding="utf-8")), json.loads(render(build_schema()))
    assert stored["x-versions"]["deepspeed"] == built["x-versions"]["deepspeed"], (
        "a new DeepSpeed: read its changes, run `python -m largetrain.doctor.engine_schema`, review the difference"
    )
    stored["x-versions"].pop("torch"), built["x-versions"].pop("torch")
    assert stored == built


def test_every_top_level_key_that_deepspeed_reads_is_known():
    """Reads DeepSpeed's config code: string constants used on the parameter dict."""
    from deepspeed.runtime import config as ds

    read = set()
    for node in ast.walk(ast.parse(inspect.getsource(ds.DeepSpeedConfig))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            read.add(node.value)
    sources = [
        function for name, function in vars(ds).items() if name.startswith("get_") and inspect.isfunction(function)
    ]
    constants = set()
    for function in sources:
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if is_top_level_read(node):
                key = node.args[1] if len(node.args) == 3 else node.args[0]
                value = getattr(inspect.getmodule(function), key.id, None) if isinstance(key, ast.Name) else key.value
                constants.add(value)
    top_level = {key for key in constants if isinstance(key, str)}
    assert len(top_level) > 20
    assert top_level <= engine_keys(), top_level - engine_keys()
    assert {"compile", "weight_quantization"} <= read & engine_keys()


def is_top_level_read(node: ast.AST) -> bool:
    """`get_scalar_param(param_dict, KEY, default)` or `param_dict.get(KEY, ...)` with KEY a name or a string."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    if name == "get_scalar_param":
        return (
            isinstance(node.args[0], ast.Name)
            and node.args[0].id == "param_dict"
            and isinstance(node.args[1], ast.Name)
        )
    owner = getattr(getattr(node.func, "value", None), "id", "")
    return (
        name == "get"
        and owner == "param_dict"
        and isinstance(node.args[0], ast.Constant | ast.Name)
        and len(node.args) < 3
    )


def test_deepspeeds_own_lists_are_covered():
    from deepspeed.runtime import config as ds
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    schema = engine_schema()
    assert set(ds._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(schema["x-removed"])
    assert set(ds._REMOVED_ZERO_CONFIG_KEYS) <= set(schema["properties"]["zero_optimization"]["x-removed"])
    assert set(schema["x-schedulers"]) == set(VALID_LR_SCHEDULES)
    assert all(optimizer_name(name) is not None for name in ds.DEEPSPEED_OPTIMIZERS)


def test_each_model_field_is_a_key_with_its_default():
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for section, model in (("fp16", DeepSpeedFP16Config), ("zero_optimization", DeepSpeedZeroConfig)):
        properties = engine_schema()["properties"][section]["properties"]
        for name, field in model.model_fields.items():
            node = properties[field.alias or name]
            if isinstance(field.default, int | float | str | None):
                assert node["default"] == field.default, name


def test_deepspeed_parses_every_shipped_config():
    """Every shipped config, resolved, makes a DeepSpeedConfig with the same numbers."""
    from pathlib import Path

    from deepspeed.runtime.config import DeepSpeedConfig

    from largetrain.config.load import load

    folder = Path(__file__).parents[3] / "ds_configs"
    for path in sorted(folder.glob("*.json")):
        engine = load(str(path), None).engine
        parsed = DeepSpeedConfig(dict(engine))
        assert parsed.train_batch_size == engine["train_batch_size"]
        assert parsed.gradient_clipping == engine["gradient_clipping"]
        assert parsed.zero_config.stage == engine["zero_optimization"]["stage"]
        assert parsed.float16_config.enabled == ("fp16" in engine)


JUNK = ["x", "5", -1, 0, 1, 1.5, True, False, None, [], ["x"], {}, "auto", 2.0]
BATCH = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def leaves(node: dict, path: tuple[str, ...] = ()):
    for key, below in node.get("properties", {}).items():
        yield (*path, key), below
        yield from leaves(below, (*path, key))


def values(node: dict) -> list:
    """Values of the right kind at the borders of a key, and values of every other kind."""
    borders = [node[key] for key in ("default", "minimum", "maximum", "exclusiveMinimum") if key in node]
    return [*node.get("enum", []), *borders, *(border + 1 for border in borders if isinstance(border, int)), *JUNK]


def test_deepspeed_parses_every_value_of_every_key_that_the_lint_accepts():
    """Thousands of small configs; the optimizer and the scheduler are checked by their classes' signatures instead."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    tried = accepted = 0
    refused = []
    for path, node in leaves(engine_schema()):
        if path[0] in (*BATCH, "optimizer", "scheduler") or path == ("aio", "use_gds"):
            continue
        for value in values(node):
            config: dict = copy.deepcopy(BATCH)
            Document("f", config).set(path, value)
            lint = lint_engine(Document("f", config))
            tried += 1
            if not lint.problems:
                accepted += 1
                try:
                    DeepSpeedConfig(copy.deepcopy(lint.data))
                except (AssertionError, AttributeError, KeyError, TypeError, ValueError, DeepSpeedConfigError) as error:
                    refused.append(f"{dotted(path)} = {value!r}: {error}")
    assert refused == []
    assert tried > 3000 and accepted > 800, (tried, accepted)


@pytest.mark.parametrize("section", ["scheduler", "optimizer"])
def test_the_classes_take_every_parameter_value_that_the_lint_accepts(section):
    """DeepSpeed's schedules, each run for some steps, and the optimizers that come from torch.optim."""
    import torch
    from deepspeed.runtime import lr_schedules

    def schedule(name: str, params: dict) -> None:
        optimizer = torch.optim.Adam([weight], lr=1e-3)
        scheduler = getattr(lr_schedules, name)(optimizer, **params)
        for _ in range(20):
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] >= 0

    weight = torch.nn.Parameter(torch.zeros(3))
    needed = {"total_num_steps": 10, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
    known = engine_schema()[f"x-{section}s"]
    if section == "optimizer":
        known = {name: entry["classes"]["default"] for name, entry in known.items()
                 if hasattr(torch.optim, name) and name not in ("Adam", "AdamW", "Muon")}  # fmt: skip
    refused = []
    for name, node in known.items():
        for key, below in node["properties"].items():
            for value in [*values(below), 1e-8, 0.5, [0.5, 1.5]]:
                given = {part: needed[part] for part in node.get("required", ())} | {key: value}
                config = {"optimizer": {"type": "AdamW"}, section: {"type": name, "params": given}}
                lint = lint_engine(Document("f", config))
                if lint.problems or value == "auto":
                    continue
                params = lint.data[section]["params"]
                try:
                    schedule(name, params) if section == "scheduler" else getattr(torch.optim, name)([weight], **params)
                except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
                    refused.append(f"{name} {key} = {value!r}: {error}")
    assert refused == []


def test_old_names_mean_the_same_under_their_new_name():
    from deepspeed.runtime.config import DeepSpeedConfig

    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "max_live_parameters": 7,
            "stage3_gather_fp16_weights_on_model_save": True}  # fmt: skip
    old = {**BATCH, "bfloat16": {"enabled": True}, "zero_optimization": zero}
    new = Document("f", copy.deepcopy(old))
    notes = use_new_names(new)
    assert new.data == {**BATCH, "bf16": {"enabled": True}, "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        "stage3_max_live_parameters": 7, "stage3_gather_16bit_weights_on_model_save": True,
    }}  # fmt: skip
    assert len(notes) == 5
    first, second = DeepSpeedConfig(old), DeepSpeedConfig(new.data)
    for section in ("zero_config", "bfloat16_config"):
        kept = {"cpu_offload", "cpu_offload_param", "stage3_gather_fp16_weights_on_model_save"}
        assert getattr(first, section).model_dump(exclude=kept) == getattr(second, section).model_dump(exclude=kept)
    assert use_new_names(Document("f", {"zero_optimization": {"cpu_offload": False}})) != []


def test_every_old_name_points_to_a_key():
    for path, node in leaves(engine_schema()):
        if "x-use" in node and path[-1] != "cpu_offload_use_pin_memory":  # which has no effect: refused
            siblings = engine_schema()
            for part in path[:-1]:
                siblings = siblings["properties"][part]
            assert node["x-use"] in siblings["properties"], path


def test_tables_name_only_keys_that_exist():
    properties = engine_schema()["properties"]
    for key in [*MEANINGS, *(key for key in REFUSED if not key.startswith("scheduler.params"))]:
        node = {"properties": properties}
        for part in key.split("."):
            node = node["properties"][part]
    assert [key for key, node in properties.items() if "description" not in node and not node.get("deprecated")] == []
    assert set(GPT3_ADAM) <= set(engine_schema()["x-optimizers"]["AdamW"]["classes"]["default"]["properties"])
    assert key_places()["stage"] == ("zero_optimization", "stage")
