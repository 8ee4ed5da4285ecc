"""The indexer on a CPU: each sequence in float32, by kernel_reference's oracle."""

from __future__ import annotations

import torch

from kernel_reference.indexing import index_scores, top_positions
from kernel_reference.ragged import clamped_ranges
from tilelang_mla.indexer.arguments import ScoresTensors, TopkTensors
from tilelang_mla.indexer.cache import views_of
from tilelang_mla.indexer.plan import IndexProblem, TopkProblem

Tensor = torch.Tensor


def scores(problem: IndexProblem, tensors: ScoresTensors) -> None:
    """Write ``out``; a token of an impossible length sees nothing, nor does one of no sequence."""
    rows, width = problem.tokens, problem.width
    if not rows:
        return
    out = tensors.out.reshape(rows, width)
    if problem.clean:
        out.fill_(-torch.inf)
    q = tensors.q.reshape(rows, problem.heads, -1)
    weights, lengths = tensors.weights.reshape(rows, -1), _possible(tensors.lengths, min(problem.capacity, width))
    for sequence, (begin, end) in enumerate(_ranges(tensors.cu_seqlens_q, problem.tokens, problem.each)):
        own = slice(begin, end)
        most = int(lengths[own].max()) if begin < end else 0
        if most:
            keys = _keys_of(tensors.k_cache, tensors.block_table[sequence], most)
            found = index_scores(q[own], keys, weights[own], lengths[own], compute_dtype=torch.float32)
            seen = torch.arange(most, device=found.device) < lengths[own, None]
            out[own, :most] = torch.where(seen, found, out[own, :most])
    if out.data_ptr() != tensors.out.data_ptr():
        tensors.out.copy_(out.view(tensors.out.shape))


def topk(problem: TopkProblem, tensors: TopkTensors) -> None:
    """Write ``out``: positions, or where they are in the pool."""
    rows = problem.tokens
    if not rows:
        return
    lengths = _possible(tensors.lengths, problem.width)
    positions = top_positions(tensors.scores.reshape(rows, problem.width), lengths, problem.topk)
    if tensors.block_table is not None:
        indices = torch.full_like(positions, -1)
        for sequence, (begin, end) in enumerate(_ranges(tensors.cu_seqlens_q, rows, problem.each)):
            own, table = positions[begin:end], tensors.block_table[sequence]
            column = own // problem.page_size
            there = (own >= 0) & (column < len(table))
            if len(table):
                page = table[torch.where(there, column, 0)]
                inside = page * problem.page_size + own % problem.page_size
                indices[begin:end] = torch.where(there & (page >= 0), inside, -1)
        positions = indices
    tensors.out.copy_(positions.view(tensors.out.shape))


def _possible(lengths: Tensor, most: int) -> Tensor:
    lengths = lengths.reshape(-1)
    return torch.where((lengths >= 0) & (lengths <= most), lengths, 0)


def _ranges(cu_seqlens_q: Tensor | None, tokens: int, each: int) -> list[tuple[int, int]]:
    if cu_seqlens_q is not None:
        return clamped_ranges(cu_seqlens_q, tokens)
    return [(begin, begin + each) for begin in range(0, tokens, each)]


def _keys_of(k_cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Keys of a sequence times their scales; zeros on a page that the pool does not have."""
    keys, scales = views_of(k_cache)
    pages = table[: -(-length // k_cache.shape[1])].long()
    there = (pages >= 0) & (pages < len(keys))
    if not len(keys):
        return torch.zeros(length, keys.shape[2])
    pages = torch.where(there, pages, 0)
    tokens = torch.where(there[:, None, None], keys[pages].float() * scales[pages][..., None], 0)
    return tokens.flatten(0, 1)[:length]
