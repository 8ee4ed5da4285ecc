"""The lightning indexer of sparse attention, as in DeepSeek-V3.2 and GLM-5: which keys each query token attends to.

A layer's call of sparse decoding goes like this, nothing of it waiting for the host::

    lengths = index_lengths(seqlens_k, num_tokens=B).view(B, 1)
    scores = index_scores(index_q, index_cache, index_weights, lengths, block_table, max_seqlen_k=longest)
    indices = index_topk(scores, lengths, 2048, block_table=block_table, page_size=64)
    out = flash_mla_with_kvcache(q, kv, None, None, 512, scale, indices=indices)
"""

from __future__ import annotations

import torch

from kernel_reference.checks import (
    REFUSALS,
    check_bool,
    check_dense,
    check_dtype,
    check_int,
    check_same_device,
    describe,
    fail,
    given,
)
from kernel_reference.dispatch import runs_now
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import refuse_derivatives
from tilelang_mla.indexer import ops
from tilelang_mla.indexer.arguments import (
    ScoresOptions,
    ScoresTensors,
    TopkOptions,
    TopkTensors,
    check_scores,
    check_topk,
)
from tilelang_mla.indexer.plan import MOST_TOPK, IndexPlan

Tensor = torch.Tensor

_scores = torch.ops.tilelang_mla.index_scores.default
_topk = torch.ops.tilelang_mla.index_topk.default


def index_scores(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    max_seqlen_k: int | None = None,
    clean_logits: bool = True,
    out: Tensor | None = None,
    plan: IndexPlan | None = None,
) -> Tensor:
    """The indexer's score of each query token and each key that it sees, over a paged cache of 8 bits.

    ``scores[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])``, the products of e4m3 summed by tensor
    cores, all else in float32. Prefill, chunks of it and decoding are the same call. A scale of q and the model's own,
    for DeepSeek-V3.2 ``128 ** -0.5 * Hi ** -0.5``, belong in weights. Source: DeepSeek-V3.2-Exp
    (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp), section 2; ``fp8_mqa_logits`` and ``fp8_paged_mqa_logits`` of
    DeepGEMM.

    Args:
        q: [B, Sq, Hi, 128], as many query tokens of each sequence, or packed [T, Hi, 128]; float8_e4m3fn, contiguous;
            Hi is 16, 32, 64 or 128.
        k_cache: uint8 [pages, page_size, 1, 132], with or without the 1, from :func:`quantize_index_k` or an engine: a
            page has its keys, ``page_size * 128`` bytes of e4m3, and behind them a float32 scale of each. page_size is
            a multiple of 16; pages are contiguous, and multiples of 16 bytes apart.
        weights: [B, Sq, Hi] or [T, Hi] float32, contiguous.
        lengths: [B, Sq] or [T] int32, contiguous: each query token sees so many of its sequence's first keys, itself
            among them where that is meant. :func:`index_lengths` makes them.
        block_table: [B, max_pages] int32, rows contiguous: position p of sequence b is in page
            ``block_table[b, p // page_size]``. A page that the pool does not have reads as zeros.
        cu_seqlens_q: [B + 1] int32: tokens ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` of packed q are those of
            sequence b. None: q is [B, Sq, Hi, 128], or has one token of each sequence.
        max_seqlen_k: scores in a row, at least the largest of lengths; ``max_pages * page_size`` when None.
        clean_logits: whether scores behind a token's last key are -inf, else they are not written. :func:`index_topk`
            does not look at them, and a wide table makes them many.
        out: a tensor to write instead of a new one: [B, Sq, N] or [T, N] float32, rows contiguous; its N is then
            max_seqlen_k. No overlap with inputs.
        plan: how tokens and keys are cut; from shapes when None.

    Returns:
        [B, Sq, max_seqlen_k] or [T, max_seqlen_k] in float32, of packed tokens of no sequence -inf. NaN in a key gives
        NaN there alone. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, requires a gradient, carries a tangent (jvp) or is
            batched by torch.vmap; nothing has been written. What only device memory tells is checked on a CPU, and on
            a GPU inside ``kernel_reference.checks.validate_values``. Else a token of a length below 0, or above what
            block_table or max_seqlen_k have room for, sees nothing.
    """
    check_bool("clean_logits", clean_logits)
    ints = plan_as_ints(plan, IndexPlan)
    named = {"q": q, "k_cache": k_cache, "weights": weights, "lengths": lengths, "block_table": block_table}
    named |= given(cu_seqlens_q=cu_seqlens_q, out=out)
    try:
        refuse_derivatives(**named)
        width = block_table.shape[1] * k_cache.shape[1]
        if max_seqlen_k is not None:
            width = check_int("max_seqlen_k", max_seqlen_k, 0)
            if out is not None and out.shape[-1] != width:
                fail("max_seqlen_k", f"{out.shape[-1]}, the scores in a row of out", width)
        result = q.new_empty((*q.shape[:-2], width), dtype=torch.float32) if out is None else out
    except REFUSALS:
        check_dense(**named)
        if q.ndim not in (3, 4):
            fail("q", "[T, Hi, 128] or [B, Sq, Hi, 128]", describe(q))
        if k_cache.ndim not in (3, 4):
            fail("k_cache", "[pages, page_size, 1, 132] or [pages, page_size, 132]", describe(k_cache))
        if block_table.ndim != 2:
            fail("block_table", "[B, max_pages]", describe(block_table))
        raise
    tensors = (q, k_cache, weights, lengths, block_table, cu_seqlens_q, result)
    run = ops.scores_now if out is None and runs_now(tensors) else _scores
    try:
        run(*tensors, clean_logits, ints)
    except REFUSALS:
        check_dense(**named)
        check_scores(ScoresTensors(*tensors), ScoresOptions(clean_logits, ints))
        raise
    return result


def index_topk(
    scores: Tensor,
    lengths: Tensor,
    k: int = 2048,
    *,
    block_table: Tensor | None = None,
    page_size: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The ``k`` highest scores of each query token, as positions or as what ``indices=`` of sparse attention takes.

    Exact: of equal scores those at lower positions come first, the two zeros are equal, NaN is above all. A list is in
    ascending order of positions, not of scores, so that it does not depend on the order in which threads run. A row of
    k scores or fewer gives all of them, and -1 behind. Source: a radix select over the bits of the scores.

    Args:
        scores: [B, Sq, N] or [T, N] float32 from :func:`index_scores`, rows contiguous, N at most 1048576.
        lengths: [B, Sq] or [T] int32, contiguous, as there: so many scores of each row are looked at.
        k: from 1 to 4096.
        block_table: None: positions in the token's own sequence. Else [B, max_pages] int32, rows contiguous: position p
            of sequence b becomes ``block_table[b, p // page_size] * page_size + p % page_size``, where that token is in
            the pool; -1 where the table has no page, or one below 0.
        page_size: of the pool that block_table is of, which may be another than the indexer's; None without one.
        cu_seqlens_q: [B + 1] int32, with a block_table and packed rows: as :func:`index_scores` has it.
        out: a tensor to write instead of a new one: [B, Sq, k] or [T, k] int32, contiguous.

    Returns:
        int32 [B, Sq, k], as :func:`flash_mla_with_kvcache` takes ``indices``, or [T, k], which
        :func:`flash_mla_sparse_fwd` takes with a dimension between: ``[:, None]``. Not differentiable.

    Raises:
        TypeError, ValueError: as :func:`index_scores`. A row of a length below 0 or above N gives -1, unless values are
            checked.
    """
    check_int("k", k, 1, MOST_TOPK)
    size = 0
    if page_size is not None:
        size = check_int("page_size", page_size, 1)
    named = {"scores": scores, "lengths": lengths}
    named |= given(block_table=block_table, cu_seqlens_q=cu_seqlens_q, out=out)
    try:
        refuse_derivatives(**named)
        if out is not None and out.shape[-1] != k:
            fail("out", f"[.., {k}], of k entries", describe(out))
        result = scores.new_empty((*scores.shape[:-1], k), dtype=torch.int32) if out is None else out
        tensors = (scores, lengths, block_table, cu_seqlens_q, result)
        run = ops.topk_now if out is None and runs_now(tensors) else _topk
        run(*tensors, size)
    except REFUSALS:
        check_dense(**named)
        check_topk(TopkTensors(scores, lengths, block_table, cu_seqlens_q, result), TopkOptions(size))
        raise
    return result


def index_lengths(seqlens_k: Tensor, cu_seqlens_q: Tensor | None = None, *, num_tokens: int) -> Tensor:
    """How many keys each query token sees in causal attention: ``lengths`` of the functions above, by torch operations.

    The last token of a sequence sees all its keys, the one before one less. There is no host synchronisation.

    Args:
        seqlens_k: [B] int32: keys of each sequence, the new tokens counted.
        cu_seqlens_q: [B + 1] int32, which tokens are whose. None: num_tokens / B of each sequence.
        num_tokens: T, of all sequences together.

    Returns:
        int32 [T]; 0 of a token that is none's, or that stands before the first key.

    Raises TypeError or ValueError, naming the argument, for dtypes and shapes that do not fit.
    """
    check_int("num_tokens", num_tokens, 0)
    check_dense(seqlens_k=seqlens_k)
    check_dtype("seqlens_k", seqlens_k, torch.int32)
    if seqlens_k.ndim != 1:
        fail("seqlens_k", "[B]", describe(seqlens_k))
    batch = seqlens_k.shape[0]
    if cu_seqlens_q is None:
        if num_tokens % max(1, batch):
            fail("num_tokens", f"a multiple of the {batch} sequences of seqlens_k, without cu_seqlens_q", num_tokens)
        each = num_tokens // max(1, batch)
        behind = torch.arange(each - 1, -1, -1, dtype=torch.int32, device=seqlens_k.device)
        return (seqlens_k[:, None] - behind).clamp(min=0).flatten()
    check_dense(cu_seqlens_q=cu_seqlens_q)
    check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32)
    check_same_device("cu_seqlens_q", cu_seqlens_q, "seqlens_k", seqlens_k)
    if cu_seqlens_q.shape != (batch + 1,):
        fail("cu_seqlens_q", f"[{batch + 1}], of the {batch} sequences of seqlens_k", describe(cu_seqlens_q))
    token = torch.arange(num_tokens, dtype=torch.int32, device=seqlens_k.device)
    if not batch:
        return torch.zeros_like(token)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
    there = (sequence < batch) & (token >= cu_seqlens_q[0])
    sequence = sequence.clamp(max=batch - 1)
    sees = seqlens_k[sequence] - (cu_seqlens_q[sequence + 1] - 1 - token)
    return torch.where(there, sees.clamp(min=0), 0).int()
