"""What arguments must be. The ops ask this, so that no call goes unchecked, not torch.compile's nor a direct one.

Every function raises ValueError or TypeError naming the argument, what it must be and what it was. What tensors and
numbers say of a call is read off them here, once: :func:`check_prefill` returns the :class:`Problem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from kernel_reference.checks import (
    MemoryOverlap,
    check_choice,
    check_dtype,
    check_elements_apart,
    check_float,
    check_int,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_window,
    describe,
    differ,
    fail,
    known,
)
from kernel_reference.paging import LAYOUTS
from prefix_prefill.covering import why_not
from prefix_prefill.plan import MOST_TOKENS, PrefillPlan, Problem
from prefix_prefill.tma import is_tma_addressable

Tensor = torch.Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_HEAD_DIMS = (16, 512)
# New tokens of a sequence that a number of draft_mask has bits for, its sign left out.
MOST_DRAFTED = 63
_CACHE = {
    "NHD": "[blocks, page, Hkv, D]",
    "HND": "[blocks, Hkv, page, D]",
    "x-packed": "[blocks, Hkv, D / x, page, x] (k_cache) and [blocks, Hkv, Dv, page] (v_cache)",
}


class PrefillTensors(NamedTuple):
    """The tensors of the op ``prefill``, in its order."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out_scale: Tensor | None
    out: Tensor
    lse: Tensor | None
    draft_mask: Tensor | None = None


class PrefillNumbers(NamedTuple):
    """What the op ``prefill`` takes behind its tensors: the window as two sides, causality in it, scales that are
    numbers, num_splits 0 for the plan's own, a plan as ints.
    """

    max_seqlen_q: int
    page_layout: str
    softmax_scale: float
    left: int
    right: int
    softcap: float
    skip_decode: bool
    k_scale: float
    v_scale: float
    out_scale: float
    num_splits: int
    # torch leaves these out where they are the schema's defaults.
    max_seqlen_k: int = MOST_TOKENS
    quantize_q: bool = False
    plan: Sequence[int] | None = None
    widen_bytes: int = 0


def prefill_arguments(given: tuple[Any, ...]) -> tuple[PrefillTensors, PrefillNumbers]:
    """The arguments of the op ``prefill`` by name."""
    count = len(PrefillTensors._fields)
    return PrefillTensors(*given[:count]), PrefillNumbers(*given[count:])


class MergeTensors(NamedTuple):
    """The tensors of the op ``merge``, in its order."""

    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor
    out: Tensor
    lse: Tensor


class Names(NamedTuple):
    """What a function calls the arguments that go by several names, for its errors."""

    block_table: str = "block_table"
    cu_seqlens_q: str = "cu_seqlens_q"
    seqlens_k: str = "seqlens_k"
    max_seqlen_q: str = "max_seqlen_q"
    max_seqlen_k: str = "max_seqlen_k"
    softmax_scale: str = "softmax_scale"
    out_scale: str = "out_scale"
    out: str = "out"

    def of(self, tensor: str) -> str:
        """What a tensor of the op is called."""
        return str(getattr(self, tensor, tensor))


NAMES = Names()


def check_prefill(tensors: PrefillTensors, numbers: PrefillNumbers, names: Names = NAMES) -> Problem:
    """New tokens, their paged cache and how they are attended to: the problem that they make, which the plan covers."""
    check_choice("page_layout", numbers.page_layout, LAYOUTS)
    check_window(numbers.left, numbers.right)
    for name in ("max_seqlen_q", "max_seqlen_k", "num_splits"):
        check_int(names.of(name), getattr(numbers, name), 0)
    for name in ("softmax_scale", "k_scale", "v_scale", "softcap"):
        check_float(names.of(name), getattr(numbers, name))
    if numbers.softcap < 0:
        fail("softcap", "0 (off) or more", numbers.softcap)

    q = tensors.q
    check_q(q)
    num_blocks, page_size, num_heads_kv = _check_caches(tensors, numbers.page_layout, _check_new(tensors), names)
    head_dim_v = value_dim(tensors.v_cache, numbers.page_layout)
    _check_lengths(tensors, names)
    for name, values in (("alibi_slopes", tensors.alibi_slopes), ("sinks", tensors.sinks)):
        if values is not None:
            _check_per_head(name, values, q)
    for name, scale in (("k_scale", tensors.k_scale), ("v_scale", tensors.v_scale)):
        if scale is not None:
            _check_scale(name, scale, num_blocks, page_size, num_heads_kv, q)
    if tensors.draft_mask is not None:
        _check_draft(tensors.draft_mask, numbers.max_seqlen_q, q, names)
    _check_out(tensors.out, tensors.out_scale, numbers.out_scale, q, head_dim_v, names)
    if tensors.lse is not None:
        _check_lse("lse", tensors.lse, q.shape[1], q.shape[0], "q", q)
        check_elements_apart("lse", tensors.lse)

    if numbers.quantize_q and (tensors.k is not None or tensors.k_cache.dtype != torch.float8_e4m3fn):
        wanted = "False unless a cache of float8_e4m3fn holds the new tokens too"
        fail("quantize_q", wanted, f"True with {describe(tensors.k_cache)}{', and k' * (tensors.k is not None)}")
    if numbers.widen_bytes < 0:
        fail("widen_bytes", "0 or more", numbers.widen_bytes)
    problem = Problem(
        num_heads=q.shape[1],
        num_heads_kv=num_heads_kv,
        head_dim=q.shape[2],
        page_size=page_size,
        tokens=q.shape[0],
        sequences=tensors.seqlens_k.shape[0],
        max_seqlen_q=numbers.max_seqlen_q,
        capacity=tensors.block_table.shape[1] * page_size,
        bits=8 * q.element_size(),
        cache_bits=8 * tensors.k_cache.element_size(),
        new_kv=tensors.k is not None,
        alibi=tensors.alibi_slopes is not None,
        draft=tensors.draft_mask is not None,
        tma=is_tma_addressable(tensors, numbers),
        num_blocks=num_blocks,
        page_layout=numbers.page_layout,
        max_seqlen_k=numbers.max_seqlen_k,
        num_splits=numbers.num_splits,
        softmax_scale=numbers.softmax_scale,
        softcap=numbers.softcap,
        left=numbers.left,
        right=numbers.right,
        skip_decode=numbers.skip_decode,
        k_scale=numbers.k_scale,
        v_scale=numbers.v_scale,
        out_scale=numbers.out_scale,
        head_dim_v=head_dim_v,
        quantize_q=numbers.quantize_q,
        widen_bytes=numbers.widen_bytes,
        token_scales=any(scale is not None and scale.ndim == 3 for scale in (tensors.k_scale, tensors.v_scale)),
    )
    plan = PrefillPlan.from_ints(numbers.plan)
    if plan is not None:
        if numbers.num_splits:
            fail("num_splits", "None where a plan is given, which has its own", numbers.num_splits)
        if wanted := why_not(plan, problem):
            fail("plan", wanted, plan)
    return problem


def overlap_of_prefill(tensors: PrefillTensors, names: Names = NAMES) -> MemoryOverlap:
    """What refuses results that share memory with an argument, for calls of tensors that look like these."""
    return MemoryOverlap({names.of(name): x for name, x in tensors._asdict().items()}, (names.out, "lse"))


def overlap_of_merge(tensors: MergeTensors) -> MemoryOverlap:
    """The same of a merge."""
    return MemoryOverlap(tensors._asdict(), ("out", "lse"))


def check_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> None:
    """Two parts of an attention, of any strides, and where the whole goes."""
    if out_a.ndim != 3:
        fail("out_a", "[T, H, Dv]", describe(out_a))
    check_dtype("out_a", out_a, *_FLOATS)
    tokens, num_heads, head_dim = out_a.shape
    if num_heads < 1 or head_dim < 1:
        fail("out_a", "of at least 1 head of at least 1 element", describe(out_a))
    for name, tensor in (("out_b", out_b), ("out", out)):
        if tensor is not None:
            check_shape(name, tensor, out_a.shape)
            check_same_device(name, tensor, "out_a", out_a)
            check_same_dtype(name, tensor, "out_a", out_a)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if tensor is not None:
            _check_lse(name, tensor, num_heads, tokens, "out_a", out_a)
    for name, tensor in (("out", out), ("lse", lse)):
        if tensor is not None:
            check_elements_apart(name, tensor)


def _check_lse(name: str, lse: Tensor, num_heads: int, tokens: int, as_in: str, first: Tensor) -> None:
    """Logarithms of sums [Hq, T] in float32."""
    check_dtype(name, lse, torch.float32)
    check_shape(name, lse, (num_heads, tokens))
    check_same_device(name, lse, as_in, first)


def check_q(q: Tensor) -> None:
    """q [T, Hq, D]."""
    if q.ndim != 3:
        fail("q", "[T, Hq, D]", describe(q))
    check_dtype("q", q, *_FLOATS)
    if q.shape[1] < 1:
        fail("q", "of at least 1 head", describe(q))
    least, most = _HEAD_DIMS
    if not least <= q.shape[2] <= most:
        fail("q", f"of a head size from {least} to {most}", q.shape[2])


def _check_new(tensors: PrefillTensors) -> int | None:
    """k [T, Hkv, D] and v [T, Hkv, Dv], or neither; their heads."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if k is None or v is None:
        if k is not v:
            name, other = ("k", "v") if k is None else ("v", "k")
            fail(name, f"given where {other} is, or both None (the new tokens are in the cache)", None)
        return None
    for name, tensor, size in (("k", k, "D"), ("v", v, "Dv")):
        if tensor.ndim != 3:
            fail(name, f"[T, Hkv, {size}] or None", describe(tensor))
        check_same_dtype(name, tensor, "q", q)
        check_same_device(name, tensor, "q", q)
    if differ((k.shape[0], k.shape[2]), (q.shape[0], q.shape[2])):
        fail("k", f"[{q.shape[0]}, Hkv, {q.shape[2]}] as q is", describe(k))
    if differ(v.shape[:2], k.shape[:2]):
        fail("v", f"[{k.shape[0]}, {k.shape[1]}, Dv] as k is", describe(v))
    return k.shape[1]


def _check_caches(
    tensors: PrefillTensors, page_layout: str, num_heads_kv: int | None, names: Names
) -> tuple[int, int, int]:
    """The pools of pages, of any strides: blocks, tokens of a page and heads."""
    q, k_cache, v_cache = tensors.q, tensors.k_cache, tensors.v_cache

    def refuse(name: str, wanted: str, cache: Tensor) -> NoReturn:
        fail(name, wanted, describe(cache) + _fitting(q, k_cache, v_cache, num_heads_kv, names))

    for name, tensor, rank in (("k_cache", k_cache, 5 if page_layout == "x-packed" else 4), ("v_cache", v_cache, 4)):
        if tensor.ndim != rank:
            refuse(name, _CACHE[page_layout], tensor)
        if tensor.dtype not in (q.dtype, *FP8):
            fail(f"{name}.dtype", f"{q.dtype} as that of q is, float8_e4m3fn or float8_e5m2", tensor.dtype, TypeError)
        check_same_device(name, tensor, "q", q)
    check_same_dtype("v_cache", v_cache, "k_cache", k_cache)
    blocks, page_size, heads, head_dim = sizes_of(k_cache, page_layout)
    if head_dim != q.shape[2]:
        refuse("k_cache", f"{_CACHE[page_layout]} with a D of {q.shape[2]} as q has", k_cache)
    if page_size < 1 or heads < 1:
        refuse("k_cache", f"{_CACHE[page_layout]} with a page and an Hkv of at least 1", k_cache)
    if num_heads_kv is not None and heads != num_heads_kv:
        refuse("k_cache", f"{_CACHE[page_layout]} with the {num_heads_kv} heads of k", k_cache)
    size = value_dim(v_cache, page_layout)
    if tuple(v_cache.shape) != _values_of(k_cache, page_layout, size):
        wanted = ", ".join(map(str, _values_of(k_cache, page_layout, "Dv")))  # type: ignore[arg-type]
        refuse("v_cache", f"[{wanted}] as k_cache is", v_cache)
    if tensors.v is not None and size != tensors.v.shape[2]:
        if tensors.v.shape[2] == q.shape[2]:
            refuse("v_cache", f"{_CACHE[page_layout]} with a Dv of {q.shape[2]} as v has", v_cache)
        hint = _fitting(q, k_cache, v_cache, num_heads_kv, names)
        fail("v", f"[T, Hkv, Dv] with a Dv of {size} as v_cache has", describe(tensors.v) + hint)
    least, most = _HEAD_DIMS
    if not least <= size <= most:
        refuse("v_cache", f"of a head size from {least} to {most}", v_cache)
    if q.shape[1] % heads:
        hint = _fitting(q, k_cache, v_cache, num_heads_kv, names)
        fail("q", f"of a multiple of the {heads} kv heads", f"{q.shape[1]} heads{hint}")
    return blocks, page_size, heads


def sizes_of(k_cache: Tensor, page_layout: str) -> tuple[int, int, int, int]:
    """Blocks, tokens of a page, heads and head size of keys of the rank that the layout has."""
    shape = k_cache.shape
    if page_layout == "x-packed":
        return shape[0], shape[3], shape[1], shape[2] * shape[4]
    if page_layout == "HND":
        return shape[0], shape[2], shape[1], shape[3]
    return shape[0], shape[1], shape[2], shape[3]


def value_dim(v_cache: Tensor, page_layout: str) -> int:
    """Dv of values of the rank that the layout has."""
    return v_cache.shape[-2 if page_layout == "x-packed" else -1]


def out_size(q: Tensor, v_cache: Tensor, page_layout: str) -> tuple[int, ...]:
    """The sizes of a new result. Where these are wrong it is the op that says how."""
    known = v_cache.ndim == 4 and isinstance(page_layout, str)
    return *q.shape[:2], value_dim(v_cache, page_layout) if known else q.shape[2]


def _values_of(k_cache: Tensor, page_layout: str, size: int) -> tuple[int, ...]:
    """The shape of values of this head size beside such keys."""
    blocks, page_size, heads, _ = sizes_of(k_cache, page_layout)
    return (blocks, heads, size, page_size) if page_layout == "x-packed" else (*k_cache.shape[:3], size)


def _fitting(q: Tensor, k_cache: Tensor, v_cache: Tensor, num_heads_kv: int | None, names: Names) -> str:
    """The layouts in which caches that were refused would be right: to be told, as most wrong ones are mixed up."""
    found = []
    for page_layout in LAYOUTS:
        if k_cache.ndim == (5 if page_layout == "x-packed" else 4) and min(k_cache.shape[1:]) > 0:
            _, _, heads, head_dim = sizes_of(k_cache, page_layout)
            right = heads == (num_heads_kv or heads) and q.shape[1] % heads == 0
            if right and head_dim == q.shape[2] and tuple(v_cache.shape) == _values_of(k_cache, page_layout, head_dim):
                found.append(f'page_layout="{page_layout}"')
    if not found:
        return ""
    return f"; with {' or '.join(found)} {'it would fit' if names is NAMES else 'it would fit prefix_prefill'}"


def _check_lengths(tensors: PrefillTensors, names: Names) -> None:
    q, block_table, cu_seqlens_q, seqlens_k = tensors.q, tensors.block_table, tensors.cu_seqlens_q, tensors.seqlens_k
    if seqlens_k.ndim != 1:
        fail(names.seqlens_k, "[B]", describe(seqlens_k))
    sequences = seqlens_k.shape[0]
    if cu_seqlens_q.ndim != 1:
        fail(names.cu_seqlens_q, f"[{sequences + 1}]", describe(cu_seqlens_q))
    if known(cu_seqlens_q.shape[0] != sequences + 1):
        both = f"{names.cu_seqlens_q}, {names.seqlens_k}"
        fail(both, "[B + 1] and [B]", f"{list(cu_seqlens_q.shape)} and {list(seqlens_k.shape)}")
    for name, tensor in ((names.cu_seqlens_q, cu_seqlens_q), (names.seqlens_k, seqlens_k)):
        _check_integers(name, tensor, q)
        if not tensor.is_contiguous():
            fail(name, "contiguous", describe(tensor))
    _check_integers(names.block_table, block_table, q)
    if block_table.ndim != 2 or known(block_table.shape[0] != sequences):
        fail(names.block_table, f"[{sequences}, max_blocks]", describe(block_table))
    if known(block_table.shape[1] > 1) and known(block_table.stride(1) != 1):
        fail(names.block_table, "of contiguous rows", describe(block_table))


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> None:
    check_dtype(name, tensor, *_INTEGERS)
    check_same_device(name, tensor, "q", q)


def _check_per_head(name: str, values: Tensor, q: Tensor) -> None:
    check_dtype(name, values, torch.float32, torch.bfloat16, torch.float16)
    if tuple(values.shape) != (q.shape[1],) or not values.is_contiguous():
        fail(name, f"[{q.shape[1]}], one a query head, contiguous", describe(values))
    check_same_device(name, values, "q", q)


def _check_scale(name: str, scale: Tensor, blocks: int, page_size: int, num_heads_kv: int, q: Tensor) -> None:
    check_dtype(name, scale, torch.float32)
    whole = (blocks, page_size, num_heads_kv)
    if tuple(scale.shape) not in (whole, (num_heads_kv,)) and (scale.numel() != 1 or scale.ndim > 2):
        wanted = f"a number, [1], [{num_heads_kv}] or {list(whole)}"
        fail(name, wanted, describe(scale))
    check_same_device(name, scale, "q", q)


def _check_draft(draft_mask: Tensor, max_seqlen_q: int, q: Tensor, names: Names) -> None:
    """Which new tokens each one sees, as bits of a number."""
    check_dtype("draft_mask", draft_mask, torch.int64)
    if draft_mask.ndim != 1 or known(draft_mask.shape[0] != q.shape[0]) or not draft_mask.is_contiguous():
        fail("draft_mask", f"[{q.shape[0]}], one a new token, contiguous", describe(draft_mask))
    check_same_device("draft_mask", draft_mask, "q", q)
    if known(max_seqlen_q > MOST_DRAFTED):
        fail(names.max_seqlen_q, f"at most {MOST_DRAFTED} with draft_mask", max_seqlen_q)


def _check_out(
    out: Tensor, out_scale: Tensor | None, number: float, q: Tensor, head_dim_v: int, names: Names
) -> None:  # fmt: skip
    """A tensor for the outputs, of any strides that leave each element its own address."""
    check_shape(names.out, out, (*q.shape[:2], head_dim_v))
    check_same_device(names.out, out, "q", q)
    check_float(names.out_scale, number)
    if out.dtype in FP8:
        if not number > 0:
            fail(names.out_scale, "above 0", number)
        if out_scale is not None:
            check_dtype(names.out_scale, out_scale, torch.float32)
            if out_scale.numel() != 1:
                fail(names.out_scale, "a number or of 1 element", describe(out_scale))
            check_same_device(names.out_scale, out_scale, "q", q)
    else:
        if out_scale is not None or number != 1:
            wanted = f"float8_e4m3fn or float8_e5m2 where {names.out_scale} is given"
            fail(f"{names.out}.dtype", wanted, out.dtype, TypeError)
        check_same_dtype(names.out, out, "q", q)
    check_elements_apart(names.out, out)
