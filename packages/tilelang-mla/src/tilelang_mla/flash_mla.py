"""FlashMLA's names, in its order of arguments: an engine swaps the import.

It returns what FlashMLA returns, but for lse where a query sees no key: -inf, the logarithm of nothing, for its +inf.
What FlashMLA takes beyond dense bfloat16 and float16 caches raises an error that names the argument.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import describe, fail
from tilelang_mla import api
from tilelang_mla import plan as plans
from tilelang_mla.arguments import Names, check_bool, check_int, check_tensors
from tilelang_mla.plan import DecodeTiles

Tensor = torch.Tensor

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

# Integers of a row of FlashMLA's metadata.
_METADATA_WIDTH = 8
_NAMES = Names(kv="k_cache", dim_nope="head_dim_v", first_part="num_splits")


def get_mla_metadata(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """How a batch is cut over the multiprocessors, for every layer of a step; see :func:`tilelang_mla.plan_decode`.

    Args:
        cache_seqlens: [B] int32, contiguous.
        num_q_tokens_per_head_k: query tokens x query heads of a kv head: Sq * Hq.
        num_heads_k: kv heads: 1.
        num_heads_q, is_fp8_kvcache, topk: of caches that are not supported yet; num_heads_q is not looked at.

    Returns:
        tile_scheduler_metadata: int32 [spare_parts, 8], of which only the shape, the parts of the grid beyond one a
        sequence, means something; it depends on num_q_tokens_per_head_k and the device alone. num_splits: int32
        [B + 1], the first part of each sequence. Both can be copied into tensors that a CUDA graph reads.

    Raises TypeError or ValueError, naming the argument, for what does not fit or is not supported.
    """
    check_int("num_q_tokens_per_head_k", num_q_tokens_per_head_k, 1)
    check_int("num_heads_k", num_heads_k)
    if num_heads_k != 1:
        fail("num_heads_k", "1", num_heads_k)
    _refuse(is_fp8_kvcache=(is_fp8_kvcache, False), topk=(topk, None))
    tiles, first_part, _ = api.plan_decode(cache_seqlens, num_q_tokens_per_head_k, 1)
    metadata = torch.zeros(tiles.spare_parts, _METADATA_WIDTH, dtype=torch.int32, device=cache_seqlens.device)
    return metadata, first_part


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | None = None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`tilelang_mla.flash_mla_with_kvcache` as FlashMLA calls it.

    Args:
        q: [B, Sq, Hq, head_dim_v + dpe]; k_cache: [pages, page_size, 1, head_dim_v + dpe]; block_table, cache_seqlens,
            softmax_scale and causal: as there. head_dim_v: dim_nope there.
        tile_scheduler_metadata, num_splits: from :func:`get_mla_metadata`, made for as many sequences and query tokens
            x heads; both or neither.
        is_fp8_kvcache and what follows it: not supported; anything but what stands above raises ValueError.

    Returns:
        out [B, Sq, Hq, head_dim_v] and lse [B, Hq, Sq], natural logarithms in float32. A query that sees no key gives 0
        and -inf (FlashMLA: +inf).

    Raises TypeError or ValueError, naming the argument, as there.
    """
    _refuse(
        is_fp8_kvcache=(is_fp8_kvcache, False), indices=(indices, None), attn_sink=(attn_sink, None),
        extra_k_cache=(extra_k_cache, None), extra_indices_in_kvcache=(extra_indices_in_kvcache, None),
        topk_length=(topk_length, None), extra_topk_length=(extra_topk_length, None),
    )  # fmt: skip
    check_bool("causal", causal)
    scale = api.checked_scale(softmax_scale)
    parts = _parts(q, head_dim_v, tile_scheduler_metadata, num_splits)
    out, lse = api.run_decode(
        q, k_cache, cache_seqlens, block_table, head_dim_v, scale, causal, None, True, parts, _NAMES
    )
    return out, lse


def _parts(q: Tensor, head_dim_v: int, metadata: Tensor | None, num_splits: Tensor | None) -> api.Parts | None:
    if metadata is None and num_splits is None:
        return None
    given = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
    for name, tensor in given.items():
        if tensor is None:
            fail(name, "given, as the other of get_mla_metadata's results is", None)
    check_tensors(q=q, **given)
    if metadata is None or num_splits is None or metadata.ndim != 2 or metadata.shape[1] != _METADATA_WIDTH:
        fail("tile_scheduler_metadata", f"[spare_parts, {_METADATA_WIDTH}] from get_mla_metadata", describe(metadata))
    check_int("head_dim_v", head_dim_v)
    if q.ndim != 4:
        fail("q", "[B, Sq, Hq, head_dim_v + dpe]", describe(q))
    limits = api.device_limits(q.device)
    made = plans.decode_tiles(q.shape[1] * q.shape[2], head_dim_v, q.shape[3] - head_dim_v, None, limits, 1)
    tiles = DecodeTiles(made.block_m, made.block_n, made.num_stages, 1, metadata.shape[0])
    return num_splits, None, tiles.as_ints()


def _refuse(**given: tuple[Any, Any]) -> None:
    """Each (value, the only one supported)."""
    for name, (value, supported) in given.items():
        if value is not supported:
            fail(name, f"{supported}, all that is supported", describe(value))
