"""The model of a run: the built-in decoder, or the user's own class.

What a user's class must do:
- be a torch.nn.Module with at least one trainable parameter, built from the keyword arguments `model.args`;
- take `(input_ids, labels)` in forward: both [micro_batch, seq_len] int64, labels already shifted, -100 masked;
- return `(loss_sum, token_count)`, the loss summed over valid labels in nats (in fp32: a sum over a thousand tokens
  does not fit fp16) and their number, or logits
  [micro_batch, seq_len, vocab_size].
For ZeRO-3 a module should initialise its own parameters in its own constructor and use them only in its own forward.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from largetrain.config.decoder_spec import DecoderSpec
from largetrain.config.schema import ModelBase, RunConfig
from largetrain.config.target import check_arguments, load_target
from largetrain.errors import ConfigError
from largetrain.models.decoder import Decoder
from largetrain.models.loss import token_loss
from largetrain.parallel.axes import Axes


class ModelChoice(Protocol):
    """The part of the resolved run that decides the model."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def decoder(self) -> DecoderSpec | None: ...


def build_model(resolved: ModelChoice, axes: Axes | None = None) -> nn.Module:
    """Build the run's model on torch's current device; initial weights come from torch's current generator.

    Args:
        axes: this rank among those that share the built-in decoder's layers; None: it has them whole.

    Raises:
        ConfigError: `model.target` or its arguments do not give a model of the kind described above.
    """
    if resolved.run.model.target is not None:
        return _build_target(resolved.run.model, resolved.run.model.target)
    assert resolved.decoder is not None, "a run without a target has a decoder"
    return Decoder(resolved.decoder, axes or Axes())


def _build_target(model: ModelBase, path: str) -> nn.Module:
    built = model_from_target(load_target(path, "model.target"), model.args, path)
    if isinstance(built, nn.modules.lazy.LazyModuleMixin) or any(map(nn.parameter.is_lazy, built.parameters())):
        raise ConfigError(f"model.target: {path!r} has lazy parameters, whose shapes are unknown; give their sizes.")
    check_trainable(built, path)
    try:
        inspect.signature(built.forward).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"model.target: forward of {path!r} is called as forward(input_ids, labels), but {error}; "
            f"it must take both and return (loss_sum, token_count) or logits."
        ) from error
    return built


def model_from_target(target: Any, args: Mapping[str, Any], path: str) -> nn.Module:
    """Call what `model.target` names, after a look at its signature.

    Raises:
        ConfigError: the arguments do not fit, or it gives no module.
    """
    check_arguments(target, args, path, "model.args")
    built = target(**args)
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"model.target: {path!r} gives a value of type {type(built).__name__}, not a torch.nn.Module."
        )
    return built


def check_trainable(built: nn.Module, path: str) -> None:
    """Refuse a model of the user's own that has nothing to train."""
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise ConfigError(f"model.target: {path!r} has no trainable parameter; register them in its constructor.")


def loss_from_output(output: object, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Reduce what a model returned to its summed loss and token count.

    Args:
        output: (loss_sum, token_count), handed through, or logits [micro_batch, seq_len, vocab], reduced in fp32.
        labels: [micro_batch, seq_len] int64; -100 is masked.
        chunk_tokens: tokens whose logits are held in fp32 at once.

    Returns:
        loss_sum (0-d fp32, nats) and token_count (0-d int64).

    Raises:
        ConfigError: the output of a user's model is neither.
    """
    if isinstance(output, Tensor) and output.dim() == labels.dim() + 1 and output.shape[:-1] == labels.shape:
        return token_loss(output, labels, chunk_tokens)
    if isinstance(output, tuple) and len(output) == 2 and all(isinstance(t, Tensor) and t.dim() == 0 for t in output):
        loss_sum, token_count = output
        if loss_sum.is_floating_point() and not token_count.is_floating_point():
            return loss_sum.float(), token_count
    raise ConfigError(
        f"model.target: forward(input_ids, labels) returned {_describe(output)}; expected (loss_sum, token_count), a "
        f"0-d float and a 0-d integer tensor, or logits {[*labels.shape, 'vocab_size']}."
    )


def _describe(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a {output.dtype} tensor of shape {list(output.shape)}"
    if isinstance(output, tuple):
        return f"({', '.join(map(_describe, output))})"
    return f"a value of type {type(output).__name__}"
