"""Which rank does what: pure arithmetic on four axes.

Tensor-parallel ranks are neighbours, since they talk most; then come the ranks that share a sequence, then data, and
pipeline stages lie farthest apart: the order of DeepSpeed's `PipeModelDataParallelTopology` (pipe, data, model).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank."""

    stage: int
    """Pipeline stage."""
    data: int
    """Data-parallel rank: which share of the global batch."""
    sequence: int
    """Which part of each sequence (Ulysses)."""
    tensor: int
    """Which part of each matrix."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product with `data` is the number of ranks.

    Args:
        sequence_parallel: norms and dropout between tensor-parallel layers are divided over the tensor ranks.
    """

    world_size: int
    tensor: int = 1
    stages: int = 1
    sequence: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        assert self.world_size % self.ranks_per_replica == 0, self

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor * self.stages * self.sequence

    @property
    def data(self) -> int:
        """Data-parallel degree: shares that the global batch is divided into."""
        return self.world_size // self.ranks_per_replica

    def place(self, rank: int) -> Place:
        """Coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        stage, data = divmod(rest, self.data)
        return Place(stage, data, sequence, tensor)

    def rank(self, place: Place) -> int:
        """The rank at these coordinates."""
        return ((place.stage * self.data + place.data) * self.sequence + place.sequence) * self.tensor + place.tensor

    def groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ along `axes` (names of `Place`) only: one list per group, in order of ranks."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = vars(self.place(rank))
            found.setdefault(tuple(place[axis] for axis in place if axis not in axes), []).append(rank)
        return list(found.values())

    def describe(self) -> str:
        """Such as "pipeline 2 x data 2 x tensor 2"; axes of one rank are left out, but for data."""
        degrees = {"pipeline": self.stages, "data": self.data, "sequence": self.sequence, "tensor": self.tensor}
        return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name == "data")
