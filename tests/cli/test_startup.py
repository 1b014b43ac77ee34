"""What a run must not import or compile before its first update: the seconds that people wait for."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from largetrain.cli import main
code = main(sys.argv[1:])
print("compilers:", sorted(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
sys.exit(code)
"""


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_training_imports_no_compiler(tmp_path, stage, precision):
    (tmp_path / "text.txt").write_text("What is not needed is not imported. " * 200)
    sets = [
        *(f"zero_optimization.stage={stage}", f"data.source={tmp_path / 'text.txt'}", f"data.cache={tmp_path}"),
        *("model.layers=1", "model.hidden=32", "model.heads=2", "model.seq_len=16", "logging.tensorboard=false"),
        *("evaluation.at_end=false", "checkpoints.at_end=false"),
        *(["fp16.enabled=true"] if precision == "fp16" else []),
    ]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--steps", "2", "--output", str(tmp_path / "out"), "--set", *sets],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "compilers: []" in result.stdout
