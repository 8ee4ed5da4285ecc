"""The kernels of one call, compiled beside one another where the first call needs several.

Compiling takes Triton a second or two a kernel. It holds Python's lock for a third of that; the rest, as its assembler
and the C compiler behind it, runs beside another kernel's.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kernel_reference.launchers import are_built, captured, launcher_builder

if TYPE_CHECKING:
    from kernel_reference.launching import Launch

Tensor = torch.Tensor
_Given = TypeVar("_Given")
_Launches = list[tuple["Launch", tuple[Tensor | None, ...]]]


@lru_cache(1)
def begin_triton() -> tuple[threading.Thread, ...]:
    """Begin what Triton does before a process's first kernel, beside the imports and plans of the call that needs one.

    It hashes its own files for the key of its cache, and a C compiler builds its driver: 0.3 to 0.5 s each, of which
    Python's lock is held for next to nothing. Returns the threads, which are to be joined before a kernel is compiled.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None or not torch.cuda.is_available():
        return ()
    try:
        # Here, so that no thread imports what another one does.
        from triton.runtime import driver
    except ImportError:
        return ()
    begun = (lambda: driver.active, _hash_triton)
    threads = tuple([threading.Thread(target=_unless_it_fails, args=(run,)) for run in begun])
    for thread in threads:
        thread.start()
    return threads


def _hash_triton() -> None:
    from triton.runtime.cache import triton_key

    triton_key()


def _unless_it_fails(run: Callable[[], object]) -> None:
    """What fails says so where a kernel is compiled."""
    with suppress(Exception):
        run()


class _Gathering(threading.local):
    """``found``: a thread's launches, each with its tensors, where they are asked for in place of being started."""

    found: _Launches | None = None


gathering = _Gathering()


def gathered_launches(run: Callable[..., Any], *tensors: Any) -> _Launches:
    """The launches that ``run(*tensors)`` would make, each with its tensors; none is started, nor is any after it where
    this is asked within a call whose own launches are gathered.
    """
    outer = gathering.found
    found: _Launches = []
    gathering.found = found
    try:
        run(*tensors)
    finally:
        gathering.found = outer
    return found


def compiled_together(run: Callable[[_Given], None], device: torch.device) -> Callable[[_Given], None]:
    """``run``, whose first call compiles the kernels of all its launches at once, and what starts each beside it;
    beside launches it only allocates.

    device: of the tensors.
    """
    # Neither in Triton's interpreter nor for another machine, where there are no tensors.
    is_due = device.type == "cuda"

    def run_compiled(given: _Given) -> None:
        nonlocal is_due
        # Who gathers launches starts none; and where a graph is captured no thread may load a kernel.
        if is_due and gathering.found is None and not torch.cuda.is_current_stream_capturing():
            is_due = False
            with torch.cuda.device(device):
                # Triton refuses a second mode in one context, and the caller may compile in one of its own.
                Context().run(_compile, gathered_launches(run, given))
        run(given)

    return run_compiled


def _compile(launches: _Launches) -> None:
    launches = [(launch, tensors) for launch, tensors in launches if not launch.is_compiled(*tensors)]
    if not launches or (len(launches) < 2 and not are_built()):
        return
    import triton

    # Triton 3.5 has it.
    if not hasattr(triton, "AsyncCompileMode"):
        return
    # What does not compile says so where it is launched.
    with _uncollected(), _Loading(len(launches)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for launch, tensors in sorted(reversed(launches), key=_length, reverse=True):
            launch.compile(*tensors)


def _length(launch: tuple[Launch, object]) -> int:
    """Of a kernel's source, by which the largest is begun first, the one to wait for; of equal ones a call's last."""
    return len(getattr(launch[0].kernel, "src", ""))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector of garbage, which among all that torch has made takes 0.12 s, and no thread traces."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Loading(ThreadPoolExecutor):
    """Threads that load what they have compiled, as a launch does: beside each kernel there may be a C compiler."""

    def __init__(self, kernels: int) -> None:
        # None waits for a thread.
        super().__init__(2 * kernels)
        self._device = torch.cuda.current_device()
        # Set once the kernel before is traced.
        self._traced = threading.Event()
        self._traced.set()

    def submit(self, make: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        build = launcher_builder(make)
        building = None if build is None else super().submit(build)
        before, traced = self._traced, threading.Event()
        self._traced = traced
        _trace_behind(before, traced, make)

        def load() -> Any:
            with torch.cuda.device(self._device):
                try:
                    compiled = make()
                finally:
                    # What Triton's cache has is not traced, nor what fails before.
                    before.wait()
                    traced.set()
                if building is not None:
                    building.exception()
                compiled.run  # noqa: B018
            return compiled

        return super().submit(load)


def _trace_behind(before: threading.Event, traced: threading.Event, make: Callable[[], Any]) -> None:
    """Have what ``make`` compiles traced after ``before``, and ``traced`` set then.

    Tracing holds Python's lock: of several at once none ends much before the last, and the first is the one to wait
    for. ``source`` is what Triton's AsyncCompileMode is given to compile, under a private name; where it has another,
    kernels are traced side by side.
    """
    source: Any = captured(make).get("src")
    trace: Callable[..., Any] | None = getattr(source, "make_ir", None)
    if trace is None:
        return

    def make_ir(*given: Any, **named: Any) -> Any:
        del source.make_ir
        before.wait()
        try:
            return trace(*given, **named)
        finally:
            traced.set()

    source.make_ir = make_ir
