"""The torch op ``choose``: the best columns of rows of scores, on a CPU, on a GPU, and while torch.compile traces."""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.dispatch import PreparedLaunches, implement, launch_module

Tensor = torch.Tensor

_library = torch.library.Library("blocksparse_attn", "FRAGMENT")
_library.define(
    "choose(Tensor scores, Tensor possible, Tensor(a!) indices, Tensor(b!) counts, int topk, int local, int sink,"
    " bool within) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
launches = PreparedLaunches()


def chosen(scores: Tensor, possible: Tensor, topk: int, local: int, sink: int, within: bool) -> tuple[Tensor, Tensor]:
    """Of scores [R, C] the ``topk`` best columns of each row, among its first ``possible`` [R] int32.

    Beside these, or ``within`` them, the last ``local`` of those and the first ``sink``. -inf and NaN are not chosen;
    of equal scores the lower column is. Returns rising indices [R, width] int32, padded with -1, and counts [R] int32.
    """
    width = min(scores.shape[1], topk if within else topk + local + sink)
    indices = torch.empty(scores.shape[0], width, dtype=torch.int32, device=scores.device)
    counts = torch.empty(scores.shape[0], dtype=torch.int32, device=scores.device)
    torch.ops.blocksparse_attn.choose(scores, possible, indices, counts, topk, local, sink, within)
    return indices, counts


def _reference(
    scores: Tensor, possible: Tensor, indices: Tensor, counts: Tensor, topk: int, local: int, sink: int, within: bool
) -> None:
    columns, width = scores.shape[1], indices.shape[1]
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


def _prepare(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    return launch_module("blocksparse_attn.choosing").prepare_choose(given, numbers)


def _kernel(*given: Any) -> None:
    launches.find(_prepare, given[:4], given[4:])(*given[:4])


def _fake(*given: Any) -> None:
    pass


implement(_library, "choose", reference=_reference, kernel=_kernel, fake=_fake)
