"""The public function: which blocks of keys each token attends to, by the means of blocks."""

from __future__ import annotations

import torch

from blocksparse_attn.choosing.ops import chosen
from kernel_reference.checks import check_dense, check_dtype, check_int, check_same_device, describe, fail, known

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
# Tokens of a sequence, on average, up to which the means of its blocks are copied for each of them.
_FEW_TOKENS = 8


def select_blocks(
    q: Tensor,
    k_summary: Tensor,
    *,
    topk: int,
    block_size: int,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    local: int = 1,
    sink: int = 0,
) -> Tensor:
    """The blocks of keys that each token attends to: those whose means score best, for :func:`selected_attention`.

    The score of a block is the sum, over the query heads of a kv head, of ``q . mean``; blocks that begin after the
    token are not chosen. Nothing synchronises with the device, so that a CUDA graph may choose anew at each replay.
    Source: MoBA (arXiv 2502.13189), section 2.2.

    Args:
        q: [T, Hq, D]; bfloat16, float16 or float32.
        k_summary: [B, blocks, Hkv, D], of any of these dtypes: a vector for each block of a sequence, such as the mean
            of its keys; what is past a sequence's last block is not chosen. Hkv divides Hq.
        topk: blocks of a list, local and first ones among them; 1 or more.
        block_size: tokens of a block.
        cu_seqlens_q: [B + 1] int32 or int64: where the sequences of q begin.
        seqlens_k: [B] int32 or int64: tokens of each sequence, new ones included.
        local: the last blocks up to the token's own, which are always chosen.
        sink: the first blocks of a sequence, which are always chosen.

    Returns:
        [T, Hkv, topk] int32, rising, padded with -1; of equal scores the lower block. Rows of no sequence, and those
        of impossible lengths, list nothing.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    check_dense(q=q, k_summary=k_summary, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k)
    for name, number, least in (
        ("topk", topk, 1),
        ("block_size", block_size, 1),
        ("local", local, 0),
        ("sink", sink, 0),
    ):
        check_int(name, number, least)
    if local + sink > topk:
        fail("topk", f"at least local + sink = {local + sink}, which are in each list", topk)
    check_dtype("q", q, *_FLOATS)
    check_dtype("k_summary", k_summary, *_FLOATS)
    if q.ndim != 3 or q.shape[1] < 1:
        fail("q", "[T, Hq, D]", describe(q))
    if k_summary.ndim != 4 or k_summary.shape[3] != q.shape[2] or k_summary.shape[2] < 1:
        fail("k_summary", f"[B, blocks, Hkv, {q.shape[2]}]", describe(k_summary))
    heads = k_summary.shape[2]
    if q.shape[1] % heads:
        fail("q", f"of a multiple of the {heads} kv heads", f"{q.shape[1]} heads")
    sequences = k_summary.shape[0]
    for name, tensor, size in (("cu_seqlens_q", cu_seqlens_q, sequences + 1), ("seqlens_k", seqlens_k, sequences)):
        check_dtype(name, tensor, *_INTEGERS)
        if tensor.ndim != 1 or known(tensor.shape[0] != size):
            fail(name, f"[{size}]", describe(tensor))
    for name, tensor in (("k_summary", k_summary), ("cu_seqlens_q", cu_seqlens_q), ("seqlens_k", seqlens_k)):
        check_same_device(name, tensor, "q", q)
    return _select(q, k_summary, topk, block_size, cu_seqlens_q.long(), seqlens_k.long(), local, sink)


def _select(
    q: Tensor, k_summary: Tensor, topk: int, block_size: int, cu: Tensor, totals: Tensor, local: int, sink: int
) -> Tensor:
    tokens, heads = q.shape[0], k_summary.shape[2]
    sequences, blocks = k_summary.shape[:2]
    if not tokens or not sequences or not blocks:
        return torch.full((tokens, heads, topk), -1, dtype=torch.int32, device=q.device)
    token = torch.arange(tokens, device=q.device)
    sequence = torch.searchsorted(cu, token, right=True) - 1
    real = (sequence >= 0) & (sequence < sequences)
    sequence = sequence.clamp(0, sequences - 1)
    new = cu[sequence + 1] - cu[sequence]
    position = totals[sequence] - cu[sequence + 1] + token
    real &= (new <= totals[sequence]) & (totals[sequence] <= blocks * block_size)
    possible = torch.where(real, position // block_size + 1, 0).to(torch.int32)
    summed = q.unflatten(1, (heads, -1)).float().sum(2)
    if tokens <= _FEW_TOKENS * sequences:
        scores = torch.einsum("thd,tnhd->thn", summed, k_summary[sequence].float())
    else:
        scores = summed.new_empty(tokens, heads, blocks)
        for i in range(sequences):
            own = torch.einsum("thd,nhd->thn", summed, k_summary[i].float())
            scores = torch.where((sequence == i)[:, None, None], own, scores)
    rows = possible[:, None].expand(tokens, heads).reshape(-1)
    indices, _ = chosen(scores.reshape(tokens * heads, blocks), rows, topk, local, sink, True)
    found = indices.view(tokens, heads, -1)
    return torch.nn.functional.pad(found, (0, topk - found.shape[2]), value=-1)
