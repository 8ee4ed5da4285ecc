"""The public functions: check the arguments, say what is wrong, call the op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from kernel_reference.checks import as_int, check_float, check_no_tangents, describe, fail, values_are_checked
from prefix_prefill import (
    arguments,
    ops,  # noqa: F401  defines the ops that are taken below
)
from prefix_prefill.arguments import (
    FP8,
    MOST_TOKENS,
    NAMES,
    Names,
    check_bool,
    check_int,
    check_layout,
    check_tensors,
    check_window,
)
from prefix_prefill.plan import PrefillPlan

Tensor = torch.Tensor

_prefill = torch.ops.prefix_prefill.prefill.default
_merge = torch.ops.prefix_prefill.merge.default

# What torch and tensors raise, in words of their own, over arguments of the wrong kind or rank.
_REFUSALS = (RuntimeError, AttributeError, TypeError, IndexError)
# What caches hold by the names that engines have for it.
_CACHE_DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_inc": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


class AttentionResult(NamedTuple):
    """``out`` [T, Hq, D] and the natural logarithm of the softmax's denominator, ``lse`` [Hq, T] in float32."""

    out: Tensor
    lse: Tensor


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
    layout: str = "NHD",
    softmax_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
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
    plan: PrefillPlan | None = None,
) -> Tensor | AttentionResult:
    """Softmax attention of a ragged batch's new tokens over a paged prefix and themselves.

    Sequence b has ``q_len = cu_seqlens_q[b + 1] - cu_seqlens_q[b]`` new tokens behind ``ctx = seqlens_k[b] - q_len``
    older ones. New token i stands at position ctx + i. ``score = softmax_scale * q.k``, then
    ``softcap * tanh(score / softcap)``, then ``+ slope * (key position - query position)``. Source: FlashAttention-2
    (arXiv 2307.08691), paged as in vLLM (arXiv 2309.06180).

    Args:
        q: [T, Hq, D], bfloat16, float16 or float32; D from 16 to 256; any strides, slices of one fused tensor too.
        k, v: [T, Hkv, D], the new tokens', as q is; both None where the cache holds them already. Hkv divides Hq: query
            head h reads kv head ``h // (Hq / Hkv)``.
        k_cache, v_cache: pages of q's dtype, float8_e4m3fn or float8_e5m2, any strides, of ``layout``: "NHD" [blocks,
            page, Hkv, D]; "HND" [blocks, Hkv, page, D]; "x-packed" [blocks, Hkv, D / x, page, x] and [blocks, Hkv, D,
            page]. A page holds any number of tokens from 1 on.
        block_table: [B, max_blocks] int32 or int64, rows contiguous: position p of sequence b is in page
            ``block_table[b, p // page]``. A page that the pool does not have reads as zeros.
        cu_seqlens_q: [B + 1] int32 or int64, contiguous, from 0, never falling, at most T. Rows after the last sequence
            are 0 in the result and -inf in lse.
        seqlens_k: [B] int32 or int64, contiguous: tokens of each sequence, the new ones counted.
        max_seqlen_q: the most new tokens of a sequence, or more; sizes the launch only.
        softmax_scale: ``D ** -0.5`` when None.
        causal: a token sees none after it.
        window: (left, right): a token sees keys from ``left`` before to ``right`` after its position, with ``causal``
            none after; -1 is unlimited. Pages wholly before the window are not read.
        softcap: 0 is off.
        alibi_slopes: [Hq] float32, bfloat16 or float16, contiguous.
        sinks: likewise, logits that stand in the denominator, and so in lse, only; neither scaled nor capped.
        k_scale, v_scale: what the cache's values are multiplied by, never k and v: a number, or float32 of one element,
            [Hkv] or [blocks, page, Hkv]. Needed with an 8-bit cache, where 1.0 says that there is none.
        out_scale: a number above 0, or float32 of one element; the result is then of an 8-bit float, the output divided
            by it and held within that dtype's range.
        skip_decode: leave rows of sequences with exactly one new token as they are, for another kernel to write. A
            prompt of one token, or its last one, is such a sequence too. Without ``out`` they, and their lse, hold
            whatever the memory held.
        out: [T, Hq, D] to write instead of a new tensor: of q's dtype, with out_scale of either 8-bit float; any
            strides that give each element a place of its own and do not interleave dimensions. It shares no memory with
            any argument, q neither.
        return_lse: whether to return lse too.
        num_splits: in how many parts each row's keys are cut, 1 or more; a number makes a sequence's result, to the
            last bit, independent of the rest of the batch. None: as the plan has it.
        plan: a launch plan to use instead of the one made for the device; has its own num_splits.

    Returns:
        out [T, Hq, D], contiguous if new, of q's dtype or, with out_scale, float8_e4m3fn; with return_lse
        AttentionResult(out, lse [Hq, T] float32, natural logarithms). NaN in a key or value that no row of a sequence
        sees changes nothing; in one that some row sees it may show in rows beside that one too. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above; nothing has been written. What only device memory tells
            is looked at on a CPU, and on a GPU inside ``kernel_reference.checks.validate_values``. Where it is not, as
            inside ``validate_values(False)``, bounds of sequences are clamped to 0 .. T, and a sequence of fewer tokens
            than are new, or more than its row of the block table has room for, gives 0 and -inf.
    """
    names = NAMES
    max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q)
    own_k, k_factor = _scale("k_scale", k_scale)
    own_v, v_factor = _scale("v_scale", v_scale)
    own_out, out_factor = _scale("out_scale", out_scale)
    left, right = _window(window, causal)
    check_bool("skip_decode", skip_decode)
    check_bool("return_lse", return_lse)
    softmax_scale = None if softmax_scale is None else _as_float("softmax_scale", softmax_scale)
    softcap = _as_float("softcap", softcap)
    splits = _splits(num_splits)
    ints = None if plan is None else _as_ints(plan)
    if ints is not None and splits:
        fail("num_splits", "None where a plan is given, which has its own", num_splits)
    try:
        if _may_be_derived():
            _refuse_derivatives(
                q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k,
                v_scale=own_v, out_scale=own_out, out=out,
            )  # fmt: skip
        _require_scales(k_cache, v_cache, k_scale, v_scale)
        if out is None:
            result = q.new_empty(q.shape) if out_scale is None else q.new_empty(q.shape, dtype=FP8[0])
        else:
            _require_out_scale(out, out_scale, names)
            result = out
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
        _prefill(
            q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k, alibi_slopes, sinks, own_k, own_v, own_out,
            result, lse, max_seqlen_q, layout, q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale, left,
            right, softcap, skip_decode, k_factor, v_factor, out_factor, splits, ints,
        )  # fmt: skip
    except _REFUSALS:
        check_tensors(
            q=q, **_given(k=k, v=v), k_cache=k_cache, v_cache=v_cache, block_table=block_table,
            cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k,
            **_given(
                alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k, v_scale=own_v, out_scale=own_out, out=out
            ),
        )  # fmt: skip
        check_layout(layout)
        arguments.check_q(q)
        raise
    return result if lse is None else AttentionResult(result, lse)


def context_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    kv_cache_dtype: str,
    k_cache: Tensor,
    v_cache: Tensor,
    b_loc: Tensor,
    b_start_loc: Tensor,
    b_seq_len: Tensor,
    max_seq_len: int,
    max_input_len: int,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    sm_scale: float | None = None,
    skip_decode: bool = False,
    fp8_out_scale: float | Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> None:
    """:func:`prefix_prefill` with the signature that engines call; writes ``o``.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D]; as there.
        o: [T, Hq, D], the ``out`` there: of q's dtype, with fp8_out_scale of either 8-bit float.
        kv_cache_dtype: "auto": the caches are of q's dtype, or 8-bit floats as they say themselves; "bfloat16" and
            "float16": of that dtype, which is q's; "fp8", "fp8_e4m3" or "fp8_inc", and "fp8_e5m2": 8-bit floats, stored
            as such or as uint8.
        k_cache: [blocks, Hkv, D / x, page, x]; v_cache: [blocks, Hkv, D, page]; any strides.
        b_loc, b_start_loc, b_seq_len, max_input_len: block_table, cu_seqlens_q, seqlens_k and max_seqlen_q there.
        max_seq_len: the most tokens of a sequence, the older ones counted, or more: the launch plan reckons with as
            many keys, rounded up to a power of two, where the block table has room for more.
        k_scale, v_scale: as there; without effect unless the caches are of 8 bits, as callers of this one expect.
        alibi_slopes, sinks, skip_decode, causal: as there.
        sliding_window: w: a token sees keys less than w positions before its own; None or <= 0 is off.
        sm_scale: softmax_scale there.
        fp8_out_scale: out_scale there.

    Raises:
        TypeError, ValueError: as there, under these names.
    """
    max_seq_len, max_input_len = as_int("max_seq_len", max_seq_len), as_int("max_input_len", max_input_len)
    check_bool("skip_decode", skip_decode)
    reach = 0 if sliding_window is None else as_int("sliding_window", sliding_window)
    left, right = _window((max(reach, 0) - 1, -1), causal)
    scale = None if sm_scale is None else _as_float("sm_scale", sm_scale)
    own_out, out_factor = _scale("fp8_out_scale", fp8_out_scale)
    own_k, k_factor = _scale("k_scale", k_scale)
    own_v, v_factor = _scale("v_scale", v_scale)
    try:
        if _may_be_derived():
            _refuse_derivatives(
                q=q, k=k, v=v, o=o, k_cache=k_cache, v_cache=v_cache, alibi_slopes=alibi_slopes, sinks=sinks,
                k_scale=own_k, v_scale=own_v, fp8_out_scale=own_out,
            )  # fmt: skip
        stored_k, stored_v = _as_stored(kv_cache_dtype, k_cache=k_cache, v_cache=v_cache)
        if stored_k.dtype in FP8:
            _require_scales(stored_k, stored_v, k_scale, v_scale)
        else:
            own_k, k_factor, own_v, v_factor = None, 1.0, None, 1.0
        _require_out_scale(o, fp8_out_scale, _NAMES_OF_ENGINES)
        tensors = (
            q, k, v, stored_k, stored_v, b_loc, b_start_loc, b_seq_len, alibi_slopes, sinks, own_k, own_v, own_out, o,
            None,
        )  # fmt: skip
        softmax_scale = q.shape[2] ** -0.5 if scale is None else scale
    except _REFUSALS:
        check_tensors(
            q=q, k=k, v=v, o=o, k_cache=k_cache, v_cache=v_cache,
            **_given(alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k, v_scale=own_v, fp8_out_scale=own_out),
        )  # fmt: skip
        arguments.check_q(q)
        raise
    factors = (k_factor, v_factor, out_factor, 0)
    numbers = (max_input_len, "x-packed", softmax_scale, left, right, 0.0)
    try:
        _prefill(*tensors, *numbers, skip_decode, *factors, None, max_seq_len)
    except (*_REFUSALS, ValueError):
        # The op knows its arguments by other names.
        check_tensors(
            q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, b_loc=b_loc, b_start_loc=b_start_loc, b_seq_len=b_seq_len,
            **_given(
                alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k, v_scale=own_v, fp8_out_scale=own_out, o=o
            ),
        )  # fmt: skip
        arguments.check_prefill(*tensors, *numbers, *factors, max_seq_len, _NAMES_OF_ENGINES)
        if values_are_checked(q.device):
            arguments.check_values(
                b_start_loc, b_seq_len, b_loc, tokens=q.shape[0], max_seqlen_q=max_input_len, max_seqlen_k=max_seq_len,
                page_size=k_cache.shape[3], blocks=k_cache.shape[0], apart=True, left=left, skip_decode=skip_decode,
                names=_NAMES_OF_ENGINES,
            )  # fmt: skip
        arguments.overlap_of_prefill(tensors, _NAMES_OF_ENGINES)(*tensors)
        raise


_NAMES_OF_ENGINES = Names(
    block_table="b_loc", cu_seqlens_q="b_start_loc", seqlens_k="b_seq_len", max_seqlen_q="max_input_len",
    max_seqlen_k="max_seq_len", softmax_scale="sm_scale", out_scale="fp8_out_scale", out="o",
)  # fmt: skip


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> AttentionResult:
    """The attention over the keys of a and of b together, from those over each: for cascades and context parallelism.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)``. Sinks belong in
    exactly one of the parts. Source: FlashInfer (arXiv 2501.01005), section 2.2.

    Args:
        out_a, out_b: [T, H, Dv] of one dtype of bfloat16, float16 and float32, any strides.
        lse_a, lse_b: [H, T] float32, natural logarithms, any strides. A part whose lse is -inf, or +inf as FlashMLA
            writes it, saw no key and is left out, whatever its out holds.

    Returns:
        AttentionResult(out [T, H, Dv] in the dtype of out_a, lse [H, T] float32), both new and contiguous; 0 and -inf
        where both parts saw nothing. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above.
    """
    try:
        if _may_be_derived():
            _refuse_derivatives(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
        out, lse = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
        _merge(out_a, lse_a, out_b, lse_b, out, lse)
    except (*_REFUSALS, ValueError):
        check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
        # What they ask of results says nothing of the arguments.
        arguments.check_merge(out_a, lse_a, out_b, lse_b)
        raise
    return AttentionResult(out, lse)


def _scale(name: str, scale: float | Tensor | None) -> tuple[Tensor | None, float]:
    """A scale as the op takes it: a tensor, or a number."""
    if scale is None:
        return None, 1.0
    if isinstance(scale, Tensor):
        return scale, 1.0
    check_float(name, scale, "None, a float or a float32 tensor")
    return None, scale


def _as_float(name: str, number: float) -> float:
    # torch would take a tensor for a number, and wait for the device to tell it.
    check_float(name, number)
    return number


def _window(window: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """What a token sees to its left and right, causality in it."""
    check_bool("causal", causal)
    if window is None:
        return -1, 0 if causal else -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        fail("window", "None or (left, right)", describe(window), TypeError)
    left, right = [as_int("window", side) for side in window]
    check_window(left, right)
    # No two tokens of a sequence are further apart.
    left, right = -1 if left >= MOST_TOKENS else left, -1 if right >= MOST_TOKENS else right
    return left, 0 if causal else right


def _splits(num_splits: int | None) -> int:
    return 0 if num_splits is None else check_int("num_splits", num_splits, 1)


def _require_scales(
    k_cache: Tensor, v_cache: Tensor, k_scale: float | Tensor | None, v_scale: float | Tensor | None
) -> None:
    for name, cache, scale in (("k_scale", k_cache, k_scale), ("v_scale", v_cache, v_scale)):
        if scale is None and cache.dtype in FP8:
            fail(name, f"given with a cache of {cache.dtype} (1.0 if its values are stored as they are)", None)


def _require_out_scale(out: Tensor, out_scale: float | Tensor | None, names: Names) -> None:
    if (out_scale is not None) != (out.dtype in FP8):
        if out_scale is None:
            fail(names.out_scale, f"given with {names.out} of {out.dtype}", None)
        fail(f"{names.out}.dtype", f"float8_e4m3fn or float8_e5m2 with {names.out_scale}", out.dtype, TypeError)


def _as_stored(kv_cache_dtype: str, **caches: Tensor) -> list[Tensor]:
    """The caches in the dtype that they hold."""
    if kv_cache_dtype == "auto":
        return [*caches.values()]
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in _CACHE_DTYPES:
        wanted = ", ".join(["auto", *_CACHE_DTYPES])
        fail("kv_cache_dtype", f"one of {wanted}", describe(kv_cache_dtype))
    dtype = _CACHE_DTYPES[kv_cache_dtype]
    stored = f"{dtype} or uint8" if dtype in FP8 else f"{dtype}"
    for name, cache in caches.items():
        if cache.dtype != dtype and not (dtype in FP8 and cache.dtype == torch.uint8):
            fail(f"{name}.dtype", f"{stored} with kv_cache_dtype {kv_cache_dtype!r}", cache.dtype, TypeError)
    return [cache.view(dtype) for cache in caches.values()]


def _may_be_derived() -> bool:
    """Whether derivatives of any kind are being taken: tells in no time, for servers, that there are none."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def _refuse_derivatives(**tensors: Tensor | None) -> None:
    check_no_tangents(**tensors)
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                fail(name, "without gradient (call under torch.no_grad() or inference_mode())", "requires_grad=True")


def _given(**tensors: object) -> dict[str, object]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _as_ints(plan: PrefillPlan) -> list[int]:
    if not isinstance(plan, PrefillPlan):
        fail("plan", "a prefix_prefill.PrefillPlan or None", describe(plan), TypeError)
    return plan.as_ints()
