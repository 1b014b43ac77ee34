"""Names that lead nowhere, keys that change nothing, and numbers beyond sense are found before anything is imported."""

import os
import sys
import time

import pytest
import yaml

from largetrain.cli.config import readable
from largetrain.config.load import load
from largetrain.config.run_rules import output_problem
from largetrain.errors import ConfigError

TARGETS = ["model.target=string:Template", "model.vocab_size=9", "data.target=string:Template"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def mistakes(*sets: str, **flags: tuple[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(None, None, list(sets), flags)
    return list(caught.value.problems)


def only_mistake(*sets: str) -> str:
    (problem,) = mistakes(*sets)
    return problem


# --- keys that change nothing ---


@pytest.mark.parametrize(
    "written",
    [
        "source=builtin",
        "source=[a.txt]",
        "tokenizer=bytes",
        "text_key=body",
        "validation_fraction=0.05",
        "validation=v.txt",
        "on_bad_input=skip",
        "cache=folder",
    ],
)
def test_keys_of_the_text_sources_are_refused_beside_a_dataset_of_ones_own(written):
    key = written.partition("=")[0]
    assert only_mistake(*TARGETS, f"data.{written}") == (
        f"--set data.{written}: data.{key}: is for the text sources and has no effect with "
        f"data.target='string:Template'; remove it, or hand it to your class under data.args."
    )


def test_keys_that_work_beside_a_dataset_of_ones_own_are_accepted():
    run = load(None, None, [*TARGETS, "data.workers=2", "data.args={a: 1}"]).run
    assert (run.data.workers, run.data.args) == (2, {"a": 1})
    # the built-in decoder takes its vocabulary from the tokenizer
    assert load(None, None, ["data.target=string:Template", "data.tokenizer=bytes"]).run.model.vocab_size == 257


def test_a_held_out_share_beside_held_out_files_is_refused(tmp_path):
    (tmp_path / "v.txt").write_text("v")
    assert only_mistake("data.validation=v.txt", "data.validation_fraction=0.1").startswith(
        "--set data.validation_fraction=0.1: data.validation_fraction: has no effect beside data.validation"
    )


@pytest.mark.parametrize("sets", [TARGETS, ["data.validation=v.txt"], []])
def test_what_is_printed_can_be_read_back(tmp_path, sets):
    (tmp_path / "v.txt").write_text("v")
    resolved = load(None, None, ["optimizer.params.lr=0.1", *sets])
    text = readable(resolved).partition("# Run (YAML)")[2].partition("# Engine")[0]
    (tmp_path / "run.yaml").write_text(text)
    assert load(None, "run.yaml", ["optimizer.params.lr=0.1"]).run == resolved.run
    assert yaml.safe_load(text)["name"] == "demo"


# --- names that lead nowhere ---


@pytest.mark.parametrize("key", ["source", "validation"])
def test_texts_that_are_not_there(tmp_path, key):
    (tmp_path / "a.txt").write_text("a")
    problem = only_mistake(f"data.{key}=[a.txt, builtin, no.txt]").replace(str(tmp_path), "HERE")
    assert problem.endswith(
        f"data.{key}: no.txt does not exist (looked from HERE). Name a file or folder, or `builtin`."
    )
    assert "~/surely/not does not exist" in only_mistake(f"data.{key}=~/surely/not")


def test_every_text_that_is_not_there_is_named():
    assert len(mistakes("data.source=[no.txt, neither.txt]", "data.validation=nor.txt")) == 3


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere:Net", "there is no module 'nowhere' in HERE or on PYTHONPATH; start in its folder or install it."),
        ("mine.deeper.no:Net", "there is no module 'mine.deeper.no' in HERE or on PYTHONPATH"),
        ("single.part:Net", "single is a single file, so it holds no module 'part'."),
        ("mine", "'mine' is not of the form package.module:Name."),
    ],
)
@pytest.mark.parametrize("section", ["model", "data"])
def test_modules_that_are_not_there(tmp_path, section, target, said):
    (tmp_path / "mine" / "deeper").mkdir(parents=True)
    (tmp_path / "single.py").write_text("")
    sets = [*(item for item in TARGETS if not item.startswith(section)), f"{section}.target={target}"]
    problem = only_mistake(*sets, "model.vocab_size=9").replace(str(tmp_path), "HERE")
    assert problem.startswith(f"--set {section}.target={target}: {section}.target: ") and said in problem


def test_a_module_that_is_there_is_not_imported(tmp_path):
    (tmp_path / "mine" / "deeper").mkdir(parents=True)
    for file in ("__init__.py", "deeper/__init__.py", "deeper/net.py"):
        (tmp_path / "mine" / file).write_text("raise RuntimeError('imported')")
    sets = ["model.target=mine.deeper.net:Net", "model.vocab_size=9", "data.target=mine:Data"]
    load(None, None, [*sets, "optimizer.params.lr=0.1"])
    assert "mine" not in sys.modules


def test_output_folders(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(None, None, ["output=~/runs/a"]).run.output == str(tmp_path / "runs" / "a")
    assert only_mistake("output=file").endswith(f"output: {tmp_path / 'file'} is a file, not a folder; name another.")
    assert f"{tmp_path / 'file'} is a file" in only_mistake("output=file/below/it")
    assert mistakes(output=("--output", "")) == [
        "--output '': output: \"\" is no folder; name one, or leave it out for runs/<name>-<time>/."
    ]
    assert output_problem("new/folder") is None and not (tmp_path / "new").exists()


def test_an_output_folder_without_the_right_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))  # root may write anywhere
    assert output_problem("new") == f"the folder {tmp_path} cannot be written by you; name another."


def test_a_tokenizer_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.json").write_text('{"model": {"vocab": {"a": 0, "b": 7}}}')
    resolved = load(None, None, ["data.tokenizer=~/t.json"])
    assert (resolved.run.data.tokenizer, resolved.run.model.vocab_size) == (str(tmp_path / "t.json"), 8)
    assert "no such file" in only_mistake("data.tokenizer=none.json")


# --- numbers beyond sense ---


@pytest.mark.parametrize(
    ("written", "most"),
    [
        ("steps=10000000000000", 10**12),
        ("seed=9223372036854775808", 2**63 - 1),
        ("runtime.timeout_s=10000001", 10**7),
        ("model.layers=1000000", 10**5),
        ("model.hidden=1000000000000000", 10**8),
        ("model.vocab_size=1000000000", 10**8),
        ("data.workers=100000", 10**4),
        ("zero_optimization.reduce_bucket_size=99999999999999999999", 2**63 - 1),
        ("train_micro_batch_size_per_gpu=99999999999999999999", 2**63 - 1),
    ],
)
def test_the_upper_ends_of_ranges(written, most):
    key, _, value = written.partition("=")
    assert only_mistake(written) == f"--set {written}: {key}: must be at most {most}, got {value}."


def test_the_largest_seed_is_accepted():
    assert load(None, None, [f"seed={2**63 - 1}"]).run.seed == 2**63 - 1


def test_the_nearest_divisors_of_a_large_size_are_found_at_once():
    start = time.process_time()
    heads, kv_heads = mistakes("model.hidden=99999989", "model.heads=99999988", "model.kv_heads=99999")
    assert time.process_time() - start < 0.5
    assert "nearest heads that do: 99999989, 1." in heads and "nearest kv_heads that do:" in kv_heads
