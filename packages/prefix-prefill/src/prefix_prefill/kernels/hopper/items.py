"""What a persistent program of the sm_90 kernel works on: pieces of tiles, looked up by one of its warps for all.

    the first consumer  --full-->  every role  --empty-->  the first consumer

The table holds ITEMS pieces; most programs have fewer and fill it once.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from prefix_prefill.kernels.balance import (
    LANES,
    Place,
    costs_of,
    first_place,
    piece_at,
    place_at,
    share_at,
    share_work,
)
from prefix_prefill.kernels.batch import Sequence, keys_of, sequence_at
from prefix_prefill.kernels.hopper.config import ITEMS, Loop, Tile
from prefix_prefill.kernels.merge import write_entry, write_no_entries

# Places of an item's numbers, and of the table's: how many items it holds, and whether more follow.
BEGIN: gl.constexpr = gl.constexpr(0)
Q_LEN: gl.constexpr = gl.constexpr(1)
CONTEXT: gl.constexpr = gl.constexpr(2)
LENGTH: gl.constexpr = gl.constexpr(3)
VALID: gl.constexpr = gl.constexpr(4)
I_TILE: gl.constexpr = gl.constexpr(5)
I_HEAD: gl.constexpr = gl.constexpr(6)
FROM_TILE: gl.constexpr = gl.constexpr(7)
TO_TILE: gl.constexpr = gl.constexpr(8)
PART: gl.constexpr = gl.constexpr(9)
I_N: gl.constexpr = gl.constexpr(10)
FIELDS: gl.constexpr = gl.constexpr(11)
COUNT: gl.constexpr = gl.constexpr(ITEMS * 11)
MORE: gl.constexpr = gl.constexpr(ITEMS * 11 + 1)
BY_SHARE: gl.constexpr = gl.constexpr(ITEMS * 11 + 2)
NUMBERS: gl.constexpr = gl.constexpr(ITEMS * 11 + 3)


class Table(NamedTuple):
    """Items in shared memory, where on the line those after them begin, and the barriers of who fills and reads it."""

    numbers: object
    following: object
    full: object
    empty: object


@gluon.jit
def table_of(readers: gl.constexpr):
    """An empty table, which so many roles read."""
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=readers)
    following = gl.allocate_shared_memory(gl.int64, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Table(numbers, following, full, empty)


@gluon.jit
def put(numbers, i, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers.index(i).store((gl.full([1], 0, gl.int64, layout) + number).to(numbers.dtype))


@gluon.jit
def get(numbers, i, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(numbers.index(i).load(layout), 0)


@gluon.jit
def fill(table, i_round, num_splits, batch, p_entries, C):
    """Look up the next items, once every role has read those before.

    How programs share is computed again in each round: kept, it would take registers from the main loop.
    """
    # Before the first round there is none to wait for.
    mbarrier.wait(table.empty.index(0), (i_round & 1) ^ 1)
    i_program = gl.program_id(0).to(gl.int64)
    o_lane = gl.arange(0, LANES, gl.BlockedLayout([LANES // 128], [32], [4], [0]))
    work = share_work(o_lane, gl.num_programs(0).to(gl.int64), num_splits, batch, C)
    x, end = first_place(i_program, work)
    if i_round > 0:
        x = get(table.following, 0, 4)
    elif C.IN_PARTS:
        write_no_entries(p_entries, i_program, work)
    place = Place(batch.num_sequences * 0 - 1, x * 0, x * 0)
    count = batch.num_sequences * 0
    while (x < end) & (count < ITEMS):
        if x >= place.high:
            place = place_at(x, o_lane, work, batch, C)
        sequence = sequence_at(batch, place.i_n, C)
        costs = costs_of(sequence, batch, C)
        at = x
        if work.line:
            item, x = share_at(x, end, i_program, place, costs, work, C)
        else:
            item, x = piece_at(x, i_program, place, costs, work, C)
        if item.pieces > 0:
            i_tile = item.i_tile.to(gl.int32)
            keys = keys_of(sequence, i_tile, batch.left, batch.right, C)
            tiles = (keys.cached_tiles + keys.new_tiles).to(gl.int64)
            first = count * FIELDS
            part = x * 0 - 1
            if C.IN_PARTS:
                part = write_entry(p_entries, at, i_program, item, sequence, work, C)
            put(table.numbers, first + BEGIN, sequence.begin)
            put(table.numbers, first + Q_LEN, sequence.q_len)
            put(table.numbers, first + CONTEXT, sequence.context)
            put(table.numbers, first + LENGTH, sequence.length)
            put(table.numbers, first + VALID, sequence.valid)
            put(table.numbers, first + I_TILE, i_tile)
            put(table.numbers, first + I_HEAD, item.i_head)
            put(table.numbers, first + FROM_TILE, tiles * item.low // item.parts)
            put(table.numbers, first + TO_TILE, tiles * item.high // item.parts)
            put(table.numbers, first + PART, part)
            put(table.numbers, first + I_N, place.i_n)
            count += 1
    put(table.numbers, COUNT, count)
    put(table.numbers, BY_SHARE, work.line)
    put(table.numbers, MORE, x < end)
    put(table.following, 0, x)
    tl.debug_barrier()
    mbarrier.arrive(table.full.index(0))


@gluon.jit
def items_of(table, i_round, WARPS: gl.constexpr):
    """How many items a round has, and whether another follows; once they are there."""
    mbarrier.wait(table.full.index(0), i_round & 1)
    return get(table.numbers, COUNT, WARPS), get(table.numbers, MORE, WARPS) != 0


@gluon.jit
def done(table):
    """All items of a round have been read."""
    mbarrier.arrive(table.empty.index(0))


@gluon.jit
def tile_of(table, i, C, WARPS: gl.constexpr):
    """Item i of the table."""
    first = i * FIELDS
    i_head = get(table.numbers, first + I_HEAD, WARPS)
    return Tile(
        get(table.numbers, first + BEGIN, WARPS), get(table.numbers, first + Q_LEN, WARPS),
        get(table.numbers, first + CONTEXT, WARPS), get(table.numbers, first + LENGTH, WARPS),
        get(table.numbers, first + VALID, WARPS) != 0, get(table.numbers, first + I_TILE, WARPS),
        i_head % C.HEADS_KV, i_head // C.HEADS_KV, get(table.numbers, first + FROM_TILE, WARPS),
        get(table.numbers, first + TO_TILE, WARPS), get(table.numbers, first + PART, WARPS),
        get(table.numbers, BY_SHARE, WARPS) != 0, get(table.numbers, first + I_N, WARPS),
    )  # fmt: skip


@gluon.jit
def context_of(table, i, WARPS: gl.constexpr):
    """The older tokens of item i's sequence."""
    return get(table.numbers, i * FIELDS + CONTEXT, WARPS)


@gluon.jit
def loop_of(tile, window, C):
    """The main loop over a piece's tiles of keys."""
    sequence = Sequence(tile.begin, tile.q_len, tile.context, tile.length, tile.valid)
    keys = keys_of(sequence, tile.i_tile, window.left, window.right, C)
    start = (keys.cached_first + tile.from_tile) * C.BLOCK_N
    first_new = keys.cached_tiles - tile.from_tile
    new_start = tile.context + (keys.new_first - keys.cached_tiles) * C.BLOCK_N
    to_new = new_start - keys.cached_first * C.BLOCK_N
    return Loop(keys.low, keys.cached_high, keys.high, start, tile.to_tile - tile.from_tile, first_new, to_new)
