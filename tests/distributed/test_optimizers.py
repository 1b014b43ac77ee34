"""Every optimizer that DeepSpeed names, on a CPU: it trains like torch's own, or is refused in one clear line."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from largetrain.engine.optimizers import check_optimizer
from largetrain.errors import ConfigError
from tests.distributed.parity.harness import SEQ_LEN, VOCAB, call_all, engine_json, make_model, resolve, train
from tests.ranks import run_ranks
from tests.reference import Optimizer, movement_error, tolerance_for, toy_batches, train_reference

UPDATES, GLOBAL_BATCH, RANKS = 4, 4, 2
# eps far above the rounding noise of a gradient (see parity/matrix.py)
EPS = {"eps": 1e-2}
# name in the test -> type in the JSON, its parameters, torch's class, its parameters where they differ
SAME_AS_TORCH: dict[str, tuple[str, dict[str, Any], str]] = {
    "Adam_decouples": ("Adam", {"lr": 0.01, "weight_decay": 0.1, **EPS}, "AdamW"),  # DeepSpeed's default for "Adam"
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False, **EPS}, "Adam"),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95], **EPS}, "AdamW"),
    "AdamW_defaults": ("AdamW", {"lr": 0.01, **EPS}, "Adam"),  # no weight decay unless it is written
    "Adagrad": ("Adagrad", {"lr": 0.01, **EPS}, "Adagrad"),
    "SGD": ("SGD", {"lr": 0.5, "momentum": 0.9, "nesterov": True}, "SGD"),
    "ASGD": ("ASGD", {"lr": 0.5}, "ASGD"),
    "Adadelta": ("Adadelta", {"lr": 1.0, **EPS}, "Adadelta"),
    "Adamax": ("Adamax", {"lr": 0.01, **EPS}, "Adamax"),
    "NAdam": ("NAdam", {"lr": 0.01, **EPS}, "NAdam"),
    "RAdam": ("RAdam", {"lr": 0.01, **EPS}, "RAdam"),
    "RMSprop": ("RMSprop", {"lr": 0.01, **EPS}, "RMSprop"),
}
# Rprop steps by the sign of each gradient, however small; Adafactor and Muon treat a matrix as a whole, which ZeRO cuts
OWN_WAY = {"Rprop": {"lr": 1e-3}, "Adafactor": {"lr": 0.01}, "Muon": {"lr": 0.01, "momentum": 0.95}}


@dataclass(frozen=True)
class TorchOptimizer(Optimizer):
    """Any optimizer of torch.optim for the reference loop."""

    name: str = "SGD"
    arguments: dict[str, Any] = field(default_factory=dict)

    def build(self, parameters):
        return getattr(torch.optim, self.name)(parameters, **self.arguments)


def engine(kind, params, stage, **sections):
    return engine_json(stage, micro=GLOBAL_BATCH // RANKS, optimizer=(kind, params), **sections)


def all_of(stage):
    """Rank 0's outcome of every optimizer at one stage, by name."""
    wanted = {name: (kind, params) for name, (kind, params, _) in SAME_AS_TORCH.items()}
    wanted |= {name: (name, params) for name, params in OWN_WAY.items()}
    zero = {"reduce_scatter": False} if stage == 3 else {}  # for Muon
    batch = toy_batches(1, GLOBAL_BATCH, SEQ_LEN, VOCAB) * UPDATES
    runs = [resolve(engine(*how, stage, zero_optimization=zero), RANKS) for how in wanted.values()]
    outcomes = run_ranks(call_all, RANKS, [(train, (run, batch)) for run in runs])[0]
    return dict(zip(wanted, outcomes, strict=True))


def references():
    """The reference run of every optimizer that torch has, in a rank."""
    resolved = resolve(engine("SGD", {"lr": 0.1}, 0), RANKS)
    batch = toy_batches(1, GLOBAL_BATCH, SEQ_LEN, VOCAB) * UPDATES
    runs = {}
    for name, (_, params, kind) in SAME_AS_TORCH.items():
        arguments = {key: value for key, value in params.items() if key != "adam_w_mode"}
        optimizer = TorchOptimizer(name=kind, arguments=arguments)
        runs[name] = train_reference(lambda: make_model(resolved), batch, [params["lr"]] * UPDATES, optimizer)
    return runs


@pytest.fixture(scope="module", params=[0, 2, 3], ids="zero{}".format)
def outcomes(request):
    return all_of(request.param)


@pytest.fixture(scope="module")
def expected():
    return run_ranks(references, 1)[0]


@pytest.mark.parametrize("name", SAME_AS_TORCH)
def test_it_makes_the_updates_of_torch(outcomes, expected, name):
    bounds = tolerance_for(torch.float32, GLOBAL_BATCH * SEQ_LEN, UPDATES)
    outcome, run = outcomes[name], expected[name]
    assert outcome.losses == pytest.approx(run.losses, rel=bounds["rtol"])
    assert movement_error(outcome.weights, run.weights, run.initial) < bounds["rtol"]
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.parametrize("name", OWN_WAY)
def test_it_trains(outcomes, name):
    losses = outcomes[name].losses
    assert all(after < before for before, after in pairwise(losses))


@pytest.mark.parametrize(
    ("kind", "zero", "message"),
    [
        ("Lamb", {}, "optimizer.type: DeepSpeed has no Lamb for CPUs; write AdamW"),
        ("Lion", {"stage": 2}, "optimizer.type: DeepSpeed has Lion for CPUs only with .*offload_optimizer"),
        ("SparseAdam", {}, "optimizer.type: SparseAdam takes sparse gradients"),
        ("Muon", {"stage": 3}, "zero_optimization.reduce_scatter: Muon at stage 3 .* write false"),
        ("MuSGD", {}, "optimizer.type: MuSGD is in the package mup, which is not installed; pip install mup"),
    ],
)
def test_what_cannot_work_is_refused_before_the_engine_is_made(kind, zero, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check_optimizer({"optimizer": {"type": kind}, "zero_optimization": zero}, "cpu")


def test_a_gpu_and_offload_have_what_the_cpu_lacks():
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert check_optimizer({"optimizer": {"type": "Lamb"}}, "cuda") == []
    assert check_optimizer({"optimizer": {"type": "Lion"}}, "cuda") == []
    assert check_optimizer({"optimizer": {"type": "Lion"}, "zero_optimization": offload}, "cpu") == []


@pytest.mark.parametrize("kind", ["Lamb", "Lion"])
def test_the_backend_refuses_too(kind):
    with pytest.raises(ConfigError, match=f"has .*{kind}"):
        run_ranks(train, RANKS, resolve(engine(kind, {"lr": 0.01}, 0), RANKS), [])


def test_muon_is_clipped_by_its_update_under_zero_and_a_note_says_so():
    """At stage 0 norm and clipping are the gradient's; from stage 1 on DeepSpeed orthogonalises first."""
    batch = toy_batches(1, GLOBAL_BATCH, SEQ_LEN, VOCAB)
    runs = [resolve(engine("Muon", {"lr": 0.01}, stage), RANKS) for stage in (0, 1)]
    plain, zero = run_ranks(call_all, RANKS, [(train, (run, batch)) for run in runs])[0]
    assert zero.grad_norms[0] > 5 * plain.grad_norms[0]
    assert not any("Muon" in note for note in plain.notes)
    assert any("gradient_clipping concern Muon's update" in note for note in zero.notes)
