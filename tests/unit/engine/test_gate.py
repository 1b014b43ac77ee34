"""An optimizer's step waits for copies of what it is about to change."""

import warnings

import torch
from torch import nn

from largetrain.engine.gate import Gate, gate_of


def test_the_next_step_waits_once():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    gate, seen = Gate(optimizer), []
    gate.shut(lambda: seen.append(parameter.tolist()))
    optimizer.step()
    optimizer.step()
    assert seen == [[1.0, 1.0]] and parameter.tolist() == [-1.0, -1.0]
    gate.open()  # nothing to wait for


def test_a_schedule_still_sees_that_the_optimizer_stepped():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    Gate(optimizer)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


class Muon(torch.optim.SGD):
    """Under ZeRO the momentum of the real one moves with the backward pass."""


def test_state_that_changes_before_the_step_is_not_left_for_later():
    inner = Muon([nn.Parameter(torch.ones(1))], lr=1.0)
    assert gate_of(inner, inner) is None
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert gate_of(plain, plain) is not None
