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
    """What the kernel is compiled for: columns rounded up to a power of two, four rows of lanes or more, entries of a
    row of the result, and whether those that are always chosen count among ``topk``. QUADS: columns of a row are whole
    groups of 4. GROUPS: of columns, as many as are chosen, up to 64. LANES: threads of a program."""

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
# Of so few scores too many the least go one by one.
FEW: tl.constexpr = tl.constexpr(4)


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
def total(which):
    return tl.sum(tl.sum(which.to(tl.int32), 0), 0)


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
        if reached - left <= FEW:
            least = tl.min(tl.min(tl.where(scores >= score_of(low), scores, float("inf")), 0), 0)
            # 0 and -0 are equal, and one number apart.
            low = tl.maximum(low, in_order(least))
            middle = low + 1
        else:
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
def best_of_groups(scores):
    """The best two, in order, of each group of columns, two groups a lane."""
    one, other = tl.split(tl.reshape(scores, [scores.shape[0], scores.shape[1] // 2, 2]))
    first, second = tl.reduce((tl.maximum(one, other), tl.minimum(one, other)), 0, best_two)
    return in_order(first), in_order(second)


@triton.jit
def reaching_best(first, second, order):
    return tl.sum((first >= order).to(tl.int32) + (second >= order).to(tl.int32), 0)


@triton.jit
def least_of(first, second, count, GROUPS: tl.constexpr):
    """Of the best of groups the largest number that ``count`` or more reach, or the least that is finite if fewer do;
    and the largest number plus one."""
    SIZE: tl.constexpr = first.shape[0] // GROUPS
    # Of as many groups as are chosen each has a number that the least of their best does not exceed: from there it is
    # half as many steps as from the least of all. Groups of columns that are not there do not count. Over all lanes the
    # least is one instruction, whose result the compiler knows to be the same in all of them.
    groups = tl.reshape(first, [GROUPS, SIZE])
    groups = tl.reshape(groups * 0 + tl.max(groups, 1)[:, None], first.shape)
    low = tl.min(tl.where(groups >= LOWEST, groups, 2**31 - 1), 0)
    high = tl.max(first, 0) + 1
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
def marked(scores, floor):
    """Which of its scores each lane has that are at least ``floor``, as bits, of each row of lanes four."""
    ROWS: tl.constexpr = scores.shape[0]
    o_bit = tl.arange(0, ROWS)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    marks = tl.reshape(scores >= floor, [ROWS, scores.shape[1] // 4, 4])
    return tl.sum(tl.sum(tl.where(marks, 1 << o_bit, 0), 2), 0)


@triton.jit
def ones_of_fours(bits):
    """How many of each four bits are set, in these."""
    twos = bits - ((bits >> 1) & 0x5555)
    return (twos & 0x3333) + ((twos >> 2) & 0x3333)


@triton.jit
def number_of(bits):
    """How many bits all lanes have."""
    eights = ones_of_fours(bits)
    eights = (eights + (eights >> 4)) & 0x0F0F
    return tl.sum((eights + (eights >> 8)) & 31, 0)


@triton.jit
def best(scores, o_c, count, columns: tl.constexpr, GROUPS: tl.constexpr):
    """The ``count`` largest of ``scores``, -inf aside, the first of equal ones, as ``marked``; and how many."""
    first, second = best_of_groups(scores)
    # These are few to look through, and rarely is one of the best not among them.
    low, high = least_of(first, second, count, GROUPS)
    bits = marked(scores, score_of(low))
    left = count
    reached = number_of(bits)
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
        bits = marked(scores, floor)
    return bits, left


@triton.jit
def places_of(bits, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Where in the list the first of each four bits of a lane belongs: numbers of BITS bits, side by side."""
    each = ones_of_fours(bits)
    if BITS == 16:
        each = each.to(tl.int64)
        each = (each | (each << 24)) & 0x000000FF000000FF
        each = (each | (each << 12)) & 0x000F000F000F000F
    else:
        each = (each | (each << 8)) & 0x00FF00FF
        each = (each | (each << 4)) & 0x0F0F0F0F
    before = tl.cumsum(each, 0) - each
    # Rows of lanes come one after the other.
    of_rows = tl.sum(each, 0)
    up_to_row = of_rows
    if ROWS > 1:
        up_to_row += up_to_row << BITS
    if ROWS > 2:
        up_to_row += up_to_row << (2 * BITS)
    return before + (up_to_row - of_rows)


@triton.jit
def store_marked(p, bits, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Store the columns that are ``marked``, rising: in each turn one of each lane."""
    LANES: tl.constexpr = bits.shape[0]
    place = places_of(bits, ROWS, BITS)
    o_first = tl.arange(0, LANES) * 4
    left = tl.max(bits, 0)
    while left != 0:
        # The exponent of the lowest bit, as a float, is its number.
        number = ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        row = number >> 2
        at = (place >> (row * BITS)).to(tl.int32) & (2**BITS - 1)
        tl.store(p + at, o_first + row * (4 * LANES) + (number & 3), mask=bits != 0)
        place += (place * 0 + 1) << (row * BITS)
        bits = bits & (bits - 1)
        left = tl.max(bits, 0)


@triton.jit
def choose_row(p_scores, p_indices, p_count, possible, COLUMNS: tl.constexpr, config: tl.constexpr):
    """``choose`` of a row that may choose among its first COLUMNS, or fewer."""
    # Rows of lanes, each of which has four columns: in a tile of two dimensions all versions of Triton lay lanes so.
    EACH: tl.constexpr = 4 * config.LANES
    o_c = tl.arange(0, COLUMNS // EACH)[:, None] * EACH + tl.arange(0, EACH)[None, :]
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
    bits, found = best(scores, o_c, count, COLUMNS, config.GROUPS)
    store_marked(p_indices + sink, bits, COLUMNS // EACH, 8 if config.TOPK < 256 else 16)
    before = sink + found
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
        # Past the last column nothing changes, and up to there 32 bits divide.
        last = tl.minimum((tl.program_id(0) + 1).to(tl.int64) * q_block - 1, columns * k_block).to(tl.int32)
        possible = tl.minimum(last // k_block + 1, columns)
    else:
        possible = tl.minimum(tl.load(p_possible + row), columns)
    p_scores += row * s_row
    p_indices += row * config.WIDTH
    p_counts += row
    # Causality leaves a quarter of the rows a quarter of the columns or fewer.
    if possible <= config.BLOCK_C // 4:
        choose_row(p_scores, p_indices, p_counts, possible, config.BLOCK_C // 4, config)
    elif possible <= config.BLOCK_C // 2:
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
