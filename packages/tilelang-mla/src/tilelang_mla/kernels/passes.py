"""What lowering a kernel leaves out: simplifications of TileLang's behind which later ones do the same.

Five of its thirty. The CUDA texts of 61 kernels are the same without them, and are made in 0.83 of the CPU time. Three
passes more are left to nvcc: texts declare variables in other places and have other names, and what nvcc makes of them
is the same code, but of the top-k. In C two more simplifications are left out, which changes temporaries: decoding is
lowered in 2.0 s for 3.0, merging in 1.2 for 1.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilelang import tvm
from tilelang.instrumentation import (
    PassInstrumentationTool,
    compile_pass_instrumentation,
    current_compile_pass_instrumentation,
)

# The passes behind which a simplification is left out.
_BEHIND = {
    "tl.Simplify": {"tl.UnrollLoop", "tl.InjectSoftwarePipeline", "tl.LowerAccessPtr", "tl.LowerOpaqueBlock"},
    "tirx.Simplify": {"s_tir.RenormalizeSplitPattern"},
}
_BEHIND_BEFORE_NVCC = {**_BEHIND, "tirx.Simplify": _BEHIND["tirx.Simplify"] | {"tl.LowerIntrin"}}
_BEHIND_IN_C = {**_BEHIND, "tl.Simplify": _BEHIND["tl.Simplify"] | {"tl.IfStmtBinding", "tl.MakePackedAPI"}}
# What finds where buffers are declared, and where an index is below zero, which none is here.
_LEFT_TO_NVCC = {"tl.PlanAndUpdateBufferAllocationLocation", "tl.LegalizeNegativeIndex"}
# The kernel whose code would be in another order.
_ORDERED = "index_topk"


@tvm.instrument.pass_instrument
class Fewer:
    """Says of each pass whether it runs. kernel: its name, of one that nvcc compiles."""

    def __init__(self, kernel: str = "", in_c: bool = False) -> None:
        before_nvcc = not in_c and kernel != _ORDERED
        self._behind = _BEHIND_IN_C if in_c else _BEHIND_BEFORE_NVCC if before_nvcc else _BEHIND
        self._never = _LEFT_TO_NVCC if before_nvcc else set()
        self._last = ""

    def should_run(self, _: Any, info: Any) -> bool:
        last, self._last = self._last, str(info.name)
        return self._last not in self._never and last not in self._behind.get(self._last, ())


class _Tool(PassInstrumentationTool):  # type: ignore[misc]
    def __init__(self, kernel: str, in_c: bool) -> None:
        self._kernel, self._in_c = kernel, in_c

    def create_pass_instrument(self) -> object:
        return Fewer(self._kernel, self._in_c)


@contextmanager
def fewer_passes(kernel: str = "", in_c: bool = False) -> Iterator[None]:
    """While it is open this thread lowers kernels, to C or to CUDA, by fewer passes, unless somebody looks at them."""
    if current_compile_pass_instrumentation() is not None:
        yield
        return
    with compile_pass_instrumentation(tools=[_Tool(kernel, in_c)]):
        yield
