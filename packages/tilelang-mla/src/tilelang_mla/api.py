"""The public functions: check the arguments, say what is wrong, call the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch

from kernel_reference.checks import (
    REFUSALS,
    check_bool,
    check_dense,
    check_int,
    describe,
    fail,
    given,
    known,
)
from kernel_reference.differentiable import are_wanted
from kernel_reference.dispatch import runs_now
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import refuse_derivatives
from tilelang_mla import arguments, calls, ops, schedule, straight, waves
from tilelang_mla import plan as plans
from tilelang_mla.arguments import Names, PrefillOptions, PrefillTensors
from tilelang_mla.gradients import ops as gradients
from tilelang_mla.plan import DeviceLimits, PrefillPlan
from tilelang_mla.schedule import DecodePlan

Tensor = torch.Tensor
_prefill = torch.ops.tilelang_mla.prefill.default

_NAMES = Names()
# DeepSeek V2's and V3's latent and rope.
_DIM_NOPE, _DIM_ROPE = 512, 64


class AttentionResult(NamedTuple):
    """``out`` in q's dtype and the natural logarithm of the softmax's denominator, ``lse``, in float32.

    Of prefill they are [Tq, H, dv] and [H, Tq], of decoding [B, Sq, Hq, dim_nope] and [B, Hq, Sq].
    """

    out: Tensor
    lse: Tensor


@overload
def flash_mla_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    plan: PrefillPlan | None = None,
) -> Tensor: ...


@overload
def flash_mla_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: Literal[True],
    plan: PrefillPlan | None = None,
) -> AttentionResult: ...


@overload
def flash_mla_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: bool,
    plan: PrefillPlan | None = None,
) -> Tensor | AttentionResult: ...


def flash_mla_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    plan: PrefillPlan | None = None,
) -> Tensor | AttentionResult:
    """Softmax attention of a ragged batch with separate heads: prefill of multi-head latent attention.

    ``out = softmax(softmax_scale * q k^T) v``. With causal, query i of a sequence of ``q_len`` queries and ``k_len``
    keys sees the keys up to ``k_len - q_len + i`` (aligned to the right); either may be the longer. Source:
    FlashAttention-2 (arXiv 2307.08691) at the head sizes of DeepSeek-V2 (arXiv 2405.04434).

    Args:
        q: [Tq, H, dqk]; bfloat16 or float16; dqk a multiple of 32 up to 256 (192 in DeepSeek V2 and V3).
        k, v: [Tk, Hkv, dqk] and [Tk, Hkv, dv], of q's dtype; dv a multiple of 64 up to 256. Hkv divides H: query head h
            reads kv head ``h // (H / Hkv)``. Rows of q, k and v are contiguous and multiples of 16 bytes apart.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, contiguous, from 0, never falling, at most Tq and Tk: where the
            sequences begin; any may be empty. Rows behind the last one are 0 in the result and -inf in lse.
        max_seqlen_q, max_seqlen_k: the most queries and keys of a sequence, or more; they size the launch only.
        softmax_scale: ``dqk ** -0.5`` when None; 0 is a scale like any other.
        causal: whether later keys are masked.
        out: a tensor to write instead of a new one: [Tq, H, dv] of q's dtype; rows contiguous, any other strides that
            give each element its own address and do not interleave dimensions, no overlap with inputs.
        return_lse: whether to return lse too.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        out, contiguous if new; with return_lse AttentionResult(out, lse), lse [H, Tq] in float32. A query that sees no
        key gives 0 and -inf. NaN in what no query of a sequence sees changes nothing; in what some query sees it may
        contaminate neighbouring rows. Differentiable in q, k and v, on a GPU where dqk + dv is at most 320; gradients
        are the same bits at every call.

    Raises:
        TypeError, ValueError: an argument is not as said above, requires a gradient beside ``out``, carries
            a tangent (jvp) or is batched by torch.vmap; nothing has been written. What only device memory tells is
            checked on a CPU, and on a GPU inside ``kernel_reference.checks.validate_values``. Else bounds of queries
            are clamped to the rows there are, and a sequence of impossible bounds of keys gives 0 and -inf.
    """
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    check_int("max_seqlen_q", max_seqlen_q, 0)
    check_int("max_seqlen_k", max_seqlen_k, 0)
    scale = calls.checked_scale(softmax_scale)
    ints = plan_as_ints(plan, PrefillPlan)
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **given(out=out)}
    if out is None and are_wanted(q, k, v):
        both = _differentiable(named, (max_seqlen_q, max_seqlen_k, scale, causal, ints))
        return both if return_lse else both.out
    try:
        refuse_derivatives(**named)
        result = q.new_empty((*q.shape[:2], v.shape[2])) if out is None else out
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
    except REFUSALS:
        check_dense(**named)
        calls.check_ranks({"q": (q, "[Tq, H, dqk]", 3), "v": (v, "[Tk, Hkv, dv]", 3)})
        raise
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, result, lse)
    options = (max_seqlen_q, max_seqlen_k, scale, causal, ints)
    run = ops.prefill_now if out is None and runs_now(tensors) else _prefill
    try:
        run(*tensors, *options)
    except REFUSALS:
        check_dense(**named)
        arguments.check_prefill(PrefillTensors(*tensors), PrefillOptions(*options))
        raise
    return result if lse is None else AttentionResult(result, lse)


def _differentiable(named: dict[str, Tensor], numbers: Sequence[Any]) -> AttentionResult:
    """By the op that autograd knows."""
    q, _, v, *_ = named.values()
    try:
        most_q, most_k, scale, *others = numbers
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return AttentionResult(*gradients.attention(*named.values(), most_q, most_k, scale, *others))
    except REFUSALS:
        check_dense(**named)
        calls.check_ranks({"q": (q, "[Tq, H, dqk]", 3), "v": (v, "[Tk, Hkv, dv]", 3)})
        raise


@overload
def flash_mla_with_kvcache(
    q: Tensor,
    kv: Tensor,
    seqlens_k: Tensor | None,
    block_table: Tensor | None,
    dim_nope: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    kv_scale: float | Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor: ...


@overload
def flash_mla_with_kvcache(
    q: Tensor,
    kv: Tensor,
    seqlens_k: Tensor | None,
    block_table: Tensor | None,
    dim_nope: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: Literal[True],
    kv_scale: float | Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> AttentionResult: ...


@overload
def flash_mla_with_kvcache(
    q: Tensor,
    kv: Tensor,
    seqlens_k: Tensor | None,
    block_table: Tensor | None,
    dim_nope: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: bool,
    kv_scale: float | Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor | AttentionResult: ...


def flash_mla_with_kvcache(
    q: Tensor,
    kv: Tensor,
    seqlens_k: Tensor | None,
    block_table: Tensor | None,
    dim_nope: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    kv_scale: float | Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor | AttentionResult:
    """Attention of a few query tokens a sequence to a paged latent cache: decoding with the projections absorbed.

    ``out = softmax(softmax_scale * q kv^T) kv[..., :dim_nope]``: all query heads share one kv head, whose first
    ``dim_nope`` elements, the latent, are the value too. With causal, query token j of Sq sees the first
    ``seqlens_k - Sq + j + 1`` keys (the new tokens are in the cache already), else all. Source: DeepSeek-V2
    (arXiv 2405.04434), section 2.1 and appendix C.

    Args:
        q: [B, Sq, Hq, dim_nope + dpe]; bfloat16 or float16; dpe, the rope, a multiple of 32 up to 128, or 0.
        kv: [pages, page_size, 1, dim_nope + dpe], of q's dtype, any page_size from 1 on. Rows of q and kv are
            contiguous and multiples of 16 bytes apart, so that kv may be a view with a stride between pages. Or in 8
            bits, from :func:`quantize_kv`: float8_e4m3fn of the same shape, or records, uint8 [pages, page_size, 1,
            656], of 512 + 64 elements beside a bfloat16 q.
        seqlens_k: [B] int32, contiguous: tokens of each sequence, the new ones counted; 0, or fewer than Sq, too. Or
            [B, Sq], the keys that each query token sees, never fewer than the one before it, in place of the causal
            rule.
        block_table: [B, max_pages] int32, rows contiguous: position p of sequence b is in page
            ``block_table[b, p // page_size]``. A page that the pool does not have reads as zeros.
        dim_nope: elements of the latent: a multiple of 64 up to 512.
        softmax_scale: ``(dim_nope + dpe) ** -0.5`` when None, as in FlashMLA. A model's own is that of its separate
            heads, for DeepSeek V2 and V3 ``(128 + 64) ** -0.5`` times what their rope scaling asks: give it.
        causal: whether later tokens are masked.
        out: a tensor to write instead of a new one: [B, Sq, Hq, dim_nope] of q's dtype; rows contiguous, any other
            strides that give each element its own address and do not interleave dimensions, no overlap with inputs.
        return_lse: whether to return lse too.
        kv_scale: above 0, what a cache of float8_e4m3fn is multiplied by: a float, or one float32 on the device, which
            costs the host less; 1 when None. Else None.
        indices: [B, Sq, topk] int32, contiguous: the keys that each query token attends to, ``page * page_size + row``
            of each; what is no position in the pool, -1 say, is none. seqlens_k, block_table and causal are then not
            looked at, and may be None. kv is of q's dtype or of records. Sparse attention of DeepSeek-V3.2.
        topk_length: [B] int32: how many entries of each list count, at most topk; all when None.
        attn_sink: [Hq] float32: a logit of each head that takes part in the softmax and has no value; lse does not
            know of it.
        plan: how keys are cut in parts, from :func:`plan_decode` for as many sequences and for as many query tokens x
            heads, else it is refused; of lists, for B x Sq sequences of one query token. None: programs share the keys
            of the batch evenly, by the lengths that the device holds.

    Returns:
        out, contiguous if new; with return_lse AttentionResult(out, lse), lse [B, Hq, Sq] in float32. A query that sees
        no key gives 0, and -inf in lse, where FlashMLA gives +inf. NaN in what no query of a sequence sees (the unused
        tail of a page, pages of others) changes nothing; in what some query sees it may contaminate
        neighbouring rows. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, requires a gradient, carries a tangent (jvp) or is
            batched by torch.vmap; nothing has been written. What only device memory tells is checked on a CPU, and on
            a GPU inside ``kernel_reference.checks.validate_values``. Else a sequence of a length below 0, or of more
            than its row of the block table has room for, gives 0 and -inf; so does, checked or not, one whose
            topk_length is below 0 or above topk.
    """
    optional = out is not None or indices is not None or topk_length is not None or attn_sink is not None
    if not optional and (plan is None or type(plan) is DecodePlan):
        # What is said below of arguments has been seen to hold for those that look like these.
        tiles, first_part, order = (None, None, None) if plan is None else plan
        again = straight.decoded_again(
            (q, kv, seqlens_k, block_table, first_part, order, kv_scale),
            (dim_nope, softmax_scale, causal, return_lse, tiles),
        )
        if again is not None:
            return again[0] if again[1] is None else AttentionResult._make(again)
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    parts = None if plan is None else calls.decode_parts(plan)
    scale = calls.checked_scale(softmax_scale)
    if indices is not None:
        if kv_scale is not None:
            fail("kv_scale", "None with indices", describe(kv_scale))
        sparse = calls.SparseCall(q, kv, indices, topk_length, attn_sink, dim_nope, scale)
        result, lse = calls.run_sparse(sparse, out, return_lse, parts, _NAMES)
        return result if lse is None else AttentionResult(result, lse)
    for name, value in (("topk_length", topk_length), ("attn_sink", attn_sink)):
        if value is not None:
            fail(name, "None without indices", describe(value))
    result, lse = calls.run_decode(
        calls.Call(q, kv, seqlens_k, block_table, dim_nope, scale, causal, kv_scale), out, return_lse, parts, _NAMES
    )
    return result if lse is None else AttentionResult(result, lse)


def plan_decode(
    seqlens_k: Tensor,
    num_heads: int,
    seqlen_q: int = 1,
    *,
    max_seqlen_k: int | None = None,
    num_splits: int | None = None,
    dim_nope: int = _DIM_NOPE,
    dim_rope: int = _DIM_ROPE,
    cores: int | None = None,
) -> DecodePlan:
    """The split-KV schedule of a ragged batch: the plan that :func:`flash_mla_with_kvcache` takes.

    Each sequence gets at least one part, and parts share its keys equally. A step of decoding makes one plan and uses
    it in every layer. It is made by torch operations on the lengths' device, with no host synchronisation, so that it
    may be captured in a CUDA graph or compiled too. Made outside one, it may be replayed with any other lengths: the
    kernel cuts the lengths that it finds, and results are as right, only less balanced. Source: the parts of
    Flash-Decoding (https://pytorch.org/blog/flash-decoding/), their number taken for the least estimated time.

    Args:
        seqlens_k: [B] int32, contiguous, as :func:`flash_mla_with_kvcache` takes it.
        num_heads, seqlen_q: Hq and Sq.
        max_seqlen_k: the most keys that a sequence may have, or more; fewer candidates are looked at where it is small.
            None: any number.
        num_splits: cut each sequence in this many parts, 1 to 256, whatever its length and the batch: a sequence's
            result is then, to the last bit, independent of the rest of the batch. None: by the lengths.
        dim_nope, dim_rope: elements of latent and rope.
        cores: how many to plan for; those of the lengths' device when None (a CPU counts as one).

    Returns:
        DecodePlan(tiles, first_part, order): numbers that depend on neither lengths nor batch, and on the device int32
        [B + 1], the first part of each sequence, and int32 [tiles.num_parts(B)], the order in which parts start. The
        grid has so many parts for each tile of packed query tokens x heads.

    Raises TypeError or ValueError, naming the argument, for dtypes, shapes and numbers that do not fit. Lengths that
    cannot be are clamped.
    """
    num_heads, seqlen_q = check_int("num_heads", num_heads, 1), check_int("seqlen_q", seqlen_q, 0)
    if max_seqlen_k is not None:
        max_seqlen_k = check_int("max_seqlen_k", max_seqlen_k, 0)
    if num_splits is not None:
        num_splits = check_int("num_splits", num_splits, 1, plans.MOST_SPLITS)
    dim_rope, dim_nope = check_int("dim_rope", dim_rope), check_int("dim_nope", dim_nope)
    arguments.check_dims("dim_nope", "dim_rope", dim_nope, dim_rope)
    if cores is not None:
        cores = check_int("cores", cores, 1)
    arguments.check_plan_lengths("seqlens_k", seqlens_k)
    limits = calls.device_limits(seqlens_k.device)
    if cores is not None:
        limits = DeviceLimits(cores, limits.shared_memory)
    rows = num_heads * seqlen_q
    tiles = plans.decode_tiles(rows, dim_nope, dim_rope, max_seqlen_k, limits, num_splits, known=known)
    at_once = plans.parts_at_once(rows, limits.cores)
    return DecodePlan(tiles, *schedule.cut(seqlens_k, tiles, rows, max_seqlen_k, at_once))


def get_splits(
    batch_size: int,
    num_heads: int,
    seqlen_q: int,
    avg_seqlen_k: int,
    block_size_h: int = 64,
    block_size_n: int = 128,
    streaming_info: Sequence[int] | None = None,
    *,
    device: torch.device | str | None = None,
) -> int:
    """In how many parts a static schedule would cut the keys of every sequence: a power of two.

    ``natural = batch_size * seqlen_q * ceil(num_heads / block_size_h)`` tiles are there without; 1 where that is
    ``target = 2 * cores`` or more; else ``ceil(target / natural)``, at most one a block of keys, rounded down
    to a power of two.

    Args:
        batch_size, num_heads, seqlen_q, avg_seqlen_k: sequences, query heads, query tokens and keys of a sequence.
        block_size_h, block_size_n: heads of a tile and keys of a block.
        streaming_info: [sink_blocks, local_blocks]: at most their sum of blocks is read of a sequence. A shorter list
            is ignored.
        device: whose SMs are meant, that of q; the current GPU when None (a CPU counts as one).

    Raises TypeError or ValueError, naming the argument, for what is no int or below its least value.
    """
    least = {"batch_size": 0, "num_heads": 0, "seqlen_q": 0, "avg_seqlen_k": 0, "block_size_h": 1, "block_size_n": 1}
    numbers = (batch_size, num_heads, seqlen_q, avg_seqlen_k, block_size_h, block_size_n)
    for (name, at_least), number in zip(least.items(), numbers, strict=True):
        check_int(name, number, at_least)
    if streaming_info is not None:
        if not isinstance(streaming_info, (list, tuple)):
            fail("streaming_info", "[sink_blocks, local_blocks] or None", describe(streaming_info), TypeError)
        for place, blocks in enumerate(streaming_info):
            check_int(f"streaming_info[{place}]", blocks, 0)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = calls.device_limits(torch.device(device)).cores
    return waves.get_splits(*numbers, streaming_info, cores=cores)
