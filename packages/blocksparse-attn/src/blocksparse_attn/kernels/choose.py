"""The best columns of a row of scores, exactly, lower ones first among equals."""

from typing import NamedTuple

import triton
import triton.language as tl


class PackConfig(NamedTuple):
    """What ``pack`` is compiled for: entries of a row, at most, rows of a program, and counts that it adds at once."""

    WIDTH: int
    BLOCK_W: int
    BLOCK_R: int
    TOGETHER: int


class ChooseConfig(NamedTuple):
    """What the kernel is compiled for: columns rounded up to a power of two, entries of a row of the result, and
    whether those that are always chosen count among ``topk``."""

    BLOCK_C: int
    WIDTH: int
    BLOCK_W: int
    TOPK: int
    LOCAL: int
    SINK: int
    WITHIN: bool


@triton.jit
def in_order(scores):
    """Numbers that are ordered as scores are, 1 or more; 0 for -inf and NaN, which are never chosen."""
    bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
    # As unsigned numbers: negative ones the other way round, below all others.
    order = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(scores > float("-inf"), order, 0)


@triton.jit
def best(order, count):
    """Which are the ``count`` largest of ``order`` [BLOCK_C], 0 aside: the first of equal ones."""
    left = tl.minimum(count, tl.sum((order > 0).to(tl.int32), 0))
    # The largest number that so many reach, bit by bit from the highest; done at once where just so many do.
    floor = tl.sum(order * 0, 0)
    bit = left * 0 + 31
    while bit >= 0:
        higher = floor | ((floor * 0 + 1) << bit.to(tl.uint32))
        reached = tl.sum((order >= higher).to(tl.int32), 0)
        floor = tl.where(reached >= left, higher, floor)
        bit = tl.where(reached == left, -1, bit - 1)
    above = (order > floor) & (left > 0)
    equal = (order == floor) & (order > 0) & (left > 0)
    rest = left - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= rest))


@triton.jit(do_not_specialize=["columns", "rows", "q_block", "k_block"])
def choose(
    p_scores, p_possible, p_indices, p_counts, columns, rows, q_block, k_block, s_row, config: tl.constexpr
):  # fmt: skip
    """The chosen columns of one row, rising, then -1; and how many they are.

    A row may choose among its first ``possible`` columns; the last LOCAL of these and the first SINK always are.
    Without such numbers they are the blocks of ``k_block`` keys up to the end of the row's ``q_block`` queries, where a
    head has ``rows``.
    """
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, config.BLOCK_C)
    if p_possible is None:
        possible = (((row % rows + 1) * q_block - 1) // k_block + 1).to(tl.int32)
    else:
        possible = tl.load(p_possible + row)
    possible = tl.minimum(possible, columns)
    inside = o_c < possible
    always = inside & ((o_c >= possible - config.LOCAL) | (o_c < config.SINK))
    scores = tl.load(p_scores + row * s_row + o_c, mask=inside & ~always, other=float("-inf"))
    count = possible * 0 + config.TOPK
    if config.WITHIN:
        count = tl.maximum(count - tl.sum(always.to(tl.int32), 0), 0)
    chosen = always | best(in_order(scores), count)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    total = tl.sum(chosen.to(tl.int32), 0)
    p_row = p_indices + row * config.WIDTH
    # Where more are always chosen than there is room for, the last of them are left out.
    tl.store(p_row + place, o_c, mask=chosen & (place < config.WIDTH))
    o_w = tl.arange(0, config.BLOCK_W)
    tl.store(p_row + o_w, o_w * 0 - 1, mask=(o_w >= total) & (o_w < config.WIDTH))
    tl.store(p_counts + row, tl.minimum(total, config.WIDTH))


@triton.jit(do_not_specialize=["rows"])
def pack(p_indices, p_counts, p_crow, p_col, rows, config: tl.constexpr):
    """The lists of some rows of a head, behind those of the rows before them; -1 behind all of the head's."""
    WIDTH: tl.constexpr = config.WIDTH
    programs = (rows + config.BLOCK_R - 1) // config.BLOCK_R
    i_h = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * config.BLOCK_R
    p_counts += i_h * rows
    p_crow += i_h * (rows + 1)
    # Each program adds up all rows: there are few, and no program waits for another.
    before = first * 0
    total = first * 0
    for i in range(0, rows, config.TOGETHER):
        o_i = i + tl.arange(0, config.TOGETHER)
        counts = tl.load(p_counts + o_i, mask=o_i < rows, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(o_i < first, counts, 0), 0)
    o_r = first + tl.arange(0, config.BLOCK_R)
    o_w = tl.arange(0, config.BLOCK_W)
    counts = tl.load(p_counts + o_r, mask=o_r < rows, other=0)
    end = before + tl.cumsum(counts, 0)
    if first == 0:
        tl.store(p_crow, first)
    tl.store(p_crow + o_r + 1, end, mask=o_r < rows)
    inside = (o_r < rows)[:, None] & (o_w < WIDTH)[None, :]
    place = o_r.to(tl.int64)[:, None] * WIDTH + o_w[None, :]
    listed = inside & (o_w[None, :] < counts[:, None])
    entries = tl.load(p_indices + i_h * rows * WIDTH + place, mask=listed, other=-1)
    p_col += i_h * rows * WIDTH
    tl.store(p_col + (end - counts)[:, None] + o_w[None, :], entries, mask=listed)
    tl.store(p_col + place, entries * 0 - 1, mask=inside & (place >= total))
