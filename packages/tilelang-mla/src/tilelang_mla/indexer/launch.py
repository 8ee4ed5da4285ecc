"""Launches of the indexer: its kernels are compiled for heads, blocks and pages, never for a batch, a length or k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.launching import launch_nothing, on_device
from tilelang_mla.indexer.arguments import ScoresTensors, TopkTensors
from tilelang_mla.indexer.cache import views_of
from tilelang_mla.indexer.plan import (
    INDEX_DIM,
    IndexPlan,
    IndexProblem,
    TopkProblem,
    plan_index_scores,
    topk_threads,
    topk_words,
)
from tilelang_mla.launch import device_limits, kernel
from tilelang_mla.plan import DeviceLimits

Tensor = torch.Tensor


def scores_constants(problem: IndexProblem, plan: IndexPlan) -> dict[str, Any]:
    """What the kernel of scores is compiled for."""
    return {
        "heads": problem.heads, "tile_tokens": plan.tile_tokens, "block_n": plan.block_n,
        "num_stages": plan.num_stages, "piece": plan.piece(problem), "warpgroups": plan.warpgroups,
        "chunk": plan.chunk, "dtype": torch.float8_e4m3fn,
    }  # fmt: skip


def topk_constants(problem: TopkProblem, limits: DeviceLimits) -> dict[str, Any]:
    """What the kernel of the top-k is compiled for."""
    threads = topk_threads(problem.tokens, limits)
    return {"words": topk_words(problem.width), "threads": threads, "dtype": torch.int32}


def prepare_scores(problem: IndexProblem, plan: IndexPlan | None, tensors: ScoresTensors) -> Callable[..., None]:
    """What writes scores, called with the tensors."""
    if tensors.out.numel() == 0:
        return launch_nothing
    if problem.capacity == 0 or problem.sequences == 0:
        return _see_nothing if problem.clean else launch_nothing
    limits = device_limits(tensors.q.device)
    chosen = plan_index_scores(problem, limits) if plan is None else plan
    needed = chosen.shared_memory(problem)
    if needed > limits.shared_memory:
        fail("plan", f"of blocks that fit in {limits.shared_memory} bytes of shared memory", f"{chosen}, of {needed}")
    score = kernel("index_scores", **scores_constants(problem, chosen))
    tokens, heads, pages = problem.tokens, problem.heads, max(1, problem.pages)
    cache = tensors.k_cache
    by_page = cache.stride(0) if problem.pages > 1 else problem.page_size * cache.shape[-1]
    form = (pages, problem.page_size, cache.shape[-1]), (by_page, cache.shape[-1], 1)
    out_form, table_form = _rows_of(tensors.out, tokens), _rows_of(tensors.block_table, problem.sequences)
    numbers = (int(problem.ragged), problem.each, int(problem.clean))
    grid = (chosen.num_slots(problem), chosen.programs)

    def run(q, k_cache, weights, lengths, block_table, cu_seqlens_q, out):  # type: ignore[no-untyped-def]
        for name, tensor in (("q", q), ("k_cache", k_cache)):
            if tensor.data_ptr() & 15:
                fail(name, "at an address that is a multiple of 16", hex(tensor.data_ptr()))
        held = k_cache.as_strided(*form) if problem.pages else k_cache.new_zeros(form[0])
        lengths = lengths.view(-1)
        score(
            q.view(tokens * heads, INDEX_DIM), *views_of(held), weights.view(tokens, heads), lengths,
            block_table.as_strided(*table_form), lengths if cu_seqlens_q is None else cu_seqlens_q,
            out.as_strided(*out_form), *numbers, *grid,
        )  # fmt: skip

    return on_device(tensors.q.device, run)


def prepare_topk(problem: TopkProblem, tensors: TopkTensors) -> Callable[..., None]:
    """What writes positions or indices, called with the tensors."""
    if tensors.out.numel() == 0:
        return launch_nothing
    limits = device_limits(tensors.scores.device)
    if problem.width == 0 or (tensors.block_table is not None and tensors.block_table.numel() == 0):
        return _list_nothing
    select = kernel("index_topk", **topk_constants(problem, limits))
    tokens = problem.tokens
    form = _rows_of(tensors.scores, tokens)
    table = tensors.block_table
    table_form: Any = None if table is None else _rows_of(table, table.shape[0])
    numbers = (problem.page_size, int(problem.each == 0), problem.each)

    def run(scores, lengths, block_table, cu_seqlens_q, out):  # type: ignore[no-untyped-def]
        lengths = lengths.view(-1)
        rows = lengths.view(-1, 1) if block_table is None else block_table.as_strided(*table_form)
        bounds = lengths if cu_seqlens_q is None else cu_seqlens_q
        bits = scores.as_strided(*form).view(torch.int32)
        select(bits, lengths, rows, bounds, out.view(tokens, -1), *numbers)

    return on_device(tensors.scores.device, run)


def _rows_of(tensor: Tensor, rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes and strides of all rows, one behind the other; of one row as if it were packed."""
    width = tensor.shape[-1]
    apart = [step for size, step in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1]
    return (rows, width), (apart[-1] if apart else width, 1)


def _see_nothing(*tensors: Any) -> None:
    tensors[-1].fill_(-torch.inf)


def _list_nothing(*tensors: Any) -> None:
    tensors[-1].fill_(-1)
