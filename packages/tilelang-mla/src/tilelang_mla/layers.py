"""Layers of models whose ``forward`` may be put in place of a library's: they hold nothing of their own."""

from __future__ import annotations

from typing import Any

import torch

from tilelang_mla.api import flash_mla_with_kvcache

Tensor = torch.Tensor


class LatentAttention(torch.nn.Module):
    """``forward`` of a layer that decodes over a paged latent cache (multi-head latent attention, absorbed)."""

    can_torch_compile = True

    def forward(
        self: Any,
        q: Tensor,
        kv: Tensor,
        seqlens_k: Tensor,
        block_table: Tensor,
        dim_nope: int,
        softmax_scale: float | None = None,
        causal: bool = True,
    ) -> Tensor:
        """:func:`tilelang_mla.flash_mla_with_kvcache`: q [B, T, H, dim] over pages [blocks, page, 1, dim]."""
        return flash_mla_with_kvcache(q, kv, seqlens_k, block_table, dim_nope, softmax_scale, causal)
