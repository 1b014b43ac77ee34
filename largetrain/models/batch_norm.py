"""What a model's batch norms mean for training it on several ranks: counts, map sizes, risks; freezing them."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from largetrain.errors import ConfigError
from largetrain.parallel.norm_kinds import FrozenStatistics, is_batch_norm, is_frozen, is_live

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FEW_IMAGES = 16
"""With fewer images per statistic than this, batch statistics are noisy enough to cost accuracy (Wu and He 2018)."""


@dataclass(frozen=True)
class LayerCounts:
    """What decides how a model is trained; parameters are those that are trained, shared ones counted once."""

    live_batch_norms: int
    frozen_batch_norms: int
    parameters: int
    convolution_parameters: int

    @property
    def convolution_share(self) -> float:
        """Share of the parameters that is in convolutions; 0 for a model without parameters."""
        return self.convolution_parameters / self.parameters if self.parameters else 0.0

    @property
    def reason(self) -> str:
        """The counts in words: '20 live batch-norm layers, 99 % of 11,689,512 parameters in convolutions'."""
        frozen = f" ({self.frozen_batch_norms} frozen)" if self.frozen_batch_norms else ""
        return (
            f"{_layers(self.live_batch_norms, 'live batch-norm layer')}{frozen}, {_percent(self.convolution_share)} of "
            f"{self.parameters:,} parameters in convolutions"
        )


@dataclass(frozen=True)
class BatchNormSite:
    """A live batch norm and what one rank's images give it."""

    name: str
    channels: int
    map_size: tuple[int, ...]
    """Size of the map after the channels; empty for a vector per image."""
    values_per_image: float
    """Values per channel that one image gives: its pixels, more where the model cuts images into several parts."""


def count_layers(model: nn.Module) -> LayerCounts:
    """Count batch norms and trained parameters; also of a model on the meta device."""
    modules = list(model.modules())
    trained = {id(p): p for p in model.parameters() if p.requires_grad and not is_lazy(p)}
    own = [p for module in modules if isinstance(module, CONVOLUTIONS) for p in module.parameters()]
    convolutions = {id(p) for p in own} & trained.keys()
    return LayerCounts(
        live_batch_norms=sum(map(is_live, modules)),
        frozen_batch_norms=sum(map(is_frozen, modules)),
        parameters=sum(p.numel() for p in trained.values()),
        convolution_parameters=sum(trained[key].numel() for key in convolutions),
    )


def freeze_batch_norms(model: nn.Module) -> nn.Module:
    """Keep the statistics and weights of every batch norm as they are, whatever mode the model is put in.

    Each gets a class that stays in evaluation mode; hooks, `state_dict` and fused activations are untouched.

    Returns:
        The model, changed in place.

    Raises:
        ConfigError: a batch norm has no running statistics that it could use instead.
    """
    live = {name: module for name, module in model.named_modules() if is_live(module)}
    problems = [problem for name, module in live.items() if (problem := _no_statistics(name, module))]
    if problems:
        raise ConfigError(problems)
    for module in live.values():
        cls: Any = type(module)
        module.__class__ = _frozen(cls)
        module.training = False
        for name, parameter in module.named_parameters():
            if name.split(".")[0] in ("weight", "bias", "parametrizations"):  # not those of a fused activation
                parameter.requires_grad_(False)
    return model


def _no_statistics(name: str, module: nn.Module) -> str | None:
    """Why this batch norm cannot be frozen, with a way out; None if it can."""
    if isinstance(module, LazyModuleMixin):
        why = "has no size yet"
    elif module.running_mean is None:
        why = "keeps no running statistics (track_running_stats is False)"
    else:
        return None
    return (
        f"model.freeze_batch_norm: the batch norm {name!r} {why}, so there is nothing to freeze; build the model with "
        "sizes and statistics, or leave the key out."
    )


def set_momentum(model: nn.Module, momentum: float) -> None:
    """Set the share of each batch in the running statistics of every batch norm.

    Raises:
        ConfigError: the model has no batch norm.
    """
    norms = [module for module in model.modules() if is_batch_norm(module)]
    if not norms:
        raise ConfigError("model.batch_norm_momentum: the model has no batch norm; remove it.")
    for module in norms:
        module.momentum = momentum  # type: ignore[assignment]


@cache
def _frozen(cls: Any) -> Any:
    """The class of frozen modules of a class."""
    return type(f"Frozen{cls.__name__}", (FrozenStatistics, cls), {"__doc__": f"{cls.__name__}, kept as it is."})


def batch_norm_sites(model: nn.Module, images_shape: Sequence[int]) -> list[BatchNormSite] | None:
    """What every live batch norm of the model sees, by one forward pass on the meta device of a copy.

    The pass computes nothing and touches neither the weights nor the statistics of `model`.

    Args:
        model: on any device.
        images_shape: [N, channels, height, width] of what the model is called with; N does not matter.

    Returns:
        The sites in the order in which they are used; one that is used several times with its smallest map. None if
        the model cannot run on the meta device.
    """
    seen: dict[str, BatchNormSite] = {}
    images = torch.empty(2, *images_shape[1:], device="meta")  # of one image, torch refuses 1x1 maps

    def watch(name: str):
        def note(module: nn.Module, args: tuple) -> None:
            x = args[0]
            site = BatchNormSite(name, x.size(1), tuple(x.shape[2:]), x.numel() / x.size(1) / images.size(0))
            if name not in seen or site.values_per_image < seen[name].values_per_image:
                seen[name] = site

        return note

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            shadow = _on_meta(model).train()
            for name, module in shadow.named_modules():
                if is_live(module):
                    module.register_forward_pre_hook(watch(name))
            shadow(images)
    except Exception:  # noqa: BLE001 (any code of a user's model may need real values)
        return None
    return list(seen.values())


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device; the values are never copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


def wants_sync(
    sites: Sequence[BatchNormSite] | None, micro_batch: int, world_size: int, dense: bool
) -> tuple[bool, str]:
    """What `sync_batch_norm: auto` means, and why, in words.

    Args:
        sites: of the model; None if they are not known.
        micro_batch: images per rank and forward pass.
        world_size: ranks.
        dense: the model predicts something for every pixel.
    """
    if sites is not None and not sites:
        return False, "no trained batch norm"
    if world_size == 1:
        return False, "one rank"
    if dense:
        return True, "dense prediction"
    if micro_batch < FEW_IMAGES:
        return True, f"{_images(micro_batch)} per rank, fewer than {FEW_IMAGES}"
    point = next((site for site in sites or () if site.values_per_image == 1), None)
    if point:
        return True, f"{point.name} sees one value per image and channel"
    return False, f"{_images(micro_batch)} per rank, at least {FEW_IMAGES}"


def batch_norm_report(
    sites: Sequence[BatchNormSite] | None,
    ranks_sharing: int,
    micro_batch: int,
    accumulation: int,
    synchronised: bool,
    world_size: int | None = None,
) -> list[str]:
    """Lines for the start of a run: layers, values behind each statistic, risks.

    Args:
        sites: of the model; None if they are not known.
        ranks_sharing: ranks that share statistics if they are synchronised.
        micro_batch: images per rank and forward pass.
        accumulation: micro-batches per update.
        synchronised: statistics are those of `ranks_sharing` ranks together.
        world_size: ranks of the run; absent: ranks_sharing.
    """
    world_size = world_size or ranks_sharing
    sharing = ranks_sharing if synchronised else 1
    images = micro_batch * sharing
    if sites is not None and not sites:
        return []
    over = f"synchronised over {sharing} ranks" if sharing > 1 else "of each rank alone"
    lines = [f"batch norm: {_sizes(sites, images)}; statistics {over}, {_images(images)} each"]
    lines += _risks(sites or [], images, micro_batch * world_size * accumulation, accumulation)
    if sharing < world_size:
        apart = f"{world_size} ranks" if sharing == 1 else f"{world_size // sharing} groups of ranks"
        way_out = "sync_batch_norm: on keeps" if sharing == 1 else "sync_batch_norm_ranks: all keeps"
        lines.append(
            f"batch norm: the running statistics of {apart} drift apart; they are averaged before each evaluation and "
            f"checkpoint. {way_out} them equal"
        )
    return lines


def _sizes(sites: Sequence[BatchNormSite] | None, images: int) -> str:
    if sites is None:
        return "map sizes unknown (the model does not run on the meta device)"
    small = min(sites, key=lambda site: site.values_per_image)
    large = max(sites, key=lambda site: site.values_per_image)
    fewest, most = _values(small, images), _values(large, images)
    range_ = f"{fewest:,}" if fewest == most else f"{fewest:,} ({small.name}) to {most:,} ({large.name})"
    return f"{_layers(len(sites), 'trained layer')}, {range_} values per channel"


def _risks(sites: Sequence[BatchNormSite], images: int, global_batch: int, accumulation: int) -> list[str]:
    """One line for each thing that may go wrong."""
    lines = []
    single = [site.name for site in sites if _values(site, images) < 2]
    if single:
        lines.append(
            f"batch norm: {_names(single)} would get one value per channel, which torch refuses in training; use a "
            "larger micro-batch, larger images, sync_batch_norm: on with several ranks, or model.freeze_batch_norm"
        )
    if images < FEW_IMAGES:
        lines.append(
            f"batch norm: {_images(images)} behind each statistic, fewer than {FEW_IMAGES}: expect lower accuracy"
        )
    if accumulation > 1:
        lines.append(
            f"batch norm: with {accumulation} micro-batches per update, statistics are of {_images(images)}, not of "
            f"the global batch of {global_batch}"
        )
    return lines


def _values(site: BatchNormSite, images: int) -> int:
    return math.floor(site.values_per_image * images)


def _names(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _layers(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _images(count: int) -> str:
    return f"{count} image{'' if count == 1 else 's'}"


def _percent(share: float) -> str:
    """Whole per cent, rounded down: 100 means all, 50 at least half."""
    return f"{math.floor(share * 100)} %"
