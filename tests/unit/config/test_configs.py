"""Every file of ds_configs/ loads, on any usual number of ranks, and is clean for any other DeepSpeed tool."""

from pathlib import Path

import pytest

from largetrain.config.lint import lint_engine
from largetrain.config.load import DEFAULT_ENGINE, load
from largetrain.config.parse import read_engine_file
from largetrain.config.schema import LanguageRun

FOLDER = Path(__file__).parents[3] / "ds_configs"
ENGINES = sorted(path.name for path in FOLDER.glob("*.json"))
RUNS = sorted(path.name for path in (FOLDER / "runs").glob("*.yaml"))


def test_the_expected_files_are_there():
    stages = [f"zero{stage}{kind}.json" for stage in range(4) for kind in ("", "_bf16", "_fp32")]
    assert set(ENGINES) >= {*stages, "zero2_offload.json", "zero3_offload.json"}
    assert set(RUNS) >= {"demo.yaml", "gpt2.yaml", "llama2-7b.yaml", "llama3-8b.yaml", "gpt3-175b.yaml"}
    assert set(RUNS) >= {"digits_resnet.yaml", "digits_deeplab.yaml", "imagenet_resnet50.yaml", "voc_deeplabv3.yaml"}


@pytest.mark.parametrize("name", ENGINES)
def test_engine_config(name):
    lint = lint_engine(read_engine_file(str(FOLDER / name)))
    assert lint.problems == () and lint.warnings == ()
    # in half precision DeepSpeed's stage 0 does not train rightly: it is handed stage 1
    stage = 1 if name in ("zero0.json", "zero0_bf16.json") else int(name[4])
    for ranks in (1, 2, 3, 4, 8):
        resolved = load(str(FOLDER / name), str(FOLDER / "runs" / "demo.yaml"), world_size=ranks)
        assert resolved.engine["zero_optimization"]["stage"] == stage
        assert resolved.batch.global_batch == ranks * 8
        assert [key for key in ("fp16", "bf16") if resolved.engine.get(key, {}).get("enabled")] == precision(name)
        assert not [note for note in resolved.notes if "no effect" in note]


def precision(name: str) -> list[str]:
    kinds = {"_fp32": [], "_bf16": ["bf16"], "3_offload": ["bf16"]}
    return next((kind for part, kind in kinds.items() if part in name), ["fp16"])


@pytest.mark.parametrize("name", RUNS)
def test_run_config(name):
    # the full-size image runs name folders that are the user's to put there
    images = ["data.source=synthetic"] if "imagenet" in name or "voc" in name else []
    resolved = load(str(FOLDER / "zero3_bf16.json"), str(FOLDER / "runs" / name), images, world_size=8)
    assert resolved.run.name == name.removesuffix(".yaml")
    if isinstance(resolved.run, LanguageRun):
        assert resolved.run.model.preset == resolved.run.name.removesuffix("_parallel")
        assert resolved.total_steps > 0
    else:
        assert resolved.run.epochs > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_image_runs_take_every_engine_json(engine):
    """What an image run needs otherwise is in its own `engine` section, so the same command line serves all."""
    for name in ("digits_resnet.yaml", "digits_deeplab.yaml"):
        resolved = load(str(FOLDER / engine), str(FOLDER / "runs" / name), world_size=2).with_backend("ddp")
        assert "scheduler" not in resolved.engine and resolved.engine["optimizer"]["type"] in ("SGD", "AdamW")
        ignored = [note for note in resolved.notes if "has no effect" in note]
        assert len(ignored) == (0 if engine.startswith("zero0") else 1)


def test_the_largest_run_has_the_published_size():
    resolved = load(str(FOLDER / "zero3.json"), str(FOLDER / "runs" / "gpt3-175b.yaml"), ["model.vocab_size=50257"])
    assert resolved.decoder.parameter_count() == pytest.approx(175e9, rel=0.005)


def test_the_built_in_configs_are_the_written_out_ones():
    assert read_engine_file(str(DEFAULT_ENGINE)).data == read_engine_file(str(FOLDER / "zero2_fp32.json")).data
    built_in, written = load(None, None), load(None, str(FOLDER / "runs" / "demo.yaml"))
    assert written.run.evaluation.every_steps > 0  # the demo shows that the validation loss falls
    without = written.run.model_copy(update={"evaluation": built_in.run.evaluation})
    assert (built_in.run, built_in.engine) == (without, written.engine)
