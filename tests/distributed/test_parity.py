"""The engine draws the curve of a plain single-process loop, at every ZeRO stage, precision and layout.

CI runs cases in which every two values meet; `launch/parity` (or `pytest tests/distributed/test_parity.py
--parity=full`) runs the whole matrix.
"""

import itertools

import pytest

from tests.distributed.parity import matrix
from tests.distributed.parity.matrix import AXES, Case, Errors, measure


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--parity", "core") == "full"
        cases = (matrix.full() if everything else matrix.core()) + matrix.offloaded(everything)
        metafunc.parametrize("case", cases, ids=str)


def check(errors: Errors) -> None:
    assert errors.initial_equal, "other initial weights"
    assert errors.lrs_equal, "another schedule"
    assert errors.scales_equal, "another loss scale"
    for name, bound in errors.bounds.items():
        assert getattr(errors, name) < bound, f"{name}: {getattr(errors, name):.3g} is not below {bound:.3g}"


def test_engine_follows_the_reference(case: Case, parity_table: dict):
    if case.offload and case.optimizer == "AdamW" and not matrix.cpu_adam_is_built():
        pytest.skip("DeepSpeed's CPUAdam is not compiled here: largetrain setup --ops cpu_adam")
    errors = parity_table[case] = measure(case)
    check(errors)


@pytest.mark.parametrize("native", [False, True], ids=["fp32_and_round", "torch_kernels"])
def test_both_ways_of_half_products_follow_the_reference(native: bool):
    """Which of the two a CPU takes depends on what it has in hardware; both are held on every machine."""
    check(measure(Case(2, "bf16", 3, 2, "SGD"), native))


def test_core_meets_every_pair_of_values():
    wanted = {frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    met = {
        frozenset([(a, getattr(case, a)), (b, getattr(case, b))])
        for case in matrix.core()
        for a, b in itertools.combinations(AXES, 2)
    }
    assert met == wanted
    assert len(matrix.core()) <= 16
