"""What arguments of sparse attention must be: each query token lists the keys that it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernel_reference.checks import (
    check_dtype,
    check_float,
    check_int,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    fail,
    known,
)
from kernel_reference.plans import brief
from tilelang_mla.arguments import NAMES, check_dims, check_parts, check_results, check_rows
from tilelang_mla.caches import RECORD, check_8bit_cache, format_of
from tilelang_mla.plan import DecodeProblem, DecodeTiles
from tilelang_mla.sparse.tiles import takes

Tensor = torch.Tensor


class SparseTensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` and ``lse`` are written."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    first_part: Tensor | None
    order: Tensor | None
    out: Tensor
    lse: Tensor | None


class SparseOptions(NamedTuple):
    """The other arguments of the op, in its order; the plan's are its tiles."""

    dim_nope: int
    softmax_scale: float
    plan: Sequence[int] | None = None


class SparsePrefillTensors(NamedTuple):
    """The tensors of the op of prefill, in its order; the last three are written."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    out: Tensor
    max_logits: Tensor
    lse: Tensor


class SparsePrefillOptions(NamedTuple):
    """The other arguments of the op of prefill, in its order."""

    d_v: int
    sm_scale: float
    plan: Sequence[int] | None = None


def check_sparse(
    tensors: SparseTensors, options: SparseOptions, name: str = "kv"
) -> tuple[DecodeProblem, DecodeTiles | None]:
    """Queries, a paged cache and lists of its keys; the problem, whose sequences are the lists, and a plan's tiles."""
    q, kv, indices, _, _, first_part, order, out, lse = tensors
    dim_nope = options.dim_nope
    check_float("softmax_scale", options.softmax_scale, "a float or None")
    check_int("dim_nope", dim_nope)
    if q.ndim != 4:
        fail("q", "[B, Sq, Hq, dim_nope + dpe]", describe(q))
    check_dtype("q", q, torch.bfloat16, torch.float16)
    batch, seqlen_q, num_heads, width = q.shape
    check_dims("dim_nope", "q", dim_nope, width - dim_nope)
    cache = ""
    if format_of(kv) == "656":
        cache = check_8bit_cache(q, kv, dim_nope, None, name)
    elif kv.dtype != q.dtype:
        wanted = f"{q.dtype} as q is, or torch.uint8 for records of {RECORD} bytes"
        fail(f"{name}.dtype", wanted, describe(kv), TypeError)
    else:
        check_same_device(name, kv, "q", q)
        if kv.ndim != 4 or known(kv.shape[2] != 1) or known(kv.shape[3] != width) or known(kv.shape[1] < 1):
            fail(name, f"[pages, page_size, 1, {width}], of 1 kv head", describe(kv))
    _check_lists(q, tensors, (batch, seqlen_q, None), num_heads)
    check_rows("q", q)
    check_rows(name, kv)
    check_results(q, out, lse, (batch, seqlen_q, num_heads, dim_nope), (batch, num_heads, seqlen_q))
    lists = batch * seqlen_q
    problem = DecodeProblem(
        num_heads, dim_nope, width - dim_nope, 1, lists, indices.shape[2], kv.shape[1], 8 * q.element_size(),
        kv.shape[0], options.softmax_scale, False, False, cache,
    )  # fmt: skip
    tiles = DecodeTiles.from_ints(options.plan)
    check_parts(problem, tiles, first_part, order, q, NAMES)
    return problem, tiles


def check_sparse_prefill(
    tensors: SparsePrefillTensors, options: SparsePrefillOptions
) -> tuple[DecodeProblem, DecodeTiles | None]:
    """Queries, keys in one row each and lists of them; the problem, whose sequences are the lists, and a plan."""
    q, kv, indices, _, _, out, max_logits, lse = tensors
    check_float("sm_scale", options.sm_scale)
    check_int("d_v", options.d_v)
    if q.ndim != 3:
        fail("q", "[Tq, Hq, d_qk]", describe(q))
    check_dtype("q", q, torch.bfloat16, torch.float16)
    tokens, num_heads, width = q.shape
    if known(num_heads < 1):
        fail("q", "of at least 1 head", describe(q))
    check_dims("d_v", "q", options.d_v, width - options.d_v)
    check_same_dtype("kv", kv, "q", q)
    check_same_device("kv", kv, "q", q)
    if kv.ndim != 3 or known(kv.shape[1] != 1) or known(kv.shape[2] != width):
        fail("kv", f"[Tk, 1, {width}], of 1 kv head", describe(kv))
    _check_lists(q, tensors, (tokens, 1, None), num_heads)
    check_rows("q", q)
    check_rows("kv", kv)
    check_results(q, out, None, (tokens, num_heads, options.d_v), ())
    for name, tensor in (("max_logits", max_logits), ("lse", lse)):
        check_dtype(name, tensor, torch.float32)
        check_shape(name, tensor, (tokens, num_heads))
        check_same_device(name, tensor, "q", q)
        if not tensor.is_contiguous():
            fail(name, "contiguous", describe(tensor))
    problem = DecodeProblem(
        num_heads, options.d_v, width - options.d_v, 1, tokens, indices.shape[2], 1, 8 * q.element_size(),
        kv.shape[0], options.sm_scale, False,
    )  # fmt: skip
    plan = DecodeTiles.from_ints(options.plan)
    if plan is not None and not takes(plan, problem):
        fail("plan", f"one of whole lists made for {brief(problem)}", plan)
    return problem, plan


def _check_lists(
    q: Tensor, tensors: SparseTensors | SparsePrefillTensors, shape: tuple[int | None, ...], num_heads: int
) -> None:
    """Lists of this shape, as many lengths as the first size, and a sink of each head."""
    lengths: tuple[int | None, ...] = shape[:1]
    for what, tensor, sizes in (("indices", tensors.indices, shape), ("topk_length", tensors.topk_length, lengths)):
        if tensor is None:
            continue
        check_dtype(what, tensor, torch.int32)
        check_same_device(what, tensor, "q", q)
        if tensor.ndim != len(sizes) or any(
            size is not None and known(own != size) for own, size in zip(tensor.shape, sizes, strict=True)
        ):
            wanted = ", ".join("topk" if size is None else str(size) for size in sizes)
            fail(what, f"[{wanted}]", describe(tensor))
        if not tensor.is_contiguous():
            fail(what, "contiguous", describe(tensor))
    attn_sink = tensors.attn_sink
    if attn_sink is not None:
        check_dtype("attn_sink", attn_sink, torch.float32)
        check_shape("attn_sink", attn_sink, (num_heads,))
        check_same_device("attn_sink", attn_sink, "q", q)
        if not attn_sink.is_contiguous():
            fail("attn_sink", "contiguous", describe(attn_sink))
