"""Layers of models whose ``forward`` may be put in place of a library's: they hold nothing of their own."""

from __future__ import annotations

from typing import Any

import torch

from blocksparse_attn.selected.api import selected_attention

Tensor = torch.Tensor


class SelectedAttention(torch.nn.Module):
    """``forward`` of a layer whose tokens attend to the blocks of a paged cache that are listed for them."""

    can_torch_compile = True

    def forward(
        self: Any,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        indices: Tensor,
        block_size: int,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """:func:`blocksparse_attn.selected_attention` over pages [blocks, page, Hkv, D]."""
        return selected_attention(
            q, k_cache, v_cache, indices, block_size=block_size, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k, softmax_scale=softmax_scale,
        )  # fmt: skip
