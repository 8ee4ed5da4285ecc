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
    whether those that are always chosen count among ``topk``. QUADS: columns of a row are whole groups of 4. GROUPS: of
    columns, as many as are chosen, up to 64. LANES: threads of a program, each of which has columns of its own, one
    behind the other."""

    BLOCK_C: int
    QUADS: bool
    GROUPS: int
    LANES: int
    WIDTH: int
    BLOCK_W: int
    TOPK: int
    LOCAL: int
    SINK: int
    WITHIN: bool


# The least number that ``in_order`` makes of a finite score.
LOWEST: tl.constexpr = tl.constexpr(-(2**31) + 2**23)


@triton.jit
def in_order(score):
    """A whole number that is ordered as scores are, of what is no number as of -inf."""
    bits = tl.maximum(score, float("-inf")).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of(order):
    """The score that ``in_order`` made a number of."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def of_lanes(which):
    """How many of [QUADS, LANES, EACH] are, of each lane."""
    return tl.sum(tl.sum(which.to(tl.int32), 0), 1)


@triton.jit
def total(which):
    return tl.sum(of_lanes(which), 0)


@triton.jit
def reaching(scores, order):
    """How many scores are at least that of ``order``."""
    return total(scores >= score_of(order))


@triton.jit
def half_way(low, high):
    """Rounded down, without a sum that could overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def narrowed(scores, low, high, reached, left):
    """The largest number that ``left`` scores or more reach, and how many; ``reached`` do ``low``, and none ``high``.

    The first one found that just so many reach will do.
    """
    while (reached > left) & (high - 1 > low):
        middle = half_way(low, high)
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
def best_of_lanes(scores):
    """The best two of each half of a lane's columns, in order [LANES, 2]; of a lane that has two, both [LANES, 1]."""
    pairs = tl.reshape(scores, [scores.shape[0], scores.shape[1], scores.shape[2] // 2, 2])
    one, other = tl.split(pairs)
    first, second = tl.reduce((tl.maximum(one, other), tl.minimum(one, other)), 0, best_two)
    return in_order(first), in_order(second)


@triton.jit
def reaching_best(first, second, order):
    return tl.sum(tl.sum((first >= order).to(tl.int32) + (second >= order).to(tl.int32), 1), 0)


@triton.jit
def least_of(first, second, count, GROUPS: tl.constexpr):
    """Of the best of lanes the largest number that ``count`` or more reach, or the least that is finite if fewer do;
    and the largest number plus one."""
    SIZE: tl.constexpr = first.shape[0] * first.shape[1] // GROUPS
    # Of as many groups as are chosen each has a number that the least of their best does not exceed: from there it is
    # half as many steps as from the least of all. Groups of columns that are not there do not count. Over all lanes the
    # least is one instruction, whose result the compiler knows to be the same in all of them.
    groups = tl.reshape(first, [GROUPS, SIZE])
    groups = tl.reshape(groups * 0 + tl.max(groups, 1)[:, None], first.shape)
    low = tl.min(tl.min(tl.where(groups >= LOWEST, groups, 2**31 - 1), 1), 0)
    high = tl.max(tl.max(first, 1), 0) + 1
    top = high
    reached = reaching_best(first, second, low)
    if reached < count:
        low = low * 0 + LOWEST
    else:
        while (reached > count) & (high - 1 > low):
            middle = half_way(low, high)
            found = reaching_best(first, second, middle)
            enough = found >= count
            low = tl.where(enough, middle, low)
            reached = tl.where(enough, found, reached)
            high = tl.where(enough, high, middle)
    return low, top


@triton.jit
def first_of(which, o_c, count, columns: tl.constexpr):
    """Before which column the first ``count`` of those that are lie, of which there are more."""
    low = count * 0
    high = low + columns
    # ``count`` or fewer are before low, more before high.
    while high - 1 > low:
        middle = half_way(low, high)
        few = total(which & (o_c < middle)) <= count
        low = tl.where(few, middle, low)
        high = tl.where(few, high, middle)
    return low


@triton.jit
def marked(scores, floor, o_bit):
    """Which of a lane's scores are at least ``floor``, as bits in the order of its columns, and how many [LANES].

    Of up to 16 columns both are one sum.
    """
    marks = tl.sum(tl.sum(tl.where(scores >= floor, (1 << o_bit) + (1 << 16), 0), 0), 1)
    return marks & 0xFFFF, marks >> 16


@triton.jit
def best(scores, o_c, o_bit, count, columns: tl.constexpr, GROUPS: tl.constexpr):
    """The ``count`` largest of ``scores`` [QUADS, LANES, EACH], -inf aside, the first of equal ones: as ``marked``."""
    first, second = best_of_lanes(scores)
    # These are few to look through, and rarely is one of the best not among them.
    low, high = least_of(first, second, count, GROUPS)
    bits, own = marked(scores, score_of(low), o_bit)
    reached = tl.sum(own, 0)
    if reached != count:
        if reached < count:
            # Beside what is no number the other counts twice.
            low = low * 0 + LOWEST
            reached = reaching(scores, low)
        left = tl.minimum(count, reached)
        low, reached = narrowed(scores, low, high, reached, left)
        floor = score_of(low)
        if reached > left:
            equal = scores == floor
            end = first_of(equal, o_c, left - total(scores > floor), columns)
            scores = tl.where(equal & (o_c >= end), float("-inf"), scores)
        bits, own = marked(scores, floor, o_bit)
    return bits, own


@triton.jit
def store_marked(p, bits, o_first):
    """Store the columns that each lane has marked, counted from its first: in each turn one of each lane."""
    left = tl.max((bits != 0).to(tl.int32), 0)
    while left != 0:
        # The exponent of the lowest bit, as a float, is its number.
        number = ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 255) - 127
        tl.store(p, o_first + number, mask=bits != 0)
        p += 1
        bits = bits & (bits - 1)
        left = tl.max((bits != 0).to(tl.int32), 0)


@triton.jit
def choose_row(p_scores, p_indices, p_count, possible, COLUMNS: tl.constexpr, config: tl.constexpr):
    """``choose`` of a row that may choose among its first COLUMNS, or fewer."""
    LANES: tl.constexpr = config.LANES
    EACH: tl.constexpr = min(4, COLUMNS // LANES)
    QUADS: tl.constexpr = COLUMNS // (LANES * EACH)
    o_first = tl.arange(0, LANES) * (QUADS * EACH)
    o_bit = tl.arange(0, QUADS)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
    o_c = o_first[None, :, None] + o_bit
    # The first and the last are always chosen.
    sink = tl.maximum(tl.minimum(config.SINK, possible), 0)
    local = tl.maximum(tl.minimum(config.LOCAL, possible - sink), 0)
    count = possible * 0 + config.TOPK
    if config.WITHIN:
        count = tl.maximum(count - sink - local, 0)
    end = tl.where(count > 0, possible - local, 0)
    loaded = end
    if config.QUADS:
        # A mask for each column would split the loads.
        loaded = (end + 3) // 4 * 4
    scores = tl.load(p_scores + o_c, mask=o_c < loaded, other=float("-inf")).to(tl.float32)
    others = o_c < end
    if config.SINK:
        others = others & (o_c >= sink)
    scores = tl.where(others, scores, float("-inf"))
    bits, own = best(scores, o_c, o_bit, count, COLUMNS, min(config.GROUPS, LANES * EACH // 2))
    store_marked(p_indices + (sink + tl.cumsum(own, 0) - own), bits, o_first)
    before = sink + tl.sum(own, 0)
    o_w = tl.arange(0, config.BLOCK_W)
    entries = tl.where(o_w < before + local, possible - local - before + o_w, -1)
    entries = tl.where(o_w < sink, o_w, entries)
    tl.store(p_indices + o_w, entries, mask=((o_w < sink) | (o_w >= before)) & (o_w < config.WIDTH))
    tl.store(p_count, before + local)


@triton.jit(do_not_specialize=["columns", "rows", "q_block", "k_block"])
def choose(
    p_scores, p_possible, p_indices, p_counts, columns, rows, q_block, k_block, s_row, config: tl.constexpr
):  # fmt: skip
    """The chosen columns of one row, rising, then -1; and how many they are.

    A row may choose among its first ``possible`` columns; the last LOCAL of these and the first SINK always are.
    Without such numbers they are the blocks of ``k_block`` keys up to the end of the row's ``q_block`` queries, where a
    head has ``rows``.
    """
    row = tl.program_id(1).to(tl.int64) * rows + tl.program_id(0)
    if p_possible is None:
        last = (tl.program_id(0) + 1).to(tl.int64) * q_block - 1
        possible = tl.minimum(last // k_block + 1, columns).to(tl.int32)
    else:
        possible = tl.minimum(tl.load(p_possible + row), columns)
    p_scores += row * s_row
    p_indices += row * config.WIDTH
    p_counts += row
    # Causality leaves half of the rows half of the columns or fewer.
    if possible <= config.BLOCK_C // 2:
        choose_row(p_scores, p_indices, p_counts, possible, config.BLOCK_C // 2, config)
    else:
        choose_row(p_scores, p_indices, p_counts, possible, config.BLOCK_C, config)


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
