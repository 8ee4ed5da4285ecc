"""Compile what launches need before they are needed, into Triton's cache: with no GPU too, for another machine's.

A package's ``compile.py`` gives the calls of a model, as launches made ready for tensors on the device ``meta``::

    calls = [("decoding", lambda: attend(*tensors)), ...]
    kernels = compile_calls(calls, "sm_90", report=print)

A process that makes such calls afterwards, with the same versions of Triton and of the package, finds the kernels in
``$TRITON_CACHE_DIR`` or ``~/.triton/cache``. Triton is imported by the first call, not by this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kernel_reference.errors import fail
from kernel_reference.launching import Launch

# Triton's backend, architecture and threads of a warp.
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
Call = tuple[str, Callable[[], object]]


class Kernel(NamedTuple):
    """A kernel that was compiled, or would be: its function, the first call that needs it, and seconds taken."""

    name: str
    call: str
    seconds: float


def compile_calls(
    calls: Sequence[Call], target: str | None = None, *, dry_run: bool = False,
    report: Callable[[Kernel, int, int], object] | None = None,
) -> list[Kernel]:  # fmt: skip
    """Compile every kernel that these calls launch; nothing is launched.

    Args:
        calls: of each a name and what makes it, through :class:`~kernel_reference.launching.Launch`.
        target: one of ``TARGETS``; None is the GPU that there is. Another one holds until the process ends.
        dry_run: find out which kernels there are, and compile none.
        report: called with each kernel, its number from 1 on, and how many there are.

    Returns the kernels, each once. Raises ValueError for an unknown target, RuntimeError in Triton's interpreter.
    """
    if target is not None:
        _aim_at(target)
    wanted = _needed(calls)
    if dry_run:
        found = [Kernel(*each, 0.0) for each in wanted]
        for number, kernel in enumerate(found, 1):
            if report:
                report(kernel, number, len(found))
        return found
    return _compiled(calls, len(wanted), report)


def _needed(calls: Sequence[Call]) -> list[tuple[str, str]]:
    """The function of each kernel and the first call that needs it."""
    found: dict[str, tuple[str, str]] = {}

    def note(call: str) -> Callable[..., bool]:
        def hook(*, key: str, fn: Any, **_: Any) -> bool:
            found.setdefault(f"{fn.name} {key}", (fn.name.rpartition(".")[2], call))
            # True: Triton goes on as if it were compiled.
            return True

        return hook

    with _only_compiling():
        for call, run in calls:
            with _hook("jit_cache_hook", note(call)):
                run()
    return [*found.values()]


def _compiled(calls: Sequence[Call], count: int, report: Callable[..., object] | None) -> list[Kernel]:
    found: list[Kernel] = []
    begun = time.perf_counter()

    def note(call: str) -> Callable[..., None]:
        def hook(*, fn: Any, **_: Any) -> None:
            nonlocal begun
            now = time.perf_counter()
            found.append(Kernel(fn.name.rpartition(".")[2], call, now - begun))
            begun = now
            if report:
                report(found[-1], len(found), count)

        return hook

    with _only_compiling():
        for call, run in calls:
            with _hook("jit_post_compile_hook", note(call)):
                run()
    return found


@contextmanager
def _only_compiling() -> Iterator[None]:
    """Launches compile in here, and do not start."""
    bind = Launch._bind

    def compile_only(self: Launch, tensors: tuple[Any, ...], aligned: bool) -> None:
        if not hasattr(self.kernel, "device_caches"):
            raise RuntimeError("Triton's interpreter compiles nothing: unset TRITON_INTERPRET")
        self.compile(*tensors)

    Launch._bind = compile_only  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch._bind = bind  # type: ignore[method-assign]


@contextmanager
def _hook(name: str, hook: Callable[..., object]) -> Iterator[None]:
    from triton import knobs

    before = getattr(knobs.runtime, name)
    setattr(knobs.runtime, name, hook)
    try:
        yield
    finally:
        setattr(knobs.runtime, name, before)


def _aim_at(target: str) -> None:
    """Let Triton compile for a GPU that is not here."""
    if target not in TARGETS:
        fail("target", f"one of {', '.join(TARGETS)}", target)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Elsewhere:
        """What compiling asks of a driver."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*TARGETS[target])

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 0

    driver.set_active(Elsewhere())
