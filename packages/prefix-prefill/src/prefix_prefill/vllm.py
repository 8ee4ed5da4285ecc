"""vLLM's ``context_attention_fwd``, drop-in: its signature, its names in errors."""

from __future__ import annotations

import torch

from kernel_reference.checks import (
    REFUSALS,
    as_float,
    as_int,
    as_window,
    check_bool,
    check_dense,
    describe,
    fail,
    given,
    values_are_checked,
)
from kernel_reference.transforms import are_active, refuse_derivatives
from prefix_prefill import arguments, ops
from prefix_prefill.api import as_scale, require_out_scale, require_scales
from prefix_prefill.arguments import FP8, Names, PrefillNumbers, PrefillTensors
from prefix_prefill.values import check_values

Tensor = torch.Tensor

# Cache dtypes by the engine's names.
_CACHE_DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_inc": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = Names(
    block_table="b_loc", cu_seqlens_q="b_start_loc", seqlens_k="b_seq_len", max_seqlen_q="max_input_len",
    max_seqlen_k="max_seq_len", softmax_scale="sm_scale", out_scale="fp8_out_scale", out="o",
)  # fmt: skip


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
    """``prefix_prefill`` with vLLM's signature; writes ``o``.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D]; as there.
        o: [T, Hq, D], the ``out`` there: of q's dtype, with fp8_out_scale of either 8-bit float.
        kv_cache_dtype: "auto": the caches are of q's dtype, or 8-bit floats as they say themselves; "bfloat16" and
            "float16": of that dtype, which is q's; "fp8", "fp8_e4m3" or "fp8_inc", and "fp8_e5m2": 8-bit floats, stored
            as such or as uint8.
        k_cache: [blocks, Hkv, D / x, page, x]; v_cache: [blocks, Hkv, D, page]; any strides.
        b_loc, b_start_loc, b_seq_len, max_input_len: block_table, cu_seqlens_q, seqlens_k and max_seqlen_q there.
        max_seq_len: an upper bound of the tokens of a sequence, its prefix included: the launch plan is made for as
            many keys, rounded up to a power of two, where the block table has room for more.
        k_scale, v_scale: as there; without effect unless the caches are of 8 bits, as callers of this one expect.
        alibi_slopes, sinks, skip_decode, causal: as there.
        sliding_window: w: a token attends to keys less than w positions before its own; None or <= 0 is off.
        sm_scale: softmax_scale there.
        fp8_out_scale: out_scale there.

    Raises:
        TypeError, ValueError: as there, under these names.
    """
    own_out, out_number = as_scale("fp8_out_scale", fp8_out_scale)
    own_k, k_number = as_scale("k_scale", k_scale)
    own_v, v_number = as_scale("v_scale", v_scale)

    def check_tensors() -> None:
        check_dense(
            q=q, k=k, v=v, o=o, k_cache=k_cache, v_cache=v_cache,
            **given(alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k, v_scale=own_v, fp8_out_scale=own_out),
        )  # fmt: skip
        arguments.check_q(q)

    try:
        stored_k, stored_v = k_cache, v_cache
        if kv_cache_dtype != "auto":
            stored_k, stored_v = _as_stored(kv_cache_dtype, k_cache=k_cache, v_cache=v_cache)
        if stored_k.dtype not in FP8:
            own_k, k_number, own_v, v_number = None, 1.0, None, 1.0
    except REFUSALS:
        check_tensors()
        raise
    tensors = (
        q, k, v, stored_k, stored_v, b_loc, b_start_loc, b_seq_len, alibi_slopes, sinks, own_k, own_v, own_out, o, None,
        None,
    )  # fmt: skip
    asked = None
    if not torch.compiler.is_dynamo_compiling():
        # As prefix_prefill has it: what was found right once need not be looked at again.
        asked = ops.asked(
            "context_attention_fwd", ops.rounded(max_seq_len), max_input_len, k_number, v_number, out_number,
            k_scale is None, v_scale is None, fp8_out_scale is None, sliding_window, sm_scale, skip_decode, causal,
        )  # fmt: skip
        served = ops.launches.direct(tensors, asked)
        if served is not None:
            try:
                served(*tensors)
            except ValueError:
                arguments.overlap_of_prefill(PrefillTensors(*tensors), _NAMES)(*tensors)
                raise
            return
    max_seq_len, max_input_len = as_int("max_seq_len", max_seq_len), as_int("max_input_len", max_input_len)
    check_bool("skip_decode", skip_decode)
    check_bool("causal", causal)
    reach = 0 if sliding_window is None else as_int("sliding_window", sliding_window)
    left, right = as_window((max(reach, 0) - 1, -1), causal)
    scale = None if sm_scale is None else as_float("sm_scale", sm_scale)
    try:
        if torch.is_grad_enabled() or are_active():
            refuse_derivatives(
                q=q, k=k, v=v, o=o, k_cache=k_cache, v_cache=v_cache, alibi_slopes=alibi_slopes, sinks=sinks,
                k_scale=own_k, v_scale=own_v, fp8_out_scale=own_out,
            )  # fmt: skip
        if stored_k.dtype in FP8:
            require_scales(stored_k, stored_v, k_scale, v_scale)
        require_out_scale(o, fp8_out_scale, _NAMES)
        softmax_scale = q.shape[2] ** -0.5 if scale is None else scale
    except REFUSALS:
        check_tensors()
        raise
    numbers = (
        max_input_len, "x-packed", softmax_scale, left, right, 0.0, skip_decode, k_number, v_number, out_number, 0,
        max_seq_len,
    )  # fmt: skip
    try:
        ops.prefill(tensors, numbers, asked=asked)
    except (*REFUSALS, ValueError):
        # The op knows its arguments by other names.
        check_dense(
            q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, b_loc=b_loc, b_start_loc=b_start_loc, b_seq_len=b_seq_len,
            **given(alibi_slopes=alibi_slopes, sinks=sinks, k_scale=own_k, v_scale=own_v, fp8_out_scale=own_out, o=o),
        )  # fmt: skip
        named, options = PrefillTensors(*tensors), PrefillNumbers(*numbers)
        arguments.check_prefill(named, options, _NAMES)
        if values_are_checked(q.device):
            check_values(named, options, _NAMES)
        arguments.overlap_of_prefill(named, _NAMES)(*named)
        raise


def _as_stored(kv_cache_dtype: str, **caches: Tensor) -> list[Tensor]:
    """The caches in the dtype that they hold."""
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in _CACHE_DTYPES:
        wanted = ", ".join(["auto", *_CACHE_DTYPES])
        fail("kv_cache_dtype", f"one of {wanted}", describe(kv_cache_dtype))
    dtype = _CACHE_DTYPES[kv_cache_dtype]
    stored = f"{dtype} or uint8" if dtype in FP8 else f"{dtype}"
    for name, cache in caches.items():
        if cache.dtype != dtype and not (dtype in FP8 and cache.dtype == torch.uint8):
            fail(f"{name}.dtype", f"{stored} with kv_cache_dtype {kv_cache_dtype!r}", cache.dtype, TypeError)
    return [cache.view(dtype) for cache in caches.values()]
