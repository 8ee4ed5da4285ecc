"""Sizes and strides as TMA's descriptors can address them."""

from typing import Any

import torch

Tensor = torch.Tensor

# Elements of 16 bits in the 16 bytes that TMA counts in.
LINE = 8


def form_of(sizes: Any, strides: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides, those of dimensions of one element as if it were packed: torch leaves them any."""
    strides = list(strides)
    for i in reversed(range(len(sizes) - 1)):
        if sizes[i] == 1:
            strides[i] = strides[i + 1] * sizes[i + 1]
            strides[i] += -strides[i] % LINE
    return tuple(sizes), tuple(strides)


def packed_form(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """[B, Sq, Hq, D] as [B, Sq x Hq, D], if a TMA descriptor can address it."""
    batch, tokens, heads, size = tensor.shape
    by_batch, by_token, by_head, _ = tensor.stride()
    row = by_head if heads > 1 else by_token
    if tokens > 1 and heads > 1 and by_token != heads * by_head:
        return None
    form = form_of((batch, tokens * heads, size), (by_batch, row, 1))
    return form if is_addressed(form) else None


def is_addressed(form: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether a TMA descriptor can: of an expanded dimension it cannot."""
    return all(stride > 0 and stride % LINE == 0 for stride in form[1][:-1])
