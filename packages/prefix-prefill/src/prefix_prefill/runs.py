"""Which new tokens and which keys each rank has, and where gathered keys go: what the layers of a step have in common.

All of it is made on the device: the host reads no length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernel_reference.checks import as_int, check_dense, check_dtype, check_int, check_shape
from kernel_reference.collectives import world_and_rank
from kernel_reference.integers import cdiv
from kernel_reference.peers import place_rows
from kernel_reference.sharding import Interleave, ZigZag

Tensor = torch.Tensor
# Of the pool that gathered keys are laid out in: sequences begin on pages, which hold whole tiles of keys.
_PAGE = 128


class Runs(NamedTuple):
    """The new tokens that a rank has of each sequence, two runs of them, as 2 B sequences.

    counts, begins: [2 B] tokens of a run, and those of its sequence before it. cu: [2 B + 1], rows where runs begin.
    """

    counts: Tensor
    begins: Tensor
    cu: Tensor


class Places(NamedTuple):
    """Keys and values of sequences one after another in a pool of ``pages`` pages.

    rows: [world x T_r] int64, where a gathered row goes; one row behind the pages takes those that go nowhere. tail:
    the same of the rows before the new ones. block_table: [2 B, ..], of two runs a sequence.
    """

    rows: Tensor
    tail: Tensor | None
    pages: int
    block_table: Tensor


class PrefillShare(NamedTuple):
    """What :func:`share_prefill` gives: a rank's part of a step, for :func:`prefix_prefill.parallel.prefix_prefill_cp`.

    cu, ends, begins: of 2 B runs, their rows, the older tokens and their own, and the new ones before them. until: the
    new ones up to the end of a run, where none is older.
    block_table: of the older pages. places: of the gathered keys. most: tokens of a run, at most.
    """

    rows: int
    max_seqlen_q: int
    world: int
    rank: int
    most: int
    cu: Tensor
    ends: Tensor
    begins: Tensor
    until: Tensor
    block_table: Tensor
    places: Places


class DecodeShare(NamedTuple):
    """What :func:`share_decode` gives, for :func:`prefix_prefill.parallel.prefix_decode_cp`.

    cu, visible, block_table: of sequences of one token, what each sees of this rank's keys; of those behind the first
    ``whole``, where a sequence has several.
    whole: [B], keys of this rank that all new tokens of a sequence see, in whole pages; None where each has one token.
    """

    rows: int
    max_seqlen_q: int
    world: int
    rank: int
    cu: Tensor
    visible: Tensor
    block_table: Tensor
    whole: Tensor | None


def share_prefill(
    block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *, rows: int, max_seqlen_q: int, group: Any
) -> PrefillShare:
    """This rank's part of a step's new tokens, for all layers that have these pages.

    Args:
        rows: of a rank's q, padding included.
        block_table, cu_seqlens_q, seqlens_k, max_seqlen_q, group: as
            :func:`prefix_prefill.parallel.prefix_prefill_cp` takes them. In a CUDA graph the result follows their
            values where it is made inside.

    Raises TypeError or ValueError, naming the argument.
    """
    rows, max_seqlen_q = as_int("rows", rows), as_int("max_seqlen_q", max_seqlen_q)
    _check(block_table, cu_seqlens_q, seqlens_k)
    world, rank = world_and_rank(group)
    lengths = cu_seqlens_q.diff().clamp(min=0)
    runs = runs_of(world, lengths, cu_seqlens_q.dtype)
    own, contexts = runs[rank], twice(seqlens_k - lengths)
    places = places_of(runs, lengths, rows, max_seqlen_q)
    # Before a first run lies nothing; an impossible sequence sees nothing.
    begins = torch.where(contexts < 0, 0, own.begins)
    until = torch.where(contexts == 0, own.begins + own.counts, -1)
    return PrefillShare(
        rows, max_seqlen_q, world, rank, cdiv(max_seqlen_q, 2 * world), own.cu, contexts + own.counts, begins,
        until, twice(block_table), places,
    )  # fmt: skip


def share_decode(
    layout: Interleave, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, *, rows: int, max_seqlen_q: int,
    page_size: int,
) -> DecodeShare:  # fmt: skip
    """What this rank's keys are to the new tokens of a step, for all layers that have these pages.

    Args:
        rows: of q. page_size: tokens of a page. layout, block_table, cu_seqlens_q, seqlens_k, max_seqlen_q: as
            :func:`prefix_prefill.parallel.prefix_decode_cp` takes them.

    Raises TypeError or ValueError, naming the argument.
    """
    rows, max_seqlen_q = as_int("rows", rows), as_int("max_seqlen_q", max_seqlen_q)
    page_size = check_int("page_size", page_size, 1)
    _check(block_table, cu_seqlens_q, seqlens_k)
    # A length that cannot be stays one.
    lengths = torch.where(seqlens_k < cu_seqlens_q.diff(), -1, seqlens_k)
    whole = None
    if max_seqlen_q == 1 or not len(seqlens_k):
        visible = torch.where(lengths < 0, -1, layout.visible(lengths))
    else:
        cu_seqlens_q, visible, block_table, whole = _shares_of_tokens(
            layout, block_table, cu_seqlens_q, lengths, rows, max_seqlen_q, page_size
        )
    return DecodeShare(rows, max_seqlen_q, layout.world, layout.rank, cu_seqlens_q, visible, block_table, whole)


def _shares_of_tokens(
    layout: Interleave, block_table: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, rows: int, max_seqlen_q: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``cu``, ``visible``, ``block_table`` and ``whole`` of a :class:`DecodeShare` where sequences have several tokens.

    What a rank has of the keys that a token sees does not grow by one a token: from the page on in which the first
    token's end, each token is a sequence of its own.
    """
    counts = cu_seqlens_q.diff()
    columns = layout.visible((lengths - counts + 1).clamp(min=0)) // page_size
    # Fewer keys than new tokens are none to attention.
    columns = torch.where(columns * page_size < counts, 0, columns)
    whole = torch.where(lengths < 0, -1, columns * page_size)
    tokens = torch.arange(rows, device=lengths.device, dtype=cu_seqlens_q.dtype)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True).clamp(max=len(lengths) - 1)
    # Rows behind the last sequence see nothing.
    behind = cu_seqlens_q[1:][sequence] - tokens - 1
    of_tokens = lengths[sequence]
    of_tokens = torch.where(behind >= 0, torch.where(of_tokens < 0, -1, of_tokens - behind), 0)
    visible = layout.visible(of_tokens) - (columns * page_size)[sequence]
    visible = torch.where(of_tokens < 0, -1, torch.where(behind >= 0, visible, 0))
    if block_table.shape[1]:
        # The rest of a page, those of the other tokens, and as many where there were too few.
        most = cdiv(page_size + 2 * max_seqlen_q - 3, page_size)
        column = columns[sequence][:, None] + torch.arange(most, device=lengths.device)
        block_table = block_table[sequence[:, None], column.clamp(max=block_table.shape[1] - 1)]
    else:
        block_table = block_table[sequence]
    cu = torch.arange(rows + 1, device=lengths.device, dtype=cu_seqlens_q.dtype)
    return cu, visible, block_table, whole


def _check(block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor) -> None:
    check_dense(block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k)
    check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32, torch.int64)
    check_dtype("seqlens_k", seqlens_k, torch.int32, torch.int64)
    check_shape("cu_seqlens_q", cu_seqlens_q, (seqlens_k.shape[0] + 1,))


def runs_of(world: int, lengths: Tensor, dtype: torch.dtype) -> list[Runs]:
    """Of every rank, of sequences of ``lengths`` new tokens."""
    return [_runs_of(ZigZag(world, rank), lengths, dtype) for rank in range(world)]


def _runs_of(layout: ZigZag, lengths: Tensor, dtype: torch.dtype) -> Runs:
    counts = torch.stack([half.visible(lengths) for half in layout.halves], 1).flatten()
    begins = torch.stack([half.begins(lengths) for half in layout.halves], 1).flatten()
    return Runs(counts, begins, torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(dtype))


def places_of(
    runs: list[Runs], lengths: Tensor, rows: int, max_seqlen_q: int, most_tail: int = 0,
    tail_lengths: Tensor | None = None,
) -> Places:  # fmt: skip
    """Places of gathered rows [world, rows, ..] in the order of their positions, behind a tail [B, most_tail, ..]."""
    world, sequences = len(runs), lengths.shape[0]
    before = torch.zeros_like(lengths) if tail_lengths is None else tail_lengths
    pages = (lengths + before + (_PAGE - 1)) // _PAGE
    first_page = pages.cumsum(0) - pages
    num_pages = sequences + cdiv(world * rows + sequences * most_tail, _PAGE)
    # Rows of padding, and whatever bad lengths lead out of the pool, go to a row behind it.
    nowhere = num_pages * _PAGE

    cu = torch.stack([one.cu for one in runs])
    begins = torch.stack([one.begins for one in runs])
    row = torch.arange(rows, device=lengths.device, dtype=cu.dtype).expand(world, rows).contiguous()
    run = torch.searchsorted(cu[:, 1:].contiguous(), row, right=True)
    inside = run < 2 * sequences
    run = run.clamp(max=2 * sequences - 1)
    place = (first_page * _PAGE + before)[run // 2] + begins.gather(1, run) + row - cu.gather(1, run)
    tail = None
    if tail_lengths is not None:
        i_tail = torch.arange(most_tail, device=lengths.device)
        tail = _kept(first_page[:, None] * _PAGE + i_tail, i_tail < before[:, None], nowhere)
    columns = torch.arange(cdiv(max_seqlen_q + most_tail, _PAGE), device=lengths.device)
    table = twice((first_page[:, None] + columns).to(torch.int32))
    return Places(_kept(place, inside, nowhere), tail, num_pages, table)


def _kept(place: Tensor, inside: Tensor, nowhere: int) -> Tensor:
    return torch.where(inside, place, nowhere).clamp(0, nowhere).flatten().long()


def placed(k: Tensor, v: Tensor, places: Places, group: Any) -> Tensor:
    """The pool of all ranks' rows, which each has written to the others' memory."""
    world, rank = world_and_rank(group)
    own = places.rows.unflatten(0, (world, -1))[rank]
    return place_rows(k, v, own, places.pages * _PAGE, group)


def laid_out(gathered: Tensor, places: Places) -> Tensor:
    """The pool of gathered rows [world, T_r, 2, Hkv, D]."""
    pool = gathered.new_empty(places.pages * _PAGE + 1, *gathered.shape[2:])
    return pool.index_copy_(0, places.rows, gathered.flatten(0, 1))


def pages_of(pool: Tensor, places: Places, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pages of keys and of values, of a pool and a tail [B, n, 2, Hkv, D]."""
    nowhere = places.pages * _PAGE
    if tail is not None and places.tail is not None:
        pool.index_copy_(0, places.tail, tail.flatten(0, 1))
    keys, values = pool[:nowhere].unflatten(0, (places.pages, _PAGE)).unbind(2)
    return keys, values


def twice(x: Tensor) -> Tensor:
    """Of each sequence's two runs."""
    return x.repeat_interleave(2, 0)
