"""One engine JSON, two backends: the same rate, loss scale, clipping and weights of a conv net without batch norms."""

import copy
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from largetrain.config.load import launch_world, load
from largetrain.engine.ddp import DdpBackend
from largetrain.engine.deepspeed import DeepSpeedBackend
from largetrain.engine.environment import prepare
from largetrain.optim.groups import parameter_groups
from largetrain.optim.schedules import schedule_factor
from largetrain.tasks.classification import Classification
from tests.distributed.ddp_nets import CLASSES, samples
from tests.distributed.parity.harness import Outcome, call_all, engine_json
from tests.distributed.test_schedules import HIGH, SCHEDULES, TOTAL, UPDATES
from tests.ranks import run_ranks
from tests.reference import LossScale

RANKS, GLOBAL_BATCH = 2, 6
BACKENDS = ("deepspeed", "ddp")
STEPS_PER_EPOCH = 2.5


class Disturbed(Classification):
    """The task with the loss of chosen updates multiplied.

    Args:
        factors: update -> factor; inf makes an overflow.
        always: factor of all other updates.
        only_rank: the rank that is disturbed; None: all.
    """

    def __init__(self, factors: Mapping[int, float], always: float = 1.0, only_rank: int | None = None):
        super().__init__(CLASSES)
        self.factors, self.always, self.only_rank = factors, always, only_rank
        self.calls = 0

    def loss_sum(self, model, batch):
        update, self.calls = self.calls, self.calls + 1
        loss = super().loss_sum(model, batch)
        here = self.only_rank is None or self.only_rank == dist.get_rank()
        return loss * (self.factors.get(update, self.always) if here else 1.0)


def make_conv_net() -> nn.Module:
    """The same initial weights every time."""
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, CLASSES),
    )  # fmt: skip


def train(backend, engine, updates, sections=None, task=None):
    """Body of a rank: some updates of the conv net by one backend; `sections` are those of the run YAML."""
    world = launch_world()
    device = prepare(
        rank=world.rank, local_rank=world.local_rank, world_size=world.world_size, timeout_s=60, verbose=False
    )
    resolved = resolve(backend, engine, world.world_size, sections)
    net, run = make_conv_net(), resolved.run
    factor = schedule_factor(run.schedule, TOTAL, STEPS_PER_EPOCH) if run.schedule else None
    kind = {"ddp": DdpBackend, "deepspeed": DeepSpeedBackend}[backend]
    # a copy: tasks count their calls, and several cases may be given the same one
    task, groups = copy.copy(task) or Classification(CLASSES), parameter_groups(net, run.parameters)
    made = kind(net, task, resolved.engine, device, groups, factor)
    outcome, sizes = Outcome(), resolved.batch
    images, labels = samples(updates * GLOBAL_BATCH, torch.float32)
    for update in range(updates):
        first = update * GLOBAL_BATCH
        result = made.train_step(iter(micro_batches(images, labels, first, sizes)))
        outcome.losses.append(float(result.loss))
        outcome.grad_norms.append(float(result.grad_norm))
        outcome.lrs.append(result.lr)
        outcome.scales.append(result.loss_scale)
        outcome.applied.append(result.applied)
        outcome.exhausted.append(result.scale_exhausted)
    outcome.final_scale, outcome.final_lr = made.loss_scale, made.lr
    outcome.weights = {name: value.detach().clone() for name, value in net.named_parameters()}
    return outcome


def micro_batches(images, labels, first, sizes):
    """This rank's share of the global batch that starts at sample `first`."""
    share = sizes.micro_batch
    for micro_step in range(sizes.gradient_accumulation_steps):
        start = first + (micro_step * sizes.data_parallel + dist.get_rank()) * share
        ids = torch.arange(start, start + share)
        yield {"images": images[ids], "labels": labels[ids], "sample_id": ids}


def resolve(backend, engine, world_size, sections):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "engine.json").write_text(json.dumps(engine))
        run = {"task": "classification", "backend": backend, "steps": TOTAL}
        (Path(folder) / "run.json").write_text(json.dumps(run | (sections or {})))
        paths = str(Path(folder) / "engine.json"), str(Path(folder) / "run.json")
        return load(*paths, world_size=world_size, local_world_size=world_size)


def on_both(cases):
    """Rank 0's outcomes by backend and case; the arguments of `train` behind the backend are the case."""
    calls = [(train, (backend, *case)) for backend in BACKENDS for case in cases.values()]
    results = iter(run_ranks(call_all, RANKS, calls, timeout=120)[0])
    return {backend: {name: next(results) for name in cases} for backend in BACKENDS}


RUN_SCHEDULES = {
    "constant": {"type": "constant", "warmup": 1.0, "warmup_start": 0.1},
    "step": {"type": "step", "milestones": [1.0, 2.0], "gamma": 0.3},
    "poly": {"type": "poly", "power": 0.9, "warmup": 0.8},
    "run cosine": {"type": "cosine", "final": 0.1},
}


def schedule_cases():
    """Each schedule of the engine JSON with an overflow in update 3, and each of the run YAML."""
    cases = {}
    for name, (kind, params, _) in SCHEDULES.items():
        scheduler = {"type": kind, "params": params}
        engine = engine_json(2, micro=3, optimizer=("AdamW", {"lr": HIGH}), scheduler=scheduler)
        cases[name] = (engine, UPDATES, None, Disturbed({2: math.inf}))
    for name, section in RUN_SCHEDULES.items():
        cases[name] = (engine_json(2, micro=3, optimizer=("AdamW", {"lr": HIGH})), TOTAL, {"schedule": section})
    return cases


def test_every_schedule_gives_the_same_rates():
    """Equal to the last bit: both backends run the same classes on the same numbers."""
    outcomes = on_both(schedule_cases())
    for name in schedule_cases():
        rates, others = (outcomes[backend][name] for backend in BACKENDS)
        assert rates.lrs == others.lrs, name
        assert rates.final_lr == others.final_lr, name
        assert rates.applied == others.applied, name
        assert len(set(rates.lrs)) >= 2, name
    for name, (_, _, rate) in SCHEDULES.items():  # and they are the right ones
        steps = [1, 2, 3, 3, *range(4, UPDATES)]
        assert outcomes["ddp"][name].lrs == pytest.approx([rate(step) for step in steps], rel=1e-12, abs=1e-15), name
    for name, section in RUN_SCHEDULES.items():
        run = resolve("ddp", engine_json(micro=3), RANKS, {"schedule": section}).run
        factor = schedule_factor(run.schedule, TOTAL, STEPS_PER_EPOCH)
        expected = [HIGH * factor(update) for update in range(1, TOTAL + 1)]
        assert outcomes["ddp"][name].lrs == pytest.approx(expected, rel=1e-12), name


INF = math.inf
SCALES = {  # fp16 section, updates that overflow
    "hysteresis 1": ({"hysteresis": 1}, [1]),
    "hysteresis 2": ({"hysteresis": 2}, [0, 2, 3]),
    "consecutive hysteresis": ({"hysteresis": 2, "consecutive_hysteresis": True}, [0, 2, 3]),
    "growth": ({"initial_scale_power": 4, "loss_scale_window": 2}, [3]),
    "fixed": ({"loss_scale": 128.0}, [1]),
    "minimum": ({"initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1}, [0, 1, 2]),
}
RULES = {
    "hysteresis 1": LossScale(8, hysteresis=1),
    "hysteresis 2": LossScale(8, hysteresis=2),
    "consecutive hysteresis": LossScale(8, hysteresis=2, consecutive_hysteresis=True),
    "growth": LossScale(4, window=2),
    "fixed": LossScale(static=128.0),
}
SCALE_UPDATES = 7


def scale_cases():
    cases = {}
    for name, (fp16, bad) in SCALES.items():
        engine = engine_json(2, "fp16", micro=3, optimizer=("SGD", {"lr": 0.1}), fp16=fp16)
        task = Disturbed(dict.fromkeys(bad, INF), only_rank=1)
        cases[name] = (engine, SCALE_UPDATES, None, task)
    return cases


def test_planted_overflows_move_the_loss_scale_alike():
    outcomes = on_both(scale_cases())
    for name, (_, bad) in SCALES.items():
        zero, ddp = (outcomes[backend][name] for backend in BACKENDS)
        assert ddp.scales == zero.scales, name
        assert ddp.final_scale == zero.final_scale, name
        assert ddp.applied == zero.applied == [update not in bad for update in range(SCALE_UPDATES)], name
        assert ddp.exhausted == zero.exhausted, name
        assert all(bool(weight.isfinite().all()) for weight in ddp.weights.values()), name
    for name, rule in RULES.items():  # against the rule, written down a second time
        expected = []
        for update in range(SCALE_UPDATES):
            expected.append(rule.value)
            rule.update(update in SCALES[name][1])
        assert outcomes["ddp"][name].scales == expected, name
    floor = outcomes["ddp"]["minimum"]
    assert floor.scales == [4, 2, 2, 2, 2, 2, 2]
    assert floor.exhausted == [False, True, True, False, False, False, False]


UNIT = 2.0**-24  # rounding of fp32
WEIGHT_UPDATES = 5
OPTIMIZERS = {
    "clipped SGD": ("SGD", {"lr": 0.5, "momentum": 0.9}, 0.05),
    "clipped AdamW": ("AdamW", {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}, 0.05),
    "unclipped AdamW": ("AdamW", {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}, 0.0),
}


# the first layer is frozen, the last one slow, biases do not decay; and the rate falls
GROUPS = {
    "parameters": {"lr_factors": {"0": 0.0, "5": 0.1}, "bias_weight_decay": 0.0},
    "schedule": {"type": "poly", "power": 1.0},
}


def weight_cases():
    cases = {}
    for name, (kind, params, clip) in OPTIMIZERS.items():
        for stage in (0, 2):
            engine = engine_json(stage, micro=3, optimizer=(kind, params), gradient_clipping=clip)
            cases[f"{name} {stage}"] = (engine, WEIGHT_UPDATES)
            cases[f"{name} {stage} in groups"] = (engine, WEIGHT_UPDATES, GROUPS)
    return cases


def rounding(terms):
    """Relative error of a sum of so many fp32 terms in another order: as a random walk, six standard deviations."""
    return 6 * math.sqrt(2 * terms / 3) * UNIT


def test_weights_and_norms_are_equal_to_rounding():
    """fp32. A gradient is a sum over 6 images x 36 pixels; five updates each add that error to weights of order one,
    moved by less than one altogether, and a convolution in front passes it on: x 2."""
    outcomes = on_both(weight_cases())
    bound = 2 * WEIGHT_UPDATES * rounding(GLOBAL_BATCH * 36)
    for name in weight_cases():
        zero, ddp = (outcomes[backend][name] for backend in BACKENDS)
        for key, weight in ddp.weights.items():
            assert float((weight - zero.weights[key]).abs().max()) < bound, (name, key)
        assert ddp.grad_norms == pytest.approx(zero.grad_norms, rel=bound), name
        assert ddp.losses == pytest.approx(zero.losses, rel=bound), name
        assert min(ddp.grad_norms) > 0.05, name  # the clipping bites
        initial = make_conv_net().state_dict()
        moved = max(float((w - initial[key]).abs().max()) for key, w in ddp.weights.items())
        assert moved > 100 * bound, name


def test_accumulation_and_clipping_of_ddp():
    """The same global batch in one or three micro-batches; and a loss a thousand times too large."""
    sgd = ("SGD", {"lr": 0.5})
    cases = {f"{n}": (engine_json(0, "fp32", n, 3 // n, sgd, gradient_clipping=0.0), 3) for n in (1, 3)}
    large = engine_json(0, micro=3, optimizer=("SGD", {"lr": 1.0}), gradient_clipping=0.1)
    cases["large"] = (large, 1, None, Disturbed({}, always=1000.0))
    calls = [(train, ("ddp", *case)) for case in cases.values()]
    once, thrice, clipped = run_ranks(call_all, RANKS, calls, timeout=60)[0]
    bound = 2 * 3 * rounding(GLOBAL_BATCH * 36)  # as above, three updates
    for name, weight in once.weights.items():
        assert float((weight - thrice.weights[name]).abs().max()) < bound, name
    # samples of a global batch are shared out otherwise, but the sum is over the same ones
    assert once.losses == pytest.approx(thrice.losses, rel=bound)
    assert once.grad_norms == pytest.approx(thrice.grad_norms, rel=bound)
    initial = make_conv_net().state_dict()
    squares = sum(float((w - initial[name]).double().square().sum()) for name, w in clipped.weights.items())
    assert clipped.grad_norms[0] > 100
    # weights of at most 1 are rounded by a unit each: 257 of them, against an update of 0.1
    assert math.sqrt(squares) == pytest.approx(0.1, rel=math.sqrt(257) * UNIT / 0.1 + 1e-5)
