"""Attention over keys that groups of rows share, level by level, as one attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .attention import AttentionResult, attention
from .checks import check_tensors, describe, fail
from .paging import sequence_ranges


class Level(NamedTuple):
    """One level: packed keys ``k`` [Tk, Hkv, D], values ``v`` [Tk, Hkv, Dv], and by ``cu_seqlens_q`` [G + 1] and
    ``cu_seqlens_k`` [G + 1] the rows and the keys of each of its groups.
    """

    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


def cascade_attention(
    q: torch.Tensor,
    levels: Sequence[Level],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionResult:
    """The attention of rows [T, Hq, D] over the keys of their groups on all levels together.

    A row sees all keys of its group on every level but the last, which is causal, aligned to the right as
    :func:`kernel_reference.attention.attention` is. mask: what is visible besides on the last level, bool [T, Tk].
    softmax_scale, softcap, sinks, rows, compute_dtype: as there. Rows of no group of the last level are 0 and -inf.

    The keys of all levels stand in one row, and a bool for each row and key says what is seen: small sizes, or few
    ``rows``, are meant. Raises TypeError or ValueError, naming the argument.
    """
    if not levels:
        fail("levels", "one level or more", "none")
    check_tensors(q=q)
    if q.ndim != 3:
        fail("q", "3-D [T, Hq, D]", describe(q))
    visible = []
    owned = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    for i, level in enumerate(levels):
        check_tensors(**{f"levels[{i}].{name}": tensor for name, tensor in level._asdict().items()})
        seen = torch.zeros(len(q), len(level.k), dtype=torch.bool, device=q.device)
        own_rows, own_keys = (
            sequence_ranges(f"levels[{i}].{name}", bounds, of)
            for name, bounds, of in (
                ("cu_seqlens_q", level.cu_seqlens_q, len(q)),
                ("cu_seqlens_k", level.cu_seqlens_k, len(level.k)),
            )
        )
        if len(own_rows) != len(own_keys):
            fail(f"levels[{i}].cu_seqlens_k", f"of {len(own_rows) + 1} elements, as cu_seqlens_q", len(own_keys) + 1)
        for (begin, end), (begin_k, end_k) in zip(own_rows, own_keys, strict=True):
            block = seen[begin:end, begin_k:end_k]
            block.fill_(True)
            if i + 1 == len(levels):
                owned[begin:end] = True
                block.tril_(block.shape[1] - block.shape[0])
        visible.append(seen)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != visible[-1].shape:
            fail("mask", f"bool {list(visible[-1].shape)}", describe(mask))
        visible[-1] &= mask
    result = attention(
        q,
        torch.cat([level.k for level in levels]),
        torch.cat([level.v for level in levels]),
        mask=(torch.cat(visible, dim=1) & owned[:, None])[None],
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        rows=rows,
        compute_dtype=compute_dtype,
    )
    mine = owned if rows is None else owned[rows.to(owned.device)]
    return AttentionResult(result.out, result.lse.masked_fill(~mine, -torch.inf))
