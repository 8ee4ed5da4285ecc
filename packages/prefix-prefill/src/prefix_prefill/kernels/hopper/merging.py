"""Merging the pieces that the sm_90 kernel left, a row at a time: each lane has some columns of all its parts.

A lane weighs one part, and hands the weight to the others; in Triton's layout each would weigh all of them. The rows of
a tile are shared by the entries of all its pieces, so that no program has many, wherever the tiles in parts are. Parts
of 2112 rows of 128 in 5 pieces are merged in 3.4 us on an H200, by a warp a row and tile in Triton in 8.3; 8192 in 2 in
5.1 and 14.9.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.groups import CONSTANT_FIELDS
from prefix_prefill.kernels.merge import ENTRY
from prefix_prefill.kernels.softmax import (
    exponential,
    finite,
    log_sum_exp,
    with_sink,
)

# Parts that are loaded at a time, and of how few all are: tiles of many rows mostly have fewer.
TOGETHER: gl.constexpr = gl.constexpr(16)
FEW: gl.constexpr = gl.constexpr(8)
FEWEST: gl.constexpr = gl.constexpr(4)


class MergeConfig(NamedTuple):
    """What ``merge_pieces`` is compiled for; of heads what the kernel is that left their parts."""

    GROUP: int
    HEADS_KV: int
    HEADS: int
    D: int
    BLOCK_D: int
    WARPS: int
    LIMIT: int
    WIDE: bool
    DEPENDENT: bool  # started before the kernel that leaves the parts has ended


class Entry(NamedTuple):
    """A tile in parts: how many, 0 if there is none; the program of the second part where they lie by program, else -1;
    its first row, its tokens, its head among all kv heads' head tiles, and whether its sequence can be. Of its rows
    each ``takers``-th one is the entry's, from number ``i_taker`` on.
    """

    pieces: object
    first_cut: object
    row: object
    tokens: object
    i_head: object
    valid: object
    i_taker: object
    takers: object


class Sizes(NamedTuple):
    """All rows of the batch, and a tile's: so many tokens, and rows that a part of it has room for. Run-time values, so
    that tiles of few rows and of many are merged by one kernel.
    """

    rows: object
    tokens: object
    block_m: object


class Parts(NamedTuple):
    """Pointers to the parts' outputs and their lse."""

    out: object
    lse: object


class Results(NamedTuple):
    """Pointers to what is merged into, to the sinks and the output's scale; its factor, and strides of out and lse."""

    out: object
    lse: object
    sinks: object
    p_scale: object
    scale: object
    s_out: object
    s_lse: object


class Row(NamedTuple):
    """A row of a tile in parts, as a block of one: its number in the tile, in all tokens, its head, and whether there
    is one.
    """

    o_m: object
    row: object
    o_h: object
    m_row: object


@gluon.constexpr_function
def tile_layout(columns, warps):
    """Of parts by columns: a lane has four columns, of all parts where a warp's lanes are a row."""
    across = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // across, across], [1, warps], [1, 0])


@gluon.constexpr_function
def row_layout(columns, warps):
    return gl.SliceLayout(1, tile_layout(columns, warps))


@gluon.constexpr_function
def column_layout(columns, warps):
    return gl.SliceLayout(0, tile_layout(columns, warps))


@gluon.jit
def field(p_field, there):
    return gl.load(p_field, mask=there, other=0).to(gl.int32)


@gluon.jit
def entry_at(p_entries, i, there):
    """Entry i; of none, if it is not ``there``."""
    p_entry = p_entries + (i.to(gl.int64) + 1) * ENTRY
    return Entry(
        field(p_entry, there), field(p_entry + 1, there), field(p_entry + 2, there), field(p_entry + 3, there),
        field(p_entry + 4, there), field(p_entry + 5, there), field(p_entry + 6, there), field(p_entry + 7, there),
    )  # fmt: skip


@gluon.jit
def row_in_tile(i, entry, sizes, C):
    """Row number i of a tile."""
    o_m = i + gl.arange(0, 1, row_layout(C.BLOCK_D, C.WARPS))
    o_t = o_m // C.HEADS
    o_g = entry.i_head // C.HEADS_KV * C.HEADS + o_m % C.HEADS
    m_row = (o_m < sizes.tokens * C.HEADS) & (o_t < entry.tokens) & (o_g < C.GROUP)
    o_h = entry.i_head % C.HEADS_KV * C.GROUP + gl.minimum(o_g, C.GROUP - 1)
    return Row(o_m, entry.row + gl.minimum(o_t, entry.tokens - 1), o_h, m_row)


@gluon.jit
def first_of(entry, own, sizes, C):
    """Where the first part of a row lies: by program, two for each, of which a tile's first one is the second; or by
    number of the piece.
    """
    by_piece = entry.first_cut < 0
    of_piece = own.row.to(gl.int64) * (C.GROUP * C.HEADS_KV) + own.o_h
    of_program = ((entry.first_cut - 1) * 2 + 1) * sizes.block_m + own.o_m
    return gl.max(gl.where(by_piece, of_piece, of_program.to(gl.int64)), 0)


@gluon.jit
def parts_of(entry, first, o_piece, sizes, C):
    """Where parts of a row lie whose first one lies there."""
    by_piece = entry.first_cut < 0
    step = gl.where(by_piece, sizes.rows.to(gl.int64) * (C.GROUP * C.HEADS_KV), 2 * sizes.block_m)
    return first + o_piece * step - gl.where(by_piece | (o_piece == 0), 0, sizes.block_m)


@gluon.jit
def add_parts(acc, sums, parts, entry, place, there, sizes, COUNT: gl.constexpr, C):
    """A row's parts, so many at the most, from number ``place[1]`` on, of which the first of all lies at ``place[0]``;
    ``sums`` are the running max and the row sum.
    """
    running_max, row_sum = sums
    first, begin = place
    # A lane has the weight of a part.
    o_lane = begin + gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [C.WARPS], [0]))
    o_p = begin + gl.arange(0, COUNT, row_layout(C.BLOCK_D, C.WARPS))
    o_d = gl.arange(0, C.BLOCK_D, column_layout(C.BLOCK_D, C.WARPS))
    p_tile = parts.out + (parts_of(entry, first, o_p, sizes, C) * C.D)[:, None] + o_d[None, :]
    m_tile = ((o_p < entry.pieces) & there)[:, None] & (o_d < C.D)[None, :]
    b_part = gl.load(p_tile, mask=m_tile, other=0.0)
    p_lse = parts.lse + parts_of(entry, first, o_lane, sizes, C)
    b_lse = gl.load(p_lse, mask=(o_lane < entry.pieces) & there, other=float("-inf"))
    new_max = gl.maximum(running_max, gl.max(b_lse, 0))
    rescale = exponential(running_max - finite(new_max))
    weight = exponential(b_lse - gl.max(finite(new_max), 0))
    row_sum = row_sum * rescale + gl.sum(weight, 0)
    weight = gl.convert_layout(weight, row_layout(C.BLOCK_D, C.WARPS))
    # A part that saw no key may hold anything.
    b_part = gl.where((weight == 0)[:, None], 0.0, b_part * weight[:, None])
    return acc * rescale[:, None] + gl.sum(b_part, 0)[None, :], (new_max, row_sum)


@gluon.jit
def merge_row(parts, results, entry, own, sizes, C):
    """A row of a tile from its parts."""
    # Of several warps, or of columns that are masked, more would spill registers.
    AT_ONCE: gl.constexpr = TOGETHER if C.WARPS == 1 and C.D == C.BLOCK_D else FEW
    L_ROW: gl.constexpr = row_layout(C.BLOCK_D, C.WARPS)
    acc = gl.zeros([1, C.BLOCK_D], gl.float32, tile_layout(C.BLOCK_D, C.WARPS))
    sums = gl.full([1], float("-inf"), gl.float32, L_ROW), gl.zeros([1], gl.float32, L_ROW)
    first = first_of(entry, own, sizes, C)
    there = gl.max(own.m_row.to(gl.int32), 0) != 0
    pieces = entry.pieces
    if pieces <= FEWEST:
        acc, sums = add_parts(acc, sums, parts, entry, (first, 0), there, sizes, FEWEST, C)
    elif pieces <= FEW:
        acc, sums = add_parts(acc, sums, parts, entry, (first, 0), there, sizes, FEW, C)
    else:
        for begin in range(0, pieces, AT_ONCE):
            acc, sums = add_parts(acc, sums, parts, entry, (first, begin), there, sizes, AT_ONCE, C)
    running_max, row_sum = sums
    if results.sinks is not None:
        b_sink = gl.load(results.sinks + own.o_h).to(gl.float32)
        b_sink = gl.where(entry.valid != 0, b_sink, float("-inf"))
        acc, running_max, row_sum = with_sink(acc, running_max, row_sum, b_sink)
    if results.lse is not None:
        p_lse = results.lse + own.o_h.to(gl.int64) * results.s_lse[0] + own.row.to(gl.int64) * results.s_lse[1]
        gl.store(p_lse, log_sum_exp(running_max, row_sum), mask=own.m_row)
    scale = results.scale
    if results.p_scale is not None:
        scale = scale * gl.load(results.p_scale)
    # As the kernel that leaves no parts has it.
    b_out = acc * (1.0 / (gl.where(row_sum == 0, 1.0, row_sum) * scale))[:, None]
    if C.LIMIT:
        b_out = gl.where(b_out > C.LIMIT, C.LIMIT, gl.where(b_out < -C.LIMIT, -C.LIMIT, b_out))
    o_d = gl.arange(0, C.BLOCK_D, column_layout(C.BLOCK_D, C.WARPS))
    p_row = results.out + own.row.to(gl.int64) * results.s_out[0] + own.o_h.to(gl.int64) * results.s_out[1]
    o_d_out = o_d
    if C.WIDE:
        o_d_out = o_d.to(gl.int64)
    p_tile = p_row[:, None] + (o_d_out * results.s_out[2])[None, :]
    m_tile = own.m_row[:, None] & (o_d < C.D)[None, :]
    gl.store(p_tile, b_out.to(results.out.dtype.element_ty), mask=m_tile)


@gluon.jit(do_not_specialize=["rows", "s_lse_head", "s_lse_token", "across", "tokens", "block_m"])
def merge_pieces(
    p_sinks, p_out_scale, p_out, p_lse, p_part, p_part_lse, p_entries,
    rows, s_lse_head, s_lse_token, across, tokens, block_m, out_scale, s_out, config: gl.constexpr,
):  # fmt: skip
    """The results of the tiles in parts. p_part has rows of D, p_part_lse one number for each.

    ``across`` programs take an entry, a row at a time.
    """
    C: gl.constexpr = config if CONSTANT_FIELDS else config._replace()
    sizes = Sizes(rows, tokens, block_m)
    parts = Parts(p_part, p_part_lse)
    results = Results(p_out, p_lse, p_sinks, p_out_scale, out_scale, s_out, (s_lse_head, s_lse_token))
    i_entry = gl.program_id(0) // across
    if C.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    count = gl.load(p_entries)
    # The first one is loaded with their number: there is memory for as many as there are programs.
    entry = entry_at(p_entries, i_entry, i_entry >= 0)
    while i_entry < count:
        # Of an entry of none the other numbers are what memory held.
        there = entry.pieces > 0
        takers = gl.where(there, entry.takers, 1)
        count_rows = gl.where(there, entry.tokens * C.HEADS, 0)
        first = gl.where(there, entry.i_taker, 0) + takers * (gl.program_id(0) % across)
        for i in range(first, count_rows, takers * across):
            merge_row(parts, results, entry, row_in_tile(i, entry, sizes, C), sizes, C)
        i_entry += gl.num_programs(0) // across
        entry = entry_at(p_entries, i_entry, i_entry < count)
