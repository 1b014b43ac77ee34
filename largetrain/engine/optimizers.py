"""Optimizers: what cannot work is refused, Adam compiles nothing, and fp32 stage 0 skips bad updates."""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.config.engine_schema import optimizer_name
from largetrain.errors import ConfigError
from largetrain.parallel.axes import Axes, Axis
from largetrain.parallel.shards import shard_of

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them."""

# torch's fused kernels take these; anything else (bias_correction: false, ...) is DeepSpeed's own optimizer's business
ADAM_KEYS = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})
# DeepSpeed's switches that make no difference to this choice
ADAM_SWITCHES = frozenset({"adam_w_mode", "torch_adam", "fp32_optimizer_states"})


# torch's own update without the decorator that imports its compiler (2.5 s) at the first step
_ADAM_UPDATE = inspect.unwrap(torch.optim.Adam.step)


class FusedAdam(torch.optim.Adam):
    """torch.optim.Adam whose first step does not import torch's compiler."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        _ADAM_UPDATE(self)


class FusedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW whose first step does not import torch's compiler."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        _ADAM_UPDATE(self)


def check_optimizer(engine_config: dict[str, Any], device_type: str) -> list[str]:
    """Refuse an optimizer that DeepSpeed 0.19 would stop at with a traceback; give notes on the others.

    Args:
        device_type: of torch.device, "cpu" or "cuda".

    Raises:
        ConfigError: the reason and the way out.
    """
    name, zero = str(engine_config["optimizer"]["type"]), engine_config.get("zero_optimization", {})
    kind, stage, place = name.lower(), int(zero.get("stage", 0)), "optimizer.type"
    if kind == "lamb" and device_type == "cpu":
        raise ConfigError(f"{place}: DeepSpeed has no {name} for CPUs; write AdamW, or run it on a GPU.")
    if kind == "lion" and device_type == "cpu" and not _offloads_optimizer(engine_config):
        raise ConfigError(
            f"{place}: DeepSpeed has {name} for CPUs only with zero_optimization.offload_optimizer: "
            f'{{"device": "cpu"}}, at stages 1-3; add that, or write AdamW.'
        )
    if kind in ("muadam", "muadamw", "musgd") and importlib.util.find_spec("mup") is None:
        raise ConfigError(f"{place}: {name} is in the package mup, which is not installed; pip install mup.")
    if kind == "sparseadam":
        raise ConfigError(f"{place}: {name} takes sparse gradients, which no model here makes; write Adam.")
    if kind == "muon" and stage == 3 and zero.get("reduce_scatter", True):
        raise ConfigError("zero_optimization.reduce_scatter: Muon at stage 3 needs whole gradients; write false.")
    if kind == "adafactor" and stage >= 1:
        return [f"{name} sees flat partitions of the weights at stage {stage}: its second moment is not factored"]
    if kind == "muon" and stage >= 1:
        return [f"at stage {stage} grad_norm and gradient_clipping concern Muon's update, no longer the gradient"]
    return []


def _offloads_optimizer(engine_config: dict[str, Any]) -> bool:
    offload = engine_config.get("zero_optimization", {}).get("offload_optimizer", {})
    return isinstance(offload, dict) and offload.get("device", "none") != "none"


def torch_adam(
    engine_config: dict[str, Any], parameters: Sequence[nn.Parameter] | Groups
) -> torch.optim.Optimizer | None:
    """torch's fused Adam or AdamW for the JSON's optimizer section, or None when DeepSpeed's own is needed.

    DeepSpeed's FusedAdam compiles an op to run the same update: 90 s on a CPU, and on a GPU it needs a CUDA toolkit,
    which a torch from pip does not bring. With optimizer offload its CPUAdam is the point, so that is left alone.
    For Muon, which brings an Adam of its own for what is no matrix, `engine_config` is changed to say so.
    """
    section = engine_config["optimizer"]
    name, params = str(section["type"]).lower(), dict(section.get("params", {}))
    if name == "muon" and not _offloads_optimizer(engine_config):
        section["params"] = {"torch_adam": True, **params}  # else it compiles FusedAdam for norms and embeddings
    arguments = {key: value for key, value in params.items() if key not in ADAM_SWITCHES}
    if arguments.get("bias_correction") is True:  # the default
        del arguments["bias_correction"]
    if name not in ("adam", "adamw") or _offloads_optimizer(engine_config) or not ADAM_KEYS.issuperset(arguments):
        return None
    decoupled = name == "adamw" or params.get("adam_w_mode", True)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    kind = FusedAdamW if decoupled else FusedAdam
    # DeepSpeed's default: no weight decay unless the JSON gives it, where torch's AdamW has 0.01
    arguments.setdefault("weight_decay", 0.0)
    return kind(parameters, fused=True, **arguments)


def optimizer_by_name(section: dict[str, Any], groups: Groups, device_type: str) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed would make of the JSON's `optimizer` section, without its engine.

    Raises:
        ConfigError: see `check_optimizer`.
    """
    config = {"optimizer": {**section, "params": dict(section.get("params", {}))}}
    if optimizer_name(str(section["type"])) == "Lion" and device_type == "cpu":  # offload is nothing to advise here
        raise ConfigError("optimizer.type: backend ddp has Lion on GPUs only; write AdamW or SGD.")
    check_optimizer(config, device_type)
    adam = torch_adam(config, groups)
    if adam is not None:
        return adam
    name = optimizer_name(str(section["type"]))
    if name in ("Adam", "AdamW"):  # keys beyond torch's fused kernel are those of DeepSpeed's
        raise ConfigError(
            f"optimizer.params: backend ddp runs {name} as torch's, which takes {', '.join(sorted(ADAM_KEYS))} only; "
            f"remove the others."
        )
    if name in ("Lamb", "Lion"):
        from deepspeed.ops import lamb, lion

        return (lamb.FusedLamb if name == "Lamb" else lion.FusedLion)(groups, **config["optimizer"]["params"])
    params = config["optimizer"]["params"]
    if name == "SGD" and not params.keys() & {"foreach", "fused", "differentiable"}:
        params["fused"] = True  # one pass over weights and momentum: half the time of torch's loop on a CPU
    made: torch.optim.Optimizer = getattr(torch.optim, str(name))(groups, **params)
    return made


def skip_infinite_updates(
    optimizer: Any, parameters: Sequence[nn.Parameter], clip: float, axes: Axes | None = None
) -> None:
    """Make a plain torch optimizer skip updates with non-finite gradients, and clip by global norm.

    At fp32 stage 0 DeepSpeed calls the optimizer whatever the gradients hold, and weights go NaN. Its engine
    reads `overflow` and `_global_grad_norm` from the optimizer, so these two carry the decision: an update is
    then counted as skipped and the schedule stays. Gradients are already averaged over ranks, so all agree.

    Args:
        clip: largest global L2 norm; 0 leaves gradients alone. The coefficient is clip / (norm + 1e-6), as in
            torch.nn.utils.clip_grad_norm_ and DeepSpeed.
        axes: the groups of ranks that hold one model together, whose parts are one norm and one decision; None: each
            rank holds all of it.
    """
    update: Callable[[], Any] = optimizer.step
    counted = [p for p in parameters if axes is None or _counts(p, axes)]

    def step(closure: None = None) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None])
        if axes is not None and axes.model.size > 1:
            norm = _norm_of_parts(norm.to(parameters[0].device), axes.model)
        optimizer._global_grad_norm = norm
        optimizer.overflow = not bool(torch.isfinite(norm))
        if optimizer.overflow:
            return
        if clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        update()

    optimizer.step = step


def sum_norm_once(optimizer: Any, axes: Axes) -> None:
    """Make ZeRO-1 add up the gradient norm over the ranks that hold one model in a single sum.

    DeepSpeed adds it up for each parameter group, and waits for ever where pipeline stages have different numbers of
    them: a tied table, norms or a prefix of `parameters.lr_factors` may be on some stages only.
    """
    norm_of_groups: Callable[[], Tensor] = optimizer.scaled_global_norm

    def scaled_global_norm() -> Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        norm = norm_of_groups()
        del optimizer._model_parallel_all_reduce  # the class has the real one, which overflows need
        return _norm_of_parts(norm, axes.model) if axes.model.size > 1 else norm

    optimizer.scaled_global_norm = scaled_global_norm


def _counts(parameter: nn.Parameter, axes: Axes) -> bool:
    """Whether this rank counts it in the norm: its own parts, and what several ranks hold alike on the first alone."""
    if getattr(parameter, "ds_pipe_replicated", False):  # DeepSpeed's mark of a tied copy that another stage counts
        return False
    return shard_of(parameter) is not None or axes.tensor.rank == 0


def _norm_of_parts(norm: Tensor, axis: Axis) -> Tensor:
    """L2 norm of what all ranks of the axis have together; not finite on all of them if it is on one."""
    total = norm.double().square()
    dist.all_reduce(total, group=axis.group)
    return total.sqrt().to(norm.dtype)
