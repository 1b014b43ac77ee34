"""The pipeline backend: parity with the single-process loop, skipped updates, continuation to the bit, refusals."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from largetrain.errors import ConfigError
from largetrain.parallel.shards import shard_of
from tests.distributed.parity.harness import Disturbed
from tests.distributed.parity.parallel import GLOBAL_BATCH, SEQ_LEN, VOCAB, Cell, join, measure, rank_parts
from tests.distributed.tiny_run import precision_section, train, write_inputs
from tests.ranks import run_ranks
from tests.reference import toy_batches

TWO = Cell(backend="pipeline", stages=2)
CELLS = {
    2: [
        replace(TWO, accumulation=4, style="gpt"),
        replace(TWO, accumulation=1, zero=1, tied=True),  # fewer micro-batches than stages
        replace(TWO, zero=1, precision="fp16", tied=True, recompute=True),
        replace(TWO, precision="bf16", partition="uniform"),
    ],
    4: [
        replace(TWO, tensor=2, zero=1, tied=True, sequence_parallel=True, accumulation=4),
        replace(TWO, tensor=2, style="gpt", tied=True, optimizer="SGD"),
        replace(TWO, data=2, zero=1, tied=True),
        replace(TWO, data=2, zero=1, precision="bf16"),
    ],
}


@pytest.mark.parametrize("ranks", CELLS)
def test_stages_train_as_one_process_does(ranks):
    for cell, errors in zip(CELLS[ranks], measure(CELLS[ranks]), strict=True):
        assert not errors.failures(), f"{cell}: {errors.failures()}"


def disturbed(factor: float, zero: int) -> list[tuple[bool, bool, dict[str, torch.Tensor]]]:
    """Three updates, of which the loss of the second is multiplied; what every rank has after each."""
    from tests.distributed.parity.pipeline import pipeline_backend

    cell = replace(TWO, data=2, zero=zero, tied=True)
    resolved = cell.resolve()
    task = Disturbed({1: factor}, accumulation=cell.accumulation)
    backend = pipeline_backend(resolved, join, task)
    seen = []
    for batch in toy_batches(3, GLOBAL_BATCH, SEQ_LEN, VOCAB):
        result = backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank())))
        weights = {name: p.detach().clone() for name, p in backend._state.named.items()}
        seen.append((result.applied, bool(torch.isfinite(torch.as_tensor(result.grad_norm))), weights))
    return seen


@pytest.mark.parametrize(("factor", "zero"), [(float("nan"), 0), (float("inf"), 1)])
def test_an_update_that_is_not_finite_is_skipped_on_all_stages(factor, zero):
    for seen in run_ranks(disturbed, 4, factor, zero, timeout=100):
        assert [applied for applied, _, _ in seen] == [True, False, True]
        assert [finite for _, finite, _ in seen] == [True, False, True]
        first, second, third = (weights for _, _, weights in seen)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not all(torch.equal(second[name], third[name]) for name in first)


LAYOUT = ["parallel.pipeline_stages=2", "parallel.tensor_parallel=2", "zero_optimization.stage=1"]


def both_ways(folder, sets):
    """A straight run of 6 updates, and one stopped after 3 and resumed, on this rank."""
    straight = train(folder, 6, "straight", None, [*sets, "checkpoints.at_end=true"])
    first = train(folder, 6, "stopped", None, [*sets, "checkpoints.every_steps=3"], stop_after=3)
    second = train(folder, 6, "stopped", "auto", [*sets, "checkpoints.at_end=true"])
    return straight, first, second


def test_a_resumed_run_goes_on_to_the_bit_with_dropout_and_half_precision(tmp_path):
    write_inputs(tmp_path, {**precision_section("fp16"), "gradient_accumulation_steps": 4})
    for straight, first, second in run_ranks(both_ways, 4, tmp_path, LAYOUT, timeout=200):
        assert [u["loss"] for u in [*first.updates, *second.updates]] == [u["loss"] for u in straight.updates]
        assert [u["norm"] for u in [*first.updates, *second.updates]] == [u["norm"] for u in straight.updates]
        assert second.state == straight.state
        assert not any("up to the rounding" in line for line in second.lines)


def replicas(steps: int, zero: int) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Whole parameters of this rank after some updates, and its place."""
    from tests.distributed.parity.pipeline import pipeline_backend

    cell = replace(TWO, tensor=2, tied=True, style="gpt", zero=zero)
    resolved = cell.resolve()
    backend = pipeline_backend(resolved, join)
    for batch in toy_batches(steps, GLOBAL_BATCH, SEQ_LEN, VOCAB):
        backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank())))
    place = backend.layout.place(dist.get_rank())
    named = backend._state.named.items()
    whole = {name: p.detach().clone() for name, p in named if shard_of(p) is None or name == "token_embedding.weight"}
    return whole, (place.stage, place.tensor)


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_and_tied_copies_stay_equal_to_the_bit(zero):
    held = {place: whole for whole, place in run_ranks(replicas, 4, 20, zero, timeout=100)}
    for stage in (0, 1):
        one, other = held[stage, 0], held[stage, 1]
        assert len(one) > 5
        alike = [name for name in one if name != "token_embedding.weight"]
        assert all(torch.equal(one[name], other[name]) for name in alike)
    for tensor in (0, 1):  # the table is divided over the tensor ranks, and both stages have each part
        table = "token_embedding.weight"
        assert torch.equal(held[0, tensor][table], held[1, tensor][table])


class Cut(torch.nn.Module):
    """A user's model with a list of layers; the last gives logits."""

    def __init__(self, width: int = 8, hidden: str = "no"):
        super().__init__()
        self.table = torch.nn.Embedding(300, width)
        self.middle = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(width, 300)
        if hidden == "tied":
            self.out.weight = self.table.weight
        self.left_out = torch.nn.Parameter(torch.zeros(2)) if hidden == "left out" else None

    def forward(self, input_ids, labels):
        return self.out(self.middle(self.table(input_ids)).relu())

    def layers(self):
        return [self.table, self.middle, torch.nn.ReLU(), self.out]


class Samples(torch.utils.data.Dataset):
    """Data for it."""

    def __init__(self, split):
        generator = torch.Generator().manual_seed(len(split))
        self.ids = torch.randint(0, 300, (24, 13), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


class Uncut(torch.nn.Linear):
    def forward(self, input_ids, labels):
        return super().forward(input_ids)


def own_model(folder, output, sets):
    return [update["loss"] for update in train(folder, 4, output, None, sets).updates]


def test_a_model_of_ones_own_trains_in_stages_as_on_one_rank(tmp_path):
    write_inputs(tmp_path, {"gradient_accumulation_steps": 4}, {"model": {}})
    run_file = tmp_path / "run.json"
    content = json.loads(run_file.read_text())
    content["model"] = {"target": f"{__name__}:Cut", "vocab_size": 300}
    content["data"] = {"target": f"{__name__}:Samples"}
    run_file.write_text(json.dumps(content))
    (alone,) = run_ranks(own_model, 1, tmp_path, "one", [], timeout=60)
    for losses in run_ranks(own_model, 2, tmp_path, "two", ["parallel.pipeline_stages=2"], timeout=60):
        assert losses == pytest.approx(alone, rel=1e-6)  # 8 features and 96 tokens: sums of rounding 6e-8


def refusal(kind: str) -> str:
    from largetrain.models.staged import staged_model

    model = Uncut(2, 2) if kind == "no list" else Cut(hidden=kind)
    with pytest.raises(ConfigError) as caught:
        staged_model(model)
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no list", "give it a method layers()"),
        ("tied", "is in several of the layers"),
        ("left out", "leaves out left_out"),
    ],
)
def test_a_model_that_cannot_be_cut_is_told_why(kind, words):
    assert words in refusal(kind)
