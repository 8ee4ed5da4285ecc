"""Sparse prefill under FlashMLA's name: check the arguments, say what is wrong, call the op."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_reference.checks import REFUSALS, check_dense, check_float, check_int, given
from kernel_reference.dispatch import runs_now
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import refuse_derivatives
from tilelang_mla import calls, ops
from tilelang_mla.plan import DecodeTiles
from tilelang_mla.sparse.arguments import SparsePrefillOptions, SparsePrefillTensors, check_sparse_prefill

Tensor = torch.Tensor
_prefill_sparse = torch.ops.tilelang_mla.prefill_sparse.default


class SparseResult(NamedTuple):
    """``out`` [Tq, Hq, d_v] in q's dtype; ``max_logits`` and ``lse`` [Tq, Hq] in float32.

    They are each row's largest score, times the scale, and the natural logarithm of the softmax's denominator.
    """

    out: Tensor
    max_logits: Tensor
    lse: Tensor


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    plan: DecodeTiles | None = None,
) -> SparseResult:
    """Attention of a prompt's tokens to keys that each of them lists: sparse prefill, as FlashMLA calls it.

    ``out = softmax(sm_scale * q keys^T) keys[..., :d_v]``, over the keys of a token's list: all query heads share one
    kv head, whose first ``d_v`` elements are the value too. Source: the sparse attention of DeepSeek-V3.2
    (arXiv 2512.02556).

    Args:
        q: [Tq, Hq, d_qk]; bfloat16 or float16; any number of heads.
        kv: [Tk, 1, d_qk], of q's dtype. Rows of q and kv are contiguous and multiples of 16 bytes apart. d_qk is d_v,
            as in DeepSeek V4, or d_v and a rope of a multiple of 32 up to 128 more (576 in DeepSeek-V3.2).
        indices: [Tq, 1, topk] int32, contiguous: rows of kv; an entry below 0, or of Tk and beyond, is no key. A batch
            has its sequences behind each other in q and kv, and indices of all of kv.
        sm_scale: what scores are multiplied by.
        d_v: elements of a value: a multiple of 64 up to 512.
        attn_sink: [Hq] float32: a logit of each head that takes part in the softmax and has no value; max_logits and
            lse do not know of it.
        topk_length: [Tq] int32: how many entries of each list count, from 0 to topk; all when None.
        out: a tensor to write instead of a new one: [Tq, Hq, d_v] of q's dtype; rows contiguous, any other strides that
            give each element its own address and do not interleave dimensions, no overlap with inputs.
        plan: tiles to use instead of those chosen for the device, of one part a list.

    Returns:
        SparseResult(out, max_logits, lse), contiguous if new. A query without keys gives 0, and -inf in both others,
        where FlashMLA gives +inf in lse. NaN in a key that no list names changes nothing; in one that some list names
        it may contaminate other heads of its token. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, requires a gradient, carries a tangent (jvp) or is
            batched by torch.vmap; nothing has been written. A length in topk_length below 0 or above topk is not
            refused: its token gives 0 and -inf.
    """
    # torch would take a tensor for a number, and wait for the device to tell it.
    check_float("sm_scale", sm_scale)
    check_int("d_v", d_v)
    ints = plan_as_ints(plan, DecodeTiles)
    named = {"q": q, "kv": kv, "indices": indices}
    named |= given(attn_sink=attn_sink, topk_length=topk_length, out=out)
    try:
        refuse_derivatives(**named)
        result = q.new_empty((*q.shape[:2], max(0, d_v))) if out is None else out
        max_logits, lse = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    except REFUSALS:
        check_dense(**named)
        calls.check_ranks({"q": (q, "[Tq, Hq, d_qk]", 3)})
        raise
    tensors = (q, kv, indices, topk_length, attn_sink, result, max_logits, lse)
    run = ops.prefill_sparse_now if out is None and runs_now(tensors) else _prefill_sparse
    try:
        run(*tensors, d_v, sm_scale, ints)
    except REFUSALS:
        check_dense(**named)
        check_sparse_prefill(SparsePrefillTensors(*tensors), SparsePrefillOptions(d_v, sm_scale, ints))
        raise
    return SparseResult(result, max_logits, lse)
