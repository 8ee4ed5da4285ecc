"""The best columns of rows of scores, in torch: on a CPU, and of rows that are too wide for the kernels."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def choose(
    scores: Tensor, possible: Tensor | None, indices: Tensor, counts: Tensor, topk: int, local: int, sink: int,
    within: bool, rows: int, q_block: int, k_block: int,
) -> None:  # fmt: skip
    """Write ``indices`` and ``counts`` of the op ``choose``."""
    columns, width = scores.shape[1], indices.shape[1]
    if possible is None:
        row = torch.arange(scores.shape[0], device=scores.device) % rows
        possible = ((row + 1) * q_block - 1) // k_block + 1
    column = torch.arange(columns, device=scores.device)
    last = possible.clamp(max=columns)[:, None]
    inside = column < last
    always = inside & ((column >= last - local) | (column < sink))
    open_to = inside & ~always & (scores > -torch.inf)
    order = torch.where(open_to, scores.float(), -torch.inf).sort(dim=1, descending=True, stable=True).indices
    count = torch.full_like(last, topk)
    if within:
        count = (count - always.sum(1, keepdim=True)).clamp(min=0)
    count = torch.minimum(count, open_to.sum(1, keepdim=True))
    best = torch.zeros_like(inside).scatter_(1, order, column < count)
    listed = torch.where(always | best, column, columns).sort(dim=1).values[:, :width]
    indices.copy_(torch.where(listed < columns, listed, -1))
    counts.copy_((indices >= 0).sum(1))


def pack(indices: Tensor, counts: Tensor, crow: Tensor, col: Tensor) -> None:
    """Write ``crow`` and ``col`` of the op ``pack``."""
    heads, rows, width = indices.shape
    crow.copy_(torch.nn.functional.pad(counts.view(heads, rows).cumsum(1), (1, 0)))
    listed = torch.arange(width, device=crow.device) < counts.view(heads, rows, 1)
    # Slots without an entry are sorted behind all entries.
    place = (crow[:, :-1, None] + torch.arange(width, device=crow.device)).where(listed, rows * width)
    found = torch.full((heads, rows * width + 1), -1, dtype=torch.int32, device=crow.device)
    col.copy_(found.scatter_(1, place.flatten(1).long(), indices.flatten(1))[:, : rows * width])
