"""A model as a list of named layers that can be built one by one, each with the same weights wherever it is built.

A pipeline stage builds only its own layers. Every layer draws its initial weights from a stream of its own, seeded by
one number of the whole model and the layer's place in it, so that the stages together are the whole model to the bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from largetrain.parallel.streams import stream


@dataclass(frozen=True)
class NamedLayer:
    """One layer of a model, not built yet."""

    name: str
    """Where the whole model has it, such as `blocks.0`: the prefix of its parameters' names."""
    build: Callable[..., nn.Module]
    """Makes it, in any order among the layers, without moving torch's current generator. Takes no argument, or, with
    `tied_to`, the weight of that layer."""
    tied_to: str | None = None
    """Name of the earlier layer whose `weight` this one uses. A stage that has not built that layer builds it as well,
    and gets the same weights."""


@contextmanager
def layer_stream(base_seed: int, index: int) -> Iterator[None]:
    """Within it, torch's current generators give the stream of layer `index`; afterwards they go on as if untouched."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    with stream(device, base_seed, index):
        yield
