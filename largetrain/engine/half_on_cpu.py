"""fp16 and bf16 on a CPU without native half precision: fast, and rounded as tensor cores round.

torch's CPU kernels for half matrix products run tens of times slower than fp32 ones on such
machines. Tensor cores multiply halves and accumulate in fp32, rounding once at the end; the same
numbers come from converting the operands to fp32, multiplying there, and converting the result back.
The mode below does so for the operations that dominate training, forward and backward alike,
for any model; everything else runs torch's own half kernels.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)

IN_FP32 = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.dot.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


class HalfProductsInFp32(TorchDispatchMode):
    """Within it, products, attention and convolutions of half CPU tensors are computed in fp32 and rounded once."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in IN_FP32:
            return func(*args, **kwargs)
        half = next((a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in HALVES), None)
        if half is None:
            return func(*args, **kwargs)
        result = func(*tree_map_only(torch.Tensor, _widen, args), **kwargs)
        # the log-sum-exp of attention is fp32 in torch's own half kernel too, and backward expects it so
        attention_forward = func is aten._scaled_dot_product_flash_attention_for_cpu.default
        if attention_forward:
            return result[0].to(half), result[1]
        return tree_map_only(torch.Tensor, lambda t: t.to(half) if t.dtype == torch.float32 else t, result)


def half_arithmetic(
    device_type: str, dtype: torch.dtype
) -> tuple[Callable[[], AbstractContextManager[Any]], list[str]]:
    """The context that products in `dtype` are computed in on such a device, and a note where it is not torch's own."""
    if device_type != "cpu" or computes_natively(dtype):
        return nullcontext, []
    name = "fp16" if dtype == torch.float16 else "bf16"
    note = (
        f"this CPU has no native {name}: matrix products, attention and convolutions are computed in fp32 "
        f"and rounded once to {name}, as tensor cores do"
    )
    return HalfProductsInFp32, [note]


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` in hardware with fp32 accumulation, so that torch's kernels are fast."""
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    if dtype == torch.float16:
        return bool(torch.cpu._is_amx_fp16_supported())
    return True
