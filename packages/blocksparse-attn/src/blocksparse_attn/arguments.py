"""What arguments of the op must be: one check, which makes the problem that plan, launch and reference are given.

The op asks it, so that a compiled call and a direct one are checked too. ValueError or TypeError name the argument,
what it must be and what it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.lists import NAMES, Names, check_blocks, check_lists
from blocksparse_attn.plan import Problem
from kernel_reference.checks import (
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

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_HEAD_SIZES = (16, 256)
_CACHE = {
    "NHD": ("[blocks, page, Hkv, D]", "[blocks, page, Hkv, Dv]"),
    "HND": ("[blocks, Hkv, page, D]", "[blocks, Hkv, page, Dv]"),
    "x-packed": ("[blocks, Hkv, D / x, page, x]", "[blocks, Hkv, Dv, page]"),
}


class Tensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` and ``lse`` are written."""

    q: Tensor
    k: Tensor
    v: Tensor
    crow: Tensor
    col: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    block_table: Tensor | None
    seqlens_k: Tensor | None
    q_starts: Tensor | None
    q_ends: Tensor | None
    k_starts: Tensor | None
    k_ends: Tensor | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor | None


class Options(NamedTuple):
    """The other arguments of the op, in its order. ``num_splits`` 0: as the plan has it."""

    max_seqlen_q: int
    q_block: int
    k_block: int
    page_layout: str
    softmax_scale: float
    left: int
    right: int
    softcap: float
    num_splits: int
    scattered: bool = False
    plan: Any = None


class _Sizes(NamedTuple):
    """What the keys tell: sequences, kv heads, the head size of v, keys that a sequence may have, slots of a page."""

    sequences: int
    num_heads_kv: int
    head_dim_v: int
    capacity: int
    page_size: int = 0


def check_attend(tensors: Tensors, options: Options, names: Names = NAMES) -> Problem:
    """The problem that these arguments of the op make; raises where they make none."""
    check_choice("page_layout", options.page_layout, LAYOUTS)
    check_window(options.left, options.right)
    check_int(names.max_seqlen_q, options.max_seqlen_q, 0)
    check_int("num_splits", options.num_splits, 0)
    check_float(names.softmax_scale, options.softmax_scale)
    check_float("softcap", options.softcap)
    if options.softcap < 0:
        fail("softcap", "0 (off) or more", options.softcap)

    q = tensors.q
    num_heads, head_dim = check_q(q)
    sizes = _check_keys_of_batch(tensors, options.page_layout)
    if num_heads % sizes.num_heads_kv:
        fits = _fitting_layout(tensors, options.page_layout) if sizes.page_size else ""
        fail("q", f"of a multiple of the {sizes.num_heads_kv} kv heads", f"{num_heads} heads{fits}")

    check_blocks(options.q_block, options.k_block, names)
    layouts, rows = check_lists(tensors.crow, tensors.col, names=names)
    if layouts not in (1, num_heads):
        fail(names.heads, f"of 1 head or of {num_heads}, as q", layouts)
    check_same_device(names.heads, tensors.crow, "q", q)
    longest = rows * options.q_block
    if known(options.max_seqlen_q > longest):
        wanted = f"at most {longest}, as the {rows} rows of {options.q_block} queries of {names.heads} hold"
        fail(names.max_seqlen_q, wanted, options.max_seqlen_q)
    if tensors.sinks is not None:
        _check_per_head("sinks", tensors.sinks, num_heads, q)
    _check_output("out", tensors.out, (*q.shape[:-1], sizes.head_dim_v), q)
    check_same_dtype("out", tensors.out, "q", q)
    if tensors.lse is not None:
        check_dtype("lse", tensors.lse, torch.float32)
        _check_output("lse", tensors.lse, lse_shape(q), q)
    return Problem(
        num_heads=num_heads,
        num_heads_kv=sizes.num_heads_kv,
        head_dim=head_dim,
        head_dim_v=sizes.head_dim_v,
        q_block=options.q_block,
        k_block=options.k_block,
        layouts=layouts,
        rows=rows,
        entries=tensors.col.shape[1],
        tokens=q.shape[0] if q.ndim == 3 else q.shape[0] * q.shape[1],
        sequences=sizes.sequences,
        max_seqlen_q=options.max_seqlen_q,
        capacity=sizes.capacity,
        page_size=sizes.page_size,
        padded=q.ndim == 4,
        bits=8 * q.element_size(),
        tma=_suits_tma(tensors, options),
        page_layout=options.page_layout,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        left=options.left,
        num_splits=options.num_splits,
        scattered=options.scattered,
    )


def _suits_tma(tensors: Tensors, options: Options) -> bool:
    """``Problem.tma``, as far as can be told without the alignment of memory, which a fake tensor has none of."""
    suits = options.page_layout != "x-packed" and options.softmax_scale >= 0
    return suits and known(tensors.k.shape[0] > 0) and all(map(has_tma_strides, tensors[:3]))


def has_tma_strides(tensor: Tensor) -> bool:
    """Whether a TMA descriptor can have these strides: whole 16 bytes, all but the last."""
    *steps, last = tensor.stride()
    size = tensor.element_size()
    return last == 1 and all(known(step > 0) and known(step < 2**39) and known(step * size % 16 == 0) for step in steps)


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """[Hq, T] of q [T, Hq, D], [B, Hq, T] of q [B, T, Hq, D]."""
    return (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])


def most_queries(q: Tensor, max_seqlen_q: int | None, without_padding: bool, reach: int) -> int:
    """The bound of a sequence's queries; ``reach``: what the layout has rows for."""
    if max_seqlen_q is None:
        if q.ndim != 4:
            fail("max_seqlen_q", "given with q [T, Hq, D]", None)
        # Padding may reach further than the layout does.
        return q.shape[1] if without_padding else min(q.shape[1], reach)
    return check_int("max_seqlen_q", max_seqlen_q, 0)


def check_q(q: Tensor) -> tuple[int, int]:
    """q [T, Hq, D] or [B, T, Hq, D]: its heads and their size."""
    if q.ndim not in (3, 4):
        fail("q", "[T, Hq, D] or [B, T, Hq, D]", describe(q))
    check_dtype("q", q, *_FLOATS)
    if q.shape[-2] < 1:
        fail("q", "of at least 1 head", describe(q))
    _check_head_size("q", q.shape[-1])
    return q.shape[-2], q.shape[-1]


def check_of_results(q: Tensor, v: Tensor, name: str = "v") -> None:
    """What the sizes of results are taken from: q, and values of a rank that some batch has."""
    check_q(q)
    if v.ndim not in (3, 4):
        fail(name, "[Tk, Hkv, Dv], or of 4 dimensions where the batch is padded or paged", describe(v))


def _check_head_size(name: str, size: int) -> None:
    least, most = _HEAD_SIZES
    if not least <= size <= most:
        fail(name, f"of a head size from {least} to {most}", size)


# Keys, by the kind of batch


def _check_keys_of_batch(tensors: Tensors, page_layout: str) -> _Sizes:
    if tensors.q.ndim == 4:
        return _check_padded(tensors)
    for name in ("q_starts", "q_ends", "k_starts", "k_ends"):
        _check_absent(name, getattr(tensors, name), "with q [B, T, Hq, D]")
    return _check_ragged(tensors) if tensors.block_table is None else _check_paged(tensors, page_layout)


def _check_absent(name: str, tensor: Tensor | None, when: str) -> None:
    if tensor is not None:
        fail(name, f"None but {when}", describe(tensor))


def _check_given(name: str, tensor: Tensor | None, when: str) -> Tensor:
    if tensor is None:
        fail(name, f"given {when}", None)
    return tensor


def _check_keys(q: Tensor, k: Tensor, v: Tensor, wanted: str) -> tuple[int, int]:
    """k, v [..., Hkv, D or Dv] of q's rank: their heads and the head size of v."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != q.ndim:
            fail(name, wanted.format("D" if name == "k" else "Dv"), describe(tensor))
        check_same_dtype(name, tensor, "q", q)
        check_same_device(name, tensor, "q", q)
    if k.shape[-1] != q.shape[-1] or k.shape[-2] < 1:
        fail("k", f"{wanted.format(q.shape[-1])} as q is, of at least 1 head", describe(k))
    if differ(v.shape[:-1], k.shape[:-1]):
        fail("v", f"[{', '.join(map(str, k.shape[:-1]))}, Dv] as k is", describe(v))
    _check_head_size("v", v.shape[-1])
    return k.shape[-2], v.shape[-1]


def _check_ragged(tensors: Tensors) -> _Sizes:
    q, k = tensors.q, tensors.k
    num_heads_kv, head_dim_v = _check_keys(q, k, tensors.v, "[Tk, Hkv, {}]")
    _check_absent("seqlens_k", tensors.seqlens_k, "with block_table")
    when = "with q [T, Hq, D]"
    cu_seqlens_q = _check_given("cu_seqlens_q", tensors.cu_seqlens_q, when)
    cu_seqlens_k = _check_given("cu_seqlens_k", tensors.cu_seqlens_k, f"{when} (seqlens_k is that of a paged cache)")
    sequences = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    if differ(cu_seqlens_k.shape, cu_seqlens_q.shape):
        both = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
        fail("cu_seqlens_q, cu_seqlens_k", "[B + 1] both", both)
    return _Sizes(sequences, num_heads_kv, head_dim_v, k.shape[0])


def _check_paged(tensors: Tensors, page_layout: str) -> _Sizes:
    q = tensors.q
    page_size, num_heads_kv, head_dim_v = _check_caches(tensors, page_layout)
    keys_of_others = "with keys that are not paged (seqlens_k gives the lengths of those)"
    _check_absent("cu_seqlens_k", tensors.cu_seqlens_k, keys_of_others)
    cu_seqlens_q = _check_given("cu_seqlens_q", tensors.cu_seqlens_q, "with q [T, Hq, D]")
    seqlens_k = _check_given("seqlens_k", tensors.seqlens_k, "with block_table")
    block_table = _check_given("block_table", tensors.block_table, "with seqlens_k")
    sequences = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    _check_lengths("seqlens_k", seqlens_k, q)
    if known(seqlens_k.shape[0] != sequences):
        both = f"{list(cu_seqlens_q.shape)} and {list(seqlens_k.shape)}"
        fail("cu_seqlens_q, seqlens_k", "[B + 1] and [B]", both)
    _check_integers("block_table", block_table, q)
    if block_table.ndim != 2 or known(block_table.shape[0] != sequences):
        fail("block_table", f"[{sequences}, max_blocks]", describe(block_table))
    if known(block_table.shape[1] > 1) and block_table.stride(1) != 1:
        fail("block_table", "of contiguous rows", describe(block_table))
    return _Sizes(sequences, num_heads_kv, head_dim_v, block_table.shape[1] * page_size, page_size)


def _check_padded(tensors: Tensors) -> _Sizes:
    q, k = tensors.q, tensors.k
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table"):
        _check_absent(name, getattr(tensors, name), "with q [T, Hq, D]")
    num_heads_kv, head_dim_v = _check_keys(q, k, tensors.v, "[B, Tk, Hkv, {}]")
    sequences = q.shape[0]
    if known(k.shape[0] != sequences):
        fail("k", f"of the {sequences} sequences of q", describe(k))
    for name in ("q_starts", "q_ends", "k_starts", "k_ends"):
        bounds = getattr(tensors, name)
        if bounds is not None:
            _check_lengths(name, bounds, q)
            if known(bounds.shape[0] != sequences):
                fail(name, f"[{sequences}], one a sequence", describe(bounds))
    return _Sizes(sequences, num_heads_kv, head_dim_v, k.shape[1])


# Pages


def _check_caches(tensors: Tensors, page_layout: str) -> tuple[int, int, int]:
    """The pools of pages, of any strides: slots of a page, heads, and the head size of v."""
    q, k, v = tensors[:3]
    wanted_k, wanted_v = _CACHE[page_layout]
    x_packed = page_layout == "x-packed"
    for name, tensor, rank, wanted in (("k", k, 5 if x_packed else 4, wanted_k), ("v", v, 4, wanted_v)):
        if tensor.ndim != rank:
            was = describe(tensor) + _fitting_layout(tensors, page_layout)
            fail(name, f"{wanted}, the pages of a cache of page_layout {page_layout!r}", was)
        check_same_dtype(name, tensor, "q", q)
        check_same_device(name, tensor, "q", q)
    page_size, heads, head_dim, head_dim_v, wanted_shape = _sizes_of_pages(k, v, page_layout)
    if head_dim != q.shape[2]:
        was = describe(k) + _fitting_layout(tensors, page_layout)
        fail("k", f"{wanted_k} with a D of {q.shape[2]} as q has, page_layout {page_layout!r}", was)
    if page_size < 1 or heads < 1:
        fail("k", f"{wanted_k} with a page and an Hkv of at least 1", describe(k))
    if differ(v.shape, wanted_shape):
        was = describe(v) + _fitting_layout(tensors, page_layout)
        fail("v", f"{wanted_v} of as many blocks, slots and heads as k, page_layout {page_layout!r}", was)
    _check_head_size("v", head_dim_v)
    return page_size, heads, head_dim_v


def _sizes_of_pages(k: Tensor, v: Tensor, page_layout: str) -> tuple[int, int, int, int, tuple[int, ...]]:
    """Slots of a page, heads, the head sizes of k and of v, and the shape that v must have."""
    sizes: tuple[int, ...] = tuple(k.shape)
    if page_layout == "x-packed":
        blocks, heads, parts, page_size, x = sizes
        return page_size, heads, parts * x, v.shape[2], (blocks, heads, v.shape[2], page_size)
    page_size, heads = (sizes[1], sizes[2]) if page_layout == "NHD" else (sizes[2], sizes[1])
    return page_size, heads, sizes[3], v.shape[3], (*sizes[:3], v.shape[3])


def _fitting_layout(tensors: Tensors, page_layout: str) -> str:
    """The other page layout that these pages would be right in, as the end of an error."""
    q, k, v = tensors[:3]
    for other in LAYOUTS:
        if other == page_layout or k.ndim != (5 if other == "x-packed" else 4) or v.ndim != 4:
            continue
        page_size, heads, head_dim, head_dim_v, shape = _sizes_of_pages(k, v, other)
        least, most = _HEAD_SIZES
        if min(page_size, heads) < 1 or head_dim != q.shape[2] or q.shape[1] % heads or tuple(v.shape) != shape:
            continue
        if least <= head_dim_v <= most:
            return f", which fits page_layout {other!r}"
    return ""


# Parts


def _check_cu_seqlens(name: str, bounds: Tensor, q: Tensor) -> int:
    """How many sequences there are."""
    _check_lengths(name, bounds, q, "[B + 1]")
    if known(bounds.shape[0] < 1):
        fail(name, "[B + 1]", describe(bounds))
    return bounds.shape[0] - 1


def _check_lengths(name: str, tensor: Tensor, q: Tensor, wanted: str = "[B]") -> None:
    _check_integers(name, tensor, q)
    if tensor.ndim != 1:
        fail(name, wanted, describe(tensor))
    if known(tensor.shape[0] > 1) and tensor.stride(0) != 1:
        fail(name, "contiguous", describe(tensor))


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> None:
    check_dtype(name, tensor, *_INTEGERS)
    check_same_device(name, tensor, "q", q)


def _check_per_head(name: str, values: Tensor, num_heads: int, q: Tensor) -> None:
    check_dtype(name, values, torch.float32, torch.bfloat16, torch.float16)
    if tuple(values.shape) != (num_heads,) or not values.is_contiguous():
        fail(name, f"[{num_heads}], one a query head, contiguous", describe(values))
    check_same_device(name, values, "q", q)


def _check_output(name: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    check_shape(name, tensor, shape)
    check_same_device(name, tensor, "q", q)
    check_elements_apart(name, tensor)
