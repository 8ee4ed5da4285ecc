"""Whether a kernel's arguments come in the same groups from addresses as from tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def checked(
    given: tuple[Any, ...], group: Callable[..., tuple[Any, ...]] | None, tensors: Sequence[torch.Tensor | None]
) -> tuple[Any, ...]:
    """What ``group`` made of these tensors; a TypeError where it makes other groups of their addresses.

    Later launches are given those alone, by C, which then has arguments that the kernel was not compiled for. Looked at
    before the first launch, so that a mistake is told on a machine without a GPU too.
    """
    if group is None:
        return given
    wanted = _nesting(given)
    found = _nesting(group(*[x if x is None else x.data_ptr() for x in tensors]))
    if found != wanted:
        raise TypeError(f"group must make the same arguments of addresses as of tensors, {wanted}, was {found}")
    return given


def _nesting(argument: Any) -> Any:
    """Tuples in their places, and whether all else is given."""
    return tuple([_nesting(x) for x in argument]) if isinstance(argument, tuple) else argument is not None
