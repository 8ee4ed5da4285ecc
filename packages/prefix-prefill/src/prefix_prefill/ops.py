"""The torch ops: schemas, fake implementations, the CPU implementation.

=======  =============================================================================
prefill  writes the outputs, and the logarithms of the sums, that it is given
merge    writes likewise the whole of an attention from two parts of its keys
=======  =============================================================================

Every implementation, the fake ones included, checks its arguments. On a GPU checks, plan and launch are made once for
each set of shapes, strides, dtypes and numbers, and found again by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from kernel_reference.attention import attention, merge_attention_states
from kernel_reference.checks import fail, values_are_checked
from kernel_reference.paging import Scale, gather
from prefix_prefill import arguments
from prefix_prefill.arguments import FP8
from prefix_prefill.plan import PrefillPlan, power_of_two_at_least

Tensor = torch.Tensor
Ints = Sequence[int] | None

_library = torch.library.Library("prefix_prefill", "DEF")
for _schema in (
    "prefill(Tensor q, Tensor? k, Tensor? v, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q,"
    " Tensor seqlens_k, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? out_scale,"
    " Tensor(a!) out, Tensor(b!)? lse, SymInt max_seqlen_q, str layout, float softmax_scale, SymInt left, SymInt right,"
    " float softcap, bool skip_decode, float k_factor, float v_factor, float out_factor, SymInt num_splits,"
    " int[]? plan=None, SymInt max_seqlen_k=2147483647) -> ()",
    "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

# Below, the tensors of prefill come first, 15 of them, then the numbers. The last ones of these torch leaves out where
# they are the defaults: a plan as ints, and the most tokens of a sequence.
_TENSORS = 15
_DEFAULTS = (None, arguments.MOST_TOKENS)
_ALL = _TENSORS + 13


def _checked_prefill(*arguments_of_op: Any) -> None:
    """The checks, which need no memory: also the fake implementation."""
    *others, _, k_factor, v_factor, out_factor, num_splits, plan, max_seqlen_k = _whole(arguments_of_op)
    rest = (k_factor, v_factor, out_factor, num_splits, max_seqlen_k)
    arguments.check_prefill(*(*others, *rest))
    if plan is None:
        return
    if num_splits:
        fail("num_splits", "None where a plan is given, which has its own", num_splits)
    made = _plan(plan)
    q, k, v, k_cache, v_cache, table, _, seqlens, alibi, _, k_scale, v_scale, *_, most, layout, scale = others[:18]
    problem = arguments.problem_of(
        q, k, v, k_cache, v_cache, table, seqlens, alibi, k_scale, v_scale, most, layout, scale, k_factor, v_factor
    )
    if made is None or not made.covers(problem):
        fail("plan", f"one made for {problem}", made)


def _whole(arguments_of_op: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments of prefill, those too that torch left out."""
    missing = _ALL - len(arguments_of_op)
    return (*arguments_of_op, *_DEFAULTS[len(_DEFAULTS) - missing :]) if missing else arguments_of_op


def _plan(plan: Ints) -> PrefillPlan | None:
    return None if plan is None else PrefillPlan(*plan)  # type: ignore[arg-type]


def _check_prefill_values(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    """What only device memory tells, inside validate_values and on a CPU."""
    q, k, _, k_cache, _, block_table, cu_seqlens_q, seqlens_k, *_ = tensors
    if not values_are_checked(q.device):
        return
    max_seqlen_q, layout, _, left, _, _, skip_decode, *_, max_seqlen_k = numbers
    arguments.check_values(
        cu_seqlens_q, seqlens_k, block_table, tokens=q.shape[0], max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        page_size=_page_size(k_cache, layout), blocks=k_cache.shape[0], apart=k is not None, left=left,
        skip_decode=skip_decode,
    )  # fmt: skip


def _page_size(k_cache: Tensor, layout: str) -> int:
    return k_cache.shape[{"NHD": 1, "HND": 2, "x-packed": 3}[layout]]


# The kernels

_launches: dict[tuple[object, ...], Any] = {}
# Room for the sizes of a server's life; past it all are made anew, which costs one slow call each.
_MOST_LAUNCHES = 8192


def _ready(prepare: Callable[..., Any], tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> Any:
    """What ``prepare(tensors, numbers)`` made the last time that tensors and numbers looked like this."""
    key = (prepare, numbers, *[t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    found = _launches.get(key)
    if found is None:
        found = prepare(tensors, numbers)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    return found


def _launches_of_gpu() -> Any:
    """The launches, imported when a tensor on a GPU first asks for them: all else works without Triton."""
    try:
        from prefix_prefill import launch
    except ImportError as error:
        raise RuntimeError(
            "tensors on a GPU need Triton, which torch's GPU builds bring; here it is missing"
        ) from error
    return launch


def _prepare_prefill(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_prefill(*tensors, *numbers)
    *others, plan, max_seqlen_k = numbers
    run = launch.prepare_prefill(*tensors, *others, _plan(plan), max_seqlen_k)
    return _apart(run, arguments.overlap_of_prefill(tensors))


def _prepare_merge(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    arguments.check_merge(*tensors)
    return _apart(launch.prepare_merge(*tensors), arguments.overlap_of_merge(tensors))


def _apart(run: Callable[..., None], overlap: Callable[..., None]) -> Callable[..., None]:
    """A launch over tensors of which the written ones share no memory with another."""

    def checked(*tensors: Tensor | None) -> None:
        overlap(*tensors)
        run(*tensors)

    return checked


def _kernel_prefill(*arguments_of_op: Any) -> None:
    given = _whole(arguments_of_op)
    tensors, numbers = given[:_TENSORS], given[_TENSORS:]
    *others, plan, max_seqlen_k = numbers
    # A key is hashable, and one for all bounds up to a power of two: sequences grow with every step of a server.
    rounded = max_seqlen_k if max_seqlen_k < 1 else power_of_two_at_least(max_seqlen_k)
    run = _ready(_prepare_prefill, tensors, (*others, plan if plan is None else tuple(plan), rounded))
    _check_prefill_values(tensors, numbers)
    run(*tensors)


def _kernel_merge(*tensors: Tensor) -> None:
    _ready(_prepare_merge, tensors, ())(*tensors)


# The references


def _reference_prefill(*arguments_of_op: Any) -> None:
    """Each sequence in float32: its cached keys and values made dense, the new ones behind them."""
    given = _whole(arguments_of_op)
    _checked_prefill(*given)
    tensors, numbers = given[:_TENSORS], given[_TENSORS:]
    _check_prefill_values(tensors, numbers)
    arguments.overlap_of_prefill(tensors)(*tensors)
    (
        q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k, alibi_slopes, sinks, k_scale, v_scale,
        out_scale, out, lse,
    ) = tensors  # fmt: skip
    _, layout, softmax_scale, left, right, softcap, skip_decode, k_factor, v_factor, out_factor, *_ = numbers
    capacity = block_table.shape[1] * _page_size(k_cache, layout)
    sequences, skipped = [], []
    for i, begin, end, total in _sequences(cu_seqlens_q, seqlens_k, q.shape[0]):
        cached = total if k is None else total - (end - begin)
        if end > begin and total >= end - begin and cached <= capacity:
            if skip_decode and end - begin == 1:
                skipped.append(begin)
            else:
                sequences.append((i, slice(begin, end), total - (end - begin), cached))
    _clear(out, lse, skipped)
    for i, rows, context, cached in sequences:
        # Pages wholly before the window are not read. Positions count from the first page that is.
        page_size = _page_size(k_cache, layout)
        first = min(max(0, context - left), cached) // page_size if left >= 0 else 0
        keys, values = (
            _dense(cache, block_table[i : i + 1, first:], cached - first * page_size, layout, factor, scale)
            for cache, factor, scale in ((k_cache, k_factor, k_scale), (v_cache, v_factor, v_scale))
        )
        if k is not None:
            keys, values = torch.cat([keys, k[rows].float()]), torch.cat([values, v[rows].float()])
        result = attention(
            q[rows], keys, values, softmax_scale=softmax_scale, window=(left, right), softcap=softcap, sinks=sinks,
            alibi_slopes=alibi_slopes, compute_dtype=torch.float32,
        )  # fmt: skip
        whole = result.out
        if out.dtype in FP8:
            limit = torch.finfo(out.dtype).max
            divisor = out_factor if out_scale is None else out_scale.reshape(()) * out_factor
            whole = (whole / divisor).clamp(-limit, limit)
        out[rows] = whole.to(out.dtype)
        if lse is not None:
            lse[:, rows] = result.lse


def _sequences(cu_seqlens_q: Tensor, seqlens_k: Tensor, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, first row, last row + 1 and length of each; within 0 and ``rows``, whatever cu_seqlens_q holds."""
    bounds = [min(max(bound, 0), rows) for bound in cu_seqlens_q.tolist()]
    for i, ((begin, end), total) in enumerate(zip(pairwise(bounds), seqlens_k.tolist(), strict=True)):
        yield i, begin, max(begin, end), total


def _clear(out: Tensor, lse: Tensor | None, kept: list[int]) -> None:
    """What rows of no sequence hold, in all rows but those to be left as they are."""
    cleared = torch.ones(out.shape[0], dtype=torch.bool)
    cleared[kept] = False
    # Indexing is not implemented for 8-bit floats; zero has no bits set in any dtype.
    (out.view(torch.uint8) if out.element_size() == 1 else out)[cleared] = 0
    if lse is not None:
        lse[:, cleared] = -torch.inf


def _dense(cache: Tensor, pages: Tensor, tokens: int, layout: str, factor: float, scale: Tensor | None) -> Tensor:
    """The first tokens [tokens, Hkv, D] of one sequence's pages [1, columns], in float32, scaled."""
    if scale is not None and scale.numel() == 1:
        scale = scale.reshape(())
    if cache.shape[0] == 0:
        # No page exists, and one that does not exist reads as zeros.
        cache = cache.new_zeros((1, *cache.shape[1:]))
        pages = torch.full_like(pages, -1)
        scale = None if scale is None or scale.ndim == 3 else scale
    by: Scale | None = scale
    if scale is None and (factor != 1 or cache.dtype in FP8):
        by = factor
    lengths = torch.tensor([tokens], dtype=torch.int64)
    return gather(cache, pages, lengths, layout, scale=by, dtype=torch.float32).tokens


def _reference_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    tensors = (out_a, lse_a, out_b, lse_b, out, lse)
    arguments.check_merge(*tensors)
    arguments.overlap_of_merge(tensors)(*tensors)
    result = merge_attention_states(out_a, lse_a, out_b, lse_b, compute_dtype=torch.float32)
    out.copy_(result.out)
    lse.copy_(result.lse)


for _name, _kernel, _reference, _fake in (
    ("prefill", _kernel_prefill, _reference_prefill, _checked_prefill),
    ("merge", _kernel_merge, _reference_merge, arguments.check_merge),
):
    _library.impl(_name, _reference, "CPU")
    # CUDA is also ROCm's key; PrivateUse1 that of out-of-tree devices such as Ascend's NPUs.
    for _key in ("CUDA", "PrivateUse1"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"prefix_prefill::{_name}", _fake, lib=_library)
