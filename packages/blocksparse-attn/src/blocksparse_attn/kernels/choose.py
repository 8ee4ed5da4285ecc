"""The best columns of a row of scores, exactly, lower ones first among equals."""

from typing import NamedTuple

import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["columns"])
def choose(p_scores, p_possible, p_indices, p_counts, columns, s_row, config: tl.constexpr):
    """The chosen columns of one row, rising, then -1; and how many they are.

    A row may choose among its first ``possible`` columns; the last LOCAL of these and the first SINK always are.
    """
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, config.BLOCK_C)
    possible = tl.minimum(tl.load(p_possible + row), columns)
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
