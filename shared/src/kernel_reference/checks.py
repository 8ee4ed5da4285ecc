"""Argument errors that read alike in every package, and the switch for checks that must look at device memory.

An error names the argument, what it must be and what it was: ``mixed_ba must be on cuda:0, got cpu``. Functions named
``check_`` raise it or return; those named ``as_`` also return the argument as an op takes it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kernel_reference.errors import fail as fail
from kernel_reference.memory import MemoryOverlap as MemoryOverlap
from kernel_reference.memory import check_elements_apart as check_elements_apart
from kernel_reference.memory import check_no_overlap as check_no_overlap
from kernel_reference.memory import share_memory as share_memory
from kernel_reference.transforms import check_no_tangents as check_no_tangents
from kernel_reference.words import describe as describe

_values_are_checked: ContextVar[bool | None] = ContextVar("kernel_reference_values_are_checked", default=None)

# No two tokens of a sequence are further apart: a window that reaches so far is none.
_FARTHEST = 2**31 - 1
# Kernels take numbers in float32, in which a larger one is infinite.
_LARGEST = torch.finfo(torch.float32).max

REFUSALS = (RuntimeError, AttributeError, TypeError, IndexError, ZeroDivisionError)
"""What torch and tensors raise, in words of their own, over arguments of the wrong kind or rank, or of no elements.

Where host time counts, a public function calls its op at once, and checks kinds only after one of these.
"""


# Sizes


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds for certain.

    While torch.compile traces, sizes may be symbols that only the device knows, such as a number of tokens. What they
    leave open counts as False here, installs no guard, and is asked again when the op runs. Write a check so that the
    condition is what must not be: ``if known(k.shape[0] != q.shape[0]): fail(...)``.
    """
    if not (torch.compiler.is_compiling() or isinstance(condition, torch.SymBool)):
        # Of NumPy's integers it is one of NumPy's.
        return bool(condition)
    # Torch imports it for itself when it makes symbolic sizes.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def differ(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape is :func:`known` to be another: of another rank, or of another size somewhere."""
    return len(shape) != len(wanted) or any([known(one != other) for one, other in zip(shape, wanted, strict=True)])


# Numbers, options


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


def check_int(name: str, number: Any, at_least: int | None = None, at_most: int | None = None) -> int:
    """``number`` as an int (:func:`as_int`), within the bounds that are given.

    >>> check_int("max_seqlen_q", -1, 0)
    Traceback (most recent call last):
    ValueError: max_seqlen_q must be at least 0, got -1
    """
    found = as_int(name, number)
    low = at_least is not None and known(found < at_least)
    if low or (at_most is not None and known(found > at_most)):
        if at_least is not None and at_most is not None:
            fail(name, f"from {at_least} to {at_most}", found)
        fail(name, f"at least {at_least}" if low else f"at most {at_most}", found)
    return found


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        fail(name, "a bool", describe(value), TypeError)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless a string option is one of its choices: TypeError if it is no string, else ValueError.

    >>> check_choice("page_layout", "NDH", ("NHD", "HND"))
    Traceback (most recent call last):
    ValueError: page_layout must be one of "NHD", "HND", got 'NDH'
    """
    wanted = "one of " + ", ".join([f'"{choice}"' for choice in choices])
    if not isinstance(value, str):
        fail(name, wanted, describe(value), TypeError)
    if value not in choices:
        fail(name, wanted, repr(value))


def check_float(name: str, number: object, wanted: str = "a float") -> None:
    """An int or a float, finite in float32. That of a symbolic one is checked when the op runs."""
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
        fail(name, wanted, describe(number), TypeError)
    # Dynamo takes symbolic floats for floats, and cannot trace math.isfinite of one.
    if not torch.compiler.is_compiling() and isinstance(number, (int, float)):
        if isinstance(number, float) and not math.isfinite(number):
            fail(name, "finite", number)
        if abs(number) > _LARGEST:
            fail(name, f"at most {_LARGEST!r}, the largest float32, in magnitude", number)


def as_float(name: str, number: float, wanted: str = "a float") -> float:
    """The number of a public function: torch would take a tensor for one, and wait for the device to tell it.

    A float passes at once; whether it is finite the op's own :func:`check_float` says.
    """
    if type(number) is not float:
        check_float(name, number, wanted)
    return number


def check_window(left: int, right: int, name: str = "window") -> None:
    """Raise ValueError unless both are tokens that a window reaches to, or -1 (unlimited)."""
    if left < -1 or right < -1:
        fail(name, "None or (left, right) of -1 (unlimited) or more", (left, right))


def as_window(window: Any, causal: bool = True, name: str = "window") -> tuple[int, int]:
    """What a query sees to its left and right, -1 without limit, causality in it.

    window: None or (left, right). Causal, nothing to the right is seen whatever ``right`` is.

    >>> as_window(None), as_window((127, 5)), as_window((127, 5), causal=False)
    ((-1, 0), (127, 0), (127, 5))
    """
    if window is None:
        return -1, 0 if causal else -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        fail(name, "None or (left, right)", describe(window), TypeError)
    left, right = [as_int(name, side) for side in window]
    check_window(left, right, name)
    left, right = -1 if left >= _FARTHEST else left, -1 if right >= _FARTHEST else right
    return left, 0 if causal else right


def as_splits(num_splits: Any, name: str = "num_splits") -> int:
    """In how many parts keys are cut as an op takes it: an int of 1 or more, and 0 for None, as the plan has it."""
    return 0 if num_splits is None else check_int(name, num_splits, 1)


# Tensors


def given(**arguments: Any) -> dict[str, Any]:
    """Those of the arguments that are not None."""
    return {name: argument for name, argument in arguments.items() if argument is not None}


def check_tensors(**tensors: object) -> None:
    """Raise TypeError unless each of these is a tensor: not a list, nor an array of another library."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            fail(name, "a tensor", describe(tensor), TypeError)


def check_dense(**tensors: object) -> None:
    """Raise TypeError unless each is a dense (strided) tensor, which alone has memory that a kernel can address."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            fail(name, "a torch.Tensor", describe(tensor), TypeError)
        if tensor.layout != torch.strided:
            fail(name, "a dense (strided) tensor", describe(tensor), TypeError)


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], hint: str = "") -> None:
    """Raise ValueError if a tensor is :func:`known` to be of another shape. ``hint`` is added to what is wanted."""
    if differ(tensor.shape, shape):
        fail(name, f"[{', '.join(map(str, shape))}]{hint}", describe(tensor))


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless a tensor's dtype is one of these.

    >>> check_dtype("slots", torch.empty(3), torch.int32, torch.int64)
    Traceback (most recent call last):
    TypeError: slots.dtype must be int32 or int64, got torch.float32
    """
    if tensor.dtype not in dtypes:
        *others, last = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        fail(f"{name}.dtype", f"{', '.join(others)} or {last}" if others else last, tensor.dtype, TypeError)


def check_same_dtype(name: str, tensor: torch.Tensor, as_in: str, other: torch.Tensor) -> None:
    """Raise TypeError unless a tensor has the dtype of another, which the error calls ``as_in``."""
    if tensor.dtype != other.dtype:
        fail(f"{name}.dtype", f"{other.dtype} as that of {as_in} is", tensor.dtype, TypeError)


def check_same_device(name: str, tensor: torch.Tensor, as_in: str, other: torch.Tensor) -> None:
    """Raise ValueError unless a tensor is where another is, which the error calls ``as_in``."""
    if tensor.device != other.device:
        fail(f"{name}.device", f"{other.device} as {as_in} is", tensor.device)


# Values


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
