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


# Columns that are looked at side by side.
LANES: tl.constexpr = tl.constexpr(32)
# The least number that ``in_order`` makes of a finite score.
LOWEST: tl.constexpr = tl.constexpr(-(2**31) + 2**23)


@triton.jit
def in_order(score):
    """A whole number that is ordered as scores are."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of(order):
    """The score that ``in_order`` made a number of."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def total(numbers):
    """The sum of a matrix."""
    return tl.sum(tl.sum(numbers, 0), 0)


@triton.jit
def reaching(scores, order):
    """How many scores are at least that of ``order``."""
    return total((scores >= score_of(order)).to(tl.int32))


@triton.jit
def narrowed(scores, low, left):
    """The largest number from ``low`` on that ``left`` scores or more reach, as ``low`` is, and how many do.

    The first one found that just so many reach will do.
    """
    high = in_order(tl.max(tl.max(scores, 0), 0)) + 1
    reached = reaching(scores, low)
    while (reached > left) & (high - 1 > low):
        # Half way, rounded down, without a sum that could overflow.
        middle = (low & high) + ((low ^ high) >> 1)
        count = reaching(scores, middle)
        enough = count >= left
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle)
    return low, reached


@triton.jit
def best_two(first, second, other_first, other_second):
    """The larger two of two pairs, each of which falls."""
    return tl.maximum(first, other_first), tl.maximum(tl.minimum(first, other_first), tl.maximum(second, other_second))


@triton.jit
def best_of_groups(scores):
    """The best two of each of 64 groups of a row's scores [SLOTS, LANES], or of fewer."""
    SLOTS: tl.constexpr = scores.shape[0]
    PARTS: tl.constexpr = min(2, SLOTS)
    parts = tl.reshape(scores, [PARTS, SLOTS // PARTS, LANES])
    first, second = tl.reduce((parts, tl.full(parts.shape, float("-inf"), tl.float32)), 1, best_two)
    return tl.reshape(tl.join(first, second), [PARTS * LANES, 2])


@triton.jit
def places(chosen):
    """How many columns are chosen before each one, and in all.

    Up to a lane, four slots are counted in a number of 8 bits each.
    """
    SLOTS: tl.constexpr = chosen.shape[0]
    TOGETHER: tl.constexpr = min(4, SLOTS)
    o_shift = (tl.arange(0, TOGETHER) * 8)[None, :, None]
    ones = tl.reshape(chosen.to(tl.int32), [SLOTS // TOGETHER, TOGETHER, LANES])
    upto = (tl.cumsum(tl.sum(ones << o_shift, 1), 1)[:, None, :] >> o_shift) & 255
    each = tl.sum(ones, 2)
    groups = tl.sum(each, 1)
    before = (tl.cumsum(groups, 0) - groups)[:, None] + tl.cumsum(each, 1) - each
    place = tl.reshape(upto - ones + before[:, :, None], [SLOTS, LANES])
    return place, tl.sum(groups, 0)


@triton.jit
def best(scores, count):
    """Which are the ``count`` largest of ``scores`` [SLOTS, LANES], -inf aside: the first of equal ones."""
    left = count
    # These are few to look through, and rarely is one of the best not among them.
    of_groups = best_of_groups(scores)
    # Where there are as many groups as are chosen, none of these is below the best of any group.
    low = tl.maximum(in_order(tl.min(tl.max(of_groups, 1), 0)), LOWEST)
    if reaching(of_groups, low) >= count:
        low, _ = narrowed(of_groups, low, left)
    else:
        low = low * 0 + LOWEST
        left = tl.minimum(count, reaching(scores, low))
    low, reached = narrowed(scores, low, left)
    floor = score_of(low)
    chosen = (scores >= floor) & (left > 0)
    if reached > left:
        above = scores > floor
        equal = scores == floor
        place, _ = places(equal)
        chosen = (above | (equal & (place < left - total(above.to(tl.int32))))) & (left > 0)
    return chosen


@triton.jit
def choose_row(p_scores, p_indices, p_count, possible, SLOTS: tl.constexpr, config: tl.constexpr):
    """``choose`` of a row that may choose among its first SLOTS * LANES columns, or fewer."""
    o_c = tl.arange(0, SLOTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    # Loaded one by one: then a slot's columns are one in each lane, as they are stored.
    o_c = tl.multiple_of(o_c, [1, 1])
    others = (o_c >= config.SINK) & (o_c < possible - config.LOCAL)
    scores = tl.load(p_scores + o_c, mask=others, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores > float("-inf"), scores, float("-inf"))
    always = (o_c < possible) & ~others
    count = possible * 0 + config.TOPK
    if config.WITHIN:
        count = tl.maximum(count - total(always.to(tl.int32)), 0)
    chosen = always | best(scores, count)
    place, listed = places(chosen)
    # Where more are always chosen than there is room for, the last of them are left out.
    tl.store(tl.max_contiguous(p_indices + place, [1, 2]), o_c, mask=chosen & (place < config.WIDTH))
    if listed < config.WIDTH:
        o_w = tl.arange(0, config.BLOCK_W)
        tl.store(p_indices + o_w, o_w * 0 - 1, mask=(o_w >= listed) & (o_w < config.WIDTH))
    tl.store(p_count, tl.minimum(listed, config.WIDTH))


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
    if p_possible is None:
        last = (tl.program_id(0) % rows + 1).to(tl.int64) * q_block - 1
        possible = tl.minimum(last // k_block + 1, columns).to(tl.int32)
    else:
        possible = tl.minimum(tl.load(p_possible + row), columns)
    p_scores += row * s_row
    p_indices += row * config.WIDTH
    p_counts += row
    # Causality leaves half of the rows half of the columns or fewer.
    SLOTS: tl.constexpr = config.BLOCK_C // LANES
    if possible <= config.BLOCK_C // 2:
        choose_row(p_scores, p_indices, p_counts, possible, SLOTS // 2, config)
    else:
        choose_row(p_scores, p_indices, p_counts, possible, SLOTS, config)


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
