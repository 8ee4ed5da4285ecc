"""Context parallelism over a process group: the ranks share the tokens of a sequence.

=================  ====================================================  ==========================================
function           what a rank holds                                     what it sends
=================  ====================================================  ==========================================
prefix_prefill_cp  every world-th pair of runs of the new tokens (its    (world - 1) rows x 2 Hkv x D elements: its
                   ``ZigZag`` layout); the whole cache                   new keys and values
prefix_decode_cp   the tokens of an ``Interleave`` layout of the cache;  its q, and see kernel_reference.partials
                   its own query heads, or all
=================  ====================================================  ==========================================

Functions over a ``torch.distributed.ProcessGroup`` (None: the default one). Every rank calls them with the same options
and with tensors of the same shapes. A group of one makes the plain call. Collectives are torch's functional ones; the
host waits for nothing.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from kernel_reference.checks import (
    as_int,
    as_window,
    check_bool,
    check_choice,
    check_dense,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    fail,
    given,
    values_are_checked,
)
from kernel_reference.collectives import start_all_gather, world_and_rank
from kernel_reference.integers import cdiv
from kernel_reference.paging import LAYOUTS
from kernel_reference.partials import (
    EXCHANGES,
    HEADS,
    Partial,
    exchange_partials,
    gathered_heads,
    merge_partials,
)
from kernel_reference.ragged import check_lengths, read_integers
from kernel_reference.sharding import Interleave, check_interleave
from kernel_reference.transforms import refuse_derivatives
from prefix_prefill.api import AttentionResult, PageLayout, merge_attention_states, prefix_prefill
from prefix_prefill.runs import (
    DecodeShare,
    Places,
    PrefillShare,
    laid_out,
    pages_of,
    placed,
    places_of,
    runs_of,
    share_decode,
    share_prefill,
    twice,
)

Tensor = torch.Tensor
Exchange = Literal["all_to_all", "reduce_scatter", "symmetric"]
Gathering = Literal["all_gather", "symmetric"]


@overload
def prefix_prefill_cp(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seqlens_k: Tensor, *, max_seqlen_q: int, group: Any, scheme: Literal["zigzag"] = "zigzag",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, window: tuple[int, int] | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, return_lse: Literal[False] = False, share: PrefillShare | None = None,
    exchange: Gathering = "all_gather",
) -> Tensor: ...  # fmt: skip
@overload
def prefix_prefill_cp(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seqlens_k: Tensor, *, max_seqlen_q: int, group: Any, scheme: Literal["zigzag"] = "zigzag",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, window: tuple[int, int] | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, return_lse: Literal[True], share: PrefillShare | None = None,
    exchange: Gathering = "all_gather",
) -> AttentionResult: ...  # fmt: skip
@overload
def prefix_prefill_cp(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seqlens_k: Tensor, *, max_seqlen_q: int, group: Any, scheme: Literal["zigzag"] = "zigzag",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, window: tuple[int, int] | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, return_lse: bool, share: PrefillShare | None = None,
    exchange: Gathering = "all_gather",
) -> Tensor | AttentionResult: ...  # fmt: skip
def prefix_prefill_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    group: Any,
    scheme: Literal["zigzag"] = "zigzag",
    page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    share: PrefillShare | None = None,
    exchange: Gathering = "all_gather",
) -> Tensor | AttentionResult:
    """Causal :func:`prefix_prefill.prefix_prefill` whose new tokens are shared by the ranks of a group.

    Of 2 x world runs of a sequence's new tokens rank r has the r-th and the r-th from behind
    (:class:`kernel_reference.sharding.ZigZag`), so that every rank has as much to attend to. The new keys and
    values are gathered. A rank attends to the older pages and to its own runs, then to the new tokens before those, and
    the two are merged. Under a window there is one pass, over the keys that it reaches back to and the gathered ones;
    and so there is where ``block_table`` has no column, over the gathered ones alone.
    Source: the balanced order of Llama 3's context parallelism (arXiv 2407.21783), section 3.3.2.

    Args:
        q, k, v: [T_r, H, D], this rank's rows: ``ZigZag(world, rank).tokens(n)`` of each sequence's n new tokens,
            packed one sequence after another. T_r is the same on every rank, ``ZigZag.most_tokens(T, B)`` suffices;
            rows behind the last token are padding, 0 in the result and -inf in lse.
        k_cache, v_cache, block_table: the older tokens, all of them on every rank.
        cu_seqlens_q: [B + 1], of all new tokens, not only this rank's; the same on every rank, as are
        seqlens_k: [B], all tokens of each sequence, and
        max_seqlen_q: an upper bound of all new tokens of a sequence.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        window: with one the cache must be of q's dtype and not scaled.
        scheme: "zigzag".
        share: what :func:`share_prefill` made of the same lengths and table, which all layers of a step may have in
            common; without it each call makes it, by some eighty small launches. Without a window.
        exchange: how new keys and values are gathered: by a collective, or "symmetric", by a kernel that writes each to
            its place in every rank's memory, which takes GPUs of one host. Call that once before a CUDA graph is
            captured, for its workspace; streams that run beside each other need a group each.
        page_layout, softmax_scale, softcap, sinks, k_scale, v_scale, return_lse: as there.

    Returns:
        out [T_r, Hq, D], or AttentionResult(out, lse [Hq, T_r]): this rank's rows. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there.
    """
    check_choice("scheme", scheme, ("zigzag",))
    check_choice("exchange", exchange, ("all_gather", "symmetric"))
    check_bool("return_lse", return_lse)
    max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q)
    left, _ = as_window(window)
    world, rank = world_and_rank(group)
    how: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "return_lse": True}
    if world == 1 or seqlens_k.shape[0] == 0:
        result: AttentionResult = prefix_prefill(
            q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k, max_seqlen_q=max_seqlen_q,
            page_layout=page_layout, window=window, sinks=sinks, k_scale=k_scale, v_scale=v_scale, **how,
        )  # fmt: skip
        return result if return_lse else result.out
    tensors = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "seqlens_k": seqlens_k}
    check_dense(**tensors)
    refuse_derivatives(**tensors, **given(sinks=sinks))
    check_lengths(q, cu_seqlens_q, seqlens_k)
    _check_new(q, k, v)
    if share is not None:
        if left >= 0:
            fail("share", "None under a window", "one")
        _check_of_step(share, PrefillShare, (len(q), max_seqlen_q, world, rank), q)

    gathering = None if exchange == "symmetric" else start_all_gather(torch.stack([k, v], 1), group)

    def pool_of(places: Places) -> Tensor:
        return placed(k, v, places, group) if gathering is None else laid_out(gathering(), places)

    if left < 0:
        if share is None:
            share = share_prefill(
                block_table, cu_seqlens_q, seqlens_k, rows=len(q), max_seqlen_q=max_seqlen_q, group=group
            )
        # Before any kernel that has a program an SM: beside it NCCL's keeps some SMs, and waits for some of the other
        # rank's. Two H100s, 64k tokens: 35.1 ms where they met, 29.8 where small launches came between.
        caches = pages_of(pool_of(share.places), share.places)
        if not block_table.shape[1]:
            # Nothing is older: one pass over the gathered keys, which are this rank's own too.
            result = prefix_prefill(
                q, None, None, *caches, share.places.block_table, share.cu, share.until, max_seqlen_q=share.most,
                sinks=sinks, **how,
            )  # fmt: skip
            return AttentionResult(*result) if return_lse else result.out
        older = prefix_prefill(
            q, k, v, k_cache, v_cache, share.block_table, share.cu, share.ends, max_seqlen_q=share.most,
            page_layout=page_layout, sinks=sinks, k_scale=k_scale, v_scale=v_scale, **how,
        )  # fmt: skip
        newer = prefix_prefill(
            q, None, None, *caches, share.places.block_table, share.cu, share.begins, max_seqlen_q=share.most,
            causal=False, **how,
        )  # fmt: skip
        result = merge_attention_states(older.out, older.lse, newer.out, newer.lse)
    else:
        if k_scale is not None or v_scale is not None:
            fail("window", "None where the cache is scaled", window)
        lengths = cu_seqlens_q.diff().clamp(min=0)
        runs = runs_of(world, lengths, cu_seqlens_q.dtype)
        own, contexts = runs[rank], seqlens_k - lengths
        tail = _tail_of(k_cache, v_cache, block_table, contexts, left, page_layout, k)
        held = contexts.clamp(0, tail.shape[1])
        places = places_of(runs, lengths, len(q), max_seqlen_q, tail.shape[1], held)
        caches = pages_of(pool_of(places), places, tail)
        ends = torch.where(twice(contexts) < 0, -1, twice(held) + own.begins + own.counts)
        result = prefix_prefill(
            q, None, None, *caches, places.block_table, own.cu, ends, max_seqlen_q=cdiv(max_seqlen_q, 2 * world),
            window=(left, 0), sinks=sinks, **how,
        )  # fmt: skip
    return AttentionResult(*result) if return_lse else result.out


@overload
def prefix_decode_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *,
    max_seqlen_q: int, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, softcap: float = 0.0,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, return_lse: Literal[False] = False,
    num_splits: int | None = None, exchange: Exchange = "all_to_all", share: DecodeShare | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def prefix_decode_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *,
    max_seqlen_q: int, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, softcap: float = 0.0,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, return_lse: Literal[True],
    num_splits: int | None = None, exchange: Exchange = "all_to_all", share: DecodeShare | None = None,
) -> AttentionResult: ...  # fmt: skip
@overload
def prefix_decode_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *,
    max_seqlen_q: int, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, softcap: float = 0.0,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, return_lse: bool,
    num_splits: int | None = None, exchange: Exchange = "all_to_all", share: DecodeShare | None = None,
) -> Tensor | AttentionResult: ...  # fmt: skip
def prefix_decode_cp(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    layout: Interleave,
    group: Any,
    heads: Literal["sharded", "replicated"] = "sharded",
    page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    exchange: Exchange = "all_to_all",
    share: DecodeShare | None = None,
) -> Tensor | AttentionResult:
    """Causal attention of a few new tokens a sequence to a cache whose tokens the ranks of a group share.

    Each rank attends with all query heads to its own keys; partial results are exchanged and merged by their lse. The
    new tokens are in the cache already, each in that of the rank that owns it. Of several new tokens of a sequence all
    attend together to the whole pages before the first of them, and each alone to the pages behind.
    Source: Helix parallelism (arXiv 2507.07120), section 2.

    Args:
        q: [T, Hq / world, D], this rank's query heads, those from ``rank * Hq / world`` on, or with heads "replicated"
            [T, Hq, D].
        k_cache, v_cache, block_table: of this rank's own tokens, all kv heads: position p of its tokens of sequence b,
            which is token ``layout.tokens(n)[p]``, is in page ``block_table[b, p // page]``.
        cu_seqlens_q, seqlens_k: [B + 1] and [B]: new tokens and all tokens of each sequence, on all ranks together.
        max_seqlen_q: an upper bound of the new tokens of a sequence.
        layout: who owns which token, for this process: ``Interleave.of(group, size=..)``.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        exchange: "all_to_all": partial results, in q's dtype; "reduce_scatter": their weighted sums, in float32, after
            the lse; "symmetric": as all_to_all, written to the peers' memory, which takes GPUs of one host. Call it
            once before a CUDA graph is captured, for its workspace; streams that run beside each other need a group
            each.
        share: what :func:`share_decode` made of the same lengths and table, which all layers of a step may have in
            common; without it each call makes it, by a dozen small launches or two.
        page_layout, softmax_scale, softcap, k_scale, v_scale, return_lse, num_splits: as
            :func:`prefix_prefill.prefix_prefill` takes them.

    Returns:
        out as q, of q's heads; with return_lse AttentionResult(out, lse [heads, T]). Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there; layout is of another world or rank.
    """
    check_choice("heads", heads, HEADS)
    check_choice("exchange", exchange, EXCHANGES)
    check_bool("return_lse", return_lse)
    max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q)
    world, rank = world_and_rank(group)
    check_interleave(layout, world, rank)
    how: dict[str, Any] = {
        "page_layout": page_layout, "softmax_scale": softmax_scale, "softcap": softcap, "k_scale": k_scale,
        "v_scale": v_scale, "num_splits": num_splits, "return_lse": True,
    }  # fmt: skip
    if world == 1:
        result: AttentionResult = prefix_prefill(
            q, None, None, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k, max_seqlen_q=max_seqlen_q, **how
        )
        return result if return_lse else result.out
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "seqlens_k": seqlens_k}
    check_dense(**tensors)
    refuse_derivatives(**tensors)
    check_lengths(q, cu_seqlens_q, seqlens_k)
    if share is not None:
        _check_of_step(share, DecodeShare, (q.shape[0], max_seqlen_q, world, rank), q)
    if heads == "sharded":
        q = gathered_heads(q, group, exchange)
    if share is None:
        share = share_decode(
            layout, block_table, cu_seqlens_q, seqlens_k, rows=q.shape[0], max_seqlen_q=max_seqlen_q,
            page_size=_page_size(k_cache, page_layout),
        )  # fmt: skip
    cache = (q, None, None, k_cache, v_cache)
    own = prefix_prefill(*cache, share.block_table, share.cu, share.visible, max_seqlen_q=1, causal=False, **how)
    if share.whole is not None:
        most = prefix_prefill(
            *cache, block_table, cu_seqlens_q, share.whole, max_seqlen_q=max_seqlen_q, causal=False, **how
        )
        own = merge_attention_states(most.out, most.lse, own.out, own.lse)
    merged = exchange_partials(Partial(own.out, own.lse.T), group, heads=heads, exchange=exchange, merge=_merged)
    return AttentionResult(merged.out, merged.lse.T) if return_lse else merged.out


def _merged(out: Tensor, lse: Tensor) -> Partial:
    """Of two parts by one launch."""
    if out.shape[0] != 2:
        return merge_partials(out, lse)
    both = merge_attention_states(out[0], lse[0].T, out[1], lse[1].T)
    return Partial(both.out, both.lse.T)


def _tail_of(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, contexts: Tensor, left: int, page_layout: str, like: Tensor
) -> Tensor:
    """The last ``left`` older tokens of each sequence, all of one that has fewer, [B, n, 2, Hkv, D]."""
    page_size = _page_size(k_cache, page_layout)
    if k_cache.dtype != like.dtype:
        fail("window", f"None where the cache is not of {like.dtype}, as q is", k_cache.dtype)
    sequences, columns = block_table.shape
    _check_tail(k_cache, block_table, contexts, left, page_size)
    most = min(left, columns * page_size) if k_cache.shape[0] else 0
    if most == 0:
        return like.new_empty(sequences, 0, 2, *like.shape[1:])
    position = (contexts - left).clamp(min=0)[:, None] + torch.arange(most, device=like.device)
    block = block_table.gather(1, (position // page_size).clamp(max=columns - 1)).long()
    exists = (block >= 0) & (block < k_cache.shape[0])
    block, offset = torch.where(exists, block, 0), position % page_size
    if page_layout == "NHD":
        rows = [cache[block, offset] for cache in (k_cache, v_cache)]
    elif page_layout == "HND":
        rows = [cache[block, :, offset] for cache in (k_cache, v_cache)]
    else:
        rows = [k_cache[block, :, :, offset].flatten(3), v_cache[block, :, :, offset]]
    return torch.where(exists[..., None, None, None], torch.stack(rows, 2), 0)


def _page_size(k_cache: Tensor, page_layout: str) -> int:
    check_choice("page_layout", page_layout, LAYOUTS)
    axis = {"NHD": 1, "HND": 2, "x-packed": 3}[page_layout]
    if k_cache.ndim <= axis:
        fail("k_cache", f"pages in the layout {page_layout}", describe(k_cache))
    return k_cache.shape[axis]


def _check_new(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != 3 or tensor.shape[0] != q.shape[0]:
            fail(name, f"[{q.shape[0]}, Hkv, {q.shape[2]}], with the rows of q", describe(tensor))
    check_shape("v", v, k.shape)
    check_same_dtype("v", v, "k", k)


def _check_of_step(
    share: Any, kind: type[PrefillShare] | type[DecodeShare], wanted: tuple[int, ...], q: Tensor
) -> None:
    if not isinstance(share, kind):
        fail("share", f"a {kind.__name__} or None", describe(share), TypeError)
    found = (share.rows, share.max_seqlen_q, share.world, share.rank)
    if found != wanted:
        fail("share", f"of {wanted} rows, longest sequence, world and rank, as q, max_seqlen_q and group are", found)
    check_same_device("share", share.cu, "q", q)


def _check_tail(k_cache: Tensor, block_table: Tensor, contexts: Tensor, left: int, page_size: int) -> None:
    """Where values are checked: the pages of the last ``left`` older tokens, which no op looks at, are of the pool."""
    if torch.compiler.is_compiling() or not values_are_checked(k_cache.device):
        return
    held = read_integers({"contexts": contexts, "table": block_table})
    columns, blocks = block_table.shape[1], k_cache.shape[0]
    for i, context in enumerate(held["contexts"]):
        for column in range(max(0, context - left) // page_size, min(columns, cdiv(context, page_size))):
            page = held["table"][i * columns + column]
            if not 0 <= page < blocks:
                fail(f"block_table[{i}, {column}]", f"a page from 0 to {blocks - 1}", page)
