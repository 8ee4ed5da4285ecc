"""Argument errors that read alike in every package, and the switch for checks that must look at device memory.

An error names the argument, what it must be and what it was: ``mixed_ba must be on cuda:0, got cpu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

_values_are_checked: ContextVar[bool] = ContextVar("kernel_reference_values_are_checked", default=False)


def fail(name: str, wanted: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise ``error`` saying that argument ``name`` must be ``wanted`` but was ``got``.

    ``error`` is TypeError for an argument of the wrong kind, ValueError for one of the right kind with a wrong value.
    """
    raise error(f"{name} must be {wanted}, got {got}")


@contextmanager
def validate_values() -> Iterator[None]:
    """Check, inside this block, what only device memory tells: lengths, page ids, slots, columns, decays.

    Each checked call copies those tensors to the host and so synchronises once; it raises the same ValueErrors as the
    other checks. Outside the block kernels clamp such values: a bad one never reads or writes outside its tensors.
    Not usable while a CUDA graph is being captured.
    """
    token = _values_are_checked.set(True)
    try:
        yield
    finally:
        _values_are_checked.reset(token)


def values_are_checked() -> bool:
    """Whether the caller is inside :func:`validate_values`."""
    return _values_are_checked.get()
