"""DDP with synchronised batch norm on N ranks is one process with the whole batch: every entry of the state dict."""

import math

import pytest
import torch
from torchvision.models import resnet18

from largetrain.config.schema import ParametersConfig
from largetrain.config.world import launch_world
from largetrain.engine.ddp import DdpBackend
from largetrain.engine.environment import prepare
from largetrain.models.vision_recompute import recompute_stages
from largetrain.optim.groups import parameter_groups
from largetrain.parallel.sync_batch_norm import convert_sync_batch_norm
from largetrain.tasks.classification import Classification
from tests.distributed.ddp_nets import CLASSES, make_net, samples, share_out, train_plainly
from tests.ranks import run_ranks

UPDATES, COUNT = 5, 16
OPTIMIZERS = {
    # AdamW's eps is well above the rounding noise of a gradient that is zero by construction (a bias before a norm)
    "SGD": ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}}, torch.optim.SGD),
    "AdamW": ({"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}}, torch.optim.AdamW),
}


def join():
    world = launch_world()
    return prepare(
        rank=world.rank, local_rank=world.local_rank, world_size=world.world_size, timeout_s=60, verbose=False
    )


def backend_for(net, optimizer, accumulation, device, **engine):
    config = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0, "optimizer": optimizer, **engine}
    return DdpBackend(net, Classification(CLASSES), config, device, parameter_groups(net, ParametersConfig()))


def rank_runs(rank_batches, dtypes, *args, **kwargs):
    """Both precisions in one launch."""
    device = join()
    return [rank_run(device, rank_batches, dtype, *args, **kwargs) for dtype in dtypes]


def rank_run(device, rank_batches, dtype, accumulation, optimizer, options, synchronised=True):
    net = make_net(dtype, **options)
    if synchronised:
        convert_sync_batch_norm(net, None)
    backend = backend_for(net, OPTIMIZERS[optimizer][0], accumulation, device)
    x, labels = samples(COUNT, dtype, options.get("dims", 2))
    mine = rank_batches[torch.distributed.get_rank()]
    stream = ({"images": x[ids], "labels": labels[ids]} for ids in mine)
    losses = [float(backend.train_step(stream).loss) for _ in range(UPDATES)]
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


def reference_run(rank_batches, dtype, accumulation, optimizer, options):
    net = make_net(dtype, **options)
    section, kind = OPTIMIZERS[optimizer]
    made = kind([p for p in net.parameters() if p.requires_grad], **section["params"])
    x, labels = samples(COUNT, dtype, options.get("dims", 2))
    steps = [[i for ids in together for i in ids] for together in zip(*rank_batches, strict=True)]
    losses = train_plainly(net, made, [(x[ids], labels[ids]) for ids in steps], accumulation)
    return losses, net.state_dict()


def tolerance(dtype):
    """fp64: 1e-12 as promised. fp32: weights of order one, moved by gradients that are sums over at most
    4 samples x 64 pixels = 256 terms in another grouping, over 5 updates through two normalisations; each may
    amplify by the ratio of activation to spread, about 4 here: 6 sqrt(2 x 256 / 3) u x 5 x 4, u = 2^-24."""
    if dtype == torch.float64:
        return 1e-12
    return 6 * math.sqrt(2 * 256 / 3) * 2.0**-24 * UPDATES * 4


CASES = [
    # shares of a micro-step, dims, options, accumulation, optimizer
    ((2, 2), {}, 1, "SGD"),
    ((2, 2), {}, 3, "AdamW"),
    ((3, 1), {}, 1, "AdamW"),
    ((3, 1), {"dims": 3}, 3, "SGD"),
    ((1, 1, 1, 1), {}, 1, "SGD"),
    ((1, 1, 1, 1), {"dims": 1}, 3, "AdamW"),
    ((2, 2), {"dims": 1, "affine": False}, 1, "SGD"),
    ((3, 1), {"dims": 3, "momentum": None}, 1, "AdamW"),
    ((2, 2), {"momentum": None, "affine": False}, 3, "SGD"),
    ((3, 1), {"frozen": True}, 1, "SGD"),
    ((1, 1, 1, 1), {"frozen": True, "dims": 3}, 1, "AdamW"),
]


@pytest.mark.parametrize(("shares", "options", "accumulation", "optimizer"), CASES)
def test_ranks_equal_one_process(shares, options, accumulation, optimizer):
    batches = share_out(COUNT, UPDATES, accumulation, shares)
    dtypes = (torch.float64, torch.float32)
    ranks = run_ranks(rank_runs, len(shares), batches, dtypes, accumulation, optimizer, options, timeout=60)
    for dtype, *outcomes in zip(dtypes, *ranks, strict=True):
        expected_losses, expected = reference_run(batches, dtype, accumulation, optimizer, options)
        bound = tolerance(dtype)
        for losses, state in outcomes:
            assert state.keys() == expected.keys()
            assert losses == pytest.approx(expected_losses, abs=max(bound, 1e-6))  # losses are reported in fp32
            for name, value in state.items():
                assert value.dtype == expected[name].dtype
                error = float((value - expected[name]).abs().max())
                assert error <= bound * (1 + float(expected[name].abs().max())), name
        first = outcomes[0][1]
        for _, state in outcomes[1:]:  # and not merely close to one another
            assert all(torch.equal(value, first[name]) for name, value in state.items())


def test_plain_batch_norm_is_another_net():
    """The comparison can fail: without synchronisation the same run is far away."""
    batches = share_out(COUNT, UPDATES, 1, (2, 2))
    outcome = run_ranks(rank_runs, 2, batches, [torch.float64], 1, "SGD", {}, False)[0][0][1]
    expected = reference_run(batches, torch.float64, 1, "SGD", {})[1]
    assert max(float((outcome[name] - expected[name]).abs().max()) for name in outcome) > 1e-2


def recomputed_run(recomputed):
    device = join()
    torch.manual_seed(5)
    net = convert_sync_batch_norm(resnet18(num_classes=CLASSES), None)
    if recomputed:
        assert recompute_stages(net)
    backend = backend_for(net, OPTIMIZERS["SGD"][0], 2, device)
    torch.manual_seed(torch.distributed.get_rank())
    stream = ({"images": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])} for _ in range(4))
    losses = [float(backend.train_step(stream).loss) for _ in range(2)]
    return losses, net.state_dict()


def test_recomputed_stages_change_no_bit():
    """Recomputing exchanges statistics anew, in the backward pass: the same numbers, and counted once."""
    plain, recomputed = (run_ranks(recomputed_run, 2, choice, timeout=90) for choice in (False, True))
    for (losses, state), (others, other_state) in zip(plain, recomputed, strict=True):
        assert losses == others
        assert all(torch.equal(value, other_state[name]) for name, value in state.items())
