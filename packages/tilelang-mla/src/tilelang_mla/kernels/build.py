"""What a first call waits for: TileLang's proofs and its linking, and kernels that could be built side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import z3
from tilelang import tvm

_Wanted = TypeVar("_Wanted")

# Z3's solver of linear arithmetic that came before the present one.
_SOLVER, _EARLIER = "smt.arith.solver", 2
_lock = Lock()
# How many threads lower kernels, and what Z3 had before the first of them began.
_lowering: list[str] = []


@contextmanager
def quick_proofs() -> Iterator[None]:
    """While it is open Z3 uses an earlier solver of linear arithmetic.

    Lowering a decoding kernel asks Z3 5700 questions and has three proofs. The present solver takes 2.4 s of 7.1 for
    them and the earlier one 0.9; both give up after as many steps. A setting that Z3's users made before comes back.
    """
    with _lock:
        before = _lowering[0] if _lowering else str(z3.get_param(_SOLVER))
        _lowering.append(before)
        z3.set_param(_SOLVER, _EARLIER)
    try:
        yield
    finally:
        with _lock:
            before = _lowering.pop()
            if not _lowering:
                z3.set_param(_SOLVER, before)


def executable_of(compiled: Any) -> Any:
    """What has the functions of a kernel that TileLang compiled.

    TileLang links it for its cache, and once more, in 0.7 s, for the process that has compiled it: that one loads what
    is in the cache, too, as all later ones do.
    """
    executable = compiled.adapter.get_exportable_executable()
    saved = Path(getattr(compiled, "_tilelang_cache_path", ""), "executable.so")
    if isinstance(executable, tvm.runtime.Executable) and saved.is_file():
        return tvm.runtime.load_module(str(saved))
    return executable


def side_by_side(make: Callable[[_Wanted], Any], wanted: Sequence[_Wanted]) -> list[Any]:
    """What is made of each; nvcc's processes run beside the lowering of other kernels."""
    if len(wanted) < 2:
        return [make(one) for one in wanted]
    with ThreadPoolExecutor(len(wanted) - 1) as pool:
        # The last of a call are the smallest.
        rest = [pool.submit(make, one) for one in wanted[1:]]
        return [make(wanted[0]), *(one.result() for one in rest)]
