"""Real launches that are told to stop: what is saved, the exit code, and that nothing goes on."""

import signal
from pathlib import Path

import pytest

from largetrain.checkpoint.verify import problem_of
from largetrain.cli import main, train
from largetrain.engine.signals import Stop, StopRequests
from tests.cli.test_train_cli import run_command
from tests.distributed.tiny_run import rows_of, without_times, write_inputs
from tests.ranks import run_ranks
from tests.signalled import Shot, launch

STEPS = "60"
FILES = ["--ds_config", "engine.json", "--config", "run.json"]


@pytest.fixture
def folder(tmp_path):
    write_inputs(
        tmp_path,
        {"zero_optimization": {"stage": 2}},
        {
            "logging": {"every_steps": 1},
            "data": {"workers": 1},
            "evaluation": {"every_steps": 7, "at_end": True},
            "checkpoints": {"at_end": True},
        },
    )
    return tmp_path


def the_checkpoint(folder: Path) -> int:
    """The step of the only checkpoint, which is whole."""
    [path] = (folder / "out" / "checkpoints").glob("step-*")
    assert problem_of(path, contents=True) is None
    return int(path.name[-8:])


def test_sigterm_to_deepspeed_saves_and_answers_75_and_the_run_goes_on(folder):
    """DeepSpeed's own `deepspeed` would die and leave its ranks training on."""
    arguments = [*FILES, "--output", "out", "--resume", "auto", "--steps", STEPS]
    stopped = launch(folder, "deepspeed", arguments, Shot("runner", after="step 3/"))
    assert (stopped.code, stopped.left) == (75, []), stopped.output
    step = the_checkpoint(folder)
    assert 3 <= step < int(STEPS)
    assert [line for line in stopped.lines if line.startswith("largetrain: ")] == [
        "largetrain: SIGTERM: this update is finished and saved, then the run stops; once more stops it at once\n",
        f"largetrain: stopped after update {step} (SIGTERM); saved in out/checkpoints/step-{step:08}. "
        f"Go on: the same command with --resume auto\n",
    ]
    resumed = launch(folder, "deepspeed", arguments)
    assert resumed.code == 0, resumed.output
    paths = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json")]
    run_ranks(
        run_command, 2, [*paths, "--output", str(folder / "straight"), "--steps", STEPS, "--set", "data.workers=0"]
    )
    assert without_times(rows_of(folder)) == without_times(rows_of(folder, "straight"))


def test_ranks_save_and_stop_when_their_launcher_is_killed(folder):
    shot = Shot("runner", signal.SIGKILL, after="step 3/")
    stopped = launch(folder, "deepspeed", [*FILES, "--output", "out", "--steps", "100000"], shot)
    assert (stopped.code, stopped.left) == (-signal.SIGKILL, []), stopped.output
    assert f"stopped after update {the_checkpoint(folder)} (the launcher has died)" in stopped.output


@pytest.mark.parametrize(
    ("asked", "code", "told"),
    [
        (Stop(0), 1, "this rank stops because another one has ended"),
        (Stop.SIGTERM, 143, "stopped by SIGTERM without saving; --resume auto goes on from the last checkpoint"),
        (Stop.SIGINT, 130, "stopped by SIGINT without saving"),
    ],
)
def test_a_rank_that_waits_for_one_that_signals_have_ended_says_so(monkeypatch, folder, capsys, asked, code, told):
    """The other one was signalled twice, or before its first update; no rank fails by itself then."""

    def lose_the_other(*_):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    requests = StopRequests()
    requests.asked = asked
    monkeypatch.setattr(train, "take_signals", lambda speaks: requests)
    monkeypatch.setattr(train, "_train", lose_the_other)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--config", str(folder / "run.json"), "--ds_config", str(folder / "engine.json")]) == code
    assert capsys.readouterr().err.startswith(f"largetrain: {told}")
