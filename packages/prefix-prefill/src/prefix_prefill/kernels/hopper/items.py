"""What a persistent program of the sm_90 kernel works on: pieces of tiles, looked up by a warp of its own, some ahead.

    schedule  --full-->  every other role  --empty-->  schedule

Consumers, loads and converters would each lose the time that looking up takes; this warp has no other work.
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
    quotient,
    share_at,
    share_work,
)
from prefix_prefill.kernels.batch import Sequence, keys_of, sequence_at
from prefix_prefill.kernels.hopper.config import SLOTS, Loop, Tile
from prefix_prefill.kernels.merge import write_entry, write_no_entries

# Places of an item's numbers in its slot. IS_ITEM is 0 behind the last item, and more than 0 in each.
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
BY_SHARE: gl.constexpr = gl.constexpr(10)
I_N: gl.constexpr = gl.constexpr(11)
IS_ITEM: gl.constexpr = gl.constexpr(12)
PIECES: gl.constexpr = gl.constexpr(13)
# A power of two, so that an item is one store.
FIELDS: gl.constexpr = gl.constexpr(16)


class Table(NamedTuple):
    """Slots for items in shared memory, and their barriers."""

    numbers: object
    full: object
    empty: object


@gluon.jit
def table_of(readers: gl.constexpr):
    """An empty table, which so many roles read."""
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return Table(numbers, full, empty)


@gluon.jit
def put(table, i, fields):
    """Item i for every role to read."""
    slot = i % SLOTS
    slots = table.numbers._reinterpret(gl.int32, [SLOTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slots.index(slot).store(fields)
    tl.debug_barrier()
    mbarrier.arrive(table.full.index(slot))


@gluon.jit
def with_field(fields, i, number):
    """The fields with number i of them."""
    o_field = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.where(o_field == i, number.to(gl.int32), fields)


@gluon.jit
def get(numbers, i, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(numbers.index(i).load(layout), 0)


@gluon.jit
def schedule(table, num_splits, batch, p_entries, C):
    """The scheduler's warp: put every item of this program into the next slot that is empty, then that there are no
    more.
    """
    i_program = gl.program_id(0).to(gl.int64)
    o_lane = gl.arange(0, LANES, gl.BlockedLayout([LANES // 32], [32], [1], [0]))
    if C.IN_PARTS:
        # The merge may be started as soon as there is room for its programs; it waits for the end of these.
        tl.extra.cuda.gdc_launch_dependents()
    work = share_work(o_lane, gl.num_programs(0).to(gl.int64), num_splits, batch, C)
    x, end = first_place(i_program, work)
    if C.IN_PARTS and not C.SHARED:
        write_no_entries(p_entries, i_program, work)
    place = Place(batch.num_sequences * 0 - 1, x * 0, x * 0)
    count = batch.num_sequences * 0
    while x < end:
        if x >= place.high:
            place = place_at(x, place, o_lane, work, batch, C)
        sequence = sequence_at(batch, place.i_n, C)
        costs = costs_of(sequence, batch, C)
        at = x
        if work.line:
            item, x = share_at(x, end, i_program, place, costs, work, C)
        else:
            item, x = piece_at(x, i_program, place, costs, work, C)
        if item.pieces > 0:
            part = x * 0 - 1
            if C.SHARED:
                part = item.i_piece
            elif C.IN_PARTS:
                part = write_entry(p_entries, at, i_program, item, sequence, work, C)
            fields = fields_of(item, part, place.i_n, sequence, work, batch, C)
            await_readers(table, count)
            put(table, count, fields)
            count += 1
    await_readers(table, count)
    put(table, count, gl.zeros([FIELDS], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def await_readers(table, i):
    """Wait until every role has read what is in the slot of item i. The first items find slots that nobody read."""
    mbarrier.wait(table.empty.index(i % SLOTS), (i // SLOTS & 1) ^ 1)


@gluon.jit
def fields_of(item, part, i_n, sequence, work, batch, C):
    """The numbers of an item, in one store's vector."""
    i_tile = item.i_tile.to(gl.int32)
    keys = keys_of(sequence, i_tile, batch.left, batch.right, C)
    tiles = (keys.cached_tiles + keys.new_tiles).to(gl.int64)
    fields = gl.full([FIELDS], 1, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    fields = with_field(fields, BEGIN, sequence.begin)
    fields = with_field(fields, Q_LEN, sequence.q_len)
    fields = with_field(fields, CONTEXT, sequence.context)
    fields = with_field(fields, LENGTH, sequence.length)
    fields = with_field(fields, VALID, sequence.valid)
    fields = with_field(fields, I_TILE, i_tile)
    fields = with_field(fields, I_HEAD, item.i_head)
    fields = with_field(fields, FROM_TILE, quotient(tiles * item.low, item.parts))
    fields = with_field(fields, TO_TILE, quotient(tiles * item.high, item.parts))
    fields = with_field(fields, PART, part)
    fields = with_field(fields, BY_SHARE, work.line)
    fields = with_field(fields, I_N, i_n)
    return with_field(fields, PIECES, gl.where(item.i_piece == 0, item.pieces, 0))


@gluon.jit
def has_item(table, i, WARPS: gl.constexpr):
    """Whether there is an item i; once that is known."""
    slot = i % SLOTS
    mbarrier.wait(table.full.index(slot), i // SLOTS & 1)
    return get(table.numbers, slot * FIELDS + IS_ITEM, WARPS) != 0


@gluon.jit
def done(table, i):
    """Nothing more is read of item i."""
    tl.debug_barrier()
    mbarrier.arrive(table.empty.index(i % SLOTS))


@gluon.jit
def tile_of(table, i, C, WARPS: gl.constexpr):
    """Item i of the table."""
    first = i % SLOTS * FIELDS
    i_head = get(table.numbers, first + I_HEAD, WARPS)
    return Tile(
        get(table.numbers, first + BEGIN, WARPS), get(table.numbers, first + Q_LEN, WARPS),
        get(table.numbers, first + CONTEXT, WARPS), get(table.numbers, first + LENGTH, WARPS),
        get(table.numbers, first + VALID, WARPS) != 0, get(table.numbers, first + I_TILE, WARPS),
        i_head % C.HEADS_KV, i_head // C.HEADS_KV, get(table.numbers, first + FROM_TILE, WARPS),
        get(table.numbers, first + TO_TILE, WARPS), get(table.numbers, first + PART, WARPS),
        get(table.numbers, first + BY_SHARE, WARPS) != 0, get(table.numbers, first + I_N, WARPS),
    )  # fmt: skip


@gluon.jit
def context_of(table, i, WARPS: gl.constexpr):
    """The older tokens of item i's sequence."""
    return get(table.numbers, i % SLOTS * FIELDS + CONTEXT, WARPS)


@gluon.jit
def pieces_if_first(table, i, WARPS: gl.constexpr):
    """In how many pieces the tile of item i is cut if the item is the first of them, else 0."""
    return get(table.numbers, i % SLOTS * FIELDS + PIECES, WARPS)


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
