"""What arguments of the op ``selected`` must be: one check, which makes the problem that all others are given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.arguments import check_q, lse_shape
from blocksparse_attn.selected.plan import Problem
from kernel_reference.checks import (
    check_choice,
    check_dtype,
    check_elements_apart,
    check_float,
    check_int,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    fail,
    known,
)
from kernel_reference.integers import cdiv, is_power_of_two
from kernel_reference.ragged import check_cu_seqlens, read_integers

Tensor = torch.Tensor

PAGE_LAYOUTS = ("NHD", "HND")
_LARGEST_BLOCK = 256
_INTEGERS = (torch.int32, torch.int64)


class Tensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` and ``lse`` are written."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    indices: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor
    lse: Tensor | None


class Options(NamedTuple):
    """The other arguments of the op, in its order."""

    block_size: int
    page_layout: str
    causal: bool
    softmax_scale: float
    k_factor: float
    v_factor: float
    plan: Any = None


def check_selected(tensors: Tensors, options: Options) -> Problem:
    """The problem that these arguments of the op make; raises where they make none."""
    q, k, v = tensors[:3]
    num_heads, head_dim = check_q(q)
    if q.ndim != 3:
        fail("q", "[T, Hq, D]", describe(q))
    check_choice("page_layout", options.page_layout, PAGE_LAYOUTS)
    for name, number in (
        ("softmax_scale", options.softmax_scale), ("k_scale", options.k_factor), ("v_scale", options.v_factor),
    ):  # fmt: skip
        check_float(name, number)
    check_int("block_size", options.block_size, 1)
    if not is_power_of_two(options.block_size) or options.block_size > _LARGEST_BLOCK:
        fail("block_size", f"a power of two up to {_LARGEST_BLOCK}", options.block_size)
    page_size, heads_kv, head_dim_v = _check_caches(q, k, v, options.page_layout)
    if num_heads % heads_kv:
        fail("q", f"of a multiple of the {heads_kv} kv heads", f"{num_heads} heads")
    for name in ("indices", "block_table", "cu_seqlens_q", "seqlens_k"):
        check_dtype(name, getattr(tensors, name), *_INTEGERS)
        check_same_device(name, getattr(tensors, name), "q", q)
    indices = tensors.indices
    if indices.dtype != torch.int32:
        fail("indices.dtype", "int32", indices.dtype, TypeError)
    if indices.ndim != 3 or known(indices.shape[0] != q.shape[0]) or indices.shape[1] != heads_kv:
        fail("indices", f"[{q.shape[0]}, {heads_kv}, topk]: a list for each token and kv head", describe(indices))
    if known(indices.shape[2] > 1) and indices.stride(2) != 1:
        fail("indices", "of contiguous lists", describe(indices))
    sequences = _check_lengths(tensors)
    if tensors.sinks is not None:
        check_dtype("sinks", tensors.sinks, torch.float32, torch.bfloat16, torch.float16)
        _check_vector("sinks", tensors.sinks, (num_heads,), q)
    for name, scale in (("k_scale", tensors.k_scale), ("v_scale", tensors.v_scale)):
        if scale is not None:
            check_dtype(name, scale, torch.float32)
            _check_vector(name, scale, (1,) if scale.numel() == 1 and scale.ndim == 1 else (heads_kv,), q)
    _check_output("out", tensors.out, (q.shape[0], num_heads, head_dim_v), q)
    check_same_dtype("out", tensors.out, "q", q)
    if tensors.lse is not None:
        check_dtype("lse", tensors.lse, torch.float32)
        _check_output("lse", tensors.lse, lse_shape(q), q)
    return Problem(
        num_heads=num_heads,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_size=options.block_size,
        topk=indices.shape[2],
        tokens=q.shape[0],
        sequences=sequences,
        capacity=tensors.block_table.shape[1] * page_size,
        page_size=page_size,
        bits=8 * q.element_size(),
        cache_bits=8 * k.element_size(),
        page_layout=options.page_layout,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        k_factor=options.k_factor,
        v_factor=options.v_factor,
    )


def _check_caches(q: Tensor, k: Tensor, v: Tensor, page_layout: str) -> tuple[int, int, int]:
    """Slots of a page, kv heads, and the head size of v."""
    wanted = "[blocks, page, Hkv, {}]" if page_layout == "NHD" else "[blocks, Hkv, page, {}]"
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if cache.ndim != 4:
            fail(name, wanted.format("D" if name == "k_cache" else "Dv"), describe(cache))
        if cache.dtype not in (q.dtype, torch.float8_e4m3fn):
            fail(f"{name}.dtype", f"{q.dtype} as that of q is, or float8_e4m3fn", cache.dtype, TypeError)
        check_same_device(name, cache, "q", q)
    check_same_dtype("v_cache", v, "k_cache", k)
    if k.dtype != q.dtype and q.dtype == torch.float32:
        fail("k_cache.dtype", "float32 as that of q is", k.dtype, TypeError)
    page, heads = (k.shape[1], k.shape[2]) if page_layout == "NHD" else (k.shape[2], k.shape[1])
    if k.shape[3] != q.shape[2] or min(page, heads) < 1:
        fail("k_cache", f"{wanted.format(q.shape[2])} with a page and an Hkv of at least 1", describe(k))
    if tuple(v.shape[:3]) != tuple(k.shape[:3]):
        fail("v_cache", f"[{', '.join(map(str, k.shape[:3]))}, Dv] as k_cache is", describe(v))
    if not 16 <= v.shape[3] <= 256:
        fail("v_cache", "of a head size from 16 to 256", v.shape[3])
    return page, heads, v.shape[3]


def _check_lengths(tensors: Tensors) -> int:
    """How many sequences there are."""
    cu_seqlens_q, seqlens_k, block_table = tensors.cu_seqlens_q, tensors.seqlens_k, tensors.block_table
    if cu_seqlens_q.ndim != 1 or known(cu_seqlens_q.shape[0] < 1):
        fail("cu_seqlens_q", "[B + 1]", describe(cu_seqlens_q))
    sequences = cu_seqlens_q.shape[0] - 1
    if seqlens_k.ndim != 1 or known(seqlens_k.shape[0] != sequences):
        fail("seqlens_k", f"[{sequences}]", describe(seqlens_k))
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seqlens_k", seqlens_k)):
        if known(tensor.shape[0] > 1) and tensor.stride(0) != 1:
            fail(name, "contiguous", describe(tensor))
    if block_table.ndim != 2 or known(block_table.shape[0] != sequences):
        fail("block_table", f"[{sequences}, max_blocks]", describe(block_table))
    if known(block_table.shape[1] > 1) and block_table.stride(1) != 1:
        fail("block_table", "of contiguous rows", describe(block_table))
    return sequences


def _check_vector(name: str, vector: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    if tuple(vector.shape) != shape or not vector.is_contiguous():
        fail(name, f"[{shape[0]}], contiguous", describe(vector))
    check_same_device(name, vector, "q", q)


def _check_output(name: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    check_shape(name, tensor, shape)
    check_same_device(name, tensor, "q", q)
    check_elements_apart(name, tensor)


def check_values(problem: Problem, tensors: Tensors) -> None:
    """Lengths, pages and lists, by one copy to the host; ValueError names the first that cannot be."""
    names = ("cu_seqlens_q", "seqlens_k", "block_table", "indices")
    held = read_integers({name: getattr(tensors, name) for name in names})
    new = check_cu_seqlens("cu_seqlens_q", held["cu_seqlens_q"], problem.tokens)
    columns = tensors.block_table.shape[1]
    first = 0
    for i, (queries, total) in enumerate(zip(new, held["seqlens_k"], strict=True)):
        if not queries <= total <= problem.capacity:
            wanted = f"from {queries} (the sequence's queries) to {problem.capacity} (what block_table has slots for)"
            fail(f"seqlens_k[{i}]", wanted, total)
        for column in range(cdiv(total, problem.page_size) if queries else 0):
            page = held["block_table"][i * columns + column]
            if not 0 <= page < tensors.k_cache.shape[0]:
                fail(f"block_table[{i}, {column}]", f"a page from 0 to {tensors.k_cache.shape[0] - 1}", page)
        for token in range(first, first + queries):
            _check_lists(problem, held["indices"], token, cdiv(total, problem.block_size))
        first += queries


def _check_lists(problem: Problem, indices: list[int], token: int, blocks: int) -> None:
    for head in range(problem.num_heads_kv):
        first = (token * problem.num_heads_kv + head) * problem.topk
        seen = set()
        for place, block in enumerate(indices[first : first + problem.topk]):
            name = f"indices[{token}, {head}, {place}]"
            if not -1 <= block < blocks:
                fail(name, f"a block from 0 to {blocks - 1}, or -1", block)
            if block in seen:
                fail(name, "a block that is not listed before", block)
            if block >= 0:
                seen.add(block)
