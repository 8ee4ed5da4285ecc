"""Decoding over a latent cache whose tokens the ranks of a process group share.

The latent has one kv head, so that tensor parallelism alone keeps the whole cache on every rank. Here each rank has the
tokens of an ``Interleave`` layout, attends to them with all query heads, and the partial results are exchanged and
merged by their lse; :mod:`kernel_reference.partials` says what each exchange sends. Functions over a
``torch.distributed.ProcessGroup`` (None: the default one). Every rank calls them with the same options and with tensors
of the same shapes. A group of one makes the plain call. Collectives are torch's functional ones; the host waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from kernel_reference.checks import (
    check_bool,
    check_choice,
    check_dense,
    check_dtype,
    check_same_device,
    check_shape,
    describe,
    fail,
    given,
)
from kernel_reference.collectives import world_and_rank
from kernel_reference.partials import EXCHANGES, HEADS, Partial, exchange_partials, gathered_heads
from kernel_reference.sharding import Interleave, check_interleave
from kernel_reference.transforms import refuse_derivatives
from tilelang_mla.api import AttentionResult, flash_mla_with_kvcache
from tilelang_mla.schedule import DecodePlan

Tensor = torch.Tensor
_merge = torch.ops.tilelang_mla.merge.default
Exchange = Literal["all_to_all", "reduce_scatter", "symmetric"]


@overload
def flash_mla_with_kvcache_cp(
    q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor, dim_nope: int, softmax_scale: float | None = None,
    causal: bool = True, *, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Exchange = "all_to_all", return_lse: Literal[False] = False, plan: DecodePlan | None = None,
    visible: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_mla_with_kvcache_cp(
    q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor, dim_nope: int, softmax_scale: float | None = None,
    causal: bool = True, *, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Exchange = "all_to_all", return_lse: Literal[True], plan: DecodePlan | None = None,
    visible: Tensor | None = None,
) -> AttentionResult: ...  # fmt: skip
@overload
def flash_mla_with_kvcache_cp(
    q: Tensor, kv: Tensor, seqlens_k: Tensor, block_table: Tensor, dim_nope: int, softmax_scale: float | None = None,
    causal: bool = True, *, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Exchange = "all_to_all", return_lse: bool, plan: DecodePlan | None = None,
    visible: Tensor | None = None,
) -> Tensor | AttentionResult: ...  # fmt: skip
def flash_mla_with_kvcache_cp(
    q: Tensor,
    kv: Tensor,
    seqlens_k: Tensor,
    block_table: Tensor,
    dim_nope: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    layout: Interleave,
    group: Any,
    heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Exchange = "all_to_all",
    return_lse: bool = False,
    plan: DecodePlan | None = None,
    visible: Tensor | None = None,
) -> Tensor | AttentionResult:
    """:func:`tilelang_mla.flash_mla_with_kvcache` over a cache whose tokens the ranks of a group share.

    Source: Helix parallelism (arXiv 2507.07120), section 2, and the merge of Flash-Decoding
    (https://pytorch.org/blog/flash-decoding/).

    Args:
        q: [B, Sq, Hq / world, dim_nope + dpe], this rank's query heads, those from ``rank * Hq / world`` on; with heads
            "replicated" [B, Sq, Hq, ...], the same on every rank.
        kv, block_table: of this rank's own tokens: position p of its tokens of sequence b, which is token
            ``layout.tokens(n)[p]``, is in page ``block_table[b, p // page_size]``. The new tokens are in the cache
            already, each in that of the rank that owns it.
        seqlens_k: [B] int32, tokens of each sequence on all ranks together; the same on every rank.
        layout: who owns which token, for this process: ``Interleave.of(group, size=..)``.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        heads: whose result a rank gets: "sharded", its own heads', for which q is gathered; or "replicated", all.
        exchange: "all_to_all": partial results, in q's dtype; "reduce_scatter": their weighted sums, in float32, after
            the lse; "symmetric": as all_to_all, written to the peers' memory, which takes GPUs of one host. Call it
            once before a CUDA graph is captured, for its workspace; streams that run beside each other need a group
            each.
        plan: from ``plan_decode(layout.visible(seqlens_k), Hq, Sq)``, this rank's own lengths and all heads, else it is
            refused.
        visible: from ``visible_keys(layout, seqlens_k, Sq, causal)``, which all layers of a step may share; without it
            each call makes it, a dozen small launches.
        dim_nope, softmax_scale, causal, return_lse: as there.

    Returns:
        out [B, Sq, heads, dim_nope]; with return_lse AttentionResult(out, lse [B, heads, Sq]). Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there; layout is of another world or rank;
            "symmetric" where ranks have no symmetric memory.
    """
    check_choice("heads", heads, HEADS)
    check_choice("exchange", exchange, EXCHANGES)
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    world, rank = world_and_rank(group)
    check_interleave(layout, world, rank)
    if world == 1:
        return flash_mla_with_kvcache(
            q, kv, seqlens_k, block_table, dim_nope, softmax_scale, causal, return_lse=return_lse, plan=plan
        )
    tensors = {"q": q, "kv": kv, "seqlens_k": seqlens_k, "block_table": block_table}
    check_dense(**tensors)
    refuse_derivatives(**tensors)
    if q.ndim != 4:
        fail("q", "[B, Sq, Hq, dim_nope + dpe]", describe(q))
    check_dtype("seqlens_k", seqlens_k, torch.int32)
    check_shape("seqlens_k", seqlens_k, (q.shape[0],))
    if visible is not None:
        check_dtype("visible", visible, torch.int32)
        check_shape("visible", visible, tuple(q.shape[:2]))
        check_same_device("visible", visible, "q", q)
    if heads == "sharded":
        q = gathered_heads(q, group, exchange)
    seqlen_q = q.shape[1]
    # Where all query tokens see as much, the kernel that knows one length a sequence.
    of_tokens = causal and seqlen_q > 1
    if visible is None or not seqlen_q:
        visible = visible_keys(layout, seqlens_k, seqlen_q if of_tokens else 1, causal)
    seen = visible if of_tokens else visible[:, 0].contiguous()
    own = flash_mla_with_kvcache(
        q, kv, seen, block_table, dim_nope, softmax_scale, causal=False, return_lse=True, plan=plan
    )
    merged = merge_of_ranks(own, group, heads, exchange)
    return merged if return_lse else merged.out


def flash_mla_sparse_with_kvcache_cp(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    seqlens_k: Tensor,
    block_table: Tensor,
    dim_nope: int,
    softmax_scale: float | None = None,
    *,
    layout: Interleave,
    group: Any,
    heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Exchange = "all_to_all",
    attn_sink: Tensor | None = None,
) -> AttentionResult:
    """Attention to listed tokens of a cache that the ranks of a group share: sparse decoding.

    A rank attends to those tokens of a list that it holds, and the partial results are merged. Lists are positions of
    the whole sequences, as :func:`tilelang_mla.index_topk` gives them: the same on every rank.

    Args:
        q, kv, block_table, seqlens_k, dim_nope, softmax_scale, layout, group, heads, exchange: as
            :func:`flash_mla_with_kvcache_cp` takes them; kv is of q's dtype or of records.
        positions: [B, Sq, topk] int32, the same on every rank: the tokens that each query token attends to. What is not
            from 0 to ``seqlens_k - 1``, -1 say, is none; a list names no token behind the query's own.
        attn_sink: float32, of the heads that q has: a logit that takes part in the softmax and has no value; lse does
            not know of it.

    Returns:
        AttentionResult(out [B, Sq, heads, dim_nope], lse [B, heads, Sq]). Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there.
    """
    check_choice("heads", heads, HEADS)
    check_choice("exchange", exchange, EXCHANGES)
    check_interleave(layout, *world_and_rank(group))
    tensors = {"q": q, "kv": kv, "positions": positions, "seqlens_k": seqlens_k, "block_table": block_table}
    check_dense(**tensors, **given(attn_sink=attn_sink))
    refuse_derivatives(**tensors, **given(attn_sink=attn_sink))
    if q.ndim != 4 or kv.ndim != 4:
        fail("q, kv", "[B, Sq, Hq, dim_nope + dpe] and [pages, page_size, 1, ..]", f"{describe(q)}, {describe(kv)}")
    for name, tensor in (("positions", positions), ("seqlens_k", seqlens_k), ("block_table", block_table)):
        check_dtype(name, tensor, torch.int32)
    if positions.ndim != 3:
        fail("positions", "[B, Sq, topk]", describe(positions))
    check_shape("positions", positions, (*q.shape[:2], positions.shape[2]))
    check_shape("seqlens_k", seqlens_k, (q.shape[0],))
    if attn_sink is not None:
        check_shape("attn_sink", attn_sink, (q.shape[2],))
    if heads == "sharded":
        q = gathered_heads(q, group, exchange)
    batch, seqlen_q = q.shape[:2]
    rows, counts = own_rows(layout, positions, seqlens_k, block_table, kv.shape[:2])
    # Each query token is a sequence of its own, which walks as many entries as this rank has of its list.
    own = flash_mla_with_kvcache(
        q.flatten(0, 1)[:, None], kv, None, None, dim_nope, softmax_scale, return_lse=True,
        indices=rows.flatten(0, 1)[:, None], topk_length=counts.flatten(),
    )  # fmt: skip
    own = AttentionResult(
        own.out[:, 0].unflatten(0, (batch, seqlen_q)), own.lse[..., 0].unflatten(0, (batch, seqlen_q)).transpose(1, 2)
    )
    merged = own
    if layout.world > 1:
        merged = merge_of_ranks(own, group, heads, exchange)
    if attn_sink is None:
        return merged
    # Of all keys together: no rank may count it for itself.
    share = torch.sigmoid(merged.lse - attn_sink[:, None]).transpose(1, 2)
    return AttentionResult((merged.out.float() * share[..., None]).to(merged.out.dtype), merged.lse)


def own_rows(
    layout: Interleave, positions: Tensor, seqlens_k: Tensor, block_table: Tensor, pages: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """A rank's part of lists of tokens: rows of its cache, those first and -1 behind, and how many; int32 both.

    positions: [B, Sq, topk] of whole sequences of ``seqlens_k`` [B]; pages: (pages, page_size) of the rank's cache.

    >>> table = torch.tensor([[4, 2]], dtype=torch.int32)
    >>> lengths = torch.tensor([9], dtype=torch.int32)
    >>> own_rows(Interleave(2, 1), torch.tensor([[[0, 1, 7, -1]]], dtype=torch.int32), lengths, table, (8, 2))
    (tensor([[[8, 5, -1, -1]]], dtype=torch.int32), tensor([[2]], dtype=torch.int32))
    """
    place = layout.visible(positions)
    is_own = (layout.visible(positions + 1) > place) & (positions >= 0) & (positions < seqlens_k[:, None, None])
    number, size = pages
    columns = block_table.shape[1]
    page = place // size
    is_own &= page < columns
    if columns == 0:
        return torch.full_like(positions, -1), is_own.sum(-1, dtype=torch.int32)
    found = block_table.gather(1, page.clamp(max=columns - 1).flatten(1).long()).view_as(page)
    is_own &= (found >= 0) & (found < number)
    row = torch.where(is_own, found * size + place % size, -1)
    most = positions.shape[2]
    behind = torch.where(is_own, is_own.cumsum(-1) - 1, most)
    rows = row.new_full((*row.shape[:2], most + 1), -1).scatter_(2, behind, row)
    return rows[..., :most].contiguous(), is_own.sum(-1, dtype=torch.int32)


def merge_of_ranks(
    own: AttentionResult, group: Any, heads: str = "sharded", exchange: str = "all_to_all"
) -> AttentionResult:
    """Exchange the partial results of all ranks, out [B, Sq, Hq, dim_nope] and lse [B, Hq, Sq], and merge them.

    What :func:`flash_mla_with_kvcache_cp` does behind its kernel; options as there.
    """
    batch, seqlen_q = own.out.shape[:2]
    merged = exchange_partials(
        Partial(own.out.flatten(0, 1), own.lse.transpose(1, 2).flatten(0, 1)), group, heads=heads, exchange=exchange,
        merge=_merged,
    )  # fmt: skip
    return AttentionResult(
        merged.out.unflatten(0, (batch, seqlen_q)), merged.lse.unflatten(0, (batch, seqlen_q)).transpose(1, 2)
    )


def _merged(out: Tensor, lse: Tensor) -> Partial:
    """:func:`kernel_reference.partials.merge_partials` in one launch: parts [world, N, H, D] and [world, N, H]."""
    _, rows, heads, dim = out.shape
    whole, whole_lse = out.new_empty(rows * heads, dim), lse.new_empty(rows * heads)
    _merge(out.flatten(1, 2), lse.flatten(1, 2), whole, whole_lse)
    return Partial(whole.unflatten(0, (rows, heads)), whole_lse.unflatten(0, (rows, heads)))


def visible_keys(layout: Interleave, seqlens_k: Tensor, seqlen_q: int, causal: bool = True) -> Tensor:
    """How many of this rank's keys each query token sees, int32 [B, Sq]: what a rank's call takes for ``seqlens_k``.

    Query token j of Sq sees the first ``seqlens_k - Sq + j + 1`` tokens of all ranks, without causal all
    ``seqlens_k`` [B]. A length below 0, which cannot be, stays below 0.

    >>> visible_keys(Interleave(world=2, rank=1), torch.tensor([9], dtype=torch.int32), 3)
    tensor([[3, 4, 4]], dtype=torch.int32)
    """
    behind = torch.arange(seqlen_q - 1, -1, -1, dtype=seqlens_k.dtype, device=seqlens_k.device)
    tokens = seqlens_k[:, None] - (behind if causal else torch.zeros_like(behind))
    return torch.where(seqlens_k[:, None] < 0, -1, layout.visible(tokens))
