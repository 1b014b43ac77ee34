"""ResNet-18 and a vision transformer in pipeline stages, with synchronised batch norm, against one process."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from largetrain.config.layout import Layout
from largetrain.config.load import launch_world
from largetrain.engine.environment import prepare
from largetrain.engine.partition import bounds_of, layer_costs
from largetrain.engine.pipeline import Cut, PipelineBackend
from largetrain.models.vision_stages import staged_vision_model
from largetrain.parallel.axes import make_axes
from largetrain.parallel.sync_batch_norm import convert_sync_batch_norm
from largetrain.tasks.classification import Classification
from tests.distributed.parity.harness import engine_json
from tests.ranks import run_ranks
from tests.reference import tolerance_for

CLASSES, SIZE, GLOBAL_BATCH, ACCUMULATION, UPDATES = 5, 32, 16, 2, 3
LR, MOMENTUM, CLIP = 0.005, 0.9, 1.0


def build(name: str) -> nn.Module:
    from torchvision.models import VisionTransformer, resnet18, vgg11_bn

    torch.manual_seed(0)
    if name == "vit":
        vit = VisionTransformer(SIZE, 8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES)
        nn.init.normal_(vit.heads.head.weight, std=0.1)  # torchvision's zeros would leave the trunk without gradient
        return vit
    model: nn.Module = {"resnet18": resnet18, "vgg11_bn": vgg11_bn}[name](num_classes=CLASSES)
    if name == "resnet18":  # where rounding turns over a ReLU or the choice of a pooling, it is no rounding any more
        model.maxpool = nn.AvgPool2d(3, 2, 1)
        for module in list(model.modules()):
            if hasattr(module, "relu"):
                module.relu = nn.SiLU()
    if name == "vgg11_bn":  # 120 million weights less, over which a norm in fp32 is off by 2e-3 in torch itself
        model.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 8), nn.ReLU(True), nn.Linear(8, CLASSES))
    return model


def global_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(GLOBAL_BATCH, 3, SIZE, SIZE, generator=generator),
            torch.randint(0, CLASSES, (GLOBAL_BATCH,), generator=generator),
        )
        for _ in range(UPDATES)
    ]


@dataclass
class Outcome:
    losses: list[float]
    grad_norms: list[float]
    state: dict[str, Tensor]
    """Parameters and buffers of this rank, by their names in the whole model."""
    correct: float = 0.0


def alone(name: str, micro_batch: int) -> Outcome:
    """Plain torch on one process; `micro_batch` images make the statistics of a batch norm."""
    torch.set_num_threads(1)
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    outcome = Outcome([], [], {})
    for images, labels in global_batches():
        total = 0.0
        for part, targets in zip(images.split(micro_batch), labels.split(micro_batch), strict=True):
            loss = cross_entropy(model(part), targets, reduction="sum") / GLOBAL_BATCH
            loss.backward()
            total += float(loss.detach())
        outcome.losses.append(total)
        outcome.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    images, labels = global_batches()[0]
    with torch.no_grad():
        outcome.correct = 100 * float((model(images).argmax(1) == labels).double().mean())
    outcome.state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return outcome


@cache
def reference(name: str, micro_batch: int) -> Outcome:
    return run_ranks(alone, 1, name, micro_batch, timeout=120)[0]


def in_stages(name: str, stages: int, zero: int) -> Outcome:
    world = launch_world()
    device = prepare(
        rank=world.rank, local_rank=world.local_rank, world_size=world.world_size, timeout_s=60, verbose=False
    )
    layout = Layout(world.world_size, stages=stages)
    axes, place = make_axes(layout), layout.place(world.rank)
    micro = GLOBAL_BATCH // ACCUMULATION // layout.data
    model = build(name)
    if layout.data > 1:
        convert_sync_batch_norm(model, axes.data.group)
    staged = staged_vision_model(model)
    costs = layer_costs(staged.layers, torch.zeros(2, 3, SIZE, SIZE), torch.float32)
    cut = Cut(layout, bounds_of("cost", costs, stages))
    engine = engine_json(
        zero, accumulation=ACCUMULATION, micro=micro, optimizer=("SGD", {"lr": LR, "momentum": MOMENTUM})
    )
    engine["train_batch_size"], engine["gradient_clipping"] = GLOBAL_BATCH, CLIP
    backend = PipelineBackend(staged, cut, Classification(CLASSES), engine, device, axes=axes)
    outcome = Outcome([], [], {})
    for images, labels in global_batches():
        result = backend.train_step(iter(parts(images, labels, layout.data, place.data, micro)))
        outcome.losses.append(float(result.loss))
        outcome.grad_norms.append(float(result.grad_norm))
    images, labels = global_batches()[0]
    outcome.correct = backend.evaluate(iter(parts(images, labels, layout.data, place.data, micro)))["top1"]
    held: dict[str, Any] = {**backend._state.named, **backend._stage.named_buffers()}
    outcome.state = {key: value.detach().clone() for key, value in held.items()}
    return outcome


def parts(images: Tensor, labels: Tensor, data: int, rank: int, micro: int) -> list[dict[str, Tensor]]:
    """Micro-batches of a rank: micro-step first, then rank, so that a micro-step has the same images on any layout."""
    chosen = [(step * data + rank) * micro for step in range(ACCUMULATION)]
    return [{"images": images[low : low + micro], "labels": labels[low : low + micro]} for low in chosen]


# the stages, ranks and ZeRO stage of each model
CELLS = {"resnet18": [(2, 4, 1), (4, 4, 0)], "vit": [(2, 4, 0), (4, 4, 1)], "vgg11_bn": [(2, 2, 1)]}


@pytest.mark.parametrize("name", CELLS)
def test_stages_train_as_one_process_does(name):
    expected = reference(name, GLOBAL_BATCH // ACCUMULATION)
    # the longest sums are those of a weight's gradient over the pixels of all images
    bound = tolerance_for(torch.float32, GLOBAL_BATCH * SIZE * SIZE // 4, UPDATES)["rtol"]
    farthest = LR * CLIP * UPDATES / (1 - MOMENTUM)  # that a weight can have moved
    for stages, ranks, zero in CELLS[name]:
        outcomes = run_ranks(in_stages, ranks, name, stages, zero, timeout=200)
        seen: set[str] = set()
        for outcome in outcomes:
            assert outcome.losses == pytest.approx(expected.losses, rel=bound)
            assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=bound)
            assert outcome.correct == expected.correct
            for key, value in outcome.state.items():
                torch.testing.assert_close(value, expected.state[key], rtol=bound, atol=bound * farthest)
            seen |= outcome.state.keys()
        assert seen == expected.state.keys()
