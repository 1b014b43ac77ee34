"""Head and loss in chunks: equal to cross entropy on full fp32 logits, and never more than a chunk of logits."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from largetrain.models.decoder import Decoder
from largetrain.models.loss import linear_cross_entropy, token_loss
from tests.unit.models.specs import small_spec

TOKENS, WIDTH, VOCAB = 40, 24, 61
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 128 / TOKENS  # a loss scale over a token count, not a power of two


def problem(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH)
    labels = torch.randint(VOCAB, (TOKENS,))
    labels[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def gradients(loss_sum, *tensors):
    return torch.autograd.grad(loss_sum * SCALE, tensors)


def full_loss(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


def assert_within(actual, expected, bound):
    excess = (actual.double() - expected.double()).abs() - bound
    assert excess.max() <= 0, f"off by {excess.max():.3g} more than the bound"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [7, 8, TOKENS, 1000])
def test_equals_cross_entropy_on_full_fp32_logits(dtype, chunk_tokens):
    """Value and gradients, within what rounding can differ by.

    Both round the logits to `dtype` once and then sum in fp32, so that the losses differ by fp32 rounding: at most
    one unit for each of the TOKENS + VOCAB + 4 operations behind a term. Each entry of the logits' gradient may round
    to the neighbouring value of `dtype` (eps), each chunk's product rounds once (eps / 2), as does the reference's
    and the final sum; with the fp32 summations, every term of the product is off by at most 3 eps + terms x eps32.
    Below the smallest normal number rounding is absolute.
    """
    hidden, weight, labels = problem(dtype)
    loss_sum, count = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    expected = full_loss(hidden, weight, labels)
    eps, eps32, tiny = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, torch.finfo(dtype).smallest_normal

    assert loss_sum.dtype == torch.float32 and count.dtype == torch.int64 and count == 32
    assert_within(loss_sum, expected, (TOKENS + VOCAB + 4) * eps32 * expected.double())

    logits = (hidden @ weight.t()).detach().float().requires_grad_()
    (grad_logits,) = gradients(F.cross_entropy(logits, labels, reduction="sum"), logits)
    spread = 3 * eps + (TOKENS + VOCAB) * eps32
    size = grad_logits.abs().double() * spread + tiny * eps
    grad_hidden, grad_weight = gradients(loss_sum, hidden, weight)
    expected_hidden, expected_weight = gradients(expected, hidden, weight)
    assert grad_hidden.dtype == grad_weight.dtype == dtype
    assert_within(grad_hidden, expected_hidden, size @ weight.abs().double() + tiny * eps)
    assert_within(grad_weight, expected_weight, size.t() @ hidden.abs().double() + tiny * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [7, TOKENS])
def test_loss_of_given_logits_equals_cross_entropy(dtype, chunk_tokens):
    """The gradient is rounded to `dtype` once, from an fp32 value that is right to 8 roundings."""
    hidden, weight, labels = problem(dtype)
    logits = (hidden @ weight.t()).detach().requires_grad_()
    loss_sum, count = token_loss(logits, labels, chunk_tokens)
    expected = F.cross_entropy(logits.float(), labels, reduction="sum")
    eps, eps32, tiny = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, torch.finfo(dtype).smallest_normal
    assert count == 32 and loss_sum.dtype == torch.float32
    assert_within(loss_sum, expected, (TOKENS + VOCAB + 4) * eps32 * expected.double())
    (grad,), (expected_grad,) = gradients(loss_sum, logits), gradients(expected, logits)
    # 1 - softmax of a likely token cancels: its error is that of softmax, absolute, in units of SCALE
    bound = eps * expected_grad.abs().double() + (VOCAB + 8) * eps32 * SCALE + tiny * eps
    assert_within(grad, expected_grad, bound)


def test_fp64_is_exact_to_fp64():
    """Nothing inside drops to fp32 when the model is fp64: parity tests rely on it."""
    hidden, weight, labels = problem(torch.float64)
    loss_sum, _ = linear_cross_entropy(hidden, weight, labels, 7)
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(loss_sum, expected, rtol=1e-14, atol=0)
    for actual, wanted in zip(gradients(loss_sum, hidden, weight), gradients(expected, hidden, weight), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk_tokens", [7, TOKENS])
def test_uniform_logits_cost_log_vocab(chunk_tokens):
    hidden, _, labels = problem(torch.float32)
    loss_sum, count = linear_cross_entropy(hidden, torch.zeros(VOCAB, WIDTH), labels, chunk_tokens)
    torch.testing.assert_close(loss_sum / count, torch.tensor(math.log(VOCAB)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [7, TOKENS])
def test_without_targets_loss_count_and_gradients_are_zero(dtype, chunk_tokens):
    """Also where the hidden state is infinite: an ignored token has no say."""
    hidden, weight, labels = problem(dtype)
    labels.fill_(-100)
    loss_sum, count = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    assert loss_sum == 0 and count == 0
    assert all((gradient == 0).all() for gradient in gradients(loss_sum, hidden, weight))
    logits = torch.full((TOKENS, VOCAB), torch.inf, dtype=dtype, requires_grad=True)
    loss_sum, count = token_loss(logits, labels, chunk_tokens)
    assert loss_sum == 0 and count == 0 and (gradients(loss_sum, logits)[0] == 0).all()


def test_a_label_outside_the_vocabulary_is_an_error():
    hidden, weight, labels = problem(torch.float32)
    labels[3] = VOCAB
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(hidden, weight, labels, 7)


def test_mismatched_labels_are_an_error():
    hidden, weight, labels = problem(torch.float32)
    with pytest.raises(ValueError, match="do not match"):
        linear_cross_entropy(hidden, weight, labels[1:], 7)
    with pytest.raises(ValueError, match="do not match"):
        token_loss(hidden @ weight.t(), labels[1:], 7)


def test_only_needed_gradients_are_computed():
    hidden, weight, labels = problem(torch.float32)
    loss_sum, _ = linear_cross_entropy(hidden.detach(), weight, labels, 7)
    loss_sum.backward()
    assert hidden.grad is None and weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_equals_the_cast_tensors(dtype):
    hidden, weight, labels = problem(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss_sum, _ = linear_cross_entropy(hidden, weight, labels, 7)
    expected, _ = linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, 7)
    assert torch.equal(loss_sum, expected)
    for actual, wanted in zip(gradients(loss_sum, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert actual.dtype == torch.float32 and torch.equal(actual, wanted)


class LargestLogits(TorchDispatchMode):
    """Records the most elements of any tensor that has a vocabulary dim and is no weight."""

    def __init__(self, vocab, weight_shape):
        super().__init__()
        self.vocab, self.weight_shape, self.elements = vocab, weight_shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            is_logits = isinstance(tensor, torch.Tensor) and self.vocab in tensor.shape
            if is_logits and tuple(tensor.shape) not in (self.weight_shape, self.weight_shape[::-1]):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("chunk_tokens", "largest"), [(5, 5), (16, 16), (48, 48), (4096, 48)])
def test_logits_never_exceed_a_chunk(tie, dtype, chunk_tokens, largest):
    """In forward and backward of the whole model on 3 x 16 tokens, and in what is kept between the two."""
    model = Decoder(small_spec(tie_embeddings=tie, loss_chunk_tokens=chunk_tokens)).to(dtype)
    input_ids = torch.randint(61, (3, 16))
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with LargestLogits(61, (61, 32)) as peak, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum, _ = model(input_ids, input_ids)
        loss_sum.backward()
    assert peak.elements == largest * 61
    kept_logits = [t for t in saved if 61 in t.shape and tuple(t.shape) != (61, 32)]
    assert [tuple(t.shape) for t in kept_logits] == ([(48, 61)] if chunk_tokens >= 48 else [])
    assert all(t.dtype == dtype for t in kept_logits)


def test_evaluation_keeps_no_logits():
    model = Decoder(small_spec(loss_chunk_tokens=5))
    input_ids = torch.randint(61, (3, 16))
    with torch.no_grad(), LargestLogits(61, (61, 32)) as peak:
        model(input_ids, input_ids)
    assert peak.elements == 5 * 61


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("tie", [True, False])
def test_model_loss_equals_the_loss_of_its_logits(style, tie):
    """Tied and untied, every parameter's gradient, in fp64 where only the order of sums differs."""
    model = Decoder(small_spec(style, tie_embeddings=tie, loss_chunk_tokens=7)).double()
    input_ids, labels = torch.randint(61, (2, 3, 16)).unbind()
    labels[0, :5] = -100
    loss_sum, count = model(input_ids, labels)
    logits = model(input_ids)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert count == 43
    torch.testing.assert_close(loss_sum, expected, rtol=1e-13, atol=0)
    parameters = list(model.parameters())
    actual, wanted = torch.autograd.grad(loss_sum, parameters), torch.autograd.grad(expected, parameters)
    for mine, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
