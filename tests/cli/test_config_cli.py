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
from largetrain.cli.arguments import load_from_args, train_parser
from largetrain.config.world import World, launch_world
from largetrain.errors import ConfigError, DivergedError, LargetrainError

ROOT = Path(__file__).parents[2]
MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
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
    """Under a second of CPU time, and neither torch nor deepspeed nor numpy is imported."""
    code = (
        "import sys; from largetrain.cli import main; code = main(sys.argv[1:]); "
        f"heavy = [name for name in {HEAVY} if name in sys.modules]; assert not heavy, heavy; sys.exit(code)"
    )
    times = []
    while len(times) < 3 and min(times, default=1.0) >= 1.0:  # other jobs on the machine only add to the time
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
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 1.0, times


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


def test_what_config_prints_of_an_image_run_can_be_read_back(tmp_path):
    """Neither the engine section of the file nor the scaling of the rate has its effect once more."""
    given = ["optimizer.params.lr=0.5", "train_micro_batch_size_per_gpu=4", "parameters.lr_for_batch=64"]
    printed = run("config", "--config", "ds_configs/runs/digits_resnet.yaml", "--set", *given).stdout
    rest = printed.partition("# Run (YAML)")[2]
    run_text, _, engine_text = rest.partition("# Engine (JSON), as DeepSpeed is handed it")
    engine = json.loads(engine_text)
    assert engine["optimizer"]["params"]["lr"] == 0.5 * 4 / 64 and engine["train_batch_size"] == 4
    (tmp_path / "run.yaml").write_text(run_text)
    (tmp_path / "ds.json").write_text(engine_text)
    again = run("config", "--config", str(tmp_path / "run.yaml"), "--ds_config", str(tmp_path / "ds.json")).stdout
    rest = again.partition("# Run (YAML)")[2]
    run_again, _, engine_again = rest.partition("# Engine (JSON), as DeepSpeed is handed it")
    assert (run_again, json.loads(engine_again)) == (run_text, engine)


def test_config_json_is_what_a_run_saves():
    saved = json.loads(run("config", "--json").stdout)
    assert set(saved) == {"run", "engine", "batch", "layout", "total_steps", "backend", "decoder", "notes"}
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
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", **MEET}
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
        (["confg"], "unknown command 'confg'; commands: train, launch, config, check"),
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


def test_mistakes_of_all_ranks_are_reported_by_the_first_of_a_host(capsys, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    report(ConfigError("x: y.", on_all_ranks=True), {"RANK": "1", "LOCAL_RANK": "1"})
    assert capsys.readouterr().err == "" and waits == [cli.SILENT_WAIT_S]
    report(ConfigError("x: y.", on_all_ranks=True), {"RANK": "8", "LOCAL_RANK": "0"})
    assert capsys.readouterr().err == "largetrain (rank 8): x: y.\n"
    report(ConfigError("x: y.", on_all_ranks=True), {"RANK": "0", "LOCAL_RANK": "0"})
    assert capsys.readouterr().err == "largetrain: x: y.\n" and len(waits) == 2


def test_what_one_rank_alone_met_is_reported_by_it(capsys, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    report(ConfigError("x: y."), {"RANK": "1", "LOCAL_RANK": "1"})
    assert capsys.readouterr().err == "largetrain (rank 1): x: y.\n" and waits == [cli.SILENT_WAIT_S]
    report(LargetrainError("no room"), {"RANK": "1", "LOCAL_RANK": "1"})
    assert capsys.readouterr().err == "largetrain (rank 1): no room\n"


def test_errors_that_are_no_mistake(capsys):
    report(DivergedError("stopped"), {"RANK": "1", "LOCAL_RANK": "1"})
    assert capsys.readouterr().err == ""
    report(DivergedError("stopped"), {})
    assert capsys.readouterr().err == "largetrain: stopped\n"


def test_mistakes_in_flags_and_files_are_those_of_all_ranks():
    for arguments in (["--stps", "3"], ["--seed", "x"], ["--resume", "no/where"]):
        with pytest.raises(ConfigError) as caught:
            load_from_args(train_parser("largetrain train").parse_args(arguments), World())
        assert caught.value.on_all_ranks
    with pytest.raises(ConfigError) as alone:
        launch_world({"RANK": "7", "WORLD_SIZE": "2", **MEET})
    assert not alone.value.on_all_ranks


def test_the_tasks_of_srun_are_refused_once(tmp_path):
    """Without RANK each task would train alone and write over the others' files."""
    environments = [{"SLURM_NTASKS": "2", "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    done = [run("--steps", "1", cwd=tmp_path, **environment) for environment in environments]
    assert [task.returncode for task in done] == [2, 2] and [task.stdout for task in done] == ["", ""]
    assert "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS" in done[0].stderr
    assert len(done[0].stderr.splitlines()) == 1 and done[1].stderr == ""


def test_a_checkpoint_that_is_not_there_is_named_before_torch_is_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for resume, said in (
        ("no/where", "--resume no/where: there is no such checkpoint or folder"),
        ("~/none", f"--resume {tmp_path}/none: there is no such checkpoint"),
        ("", "--resume '': names no checkpoint"),
    ):
        assert main(["--resume", resume, "--dry-run"]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert main(["--resume", "~/there", "--dry-run"]) == 0
    assert main(["--output", "", "--dry-run"]) == 2
    assert main(["--config", "", "--dry-run"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "largetrain: '': names no file."


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


def with_a_closed_output(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run with a standard output whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "largetrain", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, check=False, cwd=cwd, env=env, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    return done


def test_a_command_that_prints_ends_well_without_a_reader(tmp_path):
    (tmp_path / "bad.json").write_text('{"gradient_clipping": -1}')
    for arguments, code in ((["--help"], 0), (["--dry-run"], 0), (["check", "bad.json"], 2)):
        done = with_a_closed_output(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (code, ""), arguments


def test_a_training_run_that_meets_a_broken_pipe_is_no_success(monkeypatch):
    def train(arguments):
        raise BrokenPipeError

    monkeypatch.setattr("largetrain.cli.train.run", train)
    with pytest.raises(BrokenPipeError):
        main(["train", "--steps", "1"])


def test_names_that_the_encoding_of_the_output_lacks_are_escaped(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {preset: größe}\n", encoding="utf-8")
    done = run("config", "--config", "r.yaml", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "gr\\xf6\\xdfe" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "größe").mkdir()
    done = run("config", "--output", "größe", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "output: gr\\xf6\\xdfe" in done.stdout
