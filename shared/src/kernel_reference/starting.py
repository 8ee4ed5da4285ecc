"""How Triton's compiled kernels are started in the least host time, on NVIDIA's GPUs.

``compiled[grid](*arguments)`` ends in one C function. On its way there it makes the metadata of hooks that nobody has
set, calls them, and encodes each TMA descriptor anew. This module keeps what C asks for and calls it. The names it
reads are private to Triton: where its version, device or kernel is not one that they are known for, there is no
short way, and ``compiled[grid]`` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Of these the C function's arguments are known.
_VERSIONS = ("3.6.", "3.7.")


class Starter(NamedTuple):
    """A kernel's short way, for its grid and the device that was current when it was compiled.

    start: takes all arguments in one tuple, tensors as pointers, descriptors as :attr:`maps` gives them. maps: of
    TMA descriptors, what the C function takes in their place; nothing of their tensors is kept. is_watched: whether a
    profiler has set hooks, which only Triton's own way calls.
    """

    start: Callable[[tuple[Any, ...]], None]
    maps: Callable[[Sequence[Any]], tuple[Any, ...]]
    is_watched: Callable[[], bool]


def find_starter(compiled: Any, grid: tuple[int, int, int]) -> Starter | None:
    """The short way for what ``kernel[grid](...)`` returned; None where it is not known."""
    try:
        import triton

        if not triton.__version__.startswith(_VERSIONS):
            return None
        launcher = compiled.run
        if compiled.metadata.target.backend != "cuda" or launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        return Starter(_starting(compiled, grid), _mapping(compiled), _watching())
    except (ImportError, AttributeError, KeyError):
        return None


def _starting(compiled: Any, grid: tuple[int, int, int]) -> Callable[[tuple[Any, ...]], None]:
    from triton.runtime import driver

    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    launch = _beneath_descriptors(launcher.launch)
    kind = (function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream
    x, y, z = grid
    # Without hooks, their metadata and scratch memory.
    if hasattr(launcher, "kernel_signature"):
        about = (metadata, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature)
        return lambda arguments: launch(x, y, z, stream_of(device), *kind, *about, arguments)
    rest = (*kind, None, None, metadata, None, None, None)
    return lambda arguments: launch(x, y, z, stream_of(device), *rest, *arguments)


def _beneath_descriptors(launch: Any) -> Any:
    """The C function beneath the Python one that encodes descriptors, where there is one."""
    if not hasattr(launch, "__code__"):
        return launch
    return dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents


def _mapping(compiled: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if not metas:
        return lambda descriptors: ()
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return lambda descriptors: tuple(
        [x for descriptor, meta in zip(descriptors, metas, strict=True) for x in make_tensordesc_arg(descriptor, meta)]
    )


def _watching() -> Callable[[], bool]:
    from triton import knobs

    runtime = knobs.runtime
    # Chains of hooks, whose lists a profiler adds to.
    runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls  # noqa: B018
    return lambda: bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
