"""Prefill of few tiles: several programs share a tile's keys, and a kernel merges their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def prefill_in_parts(attend: Callable[..., object], merge: Callable[..., object], parts: int) -> Callable[..., None]:
    """What is called as the kernel is whose programs have whole tiles. Partial results are float32."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, begins: Tensor, begins_k: Tensor, out: Tensor, lse: Tensor, taken: Tensor,
        scale: float, causal: int, num_slots: int, wants_lse: int, programs: int, heads_each: int,
    ) -> None:  # fmt: skip
        (tokens, heads, dim), device = out.shape, out.device

        def make(*sizes: int, dtype: torch.dtype = torch.float32) -> Any:
            return torch.empty(sizes, dtype=dtype, device=device)

        partial, part_lse = make(tokens, heads * parts, dim), make(tokens, heads * parts)
        numbers = (scale, causal, num_slots, 1, programs, heads_each * parts)
        attend(q, k, v, begins, begins_k, partial, part_lse.t(), taken, *numbers)
        # A row is a token and a head, whose parts lie side by side.
        merged = out if out.is_contiguous() else make(tokens, heads, dim, dtype=out.dtype)
        rows = make(tokens, heads)
        merge(
            partial.view(tokens * heads, parts, dim).transpose(0, 1), part_lse.view(tokens * heads, parts).t(),
            merged.view(tokens * heads, dim), rows.view(tokens * heads),
        )  # fmt: skip
        if merged is not out:
            out.copy_(merged)
        if wants_lse:
            lse.copy_(rows.t())

    return run
