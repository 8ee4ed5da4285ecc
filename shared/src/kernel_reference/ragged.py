"""Packed sequences of unlike lengths: the values of ``cu_seqlens``, checked by name or clamped as kernels do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from kernel_reference.checks import check_dtype, check_same_device, check_shape, describe, fail


def read_integers(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, list[int]]:
    """The numbers of integer tensors, flattened, by name; None is left out. One copy to the host, so one sync.

    >>> read_integers({"slots": torch.tensor([[2, 0]]), "accepted": None})
    {'slots': [2, 0]}
    """
    parts = {name: tensor.reshape(-1).long() for name, tensor in tensors.items() if tensor is not None}
    if not parts:
        return {}
    host = torch.cat([*parts.values()]).cpu().split([part.numel() for part in parts.values()])
    return {name: part.tolist() for name, part in zip(parts, host, strict=True)}


def check_cu_seqlens(name: str, bounds: Sequence[int], rows: int, of: str = "q") -> list[int]:
    """The lengths of the sequences that ``bounds`` [B + 1] separate; ValueError names the first bad entry.

    Bounds begin at 0, never fall and end at ``rows`` at most, which are the rows of the argument ``of``.

    >>> check_cu_seqlens("cu_seqlens_q", [0, 3, 3, 8], rows=8)
    [3, 0, 5]
    >>> check_cu_seqlens("cu_seqlens_q", [0, 3, 9], rows=8)
    Traceback (most recent call last):
    ValueError: cu_seqlens_q[2] must be from cu_seqlens_q[1] = 3 to 8 (the rows of q), got 9
    """
    if not bounds:
        fail(name, "[B + 1]", "no entries")
    if bounds[0] != 0:
        fail(f"{name}[0]", "0", bounds[0])
    for i, (before, bound) in enumerate(pairwise(bounds), 1):
        if not before <= bound <= rows:
            fail(f"{name}[{i}]", f"from {name}[{i - 1}] = {before} to {rows} (the rows of {of})", bound)
    return [end - begin for begin, end in pairwise(bounds)]


def clamped_ranges(cu_seqlens: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """First row and last row + 1 of each sequence, within 0 and ``rows`` whatever cu_seqlens [B + 1] holds.

    As kernels clamp bounds that nobody has checked: a sequence that would end before it begins is empty.

    >>> clamped_ranges(torch.tensor([0, 3, 2, 99]), rows=8)
    [(0, 3), (3, 3), (2, 8)]
    """
    bounds = [min(max(bound, 0), rows) for bound in cu_seqlens.tolist()]
    return [(begin, max(begin, end)) for begin, end in pairwise(bounds)]


def check_lengths(q: torch.Tensor, cu_seqlens_q: torch.Tensor, seqlens_k: torch.Tensor) -> None:
    """Raise unless q is [T, Hq, D], cu_seqlens_q [B + 1] and seqlens_k [B], integers of q's device: no value is read.

    For a function over ranks, which takes them apart before an op checks them.
    """
    if q.ndim != 3:
        fail("q", "[T, Hq, D]", describe(q))
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seqlens_k", seqlens_k)):
        check_dtype(name, tensor, torch.int32, torch.int64)
        check_same_device(name, tensor, "q", q)
    if seqlens_k.ndim != 1:
        fail("seqlens_k", "[B]", describe(seqlens_k))
    check_shape("cu_seqlens_q", cu_seqlens_q, (seqlens_k.shape[0] + 1,))
