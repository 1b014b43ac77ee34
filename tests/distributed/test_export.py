"""Weights out of real runs and real DeepSpeed checkpoints: values, ties and logits as the ranks had them."""

import pytest
import torch
from torch import nn

from largetrain.checkpoint.export import export
from largetrain.checkpoint.hf import spec_of
from largetrain.checkpoint.importing import import_weights
from largetrain.checkpoint.reader import open_checkpoint
from largetrain.checkpoint.reshard import reshard
from largetrain.checkpoint.sources import MODEL
from largetrain.checkpoint.weights import weights_from
from largetrain.compose import build
from largetrain.config.world import launch_world
from largetrain.models.decoder import Decoder
from tests.distributed import tiny_images, tiny_run
from tests.ranks import run_ranks
from tests.reference import tolerance_for

IDS = torch.arange(16).view(1, 16) * 7 % 250
TIED = {"model": {"tie_embeddings": True}}


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a tied head, a frozen layer, buffers of two dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 7)
        self.middle = nn.Linear(7, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.tensor([0.5, 1.25, -3.0]))
        self.register_buffer("seen", torch.tensor(3))
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.middle(torch.tanh(self.frozen(self.embedding(ids)))) + self.offset.sum().to(self.middle.weight.dtype)
        return self.head(x).float().square().mean()


def bare_deepspeed(folder, stage, precision):
    """Two updates with DeepSpeed alone, its checkpoint in `folder`, and what its own functions say the weights are."""
    import sys

    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else compiled, and leaked
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(3)
    model = Odd()
    trained = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in trained.items() if p.requires_grad and p.ndim > 1]},
        {"params": [p for n, p in trained.items() if p.requires_grad and p.ndim == 1], "weight_decay": 0.1},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=groups, optimizer=torch.optim.Adam(groups, lr=0.01)
    )
    for step in range(2):
        engine.backward(engine(torch.arange(4) + step))
        engine.step()
    engine.save_checkpoint(str(folder))
    weights = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and stage > 0:
            weights[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                weights[name] = parameter.detach().clone()
    return weights


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp32")])
def test_a_checkpoint_of_deepspeed_alone_gives_its_fp32_weights(tmp_path, stage, precision):
    weights = run_ranks(bare_deepspeed, 2, tmp_path / "theirs", stage, precision)[0]
    source = import_weights(str(tmp_path / "theirs"), tmp_path / "ours", "import")
    for found in (source, weights_from(str(tmp_path / "ours"))):
        for name, expected in weights.items():
            actual = found.read(MODEL + name).view(found.shape(MODEL + name))
            # the frozen layer has no fp32 master: as DeepSpeed computes with it
            assert actual.dtype == (expected.dtype if name.startswith("frozen") else torch.float32)
            torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=0)
        assert torch.equal(found.read(f"{MODEL}head.weight"), found.read(f"{MODEL}embedding.weight"))
        assert found.read(f"{MODEL}offset").tolist() == [0.5, 1.25, -3.0] and found.read(f"{MODEL}seen").tolist() == [3]


def train_and_ask(folder, output, steps, sets):
    """A run of the tiny decoder, and the logits that its ranks compute together at the end."""
    resolved = tiny_run.resolved_for(folder, steps, output, sets)
    trainer = build(resolved, launch_world(), resume=None, verbose=False, say=lambda line: None).trainer
    trainer.fit()
    trainer.backend.engine.eval()
    with torch.no_grad():
        return tiny_run.digests(trainer.backend), trainer.backend.engine.module(IDS).clone()


def train(folder, output, steps, sets, resume=None):
    return tiny_run.train(folder, steps, output, resume, sets).state


@pytest.mark.parametrize("stage", [2, 3])
def test_tied_weights_stay_tied_through_every_format(tmp_path, stage):
    """Case 66; and a resharded checkpoint goes on to the same bits."""
    tiny_run.write_inputs(tmp_path / "run", run=TIED)
    sets = [f"zero_optimization.stage={stage}", "checkpoints.every_steps=2", "checkpoints.keep_last=0"]
    trained = run_ranks(train_and_ask, 2, tmp_path / "run", "out", 4, sets)
    checkpoints = tmp_path / "run" / "out" / "checkpoints"
    source = weights_from(str(checkpoints))
    spec = spec_of(source.facts["model"])
    logits = []
    for kind, target in (("torch", "a.pt"), ("safetensors", "b.safetensors"), ("hf", "c")):
        export(source, tmp_path / target, kind)
        back = weights_from(str(tmp_path / target))
        model = Decoder(spec).eval()
        if kind == "torch":
            state = torch.load(tmp_path / target, weights_only=True)
            assert state["head.weight"].data_ptr() == state["token_embedding.weight"].data_ptr()
        else:
            state = {name: back.entries[MODEL + name].whole() for name in model.state_dict()}
        assert model.load_state_dict(state, strict=True)
        assert model.head.weight is model.token_embedding.weight
        logits.append(model(IDS).detach())
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    torch.testing.assert_close(logits[0], trained[0][1], **tolerance_for(torch.float32, terms=64))
    if stage == 2:
        other = tmp_path / "run" / "moved" / "checkpoints" / "step-00000002"
        other.parent.mkdir(parents=True)
        assert reshard(checkpoints / other.name, other, 3) == 3
        states = run_ranks(train, 2, tmp_path / "run", "moved", 4, sets, "auto")
        counters = [state.pop("counters") for state in states]
        assert states == [state for state, _ in trained] and len(set(counters)) == 1


def train_images(folder):
    tiny_images.train(folder, 3, sets=["checkpoints.every_steps=3"])


def test_moving_averages_and_batch_statistics_load_strictly(tmp_path):
    """Weights of a conv net, and their moving average, as a bare state_dict of the class that was trained."""
    tiny_images.write_inputs(tmp_path, run={"ema": {"decay": 0.5}})
    run_ranks(train_images, 2, tmp_path)
    states = {}
    for ema in (False, True):
        target = tmp_path / f"{ema}.pt"
        export(weights_from(str(tmp_path / "out"), ema=ema), target, "torch")
        states[ema] = torch.load(target, weights_only=True)
        tiny_images.Net(3).load_state_dict(states[ema], strict=True)
    assert states[True].keys() == states[False].keys() and "norm_1.running_mean" in states[True]
    assert not torch.equal(states[True]["first.weight"], states[False]["first.weight"])
    pieces = open_checkpoint(tmp_path / "out" / "checkpoints" / "step-00000003")
    for ema, prefix in ((False, "model/"), (True, "ema/")):
        for name, tensor in states[ema].items():
            assert torch.equal(tensor.reshape(-1), pieces.read(prefix + name))
