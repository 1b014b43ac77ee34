"""Which sample comes next: a pure function of seed, epoch and consumed samples.

A position p counts the samples consumed since the start of the run; p // samples is its epoch, and a keyed
permutation of that epoch maps p % samples to a sample id. Nothing is stored and nothing depends on the number
of ranks, so a run resumes anywhere at no cost and follows the same order on any world size. With repeated
augmentation, p // repeats takes the place of p.

The permutation is a generalised Feistel network over Z_rows x Z_columns (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002, section 5) with cycle walking for the few values outside the range.
"""

import hashlib
import math
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np

ROUNDS = 8
MAX_SAMPLES = 1 << 62
_FORMAT = "largetrain order 1"


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values; the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    stream = hashlib.shake_256(f"{_FORMAT}|{seed}|{epoch}".encode()).digest(8 * ROUNDS)
    return tuple(np.uint64(word) for word in np.frombuffer(stream, dtype="<u8"))


def permute(index: np.ndarray, samples: int, seed: int, epoch: int) -> np.ndarray:
    """Map indices to their place in the permutation of range(samples) that belongs to (seed, epoch).

    Args:
        index: int64 of any shape, each in [0, samples).
        samples: size of the range, 1 to 2**62.

    Returns:
        int64 of the same shape; over all indices a permutation of range(samples).
    """
    rows = np.uint64(math.isqrt(samples - 1) + 1)
    columns = np.uint64(-(-samples // int(rows)))
    keys = _round_keys(seed, epoch)

    def encrypt(values: np.ndarray) -> np.ndarray:
        row, column = values // columns, values % columns
        for round_index in range(0, ROUNDS, 2):
            row = (row + _mix(column + keys[round_index]) % rows) % rows
            column = (column + _mix(row + keys[round_index + 1]) % columns) % columns
        return row * columns + column

    result = encrypt(np.asarray(index).astype(np.uint64).ravel())
    outside = np.flatnonzero(result >= samples)
    while outside.size:  # rows * columns exceeds samples by less than rows, so hardly any value walks twice
        result[outside] = encrypt(result[outside])
        outside = outside[result[outside] >= samples]
    return result.astype(np.int64).reshape(np.shape(index))


class SampleOrder:
    """The order of the training samples, counted in samples of the global batch.

    A global batch that reaches the end of an epoch carries on into the next one, so every sample is used exactly
    once per epoch and no batch is short.

    Args:
        samples: samples of one epoch, 1 to 2**62.
        global_batch: samples per optimizer update, over all ranks.
        seed: any non-negative integer.
        shuffle: False keeps 0, 1, 2, ... in every epoch.
        repeats: repeated augmentation (Hoffer et al., "Augment Your Batch", CVPR 2020): each sample comes so many
            times in a row, and each copy has an epoch number of its own, so that it is augmented in another way. An
            epoch still counts `samples` positions: one shows samples / repeats different samples, and as many epochs
            as `repeats` show each sample that many times.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(self, samples: int, global_batch: int, seed: int, shuffle: bool = True, repeats: int = 1):
        if not 1 <= samples <= MAX_SAMPLES:
            raise ValueError(f"samples={samples} is not in 1..2**62")
        if global_batch < 1:
            raise ValueError(f"global_batch={global_batch} is not positive")
        if repeats < 1:
            raise ValueError(f"repeats={repeats} is not positive")
        self.samples, self.global_batch, self.seed, self.shuffle = samples, global_batch, seed, shuffle
        self.repeats = repeats

    def ids(self, consumed_samples: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample ids and epochs of positions consumed_samples ... consumed_samples + count - 1.

        Returns:
            ids int64 [count], each in [0, samples), and epochs int64 [count].
        """
        positions = np.arange(consumed_samples, consumed_samples + count, dtype=np.int64)
        return self.at(positions)

    def rank_ids(
        self, update: int, micro_step: int, micro_batch: int, data_parallel: int, rank: int, start: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and epochs, int64 [micro_batch], of one micro-batch of one data-parallel rank.

        Update u covers positions start + u * global_batch onwards; within it micro-steps come first, then ranks, so
        that the samples of an update are the same for every way of sharing them out.

        Args:
            update: updates since `start`.
            start: samples consumed before update 0 (a resumed run whose global batch changed).
        """
        offset = (micro_step * data_parallel + rank) * micro_batch
        return self.ids(start + update * self.global_batch + offset, micro_batch)

    def steps_for(self, epochs: float) -> int:
        """Return the whole updates in so many epochs; see `dropped_for` for what is left over."""
        return self._wanted(epochs) // self.global_batch

    def dropped_for(self, epochs: float) -> int:
        """Return the samples at the very end of `epochs` that do not fill a last update (< global_batch)."""
        return self._wanted(epochs) % self.global_batch

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample ids and epochs, int64 [n], of ascending positions, int64 [n].

        The pair (id, epoch) never comes twice. With repeats=1 the epoch is position // samples; with more it counts
        the copies: (passes over the samples before this one) * repeats + (copies before this one).
        """
        places, copies = np.divmod(positions, self.repeats)
        passes, index = np.divmod(places, self.samples)
        epochs = passes * self.repeats + copies
        if not self.shuffle or not positions.size:
            return index, epochs
        ids = np.empty_like(index)
        # positions ascend, so each pass is one run of the array
        bounds = [0, *(np.flatnonzero(np.diff(passes)) + 1).tolist(), len(passes)]
        for low, high in pairwise(bounds):
            ids[low:high] = permute(index[low:high], self.samples, self.seed, int(passes[low]))
        return ids, epochs

    def _wanted(self, epochs: float) -> int:
        # the decimal as written: 0.7 epochs of 10 samples are 7 samples, not 6.999...
        return math.floor(self.samples * Fraction(str(epochs)))
