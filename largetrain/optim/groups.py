"""Parameter groups: which parameters get another weight decay or another learning rate."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from largetrain.config.prefixes import fits, longest_fit, no_fit
from largetrain.config.schema import ParametersConfig
from largetrain.errors import ConfigError

# BatchNorm2d, RMSNorm, LayerNorm2d, GroupNormAct, ...; but not NormalizedLinear, and not WeightNormConv, whose own
# parameters are weights
_NORM = re.compile(r"(?<!Weight)(?<!Spectral)Norm(?![a-z])")


def parameter_groups(
    model: nn.Module,
    config: ParametersConfig,
    names: Mapping[nn.Parameter, str] | None = None,
    all_names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Sort the trainable parameters into groups for a torch optimizer.

    Parameters whose factor is 0 are frozen (`requires_grad` is taken away). Every other trainable parameter stands in
    exactly one group, a shared one once. Groups, and the parameters within each, are in the model's order; no shape is
    read, so it works on a model that ZeRO-3 has already sharded.

    Args:
        model: all of it, or the layers of one pipeline stage.
        names: of its parameters, where the whole model has other ones than this part.
        all_names: of the whole model, where this is a part of it; a prefix may fit another part alone.

    Returns:
        dicts with "params", "lr_factor" (on the optimizer's rate) and, where `config` gives one, "weight_decay".

    Raises:
        ConfigError: a prefix fits no parameter, or nothing is left to train.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(names[parameter] if names is not None else name)
    _check_prefixes(config, all_names or [name for these in names_of.values() for name in these])
    norms = _norm_parameters(model)
    groups: dict[tuple[float, float | None], list[nn.Parameter]] = {}
    for parameter, own_names in names_of.items():
        prefix = longest_fit(config.lr_factors, own_names)
        factor = 1.0 if prefix is None else config.lr_factors[prefix]
        if factor == 0.0:
            parameter.requires_grad_(False)
        if not parameter.requires_grad:
            continue
        decay = None
        if parameter in norms:
            decay = config.norm_weight_decay
        elif any(name.endswith("bias") for name in own_names):
            decay = config.bias_weight_decay
        groups.setdefault((factor, decay), []).append(parameter)
    if not groups:
        frozen_by = "parameters.lr_factors and model.freeze" if config.lr_factors else "model.freeze"
        raise ConfigError(f"{frozen_by}: every parameter is frozen; leave some to train.")
    return [
        {"params": parameters, "lr_factor": factor, **({} if decay is None else {"weight_decay": decay})}
        for (factor, decay), parameters in groups.items()
    ]


def groups_report(groups: list[dict[str, Any]]) -> list[str]:
    """One line for each group, for a person; empty when there is a single one with nothing of its own."""
    if len(groups) == 1 and groups[0]["lr_factor"] == 1.0 and "weight_decay" not in groups[0]:
        return []
    return [
        f"{len(group['params'])} parameter tensors: learning rate x {group['lr_factor']:g}, "
        + (f"weight decay {group['weight_decay']:g}" if "weight_decay" in group else "the optimizer's weight decay")
        for group in groups
    ]


def _norm_parameters(model: nn.Module) -> set[nn.Parameter]:
    """What normalisation layers own directly: known by class name, so that users' own and wrapped ones count too."""
    found: set[nn.Parameter] = set()
    for module in model.modules():
        if any(_NORM.search(kind.__name__) for kind in type(module).__mro__):
            found.update(module.parameters(recurse=False))
    return found


def _check_prefixes(config: ParametersConfig, names: Sequence[str]) -> None:
    problems = [
        f"parameters.lr_factors.{prefix}: {no_fit(prefix, names)}"
        for prefix in config.lr_factors
        if not any(fits(prefix, name) for name in names)
    ]
    if problems:
        raise ConfigError(problems)
