"""Block-sparse attention whose tokens the ranks of a process group share.

====================  ===================================================  =========================================
function              what a rank holds                                    what it sends
====================  ===================================================  =========================================
blocksparse_          a run of a sequence's tokens, of all heads, as a     blocks of its keys and values that other
attention_cp          ``RowCut`` says                                      ranks' rows list, k_block (D + Dv)
                                                                           elements each
selected_attention_   the tokens of an ``Interleave`` layout of the        its q where heads are sharded,
cp                    cache, all kv heads; its own query heads, or all     (world - 1) T Hq / world D elements; and
                                                                           see kernel_reference.partials
====================  ===================================================  =========================================

Selected lists are of the whole sequences and the same on every rank: each attends to those blocks that it holds, and
the partial results are exchanged and merged by their lse. A block lies on one rank, so that a run of the layout is a
multiple of a block. By heads nothing is sent: see :meth:`blocksparse_attn.BlockLayout.heads`.

Functions over a ``torch.distributed.ProcessGroup`` (None: the default one). Every rank calls them with the same options
and with tensors of the same shapes. A group of one makes the plain call. Collectives are torch's functional ones; the
host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch

from blocksparse_attn.api import AttentionResult, blocksparse_attention
from blocksparse_attn.cuts import Piece, RowCut
from blocksparse_attn.plan import AttentionPlan
from blocksparse_attn.selected.api import selected_attention
from blocksparse_attn.sharing.ops import merge_parts, own_lists, pack_parts
from kernel_reference.checks import (
    check_bool,
    check_choice,
    check_dense,
    check_dtype,
    check_int,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    fail,
    given,
)
from kernel_reference.collectives import (
    all_gather,
    all_to_all,
    start_exchange,
    start_symmetric_exchanges,
    world_and_rank,
)
from kernel_reference.partials import EXCHANGES, HEADS, Partial, exchange_partials, gathered_heads
from kernel_reference.ragged import check_lengths
from kernel_reference.sharding import Interleave, check_interleave
from kernel_reference.transforms import refuse_derivatives

Tensor = torch.Tensor

__all__ = ["RowCut", "blocksparse_attention_cp", "selected_attention_cp"]


@overload
def blocksparse_attention_cp(
    q: Tensor, k: Tensor, v: Tensor, cut: RowCut, *, group: Any, softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, window: tuple[int, int] | None = None,
    exchange: Literal["all_to_all", "symmetric"] = "all_to_all", plan: AttentionPlan | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def blocksparse_attention_cp(
    q: Tensor, k: Tensor, v: Tensor, cut: RowCut, *, group: Any, softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, window: tuple[int, int] | None = None,
    exchange: Literal["all_to_all", "symmetric"] = "all_to_all", plan: AttentionPlan | None = None,
    return_lse: Literal[True],
) -> AttentionResult: ...  # fmt: skip


@overload
def blocksparse_attention_cp(
    q: Tensor, k: Tensor, v: Tensor, cut: RowCut, *, group: Any, softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, window: tuple[int, int] | None = None,
    exchange: Literal["all_to_all", "symmetric"] = "all_to_all", plan: AttentionPlan | None = None,
    return_lse: bool,
) -> Tensor | AttentionResult: ...  # fmt: skip


def blocksparse_attention_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cut: RowCut,
    *,
    group: Any,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: tuple[int, int] | None = None,
    exchange: Literal["all_to_all", "symmetric"] = "all_to_all",
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
) -> Tensor | AttentionResult:
    """:func:`blocksparse_attention` of a prompt whose tokens the ranks of a group share.

    A rank attends with its own run of queries. Of the keys before them it gathers the blocks that these list, of each
    kv head, and nothing else. Which those are is in the cut, so that the host waits for nothing.

    Args:
        q, k, v: [T_r, Hq, D], [T_r, Hkv, D] and [T_r, Hkv, Dv], rows ``cut.begin .. cut.end - 1`` of the sequence.
        cut: ``RowCut.of(group, layout, tokens, (Hq, Hkv))``, once for a layout and a length.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        exchange: "all_to_all": one collective for each of the cut's pieces; "symmetric": reads of the peers' memory by
            copy engines, which takes GPUs of one host.
        softmax_scale, softcap, sinks, window, return_lse, plan: as there. What lies before the window is gathered too.

    Returns:
        out [T_r, Hq, Dv], or AttentionResult(out, lse [Hq, T_r]): this rank's rows. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there; cut is of another world or rank.
    """
    check_choice("exchange", exchange, ("all_to_all", "symmetric"))
    check_bool("return_lse", return_lse)
    world, rank = world_and_rank(group)
    if not isinstance(cut, RowCut):
        fail("cut", "a blocksparse_attn.parallel.RowCut", describe(cut), TypeError)
    if (cut.world, cut.rank) != (world, rank):
        fail("cut", f"of world {world} and rank {rank}, as group is", cut)
    check_dense(q=q, k=k, v=v, **given(sinks=sinks))
    refuse_derivatives(q=q, k=k, v=v, **given(sinks=sinks))
    _check_rows(q, k, v, cut, sinks)
    cu_seqlens_q, cu_seqlens_k = cut.cu_seqlens
    how: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": q.shape[0],
        "softmax_scale": softmax_scale, "softcap": softcap, "window": window, "return_lse": return_lse, "plan": plan,
    }  # fmt: skip
    arriving = _gathered(k, v, cut, group, exchange)
    if len(cut.pieces) == 1:
        keys, values = next(arriving)
        whole: Tensor | AttentionResult = blocksparse_attention(q, keys, values, cut.layout, sinks=sinks, **how)
        return whole
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), []
    for piece, (keys, values) in zip(cut.pieces, arriving, strict=True):
        lo, hi = (head * (q.shape[1] // k.shape[1]) for head in piece.heads)
        result: Any = blocksparse_attention(
            q[:, lo:hi], keys, values, cut.layout.heads(lo, hi), sinks=None if sinks is None else sinks[lo:hi],
            out=out[:, lo:hi], **how,
        )  # fmt: skip
        if return_lse:
            lse.append(result.lse)
    return AttentionResult(out, torch.cat(lse)) if return_lse else out


def _gathered(k: Tensor, v: Tensor, cut: RowCut, group: Any, exchange: str) -> Iterator[Sequence[Tensor]]:
    """Begin to exchange the blocks of all pieces; wait for one at a time: its heads' keys and values up to cut.end.

    Blocks that no row of this rank lists are left as the memory was.
    """
    if cut.world == 1:
        return (_own(k, v, piece) for piece in cut.pieces)
    both = (_in_words(k), _in_words(v))
    # One message has both.
    if both[0].dtype != both[1].dtype:
        both = (k, v)
    row, counts = (cut.layout.k_block, both[0].shape[2] + both[1].shape[2]), [piece.counts for piece in cut.pieces]
    if exchange == "symmetric":
        coming = start_symmetric_exchanges(partial(_pack, both, cut), row, both[0].dtype, k.device, counts, group)
    else:
        packed = both[0].new_empty(cut.sent.shape[1], *row)
        if len(packed):
            _pack(both, cut, packed)
        parts = packed.split([sum(each[cut.rank]) for each in counts])
        coming = [start_exchange(part, each, group) for part, each in zip(parts, counts, strict=True)]
    if cut.begin == 0:
        # Nothing lies before the first rows; what they send leaves before kernels take all SMs.
        return (_own(k, v, piece, come) for piece, come in zip(cut.pieces, coming, strict=True))
    # While they come, this rank's own keys are stored behind the space for the others.
    pool = _pool(both, cut)
    sizes = [k.shape[2], v.shape[2]]
    return (
        _arrived(pool, piece, cut, come).view(k.dtype).split(sizes, 2)
        for piece, come in zip(cut.pieces, coming, strict=True)
    )


def _own(k: Tensor, v: Tensor, piece: Piece, come: Callable[[], object] = lambda: None) -> tuple[Tensor, Tensor]:
    come()
    heads = slice(*piece.heads)
    return k[:, heads], v[:, heads]


def _pack(both: tuple[Tensor, Tensor], cut: RowCut, packed: Tensor) -> None:
    """The blocks that other ranks list: a row of each token's key and value."""
    width, size = both[0].shape[2], cut.layout.k_block
    for x, out in zip(both, (packed[..., :width], packed[..., width:]), strict=True):
        # A block that another rank lists is whole: only the last of the sequence is not, with none behind it.
        blocks = x.shape[0] // size
        whole = x[: blocks * size].unflatten(0, (blocks, size))
        torch.ops.aten.index.Tensor_out(whole, [cut.sent[0], None, cut.sent[1]], out=out)


def _pool(both: tuple[Tensor, Tensor], cut: RowCut) -> Tensor:
    """Blocks up to the rank's last, [Hkv, columns, k_block, D + Dv], of which its own are there."""
    keys, values = both
    width = keys.shape[2]
    pool = keys.new_empty(keys.shape[1], cut.columns, cut.layout.k_block, width + values.shape[2])
    own = pool.flatten(1, 2)[:, cut.begin : cut.end].transpose(0, 1)
    own[..., :width] = keys
    own[..., width:] = values
    return pool


def _arrived(pool: Tensor, piece: Piece, cut: RowCut, come: Callable[[], Tensor]) -> Tensor:
    """Keys and values side by side of the piece's heads, [cut.end, heads, D + Dv]."""
    lo, hi = piece.heads
    of_heads = pool[lo:hi]
    of_heads.flatten(0, 1).index_copy_(0, piece.lacked, come())
    return of_heads.flatten(1, 2)[:, : cut.end].transpose(0, 1)


def _in_words(x: Tensor) -> Tensor:
    """x [T, H, D] as words of 8 bytes where rows are a multiple of that: fewer elements to copy."""
    each = 8 // x.element_size()
    steps = (x.shape[2], x.storage_offset(), *x.stride()[:2])
    return x.view(torch.int64) if x.stride(2) == 1 and not any(step % each for step in steps) else x


def _check_rows(q: Tensor, k: Tensor, v: Tensor, cut: RowCut, sinks: Tensor | None) -> None:
    """What is looked into before the op is called, which checks all of it."""
    rows, (heads, heads_kv) = cut.end - cut.begin, cut.heads
    check_same_device("cut", cut.layout.crow, "q", q)
    for name, tensor, count in (("q", q, heads), ("k", k, heads_kv), ("v", v, heads_kv)):
        if tensor.ndim != 3 or tensor.shape[:2] != (rows, count):
            fail(name, f"[{rows}, {count}, {'Dv' if name == 'v' else 'D'}], as cut is", describe(tensor))
        check_same_dtype(name, tensor, "q", q)
        check_same_device(name, tensor, "q", q)
    if sinks is not None:
        check_shape("sinks", sinks, (heads,))


@overload
def selected_attention_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, *, block_size: int, block_table: Tensor,
    cu_seqlens_q: Tensor, seqlens_k: Tensor, layout: Interleave, group: Any,
    heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Literal["all_to_all", "reduce_scatter", "symmetric"] = "all_to_all",
    page_layout: Literal["NHD", "HND"] = "NHD", causal: bool = True, softmax_scale: float | None = None,
    sinks: Tensor | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def selected_attention_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, *, block_size: int, block_table: Tensor,
    cu_seqlens_q: Tensor, seqlens_k: Tensor, layout: Interleave, group: Any,
    heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Literal["all_to_all", "reduce_scatter", "symmetric"] = "all_to_all",
    page_layout: Literal["NHD", "HND"] = "NHD", causal: bool = True, softmax_scale: float | None = None,
    sinks: Tensor | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    return_lse: Literal[True],
) -> AttentionResult: ...  # fmt: skip


@overload
def selected_attention_cp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, *, block_size: int, block_table: Tensor,
    cu_seqlens_q: Tensor, seqlens_k: Tensor, layout: Interleave, group: Any,
    heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Literal["all_to_all", "reduce_scatter", "symmetric"] = "all_to_all",
    page_layout: Literal["NHD", "HND"] = "NHD", causal: bool = True, softmax_scale: float | None = None,
    sinks: Tensor | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    return_lse: bool,
) -> Tensor | AttentionResult: ...  # fmt: skip


def selected_attention_cp(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    layout: Interleave,
    group: Any,
    heads: Literal["sharded", "replicated"] = "sharded",
    exchange: Literal["all_to_all", "reduce_scatter", "symmetric"] = "all_to_all",
    page_layout: Literal["NHD", "HND"] = "NHD",
    causal: bool = True,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | AttentionResult:
    """:func:`blocksparse_attn.selected_attention` over a cache whose tokens the ranks of a group share.

    Every query token is attended as a sequence of one, which suits decoding and drafts. Source: Helix parallelism
    (arXiv 2507.07120), section 2, and the merge of Flash-Decoding (https://pytorch.org/blog/flash-decoding/).

    Args:
        q: [T, Hq / world, D], this rank's query heads, those from ``rank * Hq / world`` on; with heads "replicated"
            [T, Hq, D], the same on every rank.
        k_cache, v_cache, block_table: of this rank's own tokens, all kv heads: position p of its tokens of sequence b,
            which is token ``layout.tokens(n)[p]``, is in page ``block_table[b, p // page]``. The new tokens are in the
            cache already, each in that of the rank that owns it.
        indices: [T, Hkv, topk] int32, blocks of the whole sequences; the same on every rank, as are
        cu_seqlens_q, seqlens_k: [B + 1] and [B], new tokens and all tokens of each sequence, on all ranks together.
        layout: who owns which token, for this process: ``Interleave.of(group, size=..)``, of a size that block_size
            divides.
        group: a ``torch.distributed.ProcessGroup``; None is the default one.
        heads: whose result a rank gets: "sharded", its own heads', for which q is gathered; or "replicated", all.
        exchange: "all_to_all": partial results, in q's dtype; "reduce_scatter": their weighted sums, in float32, after
            the lse; "symmetric": as all_to_all, written to the peers' memory, which takes GPUs of one host. Call it
            once before a CUDA graph is captured, for its workspace; streams that run beside each other need a group
            each.
        sinks: of the heads that q has, as there.
        block_size, page_layout, causal, softmax_scale, k_scale, v_scale, return_lse: as there.

    Returns:
        out as q, of q's heads; with return_lse AttentionResult(out, lse [heads, T]). Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, or as there; layout is of another world or rank.
    """
    check_choice("heads", heads, HEADS)
    check_choice("exchange", exchange, EXCHANGES)
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    check_int("block_size", block_size, 1)
    world, rank = world_and_rank(group)
    check_interleave(layout, world, rank)
    if layout.size % block_size:
        fail("layout", f"of a size that blocks of {block_size} divide", layout)
    how: dict[str, Any] = {
        "block_size": block_size, "page_layout": page_layout, "softmax_scale": softmax_scale, "k_scale": k_scale,
        "v_scale": v_scale,
    }  # fmt: skip
    if world == 1:
        how |= {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "seqlens_k": seqlens_k}
        return selected_attention(
            q, k_cache, v_cache, indices, causal=causal, sinks=sinks, return_lse=return_lse, **how
        )
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "indices": indices, "block_table": block_table}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "seqlens_k": seqlens_k}
    check_dense(**tensors, **given(sinks=sinks))
    refuse_derivatives(**tensors, **given(sinks=sinks))
    _check(q, indices, cu_seqlens_q, seqlens_k, sinks)
    if heads == "sharded":
        q = gathered_heads(q, group, exchange)
    own = own_lists(layout, indices, block_table, cu_seqlens_q, seqlens_k, block_size, causal)
    out, lse = selected_attention(
        q, k_cache, v_cache, own.indices, block_table=own.block_table, cu_seqlens_q=own.bounds, seqlens_k=own.seen,
        causal=False, return_lse=True, **how,
    )  # fmt: skip
    if exchange != "all_to_all":
        merged = exchange_partials(Partial(out, lse.T), group, heads=heads, exchange=exchange)
        out, lse = merged.out, merged.lse.T
        if sinks is not None:
            # A logit of all keys together, which no rank may count for itself.
            out = (out.float() * torch.sigmoid(lse.T - sinks.float())[..., None]).to(out.dtype)
            lse = torch.where(own.inside != 0, torch.logaddexp(lse, sinks.float()[:, None]), lse)
    else:
        parts = _exchanged(out, lse, group, world, heads == "sharded")
        out, lse = merge_parts(parts, sinks, own.inside)
    return AttentionResult(out, lse) if return_lse else out


def _exchanged(out: Tensor, lse: Tensor, group: Any, world: int, is_sharded: bool) -> Tensor:
    """All ranks' partial results for this one, [world, T, heads, D + 4 bytes]."""
    if is_sharded and out.shape[1] % world:
        fail("q", f"of a number of heads that the world of {world} divides", describe(out))
    parts = pack_parts(out, lse, world if is_sharded else 1)
    return all_to_all(parts, group) if is_sharded else all_gather(parts[0], group)


def _check(q: Tensor, indices: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, sinks: Tensor | None) -> None:
    """What is looked into before the op is called, which checks all of it."""
    check_lengths(q, cu_seqlens_q, seqlens_k)
    check_dtype("indices", indices, torch.int32)
    if indices.ndim != 3 or indices.shape[0] != q.shape[0]:
        fail("indices", f"[{q.shape[0]}, Hkv, topk]", describe(indices))
    if len(seqlens_k) == 0:
        fail("seqlens_k", "of one sequence or more where ranks share them", describe(seqlens_k))
    if sinks is not None:
        check_shape("sinks", sinks, (q.shape[1],))
