"""The command on a CUDA device: every stage and precision trains, and follows the CPU's fp32 run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 20
MODEL = ["model.layers=2", "model.hidden=64", "model.heads=2", "model.ffn_hidden=128", "model.seq_len=64"]


def rows(folder: Path, name: str, *sets: str, **environment: str) -> list[dict[str, Any]]:
    """Train the small decoder on the text."""
    texts = [f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]
    return train_rows(folder, name, *MODEL, *texts, *sets, **environment)


def train_rows(folder: Path, name: str, *sets: str, **environment: str) -> list[dict[str, Any]]:
    """Train in a process of its own; the training rows of metrics.jsonl."""
    command = [sys.executable, "-m", "largetrain", "--steps", str(STEPS), "--output", str(folder / name)]
    result = subprocess.run(
        [*command, "--set", "evaluation.at_end=false", "checkpoints.at_end=false", *sets],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cuda")
    (made / "text.txt").write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(40_000)))
    return made


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> list[dict[str, Any]]:
    return rows(folder, "cpu", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_cuda_follows_the_cpu(folder, on_cpu, stage, precision):
    half = [f"{precision}.enabled=true"] if precision != "fp32" else []
    scale = ["fp16.initial_scale_power=12"] if precision == "fp16" else []
    found = rows(folder, f"{stage}-{precision}", f"zero_optimization.stage={stage}", *half, *scale)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert all(row["applied"] for row in found)
    assert found[-1]["loss"] < found[0]["loss"] - 0.5
    # the first loss is that of the same initial weights: one forward pass, rounded to the precision's epsilon at each
    # of some ten layers' outputs, averaged over the tokens; TF32 products keep 10 bits as fp16 does
    epsilon = {"fp32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}[precision]
    if stage < 3:  # ZeRO-3 builds the model on the device, whose generator draws other numbers
        assert found[0]["loss"] == pytest.approx(on_cpu[0]["loss"], rel=10 * epsilon)
    assert found[-1]["memory_bytes"][0] > 0
