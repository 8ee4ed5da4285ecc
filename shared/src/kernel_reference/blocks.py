"""Block layouts: which blocks of keys each block of queries attends to, as lists (CSR), as masks, and as positions.

A layout is ``crow`` [heads or 1, rows + 1] and ``col`` [heads or 1, nnz], int32: row r of head h lists the key blocks
``col[h, crow[h, r] : crow[h, r + 1]]``. Heads may list different numbers of blocks: ``col`` is as wide as the longest
and padded with -1. A block mask is bool [heads or 1, rows, columns]. Layouts do not hold causality: the query at
position p belongs to row ``p // q_block``, the key at position p to column ``p // k_block``, and attention adds
``key <= query``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from .attention import MaskFunction
from .checks import as_int, check_tensors, fail, values_are_checked
from .paging import check_integers


class Csr(NamedTuple):
    """crow [heads or 1, rows + 1] and col [heads or 1, nnz], int32; col sorted in each row, padded with -1."""

    crow: torch.Tensor
    col: torch.Tensor


def _check_mask(mask: torch.Tensor) -> None:
    check_tensors(mask=mask)
    if mask.dtype != torch.bool:
        fail("mask", "bool", mask.dtype, TypeError)
    if mask.ndim != 3:
        fail("mask", "3-D [heads or 1, rows, columns]", f"{mask.ndim}-D")


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if as_int(name, size) < 1:
            fail(name, "at least 1", size)


def mask_to_csr(mask: torch.Tensor) -> Csr:
    """A block mask [heads or 1, rows, columns] as sorted lists."""
    _check_mask(mask)
    crow = torch.nn.functional.pad(mask.sum(2).cumsum(1), (1, 0)).to(torch.int32)
    widest = int(crow[:, -1].max()) if len(crow) else 0
    col = torch.full((mask.shape[0], widest), -1, dtype=torch.int32, device=mask.device)
    for h, head in enumerate(mask):
        listed = head.nonzero()[:, 1]
        col[h, : len(listed)] = listed.to(torch.int32)
    return Csr(crow, col)


def csr_to_mask(crow: torch.Tensor, col: torch.Tensor, columns: int) -> torch.Tensor:
    """Lists as a block mask [heads or 1, rows, columns]; what stands in ``col`` past ``crow[h, -1]`` is not read.

    Where values are checked (``checks.values_are_checked``: on a CPU, and inside ``validate_values``), ValueError names
    the first bounds or columns that are out of range, out of order or repeated. Elsewhere such bounds and columns list
    nothing, and columns may stand in any order.
    """
    check_integers("crow", crow, (None, None))
    check_integers("col", col, (crow.shape[0], None))
    if as_int("columns", columns) < 0:
        fail("columns", "0 or more", columns)
    if crow.shape[1] == 0:
        fail("crow", "of shape [heads, rows + 1]", list(crow.shape))
    mask = torch.zeros(crow.shape[0], crow.shape[1] - 1, columns, dtype=torch.bool, device="cpu")
    checked = values_are_checked(crow.device)
    for h, (bounds, listed) in enumerate(zip(crow.tolist(), col.tolist(), strict=True)):
        for r, (begin, end) in enumerate(pairwise(bounds)):
            if not 0 <= begin <= end <= len(listed):
                if checked:
                    fail(f"crow[{h}, {r + 1}]", f"from crow[{h}, {r}] = {begin} to {len(listed)}", end)
                continue
            entries = listed[begin:end]
            if checked and entries != sorted({c for c in entries if 0 <= c < columns}):
                fail(f"col[{h}, {begin}:{end}]", f"increasing, from 0 to {columns - 1}", entries)
            mask[h, r, [c for c in entries if 0 <= c < columns]] = True
    return mask.to(crow.device)


def token_mask(
    mask: torch.Tensor, q_block: int, k_block: int, q_len: int, k_len: int, *, causal: bool = True
) -> torch.Tensor:
    """Which keys each query sees under a block mask: bool [heads or 1, q_len, k_len], query i at ``k_len - q_len + i``.

    Positions past the mask's rows or columns, and below 0, see and are seen by nothing.
    """
    _check_mask(mask)
    _check_positive(q_block=q_block, k_block=k_block)
    for name, length in (("q_len", q_len), ("k_len", k_len)):
        if as_int(name, length) < 0:
            fail(name, "0 or more", length)
    query = torch.arange(k_len - q_len, k_len, device=mask.device)[:, None]
    key = torch.arange(k_len, device=mask.device)
    heads = torch.arange(mask.shape[0], device=mask.device)[:, None, None]
    visible = mask_function(mask, q_block, k_block)(torch.zeros_like(heads), heads, query, key)
    return visible & (key <= query) if causal else visible


def mask_function(mask: torch.Tensor, q_block: int, k_block: int) -> MaskFunction:
    """A block mask as the ``mask`` of :func:`kernel_reference.attention.attention`, never expanded to all tokens."""
    _check_mask(mask)
    _check_positive(q_block=q_block, k_block=k_block)
    heads, rows, columns = mask.shape

    def visible(
        sequence: torch.Tensor, head: torch.Tensor, q_position: torch.Tensor, k_position: torch.Tensor
    ) -> torch.Tensor:
        row, column = q_position // q_block, k_position // k_block
        held = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        if not rows or not columns:
            return held & torch.zeros_like(head, dtype=torch.bool)
        head = head if heads > 1 else torch.zeros_like(head)
        return held & mask[head, row.clamp(0, rows - 1), column.clamp(0, columns - 1)]

    return visible


def density(mask: torch.Tensor, q_block: int = 1, k_block: int = 1) -> float:
    """The listed share of the blocks that causality leaves: those whose first key some query of the row may see."""
    _check_mask(mask)
    _check_positive(q_block=q_block, k_block=k_block)
    last_query = (torch.arange(mask.shape[1], device=mask.device) + 1) * q_block - 1
    possible = torch.arange(mask.shape[2], device=mask.device) * k_block <= last_query[:, None]
    return float((mask & possible).sum() / (possible.sum() * mask.shape[0]).clamp(min=1))


def local_strided(
    num_heads: int,
    max_seqlen: int,
    local_blocks: int,
    vert_stride: int,
    block_size: int,
    homo_head: bool = False,
    active_head_range: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The block mask [heads or 1, rows, rows] of Phi-3-small: local blocks and, shifted by head, vertical ones.

    Key block j is visible to query block i of head h when ``j <= i`` and (``i - j < local_blocks`` or
    ``(j + h * step + 1) % vert_stride == 0``), with ``step = max(1, vert_stride // num_heads)``, or 0 with
    ``homo_head``, for which the one pattern is given once. ``active_head_range`` (lo, hi) keeps heads lo .. hi - 1 as
    they are numbered in the whole model. rows = ceil(max_seqlen / block_size). Source: Phi-3 technical report (arXiv
    2404.14219), section 2.
    """
    _check_positive(num_heads=num_heads, local_blocks=local_blocks, vert_stride=vert_stride, block_size=block_size)
    if as_int("max_seqlen", max_seqlen) < 0:
        fail("max_seqlen", "0 or more", max_seqlen)
    low, high = active_head_range or (0, num_heads)
    if not 0 <= low < high <= num_heads:
        fail("active_head_range", f"(lo, hi) with 0 <= lo < hi <= {num_heads}", (low, high))
    rows = -(-max_seqlen // block_size)
    step = 0 if homo_head else max(1, vert_stride // num_heads)
    heads = torch.arange(low, low + 1 if homo_head else high, device="cpu")[:, None, None]
    j = torch.arange(rows, device="cpu")
    i = j[:, None]
    return (j <= i) & ((i - j < local_blocks) | ((j + heads * step + 1) % vert_stride == 0))


def merge_query_blocks(mask: torch.Tensor, factor: int) -> torch.Tensor:
    """The block mask for query blocks ``factor`` times as long: each row lists what any of its ``factor`` rows did."""
    _check_mask(mask)
    _check_positive(factor=factor)
    padded = torch.nn.functional.pad(mask, (0, 0, 0, -mask.shape[1] % factor))
    return padded.reshape(mask.shape[0], -(-mask.shape[1] // factor), factor, mask.shape[2]).any(2)
