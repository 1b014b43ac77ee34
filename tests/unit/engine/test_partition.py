"""Where a pipeline is cut, and what is said of it."""

import itertools
import random

import pytest
import torch
from torch import nn

from largetrain.engine.partition import (
    LayerCost,
    balanced,
    bounds_of,
    layer_costs,
    memory_of,
    partition_report,
    runs_of,
    shares_of,
    weights_of,
)
from largetrain.errors import ConfigError
from largetrain.models.stages import NamedLayer


def cost(name="a", kind="Block", parameters=10, flops=1.0, saved=100, seconds=0.0):
    return LayerCost(name, kind, parameters, flops, saved, seconds)


def largest(weights, bounds):
    return max(sum(weights[begin:end]) for begin, end in itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(8))
def test_no_other_cut_has_a_smaller_largest_stage(seed):
    draw = random.Random(seed)
    weights = [draw.choice([0.0, 1.0, draw.random() * 5]) for _ in range(draw.randint(3, 9))]
    for stages in range(1, min(4, len(weights)) + 1):
        found = balanced(weights, stages)
        assert found[0] == 0 and found[-1] == len(weights) and all(a < b for a, b in itertools.pairwise(found))
        others = itertools.combinations(range(1, len(weights)), stages - 1)
        assert largest(weights, found) == pytest.approx(
            min(largest(weights, [0, *cut, len(weights)]) for cut in others)
        )


def test_of_equal_cuts_the_most_even_is_taken():
    assert balanced([4.0, 1, 1, 1, 1], 3) == [0, 1, 3, 5]


def test_methods_count_what_they_say():
    costs = [cost(parameters=5, flops=2.0, seconds=0.3), cost(kind="Norm", parameters=1, flops=1.0, seconds=0.1)]
    assert weights_of("parameters", costs) == [5.0, 1.0]
    assert weights_of("cost", costs) == [2.0, 1.0]
    assert weights_of("time", costs) == [0.3, 0.1]
    assert weights_of("uniform", costs) == [1.0, 1.0]
    assert weights_of("type:^block$", costs) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("partition", "stages", "words"),
    [
        ("parameter", 2, "none of cost, parameters"),
        ("type:Attention", 2, "no layer's class fits 'Attention'; there are Block, Norm"),
        ("type:(", 2, "no regular expression"),
        ([1, 1], 2, "adds up to 2 layers in 2 stages, but there are 3 layers (a, b, c)"),
        ([1, 1, 1], 2, "in 3 stages"),
        ("cost", 4, "4 stages for 3 layers"),
    ],
)
def test_what_cannot_be_cut_names_the_key_and_the_choice(partition, stages, words):
    costs = [cost("a"), cost("b", "Norm"), cost("c")]
    with pytest.raises(ConfigError) as caught:
        bounds_of(partition, costs, stages)
    assert words in caught.value.problems[0] and caught.value.problems[0].startswith("parallel.")


def test_an_explicit_list_is_taken_as_it_is():
    assert bounds_of([2, 1], [cost(), cost(), cost()], 2) == [0, 2, 3]


def test_costs_of_layers_are_counted():
    layers = [
        NamedLayer("first", lambda: nn.Linear(4, 6)),
        NamedLayer("act", lambda: nn.ReLU(inplace=True)),
        NamedLayer("last", lambda: nn.Linear(6, 2, bias=False)),
    ]
    first, act, last = layer_costs(layers, torch.zeros(3, 4), torch.float32, timed=True)
    assert (first.name, first.kind, first.parameters, last.parameters, act.parameters) == ("first", "Linear", 30, 12, 0)
    assert first.flops - last.flops == 2 * 3 * (4 * 6 - 6 * 2) + 8 * 3 * (6 - 2)  # products, and 8 for each output
    assert (first.saved_bytes, last.saved_bytes) == (3 * 4 * 4, 3 * 6 * 4)  # the inputs, fp32
    assert min(first.seconds, act.seconds, last.seconds) > 0


def test_half_precision_saves_half_the_activations():
    layers = [NamedLayer("one", lambda: nn.Linear(4, 6))]
    assert layer_costs(layers, torch.zeros(3, 4), torch.bfloat16)[0].saved_bytes == 3 * 4 * 2


@pytest.mark.parametrize(
    ("engine", "data", "expected"),
    [
        ({}, 1, 16.0),  # fp32: weight and gradient 4 each, Adam's moments 8
        ({"bf16": {"enabled": True}}, 1, 16.0),  # 2 + 2, masters and moments 12
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, 4, 7.0),
    ],
)
def test_bytes_of_a_parameter(engine, data, expected):
    assert memory_of(engine, 4, data, 1).bytes_per_parameter == expected


def test_the_table_has_shares_memory_and_a_suggestion():
    costs = [cost(f"l{index}", parameters=2**20, flops=1.0, saved=2**20) for index in range(4)]
    memory = memory_of({}, micro_batches=8, data=1, tensor=1)
    lines = partition_report([0, 3, 4], costs, memory, [3, 1], 2)
    assert lines[2].split() == ["0", "3", "l0", "to", "l2", "3,145,728", "75%", "54", "MiB"]  # 3 x 16, 2 x 3 in flight
    assert lines[3].split() == ["1", "1", "l3", "1,048,576", "25%", "17", "MiB"]
    assert "stage 0 takes 50% more time" in lines[4] and "parallel.partition: [2, 2]" in lines[4]
    assert len(partition_report([0, 2, 4], costs, memory, "cost", 2)) == 4


def test_an_imbalance_without_a_better_cut_says_so():
    costs = [cost(flops=9.0), cost(flops=1.0)]
    lines = partition_report([0, 1, 2], costs, memory_of({}, 4, 1, 1), "cost", 2)
    assert "no other cut is more even" in lines[-1]
    assert shares_of([0, 1, 2], costs, 2) == [0.9, 0.1]


def test_a_stage_may_hold_two_runs_from_both_ends():
    """DualPipeV: 2 x 2 + 1 micro-batches are in one or the other run of a stage, two and a half of the stage."""
    costs = [
        cost(f"l{index}", parameters=2**20, flops=flops, saved=2**20) for index, flops in enumerate([1, 2, 3, 2, 4])
    ]
    bounds = [0, 1, 2, 4, 5]
    assert runs_of(bounds, 2) == [[(0, 1), (4, 5)], [(1, 2), (2, 4)]]
    assert shares_of(bounds, costs, 2) == pytest.approx([5 / 12, 7 / 12])
    lines = partition_report(bounds, costs, memory_of({}, 4, 1, 1), [1, 1, 2, 1], 2)
    assert lines[2].split() == ["0", "2", "l0,", "l4", "2,097,152", "42%", "37", "MiB"]  # 2 x 16 + 2.5 x 2
    assert lines[3].split() == ["1", "3", "l1,", "l2", "to", "l3", "3,145,728", "58%", "56", "MiB"]
    assert "stage 1 takes 17% more time" in lines[4]


class Paired(nn.Linear):
    def forward(self, value):
        return super().forward(value), value


class WithLabels(nn.Linear):
    def forward(self, value, labels):
        return nn.functional.cross_entropy(super().forward(value), labels), (labels >= 0).sum()


def test_a_last_layer_that_needs_labels_gets_them():
    layers = [NamedLayer("one", lambda: nn.Linear(4, 6)), NamedLayer("last", lambda: WithLabels(6, 2))]
    labels = torch.zeros(3, dtype=torch.int64)
    found = layer_costs(layers, torch.zeros(3, 4), torch.float32, timed=True, labels=labels)
    assert found[1].flops >= 2 * 3 * 6 * 2 and found[1].seconds > 0


def test_a_layer_that_gives_no_tensor_is_named():
    layers = [NamedLayer("pair", lambda: Paired(4, 4)), NamedLayer("last", lambda: nn.Linear(4, 2))]
    with pytest.raises(ConfigError, match=r"layer pair \(Paired\) gives a tuple, and stages hand on one tensor"):
        layer_costs(layers, torch.zeros(3, 4), torch.float32)
