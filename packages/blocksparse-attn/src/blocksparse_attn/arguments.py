"""What arguments must be. The ops call these, so that no call goes unchecked, not torch.compile's nor a direct one.

Every function raises ValueError or TypeError naming the argument, what it must be and what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn

import torch

from blocksparse_attn.plan import Problem, cdiv
from kernel_reference.checks import check_float, describe, fail
from kernel_reference.paging import LAYOUTS

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_HEAD_SIZES = (16, 256)
# The narrowest tile of a matrix instruction: kernels walk blocks in whole tiles. Two of the largest fit behind the
# last position that kernels count.
_LEAST_BLOCK, _MOST_BLOCK = 16, 2**16
_CACHE = {
    "NHD": ("[blocks, page, Hkv, D]", "[blocks, page, Hkv, Dv]"),
    "HND": ("[blocks, Hkv, page, D]", "[blocks, Hkv, page, Dv]"),
    "x-packed": ("[blocks, Hkv, D / x, page, x]", "[blocks, Hkv, Dv, page]"),
}


class Names(NamedTuple):
    """What a function calls the arguments that go by several names, for its errors."""

    crow: str = "crow"
    col: str = "col"
    heads: str = "crow"
    q_block: str = "q_block"
    k_block: str = "k_block"
    cache_layout: str = "layout"
    max_seqlen_q: str = "max_seqlen_q"
    softmax_scale: str = "softmax_scale"


_NAMES = Names()


def surely(condition: bool) -> bool:
    """A condition on sizes, and False where only the device knows it: the op looks again when it runs."""
    if torch.compiler.is_compiling() or not isinstance(condition, bool):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(condition)
    return condition


def _differ(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) != len(wanted) or any([surely(a != b) for a, b in zip(shape, wanted, strict=True)])


def check_tensors(**tensors: object) -> None:
    """Each must be a dense tensor."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)


def check_tensor(name: str, tensor: object) -> None:
    """A dense tensor."""
    if not isinstance(tensor, Tensor):
        fail(name, "a torch.Tensor", describe(tensor), TypeError)
    if tensor.layout != torch.strided:
        fail(name, "a dense (strided) tensor", describe(tensor), TypeError)


def check_int(name: str, number: object, at_least: int | None = None) -> None:
    """An int, of a least value if one is given."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        fail(name, "an int", describe(number), TypeError)
    if at_least is not None and surely(number < at_least):
        fail(name, f"at least {at_least}", number)


def check_bool(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        fail(name, "a bool", describe(value), TypeError)


def check_cache_layout(layout: object, name: str = "layout") -> None:
    """The name of a cache's layout."""
    if not isinstance(layout, str):
        fail(name, f"one of {', '.join(LAYOUTS)}", describe(layout), TypeError)
    if layout not in LAYOUTS:
        fail(name, f"one of {', '.join(LAYOUTS)}", repr(layout))


def check_window(left: int, right: int) -> None:
    """Tokens that a window reaches to either side."""
    if left < -1 or right < -1:
        fail("window", "None or (left, right) of -1 (unlimited) or more", (left, right))


# Layouts


def check_blocks(q_block: object, k_block: object, names: Names = _NAMES) -> None:
    """Sizes of blocks, in tokens."""
    # That of keys first: where the other is not given it is the same, and callers do not know its name.
    for name, size in ((names.k_block, k_block), (names.q_block, q_block)):
        check_int(name, size, _LEAST_BLOCK)
        if size % _LEAST_BLOCK or size > _MOST_BLOCK:  # type: ignore[operator]
            fail(name, f"a multiple of {_LEAST_BLOCK} of at most {_MOST_BLOCK}", size)
    check_divides(names.q_block, q_block, names.k_block, k_block)  # type: ignore[arg-type]


def check_divides(name: str, size: int, other_name: str, other: int) -> None:
    """One size must be a multiple of the other."""
    if size % other and other % size:
        fail(name, f"a multiple or a divisor of {other_name} = {other}", size)


def reach(rows: int, q_block: int, k_block: int) -> int:
    """Blocks of keys up to the last position of so many blocks of queries: no query sees one after them."""
    return cdiv(rows * q_block, k_block)


def with_heads(
    crow: Tensor, col: Tensor, names: Names = _NAMES, dtypes: tuple[torch.dtype, ...] = _INTEGERS
) -> tuple[Tensor, Tensor]:
    """crow and col as [heads or 1, ...], given so or, for a layout of one head, as [rows + 1] and [nnz]."""
    check_tensors(**{names.crow: crow, names.col: col})
    if crow.ndim == col.ndim == 1:
        crow, col = crow[None], col[None]
    check_lists(crow, col, dtypes, names)
    return crow, col


def in_32_bits(crow: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Lists as kernels read them. What 32 bits cannot hold stays what it is, impossible."""
    return _in_32_bits(crow), _in_32_bits(col)


def _in_32_bits(numbers: Tensor) -> Tensor:
    return numbers if numbers.dtype == torch.int32 else numbers.clamp(-1, 2**31 - 1).to(torch.int32)


def check_lists(
    crow: Tensor, col: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.int32,), names: Names = _NAMES
) -> tuple[int, int]:
    """crow [heads or 1, rows + 1] and col [heads or 1, nnz], as far as can be told without their contents."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    for name, tensor in ((names.crow, crow), (names.col, col)):
        if tensor.dtype not in dtypes:
            fail(f"{name}.dtype", wanted, tensor.dtype, TypeError)
        if tensor.ndim != 2 or tensor.shape[0] < 1:
            fail(name, "[heads or 1, rows + 1]" if tensor is crow else "[heads or 1, nnz]", describe(tensor))
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            fail(name, "of contiguous rows", describe(tensor))
    if crow.shape[1] < 1:
        fail(names.crow, "[heads or 1, rows + 1]", describe(crow))
    if col.shape[0] != crow.shape[0]:
        fail(names.col, f"[{crow.shape[0]}, nnz] as {names.crow} is", describe(col))
    _check_device(names.col, col, names.crow, crow)
    return crow.shape[0], crow.shape[1] - 1


def list_faults(crow: Tensor, col: Tensor, columns: int) -> Tensor:
    """Whether crow does not rise from 0 to nnz at most, and whether col does not increase within columns: bool [2].

    Told on the tensors' device, without waiting for it. Where crow is at fault, what is said of col means nothing.
    """
    nnz = col.shape[1]
    bad_rows = (crow[:, 0] != 0).any() | (crow[:, 1:] < crow[:, :-1]).any() | (crow[:, -1] > nnz).any()
    # An entry need not be above the one before it where a row begins.
    begins = torch.zeros(col.shape[0], nnz + 1, dtype=torch.bool, device=col.device)
    begins.scatter_(1, crow[:, :-1].clamp(0, nnz).long(), True)
    listed = torch.arange(nnz, device=col.device) < crow[:, -1:]
    bad_columns = (listed & ((col < 0) | (col >= columns))).any()
    bad_columns |= (listed[:, 1:] & ~begins[:, 1:nnz] & (col[:, 1:] <= col[:, :-1])).any()
    return torch.stack([bad_rows, bad_columns])


def fail_lists(crow: Tensor, col: Tensor, columns: int, names: Names = _NAMES) -> NoReturn:
    """Name the first place at which :func:`list_faults` finds fault."""
    crow, col = crow.cpu().long(), col.cpu().long()
    nnz = col.shape[1]
    for head, bounds in enumerate(crow.tolist()):
        if bounds[0] != 0:
            fail(f"{names.crow}[{head}, 0]", "0", bounds[0])
        for row, (before, bound) in enumerate(pairwise(bounds)):
            if not before <= bound <= nnz:
                wanted = f"from {names.crow}[{head}, {row}] = {before} to {nnz} (the width of {names.col})"
                fail(f"{names.crow}[{head}, {row + 1}]", wanted, bound)
    for head, (bounds, entries) in enumerate(zip(crow.tolist(), col.tolist(), strict=True)):
        for row, (begin, end) in enumerate(pairwise(bounds)):
            for place in range(begin, end):
                name, column = f"{names.col}[{head}, {place}]", entries[place]
                if not 0 <= column < columns:
                    fail(name, f"a block of keys from 0 to {columns - 1}", column)
                if place > begin and column <= entries[place - 1]:
                    fail(name, f"above {entries[place - 1]}, the one before it in row {row}", column)
    raise RuntimeError("these lists are in order")


# Calls


def check_attend(
    q: Tensor, k: Tensor, v: Tensor, crow: Tensor, col: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, block_table: Tensor | None, seqlens_k: Tensor | None, q_starts: Tensor | None,
    q_ends: Tensor | None, k_starts: Tensor | None, k_ends: Tensor | None, sinks: Tensor | None, out: Tensor,
    lse: Tensor | None, max_seqlen_q: int, q_block: int, k_block: int, layout: str, softmax_scale: float, left: int,
    right: int, softcap: float, num_splits: int, names: Names = _NAMES,
) -> Problem:  # fmt: skip
    """Queries, keys, values, the layout and how it is attended by; the problem that they make."""
    check_cache_layout(layout, names.cache_layout)
    check_window(left, right)
    check_int(names.max_seqlen_q, max_seqlen_q, 0)
    check_int("num_splits", num_splits, 0)
    check_float(names.softmax_scale, softmax_scale)
    check_float("softcap", softcap)
    if softcap < 0:
        fail("softcap", "0 (off) or more", softcap)

    num_heads, head_size = check_q(q)
    bounds = {"q_starts": q_starts, "q_ends": q_ends, "k_starts": k_starts, "k_ends": k_ends}
    page_size = 0
    if q.ndim == 4:
        sequences, num_heads_kv, head_size_v, capacity = _check_padded(
            q, k, v, bounds, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k
        )
    else:
        for name, tensor in bounds.items():
            _check_absent(name, tensor, "with q [B, T, Hq, D]")
        if block_table is None:
            sequences, num_heads_kv, head_size_v = _check_ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, seqlens_k)
            capacity = k.shape[0]
        else:
            sequences, num_heads_kv, head_size_v, page_size = _check_paged(
                q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, layout
            )
            capacity = block_table.shape[1] * page_size
    if num_heads % num_heads_kv:
        fits = _fitting_layout(q, k, v, layout) if page_size else ""
        fail("q", f"of a multiple of the {num_heads_kv} kv heads", f"{num_heads} heads{fits}")

    check_blocks(q_block, k_block, names)
    layouts, rows = check_lists(crow, col, names=names)
    if layouts not in (1, num_heads):
        fail(names.heads, f"of 1 head or of {num_heads}, as q", layouts)
    _check_device(names.heads, crow, "q", q)
    if surely(max_seqlen_q > rows * q_block):
        wanted = f"at most {rows * q_block}, as the {rows} rows of {q_block} queries of {names.heads} hold"
        fail(names.max_seqlen_q, wanted, max_seqlen_q)
    if sinks is not None:
        _check_per_head("sinks", sinks, num_heads, q)
    _check_shape("out", out, (*q.shape[:-1], head_size_v), "q", q)
    _check_dtype("out", out, "q", q)
    _check_no_overlap("out", out)
    if lse is not None:
        if lse.dtype != torch.float32:
            fail("lse.dtype", "float32", lse.dtype, TypeError)
        _check_shape("lse", lse, lse_shape(q), "q", q)
        _check_no_overlap("lse", lse)
    return Problem(
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_size=head_size,
        head_size_v=head_size_v,
        q_block=q_block,
        k_block=k_block,
        layouts=layouts,
        rows=rows,
        entries=col.shape[1],
        tokens=q.shape[0] if q.ndim == 3 else q.shape[0] * q.shape[1],
        sequences=sequences,
        max_seqlen_q=max_seqlen_q,
        capacity=capacity,
        page_size=page_size,
        padded=q.ndim == 4,
        bits=8 * q.element_size(),
        described=_is_described(q, k, v, layout, softmax_scale, left),
    )


def _is_described(q: Tensor, k: Tensor, v: Tensor, layout: str, softmax_scale: float, left: int) -> bool:
    """``Problem.described``, as far as can be told without the alignment of memory, which a fake tensor has none of."""
    suits = layout != "x-packed" and surely(k.shape[0] > 0) and softmax_scale >= 0 and left < 0
    return suits and all(_in_boxes(tensor) for tensor in (q, k, v))


def _in_boxes(tensor: Tensor) -> bool:
    """Whether strides are such that a tensor memory accelerator can address it: whole 16 bytes, all but the last."""
    *steps, last = tensor.stride()
    size = tensor.element_size()
    return last == 1 and all(
        surely(step > 0) and surely(step < 2**39) and surely(step * size % 16 == 0) for step in steps
    )


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """[Hq, T] of q [T, Hq, D], [B, Hq, T] of q [B, T, Hq, D]."""
    return (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])


def check_q(q: Tensor) -> tuple[int, int]:
    """q [T, Hq, D] or [B, T, Hq, D]: its heads and their size."""
    if q.ndim not in (3, 4):
        fail("q", "[T, Hq, D] or [B, T, Hq, D]", describe(q))
    if q.dtype not in _FLOATS:
        fail("q.dtype", "bfloat16, float16 or float32", q.dtype, TypeError)
    if q.shape[-2] < 1:
        fail("q", "of at least 1 head", describe(q))
    _check_head_size("q", q.shape[-1])
    return q.shape[-2], q.shape[-1]


def _check_head_size(name: str, size: int) -> None:
    least, most = _HEAD_SIZES
    if not least <= size <= most:
        fail(name, f"of a head size from {least} to {most}", size)


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
        _check_dtype(name, tensor, "q", q)
        _check_device(name, tensor, "q", q)
    if k.shape[-1] != q.shape[-1] or k.shape[-2] < 1:
        fail("k", f"{wanted.format(q.shape[-1])} as q is, of at least 1 head", describe(k))
    if _differ(v.shape[:-1], k.shape[:-1]):
        fail("v", f"[{', '.join(map(str, k.shape[:-1]))}, Dv] as k is", describe(v))
    _check_head_size("v", v.shape[-1])
    return k.shape[-2], v.shape[-1]


def _check_ragged(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqlens_k: Tensor | None
) -> tuple[int, int, int]:
    """Sequences, kv heads and the head size of v."""
    num_heads_kv, head_size_v = _check_keys(q, k, v, "[Tk, Hkv, {}]")
    _check_absent("seqlens_k", seqlens_k, "with block_table")
    when = "with q [T, Hq, D]"
    cu_seqlens_q = _check_given("cu_seqlens_q", cu_seqlens_q, when)
    cu_seqlens_k = _check_given("cu_seqlens_k", cu_seqlens_k, f"{when} (seqlens_k is that of a paged cache)")
    sequences = _check_bounds_tensor("cu_seqlens_q", cu_seqlens_q, q)
    _check_bounds_tensor("cu_seqlens_k", cu_seqlens_k, q)
    if _differ(cu_seqlens_k.shape, cu_seqlens_q.shape):
        both = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
        fail("cu_seqlens_q, cu_seqlens_k", "[B + 1] both", both)
    return sequences, num_heads_kv, head_size_v


def _check_paged(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, block_table: Tensor,
    seqlens_k: Tensor | None, layout: str,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Sequences, kv heads, the head size of v and places of a page."""
    page_size, num_heads_kv, head_size_v = _check_caches(q, k, v, layout)
    _check_absent("cu_seqlens_k", cu_seqlens_k, "with keys that are not paged (seqlens_k gives the lengths of those)")
    cu_seqlens_q = _check_given("cu_seqlens_q", cu_seqlens_q, "with q [T, Hq, D]")
    seqlens_k = _check_given("seqlens_k", seqlens_k, "with block_table")
    sequences = _check_bounds_tensor("cu_seqlens_q", cu_seqlens_q, q)
    _check_lengths("seqlens_k", seqlens_k, q)
    if surely(seqlens_k.shape[0] != sequences):
        both = f"{list(cu_seqlens_q.shape)} and {list(seqlens_k.shape)}"
        fail("cu_seqlens_q, seqlens_k", "[B + 1] and [B]", both)
    _check_integers("block_table", block_table, q)
    if block_table.ndim != 2 or surely(block_table.shape[0] != sequences):
        fail("block_table", f"[{sequences}, max_blocks]", describe(block_table))
    if surely(block_table.shape[1] > 1) and block_table.stride(1) != 1:
        fail("block_table", "of contiguous rows", describe(block_table))
    return sequences, num_heads_kv, head_size_v, page_size


def _check_padded(
    q: Tensor, k: Tensor, v: Tensor, bounds: dict[str, Tensor | None], cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, block_table: Tensor | None, seqlens_k: Tensor | None,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Sequences, kv heads, the head size of v and keys that a sequence has room for."""
    others = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqlens_k": seqlens_k}
    for name, tensor in (*others.items(), ("block_table", block_table)):
        _check_absent(name, tensor, "with q [T, Hq, D]")
    num_heads_kv, head_size_v = _check_keys(q, k, v, "[B, Tk, Hkv, {}]")
    sequences = q.shape[0]
    if surely(k.shape[0] != sequences):
        fail("k", f"of the {sequences} sequences of q", describe(k))
    for name, tensor in bounds.items():
        if tensor is not None:
            _check_lengths(name, tensor, q)
            if surely(tensor.shape[0] != sequences):
                fail(name, f"[{sequences}], one a sequence", describe(tensor))
    return sequences, num_heads_kv, head_size_v, k.shape[1]


def _check_caches(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[int, int, int]:
    """The pools of pages, of any strides: places of a page, heads, and the head size of v."""
    wanted_k, wanted_v = _CACHE[layout]
    x_packed = layout == "x-packed"
    for name, tensor, rank, wanted in (("k", k, 5 if x_packed else 4, wanted_k), ("v", v, 4, wanted_v)):
        if tensor.ndim != rank:
            was = describe(tensor) + _fitting_layout(q, k, v, layout)
            fail(name, f"{wanted}, the pages of a cache of layout {layout!r}", was)
        _check_dtype(name, tensor, "q", q)
        _check_device(name, tensor, "q", q)
    page_size, heads, head_size, head_size_v, wanted_shape = _sizes_of_pages(k, v, layout)
    if head_size != q.shape[2]:
        was = describe(k) + _fitting_layout(q, k, v, layout)
        fail("k", f"{wanted_k} with a D of {q.shape[2]} as q has, layout {layout!r}", was)
    if page_size < 1 or heads < 1:
        fail("k", f"{wanted_k} with a page and an Hkv of at least 1", describe(k))
    if _differ(v.shape, wanted_shape):
        was = describe(v) + _fitting_layout(q, k, v, layout)
        fail("v", f"{wanted_v} of as many blocks, places and heads as k, layout {layout!r}", was)
    _check_head_size("v", head_size_v)
    return page_size, heads, head_size_v


def _sizes_of_pages(k: Tensor, v: Tensor, layout: str) -> tuple[int, int, int, int, tuple[int, ...]]:
    """Places of a page, heads, the head sizes of k and of v, and the shape that v must have."""
    sizes: tuple[int, ...] = tuple(k.shape)
    if layout == "x-packed":
        blocks, heads, parts, page_size, x = sizes
        return page_size, heads, parts * x, v.shape[2], (blocks, heads, v.shape[2], page_size)
    page_size, heads = (sizes[1], sizes[2]) if layout == "NHD" else (sizes[2], sizes[1])
    return page_size, heads, sizes[3], v.shape[3], (*sizes[:3], v.shape[3])


def _fitting_layout(q: Tensor, k: Tensor, v: Tensor, layout: str) -> str:
    """The other layout of a cache that these pages would be right in, as the end of an error."""
    for other in LAYOUTS:
        if other == layout or k.ndim != (5 if other == "x-packed" else 4) or v.ndim != 4:
            continue
        page_size, heads, head_size, head_size_v, shape = _sizes_of_pages(k, v, other)
        least, most = _HEAD_SIZES
        if min(page_size, heads) < 1 or head_size != q.shape[2] or q.shape[1] % heads or tuple(v.shape) != shape:
            continue
        if least <= head_size_v <= most:
            return f", which fits layout {other!r}"
    return ""


def _check_bounds_tensor(name: str, bounds: Tensor, q: Tensor) -> int:
    """cu_seqlens: how many sequences there are."""
    _check_lengths(name, bounds, q, "[B + 1]")
    if surely(bounds.shape[0] < 1):
        fail(name, "[B + 1]", describe(bounds))
    return bounds.shape[0] - 1


def _check_lengths(name: str, tensor: Tensor, q: Tensor, wanted: str = "[B]") -> None:
    _check_integers(name, tensor, q)
    if tensor.ndim != 1:
        fail(name, wanted, describe(tensor))
    if surely(tensor.shape[0] > 1) and tensor.stride(0) != 1:
        fail(name, "contiguous", describe(tensor))


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype not in _INTEGERS:
        fail(f"{name}.dtype", "int32 or int64", tensor.dtype, TypeError)
    _check_device(name, tensor, "q", q)


def _check_per_head(name: str, values: Tensor, num_heads: int, q: Tensor) -> None:
    if values.dtype not in _FLOATS:
        fail(f"{name}.dtype", "float32, bfloat16 or float16", values.dtype, TypeError)
    if tuple(values.shape) != (num_heads,) or not values.is_contiguous():
        fail(name, f"[{num_heads}], one a query head, contiguous", describe(values))
    _check_device(name, values, "q", q)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor) -> None:
    if _differ(tensor.shape, shape):
        fail(name, f"[{', '.join(map(str, shape))}]", describe(tensor))
    _check_device(name, tensor, as_in, first)


def _check_dtype(name: str, tensor: Tensor, as_in: str, first: Tensor) -> None:
    if tensor.dtype != first.dtype:
        fail(f"{name}.dtype", f"{first.dtype} as that of {as_in} is", tensor.dtype, TypeError)


def _check_device(name: str, tensor: Tensor, as_in: str, first: Tensor) -> None:
    if tensor.device != first.device:
        fail(f"{name}.device", f"{first.device} as {as_in} is", tensor.device)


def _is_unbacked(tensor: Tensor) -> bool:
    """Whether it has sizes that only the device knows."""
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return has_free_unbacked_symbols(tensor)


def _check_no_overlap(name: str, tensor: Tensor) -> None:
    """A tensor to be written: each stride passes all that the smaller ones reach, so that no place is shared."""
    if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride())) and _is_unbacked(tensor):
        return
    if tensor.numel() == 0:
        return
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    reached = 0
    for stride, size in sorted(dims, key=lambda dim: dim[0]):
        if stride <= reached:
            fail(name, "a tensor whose elements do not share memory, nor its dimensions interleave", describe(tensor))
        reached += stride * (size - 1)


# What only device memory tells


def check_values(
    q: Tensor, k: Tensor, crow: Tensor, col: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    block_table: Tensor | None, seqlens_k: Tensor | None, q_starts: Tensor | None, q_ends: Tensor | None,
    k_starts: Tensor | None, k_ends: Tensor | None, *, problem: Problem, blocks: int, left: int, names: Names = _NAMES,
) -> None:  # fmt: skip
    """Lengths, pages and the layout's lists, by one copy of all of it to the host."""
    columns = reach(problem.rows, problem.q_block, problem.k_block)
    given = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table, "seqlens_k": seqlens_k,
        "q_starts": q_starts, "q_ends": q_ends, "k_starts": k_starts, "k_ends": k_ends,
        "faults": list_faults(crow, col, columns),
    }  # fmt: skip
    parts = {name: tensor.reshape(-1).long() for name, tensor in given.items() if tensor is not None}
    host = torch.cat([*parts.values()]).cpu().split([part.numel() for part in parts.values()])
    held: dict[str, list[int]] = {name: part.tolist() for name, part in zip(parts, host, strict=True)}
    if any(held["faults"]):
        fail_lists(crow, col, columns, names)
    if problem.padded:
        lengths = _padded_lengths(held, q.shape[1], k.shape[1], problem.sequences)
    else:
        lengths = _ragged_lengths(held, q.shape[0], None if block_table is not None else k.shape[0], problem)
    for sequence, (new, total, total_name) in enumerate(lengths):
        if new > problem.max_seqlen_q:
            fail(names.max_seqlen_q, f"at least {new}, the queries of sequence {sequence}", problem.max_seqlen_q)
        if total < new:
            fail(total_name, f"such that the sequence has at least {new} keys, as many as queries", f"{total} keys")
        if new and total > problem.rows * problem.q_block:
            most = problem.rows * problem.q_block
            fail(total_name, f"such that the sequence has at most {most} keys, as its layout has rows for", total)
        if block_table is not None and new:
            _check_pages(held["block_table"], sequence, new, total, problem, blocks, left)


def _ragged_lengths(
    held: dict[str, list[int]], tokens: int, keys: int | None, problem: Problem
) -> list[tuple[int, int, str]]:
    """Queries and keys of each sequence, and what tells the latter."""
    new = _lengths_of("cu_seqlens_q", held["cu_seqlens_q"], tokens, "q")
    if keys is not None:
        totals = _lengths_of("cu_seqlens_k", held["cu_seqlens_k"], keys, "k")
        return [(n, total, f"cu_seqlens_k[{i + 1}]") for i, (n, total) in enumerate(zip(new, totals, strict=True))]
    found = []
    for i, (n, total) in enumerate(zip(new, held["seqlens_k"], strict=True)):
        if not n <= total <= problem.capacity:
            wanted = f"from {n} (the sequence's queries) to {problem.capacity} (what block_table has room for)"
            fail(f"seqlens_k[{i}]", wanted, total)
        found.append((n, total, f"seqlens_k[{i}]"))
    return found


def _lengths_of(name: str, bounds: list[int], rows: int, of: str) -> list[int]:
    if bounds[0] != 0:
        fail(f"{name}[0]", "0", bounds[0])
    for place, (before, bound) in enumerate(pairwise(bounds), 1):
        if not before <= bound <= rows:
            fail(f"{name}[{place}]", f"from {name}[{place - 1}] = {before} to {rows} (the rows of {of})", bound)
    return [end - begin for begin, end in pairwise(bounds)]


def _padded_lengths(held: dict[str, list[int]], tokens: int, keys: int, sequences: int) -> list[tuple[int, int, str]]:
    found = []
    for i in range(sequences):
        lengths = []
        for side, most in (("q", tokens), ("k", keys)):
            begin = held[f"{side}_starts"][i] if f"{side}_starts" in held else 0
            end = held[f"{side}_ends"][i] if f"{side}_ends" in held else most
            if not 0 <= begin <= most:
                fail(f"{side}_starts[{i}]", f"from 0 to {most}, the rows of a sequence", begin)
            if not begin <= end <= most:
                fail(f"{side}_ends[{i}]", f"from {begin}, where the sequence starts, to {most}", end)
            lengths.append(end - begin)
        found.append((lengths[0], lengths[1], f"k_ends[{i}]"))
    return found


def _check_pages(
    table: list[int], sequence: int, new: int, total: int, problem: Problem, blocks: int, left: int
) -> None:
    # Pages wholly before the window are not read; engines free them.
    first = max(0, total - new - left) // problem.page_size if left >= 0 else 0
    columns = problem.capacity // problem.page_size
    for column in range(first, cdiv(total, problem.page_size)):
        page = table[sequence * columns + column]
        if not 0 <= page < blocks:
            fail(f"block_table[{sequence}, {column}]", f"a page from 0 to {blocks - 1}", page)
