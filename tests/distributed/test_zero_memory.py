"""Bytes per rank at ZeRO stages 0-3, counted from the live engine, against the ZeRO paper's formulas.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3 and figure
1: with mixed-precision Adam a rank holds 2 psi bytes of parameters, 2 psi of gradients and K psi = 12 psi of optimizer
state (fp32 weights, momentum, variance); stage 1 divides the state by the N ranks, stage 2 the gradients too, stage 3
all of it. In fp32, parameters and gradients take 4 psi each. The state is then 8 psi at stage 0, which has no second
copy of the weights; from stage 1 on DeepSpeed keeps its partition of "master" weights in fp32 as well, so K = 12 stays.

Gradients exist between two micro-batches of an update: that is where they are counted. Afterwards stages 0-2 hold none,
while stage 3 keeps its partition's buffer for the next update.
"""

import pytest

from tests.distributed.parity.harness import MODEL, SEQ_LEN, VOCAB, engine_json, resolve
from tests.distributed.parity.memory import measure
from tests.ranks import run_ranks
from tests.reference import toy_batches

RANKS, SHARE = 4, 0.02
BUCKET = 1 << 14  # elements; more than the largest parameter
# Many small matrices: a gradient on the border of two partitions of stage 2 is kept whole on both ranks, and one that
# DeepSpeed's hook was last called with stays alive. Both have the size of a single parameter.
MANY_SMALL = {**MODEL, "layers": 48, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn_hidden": 32}
FEW = {**MODEL, "layers": 3, "hidden": 48, "heads": 2, "kv_heads": 2, "ffn_hidden": 64}


def formula(stage: int, weight_bytes: int, ranks: int) -> dict[str, float]:
    """Bytes per parameter and rank between two micro-batches."""
    state = 8 if weight_bytes == 4 and stage == 0 else 12
    return {
        "parameters": weight_bytes / (ranks if stage == 3 else 1),
        "gradients": weight_bytes / (ranks if stage >= 2 else 1),
        "optimizer": state / (ranks if stage >= 1 else 1),
    }


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (2, "bf16"), (3, "fp16")],
)
def test_a_rank_holds_what_the_paper_says(stage, precision):
    zero = {
        "reduce_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 0,  # else small parameters stay whole on every rank
    }
    engine = engine_json(stage, precision, 2, 1, ("AdamW", {"lr": 1e-3}), zero_optimization=zero)
    half = precision != "fp32"
    served_stage = 1 if half and stage == 0 else stage  # the engine says so in a note
    resolved = resolve(engine, RANKS, MANY_SMALL if served_stage in (1, 2) else FEW)
    expected = formula(served_stage, 2 if half else 4, RANKS)
    for sizes in run_ranks(measure, RANKS, resolved, toy_batches(2, 2 * RANKS, SEQ_LEN, VOCAB)):
        between, after = sizes["between"], sizes["after"]
        psi = between["elements"]
        assert psi == resolved.decoder.parameter_count()
        for kind, per_parameter in expected.items():
            assert between[kind] == pytest.approx(per_parameter * psi, rel=SHARE), kind
            if kind != "gradients":
                assert after[kind] == between[kind], kind
        assert after["gradients"] == (between["gradients"] if served_stage == 3 else 0)
        assert between["working"] <= 2 * BUCKET * (2 if half else 4)
        assert between["other"] < SHARE * sum(expected.values()) * psi  # nothing large escapes the count
