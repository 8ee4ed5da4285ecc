"""What arguments of the indexer must be. One check gives the one description of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kernel_reference.checks import (
    check_bool,
    check_dtype,
    check_elements_apart,
    check_int,
    check_same_device,
    describe,
    differ,
    fail,
    known,
)
from kernel_reference.integers import cdiv
from kernel_reference.plans import check_covers
from kernel_reference.ragged import read_integers
from tilelang_mla.indexer.cache import check_index_cache
from tilelang_mla.indexer.plan import (
    INDEX_DIM,
    INDEX_HEADS,
    MOST_POSITIONS,
    MOST_TOPK,
    PAGE_STEP,
    IndexPlan,
    IndexProblem,
    TopkProblem,
)

Tensor = torch.Tensor


class ScoresTensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` is written."""

    q: Tensor
    k_cache: Tensor
    weights: Tensor
    lengths: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor | None
    out: Tensor


class ScoresOptions(NamedTuple):
    """The other arguments of the op, in its order."""

    clean_logits: bool
    plan: Sequence[int] | None = None


class TopkTensors(NamedTuple):
    """The tensors of the op, in its order; ``out`` is written."""

    scores: Tensor
    lengths: Tensor
    block_table: Tensor | None
    cu_seqlens_q: Tensor | None
    out: Tensor


class TopkOptions(NamedTuple):
    """The other arguments of the op, in its order; page_size is 0 without a table."""

    page_size: int


def check_scores(tensors: ScoresTensors, options: ScoresOptions) -> tuple[IndexProblem, IndexPlan | None]:
    """Queries, weights and a paged cache of keys; the problem that they make, and the plan if one was given."""
    q, k_cache, weights, lengths, block_table, cu_seqlens_q, out = tensors
    check_bool("clean_logits", options.clean_logits)
    check_dtype("q", q, torch.float8_e4m3fn)
    if q.ndim not in (3, 4) or known(q.shape[-1] != INDEX_DIM):
        fail("q", f"[T, Hi, {INDEX_DIM}] or [B, Sq, Hi, {INDEX_DIM}]", describe(q))
    *leading, heads, _ = q.shape
    if not any(known(heads == of) for of in INDEX_HEADS):
        fail("q", f"of {', '.join(map(str, INDEX_HEADS[:-1]))} or {INDEX_HEADS[-1]} heads", describe(q))
    if not q.is_contiguous():
        fail("q", "contiguous", describe(q))
    check_index_cache("k_cache", k_cache, PAGE_STEP)
    check_same_device("k_cache", k_cache, "q", q)
    check_dtype("weights", weights, torch.float32)
    _check_leading("weights", weights, (*leading, heads), q)
    _check_lengths(lengths, leading, "q", q)
    _check_table(block_table, "q", q)
    each = _check_sequences(cu_seqlens_q, block_table, leading, "q", q)
    check_dtype("out", out, torch.float32)
    check_same_device("out", out, "q", q)
    if out.ndim != len(leading) + 1 or differ(out.shape[:-1], leading):
        fail("out", f"[{', '.join(map(str, leading))}, max_seqlen_k]", describe(out))
    _check_rows("out", out)
    check_elements_apart("out", out)
    problem = IndexProblem(
        heads, lengths.numel(), block_table.shape[0], each, k_cache.shape[1], k_cache.shape[0],
        block_table.shape[1] * k_cache.shape[1], out.shape[-1], options.clean_logits,
    )  # fmt: skip
    plan = IndexPlan.from_ints(options.plan)
    check_covers(plan, problem)
    return problem, plan


def check_topk(tensors: TopkTensors, options: TopkOptions) -> TopkProblem:
    """Scores and lengths; with a table and page_size positions become indices of the pool."""
    scores, lengths, block_table, cu_seqlens_q, out = tensors
    check_dtype("scores", scores, torch.float32)
    if scores.ndim not in (2, 3):
        fail("scores", "[T, N] or [B, Sq, N]", describe(scores))
    *leading, width = scores.shape
    _check_rows("scores", scores)
    if known(width > MOST_POSITIONS):
        fail("scores", f"of rows of at most {MOST_POSITIONS} scores", describe(scores))
    _check_lengths(lengths, leading, "scores", scores)
    check_int("page_size", options.page_size, 0)
    each = 1
    if block_table is None:
        if options.page_size:
            fail("page_size", "None without block_table", options.page_size)
        if cu_seqlens_q is not None:
            fail("cu_seqlens_q", "None without block_table", describe(cu_seqlens_q))
    else:
        if not options.page_size:
            fail("page_size", "given with block_table", None)
        _check_table(block_table, "scores", scores)
        each = _check_sequences(cu_seqlens_q, block_table, leading, "scores", scores)
    check_dtype("out", out, torch.int32)
    check_same_device("out", out, "scores", scores)
    if out.ndim != len(leading) + 1 or differ(out.shape[:-1], leading):
        fail("out", f"[{', '.join(map(str, leading))}, k]", describe(out))
    check_int("k", out.shape[-1], 1, MOST_TOPK)
    if not out.is_contiguous():
        fail("out", "contiguous", describe(out))
    return TopkProblem(lengths.numel(), width, out.shape[-1], each, options.page_size)


def check_scores_values(problem: IndexProblem, tensors: ScoresTensors) -> None:
    """Lengths, bounds and pages, by one copy of all of them to the host."""
    held = read_integers({"lengths": tensors.lengths, "table": tensors.block_table, "bounds": tensors.cu_seqlens_q})
    columns = tensors.block_table.shape[1]
    most = min(problem.capacity, problem.width)
    sequences = _sequences_of(problem.tokens, problem.each, held.get("bounds"))
    for token, length in enumerate(held["lengths"]):
        if not 0 <= length <= most:
            wanted = f"from 0 to {most}, what block_table and max_seqlen_k have room for"
            fail(f"lengths[{token}]", wanted, length)
        sequence = sequences[token]
        for column in range(cdiv(length, problem.page_size) if sequence >= 0 else 0):
            page = held["table"][sequence * columns + column]
            if not 0 <= page < problem.pages:
                fail(f"block_table[{sequence}, {column}]", f"a page from 0 to {problem.pages - 1}", page)


def check_topk_values(problem: TopkProblem, tensors: TopkTensors) -> None:
    """Lengths, by a copy of them to the host."""
    for token, length in enumerate(read_integers({"lengths": tensors.lengths})["lengths"]):
        if not 0 <= length <= problem.width:
            fail(f"lengths[{token}]", f"from 0 to {problem.width}, the scores of a row", length)


def _sequences_of(tokens: int, each: int, bounds: Sequence[int] | None) -> list[int]:
    """The sequence of each token; -1 of one that is none's."""
    if bounds is None:
        return [token // max(each, 1) for token in range(tokens)]
    sequences = [-1] * tokens
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        if not 0 <= begin <= end <= tokens:
            fail("cu_seqlens_q", f"ascending from 0 to {tokens}", list(bounds))
        sequences[begin:end] = [sequence] * (end - begin)
    return sequences


def _check_leading(name: str, tensor: Tensor, shape: Sequence[int], q: Tensor) -> None:
    check_same_device(name, tensor, "q", q)
    if differ(tensor.shape, shape):
        fail(name, f"{list(shape)} as q is", describe(tensor))
    if not tensor.is_contiguous():
        fail(name, "contiguous", describe(tensor))


def _check_lengths(lengths: Tensor, leading: Sequence[int], beside: str, other: Tensor) -> None:
    check_dtype("lengths", lengths, torch.int32)
    check_same_device("lengths", lengths, beside, other)
    if differ(lengths.shape, leading):
        fail("lengths", f"{list(leading)}, one a query token", describe(lengths))
    if not lengths.is_contiguous():
        fail("lengths", "contiguous", describe(lengths))


def _check_table(block_table: Tensor, beside: str, other: Tensor) -> None:
    check_dtype("block_table", block_table, torch.int32)
    check_same_device("block_table", block_table, beside, other)
    if block_table.ndim != 2:
        fail("block_table", "[B, max_pages]", describe(block_table))
    if known(block_table.shape[1] > 1) and known(block_table.stride(1) != 1):
        fail("block_table", "of contiguous rows", describe(block_table))


def _check_sequences(
    cu_seqlens_q: Tensor | None, block_table: Tensor, leading: Sequence[int], beside: str, other: Tensor
) -> int:
    """Tokens of each sequence; 0 where bounds tell them."""
    batch = block_table.shape[0]
    if cu_seqlens_q is not None:
        if len(leading) != 1:
            fail("cu_seqlens_q", f"None where {beside} is of [B, Sq] tokens", describe(cu_seqlens_q))
        check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32)
        check_same_device("cu_seqlens_q", cu_seqlens_q, beside, other)
        if cu_seqlens_q.ndim != 1 or known(cu_seqlens_q.shape[0] != batch + 1) or not cu_seqlens_q.is_contiguous():
            fail("cu_seqlens_q", f"[{batch + 1}], of the {batch} sequences of block_table", describe(cu_seqlens_q))
        return 0
    if len(leading) == 2:
        if known(leading[0] != batch):
            fail("block_table", f"[{leading[0]}, max_pages], a row a sequence of {beside}", describe(block_table))
        return max(1, leading[1]) if isinstance(leading[1], int) else leading[1]
    if known(leading[0] != batch):
        wanted = f"given, or {beside} of a token for each of the {batch} sequences of block_table"
        fail("cu_seqlens_q", wanted, f"None with {leading[0]} tokens")
    return 1


def _check_rows(name: str, tensor: Tensor) -> None:
    """Contiguous rows; of [B, Sq, N] those of a sequence are as far apart as sequences are."""
    right = not known(tensor.stride(-1) != 1) or known(tensor.shape[-1] <= 1)
    if tensor.ndim == 3 and known(tensor.shape[0] > 1) and known(tensor.shape[1] > 0):
        right = right and not known(tensor.stride(0) != tensor.shape[1] * tensor.stride(1))
    if not right:
        fail(name, "of contiguous rows, all as far apart", describe(tensor))
