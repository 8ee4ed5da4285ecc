"""How Triton's compiled kernels are started in the least host time, on NVIDIA's GPUs.

``compiled[grid](*arguments)`` ends in one C function. On its way there it makes the metadata of hooks that nobody has
set, calls them, and encodes each TMA descriptor anew. This module keeps what C asks for and calls it. The names it
reads are private to Triton: where its version, device or kernel is not one that they are known for, there is no
short way, and ``compiled[grid]`` serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_reference.packing import Late, Packer, find_packer
from kernel_reference.tensor_maps import TRITONS, promote

_threads = threading.local()
# Of these the C function's arguments are known.
_VERSIONS = ("3.6.", "3.7.", "3.8.")


class Starter(NamedTuple):
    """A kernel's short way, for the device that was current when it was compiled.

    start: takes the grid and all arguments in one tuple, tensors as pointers, descriptors as :attr:`map` gives them.
    map: of a position, its TMA descriptor and promotion (see tensor_maps.py), what the C function takes; nothing of the
        descriptor's tensor is kept.
    is_watched: whether a profiler has set hooks, which only Triton's own way calls.
    packer: what packs the arguments of launches that come again, where they are known.
    """

    start: Callable[[tuple[int, int, int], tuple[Any, ...]], None]
    map: Callable[[int, Any, int], tuple[Any, ...]]
    is_watched: Callable[[], bool]
    packer: Packer | None = None

    def but_last(
        self, grid: tuple[int, int, int], before: tuple[Any, ...], behind: tuple[Any, ...]
    ) -> Callable[[Any], bool]:
        """What starts it on these arguments and one between them; False, and nothing started, where it is watched."""
        start, is_watched = self.start, self.is_watched

        def begin(last: Any) -> bool:
            if is_watched():
                return False
            start(grid, (*before, last, *behind))
            return True

        return begin

    def again(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> Callable[..., bool]:
        """What starts it on these arguments, called with what :class:`Late` stands for among them; False, and nothing
        started, where it is watched or the driver refuses.
        """
        start, is_watched = self.start, self.is_watched

        def begin(*late: int) -> bool:
            if is_watched():
                return False
            start(grid, _filled(arguments, late))
            return True

        packed = None if self.packer is None else self.packer.pack(grid, arguments, is_watched)
        return packed or begin


def _filled(arguments: Any, late: tuple[int, ...]) -> Any:
    """The arguments with what ``Late`` stands for among them."""
    if type(arguments) is Late:
        return late[arguments.number]
    return tuple([_filled(one, late) for one in arguments]) if isinstance(arguments, tuple) else arguments


def ensure_context(device: torch.device) -> None:
    """Give this thread the GPU's context, which encoding a descriptor takes for granted.

    A launch asks for it, and so does an allocation, but for one of cached memory: autograd's thread may have none yet.
    """
    if device.type == "cuda" and not getattr(_threads, "have_context", False):
        # CUDA's runtime makes the device's own context current. Where a graph is captured, the question alone is asked.
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.mem_get_info(device)
        _threads.have_context = True


def find_starter(compiled: Any) -> Starter | None:
    """The short way for what ``kernel[grid](...)`` returned; None where it is not known."""
    try:
        import triton

        if not triton.__version__.startswith(_VERSIONS):
            return None
        launcher = compiled.run
        has_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        # A sanitizer, which adds an argument of its own.
        if compiled.metadata.target.backend != "cuda" or has_scratch or getattr(launcher, "gsan_enabled", False):
            return None
        return Starter(_starting(compiled), _mapping(compiled), _watching(), _packing(compiled))
    except (ImportError, AttributeError, KeyError):
        return None


def _starting(compiled: Any) -> Callable[[tuple[int, int, int], tuple[Any, ...]], None]:
    from triton.runtime import driver

    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    launch = _beneath_descriptors(launcher.launch)
    kind = (function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream
    # Without hooks, their metadata and scratch memory.
    if hasattr(launcher, "kernel_signature"):
        about = (metadata, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature)

        # Triton 3.8 unloads the function with what it was compiled to.
        def start(grid: tuple[int, int, int], arguments: tuple[Any, ...], kept: Any = compiled) -> None:
            launch(*grid, stream_of(device), *kind, *about, arguments)

        return start
    rest = (*kind, None, None, metadata, None, None, None)
    return lambda grid, arguments: launch(*grid, stream_of(device), *rest, *arguments)


def _packing(compiled: Any) -> Packer | None:
    from triton.runtime import driver

    return find_packer(compiled, driver.active.get_current_stream, driver.active.get_current_device())


def _beneath_descriptors(launch: Any) -> Any:
    """The C function beneath the Python one that encodes descriptors, where there is one."""
    if not hasattr(launch, "__code__"):
        return launch
    return dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents


def _mapping(compiled: Any) -> Callable[[int, Any, int], tuple[Any, ...]]:
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if not metas:
        return lambda position, descriptor, promotion: ()
    from triton.backends.nvidia.driver import make_tensordesc_arg

    # Triton 3.8's takes the launch's other arguments too, and looks at none of them.
    others = (None,) * (make_tensordesc_arg.__code__.co_argcount - 2)

    def mapped(position: int, descriptor: Any, promotion: int) -> tuple[Any, ...]:
        made = tuple(make_tensordesc_arg(descriptor, metas[position], *others))
        if promotion != TRITONS:
            promote(made[0], metas[position], descriptor, promotion)
        return made

    return mapped


def _watching() -> Callable[[], bool]:
    from triton import knobs

    runtime = knobs.runtime
    # Chains of hooks, whose lists a profiler adds to.
    runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls  # noqa: B018
    return lambda: bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
