"""Argument errors that read alike in every package, and the switch for checks that must look at device memory.

An error names the argument, what it must be and what it was: ``mixed_ba must be on cuda:0, got cpu``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from kernel_reference.errors import fail as fail

_values_are_checked: ContextVar[bool | None] = ContextVar("kernel_reference_values_are_checked", default=None)

_LONGEST = 120


def describe(value: object) -> str:
    """What an argument was, in one line of an error message: dtype, shape and strides of a tensor, else its value.

    An array of another library is described by its shape and dtype, and a long value is cut.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return f"{value.dtype} {list(value.shape)} of layout {value.layout}"
        return f"{value.dtype} {list(value.shape)} with strides {list(value.stride())}"
    kind = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"a {type(value).__module__.partition('.')[0]} {kind} {dtype} {list(shape)}"
    shown = " ".join(repr(value).split())
    return f"{shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + '...'} ({kind})"


def as_int(name: str, number: Any, wanted: str = "an int") -> int:
    """``number`` as an int: an int, a torch.SymInt, which stays one, or any type with ``__index__`` such as NumPy's.

    TypeError is raised for a bool, a float and everything else, a tensor among them: its value would be a host sync.
    """
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(number, torch.SymInt):
        return number  # type: ignore[return-value]
    if isinstance(number, (bool, torch.Tensor)) or not hasattr(number, "__index__"):
        fail(name, wanted, describe(number), TypeError)
    try:
        return operator.index(number)
    except TypeError:
        # Arrays have __index__ whether or not they are one integer.
        fail(name, wanted, describe(number), TypeError)


def check_tensors(**tensors: object) -> None:
    """Raise TypeError unless each of these is a tensor: not a list, nor an array of another library."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            fail(name, "a tensor", describe(tensor), TypeError)


def check_float(name: str, number: object, wanted: str = "a float") -> None:
    """A finite int or float. Of a symbolic one, which torch.compile passes, the value is checked when the op runs."""
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
        fail(name, wanted, describe(number), TypeError)
    # Dynamo takes symbolic floats for floats, and cannot trace math.isfinite of one.
    if not torch.compiler.is_compiling() and isinstance(number, float) and not math.isfinite(number):
        fail(name, "finite", number)


def check_no_tangents(**tensors: object) -> None:
    """Raise ValueError if a tensor carries a forward-mode tangent, which an op without a jvp rule would drop silently.

    ``torch.func.jvp``, ``jacfwd`` and ``torch.autograd.forward_ad`` make such tensors. None is skipped.
    """
    # Private, and the only thing that tells in no time that there is none.
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            fail(name, "without a tangent: it has no forward-mode derivative (jvp, jacfwd)", "a dual tensor")


class MemoryOverlap:
    """Whether tensors that a kernel writes share memory with others, prepared once for given shapes and strides.

    tensors: by the names of the arguments, in the order of later calls; None where one is left out. written: the names
    of those that the kernel writes. Calling it with tensors of the same shapes, strides and dtypes raises ValueError if
    a written one shares memory with any other. Slices of one tensor that interleave without sharing an element, as q,
    k and v of a fused projection do, pass. Costs the host 0.1 us a tensor, and 0.06 us a pair of which one is written.

    >>> overlap = MemoryOverlap({"q": q, "out": out}, written=["out"])
    >>> overlap(q, out)
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | None], written: Sequence[str]) -> None:
        self._names = tuple(tensors)
        spans = {name: _bytes_spanned(tensor) for name, tensor in tensors.items() if tensor is not None}
        places = {name: place for place, name in enumerate(tensors)}
        self._pairs = [
            (places[one], spans[one], [(places[other], spans[other]) for other in spans if _later(one, other, written)])
            for one in written
            if spans.get(one)
        ]

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        starts = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        for place, span, others in self._pairs:
            start = starts[place]
            end = start + span
            for other, its_span in others:
                its_start = starts[other]
                if its_start < end and start < its_start + its_span:
                    written: Any = tensors[place]
                    if share_memory(written, tensors[other]):  # type: ignore[arg-type]
                        self._fail(place, other, written)

    def _fail(self, place: int, other: int, written: torch.Tensor) -> NoReturn:
        fail(self._names[place], f"a tensor that shares no memory with {self._names[other]}", describe(written))


def check_no_overlap(tensors: Mapping[str, torch.Tensor | None], written: Sequence[str]) -> None:
    """:class:`MemoryOverlap` of these tensors, asked once: for calls whose host time does not count."""
    MemoryOverlap(tensors, written)(*tensors.values())


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors of one device may share a byte.

    True if their ranges of addresses meet, unless both keep to columns of their own of rows of a common length.
    """
    if not one.numel() or not other.numel():
        return False
    distance = other.data_ptr() - one.data_ptr()
    if not -_bytes_spanned(other) < distance < _bytes_spanned(one):
        return False
    dims = [sorted(_dims_in_bytes(tensor)) for tensor in (one, other)]
    for length in {stride for tensor_dims in dims for stride, _ in tensor_dims}:
        widths = [_width_in_rows(tensor_dims, length) for tensor_dims in dims]
        if None not in widths:
            width, its_width = widths
            start = distance % length
            # Columns 0 to width of the one; start to start + its_width, on a circle, of the other.
            if start >= width and start + its_width <= length:  # type: ignore[operator]
                return False
    return True


def _later(one: str, other: str, written: Sequence[str]) -> bool:
    """Each pair once: two written ones are compared when the first is."""
    return one != other and (other not in written or list(written).index(other) > list(written).index(one))


def _dims_in_bytes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that have an extent, and of an element's own bytes."""
    size = tensor.element_size()
    dims = [(step * size, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and step]
    return [(1, size), *dims]


def _bytes_spanned(tensor: torch.Tensor) -> int:
    """From the first to the last byte, both counted."""
    if not tensor.numel():
        return 0
    return 1 + sum(stride * (size - 1) for stride, size in _dims_in_bytes(tensor))


def _width_in_rows(dims: list[tuple[int, int]], length: int) -> int | None:
    """The bytes that a tensor spans of each row of ``length`` bytes; None where its dimensions do not keep to rows."""
    inner = [(stride, size) for stride, size in dims if stride % length]
    width = 1 + sum(stride * (size - 1) for stride, size in inner)
    return width if width <= length else None


@contextmanager
def validate_values(enabled: bool = True) -> Iterator[None]:
    """Check, inside this block, what only device memory tells: lengths, page ids, slots, columns, decays.

    Each checked call copies those tensors to the host and so synchronises once; it raises the same ValueErrors as the
    other checks. Without it kernels clamp such values: a bad one never reads or writes outside its tensors. Values of
    tensors on a CPU, where reading them costs nothing, are checked anyway; ``validate_values(False)`` turns that off.
    Not usable while a CUDA graph is being captured.
    """
    token = _values_are_checked.set(enabled)
    try:
        yield
    finally:
        _values_are_checked.reset(token)


def values_are_checked(device: torch.device | None = None) -> bool:
    """Whether values of tensors on ``device`` are checked: inside :func:`validate_values`, and on a CPU by default.

    Without a device: whether the caller is inside :func:`validate_values`.
    """
    chosen = _values_are_checked.get()
    if chosen is None:
        return device is not None and device.type == "cpu"
    return chosen
