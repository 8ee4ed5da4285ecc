"""What a first call waits for: TileLang's linking, and kernels that could be built side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tilelang import tvm

_Wanted = TypeVar("_Wanted")


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
