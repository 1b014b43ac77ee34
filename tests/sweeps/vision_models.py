"""Every classification and segmentation model of torchvision is built, picks a backend and takes a training step.

    python -m tests.sweeps.vision_models [NAME ...] [--activation-checkpointing]

Each model has a process of its own, one after the other, so that its peak memory is its own and is free afterwards.
Exit code 1 when a model fails; the last lines name it and say why.
"""

import argparse
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn
from torchvision import models

from largetrain.config.schema import ParametersConfig
from largetrain.config.vision_schema import (
    ClassificationData,
    ClassificationRun,
    SegmentationData,
    SegmentationModelConfig,
    SegmentationRun,
    VisionModelConfig,
)
from largetrain.models.batch_norm import count_layers
from largetrain.models.vision import build_vision_model
from largetrain.optim.groups import parameter_groups
from largetrain.tasks.classification import Classification
from largetrain.tasks.segmentation import Segmentation

CLASSES, BATCH = 10, 2
# Smallest multiple of what the model asks for; every other model takes 64 pixels.
PIXELS = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 70}
LIMIT_S = 600
# Of fresh weights and two images of noise some gradients are of 1e4: with 0.1 such a model overflows after the step.
LEARNING_RATE = 1e-3


@dataclass
class Row:
    """What is reported of one model."""

    name: str
    parameters: int = 0
    batch_norms: int = 0
    backend: str = ""
    seconds: float = 0.0
    peak_mib: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name:30} {self.parameters / 1e6:8.1f} M {self.batch_norms:5} {self.backend:>10} "
            f"{self.seconds:7.1f} s {self.peak_mib:8.0f} MiB{'  FAILED: ' if self.failure else ''}{self.failure}"
        )


def all_names() -> list[str]:
    """Classification models, then segmentation models."""
    return models.list_models(module=models) + models.list_models(module=models.segmentation)


def run_for(name: str, activation_checkpointing: bool = False) -> ClassificationRun | SegmentationRun:
    """The smallest run of this model."""
    pixels = PIXELS.get(name, 64)
    keys = {"name": name, "activation_checkpointing": activation_checkpointing}
    if name in models.list_models(module=models.segmentation):
        return SegmentationRun(model=SegmentationModelConfig(**keys), data=SegmentationData(image_size=pixels))
    return ClassificationRun(model=VisionModelConfig(**keys), data=ClassificationData(image_size=pixels))


def try_model(run: ClassificationRun | SegmentationRun) -> Row:
    """Build the run's model, take one step of SGD by the run's task, evaluate once.

    Raises:
        AssertionError: the loss or a gradient is not finite, a parameter gets no gradient, or a weight does not move.
    """
    start = time.perf_counter()
    torch.manual_seed(0)
    pixels = run.data.image_size
    images = torch.randn(BATCH, 3, pixels, pixels)
    task: Classification | Segmentation
    if isinstance(run, SegmentationRun):
        task = Segmentation([str(index) for index in range(CLASSES)], run.loss.aux_weight)
        labels = torch.randint(CLASSES, (BATCH, pixels, pixels))
    else:
        task = Classification(CLASSES)
        labels = torch.randint(CLASSES, (BATCH,))
    batch = {"images": images, "labels": labels}
    model = build_vision_model(run, CLASSES).train()
    counts = count_layers(model)
    convolutional = counts.live_batch_norms > 0 or counts.convolution_share >= 0.5
    step(model, task, batch)
    with torch.no_grad():
        figures = task.metrics(task.evaluate(model.eval(), batch))
    assert figures["loss"] == figures["loss"], "the loss of the evaluation is not a number"
    return Row(
        run.model.name,
        sum(parameter.numel() for parameter in model.parameters()),
        counts.live_batch_norms,
        "ddp" if convolutional else "deepspeed",
        time.perf_counter() - start,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def step(model: nn.Module, task: Classification | Segmentation, batch: dict[str, Tensor]) -> None:
    """One update by SGD, checked tensor by tensor at the element with the largest gradient."""
    optimizer = torch.optim.SGD(parameter_groups(model, ParametersConfig()), lr=LEARNING_RATE)
    loss = task.loss_sum(model, batch) / task.weight(batch)
    assert bool(loss.isfinite()), f"the loss is {loss.item()}"
    loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without, f"no gradient: {', '.join(without[:3])} ({len(without)} in all)"
    watched = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        place = parameter.grad.abs().argmax()
        gradient, value = parameter.grad.flatten()[place].item(), parameter.detach().flatten()[place].item()
        assert abs(gradient) < float("inf"), f"the gradient of {name} holds {gradient}"
        # a step below half the spacing of floats may round away
        if LEARNING_RATE * abs(gradient) > torch.finfo(torch.float32).eps * max(abs(value), 1e-30):
            watched.append((name, parameter, place, value))
    assert watched, "every gradient is zero"
    optimizer.step()
    still = [name for name, p, place, value in watched if p.detach().flatten()[place].item() == value]
    assert not still, f"not moved by the update: {', '.join(still[:3])} ({len(still)} in all)"


def _child(run: ClassificationRun | SegmentationRun, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        row = try_model(run)
    except Exception as error:  # noqa: BLE001 (a sweep goes on)
        row = Row(run.model.name, failure=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    pipe.send(row)


def in_own_process(run: ClassificationRun | SegmentationRun) -> Row:
    """`try_model` in a process of its own; whatever ends it is a row."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(run, sender))
    process.start()
    sender.close()
    row = Row(run.model.name, failure=f"took longer than {LIMIT_S} s")
    try:
        if receiver.poll(LIMIT_S):
            row = receiver.recv()
    except EOFError:
        process.join()
        row.failure = f"its process ended with exit code {process.exitcode}"
    if process.is_alive():
        process.join(10)
        process.kill()
    process.join()
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweeps.vision_models", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; none: all of them")
    parser.add_argument("--activation-checkpointing", action="store_true", help="with recomputed activations")
    arguments = parser.parse_args(argv)
    multiprocessing.set_forkserver_preload(
        ["largetrain.models.vision", "largetrain.tasks.segmentation", "tests.sweeps"]
    )
    print(f"{'model':30} {'parameters':>10} {'norms':>5} {'backend':>10} {'time':>9} {'peak':>12}")
    rows = []
    for name in arguments.names or all_names():
        rows.append(in_own_process(run_for(name, arguments.activation_checkpointing)))
        print(rows[-1], flush=True)
    failed = [row for row in rows if row.failure]
    backends = {kind: sum(row.backend == kind for row in rows) for kind in ("ddp", "deepspeed")}
    print(
        f"{len(rows)} models, {len(rows) - len(failed)} took a step; ddp {backends['ddp']}, deepspeed "
        f"{backends['deepspeed']}; {sum(row.seconds for row in rows):.0f} s, at most "
        f"{max((row.peak_mib for row in rows), default=0):.0f} MiB"
    )
    for row in failed:
        print(f"failed: {row.name}: {row.failure}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
