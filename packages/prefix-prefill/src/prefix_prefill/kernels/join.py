"""The levels of a cascade joined: a batch whose sequences have the keys of all levels, one level after another.

Each level begins with a tile of keys of its own, so that a page belongs to one level, and what is left of a level's
last tile is masked. A sequence of the joined batch is a run of rows that no level cuts: most often one of the last
level's, else a part of one.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from prefix_prefill.kernels.groups import CONSTANT_FIELDS
from prefix_prefill.kernels.schedule import row_at

# Bounds that are looked at together, and pages that are copied together.
BLOCK: tl.constexpr = tl.constexpr(256)


class JoinConfig(NamedTuple):
    """Compile-time values: levels, keys of a tile, tokens of a page."""

    LEVELS: int
    KEYS: int
    PAGE: int


class Run(NamedTuple):
    """Rows that no level cuts: the first, the end, and how many bounds come before the one that they begin with."""

    begin: object
    end: object
    rank: object


@triton.jit
def run_at(p_bounds, groups, i_bound, begin, rows, C):
    """The run that begins with bound ``i_bound`` of all levels', which is ``begin``; bounds that are equal in order."""
    end = rows
    rank = i_bound * 0
    before = i_bound * 0
    for i in tl.static_range(C.LEVELS):
        count = groups[i] + 1
        for first in range(0, count, BLOCK):
            o_bound = first + tl.arange(0, BLOCK)
            # Past the last one they are as those of no sequence.
            there = o_bound < count
            bound = row_at(p_bounds[i], o_bound, groups[i], rows)
            earlier = (bound < begin) | ((bound == begin) & (before + o_bound < i_bound))
            rank += tl.sum((there & earlier).to(tl.int32), 0)
            end = tl.minimum(end, tl.min(tl.where(there & (bound > begin), bound, rows), 0))
        before += count
    return Run(begin, end, rank)


@triton.jit
def group_at(p_bounds, count, row, rows):
    """The group that a row is in: -1 before the first one, ``count`` after the last."""
    passed = count * 0 - 1
    for first in range(0, count + 1, BLOCK):
        o_bound = first + tl.arange(0, BLOCK)
        bound = row_at(p_bounds, o_bound, count, rows)
        passed += tl.sum(((o_bound <= count) & (bound <= row)).to(tl.int32), 0)
    return passed


@triton.jit
def keys_at(p_bounds, p_lengths, i_group, count, run, capacity, rows, LAST: tl.constexpr):
    """How many keys of a level the rows of a run have, 0 where there is no such group, and whether that can be. On the
    last level, as many less as new tokens come after the run.
    """
    there = (i_group >= 0) & (i_group < count)
    length = tl.load(p_lengths + i_group, mask=there, other=0).to(tl.int64)
    least = length * 0
    after = length * 0
    if LAST:
        begin = row_at(p_bounds, i_group, count, rows)
        end = row_at(p_bounds, i_group + 1, count, rows)
        least = end - begin
        after = tl.maximum(end - run.end, 0)
    valid = there & (length >= least) & (length <= capacity) & (length < 2**31)
    return tl.maximum(tl.where(valid, length - after, 0), 0), valid


@triton.jit
def copy_pages(p_from, p_to, keys, num_blocks, C):
    """The pages of so many keys, and of what is left of their last tile none."""
    pages = (keys + C.PAGE - 1) // C.PAGE
    entries = (keys + C.KEYS - 1) // C.KEYS * (C.KEYS // C.PAGE)
    for first in range(0, entries, BLOCK):
        o_page = first + tl.arange(0, BLOCK)
        block = tl.load(p_from + o_page, mask=o_page < pages, other=-1).to(tl.int64)
        block = tl.where((block >= 0) & (block < num_blocks), block, -1)
        tl.store(p_to + o_page, block.to(tl.int32), mask=o_page < entries)


@triton.jit(
    do_not_specialize=[
        "rows", "num_blocks", "groups_0", "groups_1", "groups_2", "s_table_0", "s_table_1", "s_table_2", "capacity_0",
        "capacity_1", "capacity_2", "s_joined",
    ]
)  # fmt: skip
def join(
    p_tables, p_bounds, p_lengths, p_table, p_cu, p_seqlens,
    rows, num_blocks, groups_0, groups_1, groups_2, s_table_0, s_table_1, s_table_2, capacity_0, capacity_1,
    capacity_2, s_joined, config: tl.constexpr,
):  # fmt: skip
    """A program for each bound of a level: where the run that it begins comes among all, its pages and lengths.

    ``p_seqlens``, of as many rows as there are levels: in the first one how many keys a run has, tiles that are not
    full counted whole; in the others where the keys of each level before the last end.
    """
    C: tl.constexpr = config if CONSTANT_FIELDS else config._replace()
    groups = (groups_0, groups_1, groups_2)
    strides = (s_table_0, s_table_1, s_table_2)
    capacities = (capacity_0, capacity_1, capacity_2)
    i_bound = tl.program_id(0)
    count = tl.num_programs(0)
    begin = tl.zeros((), tl.int64)
    before = i_bound * 0
    for i in tl.static_range(C.LEVELS):
        own = i_bound - before
        here = (own >= 0) & (own <= groups[i])
        bound = row_at(p_bounds[i], tl.where(here, own, 0), groups[i], rows)
        begin = tl.where(here, bound, begin)
        before += groups[i] + 1
    run = run_at(p_bounds, groups, i_bound, begin, rows.to(tl.int64), C)
    tl.store(p_cu + run.rank, begin.to(tl.int32))
    if i_bound == 0:
        tl.store(p_cu + count, rows.to(tl.int32))
    p_row = p_table + run.rank.to(tl.int64) * s_joined
    first = tl.zeros((), tl.int64)
    length = first
    for i in tl.static_range(C.LEVELS):
        i_group = group_at(p_bounds[i], groups[i], begin, rows)
        keys, valid = keys_at(
            p_bounds[i], p_lengths[i], i_group, groups[i], run, capacities[i], rows, i + 1 == C.LEVELS
        )
        p_from = p_tables[i] + i_group.to(tl.int64) * strides[i]
        copy_pages(p_from, p_row + first // C.PAGE, keys, num_blocks, C)
        if i + 1 == C.LEVELS:
            length = tl.where(valid, first + keys, 0)
        else:
            tl.store(p_seqlens + (i + 1) * count + run.rank, (first + keys).to(tl.int32))
        first += (keys + C.KEYS - 1) // C.KEYS * C.KEYS
    tl.store(p_seqlens + run.rank, length.to(tl.int32))
