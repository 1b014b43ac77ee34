"""`largetrain checkpoint`: what is printed, exit codes, and one clear line for each mistake."""

import json
import subprocess
import sys

import pytest
import torch

from largetrain.checkpoint.folder import all_checkpoints
from largetrain.checkpoint.reshard import write_weights
from largetrain.checkpoint.sources import in_memory, of_names
from largetrain.checkpoint.weights import weights_from
from largetrain.checkpoint.writer import point, write_best
from largetrain.cli import main
from tests.unit.checkpoint.made import make

LOADED = """
import sys
from largetrain.cli import main
code = main(sys.argv[1:])
print("loaded:", [name for name in ("torch", "deepspeed", "transformers") if name in sys.modules])
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 2 to 10, best 4, latest 10; step 6 is incomplete, step 8 another run's."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6, 8, 10):
        make(folder, step, run_id="somebody else's" if step == 8 else "this run")
    (folder / "step-00000006" / "ranks" / "rank-00001.pt").unlink()
    make(tmp_path / "aside", 12).rename(folder / "abandoned-step-00000012")
    write_best(folder / "step-00000004", {"best": 0.5})
    point(folder / "latest", folder / "step-00000010")
    return tmp_path / "run"


def checkpoint(capsys, *arguments):
    """Exit code, lines of output, lines of errors."""
    code = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def names(run):
    return [int(path.name[5:]) for path in all_checkpoints(run / "checkpoints")]


def test_list_has_a_line_for_every_checkpoint(run, capsys):
    code, lines, _ = checkpoint(capsys, "list", run)
    assert code == 0 and lines == checkpoint(capsys, "list", run / "checkpoints")[1]
    assert lines[0].split() == "name step written size run marks state".split()
    columns = [line.split() for line in lines[1:]]
    assert [row[0][-2:] for row in columns] == ["02", "04", "06", "08", "10", "12"]
    assert "best" in lines[2] and "latest" in lines[5] and "another run" in lines[4] and "abandoned" in lines[6]
    assert "rank-00001.pt is missing" in lines[3]
    assert all(line.endswith("complete") for line in (*lines[1:3], *lines[4:7]))
    rows = json.loads("\n".join(checkpoint(capsys, "list", run, "--json")[1]))
    assert [(row["step"], row["marks"], row["problem"] is None) for row in rows] == [
        (2, [], True),
        (4, ["best"], True),
        (6, [], False),
        (8, [], True),
        (10, ["latest"], True),
        (12, ["abandoned"], True),
    ]
    files = (path for path in (run / "checkpoints" / "step-00000002").rglob("*") if path.is_file())
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in files)


def test_show_has_facts_and_every_tensor(run, capsys):
    code, lines, _ = checkpoint(capsys, "show", run)
    assert code == 0 and lines[0].endswith("step-00000010") and "step 10 of run this run" in lines[1]
    assert "  state.step = 10" in lines and "  shared.scale = 8.0" in lines
    table = [line.split() for line in lines]
    assert ["model", "2", "13", "56", "bytes"] in table and ["optimizer/exp_avg", "1", "12", "24", "bytes"] in table
    assert ["model/weight", "F32", "[3,", "4]", "48", "bytes"] in table
    content = json.loads("\n".join(checkpoint(capsys, "show", run / "best", "--json")[1]))
    assert content["step"] == 4 and content["ranks"] == 2 and content["facts"]["state"]["best"] == 0.5
    assert content["tensors"][1] == {"key": "model/weight", "dtype": "F32", "shape": [3, 4], "bytes": 48}


def test_verify_names_every_bad_file(run, capsys):
    code, lines, _ = checkpoint(capsys, "verify", run / "checkpoints" / "step-00000002")
    assert (code, lines) == (0, [f"{run / 'checkpoints' / 'step-00000002'}: whole"])
    for rank in (0, 1):
        path = run / "checkpoints" / "step-00000002" / "pieces" / f"rank-0000{rank}.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    code, lines, _ = checkpoint(capsys, "verify", run)
    assert code == 2
    bad = [line for line in lines if not line.endswith("whole")]
    assert ["/".join(line.split()[0].split("/")[-3:]) for line in bad] == [
        "step-00000002/pieces/rank-00000.safetensors",
        "step-00000002/pieces/rank-00001.safetensors",
        "step-00000006/ranks/rank-00001.pt",
    ]
    content = json.loads("\n".join(checkpoint(capsys, "verify", run, "--json")[1]))
    assert [(row["whole"], len(row["problems"])) for row in content] == [
        (False, 2),
        (True, 0),
        (False, 1),
        (True, 0),
        (True, 0),
    ]


def test_diff_begins_with_the_verdict_and_says_it_by_the_exit_code(run, tmp_path, capsys):
    other = make(tmp_path / "other", 10, ranks=3, run_id="third", state={"best": 1})
    code, lines, _ = checkpoint(capsys, "diff", run, other)
    assert code == 0 and lines[0] == "tensors: the same, bit for bit (3 in both, 0 in one alone)"
    assert any(line.startswith("state.best: null in A, 1 in B") for line in lines)
    code, lines, _ = checkpoint(capsys, "diff", run / "best", run / "latest")
    assert code == 1 and lines[0].startswith("tensors: different")
    assert "model/weight: 12 of 12 values differ, by at most 6" in lines
    assert "random generators of ranks 0, 1 differ" in lines


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--keep-last", 1], [4, 6, 8, 10]),
        (["--keep-last", 2], [4, 6, 8, 10]),
        (["--keep-last", 3], [2, 4, 6, 8, 10]),
        (["--keep-last", 1, "--keep-every", 2], [2, 4, 6, 8, 10]),
        (["--keep-last", 1, "--dry-run"], [2, 4, 6, 8, 10]),
    ],
)
def test_prune_keeps_newest_best_incomplete_and_other_runs(run, capsys, flags, left):
    code, lines, _ = checkpoint(capsys, "prune", run, *flags)
    assert code == 0 and names(run) == left
    path = run / "checkpoints" / "step-00000002"
    words = "would delete" if "--dry-run" in flags else "deleted"
    gone = 2 not in left or "--dry-run" in flags
    assert lines == ([f"{words} {path}"] if gone else ["nothing to delete"])


def test_prune_keeps_the_milestones_of_the_run(run, capsys):
    (run / "config.json").write_text(json.dumps({"run": {"checkpoints": {"milestones": [2]}}}))
    assert checkpoint(capsys, "prune", run, "--keep-last", 1)[1] == ["nothing to delete"]
    assert 2 in names(run)


def test_a_damaged_header_is_a_mistake_and_no_difference(run, capsys):
    """Exit code 1 of `diff` says that two checkpoints differ."""
    path = run / "checkpoints" / "step-00000010" / "pieces" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[9] = 0
    path.write_bytes(content)
    for arguments in (["diff", run, run / "best"], ["show", run], ["verify", run]):
        code, _, errors = checkpoint(capsys, *arguments)
        assert code == 2
        assert errors == [] if arguments[0] == "verify" else len(errors) == 1 and str(path) in errors[0]


def test_reshard_and_verify(run, tmp_path, capsys):
    code, lines, _ = checkpoint(capsys, "reshard", run, tmp_path / "out", "--ranks", 3)
    assert code == 0 and lines[0].endswith("3 files of tensors, bit for bit the same")
    assert checkpoint(capsys, "verify", tmp_path / "out")[0] == 0
    assert checkpoint(capsys, "diff", tmp_path / "out", run)[0] == 0
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "reshard", "--help"])
    assert ended.value.code == 0 and "resuming never needs it" in " ".join(capsys.readouterr().out.split())


def test_export_and_import(run, tmp_path, capsys):
    for kind, name in (("torch", "x.pt"), ("safetensors", "x.safetensors"), ("safetensors", "folder")):
        code, lines, _ = checkpoint(capsys, "export", run, tmp_path / name, "--format", kind)
        assert code == 0 and "2 tensors, 56 bytes, 1 file" in lines[0]
        assert weights_from(str(tmp_path / name)).read("model/count").tolist() == [10]
    code, lines, _ = checkpoint(capsys, "import", tmp_path / "x.pt", tmp_path / "in")
    assert code == 0 and lines[1:] == [f"init_from: {tmp_path / 'in'}"]
    assert weights_from(str(tmp_path / "in")).keys() == ["model/count", "model/weight"]


def test_the_tokenizer_of_the_run_goes_along(tmp_path, capsys):
    """And with `hf`, neither transformers nor a run are needed."""
    from largetrain.checkpoint.hf import decoder_shapes, spec_of

    model = {"style": "gpt", "layers": 1, "hidden": 8, "heads": 2, "vocab_size": 11, "seq_len": 4}
    state = {name: torch.randn(shape) for name, shape in decoder_shapes(spec_of(model)).items()}
    source = of_names({name: in_memory(tensor) for name, tensor in state.items()}, "there", {"model": model})
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_weights(source, tmp_path / "run" / "checkpoints" / "weights", "x")
    (tmp_path / "tokenizer.json").write_text("{}")
    config = {"run": {"data": {"tokenizer": str(tmp_path / "tokenizer.json")}}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "run" / "checkpoints" / "weights"
    code, lines, _ = checkpoint(capsys, "export", weights, tmp_path / "out", "--format", "hf", "--dtype", "bf16")
    assert code == 0 and lines
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "gpt2" and written["torch_dtype"] == "bfloat16"
    code, lines, _ = checkpoint(capsys, "import", tmp_path / "out", tmp_path / "back")
    assert code == 0 and "model:" in lines and "  style: gpt" in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nowhere"], "checkpoint show: there is no nowhere"),
        (["show", ""], "an empty path"),
        (["list", "empty"], "holds no checkpoints; name a run's output folder"),
        (["list", "bare"], "bare/checkpoints holds no checkpoints."),
        (["verify", "bare"], "bare/checkpoints holds no checkpoints."),
        (["show", "bare"], "bare/checkpoints holds no complete checkpoint."),
        (["prune", "bare", "--keep-last", "1"], "holds no checkpoints"),
        (["prune", "run", "--keep-last", "0"], "--keep-last 0: at least the newest one is kept"),
        (["prune", "run"], "--keep-last"),
        (["list", "run/checkpoints/step-00000002"], "is a checkpoint, not the folder of a run"),
        (["show", "first"], "earlier version of largetrain (format 1"),
        (["export", "first", "out", "--format", "torch"], "earlier version of largetrain (format 1"),
        (["diff", "run", "empty"], "empty holds no checkpoint of largetrain"),
        (["export", "empty", "out", "--format", "torch"], "empty is empty; give a checkpoint"),
        (["export", "run", "out", "--format", "hf"], "does not say which model it is of"),
        (["export", "run", "x.pt", "--format", "torch", "--max-shard-size", "1GB"], "x.pt is one file"),
        (["export", "run", "out", "--format", "safetensors", "--max-shard-size", "x"], "a size such as 5GB"),
        (["export", "run", "out", "--format", "safetensors", "--ema"], "holds no moving average"),
        (["export", "run", "out", "--format", "gguf"], "invalid choice"),
        (["import", "empty", "out"], "empty is empty"),
        (["import", "run", "out", "--trust"], "--trust: is for checkpoints of DeepSpeed"),
        (["reshard", "run", "out", "--ranks", "0"], "at least one file"),
        (["reshard", "run", "run", "--ranks", "2"], "is there already"),
        (["shwo", "run"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(run, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(run.parent)
    for name in ("empty", "bare/checkpoints", "first"):
        (run.parent / name).mkdir(parents=True)
    (run.parent / "first" / "manifest.json").write_text('{"run.json": 2}')
    code, _, errors = checkpoint(capsys, *arguments)
    told = [line for line in errors if not line.startswith("largetrain: --trust: code")]
    assert code == 2 and len(told) == 1 and told[0].startswith("largetrain: ") and words in told[0]
    assert not (run.parent / "out").exists()


@pytest.mark.parametrize("command", ["list", "show", "verify", "prune"])
def test_looking_loads_no_torch(run, command):
    arguments = ["--keep-last", "1"] if command == "prune" else []
    code = 2 if command == "verify" else 0
    result = subprocess.run(
        [sys.executable, "-c", LOADED, "checkpoint", command, str(run), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == code, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded: []"


def test_a_reader_that_goes_is_no_failure(run):
    command = f"{sys.executable} -m largetrain checkpoint show {run} | true"
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], check=False, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
