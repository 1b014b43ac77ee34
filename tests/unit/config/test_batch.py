"""The batch triple: derived when it divides, refused with all numbers when it does not."""

import pytest

from largetrain.config.batch import ACCUMULATION, MICRO, TOTAL, Batch, resolve_batch
from largetrain.config.document import Document
from largetrain.config.layout import Layout


def resolve(ranks: int, **triple):
    return resolve_batch(Document("f", triple), Layout(ranks), f"WORLD_SIZE={ranks}")


@pytest.mark.parametrize(
    ("ranks", "total", "micro", "accumulation", "expected"),
    [
        (2, 8, 2, 2, (2, 2, 8)),
        (2, 8, 2, None, (2, 2, 8)),
        (2, 8, None, 2, (2, 2, 8)),
        (2, None, 2, 2, (2, 2, 8)),
        (3, None, 2, 2, (2, 2, 12)),
        (4, 8, None, None, (2, 1, 8)),
        (4, None, 3, None, (3, 1, 12)),
        (4, None, None, 5, (1, 5, 20)),
        (3, None, None, None, (1, 1, 3)),
        (2, "auto", 4, "auto", (4, 1, 8)),
        (2, 16, "auto", "auto", (8, 1, 16)),
    ],
)
def test_what_is_missing_is_derived(ranks, total, micro, accumulation, expected):
    given = {TOTAL: total, MICRO: micro, ACCUMULATION: accumulation}
    batch, problems, notes = resolve(ranks, **{key: value for key, value in given.items() if value is not None})
    assert problems == []
    assert batch == Batch(ranks, ranks, *expected)
    derived = [key for key, value in given.items() if value in (None, "auto")]
    assert all(any(note.startswith(f"{key} = ") for note in notes) for key in derived)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            3,
            "8 is not 2 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps) x 3 ranks "
            "(WORLD_SIZE=3) = 12. "
            "Write train_batch_size: 12, or start 2 ranks; or leave one of the three out, it is derived.",
        ),
        (
            4,
            "8 is not 2 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps) x 4 ranks "
            "(WORLD_SIZE=4) = 16. "
            "Write train_batch_size: 16 or gradient_accumulation_steps: 1 or train_micro_batch_size_per_gpu: 1, "
            "or start 2 ranks; or leave one of the three out, it is derived.",
        ),
    ],
)
def test_a_mismatch_shows_all_numbers_and_what_would_fit(ranks, said):
    batch, problems, _ = resolve(ranks, **{TOTAL: 8, MICRO: 2, ACCUMULATION: 2})
    assert batch is None
    assert problems == [f"f: train_batch_size: {said}"]


@pytest.mark.parametrize(
    ("triple", "said"),
    [
        (
            {TOTAL: 10, MICRO: 4},
            "10 cannot be divided by 4 (train_micro_batch_size_per_gpu) x 3 ranks (WORLD_SIZE=3) = 12, so "
            "gradient_accumulation_steps cannot be derived. Nearest train_batch_size: 12.",
        ),
        (
            {TOTAL: 32, MICRO: 4},
            "32 cannot be divided by 4 (train_micro_batch_size_per_gpu) x 3 ranks (WORLD_SIZE=3) = 12, so "
            "gradient_accumulation_steps cannot be derived. Nearest train_batch_size: 24 or 36, or start 8 ranks.",
        ),
        (
            {TOTAL: 8},
            "8 cannot be divided by 1 (gradient_accumulation_steps) x 3 ranks (WORLD_SIZE=3) = 3, so "
            "train_micro_batch_size_per_gpu cannot be derived. Nearest train_batch_size: 6 or 9, or start 8 ranks.",
        ),
    ],
)
def test_what_does_not_divide_is_refused(triple, said):
    batch, problems, _ = resolve(3, **triple)
    assert batch is None
    assert problems == [f"f: train_batch_size: {said}"]
