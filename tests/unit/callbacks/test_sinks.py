"""The metrics file, TensorBoard and the terminal: what they hold after a resume, and what a person sees."""

import io
import json
import os
import pty

import numpy as np
import pytest
import torch
from PIL import Image

from largetrain.callbacks.sinks import MetricsFile, TensorBoard, Terminal


def row(step, **values):
    return {
        "step": step,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "loss_scale": 1.0,
        "skipped": 0,
        "tokens": 64,
        "tokens_per_s": 1234.5,
        "data_wait_share": 0.25,
        "time": 1e9 + step,
        **values,
    }


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_file_forgets_what_comes_after_the_resumed_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.start(0)
    first.write([row(step) for step in (1, 2, 3, 4)])
    first.write([{"step": 3, "time": 1.0, "eval/loss": 2.0}])
    first.close()
    with path.open("a") as file:
        file.write('{"step": 5, "los')
    second = MetricsFile(path)
    second.start(3)
    second.write([row(4)])
    second.close()
    assert steps_of(path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("junk", ["", "5\n", "[]\n", '{"loss": 1}\n', '{"step": 2, "loss": 1'])
def test_foreign_lines_are_dropped(tmp_path, junk):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + junk)
    sink = MetricsFile(path)
    sink.start(1)
    sink.close()
    assert steps_of(path) == [1]


def test_rows_are_on_file_at_once_and_valid_json(tmp_path):
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    sink.start(0)
    sink.write([row(1, loss=float("nan"), grad_norm=float("inf"))])
    written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert written["loss"] is None
    assert written["grad_norm"] is None
    sink.close()


def test_closing_what_was_never_started_is_fine(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").close()
    TensorBoard(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_redirected_output_has_plain_lines():
    stream = io.StringIO()
    terminal = Terminal(10, stream)
    terminal.start(0)
    for step in range(1, 6):
        terminal.tick(step)
    terminal.write([row(4), row(5, loss_scale=1024.0, skipped=2, mfu=0.5)])
    terminal.write([{"step": 5, "time": 1.0, "eval/loss": 2.0, "eval/tokens": 99.0}])
    terminal.say("a word")
    terminal.close()
    assert stream.getvalue().splitlines() == [
        "step 5/10  loss 2.5000  lr 1.00e-03  norm 0.50  scale 1024  skipped 2  1,234 tokens/s  MFU 50.0%  data 25%",
        "step 5/10  validation: loss 2.0000",
        "a word",
    ]


def test_a_terminal_has_a_live_line():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        terminal = Terminal(10, stream)
        terminal.start(2)
        terminal.write([row(3)])
        terminal.tick(3)
        terminal.say("update skipped")
        terminal.tick(10)
        terminal.close()
        stream.write("END\n")
        stream.flush()
        seen = b""
        while b"END" not in seen:  # a terminal hands out a few hundred bytes at a time
            seen += os.read(ours, 100_000)
    os.close(ours)
    seen = seen.decode()
    assert "2/10" in seen
    assert "10/10" in seen
    assert "\r" in seen
    assert "loss 2.5000" in seen
    # a message stands on a line of its own, above the live one
    assert any(line.strip("\r ") == "update skipped" for part in seen.split("\n") for line in part.split("\r"))


def test_predictions_are_drawn_into_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.start(0)
    picture = torch.zeros(3, 4, 6, dtype=torch.uint8)
    picture[0, :, 3:] = 255
    sink.picture(7, picture)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (drawn,) = events.Images("eval/predictions")
    assert (drawn.step, drawn.width, drawn.height) == (7, 6, 4)
    pixels = np.asarray(Image.open(io.BytesIO(drawn.encoded_image_string)))
    assert np.array_equal(pixels, picture.permute(1, 2, 0).numpy())


def test_an_image_row_shows_images_and_the_figures_of_all_classes_together():
    stream = io.StringIO()
    terminal = Terminal(9, stream)
    trained = row(3, pixels=100, pixels_per_s=50.0, images_per_s=12.0)
    del trained["tokens"], trained["tokens_per_s"]
    terminal.write([trained])
    terminal.write([{"step": 3, "time": 1.0, "eval/miou": 41.5, "eval/iou/cat": 10.0, "eval/ema_pixels": 9.0}])
    training, evaluation = stream.getvalue().splitlines()
    assert "12 images/s" in training and "tokens" not in training
    assert evaluation.endswith("validation: miou 41.5000")
