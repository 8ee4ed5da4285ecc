"""Merging partial results: the splits of one call, or two results over different keys; and the table of pieces.

Splits are those of the portable kernel; pieces of the persistent one for sm_90, which hopper/merging.py merges.
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
    """Note a piece of a tile in parts as entry ``at``, by which a share of its rows is merged; and, if ``noted``,
    what is none. The last piece is, where pieces lie by program, which may have the first of another tile.
    """
    takers = tl.where(item.first < 0, item.pieces, item.pieces - 1)
    if (item.pieces > 1) & (item.i_piece < takers):
        p_entry = p_entries + (at.to(tl.int64) + 1) * ENTRY
        tl.store(p_entry, item.pieces)
        tl.store(p_entry + 1, item.first)
        tl.store(p_entry + 2, sequence.begin + item.i_tile * C.TOKENS)
        tl.store(p_entry + 3, tl.minimum(sequence.q_len - item.i_tile * C.TOKENS, C.TOKENS))
        tl.store(p_entry + 4, item.i_head)
        tl.store(p_entry + 5, sequence.valid.to(tl.int64))
        tl.store(p_entry + 6, item.i_piece)
        tl.store(p_entry + 7, takers)
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
