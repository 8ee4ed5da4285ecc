"""How an error describes what an argument was; ``checks`` offers it to the packages."""

from __future__ import annotations

import torch

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
