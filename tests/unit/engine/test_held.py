"""From an optimizer's tensors to pieces by parameter, and back into another arrangement."""

import pytest
import torch
from torch import nn

from largetrain.engine.held import (
    Held,
    layout_bound,
    optimizer_numbers,
    optimizer_pieces,
    read,
    restore_optimizer,
    restore_weights,
    tied_names,
    weight_pieces,
    whole_parameters,
)
from largetrain.errors import CheckpointError

NUMBERS = {"step": {"dtype": "float32", "all": 3.0}}


class Memory:
    """Pieces that are kept whole."""

    def __init__(self, pieces):
        self.shared = {}
        self.tensors = {}
        for piece in pieces:
            whole = self.tensors.setdefault(piece.key, torch.full((torch.Size(piece.shape).numel(),), torch.nan))
            whole[piece.start : piece.start + piece.values.numel()] = piece.values
        self.shapes = {piece.key: piece.shape for piece in pieces}

    def keys(self):
        return sorted(self.tensors)

    def shape(self, key):
        return self.shapes[key]

    def read(self, key, start=0, stop=None, columns=None):
        assert columns is None
        return self.tensors[key][start:stop]

    def own(self, rank):
        return {}


def stepped(parameters, kind=torch.optim.AdamW):
    optimizer = kind(parameters, lr=0.1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def test_state_moves_from_whole_parameters_to_flat_ranges_and_back():
    """As from a plain optimizer to ZeRO's flat tensors of two ranks, with padding at the end."""
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(5))
    plain = stepped([first, second])
    named = {"a": first, "b": second}
    held = list(whole_parameters(named.items()))
    there = Memory(weight_pieces(held) + optimizer_pieces(held, plain))
    numbers = optimizer_numbers(named, plain)
    assert numbers == NUMBERS

    flats = [nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))]  # 11 elements and 5 of padding
    ranges = [
        [Held("a", (2, 3), 0, flats[0], 0, 6), Held("b", (5,), 0, flats[0], 6, 2)],
        [Held("b", (5,), 2, flats[1], 0, 3)],
    ]
    back = []
    for flat, mine in zip(flats, ranges, strict=True):
        optimizer = torch.optim.AdamW([flat], lr=0.1)
        restore_weights(mine, there)
        restore_optimizer(mine, {"a": flat, "b": flat}, optimizer, there, numbers, {})
        assert float(optimizer.state[flat]["step"]) == 3
        back += weight_pieces(mine) + optimizer_pieces(mine, optimizer)
        assert optimizer_numbers({"a": flat, "b": flat}, optimizer) == NUMBERS
    assert torch.equal(flats[1][3:], torch.zeros(5)) and torch.equal(
        optimizer.state[flats[1]]["exp_avg"][3:], torch.zeros(5)
    )
    again = Memory(back)
    assert again.shapes == there.shapes
    for key, tensor in there.tensors.items():
        assert torch.equal(again.tensors[key], tensor), key


def test_numbers_that_differ_are_kept_by_parameter():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = stepped([used])
    optimizer.add_param_group({"params": [unused]})
    numbers = optimizer_numbers({"used": used, "unused": unused}, optimizer)
    assert numbers == {"step": {"dtype": "float32", "each": {"used": 3.0}}}
    held = list(whole_parameters([("used", used), ("unused", unused)]))
    there = Memory(weight_pieces(held) + optimizer_pieces(held, optimizer))
    fresh = torch.optim.AdamW([used, unused], lr=0.1)
    restore_optimizer(held, {"used": used, "unused": unused}, fresh, there, numbers, {})
    assert set(fresh.state) == {used}


def test_factors_of_another_shape_are_bound_to_the_layout():
    weight = nn.Parameter(torch.randn(4, 6))
    optimizer = stepped([weight], torch.optim.Adafactor)
    bound = layout_bound({"weight": weight}, optimizer)
    assert {kind: tuple(tensor.shape) for kind, tensor in bound["weight"].items()} == {
        "row_var": (4, 1),
        "col_var": (1, 6),
    }
    plain = nn.Parameter(torch.randn(4))
    assert layout_bound({"plain": plain}, stepped([plain])) == {}


def test_tied_parameters_have_one_name_and_say_the_others():
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    assert tied_names(model.named_parameters(remove_duplicate=False)) == {}
    model["head"].weight = model["embedding"].weight
    assert tied_names(model.named_parameters(remove_duplicate=False)) == {"head.weight": "embedding.weight"}


def test_what_is_missing_or_reshaped_is_named():
    there = Memory(weight_pieces(whole_parameters([("a", torch.ones(2, 3))])))
    with pytest.raises(CheckpointError, match="no model/b"):
        read(there, "model/b", (2,))
    with pytest.raises(
        CheckpointError, match=r"model/a has shape \[2, 3\] in the checkpoint and \[3, 2\] in this model"
    ):
        read(there, "model/a", (3, 2))
