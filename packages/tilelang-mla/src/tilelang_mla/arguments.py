"""What arguments must be. The ops call these, so that no call goes unchecked, not torch.compile's nor a direct one.

One check gives the one description of a problem that plan, launch and reference are told of. While torch.compile
traces, sizes may be symbols of which nothing is known yet, such as a number of tokens that the device counts. What they
leave open (``known``) is checked when the op runs.

Every function raises ValueError or TypeError naming the argument, what it must be and what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kernel_reference.checks import (
    check_dense,
    check_dtype,
    check_elements_apart,
    check_float,
    check_int,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    differ,
    fail,
    known,
)
from kernel_reference.integers import cdiv
from kernel_reference.plans import check_covers
from kernel_reference.ragged import check_cu_seqlens, read_integers
from kernel_reference.transforms import are_active, check_no_transforms
from tilelang_mla.caches import RECORD, check_8bit_cache
from tilelang_mla.plan import DecodeProblem, DecodeTiles, PrefillPlan, PrefillProblem

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16)
# WGMMA sums over pieces of 32 elements; what is a value too has pieces of 64.
_QK_STEP, _V_STEP = 32, 64
_MOST_QK, _MOST_V = 256, 256
_MOST_NOPE, _MOST_ROPE = 512, 128
# What TMA counts strides in.
_LINE_BYTES = 16


class PrefillTensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` and ``lse`` are written."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    out: Tensor
    lse: Tensor | None


class PrefillOptions(NamedTuple):
    """The other arguments of the op, in its order."""

    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    causal: bool
    plan: Sequence[int] | None = None


class DecodeTensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` and ``lse`` are written."""

    q: Tensor
    kv: Tensor
    seqlens_k: Tensor
    block_table: Tensor
    first_part: Tensor | None
    order: Tensor | None
    out: Tensor
    lse: Tensor | None


class Decode8bitTensors(NamedTuple):
    """The same over a cache of 8 bits; ``kv_scale`` is None where records have scales of their own."""

    q: Tensor
    kv: Tensor
    seqlens_k: Tensor
    block_table: Tensor
    first_part: Tensor | None
    order: Tensor | None
    kv_scale: Tensor | None
    out: Tensor
    lse: Tensor | None


class DecodeOptions(NamedTuple):
    """The other arguments of the op, in its order; the plan's are its tiles."""

    dim_nope: int
    softmax_scale: float
    causal: bool
    plan: Sequence[int] | None = None


class MergeTensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` and ``lse`` are written."""

    parts: Tensor
    part_lse: Tensor
    out: Tensor
    lse: Tensor


class Names(NamedTuple):
    """What a function calls the arguments that go by several names, for its errors."""

    kv: str = "kv"
    seqlens_k: str = "seqlens_k"
    dim_nope: str = "dim_nope"
    first_part: str = "plan.first_part"
    order: str = "plan.order"


NAMES = Names()


# Prefill


def check_prefill(tensors: PrefillTensors, options: PrefillOptions) -> tuple[PrefillProblem, PrefillPlan | None]:
    """Ragged queries, keys and values of separate heads; the problem that they make, and the plan if one was given."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = tensors
    check_int("max_seqlen_q", options.max_seqlen_q, 0)
    check_int("max_seqlen_k", options.max_seqlen_k, 0)
    check_float("softmax_scale", options.softmax_scale, "a float or None")
    _check_rank("q", q, "[Tq, H, dqk]", 3, "q.flatten(0, 1) would fit" if q.ndim == 4 else "")
    _check_float16("q", q)
    num_heads, head_dim = q.shape[1:]
    if known(num_heads < 1):
        fail("q", "of at least 1 head", describe(q))
    _check_size("q", head_dim, _QK_STEP, _MOST_QK)
    _check_keys_and_values(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rows(name, tensor)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_integers(name, tensor, q, 1, "[B + 1]")
        if known(tensor.shape[0] < 1):
            fail(name, "[B + 1]", describe(tensor))
    if differ(cu_seqlens_k.shape, cu_seqlens_q.shape):
        both = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
        fail("cu_seqlens_q, cu_seqlens_k", "[B + 1] both", both)
    check_results(q, out, lse, (q.shape[0], num_heads, v.shape[2]), (num_heads, q.shape[0]))
    problem = PrefillProblem(
        num_heads, k.shape[1], head_dim, v.shape[2], q.shape[0], cu_seqlens_q.shape[0] - 1, options.max_seqlen_q,
        options.causal, 8 * q.element_size(), k.shape[0], options.max_seqlen_k, options.softmax_scale,
    )  # fmt: skip
    plan = PrefillPlan.from_ints(options.plan)
    check_covers(plan, problem)
    return problem, plan


def _check_keys_and_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    num_heads, head_dim = q.shape[1:]
    for name, tensor, wanted in (("k", k, "[Tk, Hkv, dqk]"), ("v", v, "[Tk, Hkv, dv]")):
        _check_rank(name, tensor, wanted, 3)
        _check_like_q(name, tensor, q)
    if known(k.shape[2] != head_dim):
        swapped = known(v.shape[2] == head_dim)
        fail("k", f"[Tk, Hkv, {head_dim}] as q is", _hinted(k, "k and v are in each other's place" if swapped else ""))
    num_heads_kv = k.shape[1]
    if known(num_heads_kv < 1) or known(num_heads % num_heads_kv != 0):
        turned = known(k.shape[0] > 0) and known(num_heads % k.shape[0] == 0)
        hint = "[Hkv, Tk, dqk] is another layout: k.transpose(0, 1) would fit" if turned else ""
        fail("k", f"of a number of heads that divides the {num_heads} of q", _hinted(k, hint))
    if differ(v.shape[:2], k.shape[:2]):
        fail("v", f"[{k.shape[0]}, {num_heads_kv}, dv] as k is", describe(v))
    _check_size("v", v.shape[2], _V_STEP, _MOST_V)


def check_prefill_values(problem: PrefillProblem, tensors: PrefillTensors) -> None:
    """Where the sequences begin, by one copy of it to the host."""
    bounds = read_integers({"q": tensors.cu_seqlens_q, "k": tensors.cu_seqlens_k})
    sides = (("q", problem.tokens, problem.max_seqlen_q), ("k", problem.tokens_k, problem.max_seqlen_k))
    for side, rows, most in sides:
        for sequence, length in enumerate(check_cu_seqlens(f"cu_seqlens_{side}", bounds[side], rows, side)):
            if length > most:
                fail(f"max_seqlen_{side}", f"at least {length}, the length of sequence {sequence}", most)


# Decoding


def check_decode(
    tensors: DecodeTensors | Decode8bitTensors, options: DecodeOptions, names: Names = NAMES
) -> tuple[DecodeProblem, DecodeTiles | None]:
    """Queries and a paged latent cache; the problem that they make, and the tiles of a plan if one was given."""
    q, kv, seqlens_k, block_table = tensors[:4]
    dim_nope = options.dim_nope
    check_float("softmax_scale", options.softmax_scale, "a float or None")
    _check_rank("q", q, f"[B, Sq, Hq, {names.dim_nope} + dpe]", 4, "q.unsqueeze(1) would fit" if q.ndim == 3 else "")
    _check_float16("q", q)
    sequences, seqlen_q, num_heads, width = q.shape
    if known(num_heads < 1):
        fail("q", "of at least 1 head", describe(q))
    check_int(names.dim_nope, dim_nope)
    check_dims(names.dim_nope, "q", dim_nope, width - dim_nope)
    cache = ""
    if isinstance(tensors, Decode8bitTensors):
        cache = check_8bit_cache(q, kv, dim_nope, tensors.kv_scale, names.kv)
    else:
        _check_cache(q, kv, dim_nope, names)
    check_rows("q", q)
    check_rows(names.kv, kv)
    page_size = kv.shape[1]
    if seqlens_k.ndim == 2 and block_table.ndim == 1:
        got = _hinted(seqlens_k, f"{names.seqlens_k} and block_table are in each other's place")
        fail(names.seqlens_k, "[B]", got)
    per_token = seqlens_k.ndim == 2
    _check_integers(names.seqlens_k, seqlens_k, q, 2 if per_token else 1, "[B] or [B, Sq]")
    if known(seqlens_k.shape[0] != sequences):
        fail(names.seqlens_k, f"[{sequences}], one a sequence of q", describe(seqlens_k))
    if per_token and (known(seqlens_k.shape[1] != seqlen_q) or not seqlens_k.is_contiguous()):
        fail(names.seqlens_k, f"[{sequences}] or, one a query token, [{sequences}, {seqlen_q}]", describe(seqlens_k))
    _check_integers("block_table", block_table, q, 2, "[B, max_pages]")
    if known(block_table.shape[0] != sequences):
        fail("block_table", f"[{sequences}, max_pages], a row a sequence of q", describe(block_table))
    shape = (sequences, seqlen_q, num_heads, dim_nope)
    check_results(q, tensors.out, tensors.lse, shape, (sequences, num_heads, seqlen_q))
    problem = DecodeProblem(
        num_heads, dim_nope, width - dim_nope, seqlen_q, sequences, block_table.shape[1] * page_size, page_size,
        8 * q.element_size(), kv.shape[0], options.softmax_scale, options.causal, per_token,
        cache,
    )  # fmt: skip
    tiles = DecodeTiles.from_ints(options.plan)
    check_parts(problem, tiles, tensors.first_part, tensors.order, q, names)
    return problem, tiles


def check_parts(
    problem: DecodeProblem, tiles: DecodeTiles | None, first_part: Tensor | None, order: Tensor | None, q: Tensor,
    names: Names,
) -> None:  # fmt: skip
    """A plan, and its tensors for as many sequences as q has."""
    sequences = problem.sequences
    if tiles is not None and known(tiles.rows != 0) and known(tiles.rows != problem.rows):
        fail("plan", f"made for {problem.rows} query tokens x heads, as q has", f"one made for {tiles.rows}")
    check_covers(tiles, problem)
    if tiles is not None and tiles.spare_parts and first_part is None:
        fail(names.first_part, "given with spare parts", None)
    num_parts = 0 if tiles is None else tiles.num_parts(sequences)
    for name, tensor, size in ((names.first_part, first_part, sequences + 1), (names.order, order, num_parts)):
        if tensor is None:
            continue
        if tiles is None or first_part is None:
            fail(name, "None without a plan", describe(tensor))
        _check_integers(name, tensor, q, 1, f"[{size}]")
        if known(tensor.shape[0] != size):
            fail(name, f"[{size}], made for the {sequences} sequences of q", describe(tensor))


def check_dims(nope: str, rope: str, dim_nope: int, dim_rope: int) -> None:
    """Sizes of the latent and of the rope behind it, of which there may be none, and what gives them."""
    if not _is_size(dim_nope, _V_STEP, _MOST_NOPE):
        fail(nope, f"a multiple of {_V_STEP} from {_V_STEP} to {_MOST_NOPE}", dim_nope)
    if dim_rope != 0 and not _is_size(dim_rope, _QK_STEP, _MOST_ROPE):
        wanted = f"a multiple of {_QK_STEP} from 0 to {_MOST_ROPE}"
        if rope == "q":
            fail(rope, f"of {nope} = {dim_nope} elements and {wanted} more", f"{dim_nope + dim_rope} elements")
        fail(rope, wanted, dim_rope)


def _check_cache(q: Tensor, kv: Tensor, dim_nope: int, names: Names) -> None:
    width = q.shape[3]
    if kv.dtype.itemsize == 1:
        wanted = f"{q.dtype} as q is, torch.float8_e4m3fn, or torch.uint8 for records of {RECORD} bytes"
        fail(f"{names.kv}.dtype", wanted, describe(kv), TypeError)
    hint = f"{names.kv}.unsqueeze(2) would fit" if kv.ndim == 3 else ""
    _check_rank(names.kv, kv, f"[pages, page_size, 1, {width}]", 4, hint)
    _check_like_q(names.kv, kv, q)
    if known(kv.shape[2] != 1):
        turned = known(kv.shape[1] == 1) and known(kv.shape[3] == width)
        hint = f"[pages, 1, page_size, {width}] is another layout: {names.kv}.transpose(1, 2) would fit"
        fail(names.kv, f"[pages, page_size, 1, {width}], of 1 kv head", _hinted(kv, hint if turned else ""))
    if known(kv.shape[3] != width):
        hint = "a row is torch.cat([latent, rope], -1)"
        a_part = known(kv.shape[3] == dim_nope) or known(kv.shape[3] == width - dim_nope)
        fail(names.kv, f"[pages, page_size, 1, {width}] as q is", _hinted(kv, hint if a_part else ""))
    if known(kv.shape[1] < 1):
        fail(names.kv, f"[pages, page_size, 1, {width}] with a page_size of at least 1", describe(kv))


def check_decode_values(
    problem: DecodeProblem, tiles: DecodeTiles | None, tensors: DecodeTensors | Decode8bitTensors,
    names: Names = NAMES,
) -> None:  # fmt: skip
    """Lengths, pages and the parts of a plan, by one copy of all of it to the host."""
    block_table = tensors.block_table
    held = read_integers(
        {"lengths": tensors.seqlens_k, "table": block_table, "first": tensors.first_part, "order": tensors.order}
    )
    columns, pages = block_table.shape[1], problem.pages
    each = problem.seqlen_q if problem.per_token else 1
    for place, length in enumerate(held["lengths"]):
        sequence, token = divmod(place, each) if problem.per_token else (place, 0)
        where = f"{sequence}, {token}" if problem.per_token else f"{sequence}"
        if not 0 <= length <= problem.capacity:
            wanted = f"from 0 to {problem.capacity}, what the {columns} columns of block_table have room for"
            fail(f"{names.seqlens_k}[{where}]", wanted, length)
        if token and length < held["lengths"][place - 1]:
            fail(f"{names.seqlens_k}[{where}]", f"at least {held['lengths'][place - 1]}, as the token before", length)
        for column in range(cdiv(length, problem.page_size)):
            page = held["table"][sequence * columns + column]
            if not 0 <= page < pages:
                fail(f"block_table[{sequence}, {column}]", f"a page from 0 to {pages - 1}", page)
    num_parts = 0 if tiles is None else tiles.num_parts(problem.sequences)
    bounds = held.get("first", [0])
    if bounds[0] != 0:
        fail(f"{names.first_part}[0]", "0", bounds[0])
    for place, (before, bound) in enumerate(pairwise(bounds), 1):
        if not before < bound <= num_parts:
            fail(f"{names.first_part}[{place}]", f"from {before + 1} to {num_parts}, the parts of the grid", bound)
    if "order" in held and sorted(held["order"]) != [*range(num_parts)]:
        fail(names.order, f"each of 0 to {num_parts - 1} once", held["order"])


# Merging


def check_merge(tensors: MergeTensors) -> None:
    """Partial results [world, N, dim_nope] of ranks, their lse [world, N], and where the whole goes, packed."""
    parts, part_lse, out, lse = tensors
    _check_rank("parts", parts, "[world, N, dim_nope]", 3)
    _check_float16("parts", parts)
    world, rows, dim = parts.shape
    if not _is_size(dim, _V_STEP, _MOST_NOPE):
        fail("parts", f"of rows of a multiple of {_V_STEP} from {_V_STEP} to {_MOST_NOPE}", describe(parts))
    if known(parts.stride(2) != 1) or any(known(step % 2 != 0) for step in parts.stride()[:2]):
        fail("parts", "of contiguous rows an even number of elements apart", describe(parts))
    for name, tensor, shape in (("part_lse", part_lse, (world, rows)), ("lse", lse, (rows,))):
        check_dtype(name, tensor, torch.float32)
        check_shape(name, tensor, shape)
        check_same_device(name, tensor, "parts", parts)
    check_shape("out", out, (rows, dim))
    check_same_dtype("out", out, "parts", parts)
    check_same_device("out", out, "parts", parts)
    for name, tensor in (("out", out), ("lse", lse)):
        if not tensor.is_contiguous():
            fail(name, "contiguous", describe(tensor))


# plan_decode


def check_plan_lengths(name: str, seqlens_k: Tensor) -> None:
    """Lengths that a plan is made from."""
    check_dense(**{name: seqlens_k})
    if are_active():
        check_no_transforms(**{name: seqlens_k})
    _check_integers(name, seqlens_k, None, 1, "[B]")


# What both have


def _hinted(tensor: Tensor, hint: str) -> str:
    """What a tensor was, and what of it may have been meant."""
    return f"{describe(tensor)}; {hint}" if hint else describe(tensor)


def _is_size(size: int, step: int, most: int) -> bool:
    return not (known(size % step != 0) or known(size < step) or known(size > most))


def _check_rank(name: str, tensor: Tensor, wanted: str, rank: int, hint: str = "") -> None:
    if tensor.ndim != rank:
        fail(name, wanted, _hinted(tensor, hint))


def _check_float16(name: str, tensor: Tensor) -> None:
    check_dtype(name, tensor, *_FLOATS)


def _check_like_q(name: str, tensor: Tensor, q: Tensor) -> None:
    check_same_dtype(name, tensor, "q", q)
    check_same_device(name, tensor, "q", q)


def _check_size(name: str, size: int, step: int, most: int) -> None:
    if not _is_size(size, step, most):
        fail(name, f"of a head size that is a multiple of {step} from {step} to {most}", size)


def check_rows(name: str, tensor: Tensor) -> None:
    """Strides that TMA can address."""
    line = _LINE_BYTES // tensor.element_size()
    *steps, last = tensor.stride()
    *sizes, _ = tensor.shape
    apart = (known(size > 1) and known(step % line != 0) for size, step in zip(sizes, steps, strict=True))
    if known(last != 1) or any(apart):
        fail(name, f"of contiguous rows {_LINE_BYTES} bytes apart or a multiple of that", describe(tensor))


def _check_integers(name: str, tensor: Tensor, q: Tensor | None, rank: int, wanted: str) -> None:
    check_dtype(name, tensor, torch.int32)
    _check_rank(name, tensor, wanted, rank)
    if rank == 1 and not tensor.is_contiguous():
        fail(name, "contiguous", describe(tensor))
    if rank == 2 and known(tensor.shape[1] > 1) and known(tensor.stride(1) != 1):
        fail(name, "of contiguous rows", describe(tensor))
    if q is not None:
        check_same_device(name, tensor, "q", q)


def check_results(
    q: Tensor, out: Tensor, lse: Tensor | None, shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> None:
    _check_like_q("out", out, q)
    check_shape("out", out, shape)
    if known(out.stride(-1) != 1):
        fail("out", "of contiguous rows", describe(out))
    check_elements_apart("out", out)
    if lse is not None:
        check_dtype("lse", lse, torch.float32)
        check_shape("lse", lse, lse_shape)
        check_same_device("lse", lse, "q", q)
        check_elements_apart("lse", lse)
