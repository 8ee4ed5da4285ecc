"""Merging partial results: the pieces or the splits of one call, or two results over different keys.

Pieces are those of the persistent kernel for sm_90, splits those of the portable one.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from prefix_prefill.kernels.groups import CONSTANT_FIELDS
from prefix_prefill.kernels.schedule import find_tile, lengths
from prefix_prefill.kernels.softmax import (
    Target,
    exponential,
    finite,
    log_sum_exp,
    normalised,
    store_results,
    with_sink,
)

# Numbers of an entry of the table that says which tiles are in parts; before the entries there is one with their count.
ENTRY: tl.constexpr = tl.constexpr(8)
# Parts that are loaded at a time; and of how few all are, as tiles of many rows mostly have them.
TOGETHER: tl.constexpr = tl.constexpr(16)
FEW: tl.constexpr = tl.constexpr(4)


class Strides(NamedTuple):
    """Of out by (token, head, element) and of lse by (head, token)."""

    out: tuple[int, ...]
    lse: tuple[int, ...]


class SplitConfig(NamedTuple):
    """What ``merge_splits`` is compiled for."""

    H: int
    D: int
    BLOCK_D: int
    TOKENS: int
    NEW_KV: bool
    LIMIT: int
    SKIP_DECODE: bool
    WIDE: bool


class MergeConfig(NamedTuple):
    """What ``merge_pieces`` is compiled for; of heads what the kernel is that left their parts."""

    GROUP: int
    HEADS_KV: int
    HEADS: int
    D: int
    BLOCK_D: int
    LIMIT: int
    WIDE: bool
    DEPENDENT: bool  # started before the kernel that leaves the parts has ended


@triton.jit
def write_count(p_entries, i_program, work):
    """The first program says how many entries there are."""
    if i_program == 0:
        tl.store(p_entries, work.entries)


@triton.jit
def write_no_entry(p_entries, at):
    """Entry ``at`` is of no tile."""
    tl.store(p_entries + (at.to(tl.int64) + 1) * ENTRY, 0)


@triton.jit
def write_entry(p_entries, at, item, sequence, noted, C):
    """Note a tile in parts, with its first piece, as entry ``at``, and with others that it is of none, if ``noted``."""
    if (item.pieces > 1) & (item.i_piece == 0):
        p_entry = p_entries + (at.to(tl.int64) + 1) * ENTRY
        tl.store(p_entry, item.pieces)
        tl.store(p_entry + 1, item.first)
        tl.store(p_entry + 2, sequence.begin + item.i_tile * C.TOKENS)
        tl.store(p_entry + 3, tl.minimum(sequence.q_len - item.i_tile * C.TOKENS, C.TOKENS))
        tl.store(p_entry + 4, item.i_head)
        tl.store(p_entry + 5, sequence.valid.to(tl.int64))
    elif noted:
        write_no_entry(p_entries, at)


@triton.jit
def add(acc, row_sum, b_part, b_lse, new_max):
    """One more part, its output normalised. A part that saw no key may hold anything."""
    weight = exponential(b_lse - finite(new_max))
    b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_part.to(tl.float32))
    return acc + b_part * weight[:, None], row_sum + weight


@triton.jit
def include(acc, running_max, row_sum, b_part, b_lse):
    """``add``, and what it is relative to."""
    new_max = tl.maximum(running_max, b_lse)
    rescale = exponential(running_max - finite(new_max))
    acc, row_sum = add(acc * rescale[:, None], row_sum * rescale, b_part, b_lse, new_max)
    return acc, new_max, row_sum


@triton.jit(
    do_not_specialize=["rows", "num_sequences", "capacity", "num_slots", "num_splits", "s_lse_head", "s_lse_token"]
)
def merge_splits(
    p_cu, p_seqlens, p_sinks, p_out_scale, p_out, p_lse, p_workspace,
    rows, num_sequences, capacity, num_slots, num_splits, s_lse_head, s_lse_token, out_scale, s_out,
    config: tl.constexpr,
):  # fmt: skip
    """Results from the workspace of a launch with splits: parts [num_splits, rows, H, D], behind them their lse
    [num_splits, H, rows].
    """
    C: tl.constexpr = config if CONSTANT_FIELDS else config._replace()
    p_part_lse = p_workspace + num_splits.to(tl.int64) * rows * (C.H * C.D)
    pid = tl.program_id(0)
    i_h = (pid // num_slots).to(tl.int64)
    i_n, i_tile, begin, q_len = find_tile(p_cu, pid % num_slots, num_sequences, rows, C.TOKENS)
    _, _, valid = lengths(p_seqlens, i_n, num_sequences, q_len, capacity, C.NEW_KV, False)
    skipped = False
    if C.SKIP_DECODE:
        skipped = valid & (q_len == 1)
    if (q_len > 0) & (not skipped):
        o_t = i_tile * C.TOKENS + tl.arange(0, C.TOKENS)
        o_d = tl.arange(0, C.BLOCK_D)
        m_row = o_t < q_len
        m_tile = m_row[:, None] & (o_d < C.D)[None, :]
        row = begin + tl.minimum(o_t, q_len - 1)
        acc = tl.zeros([C.TOKENS, C.BLOCK_D], tl.float32)
        running_max = tl.full([C.TOKENS], float("-inf"), tl.float32)
        row_sum = tl.zeros([C.TOKENS], tl.float32)
        for i_split in range(num_splits):
            split = row * 0 + i_split
            b_part = tl.load(
                p_workspace + ((split * rows + row) * C.H + i_h)[:, None] * C.D + o_d[None, :], mask=m_tile, other=0.0
            )
            b_lse = tl.load(p_part_lse + (split * C.H + i_h) * rows + row, mask=m_row, other=float("-inf"))
            acc, running_max, row_sum = include(acc, running_max, row_sum, b_part, b_lse)
        if p_sinks is not None:
            b_sink = tl.zeros([C.TOKENS], tl.float32) + tl.load(p_sinks + i_h).to(tl.float32)
            acc, running_max, row_sum = with_sink(acc, running_max, row_sum, tl.where(valid, b_sink, float("-inf")))
        o_d_out = o_d
        if C.WIDE:
            o_d_out = o_d.to(tl.int64)
        target = Target(
            row * s_out[0] + i_h * s_out[1], i_h * s_lse_head + row * s_lse_token, o_d_out * s_out[2], m_row, m_tile
        )
        b_out, b_lse = normalised(acc, row_sum), log_sum_exp(running_max, row_sum)
        store_results(p_out, p_lse, p_out_scale, out_scale, b_out, b_lse, target, C.LIMIT)


class Entry(NamedTuple):
    """A tile in parts: how many, 0 if there is none; the program of its second part where they lie by program, else -1;
    its first row, its tokens, its head among all kv heads' head tiles, and whether its sequence can be.
    """

    pieces: object
    first_cut: object
    row: object
    tokens: object
    i_head: object
    valid: object


class Sizes(NamedTuple):
    """All rows of the batch, and a tile's: so many tokens, and rows that a part of it has room for. Run-time values, so
    that tiles of few rows and of many are merged by one kernel.
    """

    rows: object
    tokens: object
    block_m: object


class Row(NamedTuple):
    """A row of a tile in parts, as a block of one: its number in the tile, in all tokens, its head, and whether there
    is one.
    """

    o_m: object
    row: object
    o_h: object
    m_row: object


@triton.jit
def entry_at(p_entries, i, there):
    """Entry i; of none, if it is not ``there``."""
    p_entry = p_entries + (i.to(tl.int64) + 1) * ENTRY
    return Entry(
        tl.load(p_entry, mask=there, other=0), tl.load(p_entry + 1, mask=there, other=0),
        tl.load(p_entry + 2, mask=there, other=0), tl.load(p_entry + 3, mask=there, other=0),
        tl.load(p_entry + 4, mask=there, other=0), tl.load(p_entry + 5, mask=there, other=0),
    )  # fmt: skip


@triton.jit
def row_in_tile(i, entry, sizes, C):
    """Row number i of a tile."""
    o_m = i + tl.arange(0, 1)
    o_t = o_m // C.HEADS
    o_g = entry.i_head // C.HEADS_KV * C.HEADS + o_m % C.HEADS
    m_row = (o_m < sizes.tokens * C.HEADS) & (o_t < entry.tokens) & (o_g < C.GROUP)
    o_h = entry.i_head % C.HEADS_KV * C.GROUP + tl.minimum(o_g, C.GROUP - 1)
    return Row(o_m, entry.row + tl.minimum(o_t, entry.tokens - 1), o_h, m_row)


@triton.jit
def parts_of(entry, o_piece, own, sizes, C):
    """Where parts of a row lie: by program, two for each, of which a tile's first one is the second; or by number of
    the piece.
    """
    by_piece = entry.first_cut < 0
    first = tl.where(by_piece, own.row * (C.GROUP * C.HEADS_KV) + own.o_h, own.o_m + sizes.block_m)
    first += tl.where(by_piece, 0, (entry.first_cut - 1) * 2 * sizes.block_m)
    step = tl.where(by_piece, sizes.rows.to(tl.int64) * (C.GROUP * C.HEADS_KV), 2 * sizes.block_m)
    return first + o_piece * step - tl.where(by_piece | (o_piece == 0), 0, sizes.block_m)


@triton.jit
def add_parts(acc, sums, p_part, p_part_lse, entry, first, own, sizes, COUNT: tl.constexpr, C):
    """A row's parts from number ``first`` on, so many at the most; ``sums`` are the running max and the row sum."""
    running_max, row_sum = sums
    o_d = tl.arange(0, C.BLOCK_D)
    o_p = first + tl.arange(0, COUNT)
    # As one block: ptxas waits for loads of their own one after another.
    there = (o_p < entry.pieces) & own.m_row
    o_part = parts_of(entry, o_p, own, sizes, C)
    b_lse = tl.load(p_part_lse + o_part, mask=there, other=float("-inf"))
    p_tile = p_part + o_part[:, None] * C.D + o_d[None, :]
    b_part = tl.load(p_tile, mask=there[:, None] & (o_d < C.D)[None, :], other=0.0)
    new_max = tl.maximum(running_max, tl.max(b_lse, 0, keep_dims=True))
    rescale = exponential(running_max - finite(new_max))
    weight = exponential(b_lse - finite(new_max))
    # A part that saw no key may hold anything.
    b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_part)
    acc = acc * rescale[:, None] + tl.sum(b_part * weight[:, None], 0, keep_dims=True)
    return acc, (new_max, row_sum * rescale + tl.sum(weight, 0, keep_dims=True))


@triton.jit
def merge_row(p_sinks, p_part, p_part_lse, entry, own, sizes, C):
    """Of a row of a tile the sum of its parts, their weights' sum, and what they are relative to."""
    acc = tl.zeros([1, C.BLOCK_D], tl.float32)
    sums = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    pieces = entry.pieces.to(tl.int32)
    if pieces <= FEW:
        acc, sums = add_parts(acc, sums, p_part, p_part_lse, entry, pieces * 0, own, sizes, FEW, C)
    else:
        for first in range(0, pieces, TOGETHER):
            acc, sums = add_parts(acc, sums, p_part, p_part_lse, entry, first, own, sizes, TOGETHER, C)
    running_max, row_sum = sums
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + own.o_h).to(tl.float32)
        b_sink = tl.where(entry.valid != 0, b_sink, float("-inf"))
        acc, running_max, row_sum = with_sink(acc, running_max, row_sum, b_sink)
    return acc, running_max, row_sum


@triton.jit(do_not_specialize=["rows", "s_lse_head", "s_lse_token", "across", "tokens", "block_m"])
def merge_pieces(
    p_sinks, p_out_scale, p_out, p_lse, p_part, p_part_lse, p_entries,
    rows, s_lse_head, s_lse_token, across, tokens, block_m, out_scale, s_out, config: tl.constexpr,
):  # fmt: skip
    """The results of the tiles in parts. p_part has rows of D, p_part_lse one number for each.

    A program has a row at a time, ``across`` of them those of a tile.
    """
    C: tl.constexpr = config if CONSTANT_FIELDS else config._replace()
    sizes = Sizes(rows, tokens, block_m)
    o_d = tl.arange(0, C.BLOCK_D)
    i_entry = tl.program_id(0) // across
    if C.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    count = tl.load(p_entries)
    # The first one is loaded with their number: there is memory for as many as there are programs.
    entry = entry_at(p_entries, i_entry, i_entry >= 0)
    while i_entry < count:
        count_rows = tl.where(entry.pieces > 0, entry.tokens * C.HEADS, 0).to(tl.int32)
        for i in range(tl.program_id(0) % across, count_rows, across):
            own = row_in_tile(i, entry, sizes, C)
            acc, running_max, row_sum = merge_row(p_sinks, p_part, p_part_lse, entry, own, sizes, C)
            o_d_out = o_d
            if C.WIDE:
                o_d_out = o_d.to(tl.int64)
            target = Target(
                own.row * s_out[0] + own.o_h * s_out[1], own.o_h * s_lse_head + own.row * s_lse_token,
                o_d_out * s_out[2], own.m_row, own.m_row[:, None] & (o_d < C.D)[None, :],
            )  # fmt: skip
            b_out, b_lse = normalised(acc, row_sum), log_sum_exp(running_max, row_sum)
            store_results(p_out, p_lse, p_out_scale, out_scale, b_out, b_lse, target, C.LIMIT)
        i_entry += tl.num_programs(0) // across
        entry = entry_at(p_entries, i_entry, i_entry < count)


@triton.jit
def load_lse(p_lse, mask):
    """The lse of a caller's part, where +inf says as well as -inf that it saw no key: FlashMLA writes that."""
    b_lse = tl.load(p_lse, mask=mask, other=float("-inf"))
    return tl.where(b_lse == float("inf"), float("-inf"), b_lse)


@triton.jit
def load_part(p_out, p_lse, strides, row, i_h, o_d, m_row, m_tile):
    """The rows of one head of a caller's part, and their lse."""
    b_out = tl.load(
        p_out + (row * strides.out[0] + i_h * strides.out[1])[:, None] + o_d[None, :] * strides.out[2], mask=m_tile,
        other=0.0,
    )  # fmt: skip
    return b_out, load_lse(p_lse + i_h * strides.lse[0] + row * strides.lse[1], m_row)


@triton.jit(do_not_specialize=["rows"])
def merge_states(
    p_out_a, p_lse_a, p_out_b, p_lse_b, p_out, p_lse, rows, s_a, s_b, strides,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Two results over different keys: outputs [rows, H, D], lse [H, rows]; s_a, s_b and strides are ``Strides``."""
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    o_t = pid // H * TOKENS + tl.arange(0, TOKENS)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_row = o_t < rows
    m_tile = m_row[:, None] & (o_d < D)[None, :]
    row = o_t.to(tl.int64)
    acc = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    running_max = tl.full([TOKENS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TOKENS], tl.float32)
    b_part, b_lse = load_part(p_out_a, p_lse_a, s_a, row, i_h, o_d, m_row, m_tile)
    acc, running_max, row_sum = include(acc, running_max, row_sum, b_part, b_lse)
    b_part, b_lse = load_part(p_out_b, p_lse_b, s_b, row, i_h, o_d, m_row, m_tile)
    acc, running_max, row_sum = include(acc, running_max, row_sum, b_part, b_lse)
    target = Target(
        row * strides.out[0] + i_h * strides.out[1], i_h * strides.lse[0] + row * strides.lse[1],
        o_d * strides.out[2], m_row, m_tile,
    )  # fmt: skip
    b_out, b_lse = normalised(acc, row_sum), log_sum_exp(running_max, row_sum)
    store_results(p_out, p_lse, None, 1.0, b_out, b_lse, target, 0)
