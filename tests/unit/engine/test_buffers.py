"""Buffers that differ between ranks: averaged for a look, put back afterwards; a bad update is kept out of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from largetrain.engine.buffers import BufferGuard, differ_between_ranks, equal_buffers, floating_buffers
from largetrain.engine.modes import evaluation_mode
from tests.ranks import run_ranks


def make_net():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2, momentum=None))
    net.register_buffer("table", torch.arange(3))
    return net


def look(spread):
    """Body of a rank: what one sees within and after, with buffers that differ by `spread` times the rank."""
    dist.init_process_group("gloo")
    net, rank = make_net(), dist.get_rank()
    with torch.no_grad():
        for index, buffer in enumerate(floating_buffers(net)):
            buffer.add_(torch.arange(buffer.numel()) + index + spread * (rank + 1) ** 2)
    own = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with equal_buffers(net) as differed:
        within = {name: buffer.clone() for name, buffer in net.named_buffers()}
    after = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with pytest.raises(KeyError), equal_buffers(net):
        raise KeyError  # a failed evaluation must not leave averages behind
    failed = {name: buffer.clone() for name, buffer in net.named_buffers()}
    return differed, own, within, after, failed


@pytest.mark.parametrize("spread", [0.0, 0.5, float("nan")])
def test_averages_within_and_own_ones_afterwards(spread):
    results = run_ranks(look, 3, spread)
    mean_of = {
        name: torch.stack([own[name].double() for _, own, *_ in results]).mean(0) for name in results[0][1]
    }  # of three values that fp32 holds: the fp64 mean is rounded once
    for differed, own, within, after, failed in results:
        assert differed == (spread != 0.0)
        for name, value in own.items():
            expected = value if not value.is_floating_point() else mean_of[name].float()
            assert torch.allclose(within[name], expected, rtol=2**-23, atol=0, equal_nan=True), name
            for later in (after, failed):
                assert torch.equal(later[name].nan_to_num(), value.nan_to_num()), name


def compare_on_ranks():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    same, other = torch.ones(2), torch.tensor([1.0, 1.0 + rank * 2.0**-23])
    infinite = torch.tensor([torch.inf])
    return [differ_between_ranks(tensors) for tensors in ([], [same], [same, other], [infinite], [infinite - infinite])]


def test_one_bit_is_a_difference_and_not_a_number_is_one_too():
    assert run_ranks(compare_on_ranks, 2) == [[False, False, True, False, True]] * 2
    assert run_ranks(compare_on_ranks, 1) == [[False] * 5]


@pytest.mark.parametrize(
    ("loss", "spoilt", "restored"), [(1.0, False, False), (torch.inf, False, True), (1.0, True, True)]
)
def test_a_bad_update_is_kept_out(loss, spoilt, restored):
    net = make_net()
    guard = BufferGuard(net)
    net[0](torch.randn(4, 3))
    guard.keep()
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net[0](torch.full((4, 3), torch.nan) if spoilt else torch.randn(4, 3))
    guard.restore_if_spoilt(loss)
    same = {name: torch.equal(buffer, kept[name]) for name, buffer in net.named_buffers()}
    assert all(same.values()) == restored
    assert same["0.num_batches_tracked"] == restored


def test_evaluation_mode_puts_every_module_back():
    net = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)), nn.Dropout(0.5))
    net[1].eval()
    net[2].eval()
    modes = [module.training for module in net.modules()]
    with pytest.raises(KeyError), evaluation_mode(net):
        assert not any(module.training for module in net.modules())
        raise KeyError
    assert [module.training for module in net.modules()] == modes
    assert any(modes) and not all(modes)
