"""Spare a run the seconds that torch and DeepSpeed spend on importing compilers it does not use.

Such imports dominate `deepspeed.initialize` (profiled: 5.0 of 5.1 s for a small model on one CPU core):
torch imports its compiler front end when the first optimizer is made, only to tell it to leave the
optimizer alone; DeepSpeed imports the Muon optimizer, whose decorators import inductor, only to add it
to a list, and tells the compiler to leave ZeRO-3's hooks alone. All this is done without the compiler
here; a run that compiles keeps the plain way.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from largetrain.engine.half_on_cpu import HalfProductsInFp32


@contextmanager
def spared_compiler_imports(engine_config: dict[str, Any]) -> Iterator[None]:
    """Construct the engine and its optimizer inside; does nothing for a run that compiles or uses Muon."""
    optimizer = str(engine_config.get("optimizer", {}).get("type", "")).lower()
    if "torch._dynamo" in sys.modules or "compile" in engine_config or optimizer == "muon":
        yield
        return
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    _leave_undecorated(torch.optim.Optimizer)
    _leave_undecorated(PartitionedParameterCoordinator)
    _leave_undecorated(torch.utils.checkpoint)
    _leave_undecorated(HalfProductsInFp32)
    _import_muon_uncompiled()
    disable = torch.compiler.disable
    torch.compiler.disable = _as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = disable


def _as_it_is(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a decorator, with or without arguments, that concerns the compiler alone."""
    return function if callable(function) else _as_it_is


def _leave_undecorated(owner: Any) -> None:
    """Give torch's lazily `_disable_dynamo`-decorated functions their cached answer: the function as it is.

    The decorator looks for `__dynamo_disable` on the function before it imports torch._dynamo.
    """
    for value in list(vars(owner).values()):
        plain = getattr(value, "__wrapped__", None)
        lazily = getattr(getattr(value, "__code__", None), "co_filename", "").endswith("_compile.py")
        if plain is not None and lazily and not hasattr(plain, "__dynamo_disable"):
            setattr(plain, "__dynamo_disable", plain)


def _import_muon_uncompiled() -> None:
    from deepspeed.runtime import compiler

    compile_ = compiler.compile

    compiler.compile = _as_it_is
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_
