"""FlashMLA's names, in its order of arguments: an engine swaps the import.

It returns what FlashMLA returns, but for lse where a query sees no key: -inf, the logarithm of nothing, for its +inf.
What FlashMLA takes beyond dense bfloat16 and float16 caches raises an error that names the argument. Both of its
interfaces are there: metadata made from lengths, and ``get_mla_metadata()`` without arguments, whose result the first
call fills.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernel_reference.checks import check_bool, check_dense, check_int, describe, fail, known
from tilelang_mla import api, arguments, calls
from tilelang_mla import plan as plans
from tilelang_mla.arguments import Names
from tilelang_mla.schedule import DecodePlan
from tilelang_mla.sparse.api import flash_mla_sparse_fwd

Tensor = torch.Tensor

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

# Integers of a row of FlashMLA's metadata. There are as many rows as parts that run at once, at most one for each
# SM, for which engines allocate; a schedule may have WAVES times as many.
_METADATA_WIDTH = 8
_NAMES = Names(kv="k_cache", seqlens_k="cache_seqlens", dim_nope="head_dim_v", first_part="num_splits")


@dataclass
class FlashMLASchedMeta:
    """How a batch is cut, made from the lengths of the first call that is given it; later calls use it again.

    For one step of decoding, in all its layers. A later call may be of other lengths: results are as right, only less
    balanced. The fields are None until then: tile_scheduler_metadata and num_splits as :func:`get_mla_metadata` makes
    them of lengths, and the order in which parts start.
    """

    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None
    order: Tensor | None = None


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Tensor | FlashMLASchedMeta, Tensor | None]:
    """How a batch is cut over the SMs, for every layer of a step; see :func:`tilelang_mla.plan_decode`.

    Without lengths: (:class:`FlashMLASchedMeta`, None), which the first call that is given it fills.

    Args:
        cache_seqlens: [B] int32, contiguous.
        num_q_tokens_per_head_k: query tokens x query heads of a kv head: Sq * Hq; given with cache_seqlens.
        num_heads_k: kv heads: 1.
        num_heads_q, is_fp8_kvcache, topk: of caches that are not supported yet; num_heads_q is not looked at.

    Returns:
        tile_scheduler_metadata: int32 [parts at once, 8], at most a row for each SM, of which only the
        shape means something; it depends on num_q_tokens_per_head_k and the device alone. num_splits: int32 [B + 1],
        the first part of each sequence. Both can be copied into tensors that a CUDA graph reads.

    Raises TypeError or ValueError, naming the argument, for what does not fit or is not supported.
    """
    _refuse(is_fp8_kvcache=(is_fp8_kvcache, False), topk=(topk, None))
    check_int("num_heads_k", num_heads_k)
    if num_heads_k != 1:
        fail("num_heads_k", "1", num_heads_k)
    if cache_seqlens is None and num_q_tokens_per_head_k is None:
        return FlashMLASchedMeta(), None
    check_dense(cache_seqlens=cache_seqlens)
    check_int("num_q_tokens_per_head_k", num_q_tokens_per_head_k, 1)
    arguments.check_plan_lengths("cache_seqlens", cache_seqlens)  # type: ignore[arg-type]
    made = _made(api.plan_decode(cache_seqlens, num_q_tokens_per_head_k, 1))  # type: ignore[arg-type]
    return made.tile_scheduler_metadata, made.num_splits  # type: ignore[return-value]


def _made(plan: DecodePlan) -> FlashMLASchedMeta:
    rows = plan.tiles.spare_parts // plans.WAVES
    metadata = plan.first_part.new_zeros((rows, _METADATA_WIDTH))
    return FlashMLASchedMeta(metadata, plan.first_part, plan.order)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | FlashMLASchedMeta | None = None,
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
            x heads; both tensors, or a :class:`FlashMLASchedMeta` and None, or neither.
        is_fp8_kvcache: of the k_cache's dtype with indices; without, what is True is not supported.
        indices, topk_length, attn_sink: sparse attention, as there; block_table and cache_seqlens may then be None.
        What else follows is not supported; anything but None raises ValueError.

    Returns:
        out [B, Sq, Hq, head_dim_v] and lse [B, Hq, Sq], natural logarithms in float32. A query that sees no key gives 0
        and -inf (FlashMLA: +inf).

    Raises TypeError or ValueError, naming the argument, as there.
    """
    _refuse(
        extra_k_cache=(extra_k_cache, None), extra_indices_in_kvcache=(extra_indices_in_kvcache, None),
        extra_topk_length=(extra_topk_length, None),
    )  # fmt: skip
    check_bool("causal", causal)
    scale = calls.checked_scale(softmax_scale)
    if indices is not None:
        # A list is cut by its own length: what a schedule says of sequences is not looked at.
        sparse = calls.SparseCall(q, k_cache, indices, topk_length, attn_sink, head_dim_v, scale)
        out, lse = calls.run_sparse(sparse, None, True, None, _NAMES)
        return out, lse  # type: ignore[return-value]
    _refuse(is_fp8_kvcache=(is_fp8_kvcache, False), attn_sink=(attn_sink, None), topk_length=(topk_length, None))
    kept = tile_scheduler_metadata
    if not isinstance(kept, FlashMLASchedMeta):
        made = FlashMLASchedMeta(kept, num_splits)
    elif num_splits is not None:
        fail("num_splits", "None beside a FlashMLASchedMeta, which has its own", describe(num_splits))
    elif kept.num_splits is None:
        made = _made_first(q, cache_seqlens, head_dim_v)  # type: ignore[arg-type]
    else:
        made = kept
    parts = _parts(q, head_dim_v, made)
    call = calls.Call(q, k_cache, cache_seqlens, block_table, head_dim_v, scale, causal)
    out, lse = calls.run_decode(call, None, True, parts, _NAMES)
    if isinstance(kept, FlashMLASchedMeta):
        # Only now: a call that is refused leaves it as it was.
        kept.tile_scheduler_metadata, kept.num_splits = made.tile_scheduler_metadata, made.num_splits
        kept.order = made.order
    return out, lse  # type: ignore[return-value]


def _made_first(q: Tensor, cache_seqlens: Tensor, head_dim_v: int) -> FlashMLASchedMeta:
    """A schedule for a call of these queries."""
    check_dense(q=q, cache_seqlens=cache_seqlens)
    check_int("head_dim_v", head_dim_v)
    if q.ndim != 4 or q.shape[2] < 1:
        fail("q", "[B, Sq, Hq, head_dim_v + dpe] of at least 1 head", describe(q))
    dim_rope = q.shape[3] - head_dim_v
    arguments.check_dims("head_dim_v", "q", head_dim_v, dim_rope)
    arguments.check_plan_lengths("cache_seqlens", cache_seqlens)
    return _made(api.plan_decode(cache_seqlens, q.shape[2], q.shape[1], dim_nope=head_dim_v, dim_rope=dim_rope))


def _parts(q: Tensor, head_dim_v: int, made: FlashMLASchedMeta) -> calls.Parts | None:
    metadata, num_splits = made.tile_scheduler_metadata, made.num_splits
    if metadata is None and num_splits is None:
        return None
    given = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
    for name, tensor in given.items():
        if tensor is None:
            fail(name, "given, as the other of get_mla_metadata's results is", None)
    check_dense(q=q, **given)
    if metadata is None or num_splits is None or metadata.ndim != 2 or metadata.shape[1] != _METADATA_WIDTH:
        fail("tile_scheduler_metadata", f"[parts at once, {_METADATA_WIDTH}] from get_mla_metadata", describe(metadata))
    check_int("head_dim_v", head_dim_v)
    if q.ndim != 4:
        fail("q", "[B, Sq, Hq, head_dim_v + dpe]", describe(q))
    limits, rows = calls.device_limits(q.device), q.shape[1] * q.shape[2]
    # By its own device: where q is elsewhere, that is what is wrong.
    at_once = plans.parts_at_once(rows, calls.device_limits(metadata.device).cores)
    if known(metadata.shape[0] != at_once):
        wanted = f"[{at_once}, {_METADATA_WIDTH}], made for {q.shape[1]} query tokens x {q.shape[2]} heads"
        fail("tile_scheduler_metadata", wanted, describe(metadata))
    tiles = plans.decode_tiles(rows, head_dim_v, q.shape[3] - head_dim_v, None, limits, 1)
    tiles = replace(tiles, num_splits=1, spare_parts=plans.WAVES * metadata.shape[0])
    return num_splits, made.order, tiles


def _refuse(**given: tuple[Any, Any]) -> None:
    """Each (value, the only one supported)."""
    for name, (value, supported) in given.items():
        if value is not supported:
            fail(name, f"{supported}, all that is supported", describe(value))
