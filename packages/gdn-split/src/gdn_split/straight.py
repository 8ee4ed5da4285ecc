"""Eager calls on a GPU that skip torch's dispatcher: for an op of ten tensors it takes 15 us of the host's time.

What the dispatcher is there for must be absent: compilation, modes, transforms, subclasses of tensors. The op is what
such calls take, and what says what is wrong with tensors that are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gdn_split import arguments, derivatives
from gdn_split.ops import launches
from gdn_split.reference import Parts, new_parts
from gdn_split.step import arguments as step_arguments
from gdn_split.tensors import Convolve, Step
from kernel_reference.checks import MemoryOverlap, values_are_checked
from kernel_reference.dispatch import allocator, launch_module
from kernel_reference.launching import Launch, launch_nothing

Tensor = torch.Tensor

_MOST_ADDRESSES = 512
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


def is_possible(tensors: Sequence[Any], numbers: Sequence[Any]) -> bool:
    """Whether nothing is lost without the dispatcher: plain tensors on a GPU, ints, no mode and no transform."""
    # Private, all that tells in no time that there is none, and what torch itself asks.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    # Loops, as sets of the types take the host 0.2 us longer.
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    for number in numbers:
        # True and 1.0 would be found in the table as 1.
        if type(number) is not int:
            return False
    # That the others are there too is checked once for each combination.
    return _is_on_gpu(tensors[0]) and not derivatives.is_forward_or_transformed()


def _is_on_gpu(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_cuda


def _are_ints(a: object, b: object, c: object, d: object, e: object) -> bool:
    return type(a) is int and type(b) is int and type(c) is int and type(d) is int and type(e) is int


def convolved_again(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Parts | None:
    """What :func:`split_conv1d_update` does for a call that looks like the last one, if it can be said at once."""
    found = launches.again(_prepare_convolve, tensors, numbers) if _are_ints(numbers[0], *numbers[2:6]) else None
    if found is None:
        return None
    overlap, allocators, run = found
    starts, aligned = overlap.addresses(*tensors)
    parts: Parts = tuple([allocate() for allocate in allocators])
    qkvz, ba, state, weight, bias, slots = starts
    addresses = [part.data_ptr() for part in parts]
    given = (qkvz, ba, state, weight, weight if bias is None else bias, slots, *addresses)
    aligned = aligned and not any([address & 15 for address in addresses])
    if not (aligned and isinstance(run, Launch) and run.at(*given)):
        _convolve(run, tensors, parts)
    _count_versions(tensors[2])
    return parts


def split_conv1d_update(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Parts:
    """The op's work on its first six tensors, into new parts."""
    check_overlap, allocators, run = launches.find(_prepare_convolve, tensors, numbers)
    check_overlap(*tensors)
    if values_are_checked(tensors[0].device):
        arguments.check_slot_values(tensors[5], tensors[2].shape[0])
    parts: Parts = tuple([allocate() for allocate in allocators])
    _convolve(run, tensors, parts)
    _count_versions(tensors[2])
    return parts


def _convolve(run: Callable[..., None], tensors: tuple[Any, ...], parts: Parts) -> None:
    *others, weight, bias, slots = tensors
    run(*others, weight, weight if bias is None else bias, slots, *parts)


def _prepare_convolve(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("gdn_split")
    shape = arguments.check_sizes(*numbers[2:7])
    arguments.check_projections(tensors[0], tensors[1], shape)
    parts = new_parts(tensors[0], tensors[1], shape)
    t = Convolve(*(*tensors, *parts))
    problem = arguments.check_convolve(t, *numbers)
    run = launch.prepare_split_conv1d_update(problem, None, t)
    named = dict(zip(Convolve._fields[:6], tensors, strict=True))
    return MemoryOverlap(named, ("conv_state",)), [allocator(part) for part in parts], run


def stepped_again(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Tensor | None:
    """What :func:`decode_step` does for a call that looks like the last one, if it can be said at once."""
    found = launches.again(_prepare_step, tensors, numbers) if _are_ints(numbers[0], *numbers[6:10]) else None
    if found is None:
        return None
    overlap, allocate, run, _, at = found
    starts = tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])
    # Addresses alone tell whether tensors like these share memory: one that is known was asked for that.
    begin = at.get(starts)
    out: Tensor = allocate()
    address = out.data_ptr()
    if begin is None or address & 15 or not begin(address):
        _, aligned = overlap.addresses(*tensors)
        run(*tensors, out)
        if begin is None and aligned and run is not launch_nothing:
            _keep(at, starts, run.at(tensors[2], starts))
    _count_versions(tensors[2], tensors[5])
    return out


def _keep(at: dict[Any, Any], starts: tuple[int | None, ...], begin: Callable[[int], bool] | None) -> None:
    """What a model's layers have, and pools that were freed since."""
    if begin is not None:
        if len(at) >= _MOST_ADDRESSES:
            at.clear()
        at[starts] = begin


def decode_step(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Tensor:
    """The op's work on its first ten tensors, into a new one."""
    check_overlap, allocate, run, path_length, _ = launches.find(_prepare_step, tensors, numbers)
    check_overlap(*tensors)
    out: Tensor = allocate()
    if values_are_checked(out.device):
        step_arguments.check_values(Step(*(*tensors, out)), path_length)
    run(*tensors, out)
    _count_versions(tensors[2], tensors[5])
    return out


def _prepare_step(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("gdn_split")
    from gdn_split.step import launch as step_launch

    shape = arguments.check_sizes(*numbers[6:11])
    arguments.check_projections(tensors[0], tensors[1], shape)
    out = tensors[0].new_empty((tensors[0].shape[0], shape.num_heads_v, shape.head_v))
    t = Step(*(*tensors, out))
    problem = step_arguments.check_step("decode_step", t, *numbers)
    named = dict(zip(Step._fields[:10], tensors, strict=True))
    overlap = MemoryOverlap(named, ("conv_state", "state_pool"))
    return overlap, allocator(out), step_launch.prepare_step(problem, None, t), problem.path_length, {}


def _count_versions(*written: Tensor) -> None:
    """What the dispatcher does of tensors that an op writes: autograd notices, where it has kept one."""
    torch._C._increment_version(written)
