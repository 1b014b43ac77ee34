"""What files of weights by other programs have in common: wrappers around the tensors, prefixes before their names."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from largetrain.errors import ConfigError

# Names under which training programs keep the weights within a file.
WRAPPERS = ("model", "state_dict", "module", "model_state_dict")
# Put before every name by DDP, torch.compile and weight averaging.
PREFIXES = ("module.", "_orig_mod.")
# A count that weight averaging keeps beside the weights.
COUNTER = "n_averaged"


def tensors_of(held: Any, where: str, key: str) -> Mapping[Any, Tensor]:
    """The table of tensors within what a file of torch.save holds, as it lies there.

    Args:
        where: the file, for messages.
        key: where the file was named.

    Raises:
        ConfigError: it holds anything else.
    """
    while isinstance(held, Mapping):
        inner = next((held[name] for name in WRAPPERS if isinstance(held.get(name), Mapping)), None)
        if inner is None:
            break
        held = inner
    if not isinstance(held, Mapping) or not held:
        kind = "is empty" if isinstance(held, Mapping) else f"holds a {type(held).__name__}"
        raise ConfigError(f"{key}: {where} {kind}, not parameters by name; save model.state_dict().")
    if others := [str(name) for name, value in held.items() if not isinstance(value, Tensor)]:
        raise ConfigError(
            f"{key}: {where} holds more than tensors: {some(others)}; save model.state_dict(), alone or as one of: "
            f"{', '.join(WRAPPERS)}."
        )
    return held


def prefix_of(names: Sequence[str]) -> str | None:
    """What a wrapper has put before every one of these names; may be there several times."""
    return next((prefix for prefix in PREFIXES if names and all(name.startswith(prefix) for name in names)), None)


def some(names: Sequence[str], count: int = 3) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
