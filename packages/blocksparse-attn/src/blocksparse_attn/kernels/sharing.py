"""Around attention to a cache that ranks share: a rank's own part of the lists, and messages of partial results."""

from typing import NamedTuple

import triton
import triton.language as tl


class OwnConfig(NamedTuple):
    """What ``own_lists`` is compiled for: ranks, tokens of a run and of a block, entries of a token, and of a table."""

    WORLD: int
    SIZE: int
    BLOCK: int
    TOPK: int
    ENTRIES: int
    BLOCK_E: int
    BLOCK_C: int
    BLOCK_S: int
    CAUSAL: bool


class PartConfig(NamedTuple):
    """What the kernels of messages are compiled for. PAD: elements that a logarithm takes."""

    WORLD: int
    H: int
    D: int
    BLOCK_D: int
    PAD: int


@triton.jit(do_not_specialize=["sequences", "columns", "rank"])
def own_lists(
    p_indices, p_table, p_cu, p_lengths, p_own, p_own_table, p_seen, p_bounds, p_inside, sequences, columns, rank,
    s_row, s_head, s_table, config: tl.constexpr,
):  # fmt: skip
    """Of one query token, as a sequence of its own: the blocks that this rank holds, its pages, and its keys.

    Token t of a sequence lies on rank ``t // SIZE % WORLD``, in the order of t. Where the rank has no key of a sequence
    it has one in a list that names nothing; an impossible length stays one.
    """
    SIZE: tl.constexpr = config.SIZE
    WORLD: tl.constexpr = config.WORLD
    RUN: tl.constexpr = config.SIZE // config.BLOCK
    row = tl.program_id(0).to(tl.int64)
    i_sequence = row * 0
    o_s = tl.arange(0, config.BLOCK_S)
    for first in range(0, sequences, config.BLOCK_S):
        m_s = first + o_s < sequences
        b_ends = tl.load(p_cu + 1 + first + o_s, mask=m_s, other=0).to(tl.int64)
        i_sequence += tl.sum((m_s & (b_ends <= row)).to(tl.int64), 0)
    inside = i_sequence < sequences
    i_sequence = tl.minimum(i_sequence, sequences - 1)
    begin = tl.load(p_cu + i_sequence).to(tl.int64)
    end = tl.load(p_cu + i_sequence + 1).to(tl.int64)
    length = tl.load(p_lengths + i_sequence).to(tl.int64)
    last = length
    if config.CAUSAL:
        last = length - (end - row - 1)
    last = tl.where(length < end - begin, -1, last)
    last = tl.where(inside, last, 0)
    turns = tl.maximum(last, 0) // (SIZE * WORLD)
    rest = tl.maximum(last, 0) - turns * (SIZE * WORLD) - rank * SIZE
    seen = turns * SIZE + tl.minimum(tl.maximum(rest, 0), SIZE)
    tl.store(p_seen + row, tl.where(last < 0, -1, tl.maximum(seen, 1)).to(p_seen.dtype.element_ty))
    tl.store(p_inside + row, (inside & (last >= 0)).to(tl.int32))
    tl.store(p_bounds + row, row.to(p_bounds.dtype.element_ty))
    if row == tl.num_programs(0) - 1:
        tl.store(p_bounds + row + 1, (row + 1).to(p_bounds.dtype.element_ty))

    o_e = tl.arange(0, config.BLOCK_E)
    for first in range(0, config.ENTRIES, config.BLOCK_E):
        entry = first + o_e
        m_e = entry < config.ENTRIES
        p_entry = p_indices + row * s_row + (entry // config.TOPK) * s_head + entry % config.TOPK
        block = tl.load(p_entry, mask=m_e, other=-1)
        listed = (block >= 0) & (block.to(tl.int64) * config.BLOCK < last)
        run = tl.where(listed, block, 0) // RUN
        own = run // WORLD * RUN + tl.where(listed, block, 0) % RUN
        tl.store(p_own + row * config.ENTRIES + entry, tl.where(listed & (run % WORLD == rank), own, -1), mask=m_e)

    o_c = tl.arange(0, config.BLOCK_C)
    for first in range(0, columns, config.BLOCK_C):
        m_c = first + o_c < columns
        page = tl.load(p_table + i_sequence * s_table + first + o_c, mask=m_c & (seen > 0), other=0)
        tl.store(p_own_table + row * columns + first + o_c, page, mask=m_c)


@triton.jit(do_not_specialize=["rows"])
def pack_parts(p_out, p_lse, p_parts, rows, config: tl.constexpr):
    """One row of a head, behind which its logarithm stands, where the rank that gets the head reads it.

    out: [rows, H, D]; lse: [H, rows]; parts: [WORLD, rows, H / WORLD, D + PAD].
    """
    pid = tl.program_id(0).to(tl.int64)
    row, i_h = pid // config.H, pid % config.H
    EACH: tl.constexpr = config.H // config.WORLD
    o_d = tl.arange(0, config.BLOCK_D)
    m_d = o_d < config.D
    to = (((i_h // EACH) * rows + row) * EACH + i_h % EACH) * (config.D + config.PAD)
    tl.store(p_parts + to + o_d, tl.load(p_out + pid * config.D + o_d, mask=m_d), mask=m_d)
    p_behind = (p_parts + to + config.D).to(tl.pointer_type(tl.float32))
    tl.store(p_behind, tl.load(p_lse + i_h * rows + row))


@triton.jit(do_not_specialize=["rows"])
def merge_parts(p_parts, p_sinks, p_inside, p_out, p_lse, rows, config: tl.constexpr):
    """One row of a head from the parts of all ranks, [WORLD, rows, H, D + PAD], as ``merge_partials`` does; and a sink.

    A sink is a logit of all keys together, which no rank may count for itself. out: [rows, H, D]; lse: [H, rows].
    """
    BLOCK_D: tl.constexpr = config.BLOCK_D
    pid = tl.program_id(0).to(tl.int64)
    row, i_h = pid // config.H, pid % config.H
    o_d = tl.arange(0, config.BLOCK_D)
    m_d = o_d < config.D
    acc = tl.zeros([BLOCK_D], tl.float32)
    highest = tl.sum(acc, 0) - float("inf")
    total = tl.sum(acc, 0)
    for i_part in range(0, config.WORLD):
        p_part = p_parts + (i_part * rows * config.H + pid) * (config.D + config.PAD)
        lse = tl.load((p_part + config.D).to(tl.pointer_type(tl.float32)))
        lse = tl.where(lse == float("inf"), float("-inf"), lse)
        b_part = tl.load(p_part + o_d, mask=m_d, other=0.0).to(tl.float32)
        # A part that saw nothing may hold anything.
        b_part = tl.where(lse == float("-inf"), 0.0, b_part)
        higher = tl.maximum(highest, lse)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before, weight = tl.exp(highest - shift), tl.exp(lse - shift)
        acc = acc * before + b_part * weight
        total = total * before + weight
        highest = higher
    if p_sinks is not None:
        sink = tl.load(p_sinks + i_h).to(tl.float32)
        sink = tl.where(tl.load(p_inside + row) != 0, sink, float("-inf"))
        higher = tl.maximum(highest, sink)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before = tl.exp(highest - shift)
        acc = acc * before
        total = total * before + tl.exp(sink - shift)
        highest = higher
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(p_out + pid * config.D + o_d, out.to(p_out.dtype.element_ty), mask=m_d)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(p_lse + i_h * rows + row, shift + tl.log(total))
