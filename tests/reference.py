"""An independent training loop: plain torch, one process, no engine. The parity tests compare everything with it.

It imports nothing from largetrain's engine or trainer and nothing from DeepSpeed; what it must agree with is written
here a second time, from the published methods: mixed precision with fp32 master weights and loss scaling from
Micikevicius et al., "Mixed Precision Training" (2018), clipping by global norm from Pascanu et al. (2013).
Rules that are DeepSpeed's own choice (the 1e-6 in the clipping coefficient, the dtype of accumulated gradients, how
hysteresis is counted) are named as such where they stand.

Run it inside a rank (`run_ranks(train_reference, 1, ...)`) when it is to use the same number of threads as the rest.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

IGNORED = -100
HALF = (torch.bfloat16, torch.float16)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Optimizer:
    """Settings of the reference optimizer; torch's own implementation runs on the fp32 master weights."""

    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0

    def build(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        if self.kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.0, momentum=self.momentum, weight_decay=self.weight_decay)
        kind = torch.optim.AdamW if self.kind == "adamw" else torch.optim.Adam
        return kind(parameters, lr=0.0, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


class FloorReached(Exception):
    """The loss scale would have to fall below its minimum."""


@dataclass
class LossScale:
    """The dynamic loss scale as DeepSpeed counts it (fp16 only); `static` turns the dynamics off.

    An overflow uses up one unit of hysteresis; the last unit halves the scale instead. `window` + 1 clean updates
    after an overflow (or `window` after a growth, and `window` + 1 from the start) double the scale and restore the
    hysteresis; `consecutive_hysteresis` restores it at every clean update.
    """

    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    static: float | None = None

    def __post_init__(self) -> None:
        self.value = self.static if self.static is not None else 2.0**self.initial_power
        self._left = self.hysteresis
        self._clean = -1  # clean updates since the last overflow, not counting the first

    def update(self, overflow: bool) -> None:
        """Take note of one update.

        Raises:
            FloorReached: an overflow at the minimal scale, with no hysteresis left.
        """
        if self.static is not None:
            return
        if overflow:
            self._clean = -1
            if self._left > 1:
                self._left -= 1
                return
            if self.value == self.minimum:
                raise FloorReached(f"the loss scale is already at its minimum {self.minimum:g}")
            self.value = max(self.value / 2, self.minimum)
            return
        self._clean += 1
        if self.consecutive_hysteresis:
            self._left = self.hysteresis
        if self._clean > 0 and self._clean % self.window == 0:
            self._left = self.hysteresis
            self.value *= 2


@dataclass
class ReferenceRun:
    """What the loop did, one entry per update, skipped ones included."""

    losses: list[float] = field(default_factory=list)  # nats per valid token of the whole global batch
    grad_norms: list[float] = field(default_factory=list)  # global, before clipping, unscaled; inf when skipped
    lrs: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # the one the update was computed with
    skipped: list[bool] = field(default_factory=list)
    final_scale: float = 1.0
    weights: dict[str, Tensor] = field(default_factory=dict)  # fp32 master weights by parameter name
    initial: dict[str, Tensor] = field(default_factory=dict)  # the same before the first update


def train_reference(
    model_factory: Callable[[], nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    lrs: Sequence[float],
    optimizer: Optimizer | None = None,
    *,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    pieces: int = 1,
    clip: float = 1.0,
    grad_dtype: torch.dtype | None = None,
    loss_scale: LossScale | None = None,
    loss_factors: Mapping[int, float] | None = None,
) -> ReferenceRun:
    """Train on the given global batches, one update for each.

    Args:
        model_factory: returns the model with its initial weights (it seeds itself). `model(input_ids)` returns
            logits [batch, seq_len, vocab].
        batches: (input_ids, labels) of each update, both [global_batch, seq_len] int64; labels are already shifted,
            -100 is masked.
        lrs: learning rates of the applied updates: the schedule does not advance over skipped ones.
        optimizer: AdamW with torch's defaults and no weight decay when absent.
        precision: dtype of the model's weights, activations and gradients. Master weights and optimizer state are
            fp32 always; the masters start from the initial weights rounded to this dtype, as DeepSpeed's do.
        pieces: the global batch is cut into so many consecutive equal parts (micro-batches x accumulation x ranks),
            whose gradients are added up. The result depends on it by rounding only.
        clip: largest global norm of the gradients; 0 turns clipping off.
        grad_dtype: dtype in which the gradients of the pieces are added; absent: the model's, which is DeepSpeed's
            default at every stage (`data_types.grad_accum_dtype` unset).
        loss_scale: fp16 only, left as it is; `LossScale()` when absent.
        loss_factors: update index -> factor on its loss; `inf` makes an overflow.

    Raises:
        FloorReached: see `LossScale`.
        ValueError: a global batch cannot be cut into `pieces`.
    """
    dtype = DTYPES[precision]
    model = model_factory()
    model.to(dtype)
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    steps = (optimizer or Optimizer()).build(list(masters.values()))
    scale = copy.copy(loss_scale or LossScale()) if precision == "fp16" else LossScale(static=1.0)
    run = ReferenceRun(initial={name: master.clone() for name, master in masters.items()})
    applied = 0
    for index, (input_ids, labels) in enumerate(batches):
        factor = (loss_factors or {}).get(index, 1.0)
        loss, grads = _gradients(model, input_ids, labels, pieces, scale.value * factor, grad_dtype or dtype)
        finite = all(bool(grad.isfinite().all()) for grad in grads.values())
        grads = {name: grad.float() / scale.value for name, grad in grads.items()}
        norm = global_norm(grads.values())
        run.losses.append(loss * factor)
        run.scales.append(scale.value)
        run.lrs.append(lrs[applied])
        run.skipped.append(not finite)
        run.grad_norms.append(norm if finite else math.inf)
        if finite:
            coefficient = clip_coefficient(norm, clip)
            for name, master in masters.items():
                master.grad = grads[name] * coefficient
            for group in steps.param_groups:
                group["lr"] = lrs[applied]
            steps.step()
            _copy_to_model(masters, model)
            applied += 1
        scale.update(overflow=not finite)
    run.final_scale, run.weights = scale.value, {name: master.detach() for name, master in masters.items()}
    return run


def _gradients(
    model: nn.Module, input_ids: Tensor, labels: Tensor, pieces: int, scale: float, grad_dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss of the global batch, and the gradients of `scale` times it, added up in `grad_dtype`."""
    if len(input_ids) % pieces:
        raise ValueError(f"a global batch of {len(input_ids)} samples cannot be cut into {pieces} equal pieces")
    count = int((labels != IGNORED).sum())
    total = 0.0
    sums = {name: torch.zeros_like(p, dtype=grad_dtype) for name, p in model.named_parameters()}
    for ids, targets in zip(input_ids.chunk(pieces), labels.chunk(pieces), strict=True):
        with HalfProductsInFp32():
            logits = model(ids)
            loss_sum = F.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss_sum * (scale / count)).backward()
        total += float(loss_sum.detach())
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad.to(grad_dtype)
            p.grad = None
    return total / count, sums


def global_norm(grads) -> float:
    """Euclidean norm of all gradients together, summed in fp64 so that it adds no error of its own."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def clip_coefficient(norm: float, clip: float) -> float:
    """Factor on the gradients: min(1, clip / (norm + 1e-6)), DeepSpeed's and Megatron's rule; clip 0 is off."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


@torch.no_grad()
def _copy_to_model(masters: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.copy_(masters[name])  # rounds to the model's dtype


class HalfProductsInFp32(TorchFunctionMode):
    """Matrix products, attention and convolutions of half tensors: operands to fp32, result rounded once.

    Autograd differentiates through the conversions, so the products of the backward pass are treated alike. This is
    what tensor cores compute, and what the CPU mode of the engine promises.
    """

    PRODUCTS = frozenset(
        {
            *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
            *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm),
            *(F.linear, F.scaled_dot_product_attention, F.conv1d, F.conv2d, F.conv3d),
        }
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.PRODUCTS:
            return func(*args, **kwargs)
        dtypes = {a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.dtype in HALF}
        if not dtypes:
            return func(*args, **kwargs)
        result = func(*(_float(a) for a in args), **{key: _float(value) for key, value in kwargs.items()})
        return result.to(dtypes.pop())


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


# ---------------------------------------------------------------- how close is close


def tolerance_for(dtype: torch.dtype, terms: int, updates: int = 1) -> dict[str, float]:
    """Tolerances for `torch.testing.assert_close` on values of order one that two correct programs compute.

    Where two programs add the same `terms` numbers in another order or grouping, each rounding errs by at most
    u = eps/2, and independently enough to be taken as uniform in [-u, u], standard deviation u/sqrt(3) (Higham and
    Mary, "A new approach to probabilistic rounding error analysis", 2019: error grows as sqrt(n) u, not n u). The
    difference of two such sums has the standard deviation u sqrt(2 terms / 3); six of them make a false alarm one in
    500 million. Each update adds fresh errors of this size to the weights and carries the old ones on unamplified
    (lr times curvature well below 1), so the bound grows linearly at worst.

    Args:
        dtype: in which the reordered sums are kept. Products of half tensors are summed in fp32 and rounded once;
            what is summed in half is the gradients of the pieces: terms = pieces.
        terms: length of the longest sum that may be ordered differently; for an fp32 loss or gradient, the tokens
            of the global batch.
        updates: optimizer updates between the common start and the comparison.

    Adam divides by the root of the second moment, so where a gradient is itself only rounding noise (the bias of the
    attention keys) its update is noise of size lr whatever the precision. Compare weights after SGD, or with an
    Adam eps well above the noise, or by `movement_error`.
    """
    unit_roundoff = torch.finfo(dtype).eps / 2
    bound = 6 * math.sqrt(2 * terms / 3) * unit_roundoff * updates
    return {"rtol": bound, "atol": bound}


def movement_error(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> float:
    """Norm of the difference of two sets of weights, relative to how far the expected ones have moved.

    Unlike a comparison of weights, it is not flattered by weights that hardly changed: two runs that never trained
    give nan, two that moved in opposite directions give 2.

    Raises:
        KeyError: a name is missing in `actual`.
        ValueError: a name in `actual` is unknown.
    """
    if extra := set(actual) - set(expected):
        raise ValueError(f"unknown weights: {sorted(extra)}")
    wrong = global_norm(actual[name].float() - weight for name, weight in expected.items())
    moved = global_norm(weight - initial[name] for name, weight in expected.items())
    return wrong / moved if moved else math.nan


# ---------------------------------------------------------------- a small model and data to train it on


class ToyLanguageModel(nn.Module):
    """One causal attention block with embeddings and head: small, yet with every kind of weight of a decoder.

    Args of forward:
        input_ids: [batch, seq_len] int64.
        labels: the same shape, already shifted, -100 masked; None returns logits [batch, seq_len, vocab].

    Returns of forward with labels: loss_sum (0-d fp32, nats) and token_count (0-d int64).
    """

    def __init__(self, vocab: int = 32, hidden: int = 16, heads: int = 2, seq_len: int = 8, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.heads = heads
            self.tokens = nn.Embedding(vocab, hidden)
            self.positions = nn.Parameter(0.1 * torch.randn(seq_len, hidden))
            self.norm = nn.LayerNorm(hidden)
            self.qkv = nn.Linear(hidden, 3 * hidden)
            self.out = nn.Linear(hidden, hidden)
            self.up = nn.Linear(hidden, 4 * hidden)
            self.down = nn.Linear(4 * hidden, hidden)
            self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(x)
        if labels is None:
            return logits
        loss_sum = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss_sum, (labels != IGNORED).sum()


def toy_batches(
    updates: int, global_batch: int, seq_len: int = 8, vocab: int = 32, masked: float = 0.3, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Global batches for `ToyLanguageModel`: each token is its predecessor plus 1 or 2, modulo the vocabulary.

    `masked` is the share of masked labels; the masks are ragged, so that samples, micro-batches and ranks have
    different numbers of valid tokens. The first label of a batch is always valid.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(updates):
        start = torch.randint(vocab, (global_batch, 1), generator=generator)
        jumps = torch.randint(1, 3, (global_batch, seq_len), generator=generator)
        text = torch.cat([start, start + jumps.cumsum(1)], 1) % vocab
        labels = text[:, 1:].clone()
        share = 2 * masked * torch.rand(global_batch, 1, generator=generator)
        hidden = torch.rand(labels.shape, generator=generator) < share
        hidden[0, 0] = False
        labels[hidden] = IGNORED
        batches.append((text[:, :-1].contiguous(), labels))
    return batches
