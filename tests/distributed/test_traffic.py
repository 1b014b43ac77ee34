"""What an update sends over data-parallel ranks and between stages, counted, against the published formulas.

ZeRO (Rajbhandari et al. 2020, section 7): P parameters' gradients are reduced once, updated weights are gathered once
(stages 1 and 2: 2 P in all); stage 3 gathers weights for the forward and for the backward pass instead (3 P).
Pipelines (Narayanan et al. 2021, section 3): batch x sequence x hidden elements at each boundary and micro-batch,
each way. Tensor parallelism is counted in test_tensor_parallel.
"""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity.parallel import BACKENDS, GLOBAL_BATCH, SEQ_LEN, VOCAB, Cell, rank_parts
from tests.ranks import run_ranks
from tests.reference import toy_batches
from tests.traffic import Message, counted

SMALL = 4  # elements: loss, weight, norm, overflow
NOTHING_KEPT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def sent(cell: Cell, zero: dict[str, Any]) -> tuple[int, list[Message], int]:
    """Parameters of the model, what this rank sent in a later update, and its rank."""
    resolved = cell.resolve()
    resolved.engine["zero_optimization"].update(zero)
    backend, _ = BACKENDS[cell.backend](resolved)
    batches = toy_batches(2, GLOBAL_BATCH, SEQ_LEN, VOCAB)
    backend.train_step(iter(rank_parts(resolved, batches[0], dist.get_rank())))
    with counted() as traffic:
        backend.train_step(iter(rank_parts(resolved, batches[1], dist.get_rank())))
    parameters = sum(prod(shape) for shape in backend.shapes().values())
    # beside activations, stages tell one another their shape: 1 KiB of int32 at each boundary and update
    counting = [message for message in traffic.messages if message.elements > SMALL and message.dtype != torch.int32]
    return parameters, counting, dist.get_rank()


def elements(messages: list[Message], *kinds: str) -> int:
    return sum(message.elements for message in messages if message.kind in kinds)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_sends_two_or_three_times_the_parameters(stage):
    cell = Cell(data=2, zero=stage, accumulation=2)
    for parameters, messages, _ in run_ranks(sent, 2, cell, NOTHING_KEPT if stage == 3 else {}, timeout=100):
        # stages 2 and 3 keep only their part of the gradients, so each micro-batch's are reduced on their own
        reductions = cell.accumulation if stage >= 2 else 1
        assert elements(messages, "all_reduce", "reduce_scatter", "reduce") == reductions * parameters
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * cell.accumulation}[stage]
        assert elements(messages, "all_gather") == gathers * parameters
        assert {message.kind for message in messages} <= {"all_reduce", "reduce_scatter", "reduce", "all_gather"}


@pytest.mark.parametrize(("tensor", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_stages_send_each_activation_and_its_gradient_once(tensor, sequence_parallel):
    cell = Cell(
        backend="pipeline", stages=2, tensor=tensor, sequence_parallel=sequence_parallel, zero=1, accumulation=4
    )
    hidden, micro_batch = cell.model["hidden"], GLOBAL_BATCH // cell.accumulation
    # with sequence parallelism a tensor rank has, and hands on, its part of the positions
    activation = micro_batch * SEQ_LEN * hidden // (tensor if sequence_parallel else 1)
    for _, messages, _ in run_ranks(sent, 2 * tensor, cell, {}, timeout=100):
        for kind in ("send", "recv"):
            assert [m.elements for m in messages if m.kind == kind] == [activation] * cell.accumulation


def test_a_tied_table_is_summed_over_its_two_stages_once():
    cell = Cell(backend="pipeline", stages=2, zero=0, tied=True, accumulation=4)
    tied = run_ranks(sent, 2, cell, {}, timeout=60)
    untied = run_ranks(sent, 2, replace(cell, tied=False), {}, timeout=60)
    for (_, messages, rank), (_, without, _) in zip(tied, untied, strict=True):
        table = VOCAB * cell.model["hidden"]
        both = tuple(range(2))
        assert [m.elements for m in messages if m.kind == "all_reduce" and m.ranks == both] == [table], rank
        assert not [m for m in without if m.kind == "all_reduce" and m.ranks == both]
