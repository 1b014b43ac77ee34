"""What a rank holds when tensor and pipeline parallelism divide a model: live counts against the table of stages.

Megatron's count (Narayanan et al. 2021, section 2): matrices are divided by tensor x pipeline, what is small stays
whole on tensor ranks; the table in `engine/partition` says so before a run starts.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from largetrain.config.decoder_spec import DecoderSpec
from largetrain.engine.partition import memory_of
from tests.distributed.parity.memory import held_bytes
from tests.distributed.parity.parallel import BACKENDS, GLOBAL_BATCH, SEQ_LEN, VOCAB, Cell, rank_parts
from tests.ranks import run_ranks
from tests.reference import toy_batches

WIDE = {"hidden": 128, "heads": 8, "kv_heads": 8, "ffn_hidden": 384}
CELLS = {
    "tensor 2": Cell(tensor=2),
    "stages 2": Cell(backend="pipeline", stages=2),
    "stages 2 x tensor 2": Cell(backend="pipeline", stages=2, tensor=2),
    "stages 2 x data 2, ZeRO-1, bf16": Cell(backend="pipeline", stages=2, data=2, zero=1, precision="bf16"),
}


def held(cell: Cell) -> tuple[int, int, DecoderSpec]:
    """Bytes of parameters, gradients and optimizer of this rank after an update, and its stage's parameters."""
    resolved = cell.resolve()
    spec = replace(resolved.decoder, **WIDE)
    resolved = replace(resolved, decoder=spec)
    backend, _ = BACKENDS[cell.backend](resolved)
    (batch,) = toy_batches(1, GLOBAL_BATCH, SEQ_LEN, VOCAB)
    backend.train_step(iter(rank_parts(resolved, batch, dist.get_rank())))
    engine = backend.engine
    found = held_bytes(SimpleNamespace(engine=engine, optimizer=engine.optimizer), batch)
    elements = sum(parameter.numel() for parameter in engine.module.parameters())
    return found["parameters"] + found["optimizer"], elements, spec


@pytest.mark.parametrize("name", CELLS)
def test_weights_and_optimizer_divide_as_the_formulas_say(name):
    cell = CELLS[name]
    outcomes = run_ranks(held, cell.world_size, cell, timeout=100)
    whole = outcomes[0][2].parameter_count()
    parts = cell.tensor * cell.stages
    memory = memory_of(cell.resolve().engine, cell.accumulation, cell.data, cell.tensor)
    gradient_bytes = 2 if cell.precision == "bf16" else 4
    for n_bytes, elements, _ in outcomes:
        # the two stages differ by one norm, and tensor ranks hold all norms: under a hundredth
        assert elements == pytest.approx(whole / parts, rel=0.05)
        assert n_bytes == pytest.approx(elements * (memory.bytes_per_parameter - gradient_bytes), rel=0.05)
    held_once = sum(elements for _, elements, _ in outcomes) / cell.data
    assert held_once == pytest.approx(whole, rel=0.02) and held_once >= whole
