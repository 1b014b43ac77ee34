"""Pretrained weights of vision models: from a file, or those that torchvision publishes.

Files are only read with torch's restricted loader, which runs no code from them.
"""

import difflib
import os
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn
from torch.hub import get_dir, load_state_dict_from_url

from largetrain.errors import ConfigError
from largetrain.models.state_dicts import COUNTER, prefix_of, some, tensors_of

State = dict[str, Tensor]
FILE_ENDINGS = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".safetensors")
# Heads that are used in training alone: a file may lack them, a model may be built without them.
AUXILIARY = ("aux_classifier.", "aux1.", "aux2.", "AuxLogits.")
CLASSIFIERS = ("fc.", "classifier.", "head.", "heads.", *AUXILIARY)
# DenseNet's files come from a torch that allowed dots in layer names.
_OLD_DENSE_NAME = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")


def load_pretrained(model: nn.Module, source: str | bool, enum: Any, key: str, num_classes: int) -> list[str]:
    """Load weights into `model`, all of it but a head for another number of classes.

    Args:
        model: the freshly built model.
        source: a file, true, or a name of torchvision's weights.
        enum: torchvision's weights of this model (a WeightsEnum class), None for a model of the user's own.
        key: where `source` was written, for messages ("model.pretrained").
        num_classes: outputs of the model.

    Returns:
        lines that say what was loaded and what was left as initialised.

    Raises:
        ConfigError: there are no such weights, or they do not fit.
    """
    state, where = _read(source, enum, key)
    return _load(model, state, where, key, num_classes)


def load_backbone(backbone: nn.Module, source: str | bool, enum: Any, key: str) -> list[str]:
    """As `load_pretrained`, with the weights of a classification model, whose classifier is left out."""
    state, where = _read(source, enum, key)
    metadata = getattr(state, "_metadata", None)
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(CLASSIFIERS)}
    if kept and all(name.startswith("features.") for name in kept):
        kept = {name.removeprefix("features."): tensor for name, tensor in kept.items()}
        metadata = None  # is by module name, which have changed
    return _load(backbone, _with_metadata(kept, metadata), where, key)


def is_file_name(source: str) -> bool:
    """Whether `source` means a file rather than a name of torchvision's weights."""
    return source.endswith(FILE_ENDINGS) or os.sep in source or os.path.isfile(source)


def _load(model: nn.Module, state: State, where: str, key: str, num_classes: int | None = None) -> list[str]:
    own = model.state_dict()
    reshaped = {name for name, tensor in state.items() if name in own and own[name].shape != tensor.shape}
    heads = _heads(own, state, reshaped, num_classes)
    unused = [name for name in state if name.startswith(AUXILIARY) and name.split(".")[0] not in _children(model)]
    problems = [
        f"{name} is {list(state[name].shape)} there and {list(own[name].shape)} here"
        for name in state
        if name in reshaped - heads
    ]
    if problems:
        raise ConfigError(
            f"{key}: {where} does not fit the model: {some(problems)}. Take the weights of this very model, and the "
            f"data.image_size that they are for."
        )
    left_out = heads.union(unused)
    fitting = {name: tensor for name, tensor in state.items() if name not in left_out}
    # the model's own hooks may rename what older versions of its layers wrote, so only loading shows what is missing
    result = model.load_state_dict(_with_metadata(fitting, getattr(state, "_metadata", None)), strict=False)
    absent = [name for name in result.missing_keys if name not in heads]
    absent_aux = [name for name in absent if name.startswith(AUXILIARY)]
    missing = [name for name in absent if name not in absent_aux]
    loaded = len(fitting) - len(result.unexpected_keys)
    if not loaded:
        raise ConfigError(
            f"{key}: {where}: none of its {len(state)} names is one of the model's; it has {some(list(state))}, the "
            f"model {some(list(own))}."
        )
    lacks = [f"lacks {some(missing)}"] if missing else []
    has = [f"holds {some(result.unexpected_keys)}, which the model has not"] if result.unexpected_keys else []
    if lacks or has:
        raise ConfigError(f"{key}: {where} {' and '.join(lacks + has)}. Take the weights of this very model.")
    lines = [f"loaded {loaded} tensors from {where}"]
    fresh = [name for name in own if name in heads or name in absent_aux]
    if fresh:
        lines.append(f"left as initialised, for another number of classes or not in the file: {', '.join(fresh)}")
    if unused:
        lines.append(f"not used, since the model is built without it: {some(unused)}")
    return lines


def _heads(own: Mapping[str, Tensor], state: State, reshaped: set[str], num_classes: int | None) -> set[str]:
    """Of `reshaped` the tensors that differ in the number of classes alone: the same other number in all of them."""
    found = {
        name: state[name].shape[0]
        for name in reshaped
        if own[name].dim() and own[name].shape[0] == num_classes and own[name].shape[1:] == state[name].shape[1:]
    }
    return set(found) if len(set(found.values())) == 1 else set()


def _children(model: nn.Module) -> set[str]:
    return {name for name, child in model.named_children() if child is not None}


def _read(source: str | bool, enum: Any, key: str) -> tuple[State, str]:
    """The weights by name, and words for where they are from."""
    if isinstance(source, str) and is_file_name(source):
        return _plain_state(_read_file(source, key), source, key), source
    if enum is None:
        raise ConfigError(f"{key}: a model of your own has no published weights; give the path of a file.")
    weights = enum.DEFAULT if source is True else _by_name(str(source), enum, key)
    return _plain_state(_published(weights.url, key), weights.url, key), f"torchvision's {weights}"


def _by_name(name: str, enum: Any, key: str) -> Any:
    members = enum.__members__
    short = name.rpartition(".")[2]
    if short in members and name in (short, f"{enum.__name__}.{short}"):
        return members[short]
    near = difflib.get_close_matches(short.upper(), members, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(members)}."
    raise ConfigError(f"{key}: {name!r} is neither a file nor a name of this model's weights; {hint}")


def _published(url: str, key: str) -> Any:
    name, folder = os.path.basename(url), os.path.join(get_dir(), "checkpoints")
    path = os.path.join(folder, name)
    fetch = partial(
        load_state_dict_from_url, url, map_location="cpu", progress=False, check_hash=True, weights_only=True
    )
    if os.path.exists(path):
        return _guarded(fetch, path, key)
    try:
        return fetch()
    except (URLError, OSError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"{key}: {name} is not in {folder}, and {url} cannot be fetched ({reason}); put that file there, or give "
            f"the path where it lies."
        ) from error
    except RuntimeError as error:  # another hash than the one in the file's name
        raise ConfigError(f"{key}: {url} gave a damaged file ({error}); try again.") from error


def _read_file(path: str, key: str) -> Any:
    if not os.path.isfile(path):
        raise ConfigError(f"{key}: there is no file {path}.")
    if not path.endswith(".safetensors"):
        return _guarded(lambda: torch.load(path, map_location="cpu", weights_only=True), path, key)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ConfigError(f"{key}: {path} needs the package safetensors: pip install safetensors.") from error
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}.") from error


def _guarded(read: Callable[[], Any], path: str, key: str) -> Any:
    try:
        return read()
    except pickle.UnpicklingError as error:  # torch gives no way to tell the two apart
        raise ConfigError(
            f"{key}: {path} is damaged, or holds more than tensors and plain values, which could run code and is not "
            f"loaded; save the weights alone: torch.save(model.state_dict(), path)."
        ) from error
    except Exception as error:  # bytes that are no checkpoint end in whatever the reader stumbles over first
        text = str(error).strip().splitlines() or ["no more is known"]
        raise ConfigError(
            f"{key}: {path} is damaged or no file of weights ({type(error).__name__}: {text[0]}); write it anew."
        ) from error


def _plain_state(held: Any, where: str, key: str) -> State:
    """Unwrap a checkpoint to name -> tensor, names as the bare model has them."""
    held = tensors_of(held, where, key)
    metadata = getattr(held, "_metadata", None)
    state: State = {str(name): tensor for name, tensor in held.items() if name != COUNTER}
    while (prefix := prefix_of(list(state))) is not None:
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if metadata is not None:
            metadata = {f"{name}.".removeprefix(prefix).rstrip("."): value for name, value in metadata.items()}
    return _with_metadata({_OLD_DENSE_NAME.sub(r"\1\2", name): tensor for name, tensor in state.items()}, metadata)


class _State(dict[str, Tensor]):
    """A dict that can carry the versions of the modules that wrote it, as torch's load_state_dict looks for them."""

    _metadata: Any


def _with_metadata(state: State, metadata: Any) -> State:
    held = _State(state)
    if metadata is not None:
        held._metadata = metadata
    return held
