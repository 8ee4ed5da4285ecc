"""The two lists of a block layout, ``crow`` and ``col``: what they must be, what they list, and a mask of it."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, NoReturn

import torch

from kernel_reference.checks import check_dense, check_int, check_same_device, describe, fail
from kernel_reference.integers import cdiv

Tensor = torch.Tensor

_INTEGERS = (torch.int32, torch.int64)
# The narrowest tile of a matrix instruction: kernels walk blocks in whole tiles. Two of the largest fit behind the
# last position that kernels count.
_LEAST_BLOCK, _MOST_BLOCK = 16, 2**16


class Names(NamedTuple):
    """What a public function calls the arguments that go by several names, for its errors."""

    crow: str = "crow"
    col: str = "col"
    heads: str = "crow"
    q_block: str = "q_block"
    k_block: str = "k_block"
    max_seqlen_q: str = "max_seqlen_q"
    softmax_scale: str = "softmax_scale"


NAMES = Names()


def check_blocks(q_block: object, k_block: object, names: Names = NAMES) -> None:
    """Sizes of blocks, in tokens."""
    # That of keys first: where the other is not given it is the same, and callers do not know its name.
    for name, size in ((names.k_block, k_block), (names.q_block, q_block)):
        found = check_int(name, size, _LEAST_BLOCK)
        if found % _LEAST_BLOCK or found > _MOST_BLOCK:
            fail(name, f"a multiple of {_LEAST_BLOCK} of at most {_MOST_BLOCK}", size)
    if q_block % k_block and k_block % q_block:  # type: ignore[operator]
        fail(names.q_block, f"a multiple or a divisor of {names.k_block} = {k_block}", q_block)


def reach(rows: int, q_block: int, k_block: int) -> int:
    """Blocks of keys up to the last position of so many blocks of queries: no query sees one after them."""
    return cdiv(rows * q_block, k_block)


def check_columns(columns: object, rows: int, q_block: int, k_block: int) -> None:
    """How many blocks of keys a layout has."""
    most = reach(rows, q_block, k_block)
    if check_int("columns", columns, 0) > most:
        fail("columns", f"at most {most}, which {rows} rows of {q_block} queries reach", columns)


def with_heads(
    crow: Tensor, col: Tensor, names: Names = NAMES, dtypes: tuple[torch.dtype, ...] = _INTEGERS
) -> tuple[Tensor, Tensor]:
    """crow and col as [heads or 1, ...], given so or, for a layout of one head, as [rows + 1] and [nnz]."""
    check_dense(**{names.crow: crow, names.col: col})
    if crow.ndim == col.ndim == 1:
        crow, col = crow[None], col[None]
    check_lists(crow, col, dtypes, names)
    return crow, col


def in_32_bits(crow: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Lists as kernels read them. What 32 bits cannot hold stays what it is, impossible."""
    return _in_32_bits(crow), _in_32_bits(col)


def _in_32_bits(numbers: Tensor) -> Tensor:
    return numbers if numbers.dtype == torch.int32 else numbers.clamp(-1, 2**31 - 1).to(torch.int32)


def check_lists(
    crow: Tensor, col: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.int32,), names: Names = NAMES
) -> tuple[int, int]:
    """Heads and rows of crow [heads or 1, rows + 1] and col [heads or 1, nnz], checked but for their contents."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    for name, tensor in ((names.crow, crow), (names.col, col)):
        if tensor.dtype not in dtypes:
            fail(f"{name}.dtype", wanted, tensor.dtype, TypeError)
        if tensor.ndim != 2 or tensor.shape[0] < 1:
            fail(name, "[heads or 1, rows + 1]" if tensor is crow else "[heads or 1, nnz]", describe(tensor))
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            fail(name, "of contiguous rows", describe(tensor))
    if crow.shape[1] < 1:
        fail(names.crow, "[heads or 1, rows + 1]", describe(crow))
    if col.shape[0] != crow.shape[0]:
        fail(names.col, f"[{crow.shape[0]}, nnz] as {names.crow} is", describe(col))
    check_same_device(names.col, col, names.crow, crow)
    return crow.shape[0], crow.shape[1] - 1


def list_faults(crow: Tensor, col: Tensor, columns: int) -> Tensor:
    """Whether crow does not rise from 0 to nnz at most, and whether col does not increase within columns: bool [2].

    Computed on the tensors' device, without waiting for it. Where crow is at fault, what is said of col means nothing.
    """
    nnz = col.shape[1]
    bad_rows = (crow[:, 0] != 0).any() | (crow[:, 1:] < crow[:, :-1]).any() | (crow[:, -1] > nnz).any()
    # An entry need not be above the one before it where a row begins.
    begins = torch.zeros(col.shape[0], nnz + 1, dtype=torch.bool, device=col.device)
    begins.scatter_(1, crow[:, :-1].clamp(0, nnz).long(), True)
    listed = torch.arange(nnz, device=col.device) < crow[:, -1:]
    bad_columns = (listed & ((col < 0) | (col >= columns))).any()
    bad_columns |= (listed[:, 1:] & ~begins[:, 1:nnz] & (col[:, 1:] <= col[:, :-1])).any()
    return torch.stack([bad_rows, bad_columns])


def fail_lists(crow: Tensor, col: Tensor, columns: int, names: Names = NAMES) -> NoReturn:
    """Raise ValueError for the first entry at which :func:`list_faults` finds fault."""
    crow, col = crow.cpu().long(), col.cpu().long()
    nnz = col.shape[1]
    for head, bounds in enumerate(crow.tolist()):
        if bounds[0] != 0:
            fail(f"{names.crow}[{head}, 0]", "0", bounds[0])
        for row, (before, bound) in enumerate(pairwise(bounds)):
            if not before <= bound <= nnz:
                wanted = f"from {names.crow}[{head}, {row}] = {before} to {nnz} (the width of {names.col})"
                fail(f"{names.crow}[{head}, {row + 1}]", wanted, bound)
    for head, (bounds, entries) in enumerate(zip(crow.tolist(), col.tolist(), strict=True)):
        for row, (begin, end) in enumerate(pairwise(bounds)):
            for place in range(begin, end):
                name, column = f"{names.col}[{head}, {place}]", entries[place]
                if not 0 <= column < columns:
                    fail(name, f"a block of keys from 0 to {columns - 1}", column)
                if place > begin and column <= entries[place - 1]:
                    fail(name, f"above {entries[place - 1]}, the one before it in row {row}", column)
    raise RuntimeError("these lists are in order")


class Listed(NamedTuple):
    """Each entry of the lists, in their order: ``head * rows + row``, and ``head * nnz`` + its index in col."""

    row: Tensor
    place: Tensor


def listed(crow: Tensor, col: Tensor) -> Listed:
    """The entries that lists of any content have; rows of impossible bounds have none."""
    heads, nnz = col.shape
    begin, end = crow[:, :-1].long(), crow[:, 1:].long()
    possible = (begin >= 0) & (begin <= end) & (end <= nnz)
    counts = torch.where(possible, end - begin, 0).reshape(-1)
    row = torch.repeat_interleave(torch.arange(counts.numel(), device=crow.device), counts)
    first = (begin + torch.arange(heads, device=crow.device)[:, None] * nnz).reshape(-1)
    before = counts.cumsum(0) - counts
    return Listed(row, torch.arange(row.numel(), device=crow.device) + (first - before)[row])


def transposed(crow: Tensor, col: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The rows that list each column, in order, as lists [heads, columns + 1] and [heads, nnz], without a sync."""
    heads, nnz = col.shape
    place = torch.arange(nnz, dtype=torch.int32, device=col.device).expand(heads, nnz).contiguous()
    row = torch.searchsorted(crow[:, 1:].contiguous(), place, right=True)
    there = (place < crow[:, -1:]) & (row < crow.shape[1] - 1) & (col >= 0) & (col < columns)
    # What is not there comes last.
    column = torch.where(there, col, columns).long()
    order = column.argsort(dim=1, stable=True)
    counts = torch.zeros(heads, columns + 1, dtype=torch.int32, device=col.device)
    counts.scatter_add_(1, column, torch.ones_like(place))
    begins = torch.nn.functional.pad(counts[:, :columns].cumsum(1), (1, 0))
    return begins.to(torch.int32), row.gather(1, order).to(torch.int32)


def block_mask(crow: Tensor, col: Tensor, rows: int, columns: int) -> Tensor:
    """What the first ``rows`` rows, of those there are, list of ``columns`` columns: bool [heads or 1, rows, columns].

    Lists of any content: columns may be in any order; those out of bounds, and rows of impossible bounds, list nothing.
    """
    row, place = listed(crow[:, : rows + 1], col)
    column = col.reshape(-1)[place]
    there = (column >= 0) & (column < columns)
    mask = torch.zeros(crow.shape[0] * rows, columns, dtype=torch.bool, device=crow.device)
    mask[row[there], column[there].long()] = True
    return mask.view(crow.shape[0], rows, columns)
