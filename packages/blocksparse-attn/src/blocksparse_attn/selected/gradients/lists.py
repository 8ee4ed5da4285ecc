"""What tokens list, by the token and by the keys: computed on the tensors' device, without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from blocksparse_attn.selected.gradients.arguments import Inputs
from blocksparse_attn.selected.plan import Problem

Tensor = torch.Tensor


class Pieces(NamedTuple):
    """The pieces of keys that tokens list.

    By tokens [T, Hkv, n], ``n = topk * block_size / piece``: ``slot`` int64, where a piece begins in the pool, counted
    from its first page; and ``reach`` int32, how many keys of it the token sees, 0 for what is no piece.

    By pieces of the pool and kv heads, which is the number ``piece * Hkv + head``: those that list number i are the
    entries ``begins[i]`` to ``begins[i + 1] - 1`` int64 of ``token`` and ``token_reach`` int32, in order of tokens.
    """

    slot: Tensor
    reach: Tensor
    begins: Tensor
    token: Tensor
    token_reach: Tensor


def listed_pieces(problem: Problem, inputs: Inputs, piece: int) -> Pieces:
    """Those that lists of any content have, of sequences of possible lengths and pages that there are."""
    indices, table = inputs.indices, inputs.block_table
    device, heads, pages = indices.device, problem.num_heads_kv, inputs.k_cache.shape[0]
    each = problem.topk * (problem.block_size // piece)
    row = torch.arange(problem.tokens, device=device)
    bounds = inputs.cu_seqlens_q.long().clamp(0, problem.tokens)
    sequence = torch.searchsorted(bounds[1:].contiguous(), row, right=True)
    inside = sequence < problem.sequences
    sequence = sequence.clamp(max=problem.sequences - 1)
    begin, end, length = bounds[sequence], bounds[sequence + 1], inputs.seqlens_k.long()[sequence]
    inside = inside & (begin <= row) & (end - begin <= length) & (length <= problem.capacity)
    high = length - end + row + 1 if problem.causal else length
    high = torch.where(inside, high, 0)[:, None, None]

    first = torch.arange(problem.block_size // piece, device=device) * piece
    first = (indices.long()[..., None] * problem.block_size + first).view(problem.tokens, heads, each)
    there = (first >= 0) & (first < high)
    first = torch.where(there, first, 0)
    page = table[sequence[:, None, None], first // problem.page_size].long()
    there = there & (page >= 0) & (page < pages)
    slot = torch.where(there, page * problem.page_size + first % problem.page_size, 0)
    reach = torch.where(there, (high - first).clamp(max=piece), 0).int()

    numbers = pages * (problem.page_size // piece) * heads
    number = slot // piece * heads + torch.arange(heads, device=device)[:, None]
    # What is not there comes last.
    number, order = torch.where(there, number, numbers).flatten().sort(stable=True)
    begins = torch.searchsorted(number, torch.arange(numbers + 1, device=device))
    return Pieces(slot, reach, begins, (order // (heads * each)).int(), reach.flatten()[order])
