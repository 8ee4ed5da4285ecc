"""What arguments must be. The ops call these, so that no call goes unchecked, not torch.compile's nor a direct one.

While torch.compile traces, sizes may be symbols of which nothing is known yet, such as a number of tokens that the
device counts. What they leave open (``known``) is checked when the op runs.

Every function raises ValueError or TypeError naming the argument, what it must be and what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false as known

from kernel_reference.checks import check_float, describe, fail
from tilelang_mla.plan import DecodeProblem, DecodeTiles, PrefillProblem, cdiv

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.uint8, torch.int8)
# Of FlashMLA's record: 512 fp8 latents, 4 scales, 64 elements of rope.
_FP8_RECORD = 656
# Widths of the matrix products: of what is summed over in pieces of 32, of what is a value too in pieces of 64.
_QK_STEP, _V_STEP = 32, 64
_MOST_QK, _MOST_V = 256, 256
_MOST_NOPE, _MOST_ROPE = 512, 128
# What tensor memory accelerators count strides in.
_LINE_BYTES = 16


class Names(NamedTuple):
    """What a function calls the arguments that go by several names, for its errors."""

    kv: str = "kv"
    dim_nope: str = "dim_nope"
    first_part: str = "plan.first_part"
    order: str = "plan.order"


_NAMES = Names()


def check_tensors(**tensors: object) -> None:
    """Each must be a dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fail(name, "a torch.Tensor", describe(tensor), TypeError)
        if tensor.layout != torch.strided:
            fail(name, "a dense (strided) tensor", describe(tensor), TypeError)


def check_int(name: str, number: object, at_least: int | None = None, at_most: int | None = None) -> None:
    """An int, of a least and a greatest value if they are given."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        fail(name, "an int", describe(number), TypeError)
    if at_least is not None and known(number < at_least):
        fail(name, f"at least {at_least}", number)
    if at_most is not None and known(number > at_most):
        fail(name, f"at most {at_most}", number)


def check_bool(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        fail(name, "a bool", describe(value), TypeError)


def check_no_vmap(**tensors: object) -> None:
    """None may be a batch of ``torch.vmap``: the ops take whole batches themselves, and write what they are given."""
    # The functions below are private; there is no other way to ask.
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and torch._C._functorch.is_batchedtensor(tensor):
            fail(name, "outside torch.vmap (the function takes a batch of sequences itself)", "a batched tensor")


# Prefill


def check_prefill(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
) -> PrefillProblem:  # fmt: skip
    """Ragged queries, keys and values of separate heads; the problem that they make."""
    check_int("max_seqlen_q", max_seqlen_q, 0)
    check_int("max_seqlen_k", max_seqlen_k, 0)
    check_float("softmax_scale", softmax_scale, "a float or None")
    _check_rank("q", q, "[Tq, H, dqk]", 3, "q.flatten(0, 1) would fit" if q.ndim == 4 else "")
    _check_float16("q", q)
    num_heads, head_size = q.shape[1:]
    if known(num_heads < 1):
        fail("q", "of at least 1 head", describe(q))
    _check_size("q", head_size, _QK_STEP, _MOST_QK)
    for name, tensor, wanted in (("k", k, "[Tk, Hkv, dqk]"), ("v", v, "[Tk, Hkv, dv]")):
        _check_rank(name, tensor, wanted, 3)
        _check_like_q(name, tensor, q)
    if known(k.shape[2] != head_size):
        swapped = known(v.shape[2] == head_size)
        fail("k", f"[Tk, Hkv, {head_size}] as q is", _hinted(k, "k and v are in each other's place" if swapped else ""))
    num_heads_kv = k.shape[1]
    if known(num_heads_kv < 1) or known(num_heads % num_heads_kv != 0):
        turned = known(k.shape[0] > 0) and known(num_heads % k.shape[0] == 0)
        hint = "[Hkv, Tk, dqk] is another layout: k.transpose(0, 1) would fit" if turned else ""
        fail("k", f"of a number of heads that divides the {num_heads} of q", _hinted(k, hint))
    if _differ(v.shape[:2], k.shape[:2]):
        fail("v", f"[{k.shape[0]}, {num_heads_kv}, dv] as k is", describe(v))
    _check_size("v", v.shape[2], _V_STEP, _MOST_V)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, tensor)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_integers(name, tensor, q, 1, "[B + 1]")
        if known(tensor.shape[0] < 1):
            fail(name, "[B + 1]", describe(tensor))
    if _differ(cu_seqlens_k.shape, cu_seqlens_q.shape):
        both = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
        fail("cu_seqlens_q, cu_seqlens_k", "[B + 1] both", both)
    _check_results(q, out, lse, (q.shape[0], num_heads, v.shape[2]), (num_heads, q.shape[0]))
    return PrefillProblem(
        num_heads, num_heads_kv, head_size, v.shape[2], q.shape[0], cu_seqlens_q.shape[0] - 1, max_seqlen_q,
        causal, 8 * q.element_size(),
    )  # fmt: skip


def check_prefill_values(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, problem: PrefillProblem,
    max_seqlen_k: int) -> None:  # fmt: skip
    """Where the sequences begin, by one copy of it to the host."""
    bounds = torch.stack([cu_seqlens_q, cu_seqlens_k]).cpu().tolist()
    sides = (("q", bounds[0], q.shape[0], problem.max_seqlen_q), ("k", bounds[1], k.shape[0], max_seqlen_k))
    for side, held, rows, most in sides:
        name = f"cu_seqlens_{side}"
        if held[0] != 0:
            fail(f"{name}[0]", "0", held[0])
        for place, (before, bound) in enumerate(pairwise(held), 1):
            if not before <= bound <= rows:
                fail(f"{name}[{place}]", f"from {name}[{place - 1}] = {before} to {rows} (the rows of {side})", bound)
            if bound - before > most:
                fail(f"max_seqlen_{side}", f"at least {bound - before}, the length of sequence {place - 1}", most)


# Decoding


def check_decode(
    q: Tensor, kv: Tensor, cache_seqlens: Tensor, block_table: Tensor, first_part: Tensor | None,
    order: Tensor | None, out: Tensor, lse: Tensor | None, dim_nope: int, softmax_scale: float, causal: bool,
    plan: Sequence[int] | None = None, names: Names = _NAMES,
) -> DecodeProblem:  # fmt: skip
    """Queries and a paged latent cache; the problem that they make."""
    check_float("softmax_scale", softmax_scale, "a float or None")
    _check_rank("q", q, f"[B, Sq, Hq, {names.dim_nope} + dpe]", 4, "q.unsqueeze(1) would fit" if q.ndim == 3 else "")
    _check_float16("q", q)
    sequences, seqlen_q, num_heads, width = q.shape
    if known(num_heads < 1):
        fail("q", "of at least 1 head", describe(q))
    check_int(names.dim_nope, dim_nope)
    check_dims(names.dim_nope, "q", dim_nope, width - dim_nope)
    _check_cache(q, kv, dim_nope, names)
    page_size = kv.shape[1]
    if cache_seqlens.ndim == 2 and block_table.ndim == 1:
        got = _hinted(cache_seqlens, "cache_seqlens and block_table are in each other's place")
        fail("cache_seqlens", "[B]", got)
    _check_integers("cache_seqlens", cache_seqlens, q, 1, "[B]")
    if known(cache_seqlens.shape[0] != sequences):
        fail("cache_seqlens", f"[{sequences}], one a sequence of q", describe(cache_seqlens))
    _check_integers("block_table", block_table, q, 2, "[B, max_pages]")
    if known(block_table.shape[0] != sequences):
        fail("block_table", f"[{sequences}, max_pages], a row a sequence of q", describe(block_table))
    shape = (sequences, seqlen_q, num_heads, dim_nope)
    _check_results(q, out, lse, shape, (sequences, num_heads, seqlen_q))
    problem = DecodeProblem(
        num_heads, dim_nope, width - dim_nope, seqlen_q, sequences, block_table.shape[1] * page_size, page_size,
        8 * q.element_size(),
    )  # fmt: skip
    _check_parts(q, first_part, order, None if plan is None else DecodeTiles(*plan), problem, names)
    return problem


def _check_parts(
    q: Tensor, first_part: Tensor | None, order: Tensor | None, tiles: DecodeTiles | None, problem: DecodeProblem,
    names: Names,
) -> None:  # fmt: skip
    """A plan, and its tensors for as many sequences as q has."""
    sequences = problem.sequences
    if tiles is not None and not tiles.covers(problem):
        fail("plan", f"one made for {problem}", tiles)
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
    """Sizes of the latent and of the rope behind it, and what gives them."""
    if not _is_size(dim_nope, _V_STEP, _MOST_NOPE):
        fail(nope, f"a multiple of {_V_STEP} from {_V_STEP} to {_MOST_NOPE}", dim_nope)
    if not _is_size(dim_rope, _QK_STEP, _MOST_ROPE):
        wanted = f"a multiple of {_QK_STEP} from {_QK_STEP} to {_MOST_ROPE}"
        if rope == "q":
            fail(rope, f"of {nope} = {dim_nope} elements and {wanted} more", f"{dim_nope + dim_rope} elements")
        fail(rope, wanted, dim_rope)


def _check_cache(q: Tensor, kv: Tensor, dim_nope: int, names: Names) -> None:
    width = q.shape[3]
    if kv.dtype in _FP8 or (kv.ndim and known(kv.shape[-1] == _FP8_RECORD)):
        wanted = f"{q.dtype} as q is (an fp8 latent cache, of {_FP8_RECORD} bytes a token, is not supported yet)"
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
    _check_rows("q", q)
    _check_rows(names.kv, kv)


def check_decode_values(
    cache_seqlens: Tensor, block_table: Tensor, first_part: Tensor | None, order: Tensor | None, pages: int,
    problem: DecodeProblem, tiles: DecodeTiles | None, names: Names = _NAMES,
) -> None:  # fmt: skip
    """Lengths, pages and the parts of a plan, by one copy of all of it to the host."""
    given = {"lengths": cache_seqlens, "table": block_table, "first": first_part, "order": order}
    parts = {name: tensor.reshape(-1).long() for name, tensor in given.items() if tensor is not None}
    host = torch.cat([*parts.values()]).cpu().split([part.numel() for part in parts.values()])
    held: dict[str, list[int]] = {name: part.tolist() for name, part in zip(parts, host, strict=True)}
    columns = block_table.shape[1]
    for sequence, length in enumerate(held["lengths"]):
        if not 0 <= length <= problem.capacity:
            wanted = f"from 0 to {problem.capacity}, what the {columns} columns of block_table have room for"
            fail(f"cache_seqlens[{sequence}]", wanted, length)
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


# plan_decode


def check_plan_lengths(cache_seqlens: Tensor) -> None:
    """cache_seqlens, where a plan is made from them."""
    _check_integers("cache_seqlens", cache_seqlens, None, 1, "[B]")


# What both have


def _hinted(tensor: Tensor, hint: str) -> str:
    """What a tensor was, and what of it may have been meant."""
    return f"{describe(tensor)}; {hint}" if hint else describe(tensor)


def _differ(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(sizes) != len(wanted) or any(known(one != other) for one, other in zip(sizes, wanted, strict=True))


def _is_size(size: int, step: int, most: int) -> bool:
    return not (known(size % step != 0) or known(size < step) or known(size > most))


def _check_rank(name: str, tensor: Tensor, wanted: str, rank: int, hint: str = "") -> None:
    if tensor.ndim != rank:
        fail(name, wanted, _hinted(tensor, hint))


def _check_float16(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        fail(f"{name}.dtype", "bfloat16 or float16", tensor.dtype, TypeError)


def _check_like_q(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype != q.dtype:
        fail(f"{name}.dtype", f"{q.dtype} as that of q is", tensor.dtype, TypeError)
    _check_device(name, tensor, q)


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        fail(f"{name}.device", f"{q.device} as q is", tensor.device)


def _check_size(name: str, size: int, step: int, most: int) -> None:
    if not _is_size(size, step, most):
        fail(name, f"of a head size that is a multiple of {step} from {step} to {most}", size)


def _check_rows(name: str, tensor: Tensor) -> None:
    """Strides such that a tensor memory accelerator can address it."""
    line = _LINE_BYTES // tensor.element_size()
    *steps, last = tensor.stride()
    *sizes, _ = tensor.shape
    apart = (known(size > 1) and known(step % line != 0) for size, step in zip(sizes, steps, strict=True))
    if known(last != 1) or any(apart):
        fail(name, f"of contiguous rows {_LINE_BYTES} bytes apart or a multiple of that", describe(tensor))


def _check_integers(name: str, tensor: Tensor, q: Tensor | None, rank: int, wanted: str) -> None:
    if tensor.dtype != torch.int32:
        fail(f"{name}.dtype", "int32", tensor.dtype, TypeError)
    _check_rank(name, tensor, wanted, rank)
    if rank == 1 and not tensor.is_contiguous():
        fail(name, "contiguous", describe(tensor))
    if rank == 2 and known(tensor.shape[1] > 1) and known(tensor.stride(1) != 1):
        fail(name, "of contiguous rows", describe(tensor))
    if q is not None:
        _check_device(name, tensor, q)


def _check_results(
    q: Tensor, out: Tensor, lse: Tensor | None, shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> None:
    _check_like_q("out", out, q)
    _check_shape("out", out, shape, q)
    if known(out.stride(-1) != 1):
        fail("out", "of contiguous rows", describe(out))
    _check_no_overlap("out", out)
    if lse is not None:
        if lse.dtype != torch.float32:
            fail("lse.dtype", "float32", lse.dtype, TypeError)
        _check_shape("lse", lse, lse_shape, q)
        _check_no_overlap("lse", lse)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    if _differ(tensor.shape, shape):
        fail(name, f"[{', '.join(map(str, shape))}]", describe(tensor))
    _check_device(name, tensor, q)


def _check_no_overlap(name: str, tensor: Tensor) -> None:
    """A tensor to be written: each stride passes all that the smaller ones reach, so that no place is shared."""
    if any(isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride())):
        # Not to be compiled anew for each order of strides: the op looks when it runs.
        return
    if tensor.numel() == 0:
        return
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    reached = 0
    for stride, size in sorted(dims, key=lambda dim: dim[0]):
        if stride <= reached:
            fail(name, "a tensor whose elements do not share memory, nor its dimensions interleave", describe(tensor))
        reached += stride * (size - 1)
