"""The public functions: check the arguments, say what is wrong, call the op."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch

from kernel_reference.checks import (
    REFUSALS,
    as_float,
    as_int,
    as_splits,
    as_window,
    check_bool,
    check_choice,
    check_dense,
    check_float,
    fail,
    given,
)
from kernel_reference.paging import LAYOUTS
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import are_active, refuse_derivatives
from prefix_prefill import arguments, ops
from prefix_prefill.arguments import FP8, NAMES, Names
from prefix_prefill.plan import MOST_TOKENS, PrefillPlan

Tensor = torch.Tensor
PageLayout = Literal["NHD", "HND", "x-packed"]


class AttentionResult(NamedTuple):
    """``out`` [T, Hq, Dv] and the natural logarithm of the softmax's denominator, ``lse`` [Hq, T] in float32."""

    out: Tensor
    lse: Tensor


@overload
def prefix_prefill(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    draft_mask: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None,
    skip_decode: bool = False,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    num_splits: int | None = None,
    quantize_q: bool = False,
    widen_bytes: int = 0,
    plan: PrefillPlan | None = None,
) -> Tensor: ...
@overload
def prefix_prefill(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    draft_mask: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None,
    skip_decode: bool = False,
    out: Tensor | None = None,
    return_lse: Literal[True],
    num_splits: int | None = None,
    quantize_q: bool = False,
    widen_bytes: int = 0,
    plan: PrefillPlan | None = None,
) -> AttentionResult: ...
@overload
def prefix_prefill(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    draft_mask: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None,
    skip_decode: bool = False,
    out: Tensor | None = None,
    return_lse: bool,
    num_splits: int | None = None,
    quantize_q: bool = False,
    widen_bytes: int = 0,
    plan: PrefillPlan | None = None,
) -> Tensor | AttentionResult: ...
def prefix_prefill(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    draft_mask: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None,
    skip_decode: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    quantize_q: bool = False,
    widen_bytes: int = 0,
    plan: PrefillPlan | None = None,
) -> Tensor | AttentionResult:
    """Softmax attention of a ragged batch's new tokens over a paged KV cache and themselves.

    Sequence b has ``q_len = cu_seqlens_q[b + 1] - cu_seqlens_q[b]`` new tokens after a prefix of
    ``ctx = seqlens_k[b] - q_len``. New token i is at position ctx + i. ``score = softmax_scale * q.k``, then
    ``softcap * tanh(score / softcap)``, then ``+ slope * (key position - query position)``. Source: FlashAttention-2
    (arXiv 2307.08691), paged as in vLLM (arXiv 2309.06180).

    Args:
        q: [T, Hq, D], bfloat16, float16 or float32; D from 16 to 512; any strides, slices of one fused tensor too.
        k, v: [T, Hkv, D] and [T, Hkv, Dv], of the new tokens, as q is; both None where the cache holds them already.
            Hkv divides Hq: query head h reads kv head ``h // (Hq / Hkv)``. Dv may differ from D.
        k_cache, v_cache: pages of q's dtype, float8_e4m3fn or float8_e5m2, any strides, of ``page_layout``: "NHD"
            [blocks, page, Hkv, D]; "HND" [blocks, Hkv, page, D]; "x-packed" [blocks, Hkv, D / x, page, x] and [blocks,
            Hkv, Dv, page]; of values Dv in place of D. Any page size of 1 or more.
        block_table: [B, max_blocks] int32 or int64, rows contiguous: position p of sequence b is in page
            ``block_table[b, p // page]``. A page out of bounds reads as zeros.
        cu_seqlens_q: [B + 1] int32 or int64, contiguous, non-decreasing from 0 to at most T. Rows after the last
            sequence are 0 in the result and -inf in lse.
        seqlens_k: [B] int32 or int64, contiguous: tokens of each sequence, the new ones included. Where all keys are in
            the cache and seen, of neither causal order nor a window, 0 too: rows that see nothing.
        max_seqlen_q: an upper bound of the new tokens of a sequence; only sizes the launch.
        max_seqlen_k: likewise of all its tokens: where it tells that none sees many keys, as in a first chunk, plans
            need not cut them; rounded up to a power of two. None: what the block table has room for.
        softmax_scale: ``D ** -0.5`` when None.
        causal: a token attends to none after it.
        window: (left, right): a token attends to keys from ``left`` before to ``right`` after its position, with
            ``causal`` none after; -1 is unlimited. Pages wholly before the window are not read.
        draft_mask: [T] int64, contiguous, of tree drafts, as in SpecInfer (arXiv 2305.09781): bit j of a new token's
            number says that it attends to new token j of its own sequence, as far as ``causal`` and the window, which
            know it as position ctx + j, let it; the prefix is always seen. At most 63 new tokens a sequence.
        softcap: 0 is off.
        alibi_slopes: [Hq] float32, bfloat16 or float16, contiguous.
        sinks: likewise; logits in the softmax's denominator, and so in lse, alone; neither scaled nor capped.
        k_scale, v_scale: dequantise the cache, never k and v: a number, or float32 of one element, [Hkv] or [blocks,
            page, Hkv]. Required with an 8-bit cache; 1.0 for one that is not scaled.
        out_scale: a number above 0, or float32 of one element; the result is then an 8-bit float: the output divided by
            it and clamped to the dtype's range.
        skip_decode: leave rows of sequences with exactly one new token untouched, for another kernel to write. A
            prompt, or a last chunk, of one token is such a sequence too. Without ``out`` they, and their lse, are
            uninitialised.
        out: [T, Hq, Dv] to write to: of q's dtype, with out_scale of either 8-bit float; any strides by which no two
            elements share memory and dimensions do not interleave. Shares no memory with an argument, q included.
        return_lse: whether to return lse too.
        num_splits: in how many pieces each row's keys are cut (split-KV), 1 or more; a fixed number makes a sequence's
            result bitwise independent of the rest of the batch. None: as the plan, or on sm_90 the device, finds best.
        quantize_q: round q, row by row, to float8_e4m3fn in units of a power of two, by which keys of a float8_e4m3fn
            cache are then multiplied as they are; the new tokens are in it. Faster on sm_90, and less exact: the README
            has how much. Weights and values stay in 16 bits.
        widen_bytes: the most memory that a call may take to widen an 8-bit cache once, before it attends, where
            sequences have many new tokens (sm_90): faster, and exact. It takes 2 bytes a number of all that the block
            table has room for. 0: none.
        plan: a launch plan in place of the one made for the device; has its own num_splits.

    Returns:
        out [T, Hq, Dv], contiguous if new, of q's dtype or, with out_scale, float8_e4m3fn; with return_lse
        AttentionResult(out, lse [Hq, T] float32, natural logarithm). NaN in a key or value that no row of a sequence
        attends to changes nothing; in one that some row attends to it may contaminate the rows beside that one, and so
        may that of any new token with draft_mask. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above; nothing has been written. Values in device memory are
            checked on a CPU, and on a GPU inside ``kernel_reference.checks.validate_values``. Unchecked, bounds of
            sequences are clamped to 0 .. T, and a sequence with fewer tokens than new ones, or more than its row of the
            block table has room for, gives 0 and -inf.
    """
    own_k, k_number = as_scale("k_scale", k_scale)
    own_v, v_number = as_scale("v_scale", v_scale)
    own_out, out_number = as_scale("out_scale", out_scale)
    tensors = (
        q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k, alibi_slopes, sinks, own_k, own_v, own_out,
        out, None, draft_mask,
    )  # fmt: skip
    asked = None
    if not torch.compiler.is_dynamo_compiling():
        # What was found right once need not be looked at again: to check it takes 5 us of a call's host time.
        asked = ops.asked(
            "prefix_prefill", return_lse, max_seqlen_q, ops.rounded(max_seqlen_k), page_layout, softmax_scale, causal,
            window, softcap, skip_decode, num_splits, quantize_q, widen_bytes, plan, k_number, v_number, out_number,
            k_scale is None, v_scale is None, out_scale is None,
        )  # fmt: skip
        served = ops.launches.direct(tensors, asked)
        if served is not None:
            result, lse = served(*tensors)
            return result if lse is None else AttentionResult(result, lse)
    # What is served looks like tensors of which no derivative was asked, outside transforms.
    if torch.is_grad_enabled() or are_active():
        refuse_derivatives(
            q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k,
            v_scale=own_v, out_scale=own_out, out=out,
        )  # fmt: skip
    max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q)
    most = MOST_TOKENS if max_seqlen_k is None else as_int("max_seqlen_k", max_seqlen_k)
    check_bool("causal", causal)
    left, right = as_window(window, causal)
    check_bool("skip_decode", skip_decode)
    check_bool("quantize_q", quantize_q)
    check_bool("return_lse", return_lse)
    softmax_scale = None if softmax_scale is None else as_float("softmax_scale", softmax_scale)
    softcap = as_float("softcap", softcap)
    splits = as_splits(num_splits)
    widen_bytes = as_int("widen_bytes", widen_bytes)
    ints = plan_as_ints(plan, PrefillPlan)
    if ints is not None and splits:
        fail("num_splits", "None where a plan is given, which has its own", num_splits)
    try:
        require_scales(k_cache, v_cache, k_scale, v_scale)
        if out is not None:
            require_out_scale(out, out_scale, NAMES)
        numbers = (
            max_seqlen_q, page_layout, q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale, left, right,
            softcap, skip_decode, k_number, v_number, out_number, splits, most,
            quantize_q, None if ints is None else tuple(ints), widen_bytes,
        )  # fmt: skip
        result, lse = ops.prefill(tensors, numbers, return_lse, None if out_scale is None else FP8[0], asked)
    except REFUSALS:
        check_dense(
            q=q, **given(k=k, v=v), k_cache=k_cache, v_cache=v_cache, block_table=block_table,
            cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k,
            **given(
                alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k, v_scale=own_v, out_scale=own_out, out=out,
                draft_mask=draft_mask,
            ),
        )  # fmt: skip
        check_choice("page_layout", page_layout, LAYOUTS)
        arguments.check_q(q)
        raise
    return result if lse is None else AttentionResult(result, lse)


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor | None = None
) -> AttentionResult:
    """Combine the attention over two disjoint sets of keys: for cascades and context parallelism.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)``. Sinks belong in
    exactly one of the two. Source: FlashInfer (arXiv 2501.01005), section 2.2.

    Args:
        out_a, out_b: [T, H, Dv] of one dtype of bfloat16, float16 and float32, any strides.
        lse_a, lse_b: [H, T] float32, natural logarithms, any strides. A partial result whose lse is -inf, or +inf as
            FlashMLA writes it, saw no key and is left out, whatever its out holds.
        out: [T, H, Dv] to write to, as out_a is; shares no memory with the arguments.

    Returns:
        AttentionResult(out [T, H, Dv] in the dtype of out_a, lse [H, T] float32), contiguous if new; 0 and -inf where
        neither saw a key. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above.
    """
    try:
        if torch.is_grad_enabled() or are_active():
            refuse_derivatives(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out)
        return AttentionResult(*ops.merge((out_a, lse_a, out_b, lse_b, out)))
    except (*REFUSALS, ValueError):
        check_dense(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, **given(out=out))
        # What the op asks of results says nothing of the arguments.
        arguments.check_merge(out_a, lse_a, out_b, lse_b, out)
        raise


def as_scale(name: str, scale: float | Tensor | None) -> tuple[Tensor | None, float]:
    """A scale as the op takes it: a tensor and a number, one of which is neutral."""
    if scale is None:
        return None, 1.0
    if isinstance(scale, Tensor):
        return scale, 1.0
    check_float(name, scale, "None, a float or a float32 tensor")
    return None, scale


def require_scales(
    k_cache: Tensor, v_cache: Tensor, k_scale: float | Tensor | None, v_scale: float | Tensor | None
) -> None:
    """An 8-bit cache comes with scales."""
    for name, cache, scale in (("k_scale", k_cache, k_scale), ("v_scale", v_cache, v_scale)):
        if scale is None and cache.dtype in FP8:
            fail(name, f"given with a cache of {cache.dtype} (1.0 if its values are stored as they are)", None)


def require_out_scale(out: Tensor, out_scale: float | Tensor | None, names: Names) -> None:
    """An 8-bit result comes with a scale, and no other does."""
    if (out_scale is not None) != (out.dtype in FP8):
        if out_scale is None:
            fail(names.out_scale, f"given with {names.out} of {out.dtype}", None)
        fail(f"{names.out}.dtype", f"float8_e4m3fn or float8_e5m2 with {names.out_scale}", out.dtype, TypeError)
