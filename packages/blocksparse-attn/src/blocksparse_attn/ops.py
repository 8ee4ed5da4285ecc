"""The torch op: schema, fake implementation, the CPU implementation.

======  =============================================================================
attend  writes the outputs, and the logarithms of the sums, that it is given
======  =============================================================================

Every implementation, the fake one included, checks its arguments. On a GPU checks, plan and launch are made once for
each set of shapes, strides, dtypes and numbers, and found again by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from blocksparse_attn import arguments
from blocksparse_attn.layout import block_mask
from blocksparse_attn.plan import AttentionPlan, Problem, cdiv
from kernel_reference.attention import attention
from kernel_reference.blocks import mask_function
from kernel_reference.checks import MemoryOverlap, check_no_overlap, fail, values_are_checked
from kernel_reference.paging import gather

Tensor = torch.Tensor

_library = torch.library.Library("blocksparse_attn", "DEF")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor crow, Tensor col, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? block_table, Tensor? seqlens_k, Tensor? q_starts, Tensor? q_ends, Tensor? k_starts, Tensor? k_ends,"
    " Tensor? sinks, Tensor(a!) out, Tensor(b!)? lse, SymInt max_seqlen_q, int q_block, int k_block, str layout,"
    " float softmax_scale, int left, int right, float softcap, int num_splits, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# Below, the tensors come first, 16 of them, then the numbers, and a plan is one as ints, which torch leaves out when it
# is None.
_TENSORS, _NUMBERS = 16, 10
_NAMES = (
    "q", "k", "v", "crow", "col", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "q_starts", "q_ends",
    "k_starts", "k_ends", "sinks", "out", "lse",
)  # fmt: skip
_WRITTEN = ("out", "lse")


def _with_plan(arguments_of_op: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the op, the plan among them even when torch left it out."""
    return arguments_of_op if len(arguments_of_op) == _TENSORS + _NUMBERS else (*arguments_of_op, None)


def _checked_attend(*arguments_of_op: Any) -> Problem:
    *others, num_splits, plan = _with_plan(arguments_of_op)
    problem = arguments.check_attend(*(*others, num_splits))
    if plan is None:
        return problem
    if num_splits:
        fail("num_splits", "None where a plan is given, which has its own", num_splits)
    made = _plan(plan)
    if made is None or not made.covers(problem):
        fail("plan", f"one made for {problem}", made)
    return problem


def _fake_attend(*arguments_of_op: Any) -> None:
    _checked_attend(*arguments_of_op)


def _plan(plan: list[int] | None) -> AttentionPlan | None:
    return None if plan is None else AttentionPlan(*plan)  # type: ignore[arg-type]


def _check_attend_values(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    """What only device memory tells, on a CPU and inside validate_values."""
    if values_are_checked(tensors[0].device):
        problem = arguments.check_attend(*(*tensors, *numbers[:-1]))
        q, k, _, *lists = tensors[:13]
        arguments.check_values(q, k, *lists, problem=problem, blocks=k.shape[0], left=numbers[5])


# The kernels

_launches: dict[tuple[object, ...], Any] = {}
# Room for the sizes of a server's life; past it all are made anew, which costs one slow call each.
_MOST_LAUNCHES = 8192


def _ready(prepare: Callable[..., Any], tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> Any:
    """What ``prepare(tensors, numbers)`` made the last time that tensors and numbers looked like this."""
    if numbers and type(numbers[-1]) is list:
        # A plan, as torch passes it: a key wants it hashable.
        numbers = (*numbers[:-1], tuple(numbers[-1]))
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
        from blocksparse_attn import launch
    except ImportError as error:
        raise RuntimeError(
            "tensors on a GPU need Triton, which torch's GPU builds bring; here it is missing"
        ) from error
    return launch


def _prepare_attend(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_attend(*tensors, *numbers)
    *others, plan = numbers
    overlap = MemoryOverlap(dict(zip(_NAMES, tensors, strict=True)), _WRITTEN)
    return launch.prepare_attend(*tensors, *others, _plan(plan)), overlap


def _kernel_attend(*arguments_of_op: Any) -> None:
    arguments_of_op = _with_plan(arguments_of_op)
    tensors, numbers = arguments_of_op[:_TENSORS], arguments_of_op[_TENSORS:]
    run, check_overlap = _ready(_prepare_attend, tensors, numbers)
    check_overlap(*tensors)
    _check_attend_values(tensors, numbers)
    run(*tensors)


# The reference


class _Sequence(NamedTuple):
    """One sequence: its queries [q_len, Hq, D], where their results go, what gives its ``total`` keys and values."""

    q: Tensor
    out: Tensor
    lse: Tensor | None
    total: int
    load: Callable[[], tuple[Tensor, Tensor]]


def _reference_attend(*arguments_of_op: Any) -> None:
    """Each sequence in float32; the layout as a mask of blocks, never of tokens."""
    problem = _checked_attend(*arguments_of_op)
    arguments_of_op = _with_plan(arguments_of_op)
    tensors, numbers = arguments_of_op[:_TENSORS], arguments_of_op[_TENSORS:]
    check_no_overlap(dict(zip(_NAMES, tensors, strict=True)), _WRITTEN)
    _check_attend_values(tensors, numbers)
    crow, col, sinks, out, lse = (tensors[i] for i in (3, 4, 13, 14, 15))
    _, q_block, k_block, _, softmax_scale, left, right, softcap, *_ = numbers
    sequences = [one for one in _sequences(tensors, numbers, problem) if 0 < len(one.q) <= one.total]
    longest = max([one.total for one in sequences], default=0)
    mask = block_mask(crow, col, min(problem.rows, cdiv(longest, q_block)), cdiv(longest, k_block))
    visible = mask_function(mask, q_block, k_block)
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    for one in sequences:
        keys, values = one.load()
        result = attention(
            one.q, keys, values, softmax_scale=softmax_scale, causal=True, window=(left, right), mask=visible,
            softcap=softcap, sinks=sinks, compute_dtype=torch.float32,
        )  # fmt: skip
        one.out.copy_(result.out)
        if one.lse is not None:
            one.lse.copy_(result.lse)


def _sequences(tensors: tuple[Any, ...], numbers: tuple[Any, ...], problem: Problem) -> Iterator[_Sequence]:
    if problem.padded:
        return _padded(tensors)
    if problem.page_size:
        return _paged(tensors, numbers, problem)
    return _ragged(tensors)


def _rows(tensors: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Queries, outputs and lse of each sequence, within the rows there are whatever cu_seqlens_q holds."""
    q, cu_seqlens_q, out, lse = (tensors[i] for i in (0, 5, 14, 15))
    bounds = [min(max(bound, 0), q.shape[0]) for bound in cu_seqlens_q.tolist()]
    for begin, end in pairwise(bounds):
        rows = slice(begin, max(begin, end))
        yield q[rows], out[rows], None if lse is None else lse[:, rows]


def _ragged(tensors: tuple[Any, ...]) -> Iterator[_Sequence]:
    _, k, v, _, _, _, cu_seqlens_k, *_ = tensors
    for own, (begin, end) in zip(_rows(tensors), pairwise(cu_seqlens_k.tolist()), strict=True):
        if 0 <= begin <= end <= k.shape[0]:
            yield _Sequence(*own, end - begin, _slices(k, v, begin, end))


def _padded(tensors: tuple[Any, ...]) -> Iterator[_Sequence]:
    q, k, v = tensors[:3]
    out, lse = tensors[14:]
    starts_q, ends_q, starts_k, ends_k = (
        [default] * q.shape[0] if bounds is None else bounds.tolist()
        for bounds, default in zip(tensors[9:13], (0, q.shape[1], 0, k.shape[1]), strict=True)
    )
    for i, (begin, end) in enumerate(zip(starts_k, ends_k, strict=True)):
        first, last = (min(max(bound, 0), q.shape[1]) for bound in (starts_q[i], ends_q[i]))
        rows = slice(first, max(first, last))
        own = (q[i, rows], out[i, rows], None if lse is None else lse[i, :, rows])
        if 0 <= begin <= end <= k.shape[1]:
            yield _Sequence(*own, end - begin, _slices(k[i], v[i], begin, end))


def _slices(k: Tensor, v: Tensor, begin: int, end: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (k[begin:end], v[begin:end])


def _paged(tensors: tuple[Any, ...], numbers: tuple[Any, ...], problem: Problem) -> Iterator[_Sequence]:
    _, k, v, _, _, _, _, block_table, seqlens_k, *_ = tensors
    layout, left = numbers[3], numbers[5]
    for i, (own, total) in enumerate(zip(_rows(tensors), seqlens_k.tolist(), strict=True)):
        if 0 <= total <= problem.capacity:
            # Pages wholly before the window are not read: engines free them.
            first = max(0, total - len(own[0]) - left) // problem.page_size if left >= 0 else 0
            yield _Sequence(*own, total, _pages(k, v, block_table[i : i + 1], first, total, layout, problem.page_size))


def _pages(
    k: Tensor, v: Tensor, pages: Tensor, first: int, total: int, layout: str, page_size: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    def load() -> tuple[Tensor, Tensor]:
        skipped = first * page_size
        length = torch.tensor([total - skipped])
        found = []
        for cache in (k, v):
            # No page exists, and one that does not exist reads as zeros.
            pool, table = (cache, pages) if len(cache) else (cache.new_zeros(1, *cache.shape[1:]), pages * 0 - 1)
            tokens = gather(pool, table[:, first:], length, layout).tokens
            found.append(torch.cat([tokens.new_zeros(skipped, *tokens.shape[1:]), tokens]))
        return found[0], found[1]

    return load


_library.impl("attend", _reference_attend, "CPU")
# CUDA is also ROCm's key; PrivateUse1 that of out-of-tree devices such as Ascend's NPUs.
for _key in ("CUDA", "PrivateUse1"):
    _library.impl("attend", _kernel_attend, _key)
torch.library.register_fake("blocksparse_attn::attend", _fake_attend, lib=_library)
