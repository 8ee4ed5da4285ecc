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

from typing import Any, Literal, NamedTuple, overload

import torch

from kernel_reference.checks import (
    as_int,
    as_window,
    check_bool,
    check_choice,
    check_dense,
    check_dtype,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    fail,
    given,
    values_are_checked,
)
from kernel_reference.collectives import all_gather, start_all_gather, world_and_rank
from kernel_reference.integers import cdiv
from kernel_reference.paging import LAYOUTS
from kernel_reference.partials import HEADS, Partial, exchange_partials, merge_partials
from kernel_reference.ragged import read_integers
from kernel_reference.sharding import Interleave, ZigZag
from kernel_reference.transforms import refuse_derivatives
from prefix_prefill.api import AttentionResult, PageLayout, merge_attention_states, prefix_prefill

Tensor = torch.Tensor
# Of the pool that gathered keys are laid out in: sequences begin on pages, which hold whole tiles of keys.
_PAGE = 128


class _Runs(NamedTuple):
    """The new tokens that a rank has of each sequence, two runs of them, as 2 B sequences.

    counts, begins: [2 B] tokens of a run, and those of its sequence before it. cu: [2 B + 1], rows where runs begin.
    """

    counts: Tensor
    begins: Tensor
    cu: Tensor


@overload
def prefix_prefill_cp(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seqlens_k: Tensor, *, max_seqlen_q: int, group: Any, scheme: Literal["zigzag"] = "zigzag",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, window: tuple[int, int] | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def prefix_prefill_cp(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seqlens_k: Tensor, *, max_seqlen_q: int, group: Any, scheme: Literal["zigzag"] = "zigzag",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, window: tuple[int, int] | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, return_lse: Literal[True],
) -> AttentionResult: ...  # fmt: skip
@overload
def prefix_prefill_cp(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seqlens_k: Tensor, *, max_seqlen_q: int, group: Any, scheme: Literal["zigzag"] = "zigzag",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, window: tuple[int, int] | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, return_lse: bool,
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
) -> Tensor | AttentionResult:
    """Causal :func:`prefix_prefill.prefix_prefill` whose new tokens are shared by the ranks of a group.

    Of 2 x world runs of a sequence's new tokens rank r has the r-th and the r-th from behind
    (:class:`kernel_reference.sharding.ZigZag`), so that every rank has as much to attend to. While the new keys and
    values are gathered, a rank attends to the older pages and to its own runs; then to the new tokens before those, and
    the two are merged. Under a window there is one pass, over the keys that it reaches back to and the gathered ones.
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
        page_layout, softmax_scale, softcap, sinks, k_scale, v_scale, return_lse: as there.

    Returns:
        out [T_r, Hq, D], or AttentionResult(out, lse [Hq, T_r]): this rank's rows. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there.
    """
    check_choice("scheme", scheme, ("zigzag",))
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
    _check_lengths(q, cu_seqlens_q, seqlens_k)
    _check_new(q, k, v)

    gathered = start_all_gather(torch.stack([k, v], 1), group)
    layouts = [ZigZag(world, other) for other in range(world)]
    lengths = cu_seqlens_q.diff().clamp(min=0)
    runs = [_runs_of(layout, lengths, cu_seqlens_q.dtype) for layout in layouts]
    own = runs[rank]
    most = cdiv(max_seqlen_q, 2 * world)
    contexts = seqlens_k - lengths
    if left < 0:
        older = prefix_prefill(
            q, k, v, k_cache, v_cache, _twice(block_table), own.cu, _twice(contexts) + own.counts, max_seqlen_q=most,
            page_layout=page_layout, sinks=sinks, k_scale=k_scale, v_scale=v_scale, **how,
        )  # fmt: skip
        pool = _pool_of(gathered(), runs, lengths, max_seqlen_q)
        # Before a first run lies nothing; an impossible sequence sees nothing.
        begins = torch.where(_twice(contexts) < 0, 0, own.begins)
        newer = prefix_prefill(
            q, None, None, *pool.caches, pool.block_table, own.cu, begins, max_seqlen_q=most, causal=False, **how
        )
        result = merge_attention_states(older.out, older.lse, newer.out, newer.lse)
    else:
        if k_scale is not None or v_scale is not None:
            fail("window", "None where the cache is scaled", window)
        tail = _tail_of(k_cache, v_cache, block_table, contexts, left, page_layout, k)
        held = contexts.clamp(0, tail.shape[1])
        pool = _pool_of(gathered(), runs, lengths, max_seqlen_q, tail, held)
        ends = torch.where(_twice(contexts) < 0, -1, _twice(held) + own.begins + own.counts)
        result = prefix_prefill(
            q, None, None, *pool.caches, pool.block_table, own.cu, ends, max_seqlen_q=most, window=(left, 0),
            sinks=sinks, **how,
        )  # fmt: skip
    return AttentionResult(*result) if return_lse else result.out


@overload
def prefix_decode_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *,
    max_seqlen_q: int, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, softcap: float = 0.0,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, return_lse: Literal[False] = False,
    num_splits: int | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def prefix_decode_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *,
    max_seqlen_q: int, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, softcap: float = 0.0,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, return_lse: Literal[True],
    num_splits: int | None = None,
) -> AttentionResult: ...  # fmt: skip
@overload
def prefix_decode_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *,
    max_seqlen_q: int, layout: Interleave, group: Any, heads: Literal["sharded", "replicated"] = "sharded",
    page_layout: PageLayout = "NHD", softmax_scale: float | None = None, softcap: float = 0.0,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, return_lse: bool,
    num_splits: int | None = None,
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
) -> Tensor | AttentionResult:
    """Causal attention of a few new tokens a sequence to a cache whose tokens the ranks of a group share.

    Each rank attends with all query heads to its own keys; partial results are exchanged and merged by their lse. The
    new tokens are in the cache already, each in that of the rank that owns it. Several new tokens of a sequence are
    attended as sequences of one. Source: Helix parallelism (arXiv 2507.07120), section 2.

    Args:
        q: [T, Hq / world, D], this rank's query heads, those from ``rank * Hq / world`` on, or with heads "replicated"
            [T, Hq, D].
        k_cache, v_cache, block_table: of this rank's own tokens, all kv heads: position p of its tokens of sequence b,
            which is token ``layout.tokens(n)[p]``, is in page ``block_table[b, p // page]``.
        cu_seqlens_q, seqlens_k: [B + 1] and [B]: new tokens and all tokens of each sequence, on all ranks together.
        max_seqlen_q: an upper bound of the new tokens of a sequence.
        layout: who owns which token, for this process: ``Interleave.of(group, size=..)``.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        page_layout, softmax_scale, softcap, k_scale, v_scale, return_lse, num_splits: as
            :func:`prefix_prefill.prefix_prefill` takes them.

    Returns:
        out as q, of q's heads; with return_lse AttentionResult(out, lse [heads, T]). Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there; layout is of another world or rank.
    """
    check_choice("heads", heads, HEADS)
    check_bool("return_lse", return_lse)
    max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q)
    world, rank = world_and_rank(group)
    if not isinstance(layout, Interleave):
        fail("layout", "a kernel_reference.sharding.Interleave", describe(layout), TypeError)
    if (layout.world, layout.rank) != (world, rank):
        fail("layout", f"of world {world} and rank {rank}, as group is", layout)
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
    _check_lengths(q, cu_seqlens_q, seqlens_k)
    if heads == "sharded":
        q = all_gather(q, group).transpose(0, 1).flatten(1, 2)
    # What a rank has of the keys that a token sees; a length that cannot be stays one.
    lengths = torch.where(seqlens_k < cu_seqlens_q.diff(), -1, seqlens_k)
    if max_seqlen_q != 1 and len(seqlens_k):
        # It does not grow by one a token.
        tokens = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens_q.dtype)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True).clamp(max=len(seqlens_k) - 1)
        behind = cu_seqlens_q[1:][sequence] - tokens - 1
        # Rows behind the last sequence see nothing.
        lengths = lengths[sequence]
        lengths = torch.where(behind >= 0, torch.where(lengths < 0, -1, lengths - behind), 0)
        block_table = block_table[sequence]
        cu_seqlens_q = torch.arange(q.shape[0] + 1, device=q.device, dtype=cu_seqlens_q.dtype)
    own = prefix_prefill(
        q, None, None, k_cache, v_cache, block_table, cu_seqlens_q,
        torch.where(lengths < 0, -1, layout.visible(lengths)), max_seqlen_q=1, causal=False, **how,
    )  # fmt: skip
    merged = exchange_partials(Partial(own.out, own.lse.T), group, heads=heads, merge=_merged)
    return AttentionResult(merged.out, merged.lse.T) if return_lse else merged.out


def _merged(out: Tensor, lse: Tensor) -> Partial:
    """Of two parts by one launch."""
    if out.shape[0] != 2:
        return merge_partials(out, lse)
    both = merge_attention_states(out[0], lse[0].T, out[1], lse[1].T)
    return Partial(both.out, both.lse.T)


class _Pool(NamedTuple):
    """Keys and values of sequences one after another, as a cache of pages, and its table for two runs a sequence."""

    caches: tuple[Tensor, Tensor]
    block_table: Tensor


def _runs_of(layout: ZigZag, lengths: Tensor, dtype: torch.dtype) -> _Runs:
    counts = torch.stack([half.visible(lengths) for half in layout.halves], 1).flatten()
    begins = torch.stack([half.begins(lengths) for half in layout.halves], 1).flatten()
    return _Runs(counts, begins, torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(dtype))


def _pool_of(
    gathered: Tensor, runs: list[_Runs], lengths: Tensor, max_seqlen_q: int, tail: Tensor | None = None,
    tail_lengths: Tensor | None = None,
) -> _Pool:  # fmt: skip
    """The gathered rows [world, T_r, 2, Hkv, D] in the order of their positions, behind a tail [B, n, 2, Hkv, D]."""
    world, rows = gathered.shape[:2]
    sequences = lengths.shape[0]
    most_tail = 0 if tail is None else tail.shape[1]
    before = torch.zeros_like(lengths) if tail_lengths is None else tail_lengths
    pages = (lengths + before + (_PAGE - 1)) // _PAGE
    first_page = pages.cumsum(0) - pages
    num_pages = sequences + cdiv(world * rows + sequences * most_tail, _PAGE)
    # Rows of padding, and whatever bad lengths lead out of the pool, go to a row behind it.
    nowhere = num_pages * _PAGE
    pool = gathered.new_empty(nowhere + 1, *gathered.shape[2:])

    cu = torch.stack([one.cu for one in runs])
    begins = torch.stack([one.begins for one in runs])
    row = torch.arange(rows, device=gathered.device, dtype=cu.dtype).expand(world, rows).contiguous()
    run = torch.searchsorted(cu[:, 1:].contiguous(), row, right=True)
    inside = run < 2 * sequences
    run = run.clamp(max=2 * sequences - 1)
    place = (first_page * _PAGE + before)[run // 2] + begins.gather(1, run) + row - cu.gather(1, run)
    _write(pool, place, inside, gathered, nowhere)
    if tail is not None:
        i_tail = torch.arange(most_tail, device=gathered.device)
        _write(pool, first_page[:, None] * _PAGE + i_tail, i_tail < before[:, None], tail, nowhere)

    columns = torch.arange(cdiv(max_seqlen_q + most_tail, _PAGE), device=gathered.device)
    keys, values = pool[:nowhere].unflatten(0, (num_pages, _PAGE)).unbind(2)
    return _Pool((keys, values), _twice((first_page[:, None] + columns).to(torch.int32)))


def _write(pool: Tensor, place: Tensor, inside: Tensor, rows: Tensor, nowhere: int) -> None:
    place = torch.where(inside, place, nowhere).clamp(0, nowhere)
    pool.index_copy_(0, place.flatten().long(), rows.flatten(0, 1))


def _tail_of(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, contexts: Tensor, left: int, page_layout: str, like: Tensor
) -> Tensor:
    """The last ``left`` older tokens of each sequence, all of one that has fewer, [B, n, 2, Hkv, D]."""
    check_choice("page_layout", page_layout, LAYOUTS)
    if k_cache.dtype != like.dtype:
        fail("window", f"None where the cache is not of {like.dtype}, as q is", k_cache.dtype)
    page_size = k_cache.shape[{"NHD": 1, "HND": 2, "x-packed": 3}[page_layout]]
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


def _twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 0)


def _check_lengths(q: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor) -> None:
    """What is looked into before the op is called, which checks all of it."""
    if q.ndim != 3:
        fail("q", "[T, Hq, D]", describe(q))
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seqlens_k", seqlens_k)):
        check_dtype(name, tensor, torch.int32, torch.int64)
        check_same_device(name, tensor, "q", q)
    if seqlens_k.ndim != 1:
        fail("seqlens_k", "[B]", describe(seqlens_k))
    check_shape("cu_seqlens_q", cu_seqlens_q, (seqlens_k.shape[0] + 1,))


def _check_new(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != 3 or tensor.shape[0] != q.shape[0]:
            fail(name, f"[{q.shape[0]}, Hkv, {q.shape[2]}], with the rows of q", describe(tensor))
    check_shape("v", v, k.shape)
    check_same_dtype("v", v, "k", k)


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
