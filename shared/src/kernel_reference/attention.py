"""Softmax attention, in float64 by default, computed a kv head's query heads and a block of rows at a time.

The score matrix is never materialised whole, so that the oracle runs at the sizes that kernels are used at. What a row
does not see is masked by selection, never by a product with zero: NaN there contaminates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from einops import rearrange

from .checks import as_int, check_float, check_tensors, describe, fail
from .paging import check_integers, cumulative, gather, sequence_ranges

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``mask(sequence, head, q_position, k_position) -> bool``: positions are absolute, the four int64 tensors broadcast
against each other and the result to [heads, rows, keys]; the order of a FlexAttention ``mask_mod``."""

# 32 MiB of float64 scores: a few such temporaries fit beside a model, and a matrix product of that size is efficient.
_SCORES_AT_ONCE = 2**22
_ROWS_AT_ONCE = 256


class AttentionResult(NamedTuple):
    """``out`` [T, Hq, Dv] and the natural-log ``lse`` [Hq, T]; or [B, Sq, Hq, Dv] and [B, Hq, Sq]."""

    out: torch.Tensor
    lse: torch.Tensor


class _Scoring(NamedTuple):
    softmax_scale: float
    left: int
    right: int
    softcap: float
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensors(**{name: tensor})
        if not tensor.dtype.is_floating_point:
            fail(name, "of a floating-point dtype", tensor.dtype, TypeError)
        if tensor.device != q.device:
            fail(name, f"on {q.device}", tensor.device)
    if q.ndim not in (3, 4):
        fail("q", "3-D [T, Hq, D] or 4-D [B, Sq, Hq, D]", f"{q.ndim}-D")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != q.ndim:
            fail(name, f"{q.ndim}-D as q is", f"{tensor.ndim}-D")
    if k.shape[-1] != q.shape[-1]:
        fail("k", f"of head size {q.shape[-1]}, as q", k.shape[-1])
    if v.shape[:-1] != k.shape[:-1]:
        fail("v", f"of shape {[*k.shape[:-1], 'Dv']}", list(v.shape))
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        fail("q", f"of a multiple of {k.shape[-2]} heads, k's", q.shape[-2])
    if q.ndim == 4 and k.shape[0] != q.shape[0]:
        fail("k", f"of batch {q.shape[0]}, as q", k.shape[0])


def _per_head(name: str, values: torch.Tensor | None, heads: int, like: torch.Tensor) -> torch.Tensor | None:
    if values is None:
        return None
    check_tensors(**{name: values})
    if values.shape != (heads,):
        fail(name, f"of shape [{heads}], one for each query head", list(values.shape))
    return values.to(device=like.device, dtype=like.dtype)


def _window(window: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2):
        fail("window", "(left, right), two ints", describe(window), TypeError)
    left, right = (
        as_int("window", side, "(left, right), two ints") for side in ((-1, -1) if window is None else window)
    )
    if min(left, right) < -1:
        fail("window", "(left, right) of -1 (unlimited) or more", (left, right))
    return left, 0 if causal else right


def _expand_mask(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if mask.dtype != torch.bool:
        fail("mask", "bool", mask.dtype, TypeError)
    sizes = zip(mask.shape[::-1], shape[::-1], strict=False)
    if mask.ndim > len(shape) or any(got not in (1, want) for got, want in sizes):
        fail("mask", f"broadcastable to {list(shape)}", list(mask.shape))
    return mask.expand(shape)


def _key_range(position: torch.Tensor, left: int, right: int, length: int) -> tuple[int, int]:
    """The keys (first, last + 1) that rows at these positions may see."""
    first = 0 if left < 0 else max(0, int(position.min()) - left)
    last = length if right < 0 else min(length, int(position.max()) + right + 1)
    return first, max(first, last)


def _by_batch(out: torch.Tensor, lse: torch.Tensor, batch: int, length: int) -> AttentionResult:
    return AttentionResult(
        out.reshape(batch, length, *out.shape[1:]), rearrange(lse, "h (b s) -> b h s", b=batch, s=length)
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_position: torch.Tensor,
    k_position: torch.Tensor,
    visible: torch.Tensor,
    heads: torch.Tensor,
    how: _Scoring,
) -> AttentionResult:
    """q [G, R, D], k [K, D], v [K, Dv], visible [G, R, K] -> out [G, R, Dv], lse [G, R]."""
    scores = q @ k.T * how.softmax_scale
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.alibi_slopes is not None:
        scores = scores + how.alibi_slopes[heads][:, None, None] * (k_position - q_position[:, None])
    scores = scores.masked_fill(~visible, -torch.inf)

    row_max = scores.amax(2) if k.shape[0] else scores.new_full(scores.shape[:2], -torch.inf)
    if how.sinks is not None:
        row_max = torch.maximum(row_max, how.sinks[heads][:, None])
    # A row that sees nothing has no largest score: shifting by 0 leaves its weights exp(-inf) = 0.
    shift = row_max.masked_fill(row_max == -torch.inf, 0)
    weights = torch.exp(scores - shift[..., None])
    total = weights.sum(2)
    if how.sinks is not None:
        total = total + torch.exp(how.sinks[heads][:, None] - shift)

    strange = ~torch.isfinite(v)
    out = weights @ v.masked_fill(strange, 0) / total[..., None]
    if bool(strange.any()):
        out = out.masked_fill(visible.to(v.dtype) @ strange.to(v.dtype) > 0, torch.nan)
    out = torch.where(visible.any(2)[..., None], out, 0)
    return AttentionResult(out, shift + torch.log(total))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: torch.Tensor | MaskFunction | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
    out_dtype: torch.dtype | None = None,
) -> AttentionResult:
    """``out = softmax(scores) v`` over the keys each row sees, with the natural logarithm of the softmax's denominator.

    Query i of a sequence stands at position ``k_len - q_len + i`` (aligned to the right), key j at position j.
    ``scores = softmax_scale * q.k``, then ``softcap * tanh(scores / softcap)``, then
    ``+ slope * (key - query position)``.

    Args:
        q, k, v: packed ``[T, Hq, D]``, ``[Tk, Hkv, D]``, ``[Tk, Hkv, Dv]``, or dense with a batch dimension in front;
            any float dtype and strides. Hq is a multiple of Hkv: query head h reads kv head ``h // (Hq / Hkv)``.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 or int64 of packed tensors, both or neither (one sequence).
        softmax_scale: ``D ** -0.5`` when None; 0 is a scale like any other.
        causal: key position <= query position.
        window: (left, right): key position in [query - left, query + right]; -1 on a side is unlimited.
        mask: what is visible besides: bool, broadcastable to [Hq, T, Tk] (packed rows and keys; only a sequence's own
            block is read) or [B, Hq, Sq, Sk]; or a function, see :data:`MaskFunction`.
        sinks: [Hq] logits, neither scaled nor capped, that stand in the denominator and so in the lse only.
        softcap: 0 is off.
        alibi_slopes: [Hq].
        rows: int64 [R] packed rows to compute, in the order of the results: a sample where the whole would take long.
        compute_dtype: of every step, inputs being converted first.
        out_dtype: of both results; ``compute_dtype`` without it.

    Returns out [T, Hq, Dv] and lse [Hq, T] (with ``rows`` R for T), or [B, Sq, Hq, Dv] and [B, Hq, Sq]. A row that sees
    no key is 0 and its lse the sink, or -inf. A row of no sequence is 0 and -inf. NaN or inf in a value that a row sees
    makes that element of the row NaN; in one that it does not see it changes nothing.

    Raises TypeError or ValueError, naming the argument, for dtypes, shapes, devices and numbers that do not fit.
    """
    _check_tensors(q, k, v)
    if not compute_dtype.is_floating_point:
        fail("compute_dtype", "a floating-point dtype", compute_dtype, TypeError)
    check_float("softcap", softcap)
    if softmax_scale is not None:
        check_float("softmax_scale", softmax_scale)
    if mask is not None and not isinstance(mask, torch.Tensor) and not callable(mask):
        fail("mask", "a bool tensor or a function of positions", describe(mask), TypeError)
    if not softcap >= 0:
        fail("softcap", "0 (off) or more", softcap)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing, given = ("cu_seqlens_q", "cu_seqlens_k") if cu_seqlens_q is None else ("cu_seqlens_k", "cu_seqlens_q")
        fail(missing, f"given, as {given} is", None)
    dense = q.ndim == 4
    if dense and (cu_seqlens_q is not None or rows is not None):
        fail("q", "packed [T, Hq, D] with cu_seqlens or rows", "4-D")
    batch, q_len, k_len = (q.shape[0], q.shape[1], k.shape[1]) if dense else (1, q.shape[0], k.shape[0])
    if dense:
        cu_seqlens_q = cumulative(torch.full((batch,), q_len, device="cpu"))
        cu_seqlens_k = cumulative(torch.full((batch,), k_len, device="cpu"))
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    num_heads, heads_kv, dim = q.shape[1], k.shape[1], q.shape[2]
    device = q.device
    like = torch.empty(0, dtype=compute_dtype, device=device)
    left, right = _window(window, causal)
    how = _Scoring(
        dim**-0.5 if softmax_scale is None else softmax_scale,
        left,
        right,
        softcap,
        _per_head("sinks", sinks, num_heads, like),
        _per_head("alibi_slopes", alibi_slopes, num_heads, like),
    )
    mask_table = None
    if isinstance(mask, torch.Tensor):
        shape = (batch, num_heads, q_len, k_len) if dense else (num_heads, q_len, k_len)
        mask_table = _expand_mask(mask.to(device), shape)
    if rows is not None:
        check_integers("rows", rows, (None,))
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < q.shape[0]:
            fail("rows", f"from 0 to {q.shape[0] - 1}", [int(rows.min()), int(rows.max())])
    rows = torch.arange(q.shape[0], device=device) if rows is None else rows.to(device=device, dtype=torch.int64)

    q_ranges = sequence_ranges("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    k_ranges = sequence_ranges("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if len(q_ranges) != len(k_ranges):
        fail("cu_seqlens_k", f"of {len(q_ranges) + 1} elements, as cu_seqlens_q", len(k_ranges) + 1)

    out = like.new_zeros(len(rows), num_heads, v.shape[2])
    lse = like.new_full((num_heads, len(rows)), -torch.inf)
    group = num_heads // heads_kv
    all_heads = torch.arange(num_heads, device=device)
    for sequence, ((q_begin, q_end), (k_begin, k_end)) in enumerate(zip(q_ranges, k_ranges, strict=True)):
        places = torch.nonzero((rows >= q_begin) & (rows < q_end))[:, 0]
        length = k_end - k_begin
        # A window bounds the keys that a block of rows can see.
        span = max(1, length if min(left, right) < 0 else min(length, left + right + _ROWS_AT_ONCE))
        heads_at_once = max(1, min(group, _SCORES_AT_ONCE // span))
        rows_at_once = max(1, min(_ROWS_AT_ONCE, _SCORES_AT_ONCE // (heads_at_once * span)))
        for head_kv, head, start in product(
            range(heads_kv), range(0, group, heads_at_once), range(0, len(places), rows_at_once)
        ):
            heads = all_heads[head_kv * group :][:group][head : head + heads_at_once]
            chosen = places[start : start + rows_at_once]
            position = rows[chosen] - q_end + length
            first, last = _key_range(position, left, right, length)
            k_position = torch.arange(first, last, device=device)
            visible = torch.ones(len(heads), len(chosen), len(k_position), dtype=torch.bool, device=device)
            if left >= 0:
                visible &= k_position >= position[:, None] - left
            if right >= 0:
                visible &= k_position <= position[:, None] + right
            if mask_table is not None:
                # A packed mask is indexed by packed rows and keys, a dense one by the places in its own sequence.
                own = mask_table[sequence] if dense else mask_table
                row, key = (rows[chosen] - q_begin, k_position) if dense else (rows[chosen], k_position + k_begin)
                visible &= own[heads[:, None, None], row[:, None], key]
            elif mask is not None and not isinstance(mask, torch.Tensor):
                number = torch.tensor(sequence, device=device)
                visible &= mask(number, heads[:, None, None], position[:, None], k_position)
            keys = slice(k_begin + first, k_begin + last)
            result = _attend(
                rearrange(q[rows[chosen, None], heads], "r g d -> g r d").to(compute_dtype),
                k[keys, head_kv].to(compute_dtype),
                v[keys, head_kv].to(compute_dtype),
                position,
                k_position,
                visible,
                heads,
                how,
            )
            out[chosen[:, None], heads] = rearrange(result.out, "g r d -> r g d")
            lse[heads[:, None], chosen] = result.lse
    out, lse = out.to(out_dtype or compute_dtype), lse.to(out_dtype or compute_dtype)
    if dense:
        return _by_batch(out, lse, batch, q_len)
    return AttentionResult(out, lse)


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionResult:
    """Attention over the keys of a and of b together, from the results over each: out [T, H, Dv], lse [H, T].

    With natural logarithms, ``lse = log(exp(lse_a) + exp(lse_b))`` and
    ``out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)``. A part with lse -inf, or +inf as FlashMLA writes it, saw
    nothing and is left out whatever its ``out`` holds; where both are, out is 0 and lse -inf. Sinks belong in exactly
    one of the parts. Results are in ``compute_dtype``. Raises ValueError for shapes that differ.
    """
    check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if out_a.ndim != 3:
        fail("out_a", "3-D [T, H, Dv]", f"{out_a.ndim}-D")
    if out_b.shape != out_a.shape:
        fail("out_b", f"of shape {list(out_a.shape)}, as out_a", list(out_b.shape))
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tensor.shape != (out_a.shape[1], out_a.shape[0]):
            fail(name, f"of shape {[out_a.shape[1], out_a.shape[0]]}", list(tensor.shape))
    lse_a, lse_b = (x.to(compute_dtype).masked_fill(x == torch.inf, -torch.inf) for x in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a, dtype=compute_dtype)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part_lse - lse).T[..., None]
        out = out + torch.where(part_lse.T[..., None] == -torch.inf, 0, part.to(compute_dtype) * weight)
    return AttentionResult(out, lse)


def mla_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    dim_nope: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionResult:
    """Attention over a paged latent cache whose first ``dim_nope`` elements are the value too.

    Args:
        q: [B, Sq, Hq, dim], dim = dim_nope + rope.
        kv: [pages, page, 1, dim]; the new tokens are already in it.
        cache_seqlens: [B] int32 or int64, from 0 up; may be less than Sq.
        block_table: [B, max_pages] int32 or int64.
        softmax_scale: ``dim ** -0.5`` when None.
        causal: query j sees keys below ``cache_seqlens - Sq + j + 1``; otherwise all below ``cache_seqlens``.

    Returns out [B, Sq, Hq, dim_nope] and lse [B, Hq, Sq]; 0 and -inf for a query that sees nothing. Source: DeepSeek-V2
    (arXiv 2405.04434), section 2.1, with the up-projections absorbed. Errors as :func:`attention` and
    :func:`kernel_reference.paging.gather`.
    """
    if q.ndim != 4:
        fail("q", "4-D [B, Sq, Hq, dim]", f"{q.ndim}-D")
    if kv.ndim != 4 or kv.shape[2] != 1 or kv.shape[3] != q.shape[3]:
        fail("kv", f"of shape [pages, page, 1, {q.shape[3]}]", list(kv.shape))
    if not 0 < dim_nope <= q.shape[3]:
        fail("dim_nope", f"from 1 to {q.shape[3]}", dim_nope)
    batch, length = q.shape[:2]
    check_integers("cache_seqlens", cache_seqlens, (batch,))
    check_integers("block_table", block_table, (batch, None))
    latent = gather(kv, block_table, cache_seqlens)
    result = attention(
        q.flatten(0, 1),
        latent.tokens,
        latent.tokens[..., :dim_nope],
        cu_seqlens_q=cumulative(torch.full((batch,), length, device="cpu")),
        cu_seqlens_k=latent.cu_seqlens,
        softmax_scale=softmax_scale,
        causal=causal,
        compute_dtype=compute_dtype,
    )
    return _by_batch(result.out, result.lse, batch, length)
