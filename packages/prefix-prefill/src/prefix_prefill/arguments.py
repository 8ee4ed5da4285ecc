"""What arguments must be. The ops call these, so that no call goes unchecked, not torch.compile's nor a direct one.

Every function raises ValueError or TypeError naming the argument, what it must be and what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn

import torch

from kernel_reference.checks import MemoryOverlap, as_int, check_float, describe, fail
from kernel_reference.paging import LAYOUTS
from prefix_prefill.plan import Problem, cdiv

Tensor = torch.Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# How torch tells the tensors of transforms that the ops do not take.
_TRANSFORMS = {
    "vmap": torch._C._functorch.is_batchedtensor, "functionalize": torch._C._functorch.is_functionaltensor,
}  # fmt: skip
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_HEAD_SIZES = (16, 256)
# The most tokens that a sequence may have: no bound is this one.
MOST_TOKENS = 2**31 - 1
_CACHE = {
    "NHD": "[blocks, page, Hkv, D]",
    "HND": "[blocks, Hkv, page, D]",
    "x-packed": "[blocks, Hkv, D / x, page, x] (k_cache) and [blocks, Hkv, D, page] (v_cache)",
}


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

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of the op, in its order."""
        return (
            "q", "k", "v", "k_cache", "v_cache", self.block_table, self.cu_seqlens_q, self.seqlens_k, "alibi_slopes",
            "sinks", "k_scale", "v_scale", self.out_scale, self.out, "lse",
        )  # fmt: skip


NAMES = Names()
_TENSORS_OF_MERGE = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")


def check_tensors(**tensors: object) -> None:
    """Each must be a dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fail(name, "a torch.Tensor", describe(tensor), TypeError)
        if tensor.layout != torch.strided:
            fail(name, "a dense (strided) tensor", describe(tensor), TypeError)
        for transform, wraps in _TRANSFORMS.items():
            if wraps(tensor):
                fail(name, f"a plain tensor: there is no rule for torch.func.{transform}", "one of its own", TypeError)


def check_int(name: str, number: object, at_least: int | None = None) -> int:
    """An int, of a least value if one is given; of another type that stands for one, that one."""
    found = as_int(name, number)
    if at_least is not None and _known(found < at_least):
        fail(name, f"at least {at_least}", found)
    return found


def check_bool(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        fail(name, "a bool", describe(value), TypeError)


def check_layout(layout: object) -> None:
    """A layout's name."""
    if not isinstance(layout, str):
        fail("layout", f"one of {', '.join(LAYOUTS)}", describe(layout), TypeError)
    if layout not in LAYOUTS:
        fail("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))


def check_window(left: int, right: int) -> None:
    """Tokens that a window reaches to either side."""
    if left < -1 or right < -1:
        fail("window", "None or (left, right) of -1 (unlimited) or more", (left, right))


def check_prefill(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    cu_seqlens_q: Tensor, seqlens_k: Tensor, alibi_slopes: Tensor | None, sinks: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, out_scale: Tensor | None, out: Tensor, lse: Tensor | None, max_seqlen_q: int, layout: str,
    softmax_scale: float, left: int, right: int, softcap: float, k_factor: float, v_factor: float, out_factor: float,
    num_splits: int, max_seqlen_k: int = MOST_TOKENS, names: Names = NAMES,
) -> None:  # fmt: skip
    """New tokens, their paged cache and how they are attended to."""
    check_layout(layout)
    check_window(left, right)
    check_int(names.max_seqlen_q, max_seqlen_q, 0)
    check_int(names.max_seqlen_k, max_seqlen_k, 0)
    check_int("num_splits", num_splits, 0)
    for name, number in ((names.softmax_scale, softmax_scale), ("k_scale", k_factor), ("v_scale", v_factor)):
        check_float(name, number)
    check_float("softcap", softcap)
    if softcap < 0:
        fail("softcap", "0 (off) or more", softcap)

    num_heads = check_q(q)
    blocks, page_size, num_heads_kv = _check_caches(q, k_cache, v_cache, layout, _check_new(q, k, v), names)
    _check_lengths(q, block_table, cu_seqlens_q, seqlens_k, names)
    for name, values in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if values is not None:
            _check_per_head(name, values, num_heads, q)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _check_scale(name, scale, blocks, page_size, num_heads_kv, q)
    _check_out(out, out_scale, out_factor, q, names)
    if lse is not None:
        check_lse("lse", lse, num_heads, q.shape[0], "q", q)
        _check_no_overlap("lse", lse)


def problem_of(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    seqlens_k: Tensor, alibi_slopes: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, max_seqlen_q: int,
    layout: str, softmax_scale: float, k_factor: float, v_factor: float,
) -> Problem:  # fmt: skip
    """What a plan must cover: of arguments that have been checked."""
    _, page_size, num_heads_kv, _ = _sizes(k_cache, layout)
    return Problem(
        num_heads=q.shape[1],
        num_heads_kv=num_heads_kv,
        head_size=q.shape[2],
        page_size=page_size,
        tokens=q.shape[0],
        sequences=seqlens_k.shape[0],
        max_seqlen_q=max_seqlen_q,
        capacity=block_table.shape[1] * page_size,
        bits=8 * q.element_size(),
        cache_bits=8 * k_cache.element_size(),
        apart=k is not None,
        biased=alibi_slopes is not None,
        described=is_described(k, v, k_cache, v_cache, layout, k_scale, v_scale, softmax_scale, k_factor, v_factor),
    )


def is_described(
    k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, layout: str, k_scale: Tensor | None,
    v_scale: Tensor | None, softmax_scale: float, k_factor: float, v_factor: float,
) -> bool:  # fmt: skip
    """``Problem.described``, as far as can be told without the alignment of memory, which a fake tensor has none of."""
    if k_cache.element_size() == 1:
        scaled = all(scale is None or scale.ndim < 3 for scale in (k_scale, v_scale))
    else:
        scaled = k_scale is None and v_scale is None and k_factor == v_factor == 1
    return (
        layout != "x-packed"
        and k_cache.shape[0] > 0
        and scaled
        and softmax_scale >= 0
        and all(_in_boxes(tensor) for tensor in (k, v, k_cache, v_cache) if tensor is not None)
    )


def overlap_of_prefill(tensors: Sequence[Tensor | None], names: Names = NAMES) -> MemoryOverlap:
    """What refuses results that share memory with an argument, for calls of tensors that look like these."""
    return MemoryOverlap(dict(zip(names.tensors, tensors, strict=True)), (names.out, "lse"))


def overlap_of_merge(tensors: Sequence[Tensor]) -> MemoryOverlap:
    """The same of a merge."""
    return MemoryOverlap(dict(zip(_TENSORS_OF_MERGE, tensors, strict=True)), ("out", "lse"))


def check_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> None:
    """Two parts of an attention, of any strides, and where the whole goes."""
    if out_a.ndim != 3:
        fail("out_a", "[T, H, Dv]", describe(out_a))
    if out_a.dtype not in _FLOATS:
        fail("out_a.dtype", "bfloat16, float16 or float32", out_a.dtype, TypeError)
    tokens, num_heads, _ = out_a.shape
    if num_heads < 1 or out_a.shape[2] < 1:
        fail("out_a", "of at least 1 head of at least 1 element", describe(out_a))
    for name, tensor in (("out_b", out_b), ("out", out)):
        if tensor is not None:
            _check_shape(name, tensor, tuple(out_a.shape), "out_a", out_a)
            _check_dtype(name, tensor, "out_a", out_a)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if tensor is not None:
            check_lse(name, tensor, num_heads, tokens, "out_a", out_a)
    for name, tensor in (("out", out), ("lse", lse)):
        if tensor is not None:
            _check_no_overlap(name, tensor)


def check_lse(name: str, lse: Tensor, num_heads: int, tokens: int, as_in: str, first: Tensor) -> None:
    """Logarithms of sums [Hq, T] in float32."""
    if lse.dtype != torch.float32:
        fail(f"{name}.dtype", "float32", lse.dtype, TypeError)
    _check_shape(name, lse, (num_heads, tokens), as_in, first)


def check_values(
    cu_seqlens_q: Tensor, seqlens_k: Tensor, block_table: Tensor, *, tokens: int, max_seqlen_q: int, max_seqlen_k: int,
    page_size: int, blocks: int, apart: bool, left: int, skip_decode: bool, names: Names = NAMES,
) -> None:  # fmt: skip
    """What only device memory tells, by one copy of all of it to the host."""
    parts = [tensor.reshape(-1).long() for tensor in (cu_seqlens_q, seqlens_k, block_table)]
    cu, seqlens, table = torch.cat(parts).cpu().split([part.numel() for part in parts])
    table = table.view(block_table.shape)
    bounds, totals = cu.tolist(), seqlens.tolist()
    _check_bounds(bounds, tokens, names)
    capacity = block_table.shape[1] * page_size
    for sequence, ((begin, end), total) in enumerate(zip(pairwise(bounds), totals, strict=True)):
        new = end - begin
        if new > max_seqlen_q:
            fail(names.max_seqlen_q, f"at least {new}, the new tokens of sequence {sequence}", max_seqlen_q)
        most = capacity + new if apart else capacity
        if not new <= total <= most:
            wanted = f"from {new} (the sequence's new tokens) to {most} (with what {names.block_table} has room for)"
            fail(f"{names.seqlens_k}[{sequence}]", wanted, total)
        if total > max_seqlen_k:
            fail(names.max_seqlen_k, f"at least {total}, the tokens of sequence {sequence}", max_seqlen_k)
        if new == 0 or (skip_decode and new == 1):
            continue
        # Pages wholly before the window are not read; engines free them.
        first = max(0, total - new - left) // page_size if left >= 0 else 0
        last = cdiv(total - new if apart else total, page_size)
        outside = (table[sequence, first:last] < 0) | (table[sequence, first:last] >= blocks)
        if bool(outside.any()):
            column = first + int(outside.nonzero()[0])
            wanted = f"a page from 0 to {blocks - 1}"
            fail(f"{names.block_table}[{sequence}, {column}]", wanted, int(table[sequence, column]))


def _check_bounds(bounds: list[int], tokens: int, names: Names) -> None:
    name = names.cu_seqlens_q
    if bounds[0] != 0:
        fail(f"{name}[0]", "0", bounds[0])
    for place, (before, bound) in enumerate(pairwise(bounds), 1):
        if not before <= bound <= tokens:
            fail(f"{name}[{place}]", f"from {name}[{place - 1}] = {before} to {tokens} (the rows of q)", bound)


def check_q(q: Tensor) -> int:
    """q [T, Hq, D]: its heads."""
    if q.ndim != 3:
        fail("q", "[T, Hq, D]", describe(q))
    if q.dtype not in _FLOATS:
        fail("q.dtype", "bfloat16, float16 or float32", q.dtype, TypeError)
    if q.shape[1] < 1:
        fail("q", "of at least 1 head", describe(q))
    least, most = _HEAD_SIZES
    if not least <= q.shape[2] <= most:
        fail("q", f"of a head size from {least} to {most}", q.shape[2])
    return q.shape[1]


def _check_new(q: Tensor, k: Tensor | None, v: Tensor | None) -> int | None:
    """k, v [T, Hkv, D], or neither; their heads."""
    if k is None or v is None:
        if k is not v:
            name, other = ("k", "v") if k is None else ("v", "k")
            fail(name, f"given where {other} is, or both None (the new tokens are in the cache)", None)
        return None
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != 3:
            fail(name, "[T, Hkv, D] or None", describe(tensor))
        _check_dtype(name, tensor, "q", q)
        _check_device(name, tensor, "q", q)
        if _differ((tensor.shape[0], tensor.shape[2]), (q.shape[0], q.shape[2])):
            fail(name, f"[{q.shape[0]}, Hkv, {q.shape[2]}] as q is", describe(tensor))
    if _differ(v.shape, k.shape):
        fail("v", f"{list(k.shape)} as k is", describe(v))
    return k.shape[1]


def _check_caches(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: str, num_heads_kv: int | None, names: Names
) -> tuple[int, int, int]:
    """The pools of pages, of any strides: blocks, places of a page and heads."""

    def refuse(name: str, wanted: str, cache: Tensor) -> NoReturn:
        fail(name, wanted, describe(cache) + _fitting(q, k_cache, v_cache, num_heads_kv, names))

    for name, tensor, rank in (("k_cache", k_cache, 5 if layout == "x-packed" else 4), ("v_cache", v_cache, 4)):
        if tensor.ndim != rank:
            refuse(name, _CACHE[layout], tensor)
        if tensor.dtype not in (q.dtype, *FP8):
            fail(f"{name}.dtype", f"{q.dtype} as that of q is, float8_e4m3fn or float8_e5m2", tensor.dtype, TypeError)
        _check_device(name, tensor, "q", q)
    if v_cache.dtype != k_cache.dtype:
        fail("v_cache.dtype", f"{k_cache.dtype} as that of k_cache is", v_cache.dtype, TypeError)
    blocks, page_size, heads, head_size = _sizes(k_cache, layout)
    if head_size != q.shape[2]:
        refuse("k_cache", f"{_CACHE[layout]} with a D of {q.shape[2]} as q has", k_cache)
    if page_size < 1 or heads < 1:
        refuse("k_cache", f"{_CACHE[layout]} with a page and an Hkv of at least 1", k_cache)
    if num_heads_kv is not None and heads != num_heads_kv:
        refuse("k_cache", f"{_CACHE[layout]} with the {num_heads_kv} heads of k", k_cache)
    if tuple(v_cache.shape) != _values_of(k_cache, layout):
        refuse("v_cache", f"{list(_values_of(k_cache, layout))} as k_cache is", v_cache)
    if q.shape[1] % heads:
        hint = _fitting(q, k_cache, v_cache, num_heads_kv, names)
        fail("q", f"of a multiple of the {heads} kv heads", f"{q.shape[1]} heads{hint}")
    return blocks, page_size, heads


def _sizes(k_cache: Tensor, layout: str) -> tuple[int, int, int, int]:
    """Blocks, places of a page, heads and head size of keys of the rank that the layout has."""
    shape = k_cache.shape
    if layout == "x-packed":
        return shape[0], shape[3], shape[1], shape[2] * shape[4]
    return (shape[0], shape[1], shape[2], shape[3]) if layout == "NHD" else (shape[0], shape[2], shape[1], shape[3])


def _values_of(k_cache: Tensor, layout: str) -> tuple[int, ...]:
    """The shape of the values beside such keys."""
    blocks, page_size, heads, head_size = _sizes(k_cache, layout)
    return (blocks, heads, head_size, page_size) if layout == "x-packed" else tuple(k_cache.shape)


def _fitting(q: Tensor, k_cache: Tensor, v_cache: Tensor, num_heads_kv: int | None, names: Names) -> str:
    """The layouts in which caches that were refused would be right: to be told, as most wrong ones are mixed up."""
    found = []
    for layout in LAYOUTS:
        if k_cache.ndim == (5 if layout == "x-packed" else 4) and min(k_cache.shape[1:]) > 0:
            _, _, heads, head_size = _sizes(k_cache, layout)
            right = heads == num_heads_kv if num_heads_kv else q.shape[1] % heads == 0
            if right and head_size == q.shape[2] and tuple(v_cache.shape) == _values_of(k_cache, layout):
                found.append(f'layout="{layout}"')
    if not found:
        return ""
    return f"; with {' or '.join(found)} {'it would fit' if names is NAMES else 'it would fit prefix_prefill'}"


def _check_lengths(q: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, names: Names) -> None:
    if seqlens_k.ndim != 1:
        fail(names.seqlens_k, "[B]", describe(seqlens_k))
    sequences = seqlens_k.shape[0]
    if cu_seqlens_q.ndim != 1:
        fail(names.cu_seqlens_q, f"[{sequences + 1}]", describe(cu_seqlens_q))
    if _known(cu_seqlens_q.shape[0] != sequences + 1):
        both = f"{names.cu_seqlens_q}, {names.seqlens_k}"
        fail(both, "[B + 1] and [B]", f"{list(cu_seqlens_q.shape)} and {list(seqlens_k.shape)}")
    for name, tensor in ((names.cu_seqlens_q, cu_seqlens_q), (names.seqlens_k, seqlens_k)):
        _check_integers(name, tensor, q)
        if not tensor.is_contiguous():
            fail(name, "contiguous", describe(tensor))
    _check_integers(names.block_table, block_table, q)
    if block_table.ndim != 2 or _known(block_table.shape[0] != sequences):
        fail(names.block_table, f"[{sequences}, max_blocks]", describe(block_table))
    if _known(block_table.shape[1] > 1) and _known(block_table.stride(1) != 1):
        fail(names.block_table, "of contiguous rows", describe(block_table))


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


def _check_scale(name: str, scale: Tensor, blocks: int, page_size: int, num_heads_kv: int, q: Tensor) -> None:
    if scale.dtype != torch.float32:
        fail(f"{name}.dtype", "float32", scale.dtype, TypeError)
    whole = (blocks, page_size, num_heads_kv)
    if tuple(scale.shape) not in (whole, (num_heads_kv,)) and (scale.numel() != 1 or scale.ndim > 2):
        wanted = f"a number, [1], [{num_heads_kv}] or {list(whole)}"
        fail(name, wanted, describe(scale))
    _check_device(name, scale, "q", q)


def _check_out(out: Tensor, out_scale: Tensor | None, out_factor: float, q: Tensor, names: Names) -> None:
    """A tensor for the outputs, of any strides that leave each element a place of its own."""
    _check_shape(names.out, out, tuple(q.shape), "q", q)
    check_float(names.out_scale, out_factor)
    if out.dtype in FP8:
        if not out_factor > 0:
            fail(names.out_scale, "above 0", out_factor)
        if out_scale is not None:
            if out_scale.dtype != torch.float32:
                fail(f"{names.out_scale}.dtype", "float32", out_scale.dtype, TypeError)
            if out_scale.numel() != 1:
                fail(names.out_scale, "a number or of 1 element", describe(out_scale))
            _check_device(names.out_scale, out_scale, "q", q)
    else:
        if out_scale is not None or out_factor != 1:
            wanted = f"float8_e4m3fn or float8_e5m2 where {names.out_scale} is given"
            fail(f"{names.out}.dtype", wanted, out.dtype, TypeError)
        _check_dtype(names.out, out, "q", q)
    _check_no_overlap(names.out, out)


def _in_boxes(tensor: Tensor) -> bool:
    """Whether strides are such that a tensor memory accelerator can address it: whole 16 bytes, all but the last."""
    *steps, last = tensor.stride()
    return last == 1 and all(0 < step < 2**39 and step * tensor.element_size() % 16 == 0 for step in steps)


def _known(condition: bool | torch.SymBool) -> bool:
    """Whether it is so, as far as shapes tell: of sizes that only the device knows the op asks again as it runs."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _differ(shape: Sequence[int], other: Sequence[int]) -> bool:
    return len(shape) != len(other) or any(_known(one != size) for one, size in zip(shape, other, strict=True))


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


def _check_no_overlap(name: str, tensor: Tensor) -> None:
    """A tensor to be written: each stride passes all that the smaller ones reach, so that no place is shared."""
    if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride())):
        # Symbols have no order; the op looks at numbers as it runs.
        return
    if tensor.numel() == 0:
        return
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    reach = 0
    for stride, size in sorted(dims, key=lambda dim: dim[0]):
        if stride <= reach:
            fail(name, "a tensor whose elements do not share memory, nor its dimensions interleave", describe(tensor))
        reach += stride * (size - 1)
