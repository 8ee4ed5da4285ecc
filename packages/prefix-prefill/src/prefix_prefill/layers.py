"""Layers of models whose ``forward`` may be put in place of a library's: they hold nothing of their own."""

from __future__ import annotations

from typing import Any

import torch

from prefix_prefill.api import prefix_prefill

Tensor = torch.Tensor


class PagedAttention(torch.nn.Module):
    """``forward`` of a layer that attends over a paged cache: new tokens to cached ones and to those before them."""

    can_torch_compile = True

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        max_seqlen_q: int,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """:func:`prefix_prefill.prefix_prefill` over pages [blocks, page, Hkv, D]."""
        return prefix_prefill(
            q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k, max_seqlen_q=max_seqlen_q,
            softmax_scale=softmax_scale,
        )  # fmt: skip
