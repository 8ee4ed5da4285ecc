"""vLLM's backend FLASHMLA_SPARSE with these kernels for caches of 16 bits; see :mod:`tilelang_mla.integrations.vllm`.

vLLM decides by the backend's name how it lays out the cache and which prompts it attends to with separate heads, so the
name stays its own, and so do the indexer, its lists and the metadata. Caches in records of 8 bits are decoded by vLLM's
FlashMLA; of their prompts, which it converts to 16 bits, the attention is these kernels' too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl

from tilelang_mla.sparse.api import flash_mla_sparse_fwd

Tensor = torch.Tensor


class SparseImplementation(FlashMLASparseImpl):
    """The attention of one layer to the keys that its indexer lists, with as many heads as there are."""

    def _bf16_flash_mla_kernel(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        topk_indices: Tensor,
        topk_length: Tensor | None = None,
        actual_num_heads: int | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Out [T, H, latent] and lse [T, H] of absorbed queries [T, H or more, latent + rope].

        kv_c_and_k_pe_cache: rows, any leading dimensions; topk_indices [T, topk]: rows of it, -1 is no key; out: the
        memory of the result, [T, H or more, latent].
        """
        # vLLM pads heads for its own kernel.
        heads = q.shape[1] if actual_num_heads is None else actual_num_heads
        rows = kv_c_and_k_pe_cache.view(-1, 1, kv_c_and_k_pe_cache.shape[-1])
        found = flash_mla_sparse_fwd(
            q[:, :heads], rows, topk_indices.view(len(q), 1, -1), self.softmax_scale, self.kv_lora_rank,
            topk_length=topk_length, out=None if out is None else out[:, :heads],
        )  # fmt: skip
        return found.out, found.lse


class SparseBackend(FlashMLASparseBackend):
    """What vLLM asks before it takes the backend: as its own, on sm_90."""

    @staticmethod
    def get_impl_cls() -> type[SparseImplementation]:
        return SparseImplementation

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == 9)
