"""The CPU implementation: each sequence in float32, the layout as a mask of blocks, never of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from blocksparse_attn.arguments import Tensors
from blocksparse_attn.lists import block_mask
from blocksparse_attn.plan import Problem
from blocksparse_attn.values import first_page
from kernel_reference.attention import attention
from kernel_reference.blocks import mask_function
from kernel_reference.integers import cdiv
from kernel_reference.paging import gather
from kernel_reference.ragged import clamped_ranges

Tensor = torch.Tensor


class _Sequence(NamedTuple):
    """One sequence: its queries [q_len, Hq, D], where their results go, what gives its ``total`` keys and values."""

    q: Tensor
    out: Tensor
    lse: Tensor | None
    total: int
    load: Callable[[], tuple[Tensor, Tensor]]


def attend(problem: Problem, tensors: Tensors) -> None:
    """Write ``out``, and ``lse`` if there is one; sequences of impossible lengths are 0 and -inf."""
    sequences = [one for one in _sequences(problem, tensors) if 0 < len(one.q) <= one.total]
    longest = max([one.total for one in sequences], default=0)
    rows, columns = min(problem.rows, cdiv(longest, problem.q_block)), cdiv(longest, problem.k_block)
    mask = block_mask(tensors.crow, tensors.col, rows, columns)
    visible = mask_function(mask, problem.q_block, problem.k_block)
    tensors.out.zero_()
    if tensors.lse is not None:
        tensors.lse.fill_(-torch.inf)
    for one in sequences:
        keys, values = one.load()
        result = attention(
            one.q, keys, values, softmax_scale=problem.softmax_scale, causal=True, window=(problem.left, 0),
            mask=visible, softcap=problem.softcap, sinks=tensors.sinks, compute_dtype=torch.float32,
        )  # fmt: skip
        one.out.copy_(result.out)
        if one.lse is not None:
            one.lse.copy_(result.lse)


def _sequences(problem: Problem, tensors: Tensors) -> Iterator[_Sequence]:
    if problem.padded:
        return _padded(tensors)
    return _paged(problem, tensors) if problem.page_size else _ragged(tensors)


def _checked(tensor: Tensor | None) -> Tensor:
    """What ``check_attend`` has seen to be given."""
    return cast(Tensor, tensor)


def _rows(tensors: Tensors) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Queries, outputs and lse of each sequence, within the rows there are whatever cu_seqlens_q holds."""
    for begin, end in clamped_ranges(_checked(tensors.cu_seqlens_q), tensors.q.shape[0]):
        rows = slice(begin, end)
        yield tensors.q[rows], tensors.out[rows], None if tensors.lse is None else tensors.lse[:, rows]


def _ragged(tensors: Tensors) -> Iterator[_Sequence]:
    for own, (begin, end) in zip(_rows(tensors), pairwise(_checked(tensors.cu_seqlens_k).tolist()), strict=True):
        if 0 <= begin <= end <= tensors.k.shape[0]:
            yield _Sequence(*own, end - begin, _slices(tensors.k, tensors.v, begin, end))


def _padded(tensors: Tensors) -> Iterator[_Sequence]:
    q, k, v = tensors[:3]
    bounds = (tensors.q_starts, tensors.q_ends, tensors.k_starts, tensors.k_ends)
    starts_q, ends_q, starts_k, ends_k = (
        [default] * q.shape[0] if given is None else given.tolist()
        for given, default in zip(bounds, (0, q.shape[1], 0, k.shape[1]), strict=True)
    )
    for i, (begin, end) in enumerate(zip(starts_k, ends_k, strict=True)):
        first, last = (min(max(bound, 0), q.shape[1]) for bound in (starts_q[i], ends_q[i]))
        rows = slice(first, max(first, last))
        lse = None if tensors.lse is None else tensors.lse[i, :, rows]
        if 0 <= begin <= end <= k.shape[1]:
            yield _Sequence(q[i, rows], tensors.out[i, rows], lse, end - begin, _slices(k[i], v[i], begin, end))


def _slices(k: Tensor, v: Tensor, begin: int, end: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (k[begin:end], v[begin:end])


def _paged(problem: Problem, tensors: Tensors) -> Iterator[_Sequence]:
    block_table = _checked(tensors.block_table)
    for i, (own, total) in enumerate(zip(_rows(tensors), _checked(tensors.seqlens_k).tolist(), strict=True)):
        if 0 <= total <= problem.capacity:
            first = first_page(problem, len(own[0]), total)
            yield _Sequence(*own, total, _pages(problem, tensors, block_table[i : i + 1], first, total))


def _pages(
    problem: Problem, tensors: Tensors, pages: Tensor, first: int, total: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    def load() -> tuple[Tensor, Tensor]:
        skipped = first * problem.page_size
        length = torch.tensor([total - skipped])
        found = []
        for cache in (tensors.k, tensors.v):
            # No page exists, and one that does not exist reads as zeros.
            pool, table = (cache, pages) if len(cache) else (cache.new_zeros(1, *cache.shape[1:]), pages * 0 - 1)
            tokens = gather(pool, table[:, first:], length, problem.page_layout).tokens
            found.append(torch.cat([tokens.new_zeros(skipped, *tokens.shape[1:]), tokens]))
        return found[0], found[1]

    return load
