"""The commands config and check, and what the command line does before any command: real processes."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from largetrain import cli
from largetrain.cli import main, report, without_local_rank
from largetrain.errors import ConfigError, DivergedError, LargetrainError

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "deepspeed", "numpy", "rich")


def run(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "largetrain", *arguments]
    return subprocess.run(command, check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["config"],
        ["config", "--ds_config", "ds_configs/zero3_offload.json", "--config", "ds_configs/runs/gpt3-175b.yaml"],
        ["config", "--reference"],
        ["config", "--json-schema", "engine"],
        ["check", "ds_configs/zero2.json"],
        ["train", "--dry-run"],
    ],
)
def test_commands_that_do_not_train_are_light(arguments):
    """Under a second of CPU time, and neither torch nor deepspeed nor numpy is imported (shows 7)."""
    code = (
        "import sys; from largetrain.cli import main; code = main(sys.argv[1:]); "
        f"heavy = [name for name in {HEAVY} if name in sys.modules]; assert not heavy, heavy; sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_help_names_the_commands_and_the_flags_of_train():
    text = run("--help").stdout
    for part in (
        *cli.COMMANDS,
        "--ds_config",
        "--config",
        "--set",
        "--steps",
        "--seed",
        "--output",
        "--resume",
        "--dry-run",
    ):
        assert part in text


def test_config_prints_notes_then_a_run_yaml_then_an_engine_json():
    done = run("config", "--ds_config", "ds_configs/zero2.json", "--steps", "10", "--world-size", "4")
    assert done.returncode == 0
    notes, _, rest = done.stdout.partition("# Run (YAML)")
    run_text, _, engine_text = rest.partition("# Engine (JSON), as DeepSpeed is handed it")
    assert "train_batch_size = 32 (4 per rank x 2 accumulation x 4 ranks)" in notes
    assert yaml.safe_load(run_text)["steps"] == 10
    engine = json.loads(engine_text)
    assert (engine["train_batch_size"], engine["scheduler"]["params"]["total_num_steps"]) == (32, 10)


def test_what_config_prints_can_be_read_back(tmp_path):
    done = run("config", "--config", "ds_configs/runs/gpt2.yaml", "--ds_config", "ds_configs/zero3.json")
    rest = done.stdout.partition("# Run (YAML)")[2]
    run_text, _, engine_text = rest.partition("# Engine (JSON), as DeepSpeed is handed it")
    (tmp_path / "run.yaml").write_text(run_text)
    (tmp_path / "ds.json").write_text(engine_text)
    again = run("config", "--config", str(tmp_path / "run.yaml"), "--ds_config", str(tmp_path / "ds.json"))
    assert again.stdout.partition("# Run (YAML)")[2] == rest


def test_config_json_is_what_a_run_saves():
    saved = json.loads(run("config", "--json").stdout)
    assert set(saved) == {"run", "engine", "batch", "total_steps", "decoder", "notes"}
    assert run("config", "--world-size", "0").returncode == 2


def test_set_takes_several_values_and_may_be_repeated():
    saved = json.loads(
        run("config", "--json", "--set", "seed=5", "model.layers=2", "--set", "bf16.enabled=true").stdout
    )
    assert (saved["run"]["seed"], saved["decoder"]["layers"], saved["engine"]["bf16"]) == (5, 2, {"enabled": True})


def test_all_mistakes_in_one_report_and_exit_code_2(tmp_path):
    (tmp_path / "ds.json").write_text('{\n"gradient_acumulation_steps": 4,\n"fp16": {"enabled": "false"}\n}')
    done = run("config", "--ds_config", "ds.json", "--set", "model.layers=0", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "largetrain: 3 mistakes:",
        "  ds.json:2: gradient_acumulation_steps: unknown key. Did you mean gradient_accumulation_steps?",
        '  ds.json:3: fp16.enabled: expected true or false, got "false" (text). Write false without quotes.',
        "  --set model.layers=0: model.layers: must be greater than 0, got 0.",
    ]


def test_a_mistake_is_found_before_torch_is_imported_and_said_once_per_launch(tmp_path):
    """Three ranks as a launcher starts them: exit code 2 each, one report."""
    command = [sys.executable, "-m", "largetrain", "--local_rank=0", "--set", "gradient_clipping=-1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2, 2]
    assert outputs == [
        "largetrain: --set gradient_clipping=-1: gradient_clipping: must be at least 0, got -1.\n",
        "",
        "",
    ]


def test_wrong_flags_and_commands(capsys):
    for arguments, said in (
        (["confg"], "unknown command 'confg'; commands: train, config, check"),
        (["config", "--stps", "3"], "unrecognized arguments: --stps 3; did you mean --steps?"),
        (["config", "--world-size", "two"], "invalid int value: 'two'"),
        (["config", "leftover"], "unrecognized arguments: leftover"),
        (["check"], "the following arguments are required: FILE"),
        (["--steps", "0", "--dry-run"], "--steps 0: steps: must be greater than 0, got 0."),
        (["--seed", "x", "--dry-run"], '--seed x: seed: expected a whole number, got "x" (text).'),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("largetrain: ") and said in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["--local_rank=1", "config"], ["config"]),
        (["--local-rank", "1", "train", "--steps", "3"], ["train", "--steps", "3"]),
        (["train", "--local_rank", "0"], ["train"]),
        (["--steps", "3", "--local-rank=7"], ["--steps", "3"]),
        ([], []),
    ],
)
def test_launchers_add_a_local_rank(typed, kept):
    assert without_local_rank(typed) == kept


def test_only_the_first_rank_of_a_host_reports(capsys, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    report(ConfigError("x: y."), {"RANK": "1", "LOCAL_RANK": "1"})
    assert capsys.readouterr().err == "" and waits == [cli.SILENT_WAIT_S]
    report(ConfigError("x: y."), {"RANK": "8", "LOCAL_RANK": "0"})
    assert capsys.readouterr().err == "largetrain (rank 8): x: y.\n"
    report(DivergedError("stopped"), {"RANK": "1", "LOCAL_RANK": "1"})
    assert capsys.readouterr().err == ""
    report(LargetrainError("no room"), {"RANK": "1", "LOCAL_RANK": "1"})
    assert capsys.readouterr().err == "largetrain (rank 1): no room\n"
    report(DivergedError("stopped"), {})
    assert capsys.readouterr().err == "largetrain: stopped\n"


def test_check_prints_every_problem_of_every_file(tmp_path):
    (tmp_path / "good.json").write_text('{// fine\n "train_batch_size": "auto", "bf16": {"enabled": "auto"},}')
    (tmp_path / "bad.json").write_text(
        '{\n "zero_optimization": {"stage": 2,\n "offload_param": {"device": "cpu"}},\n "steps_per_print": 0}'
    )
    (tmp_path / "old.json").write_text('{"zero_optimization": {"stage": 1, "cpu_offload": true}}')
    done = run("check", "good.json", "bad.json", "old.json", "/no/where.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.splitlines() == [
        "good.json: ok",
        "bad.json:3: zero_optimization.offload_param: needs ZeRO stage 3; the stage here is 2, "
        "where DeepSpeed ignores it.",
        "bad.json:4: steps_per_print: must be at least 1, got 0.",
        "old.json:1: zero_optimization.cpu_offload: is an old name; write offload_optimizer. (warning)",
        "old.json: ok",
        "/no/where.json: no such file (the folder /no does not exist).",
    ]
    assert run("check", "good.json", "old.json", cwd=tmp_path).returncode == 0
    assert run("check", "--quiet", "good.json", cwd=tmp_path).stdout == ""


def test_check_accepts_what_a_run_refuses(tmp_path):
    """A file may be right for another program: pipeline stages, activation checkpointing."""
    (tmp_path / "p.json").write_text(
        '{"pipeline": {"stages": 2}, "activation_checkpointing": {"cpu_checkpointing": true}}'
    )
    assert run("check", "p.json", cwd=tmp_path).returncode == 0
    assert run("config", "--ds_config", "p.json", cwd=tmp_path).returncode == 2


def test_a_closed_pipe_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m largetrain config --reference | head -1",
        shell=True,
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "RUN YAML (--config FILE)\n" and done.stderr == ""
