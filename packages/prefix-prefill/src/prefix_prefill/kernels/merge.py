"""Merging partial results: the pieces or the splits of one call, or two results over different keys.

Pieces are those of the persistent kernel for sm_90, splits those of the portable one.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from prefix_prefill.kernels.schedule import find_tile, lengths
from prefix_prefill.kernels.softmax import Target, exponential, finite, store_results, with_sink

# Numbers of an entry of the table that says which tiles are in parts; before the entries there is one with their count.
ENTRY: tl.constexpr = tl.constexpr(8)


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
    SPLITS: int
    NEW_KV: bool
    LIMIT: int
    SKIP_DECODE: bool
    WIDE: bool


class MergeConfig(NamedTuple):
    """What ``merge_pieces`` is compiled for; of tiles what the kernel is that left their parts."""

    GROUP: int
    HEADS_KV: int
    HEADS: int
    TOKENS: int
    BLOCK_M: int
    ROWS: int  # rows of a tile that one program merges
    D: int
    BLOCK_D: int
    LIMIT: int
    WIDE: bool
    DEPENDENT: bool  # started before the kernel that leaves the parts has ended


@triton.jit
def write_no_entries(p_entries, i_program, work):
    """What a program writes before its items: the first one how many entries there are, each its own two as none."""
    if i_program == 0:
        tl.store(p_entries, work.entries)
    if work.line:
        tl.store(p_entries + (2 * i_program + 1) * ENTRY, i_program * 0)
        tl.store(p_entries + (2 * i_program + 2) * ENTRY, i_program * 0)


@triton.jit
def write_entry(p_entries, x, i_program, item, sequence, work, C):
    """Note a tile in parts, with its first piece; returns where this piece's part goes, -1 if it is the whole tile.

    Shares of keys leave at most two parts a program, which lie by program; others lie by number of the piece.
    """
    cut = item.pieces > 1
    own = tl.where(item.i_piece == 0, 2 * i_program + 1, 2 * i_program)
    at = tl.where(work.line, own, x)
    first = cut & (item.i_piece == 0)
    p_entry = p_entries + (at + 1) * ENTRY
    if first:
        tl.store(p_entry, item.pieces)
        tl.store(p_entry + 1, tl.where(work.line, item.first, -1))
        tl.store(p_entry + 2, sequence.begin + item.i_tile * C.TOKENS)
        tl.store(p_entry + 3, tl.minimum(sequence.q_len - item.i_tile * C.TOKENS, C.TOKENS))
        tl.store(p_entry + 4, item.i_head)
        tl.store(p_entry + 5, sequence.valid.to(tl.int64))
    elif (work.entries > 0) & (work.line == 0):
        tl.store(p_entry, x * 0)
    return tl.where(cut, tl.where(work.line, own, item.i_piece), -1)


@triton.jit
def include(acc, running_max, row_sum, b_part, b_lse):
    """One more part, its output normalised. A part that saw no key may hold anything."""
    new_max = tl.maximum(running_max, b_lse)
    rescale = exponential(running_max - finite(new_max))
    weight = exponential(b_lse - finite(new_max))
    b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_part.to(tl.float32))
    return acc * rescale[:, None] + b_part * weight[:, None], new_max, row_sum * rescale + weight


@triton.jit(do_not_specialize=["rows", "num_sequences", "capacity", "num_slots"])
def merge_splits(
    p_cu, p_seqlens, p_sinks, p_out_scale, p_out, p_lse, p_part, p_part_lse,
    rows, num_sequences, capacity, num_slots, out_scale, strides, config: tl.constexpr,
):  # fmt: skip
    """Results from the workspace of a launch with splits: p_part [SPLITS, rows, H, D], p_part_lse [SPLITS, H, rows]."""
    C: tl.constexpr = config._replace()
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
        for i_split in range(C.SPLITS):
            split = row * 0 + i_split
            b_part = tl.load(
                p_part + ((split * rows + row) * C.H + i_h)[:, None] * C.D + o_d[None, :], mask=m_tile, other=0.0
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
            row * strides.out[0] + i_h * strides.out[1], i_h * strides.lse[0] + row * strides.lse[1],
            o_d_out * strides.out[2], m_row, m_tile,
        )  # fmt: skip
        store_results(p_out, p_lse, p_out_scale, out_scale, acc, running_max, row_sum, target, C.LIMIT)


@triton.jit(do_not_specialize=["rows", "s_lse_head", "s_lse_token"])
def merge_pieces(
    p_sinks, p_out_scale, p_out, p_lse, p_part, p_part_lse, p_entries,
    rows, s_lse_head, s_lse_token, out_scale, s_out, config: tl.constexpr,
):  # fmt: skip
    """The results of the tiles in parts. p_part has rows of D, p_part_lse one number for each."""
    C: tl.constexpr = config._replace()
    H: tl.constexpr = C.GROUP * C.HEADS_KV
    BLOCKS: tl.constexpr = (C.BLOCK_M + C.ROWS - 1) // C.ROWS
    if C.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    while i < tl.load(p_entries) * BLOCKS:
        p_entry = p_entries + (i // BLOCKS + 1).to(tl.int64) * ENTRY
        pieces = tl.load(p_entry)
        tokens = tl.load(p_entry + 3)
        o_m = i % BLOCKS * C.ROWS + tl.arange(0, C.ROWS)
        if (pieces > 0) & (i % BLOCKS * C.ROWS < tokens * C.HEADS):
            first_cut = tl.load(p_entry + 1)
            i_head = tl.load(p_entry + 4)
            o_d = tl.arange(0, C.BLOCK_D)
            o_t = o_m // C.HEADS
            o_g = i_head // C.HEADS_KV * C.HEADS + o_m % C.HEADS
            m_row = (o_m < C.TOKENS * C.HEADS) & (o_t < tokens) & (o_g < C.GROUP)
            m_tile = m_row[:, None] & (o_d < C.D)[None, :]
            row = tl.load(p_entry + 2) + tl.minimum(o_t, tokens - 1)
            o_h = i_head % C.HEADS_KV * C.GROUP + tl.minimum(o_g, C.GROUP - 1)
            acc = tl.zeros([C.ROWS, C.BLOCK_D], tl.float32)
            running_max = tl.full([C.ROWS], float("-inf"), tl.float32)
            row_sum = tl.zeros([C.ROWS], tl.float32)
            for i_piece in range(pieces):
                # By program, two for each, or by number of the piece.
                i_part = tl.where(i_piece == 0, 2 * first_cut - 1, 2 * (first_cut + i_piece - 1))
                o_part = tl.where(first_cut < 0, (i_piece * rows + row) * H + o_h, i_part * C.BLOCK_M + o_m)
                b_part = tl.load(p_part + o_part[:, None] * C.D + o_d[None, :], mask=m_tile, other=0.0)
                b_lse = tl.load(p_part_lse + o_part, mask=m_row, other=float("-inf"))
                acc, running_max, row_sum = include(acc, running_max, row_sum, b_part, b_lse)
            if p_sinks is not None:
                b_sink = tl.load(p_sinks + o_h).to(tl.float32)
                b_sink = tl.where(tl.load(p_entry + 5) != 0, b_sink, float("-inf"))
                acc, running_max, row_sum = with_sink(acc, running_max, row_sum, b_sink)
            o_d_out = o_d
            if C.WIDE:
                o_d_out = o_d.to(tl.int64)
            target = Target(
                row * s_out[0] + o_h * s_out[1], o_h * s_lse_head + row * s_lse_token, o_d_out * s_out[2], m_row, m_tile
            )
            store_results(p_out, p_lse, p_out_scale, out_scale, acc, running_max, row_sum, target, C.LIMIT)
        i += tl.num_programs(0)


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
    store_results(p_out, p_lse, None, 1.0, acc, running_max, row_sum, target, 0)
