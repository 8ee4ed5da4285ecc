"""Which kernels Triton and TileLang compile while something runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by a name for each kernel that is compiled in this process, found in no cache on disk.

    Of a package that is not imported yet nothing is counted where importing it is what fails.
    """
    found: list[str] = []
    with ExitStack() as stack:
        for watch in (_of_triton, _of_tilelang):
            try:
                stack.enter_context(watch(found))
            except ImportError:
                continue
        yield found


@contextmanager
def _of_triton(found: list[str]) -> Iterator[None]:
    from triton import knobs

    before = knobs.compilation.listener

    def note(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            found.append(str(metadata.get("name") or getattr(src, "name", "kernel")))
        if before is not None:
            before(src=src, metadata=metadata, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = note
    try:
        yield
    finally:
        knobs.compilation.listener = before


@contextmanager
def _of_tilelang(found: list[str]) -> Iterator[None]:
    # Importing it takes seconds: only whoever uses it has it.
    tilelang: Any = sys.modules.get("tilelang")
    if tilelang is None:
        yield
        return
    before = tilelang.compile

    def compile_and_note(*arguments: Any, **options: Any) -> Any:
        kernel = before(*arguments, **options)
        found.append(str(getattr(getattr(kernel, "prim_func", None), "__name__", "kernel")))
        return kernel

    tilelang.compile = compile_and_note
    try:
        yield
    finally:
        tilelang.compile = before
