"""The attention of MiniMax-M3's layers in vLLM, by this package; see :mod:`blocksparse_attn.integrations.vllm`.

Where vLLM would take its Triton kernels, as it does on GPUs before sm_100, these take their place; projections, caches,
the indexer and the metadata stay vLLM's. Its cache of a layer is [pages, Hkv, 128, 2 D]: keys and values side by side,
of which the kernels take slices as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common import sparse_attention

from blocksparse_attn.selected.api import selected_attention
from kernel_reference.checks import fail

Tensor = torch.Tensor

FP8 = ("fp8", "fp8_e4m3")
THEIRS = "MiniMaxM3SparseTritonImpl"


def take_over() -> None:
    """Layers that are made from now on take :class:`Implementation` where they would take vLLM's Triton kernels."""
    # vLLM looks the class up by this name when it makes a layer: it has no registry of these.
    setattr(sparse_attention, THEIRS, Implementation)


class Implementation(sparse_attention.MiniMaxM3SparseTritonImpl):
    """The attention of one layer: of what decodes, drafts too, in one launch, and of prompts and chunks in another."""

    def forward(
        self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, *, query_fp8: Tensor | None = None
    ) -> Tensor:
        """Attention of query [T, Hq * D] to the selected blocks, into output, which is returned.

        Raises:
            ValueError: the query is in 8 bits.
        """
        if query_fp8 is not None:
            fail("query_fp8", "None", "a tensor")
        steps = get_forward_context().attn_metadata
        if not isinstance(steps, dict):
            # vLLM measures its memory before there are caches.
            return output
        is_fp8 = self.kv_cache_dtype in FP8
        if kv_cache.element_size() == 1 and not is_fp8:
            # Of 8 bits the kernels read e4m3 alone.
            return super().forward(layer, query, kv_cache, output)
        step = steps[layer.layer_name]
        tokens, decoding = step.num_actual_tokens, step.num_decode_tokens
        q, out = (x[:tokens].view(tokens, self.num_heads, self.head_size) for x in (query, output))
        indices = layer.topk_indices_buffer[:tokens]
        cache = kv_cache.view(torch.float8_e4m3fn) if is_fp8 else kv_cache
        keys, values = cache.split(self.head_size, dim=-1)
        scales = {"k_scale": layer._k_scale.view(1), "v_scale": layer._v_scale.view(1)} if is_fp8 else {}

        def attend(rows: slice, cu_seqlens_q: Tensor, part: Any) -> None:
            selected_attention(
                q[rows], keys, values, indices[rows], block_size=self.block_size, block_table=part.block_table,
                cu_seqlens_q=cu_seqlens_q, seqlens_k=part.seq_lens, page_layout="HND", softmax_scale=self.scale,
                out=out[rows], **scales,
            )  # fmt: skip

        if step.num_decodes:
            # Tokens of every sequence alike, which are the batch's first.
            each = step.decode.decode_query_len
            starts = torch.arange(0, decoding + 1, each, dtype=torch.int32, device=query.device)
            attend(slice(decoding), starts, step.decode)
        if step.num_prefills:
            attend(slice(decoding, tokens), step.prefill.cu_seqlens_q, step.prefill)
        return output
