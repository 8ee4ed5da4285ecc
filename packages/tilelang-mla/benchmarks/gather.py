"""What it takes to bring the rows that lists name to the SMs, and nothing more: a kernel that adds them up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows that a program adds up together, and the least words of them that are a power of two.
_ROWS, _LEAST = 16, 16


@triton.jit
def _add_rows(
    kv, indices, out, topk, WORDS: tl.constexpr, FIRST: tl.constexpr, BEHIND: tl.constexpr, ROWS: tl.constexpr
):
    part = tl.program_id(0)
    columns, behind = tl.arange(0, FIRST), FIRST + tl.arange(0, BEHIND)
    total = tl.zeros([ROWS, FIRST], tl.int32)
    rest = tl.zeros([ROWS, BEHIND], tl.int32)
    for begin in tl.range(0, topk, ROWS, num_stages=4):
        rows = tl.load(indices + part * topk + begin + tl.arange(0, ROWS)).to(tl.int64) * WORDS
        total += tl.load(kv + rows[:, None] + columns[None, :])
        rest += tl.load(kv + rows[:, None] + behind[None, :], mask=behind[None, :] < WORDS, other=0)
    tl.store(out + part * WORDS + columns, tl.sum(total, 0))
    tl.store(out + part * WORDS + behind, tl.sum(rest, 0), mask=behind < WORDS)


def sums_of_rows(kv: torch.Tensor, indices: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Of each part of a list the sum of its rows as words of 32 bits, [lists, parts, words]; a program has a part.

    kv: [.., width], a key each.
    """
    words = kv.view(torch.int32).flatten(0, -2)
    lists, topk = indices.flatten(0, -2).shape
    width = words.shape[1]
    out = torch.empty(lists, parts, width, dtype=torch.int32, device=kv.device)
    first = triton.next_power_of_2(width + 1) // 2
    behind = max(_LEAST, triton.next_power_of_2(max(width - first, 1)))
    _add_rows[(lists * parts,)](words, indices, out, topk // parts, width, first, behind, _ROWS, num_warps=4)
    return out
