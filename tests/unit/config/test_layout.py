"""Layouts: which rank does what, and what is refused before anything heavy."""

import json
from math import prod

import pytest

from largetrain.config.layout import Layout
from largetrain.config.load import load
from largetrain.errors import ConfigError

LAYOUTS = [
    Layout(8, tensor=2, stages=2),
    Layout(16, tensor=4, stages=2),
    Layout(12, stages=3),
    Layout(8, sequence=4),
    Layout(1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_places_and_ranks_are_one_to_one(layout):
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    assert len(set(places)) == layout.world_size
    sizes = {axis: len({getattr(place, axis) for place in places}) for axis in ("stage", "data", "sequence", "tensor")}
    assert sizes == {
        "stage": layout.stages,
        "data": layout.data,
        "sequence": layout.sequence,
        "tensor": layout.tensor,
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("axes", [("tensor",), ("data", "sequence"), ("stage", "tensor")])
def test_groups_cover_every_rank_once(layout, axes):
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    degrees = {"stage": layout.stages, "data": layout.data, "sequence": layout.sequence, "tensor": layout.tensor}
    assert {len(group) for group in groups} == {prod(degrees[axis] for axis in axes)}


def test_the_order_is_that_of_deepspeed():
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = Layout(16, tensor=2, stages=2)
    theirs = PipeModelDataParallelTopology(num_pp=2, num_dp=4, num_mp=2)
    for rank in range(16):
        place, coord = layout.place(rank), theirs.get_coord(rank)
        assert (place.stage, place.data, place.tensor) == (coord.pipe, coord.data, coord.model)
    assert layout.groups("tensor") == theirs.get_axis_comm_lists("model")
    assert layout.groups("data") == theirs.get_axis_comm_lists("data")


def problems_of(world_size: int, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(None, None, overrides, world_size=world_size, world_size_source="--num_gpus")
    return caught.value.problems


# (ranks, overrides) -> what one of the lines must say: the key, and what to write instead
FOLDED = ("parallel.pipeline_stages=2", "parallel.pipeline_schedule=dualpipev")
REFUSED = {
    "ranks": ((4, "parallel.tensor_parallel=3", "model.heads=6"), ("tensor_parallel 3 does not divide 4", "1, 2, 4")),
    "ranks, both": (
        (6, "parallel.tensor_parallel=2", "parallel.pipeline_stages=2", "model.heads=4"),
        ("2 x pipeline_stages 2 = 4 does not divide 6 ranks", "Start 4 or 8 ranks"),
    ),
    "heads": ((2, "parallel.tensor_parallel=2"), ("model.heads=3", "one of 1")),
    "feed-forward": (
        (4, "parallel.tensor_parallel=4", "model.heads=4", "model.hidden=192", "model.ffn_hidden=510"),
        ("model.ffn_hidden=510", "one of 1, 2"),
    ),
    "stages": ((8, "parallel.pipeline_stages=8"), ("8 stages for 4 blocks", "at most 4")),
    "ulysses heads": ((2, "parallel.ulysses=2"), ("model.heads=3", "one of 1, 3")),
    "ulysses length": ((3, "parallel.ulysses=3"), ("model.seq_len=256", "change one")),
    "ulysses and stages": (
        (4, "parallel.ulysses=2", "parallel.pipeline_stages=2", "model.heads=4"),
        ("not with pipeline_stages", "write 1"),
    ),
    "sequence alone": ((2, "parallel.sequence_parallel=true"), ("tensor_parallel is 1", "ulysses")),
    "zero 2": (
        (2, "parallel.pipeline_stages=2", "zero_optimization.stage=2"),
        ("zero_optimization.stage: 2", "write 0 or 1"),
    ),
    "zero 3": ((2, "parallel.pipeline_stages=2", "zero_optimization.stage=3"), ("stage: 3", "write 0 or 1")),
    "offload": (
        (2, "parallel.pipeline_stages=2", 'zero_optimization.offload_optimizer={"device": "cpu"}'),
        ("offload_optimizer", "remove one"),
    ),
    "backend": ((2, "parallel.pipeline_stages=2", "backend=deepspeed"), ("backend: deepspeed has no", "pipeline")),
    "ddp": (
        (2, "parallel.tensor_parallel=2", "backend=ddp", "model.heads=4"),
        ("whole model", "backend: deepspeed"),
    ),
    "idle partition": ((1, "parallel.partition=uniform"), ("no effect", "pipeline_stages")),
    "stage number": ((2, "parallel.pipeline_stages=2", "parallel.recompute_stages=[2]"), ("no stage 2", "0 to 1")),
    "idle schedule": ((1, "parallel.pipeline_schedule=dualpipev"), ("no effect", "pipeline_stages")),
    "micro-batches": (
        (2, *FOLDED, "gradient_accumulation_steps=3"),
        ("dualpipev on 2 stages takes 4 micro-batches", "gradient_accumulation_steps is 3", "write 1f1b"),
    ),
    "runs": (
        (2, *FOLDED, "model.layers=3", "gradient_accumulation_steps=4"),
        ("3 blocks (model.layers) into 4 runs", "more layers"),
    ),
    "partition of runs": (
        (2, *FOLDED, "parallel.partition=[4,5]", "gradient_accumulation_steps=4"),
        ("names 2 runs", "4 runs of layers, 2 for each of the 2 stages"),
    ),
    "partition length": (
        (2, "parallel.pipeline_stages=2", "parallel.partition=[3,3,3]"),
        ("names 3 runs", "the 2 stages"),
    ),
    "optimizer": (
        (2, "parallel.tensor_parallel=2", "model.heads=4", "optimizer.type=Lamb"),
        ("Lamb needs whole matrices", "AdamW"),
    ),
    "target in stages": (
        (4, "parallel.tensor_parallel=2", "parallel.pipeline_stages=2", "model.target=torch.nn:Identity"),
        ("knows nothing of pipeline stages", "write 1"),
    ),
    "images": ((2, "task=classification", "parallel.tensor_parallel=2"), ("language models only", "pipeline_stages")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_layouts_are_refused_with_a_way_out(case):
    (world_size, *overrides), words = REFUSED[case]
    problems = problems_of(world_size, *overrides)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_the_batch_counts_data_parallel_ranks_only():
    found = load(
        None,
        None,
        [
            "parallel.tensor_parallel=2",
            "parallel.pipeline_stages=2",
            "model.heads=4",
            "train_batch_size=64",
            "gradient_accumulation_steps=null",
        ],
        world_size=8,
    )
    assert found.layout == Layout(8, tensor=2, stages=2)
    assert (found.batch.data_parallel, found.batch.global_batch) == (2, 64)
    assert found.batch.gradient_accumulation_steps == 64 // (2 * found.batch.micro_batch)
    assert found.backend == "pipeline"
    assert found.engine["zero_optimization"]["stage"] == 1
    assert any("stage = 1" in note for note in found.notes)
    assert json.loads(found.to_json())["layout"]["tensor"] == 2


def test_a_batch_that_does_not_divide_names_the_ranks_to_start():
    (problem,) = problems_of(
        8,
        "parallel.tensor_parallel=4",
        "model.heads=4",
        "train_batch_size=24",
        "train_micro_batch_size_per_gpu=8",
        "gradient_accumulation_steps=1",
    )
    assert "2 data-parallel ranks (8 in all, 4 for one model" in problem and "start 12 ranks" in problem
