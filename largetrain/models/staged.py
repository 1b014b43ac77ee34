"""Any model as a list of layers that a pipeline can cut, with the names that the whole model gives their tensors."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from largetrain.config.decoder_spec import DecoderSpec
from largetrain.errors import ConfigError
from largetrain.models.decoder import decoder_layers
from largetrain.models.stages import NamedLayer
from largetrain.parallel.axes import Axes
from largetrain.parallel.streams import draw_seed

KEY = "parallel.pipeline_stages"


@dataclass(frozen=True)
class StagedModel:
    """Layers to be called one after the other; each gets what the one before it gave."""

    layers: Sequence[NamedLayer]
    last_takes_labels: bool
    """The last layer gives the loss, or may: it is called with the labels too, once a micro-batch has come so far."""
    whole_layers: Sequence[NamedLayer] | None = None
    """The same layers undivided by tensor parallelism, to look at; None: they are undivided."""
    names: dict[int, str] = field(default_factory=dict)
    """id of a parameter or buffer -> its name in the whole model; empty: names follow from those of the layers."""

    def name(self, layer: NamedLayer, local: str, tensor: Tensor) -> str:
        """Of a layer's tensor, as the whole model has it.

        Args:
            local: its name within the layer.
        """
        if self.names:
            return self.names[id(tensor)]
        if layer.tied_to is not None and local == "weight":
            return f"{layer.tied_to}.weight"
        return f"{layer.name}.{local}"


def staged_decoder(spec: DecoderSpec, axes: Axes) -> StagedModel:
    """The built-in decoder, of which a stage builds its own layers only.

    Draws one number from torch's current generator, as `Decoder` does, so the weights are the same.
    """
    seed = draw_seed()
    whole = decoder_layers(spec, Axes(), seed) if axes.tensor.size > 1 else None
    return StagedModel(decoder_layers(spec, axes, seed), True, whole)


def staged_model(model: nn.Module, layers: Sequence[nn.Module] | None = None) -> StagedModel:
    """A model that exists already, whole on every rank, and lists its layers.

    Args:
        layers: in the order of calls; None: what the model's own `layers()` gives.

    Raises:
        ConfigError: it has no such list, or parameters that are in none of the layers.
    """
    if layers is None:
        layers = _listed(model)
    names = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    covered = {id(tensor) for layer in layers for tensor in [*layer.parameters(), *layer.buffers()]}
    if missing := [name for key, name in names.items() if key not in covered]:
        raise ConfigError(f"{KEY}: layers() of the model leaves out {_few(missing)}; every parameter has to be in one.")
    if covered - names.keys():
        raise ConfigError(f"{KEY}: layers() gives layers with parameters that the model does not have; register them.")
    _check_shared(layers, names)
    by_module = {id(module): name for name, module in model.named_modules()}
    named = [
        NamedLayer(by_module.get(id(layer)) or f"{type(layer).__name__}-{index}", _built(layer))
        for index, layer in enumerate(layers)
    ]
    return StagedModel(named, _takes_labels(layers[-1]), names=names)


def _listed(model: nn.Module) -> list[nn.Module]:
    listing = getattr(model, "layers", None)
    if not callable(listing) or isinstance(listing, nn.Module):
        raise ConfigError(
            f"{KEY}: {type(model).__name__} does not say how it can be cut; give it a method layers() that lists its "
            f"modules in the order of calls, each taking what the one before it gives, or write 1."
        )
    layers = list(listing())
    if len(layers) < 2 or not all(isinstance(layer, nn.Module) for layer in layers):
        raise ConfigError(f"{KEY}: layers() of {type(model).__name__} must give two or more modules.")
    return layers


def _check_shared(layers: Sequence[nn.Module], names: dict[int, str]) -> None:
    """Refuse a parameter in several layers: stages would train copies of it apart from one another."""
    owner: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for tensor in layer.parameters():
            if owner.setdefault(id(tensor), index) != index:
                raise ConfigError(
                    f"{KEY}: {names[id(tensor)]} is in several of the layers, which would train copies of it; untie "
                    f"it, or write 1."
                )


def _takes_labels(layer: nn.Module) -> bool:
    """Whether the last layer wants the labels beside the hidden states."""
    try:
        inspect.signature(layer.forward).bind(None, None)
    except TypeError:
        return False
    return True


def _built(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: layer


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
