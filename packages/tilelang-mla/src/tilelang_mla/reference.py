"""The CPU implementations: each sequence in float32."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernel_reference.attention import attention
from kernel_reference.paging import gather
from kernel_reference.partials import merge_partials
from kernel_reference.ragged import clamped_ranges
from tilelang_mla.arguments import Decode8bitTensors, DecodeTensors, MergeTensors, PrefillTensors
from tilelang_mla.caches import dequantize_kv
from tilelang_mla.plan import DecodeProblem, PrefillProblem
from tilelang_mla.sparse.arguments import SparsePrefillTensors, SparseTensors

Tensor = torch.Tensor


def prefill(problem: PrefillProblem, tensors: PrefillTensors) -> None:
    """Write ``out``, and ``lse`` if there is one; sequences of impossible bounds are 0 and -inf."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = tensors
    _write_nothing(out, lse)
    ranges = clamped_ranges(cu_seqlens_q, problem.tokens)
    for (begin, end), (first, last) in zip(ranges, pairwise(cu_seqlens_k.tolist()), strict=True):
        if begin < end and 0 <= first <= last <= problem.tokens_k:
            rows = slice(begin, end)
            own = None if lse is None else lse[:, rows]
            _attend(problem, q[rows], k[first:last], v[first:last], out[rows], own)


def decode(problem: DecodeProblem, tensors: DecodeTensors) -> None:
    """The same over a paged cache, whose latents are keys, with the rope behind them, and values."""
    q, kv, seqlens_k, block_table, _, _, out, lse = tensors
    _write_nothing(out, lse)
    if q.shape[1] == 0:
        return
    lengths = seqlens_k[:, -1] if problem.per_token else seqlens_k
    for i, length in enumerate(lengths.tolist()):
        if 0 < length <= problem.capacity:
            keys = _gathered(kv, block_table[i : i + 1], length)
            own = None if lse is None else lse[i]
            seen = torch.arange(length) < seqlens_k[i][:, None] if problem.per_token else None
            _attend(problem, q[i], keys, keys[..., : problem.dim_nope], out[i], own, seen)


def decode_8bit(problem: DecodeProblem, tensors: Decode8bitTensors) -> None:
    """The same over a cache of 8 bits, widened first; what has one scale is exact in float32."""
    q, kv, seqlens_k, block_table, first_part, order, kv_scale, out, lse = tensors
    if problem.cache == "e4m3":
        q, kv = q.float(), dequantize_kv(kv, "e4m3", kv_scale, torch.float32)
    else:
        kv = dequantize_kv(kv, "656", dtype=q.dtype)
    decode(problem, DecodeTensors(q, kv, seqlens_k, block_table, first_part, order, out, lse))


def decode_sparse(problem: DecodeProblem, tensors: SparseTensors) -> None:
    """Write ``out``, and ``lse`` if there is one, of lists of keys; an entry that is no key is nothing."""
    q, kv, indices, topk_length, attn_sink, _, _, out, lse = tensors
    tokens = (dequantize_kv(kv, "656", dtype=q.dtype) if problem.cache else kv).flatten(0, 2).float()
    for b, token in ((b, token) for b in range(q.shape[0]) for token in range(q.shape[1])):
        count = None if topk_length is None else int(topk_length[b])
        attended, _, log_of = _attend_listed(problem, q[b, token], tokens, indices[b, token], count, attn_sink)
        out[b, token] = attended
        if lse is not None:
            lse[b, :, token] = log_of


def prefill_sparse(problem: DecodeProblem, tensors: SparsePrefillTensors) -> None:
    """Write ``out``, ``max_logits`` and ``lse`` of lists of keys; an entry that is no key is nothing."""
    q, kv, indices, topk_length, attn_sink, out, max_logits, lse = tensors
    tokens = kv[:, 0].float()
    for i in range(q.shape[0]):
        count = None if topk_length is None else int(topk_length[i])
        out[i], max_logits[i], lse[i] = _attend_listed(problem, q[i], tokens, indices[i, 0], count, attn_sink)


def merge(tensors: MergeTensors) -> None:
    """Write the whole of an attention from the parts [world, N, dim_nope] that ranks have of its keys."""
    whole = merge_partials(tensors.parts, tensors.part_lse)
    tensors.out.copy_(whole.out)
    tensors.lse.copy_(whole.lse)


def _write_nothing(out: Tensor, lse: Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


def _attend(
    problem: PrefillProblem | DecodeProblem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None,
    seen: Tensor | None = None,
) -> None:  # fmt: skip
    scale, causal = problem.softmax_scale, problem.causal and seen is None
    result = attention(q, k, v, softmax_scale=scale, causal=causal, mask=seen, compute_dtype=torch.float32)
    out.copy_(result.out)
    if lse is not None:
        lse.copy_(result.lse)


def _attend_listed(
    problem: DecodeProblem, q: Tensor, tokens: Tensor, listed: Tensor, count: int | None, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention of a token's heads to the first ``count`` keys of a list, its largest scores and lse."""
    listed = listed.long()
    if count is not None:
        listed = listed[: count if 0 <= count <= len(listed) else 0]
    keys = tokens[listed[(listed >= 0) & (listed < len(tokens))]]
    if not len(keys):
        nothing = q.new_full(q.shape[:1], -torch.inf, dtype=torch.float32)
        return q.new_zeros((), dtype=torch.float32), nothing, nothing
    scores = q.float() @ keys.mT * problem.softmax_scale
    log_of = scores.logsumexp(-1)
    attended = scores.softmax(-1) @ keys[:, : problem.dim_nope]
    if attn_sink is not None:
        attended = attended * torch.where(log_of == -torch.inf, 0, torch.sigmoid(log_of - attn_sink))[:, None]
    return attended, scores.amax(-1), log_of


def _gathered(kv: Tensor, pages: Tensor, length: int) -> Tensor:
    # Without a page in the pool, and on one that it does not have, keys are zeros.
    pool, table = (kv, pages) if len(kv) else (kv.new_zeros(1, *kv.shape[1:]), pages * 0 - 1)
    # Lengths and pages have been checked, in the caller's words, where they are to be.
    return gather(pool, table, torch.tensor([length], device=pool.device), "NHD").tokens
