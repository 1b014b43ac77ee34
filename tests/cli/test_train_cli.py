"""`largetrain train` in one process of a forked rank: exit codes and single lines for what a user may get wrong."""

import contextlib
import errno
import io
import json
import os

import pytest

from largetrain.cli import main
from tests.distributed.tiny_run import rows_of, write_inputs
from tests.ranks import run_ranks


def run_command(arguments, before=None):
    """Exit code, standard output and standard error of the command on this rank."""
    if before is not None:
        before()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def folder(tmp_path):
    write_inputs(
        tmp_path,
        {"zero_optimization": {"stage": 2}},
        {"checkpoints": {"every_steps": 2, "at_end": True, "keep_last": 0}},
    )
    return tmp_path


def arguments(folder, *more, output="out"):
    files = ["--ds_config", str(folder / "engine.json"), "--config", str(folder / "run.json")]
    return [*files, "--output", str(folder / output), *more]


def checkpoints(folder):
    """Folders only: beside them lie `latest` and DeepSpeed's scripts that merge a checkpoint's weights."""
    return sorted(path.name for path in (folder / "out" / "checkpoints").iterdir() if path.is_dir())


def test_the_output_folder_holds_what_is_promised(folder):
    (code, out, err), (other_code, other_out, other_err) = run_ranks(
        run_command, 2, arguments(folder, "--steps", "3", "--set", "logging.tensorboard=true")
    )
    assert (code, other_code) == (0, 0)
    assert other_out == other_err == err == ""  # rank 0 alone speaks
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "tensorboard", "checkpoints"}
    assert checkpoints(folder) == ["step-00000002", "step-00000003"]
    assert len(list((folder / "out" / "tensorboard").iterdir())) == 1
    config = json.loads((folder / "out" / "config.json").read_text())
    assert "auto" not in json.dumps({key: config[key] for key in ("engine", "batch", "total_steps")})
    assert config["engine"]["scheduler"]["params"]["total_num_steps"] == 3
    assert config["world"]["world_size"] == 2
    assert out.splitlines()[-2].startswith("done: 3 updates, 384 tokens; results in ")


def test_a_dry_run_prints_the_resolved_run_and_writes_nothing(folder):
    (code, out, _), (_, other_out, _) = run_ranks(run_command, 2, arguments(folder, "--steps", "3", "--dry-run"))
    assert code == 0
    assert '"train_batch_size": 8' in out or "train_batch_size = 8" in out
    assert other_out == ""
    assert not (folder / "out").exists()
    assert not (folder / "cache").exists()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("file", "file is a file, not a folder; name another."),
        ("file/below", "file is a file, not a folder; name another."),
        ("/proc/largetrain-output", "cannot be written: "),
    ],
)
def test_an_output_that_cannot_be_written_is_one_clear_line(folder, place, told):
    (folder / "file").write_text("I am a file")
    ranks = run_ranks(run_command, 2, arguments(folder, "--steps", "3", output=place))
    assert [code for code, _, _ in ranks] == [2, 2]
    _, out, err = ranks[0]
    assert len(err.splitlines()) == 1
    assert err.startswith(f"largetrain: --output {folder / place}: ") and told in err
    assert ranks[1][2] == ""
    assert not (folder / "cache").exists()  # found out before the data are prepared
    assert "step" not in out
    assert (folder / "file").read_text() == "I am a file"


def test_an_output_with_a_run_asks_for_resume(folder):
    assert run_ranks(run_command, 1, arguments(folder, "--steps", "2"))[0][0] == 0
    code, _, err = run_ranks(run_command, 1, arguments(folder, "--steps", "4"))[0]
    assert code == 2
    assert "already holds a run. Add --resume" in err
    code, out, _ = run_ranks(run_command, 1, arguments(folder, "--steps", "4", "--resume"))[0]
    assert code == 0
    assert "resuming from" in out
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4]


def test_a_complete_run_is_no_failure(folder):
    run_ranks(run_command, 2, arguments(folder, "--steps", "2"))
    ranks = run_ranks(run_command, 2, arguments(folder, "--steps", "2", "--resume"))
    assert [code for code, _, _ in ranks] == [0, 0]
    assert "is complete: all 2 updates are done" in ranks[0][1] + ranks[0][2]
    assert [row["step"] for row in rows_of(folder)] == [1, 2]


def fill_the_disk(failing_rank):
    """Writing fails on one rank from the second checkpoint on, as on a full disk."""
    from largetrain.checkpoint import manager

    write = manager.write_rank

    def full(partial, rank, *args):
        if rank == failing_rank and "step-00000002" not in partial.name:
            (partial / "pieces" / f"rank-{rank:05d}.safetensors").write_bytes(b"half of")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
        return write(partial, rank, *args)

    manager.write_rank = full


def run_on_a_full_disk(arguments, failing_rank):
    return run_command(arguments, before=lambda: fill_the_disk(failing_rank))


@pytest.mark.parametrize(("stage", "failing_rank"), [(0, 0), (3, 1)])
def test_a_full_disk_is_told_and_ends_the_run_when_the_next_checkpoint_fails_too(folder, stage, failing_rank):
    words = arguments(folder, "--steps", "8", "--set", f"zero_optimization.stage={stage}")
    ranks = run_ranks(run_on_a_full_disk, 2, words, failing_rank)
    assert [code for code, _, _ in ranks] == [1, 1]
    assert f"checkpoint step 4 could not be written: rank {failing_rank}: [Errno 28]" in ranks[0][1]
    err = ranks[0][2]
    assert len(err.splitlines()) == 1
    assert "step-00000006 could not be written" in err
    assert f"rank {failing_rank}: [Errno 28] No space left on device" in err
    assert "Earlier checkpoints are intact" in err
    assert checkpoints(folder) == ["step-00000002"]
    assert not list((folder / "out" / "checkpoints").glob("partial-*"))
    ranks = run_ranks(run_command, 2, [*words, "--resume"])
    assert [code for code, _, _ in ranks] == [0, 0]
    assert "resuming from" in ranks[0][1]
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_damaged_checkpoint_by_path_is_a_mistake(folder):
    run_ranks(run_command, 2, arguments(folder, "--steps", "2"))
    file = folder / "out" / "checkpoints" / "step-00000002" / "run.json"
    file.write_bytes(file.read_bytes()[:-1])
    ranks = run_ranks(run_command, 2, arguments(folder, "--steps", "4", "--resume", str(file.parent)))
    assert [code for code, _, _ in ranks] == [2, 2]
    assert "run.json has" in ranks[0][2]
