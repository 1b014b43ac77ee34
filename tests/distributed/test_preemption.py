"""Real signals to ranks: all save the same update and stop, and the resumed run is the one that was never stopped."""

import json
import os
import signal
import subprocess

import pytest

from largetrain.checkpoint.verify import problem_of
from tests.cli.test_train_cli import run_command
from tests.distributed.tiny_run import rows_of, without_times, write_inputs
from tests.ranks import RankFailed, run_ranks

STEPS = 6
HOLD_S = 0.3  # a moment for the thread that takes the signal


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The files of a run, and the rows of one that nobody stopped."""
    folder = tmp_path_factory.mktemp("signals")
    write_inputs(
        folder,
        {"zero_optimization": {"stage": 2}},
        {"evaluation": {"every_steps": 2, "at_end": True}, "checkpoints": {"at_end": True, "every_steps": 4}},
    )
    assert codes(run_ranks(run_command, 2, words(folder, "straight"))) == [0, 0]
    return folder, without_times(rows_of(folder, "straight"))


def words(folder, output, *more):
    files = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json")]
    return [*files, "--output", str(folder / output), "--steps", str(STEPS), *more]


def codes(outcomes):
    return [code for code, _, _ in outcomes]


def checkpoints(folder, output):
    """Steps of the checkpoints, all of which are whole."""
    found = sorted((folder / output / "checkpoints").glob("step-*"))
    assert [problem_of(path, contents=True) for path in found] == [None] * len(found)
    return [int(path.name[-8:]) for path in found]


def send(rank, number):
    """Called on every rank; a signal reaches one."""
    if os.environ["RANK"] == str(rank):
        os.kill(os.getpid(), number)


def run_signalled(arguments, place, step, rank, number):
    """The command on this rank, in whose process a signal arrives within update, evaluation or save `step`."""
    import time

    from largetrain.compose import watching as compose
    from largetrain.engine.deepspeed import DeepSpeedBackend
    from largetrain.train.state import TrainState
    from largetrain.train.trainer import Trainer

    at = []

    def patched(owner, name, due, after=False):
        plain = getattr(owner, name)

        def method(self, *args, **kwargs):
            result = plain(self, *args, **kwargs) if after else None
            if due():
                send(rank, number)
                time.sleep(HOLD_S)
            return result if after else plain(self, *args, **kwargs)

        setattr(owner, name, method)

    def counted(self, *args, **kwargs):
        advance(self, *args, **kwargs)
        at.append(self.step)

    advance, TrainState.advance = TrainState.advance, counted
    if place == "update":
        patched(Trainer, "_update", lambda: len(at) + 1 == step)
    elif place == "snapshot":
        patched(DeepSpeedBackend, "snapshot", lambda: at[-1:] == [step])
    elif place == "evaluation":
        evaluation_batches = compose.evaluation_batches

        def batches(*args, **kwargs):
            for index, batch in enumerate(evaluation_batches(*args, **kwargs)):
                if index == 1 and at[-1:] == [step]:
                    send(rank, number)
                    time.sleep(HOLD_S)
                yield batch

        compose.evaluation_batches = batches
    return run_command(arguments)


@pytest.mark.parametrize(
    ("rank", "number", "code", "words_for_it"),
    [
        (0, signal.SIGTERM, 75, "SIGTERM"),
        (1, signal.SIGUSR1, 75, "SIGUSR1"),
        (0, signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_to_any_rank_stops_all_with_a_checkpoint(inputs, rank, number, code, words_for_it):
    folder, straight = inputs
    output = f"{number.name}-{rank}"
    stopped = run_ranks(run_signalled, 2, words(folder, output), "update", 3, rank, number)
    assert codes(stopped) == [code, code]
    assert checkpoints(folder, output) == [3]
    place = folder / output / "checkpoints" / "step-00000003"
    assert stopped[0][2] == (
        f"largetrain: stopped after update 3 ({words_for_it}); saved in {place}. "
        f"Go on: the same command with --resume auto\n"
    )
    assert stopped[1][2] == ""
    lines = (folder / output / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert without_times([json.loads(line) for line in lines]) == straight[:4]  # three updates and an evaluation
    assert lines[-1].endswith("\n")


def test_an_evaluation_is_given_up_and_made_up_for(inputs):
    folder, straight = inputs
    stopped = run_ranks(run_signalled, 2, words(folder, "evaluation"), "evaluation", 2, 1, signal.SIGTERM)
    assert codes(stopped) == [75, 75]
    assert checkpoints(folder, "evaluation") == [2]
    assert not any("eval/loss" in row for row in rows_of(folder, "evaluation"))
    assert codes(run_ranks(run_command, 2, words(folder, "evaluation", "--resume", "auto"))) == [0, 0]
    assert without_times(rows_of(folder, "evaluation")) == straight


def test_the_last_evaluation_is_given_up_and_made_up_for(inputs):
    """Without it the run is not complete; with it, it is."""
    folder, straight = inputs
    stopped = run_ranks(run_signalled, 2, words(folder, "last"), "evaluation", STEPS, 0, signal.SIGTERM)
    assert codes(stopped) == [75, 75]
    assert checkpoints(folder, "last") == [4, 6]
    assert without_times(rows_of(folder, "last")) == straight[:-1]
    resumed = run_ranks(run_command, 2, words(folder, "last", "--resume", "auto"))
    assert codes(resumed) == [0, 0]
    assert without_times(rows_of(folder, "last")) == straight
    again = run_ranks(run_command, 2, words(folder, "last", "--resume", "auto"))
    assert codes(again) == [0, 0]
    assert f"is complete: all {STEPS} updates are done" in again[0][2]
    assert without_times(rows_of(folder, "last")) == straight


def test_a_signal_in_the_last_update_lets_a_run_without_anything_left_end(inputs):
    folder, _ = inputs
    arguments = words(folder, "end", "--set", "evaluation.at_end=false", "evaluation.every_steps=0")
    assert codes(run_ranks(run_signalled, 2, arguments, "update", STEPS, 0, signal.SIGTERM)) == [0, 0]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_under_way_is_the_one_that_is_stopped_with(inputs, asynchronous):
    folder, straight = inputs
    output = f"save-{asynchronous}"
    arguments = words(folder, output, "--set", f"checkpoints.asynchronous={asynchronous}")
    stopped = run_ranks(run_signalled, 2, arguments, "snapshot", 4, 1, signal.SIGTERM)
    assert codes(stopped) == [75, 75]
    assert checkpoints(folder, output) == [4]
    assert not list((folder / output / "checkpoints").glob("abandoned-*"))  # what a second save of it would leave
    assert codes(run_ranks(run_command, 2, words(folder, output, "--resume", "auto"))) == [0, 0]
    assert without_times(rows_of(folder, output)) == straight


def test_signals_to_loader_processes_too(inputs):
    """SLURM signals every process of a job, launchers every descendant of a rank."""
    folder, straight = inputs
    arguments = words(folder, "workers", "--set", "data.workers=2")
    stopped = run_ranks(run_and_signal_workers, 2, arguments, 3)
    assert codes(stopped) == [75, 75], stopped
    assert checkpoints(folder, "workers") == [3]
    assert codes(run_ranks(run_command, 2, words(folder, "workers", "--resume", "auto"))) == [0, 0]
    assert without_times(rows_of(folder, "workers")) == straight


def run_and_signal_workers(arguments, step):
    import multiprocessing

    from largetrain.engine.signals import descendants
    from largetrain.train.trainer import Trainer

    multiprocessing.set_start_method("fork", force=True)
    plain = Trainer._update

    def update(self):
        if self.state.step + 1 == step:
            workers = descendants(os.getpid())
            assert len(workers) == 2
            for name in ("TERM", "INT", "USR1", "HUP"):  # by a process of its own: a parent's SIGTERM is another thing
                subprocess.run(["kill", f"-{name}", *map(str, workers), str(os.getpid())], check=True)
        return plain(self)

    Trainer._update = update
    code, out, err = run_command(arguments)
    return (75 if code == 130 else code), out, err  # SIGINT was among them


def test_a_signal_before_the_first_update_ends_at_once(inputs):
    folder, _ = inputs
    with pytest.raises(RankFailed, match=r"rank 0 ended with exit code 143[\s\S]*nothing to save"):
        run_ranks(run_signalled_in_data, 1, words(folder, "early"))
    assert checkpoints(folder, "early") == []
    assert not (folder / "early" / "metrics.jsonl").exists()


def run_signalled_in_data(arguments):
    import time

    from largetrain.compose import run as compose

    def build_data(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    compose.build_data = build_data
    return run_command(arguments)


def test_max_minutes(inputs):
    folder, straight = inputs
    for minutes in ("0.0001", "0.0001"):  # each of them finishes one update
        resume = ["--resume", "auto", "--max-minutes", minutes]
        outcomes = run_ranks(run_command, 2, words(folder, "minutes", *resume))
        assert codes(outcomes) == [75, 75]
        assert "(--max-minutes is over)" in outcomes[0][2]
    assert checkpoints(folder, "minutes") == [1, 2]
    resume = ["--resume", "auto", "--max-minutes", "10"]
    assert codes(run_ranks(run_command, 2, words(folder, "minutes", *resume))) == [0, 0]
    assert without_times(rows_of(folder, "minutes")) == straight


def test_max_minutes_in_words_is_a_mistake(inputs):
    folder, _ = inputs
    code, _, err = run_ranks(run_command, 1, words(folder, "words", "--max-minutes", "soon"))[0]
    assert code == 2
    assert err == 'largetrain: --max-minutes soon: max_minutes: expected a number, got "soon" (text).\n'


def test_checkpoints_by_the_clock_and_at_milestones(inputs):
    folder, _ = inputs
    sets = ["checkpoints.every_minutes=1e-9", "checkpoints.keep_last=0", "checkpoints.every_steps=0"]
    assert codes(run_ranks(run_command, 2, words(folder, "clock", "--set", *sets))) == [0, 0]
    # asked for after an update, written after the next
    assert checkpoints(folder, "clock") == [2, 3, 4, 5, 6]
    sets = ["checkpoints.milestones=[1, 3]", "checkpoints.keep_last=1", "checkpoints.every_steps=2"]
    assert codes(run_ranks(run_command, 2, words(folder, "milestones", "--set", *sets))) == [0, 0]
    assert checkpoints(folder, "milestones") == [1, 3, 6]


def exchange(rounds):
    """What ranks agree on, when each has its own bit in its own rounds."""
    import torch.distributed as dist

    from largetrain.parallel.agreement import StepAgreement

    dist.init_process_group("gloo")
    agreement = StepAgreement(30)
    own = [1 << dist.get_rank() if index % dist.get_world_size() == dist.get_rank() else 0 for index in range(rounds)]
    return [agreement.union(flags) for flags in own], agreement.last


@pytest.mark.parametrize("ranks", [1, 3])
def test_bits_of_any_rank_are_bits_of_all(ranks):
    expected = [1 << index % ranks for index in range(7)]
    assert run_ranks(exchange, ranks, 7) == [(expected, expected[-1])] * ranks
