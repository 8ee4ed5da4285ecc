"""Attention to blocks that are selected for each token and kv head, over a paged cache: the oracle.

Models choose a few blocks of keys anew for every token (NSA, arXiv 2502.11089; MoBA, arXiv 2502.13189). Block i holds
the positions ``i * block_size`` to ``(i + 1) * block_size - 1`` of the token's own sequence.
"""

from __future__ import annotations

import torch

from .attention import AttentionResult, MaskFunction, attention
from .attention_gradients import AttentionGradients, attention_gradients
from .checks import as_int, fail
from .paging import Packed, Scale, accumulate, check_integers, gather, sequence_ranges


def selection_mask(indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """Which of so many blocks are listed: indices [..., topk], in any order, to bool [..., blocks].

    -1, and whatever else is no block, lists nothing.
    """
    listed = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    there = (indices >= 0) & (indices < blocks)
    return listed.scatter_(-1, torch.where(there, indices, blocks).long(), True)[..., :blocks]


def selected_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    block_size: int,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    page_layout: str = "NHD",
    causal: bool = True,
    softmax_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    rows: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionResult:
    """Softmax attention of each token to the keys in the blocks that ``indices`` lists for it and a kv head.

    Args:
        q: [T, Hq, D], packed; query i of a sequence stands at position ``k_len - q_len + i``.
        k_cache, v_cache: pages of ``page_layout`` that hold the new tokens too, see :mod:`kernel_reference.paging`.
        indices: [T, Hkv, topk] int32 or int64: blocks of the token's own sequence in any order; -1 is nothing.
        block_size: tokens of a block, 1 or more.
        block_table, seqlens_k: [B, max_blocks] and [B].
        cu_seqlens_q: [B + 1].
        causal: whether a token sees keys up to its own position only.
        softmax_scale, sinks, rows, compute_dtype: as :func:`kernel_reference.attention.attention` has them.
        k_scale, v_scale: what stored values are multiplied by: a number, [Hkv] or [blocks, page, Hkv].

    Returns out [T, Hq, Dv] and lse [Hq, T], with rows those alone; 0 and -inf, or the sink, for a token that sees
    nothing. Errors as those two modules have them.
    """
    keys, values, visible = _gathered(
        q, k_cache, v_cache, indices, block_size, block_table, cu_seqlens_q, seqlens_k, page_layout, k_scale, v_scale
    )
    return attention(
        q, keys.tokens, values.tokens, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=keys.cu_seqlens, causal=causal,
        mask=visible, softmax_scale=softmax_scale, sinks=sinks, rows=rows, compute_dtype=compute_dtype,
    )  # fmt: skip


def selected_attention_gradients(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None = None,
    *,
    block_size: int,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    page_layout: str = "NHD",
    causal: bool = True,
    softmax_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionGradients:
    """What a loss with the gradients d_out and d_lse of :func:`selected_attention`'s results has for gradients.

    Those of k and v are in the shapes of the caches, 0 where no token lies; a page of several sequences has the sum of
    theirs. d_out [T, Hq, Dv]; d_lse [Hq, T], zeros without it; k_scale, v_scale: a number, or [Hkv]. The rest as there,
    and errors as that and :func:`.attention_gradients.attention_gradients` have them.
    """
    keys, values, visible = _gathered(
        q, k_cache, v_cache, indices, block_size, block_table, cu_seqlens_q, seqlens_k, page_layout, k_scale, v_scale
    )
    found = attention_gradients(
        q, keys.tokens, values.tokens, d_out, d_lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=keys.cu_seqlens,
        causal=causal, mask=visible, softmax_scale=softmax_scale, sinks=sinks, compute_dtype=compute_dtype,
    )  # fmt: skip
    pages = []
    for tokens, cache, scale in ((found.k, k_cache, k_scale), (found.v, v_cache, v_scale)):
        factor = torch.as_tensor(1.0 if scale is None else scale, device=q.device).to(compute_dtype)
        own = cache.new_zeros(cache.shape, dtype=compute_dtype)
        accumulate(tokens * factor.reshape(-1, 1), own, block_table, keys.cu_seqlens, page_layout)
        pages.append(own)
    return AttentionGradients(found.q, pages[0], pages[1], found.sinks)


def _gathered(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor, block_size: int,
    block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seqlens_k: torch.Tensor, page_layout: str,
    k_scale: Scale | None, v_scale: Scale | None,
) -> tuple[Packed, Packed, MaskFunction]:  # fmt: skip
    """Keys, values, and which keys the lists let a query see."""
    if as_int("block_size", block_size) < 1:
        fail("block_size", "at least 1", block_size)
    check_integers("indices", indices, (q.shape[0], None, None))
    keys = gather(k_cache, block_table, seqlens_k, page_layout, scale=k_scale)
    values = gather(v_cache, block_table, seqlens_k, page_layout, scale=v_scale)
    ranges_q = sequence_ranges("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    totals = keys.cu_seqlens.diff().tolist()
    mask = selection_mask(indices, -(-max(totals, default=0) // block_size))
    # Of each sequence, the row of q at position 0.
    first = torch.tensor([end - total for (_, end), total in zip(ranges_q, totals, strict=True)], device=q.device)
    group = q.shape[1] // max(1, indices.shape[1])

    def visible(
        sequence: torch.Tensor, head: torch.Tensor, q_position: torch.Tensor, k_position: torch.Tensor
    ) -> torch.Tensor:
        return mask[q_position + first[sequence], head // group, k_position // block_size]

    return keys, values, visible
