"""What lowering a kernel leaves out: simplifications of TileLang's behind which later ones do the same.

Five of its thirty. The CUDA texts of 61 kernels are the same without them, and are made in 0.83 of the CPU time. In C
two more are left out, which changes temporaries: decoding is lowered in 2.0 s for 3.0, merging in 1.2 for 1.9.
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
_BEHIND_IN_C = {**_BEHIND, "tl.Simplify": _BEHIND["tl.Simplify"] | {"tl.IfStmtBinding", "tl.MakePackedAPI"}}


@tvm.instrument.pass_instrument
class Fewer:
    """Says of each pass whether it runs."""

    def __init__(self, in_c: bool = False) -> None:
        self._behind = _BEHIND_IN_C if in_c else _BEHIND
        self._last = ""

    def should_run(self, _: Any, info: Any) -> bool:
        last, self._last = self._last, str(info.name)
        return last not in self._behind.get(self._last, ())


class _Tool(PassInstrumentationTool):  # type: ignore[misc]
    def __init__(self, in_c: bool) -> None:
        self._in_c = in_c

    def create_pass_instrument(self) -> object:
        return Fewer(self._in_c)


@contextmanager
def fewer_passes(in_c: bool = False) -> Iterator[None]:
    """While it is open this thread lowers kernels, to C or to CUDA, by fewer passes, unless somebody looks at them."""
    if current_compile_pass_instrumentation() is not None:
        yield
        return
    with compile_pass_instrumentation(tools=[_Tool(in_c)]):
        yield
