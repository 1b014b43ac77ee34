"""Vision models: torchvision's classification and segmentation models by name, or the user's own class.

What a user's class must do: be a torch.nn.Module with at least one trainable parameter, built from the keyword
arguments `model.args` (and `num_classes`, where its signature has that parameter), and be called as `model(images)`
with float images [batch, 3, height, width]. It returns logits: [batch, classes], for segmentation
[batch, classes, height, width], or a dict with these as "out" and those of an auxiliary head as "aux".
"""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models import get_model_builder, get_model_weights, list_models

from largetrain.config.prefixes import fits, no_fit
from largetrain.config.target import check_arguments, load_target
from largetrain.config.vision_schema import ClassificationRun, SegmentationRun
from largetrain.errors import ConfigError
from largetrain.models.batch_norm import count_layers, freeze_batch_norms, set_momentum
from largetrain.models.build import check_trainable, model_from_target
from largetrain.models.vision_recompute import recompute_stages
from largetrain.models.vision_weights import is_file_name, load_backbone, load_pretrained

VisionRun = ClassificationRun | SegmentationRun
# Why a model of torchvision is of no use here, by the package that it is in.
REFUSED = {
    "detection": "finds objects, and object detection is not supported",
    "video": "takes video clips, not images",
    "optical_flow": "takes pairs of frames, not images",
    "quantization": "computes in int8 and cannot be trained",
}
# Arguments of torchvision's builders that have a key of their own.
OWN_KEYS = {
    "num_classes": "model.num_classes",
    "weights": "model.pretrained",
    "pretrained": "model.pretrained",
    "weights_backbone": "model.pretrained_backbone",
    "pretrained_backbone": "model.pretrained_backbone",
    "image_size": "data.image_size",
    "input_size": "data.image_size",
}
INCEPTION_AUX_PIXELS = 299
"""Smallest image whose feature map is large enough for Inception v3's auxiliary head (found by trying)."""
SIZE_BOUND = ("vit_", "maxvit_")
"""Their weights, or their windows, are made for one image size."""


def build_vision_model(run: VisionRun, num_classes: int, say: Callable[[str], None] = lambda line: None) -> nn.Module:
    """Build the run's model on torch's current device, load, freeze and lay it out as `run.model` says.

    Initial weights come from torch's current generator.

    Args:
        run: classification or segmentation.
        num_classes: outputs of the model.
        say: is given lines for a person: what was loaded, what was left as initialised, what is frozen.

    Raises:
        ConfigError: a key of `model`, or `data.image_size`, does not give a model that can be trained.
    """
    config = run.model
    model = _from_target(run, config.target, num_classes) if config.target else _from_torchvision(run, num_classes)
    _load_weights(model, run, num_classes, say)
    _freeze(model, config.freeze, say)
    if config.batch_norm_momentum is not None:
        set_momentum(model, config.batch_norm_momentum)
    if config.freeze_batch_norm and count_layers(model).live_batch_norms == 0:
        raise ConfigError("model.freeze_batch_norm: the model has no batch norm; remove it.")
    if config.freeze_batch_norm:
        freeze_batch_norms(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model.freeze: every parameter of the model is frozen; leave some to train.")
    if config.activation_checkpointing:
        stages = recompute_stages(model)
        if not stages:
            raise ConfigError(
                "model.activation_checkpointing: this model has no stages (blocks in a Sequential or ModuleList) whose "
                "activations could be recomputed; turn it off."
            )
        say(f"activations of {len(stages)} stages are recomputed")
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def _from_torchvision(run: VisionRun, num_classes: int) -> nn.Module:
    name = run.model.name
    _check_name(name, run)
    builder = get_model_builder(name)
    _check_args(builder, run)
    args = _arguments(run, builder) | run.model.args
    _check_image_size(run, args)
    try:
        return builder(num_classes=num_classes, **args)
    except (TypeError, ValueError, LookupError, AssertionError, RuntimeError) as error:
        if not run.model.args:
            raise  # what is passed without them is checked above
        fixed = [arg for arg in run.model.args if "multiple values" in str(error) and f"'{arg}'" in str(error)]
        if fixed:
            raise ConfigError(f"model.args.{fixed[0]}: is what makes {name!r} that model; leave it out.") from error
        raise ConfigError(f"model.args: {name!r} cannot be built with {_shown(run.model.args)}: {error}") from error


def _check_name(name: str, run: VisionRun) -> None:
    groups = {"classification": list_models(module=models), "segmentation": list_models(module=models.segmentation)}
    known = groups[run.task]
    if name in known:
        return
    for task, names in groups.items():
        if name in names:
            raise ConfigError(f"model.name: {name!r} is a {task} model, but task is {run.task}; change one of the two.")
    if name in list_models():
        package = get_model_builder(name).__module__.split(".")[-2]
        why = REFUSED.get(package, f"is of the kind {package}, which is not supported")
        example = "resnet50" if run.task == "classification" else "deeplabv3_resnet50"
        raise ConfigError(f"model.name: {name!r} {why}; choose a {run.task} model, such as {example!r}.")
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are: {', '.join(known)}."
    raise ConfigError(f"model.name: {name!r} is unknown; {hint} For a model of your own set model.target.")


def _check_args(builder: Callable[..., nn.Module], run: VisionRun) -> None:
    taken = [name for name in run.model.args if name in OWN_KEYS]
    if taken:
        raise ConfigError(f"model.args.{name}: is set by the key {OWN_KEYS[name]}; write it there." for name in taken)
    check_arguments(_with_signature(builder), run.model.args, run.model.name, "model.args")


def _with_signature(builder: Callable[..., nn.Module]) -> Callable[..., None]:
    """A stand-in whose signature names what `builder` hands on to its model's class; torchvision writes `**kwargs`."""
    parameters = _parameters(builder)

    def stand_in(**_: Any) -> None: ...

    keyword_only = [p.replace(kind=p.KEYWORD_ONLY, default=None) for p in parameters.values()]
    stand_in.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return stand_in


def _parameters(builder: Callable[..., nn.Module]) -> dict[str, inspect.Parameter]:
    signature = inspect.signature(builder)
    named = {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != "progress"}
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()) and "segmentation" not in builder.__module__:
        of_class = list(inspect.signature(signature.return_annotation).parameters.values())
        named |= {p.name: p for p in of_class if p.kind is p.POSITIONAL_OR_KEYWORD and _is_plain(p.annotation)}
    return {name: p for name, p in named.items() if name not in OWN_KEYS}


def _is_plain(annotation: Any) -> bool:
    """Whether a value of this type can be written in a run config: no class, function or module."""
    return not any(word in str(annotation) for word in ("Callable", "Module", "type[", "Conf", "torch"))


def _arguments(run: VisionRun, builder: Callable[..., nn.Module]) -> dict[str, Any]:
    """What torchvision's builders are given beside the user's arguments."""
    name, size = run.model.name, run.data.image_size
    args: dict[str, Any] = {"weights": None}  # loaded afterwards, so that a head of another size may be left out
    if isinstance(run, SegmentationRun):
        args["weights_backbone"] = None
        if run.loss.aux_weight and "aux_loss" in inspect.signature(builder).parameters:
            args["aux_loss"] = True
    if name in ("googlenet", "inception_v3"):
        args["init_weights"] = True  # what leaving it out means, without the warning that this may change
        if run.model.pretrained and not (isinstance(run.model.pretrained, str) and is_file_name(run.model.pretrained)):
            args["transform_input"] = True  # their weights are for images in -1..1, as torchvision's builder knows
    if name.startswith("vit_"):
        args["image_size"] = size
    if name.startswith("maxvit_"):
        args["input_size"] = (size, size)
    return args


def _check_image_size(run: VisionRun, args: dict[str, Any]) -> None:
    name, size = run.model.name, run.data.image_size
    evaluated = (run.data.eval_size or size) if isinstance(run, ClassificationRun) else size
    least = 1
    if not name.startswith((*SIZE_BOUND, "swin_")) and isinstance(run, ClassificationRun):
        least = max(get_model_weights(name).DEFAULT.meta["min_size"])
    for key, pixels in (("image_size", size), ("eval_size", evaluated)):
        if pixels < least:
            raise ConfigError(f"data.{key}: {name!r} needs images of at least {least} pixels, not {pixels}.")
    if name == "inception_v3" and args.get("aux_logits", True) and size < INCEPTION_AUX_PIXELS:
        raise ConfigError(
            f"data.image_size: the auxiliary head of {name!r} needs at least {INCEPTION_AUX_PIXELS} pixels, not "
            f"{size}; take larger images, or leave the head out by model.args: {{aux_logits: false}}."
        )
    if name.startswith("vit_") and size % int(name.rpartition("_")[2]):
        patch = name.rpartition("_")[2]
        raise ConfigError(f"data.image_size: {name!r} cuts images into {patch}s, so it must be a multiple, not {size}.")
    if name.startswith("maxvit_") and size % 224:
        raise ConfigError(f"data.image_size: {name!r} needs a multiple of 224 pixels, not {size}.")
    if name.startswith(SIZE_BOUND) and evaluated != size:
        raise ConfigError(
            f"data.eval_size: {name!r} takes images of one size alone, image_size={size}; leave eval_size out."
        )


def _from_target(run: VisionRun, path: str, num_classes: int) -> nn.Module:
    target = load_target(path, "model.target")
    args = dict(run.model.args)
    if "num_classes" in args:
        raise ConfigError("model.args.num_classes: is set by the key model.num_classes; write it there.")
    if callable(target) and _takes_num_classes(target):
        args["num_classes"] = num_classes
    model = model_from_target(target, args, path)
    try:
        inspect.signature(model.forward).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"model.target: forward of {path!r} is called as forward(images), but {error}; take the images alone."
        ) from error
    _materialise(model, path, run.data.image_size)
    check_trainable(model, path)
    return model


def _takes_num_classes(target: Any) -> bool:
    try:
        return "num_classes" in inspect.signature(target).parameters
    except ValueError:
        return False


def _materialise(model: nn.Module, path: str, image_size: int) -> None:
    """Let lazy layers take their shapes from one image of the run's size; statistics stay as initialised."""
    if not any(nn.parameter.is_lazy(held) for held in [*model.parameters(), *model.buffers()]):
        return
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(2, 3, image_size, image_size))
    except Exception as error:  # whatever the user's forward raises: say which input it was given
        shape = [2, 3, image_size, image_size]
        raise ConfigError(
            f"model.target: {path!r} has lazy layers, and its forward fails on images {shape}, from which they would "
            f"take their shapes: {type(error).__name__}: {error}"
        ) from error
    for module, was in training.items():
        module.training = was
    unused = [name for name, held in model.named_parameters() if nn.parameter.is_lazy(held)]
    if unused:
        raise ConfigError(
            f"model.target: {path!r} has lazy layers that its forward leaves out: {', '.join(unused[:3])}; remove them."
        )


def _load_weights(model: nn.Module, run: VisionRun, num_classes: int, say: Callable[[str], None]) -> None:
    config = run.model
    if config.pretrained_backbone:
        if isinstance(run, ClassificationRun) or config.target:
            raise ConfigError(
                "model.pretrained_backbone: is for torchvision's segmentation models; use model.pretrained."
            )
        if config.pretrained:
            raise ConfigError(
                "model.pretrained_backbone: has no effect beside model.pretrained, which has the backbone; drop one."
            )
        enum = get_model_weights(config.name.partition("_")[2])
        backbone = model.get_submodule("backbone")
        for line in load_backbone(backbone, config.pretrained_backbone, enum, "model.pretrained_backbone"):
            say(line)
    if config.pretrained:
        enum = None if config.target else get_model_weights(config.name)
        for line in load_pretrained(model, config.pretrained, enum, "model.pretrained", num_classes):
            say(line)


def _freeze(model: nn.Module, prefixes: list[str], say: Callable[[str], None]) -> None:
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    problems = [
        f"model.freeze: {no_fit(prefix, names)}" for prefix in prefixes if not any(fits(prefix, n) for n in names)
    ]
    if problems:
        raise ConfigError(problems)
    frozen = {parameter for name, parameter in named if any(fits(prefix, name) for prefix in prefixes)}
    for parameter in frozen:
        parameter.requires_grad_(False)
    if frozen:
        say(f"{len(frozen)} of {len(set(model.parameters()))} parameter tensors are frozen by model.freeze")


def _shown(args: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in args.items())
