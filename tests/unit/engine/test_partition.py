"""What layers cost, where a model is cut, and what the table of stages says."""

import itertools
import random

import pytest
import torch
from torch import nn

from largetrain.engine.partition import (
    LayerCost,
    Memory,
    balanced,
    bounds_of,
    layer_costs,
    memory_of,
    partition_report,
    shares_of,
    weights_of,
)
from largetrain.errors import ConfigError
from largetrain.models.decoder import decoder_layers
from largetrain.models.staged import staged_model
from largetrain.models.stages import NamedLayer
from largetrain.parallel.axes import Axes
from tests.unit.models.specs import small_spec


def largest(weights, bounds):
    return max(sum(weights[begin:end]) for begin, end in itertools.pairwise(bounds))


def every_cut(count, stages):
    for inner in itertools.combinations(range(1, count), stages - 1):
        yield [0, *inner, count]


def test_no_cut_has_a_smaller_largest_stage():
    """Against all cuts of 200 random lists, with equal weights and zeros among them."""
    draw = random.Random(7)
    for _ in range(200):
        count = draw.randint(1, 8)
        weights = [float(draw.choice([0, 1, 1, 2, 3, 10])) for _ in range(count)]
        stages = draw.randint(1, count)
        bounds = balanced(weights, stages)
        assert bounds in list(every_cut(count, stages))
        assert largest(weights, bounds) == min(largest(weights, other) for other in every_cut(count, stages))


def test_of_cuts_with_the_same_largest_stage_the_most_even_one_is_taken():
    """One stage of 10 cannot be helped; the other six layers go three and three."""
    assert balanced([10.0, 1, 1, 1, 1, 1, 1], 3) == [0, 1, 4, 7]
    assert balanced([1.0] * 8, 4) == [0, 2, 4, 6, 8]


def costs(*flops, seconds=None, kind="Block", parameters=100, saved=1 << 20):
    times = seconds or [0.0] * len(flops)
    return [
        LayerCost(f"layer{index}", kind, parameters, float(one), saved, time)
        for index, (one, time) in enumerate(zip(flops, times, strict=True))
    ]


def test_a_partition_is_counted_in_what_its_name_says():
    found = [
        LayerCost("table", "Embedding", 900, 1.0, 0, 0.5),
        LayerCost("one", "Block", 100, 8.0, 0, 0.1),
        LayerCost("two", "Block", 100, 8.0, 0, 0.1),
        LayerCost("head", "Head", 100, 9.0, 0, 0.1),
    ]
    assert bounds_of("parameters", found, 2) == [0, 1, 4]
    assert bounds_of("cost", found, 2) == [0, 2, 4]
    assert bounds_of("time", found, 2) == [0, 1, 4]
    assert bounds_of("uniform", found, 2) == [0, 2, 4]
    assert weights_of("type:^block$", found) == [0.0, 1.0, 1.0, 0.0]
    assert bounds_of("type:block|head", found, 3) == [0, 2, 3, 4]
    assert bounds_of([1, 3], found, 2) == [0, 1, 4]


@pytest.mark.parametrize(
    ("partition", "stages", "words"),
    [
        ("fastest", 2, "is none of cost, parameters, uniform, time, type:REGEX"),
        ("type", 2, "is none of"),
        ("type:(", 2, "is no regular expression"),
        ("type:conv", 2, "no layer's class fits 'conv'; there are Block"),
        ([1, 1], 2, "adds up to 2 layers in 2 stages, but there are 3 layers (layer0, layer1, layer2)"),
        ([1, 1, 1], 2, "for 2 stages"),
        ("cost", 4, "4 stages for 3 layers; write at most that"),
    ],
)
def test_a_partition_that_is_none_is_refused(partition, stages, words):
    with pytest.raises(ConfigError) as caught:
        bounds_of(partition, costs(1, 1, 1), stages)
    assert words in caught.value.problems[0]


def test_shares_follow_measured_time_where_there_is_some():
    assert shares_of([0, 1, 3], costs(2, 1, 1)) == [0.5, 0.5]
    assert shares_of([0, 1, 3], costs(2, 1, 1, seconds=[0.1, 0.2, 0.1])) == pytest.approx([0.25, 0.75])


# ---------------------------------------------------------------- the table


def test_memory_per_parameter_by_precision_and_stage():
    """fp32: 4 weight + 4 gradient + 8 moments. Half: 2 + 2, and 12 for master and moments, divided by ZeRO-1."""
    assert memory_of({}, 4, 2, 1) == Memory(16.0, 4, 1)
    assert memory_of({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, 4, 4, 2) == Memory(7.0, 4, 2)
    assert memory_of({"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}, 1, 1, 1) == Memory(16.0, 1, 1)


def test_the_table_counts_micro_batches_in_flight():
    """1F1B: stage s of p keeps min(m, p - s) micro-batches. 1 MiB a layer and micro-batch, 2^18 parameters of 16 B."""
    rows = partition_report([0, 1, 2, 3], costs(1, 1, 1, parameters=1 << 18), Memory(16.0, 2), "cost")
    assert [line.split() for line in rows[1:]] == [
        ["stage", "layers", "parameters", "time", "memory"],
        ["0", "1", "layer0", "262,144", "33%", "6", "MiB"],
        ["1", "1", "layer1", "262,144", "33%", "6", "MiB"],
        ["2", "1", "layer2", "262,144", "33%", "5", "MiB"],
    ]


def test_tensor_ranks_divide_what_a_stage_holds():
    rows = partition_report([0, 2], costs(1, 1, parameters=1 << 18), Memory(16.0, 1, 2), "uniform")
    assert rows[0].startswith("stages by uniform")
    assert rows[2].split() == ["0", "2", "layer0", "to", "layer1", "262,144", "100%", "5", "MiB"]


def test_an_uneven_cut_gets_the_list_that_would_be_better():
    """60 % of the time on one of two stages is 20 % more than the mean; up to 15 % nothing is said."""
    uneven = partition_report([0, 3, 5], costs(2, 2, 2, 2, 2), Memory(16.0, 1), [3, 2])
    assert "no other cut is more even" in uneven[-1] and "stage 0 takes 20% more time" in uneven[-1]
    mended = partition_report([0, 1, 4], costs(1, 1, 1, 1), Memory(16.0, 1), [1, 3])
    assert mended[-1].endswith(
        "stage 1 takes 50% more time than the mean, and all others wait for it; "
        "parallel.partition: [2, 2] would leave 0%"
    )
    even = partition_report([0, 1, 2], costs(23, 20), Memory(16.0, 1), "cost")  # 7 %
    assert len(even) == 4


def test_the_list_that_is_suggested_is_one_that_can_be_written():
    found = costs(5, 1, 1, 1, 1, 1)
    line = partition_report([0, 3, 6], found, Memory(16.0, 1), "uniform")[-1]
    lengths = [int(number) for number in line.partition("[")[2].partition("]")[0].split(",")]
    assert bounds_of(lengths, found, 2) == balanced([cost.flops for cost in found], 2) == [0, 1, 6]


# ---------------------------------------------------------------- what layers cost


def test_costs_of_the_decoder_without_building_its_weights():
    """On the meta device: parameters and products of every layer, the tied table counted once."""
    spec = small_spec("gpt", layers=2, tie_embeddings=True)
    ids = torch.zeros(3, spec.seq_len, dtype=torch.int64, device="meta")
    found = {cost.name: cost for cost in layer_costs(decoder_layers(spec, Axes(), 1), ids, torch.float32)}
    assert found["head"].parameters == 0
    assert found["token_embedding"].parameters == spec.vocab_size * spec.hidden
    assert found["blocks.0"].parameters == found["blocks.1"].parameters > 4 * spec.hidden**2
    tokens = 3 * spec.seq_len
    head = 2 * tokens * spec.hidden * spec.vocab_size
    assert head <= found["head"].flops < 1.5 * head
    matrices = sum(p for p in (4 * spec.hidden**2, 2 * spec.hidden * spec.ffn_hidden))
    assert found["blocks.0"].flops > 2 * tokens * matrices
    half = layer_costs(decoder_layers(spec, Axes(), 1), ids, torch.bfloat16)
    assert [cost.saved_bytes for cost in half] == [cost.saved_bytes // 2 for cost in found.values()]


def test_frozen_parameters_are_not_counted_nor_modes_changed():
    layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)]
    layers[0].requires_grad_(False)
    layers[2].eval()
    named = [NamedLayer(str(index), lambda layer=layer: layer) for index, layer in enumerate(layers)]
    found = layer_costs(named, torch.randn(3, 4), torch.float32)
    assert [cost.parameters for cost in found] == [0, 0, 10]
    assert [layer.training for layer in layers] == [True, True, False]


def test_statistics_of_batch_norms_do_not_move_while_they_are_timed():
    norm = nn.BatchNorm2d(2)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), norm, nn.ReLU(inplace=True))
    found = layer_costs(staged_model(model, list(model)).layers, torch.randn(4, 2, 3, 3), torch.float32, timed=True)
    assert all(cost.seconds > 0 for cost in found)
    assert norm.num_batches_tracked == 0 and norm.running_mean.tolist() == [0.0, 0.0]
    assert all(parameter.grad is None for parameter in model.parameters())
