"""Attention to selected blocks over a cache whose tokens the ranks of a process group share.

====================  ===================================================  =========================================
function              what a rank holds                                    what it sends
====================  ===================================================  =========================================
selected_attention_   the tokens of an ``Interleave`` layout of the        its q where heads are sharded,
cp                    cache, all kv heads; its own query heads, or all     (world - 1) T Hq / world D elements; and
                                                                           see kernel_reference.partials
====================  ===================================================  =========================================

The lists are of the whole sequences and the same on every rank: each attends to those blocks that it holds, and the
partial results are exchanged and merged by their lse. A block lies on one rank, so that a run of the layout is a
multiple of a block. By heads nothing is sent: see :meth:`blocksparse_attn.BlockLayout.heads`.

Functions over a ``torch.distributed.ProcessGroup`` (None: the default one). Every rank calls them with the same options
and with tensors of the same shapes. A group of one makes the plain call. Collectives are torch's functional ones; the
host waits for nothing.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from blocksparse_attn.api import AttentionResult
from blocksparse_attn.selected.api import selected_attention
from kernel_reference.checks import (
    check_bool,
    check_choice,
    check_dense,
    check_dtype,
    check_int,
    check_same_device,
    check_shape,
    describe,
    fail,
    given,
)
from kernel_reference.collectives import all_gather, world_and_rank
from kernel_reference.partials import EXCHANGES, HEADS, Partial, exchange_partials
from kernel_reference.sharding import Interleave
from kernel_reference.transforms import refuse_derivatives

Tensor = torch.Tensor


class _Tokens(NamedTuple):
    """Of each query token: its sequence [T], how many keys of it the token may see [T], whether it is in one [T]."""

    sequence: Tensor
    ends: Tensor
    inside: Tensor


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
            the lse; "symmetric": as all_to_all, written to the peers' memory, which takes GPUs of one host.
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
    if not isinstance(layout, Interleave):
        fail("layout", "a kernel_reference.sharding.Interleave", describe(layout), TypeError)
    if (layout.world, layout.rank) != (world, rank):
        fail("layout", f"of world {world} and rank {rank}, as group is", layout)
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
        q = all_gather(q, group).transpose(0, 1).flatten(1, 2)
    tokens = _tokens(q.shape[0], cu_seqlens_q, seqlens_k, causal)
    # A sequence of one query has a key or more: of one that this rank has none of, in a list that names nothing.
    seen = layout.visible(tokens.ends)
    table = block_table[tokens.sequence] if block_table.shape[1] else block_table.new_zeros(q.shape[0], 1)
    own: Any = selected_attention(
        q, k_cache, v_cache, own_blocks(layout, indices, tokens.ends, block_size),
        block_table=torch.where(seen[:, None] > 0, table, 0),
        cu_seqlens_q=torch.arange(q.shape[0] + 1, device=q.device, dtype=cu_seqlens_q.dtype),
        seqlens_k=torch.where(tokens.ends < 0, -1, seen.clamp(min=1)), causal=False, return_lse=True, **how,
    )  # fmt: skip
    out, lse = exchange_partials(Partial(own.out, own.lse.T), group, heads=heads, exchange=exchange)
    if sinks is not None:
        # A logit of all keys together, which no rank may count for itself.
        out = (out.float() * torch.sigmoid(lse - sinks.float())[..., None]).to(out.dtype)
        lse = torch.where(tokens.inside[:, None], torch.logaddexp(lse, sinks.float()), lse)
    return AttentionResult(out, lse.T) if return_lse else out


def own_blocks(layout: Interleave, indices: Tensor, ends: Tensor, block_size: int) -> Tensor:
    """The blocks of whole sequences as blocks of what a rank holds; -1 where another rank has one, or nobody sees it.

    indices: [T, Hkv, topk] int32; ends: [T], the tokens that each query token may see. Torch operations alone.

    >>> layout = Interleave(world=2, rank=1, size=64)
    >>> own_blocks(layout, torch.tensor([[[0, 1, 3, 5, -1]]], dtype=torch.int32), torch.tensor([300]), 64)
    tensor([[[-1,  0,  1, -1, -1]]], dtype=torch.int32)
    """
    begins = indices.long() * block_size
    before = layout.visible(begins)
    is_own = (layout.visible(begins + 1) > before) & (indices >= 0) & (begins < ends[:, None, None])
    return torch.where(is_own, before // block_size, -1).to(torch.int32)


def _tokens(rows: int, cu_seqlens_q: Tensor, seqlens_k: Tensor, causal: bool) -> _Tokens:
    row = torch.arange(rows, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    if len(seqlens_k) == 0:
        fail("seqlens_k", "of one sequence or more where ranks share them", describe(seqlens_k))
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
    inside = sequence < len(seqlens_k)
    sequence = sequence.clamp(max=len(seqlens_k) - 1)
    lengths = seqlens_k[sequence]
    ends = lengths - (cu_seqlens_q[1:][sequence] - row - 1) if causal else lengths
    # A length that cannot be stays one; rows behind the last sequence see nothing.
    ends = torch.where(lengths < cu_seqlens_q.diff()[sequence], -1, ends)
    return _Tokens(sequence, torch.where(inside, ends, 0), inside)


def _check(q: Tensor, indices: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, sinks: Tensor | None) -> None:
    """What is looked into before the op is called, which checks all of it."""
    if q.ndim != 3:
        fail("q", "[T, Hq, D]", describe(q))
    check_dtype("indices", indices, torch.int32)
    if indices.ndim != 3 or indices.shape[0] != q.shape[0]:
        fail("indices", f"[{q.shape[0]}, Hkv, topk]", describe(indices))
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seqlens_k", seqlens_k)):
        check_dtype(name, tensor, torch.int32, torch.int64)
        check_same_device(name, tensor, "q", q)
    if seqlens_k.ndim != 1:
        fail("seqlens_k", "[B]", describe(seqlens_k))
    check_shape("cu_seqlens_q", cu_seqlens_q, (seqlens_k.shape[0] + 1,))
    if sinks is not None:
        check_shape("sinks", sinks, (q.shape[1],))
