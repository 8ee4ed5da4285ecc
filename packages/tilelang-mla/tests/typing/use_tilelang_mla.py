"""A user's code, for `nox -s types` to check with mypy in strict mode; it is never run.

Every file of such a folder has a name of its own, as mypy takes them together.
"""

from typing import Any, assert_type

import torch

from kernel_reference.sharding import Interleave
from tilelang_mla import (
    AttentionResult,
    DecodePlan,
    DecodeTiles,
    IndexPlan,
    IndexViews,
    PrefillPlan,
    SparseResult,
    dequantize_kv,
    flash_mla,
    flash_mla_sparse_fwd,
    flash_mla_varlen_func,
    flash_mla_with_kvcache,
    get_splits,
    index_cache_views,
    index_lengths,
    index_scores,
    index_topk,
    plan_decode,
    quantize_index_k,
    quantize_kv,
)
from tilelang_mla.parallel import flash_mla_sparse_with_kvcache_cp, flash_mla_with_kvcache_cp

q, k = torch.randn(2, 20, 4, 192, dtype=torch.bfloat16)
v = torch.randn(20, 4, 128, dtype=torch.bfloat16)
cu_seqlens = torch.tensor([0, 5, 20], dtype=torch.int32)
kv = torch.randn(4, 64, 1, 576, dtype=torch.bfloat16)
queries = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
lengths = torch.tensor([70, 3], dtype=torch.int32)
block_table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def prefill(with_lse: bool) -> torch.Tensor:
    """The type of a result follows from ``return_lse``."""
    assert_type(flash_mla_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 15, 15), torch.Tensor)
    assert_type(flash_mla_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 15, 15, 0.1, return_lse=False), torch.Tensor)
    out, lse = flash_mla_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=15, max_seqlen_k=15, softmax_scale=0.1, causal=False,
        out=torch.empty_like(v), return_lse=True, plan=PrefillPlan(128, 64, 2),
    )  # fmt: skip
    assert_type(lse, torch.Tensor)
    either = flash_mla_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 15, 15, return_lse=with_lse)
    assert_type(either, torch.Tensor | AttentionResult)
    return out


def decode(with_lse: bool) -> torch.Tensor:
    """With a plan and without, and a static number of parts."""
    plan = plan_decode(lengths, 16, max_seqlen_k=128)
    assert_type(plan, DecodePlan)
    assert_type(plan.tiles, DecodeTiles)
    assert_type(flash_mla_with_kvcache(queries, kv, lengths, block_table, 512, plan=plan), torch.Tensor)
    result = flash_mla_with_kvcache(queries, kv, lengths, block_table, 512, 0.1, True, return_lse=True)
    assert_type(result, AttentionResult)
    either = flash_mla_with_kvcache(queries, kv, lengths, block_table, 512, return_lse=with_lse)
    assert_type(either, torch.Tensor | AttentionResult)
    assert_type(get_splits(2, 16, 1, 70), int)
    flash_mla_with_kvcache(queries, kv, lengths, block_table, 512, cache_seqlens=lengths)  # type: ignore[call-overload]
    return result.out


def listed() -> torch.Tensor:
    """Sparse prefill."""
    indices = torch.zeros(2, 1, 8, dtype=torch.int32)
    assert_type(flash_mla_sparse_fwd(queries[:, 0], kv[0], indices, 0.1, plan=DecodeTiles(64, 64, 2)), SparseResult)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        queries[:, 0], kv[0], indices, sm_scale=0.1, topk_length=lengths
    )
    assert_type(lse, torch.Tensor)
    assert_type(max_logits, torch.Tensor)
    return out


def drop_in() -> torch.Tensor:
    """FlashMLA's names, by both of its interfaces."""
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, 16, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        queries, kv, block_table, lengths, 512, metadata, num_splits, softmax_scale=0.1, causal=True
    )
    assert_type(lse, torch.Tensor)
    made, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(queries, kv, block_table, cache_seqlens=lengths, head_dim_v=512,
                                     tile_scheduler_metadata=made)  # fmt: skip
    return out


def indexed(q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Keys of 8 bits are written, scored and listed; the latents of those listed are read back."""
    cache = quantize_index_k(k_index)
    assert_type(index_cache_views(cache), IndexViews)
    seen = index_lengths(lengths, num_tokens=2)
    scores = index_scores(q_index, cache, weights, seen, block_table, plan=IndexPlan(1, 64, 4, 1, 8))
    assert_type(index_topk(scores, seen, 2048, block_table=block_table, page_size=64), torch.Tensor)
    quantize_kv(kv, "e5m2")  # type: ignore[arg-type]
    return dequantize_kv(quantize_kv(kv, "656"), "656", dtype=torch.float16)


def over_ranks(group: Any, with_lse: bool) -> AttentionResult:
    """Tokens of the cache that ranks share."""
    layout = Interleave.of(group, size=64)
    assert_type(
        flash_mla_with_kvcache_cp(queries, kv, lengths, block_table, 512, layout=layout, group=group), torch.Tensor
    )
    either = flash_mla_with_kvcache_cp(
        queries, kv, lengths, block_table, 512, layout=layout, group=group, return_lse=with_lse
    )
    assert_type(either, torch.Tensor | AttentionResult)
    return flash_mla_sparse_with_kvcache_cp(queries, kv, lengths, lengths, block_table, 512, layout=layout, group=group)
