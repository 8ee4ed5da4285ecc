"""What it takes to bring the rows that lists name to the SMs, and nothing more: a kernel that adds them up."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Words of a row that are a power of two, and those behind them; rows that a program has in flight.
_FIRST, _MOST_BEHIND, _ROWS = 256, 32, 16


@triton.jit
def _add_rows(
    kv: Any, indices: Any, out: Any, TOPK: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr,
    BEHIND: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0)
    columns, behind = tl.arange(0, FIRST), FIRST + tl.arange(0, BEHIND)
    total = tl.zeros([ROWS, FIRST], tl.int32)
    rest = tl.zeros([ROWS, BEHIND], tl.int32)
    for begin in tl.range(0, TOPK, ROWS, num_stages=4):
        rows = tl.load(indices + token * TOPK + begin + tl.arange(0, ROWS)).to(tl.int64) * WORDS
        total += tl.load(kv + rows[:, None] + columns[None, :])
        rest += tl.load(kv + rows[:, None] + behind[None, :], mask=behind[None, :] < WORDS, other=0)
    tl.store(out + token * WORDS + columns, tl.sum(total, 0))
    tl.store(out + token * WORDS + behind, tl.sum(rest, 0), mask=behind < WORDS)


def sums_of_rows(kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Of each list the sum of its rows as words of 32 bits, [lists, words]; rows of 512 or 576 elements of 16 bits."""
    words, lists = kv.view(torch.int32).flatten(1), indices.flatten(1)
    out = torch.empty(len(lists), words.shape[1], dtype=torch.int32, device=kv.device)
    _add_rows[(len(lists),)](
        words, lists, out, lists.shape[1], words.shape[1], _FIRST, _MOST_BEHIND, _ROWS, num_warps=4
    )  # fmt: skip
    return out
