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
    block_at,
    by_number,
    first_block,
    on_line,
    piece_at,
    place_at,
    place_on_lines,
    round_of,
    share_at,
    share_work,
    tiles_of_piece,
    tiles_of_share,
)
from prefix_prefill.kernels.batch import Sequence, keys_of, sequence_at
from prefix_prefill.kernels.costs import costs_of
from prefix_prefill.kernels.hopper.config import SLOTS, Inside, Loop, Tile
from prefix_prefill.kernels.hopper.joined import is_full, load_end, partial_tiles
from prefix_prefill.kernels.merge import write_count, write_entry, write_no_entry

# Offsets of an item's numbers in its slot. IS_ITEM is 0 behind the last item, and more than 0 in each.
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
SHARED_BY_KEYS: gl.constexpr = gl.constexpr(10)
I_N: gl.constexpr = gl.constexpr(11)
IS_ITEM: gl.constexpr = gl.constexpr(12)
PIECES: gl.constexpr = gl.constexpr(13)
# Of two levels at most.
ENDS: gl.constexpr = gl.constexpr(14)
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
    i_program = gl.program_id(0)
    programs = gl.num_programs(0)
    o_lane = gl.arange(0, LANES, gl.BlockedLayout([LANES // 32], [32], [1], [0]))
    count = batch.num_sequences * 0
    if C.IN_PARTS:
        # The merge may be started as soon as there is room for its programs; it waits for the end of these.
        tl.extra.cuda.gdc_launch_dependents()
        work, block = share_work(o_lane, programs, num_splits, batch, C)
        if C.SHARED:
            count = schedule_pieces(table, p_entries, i_program, o_lane, work, block, batch, C)
        else:
            if work.line:
                count = schedule_shares(table, p_entries, i_program, o_lane, work, batch, C)
            else:
                count = schedule_pieces(table, p_entries, i_program, o_lane, work, block, batch, C)
            write_count(p_entries, i_program, work)
    else:
        work = by_number(programs, num_splits, batch, C)
        block = first_block(o_lane, batch, False)
        count = schedule_pieces(table, p_entries, i_program, o_lane, work, block, batch, C)
    await_readers(table, count)
    put(table, count, gl.zeros([FIELDS], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def schedule_pieces(table, p_entries, i_program, o_lane, work, block, batch, C):
    """Put this program's items where work is shared by pieces; returns how many.

    An item is put before its entry is written: attention waits for the one, nobody yet for the other.
    """
    NOTED: gl.constexpr = C.IN_PARTS and not C.SHARED
    count = batch.num_sequences * 0
    i_round = count
    x = round_of(i_round, i_program, work)
    while x < work.most:
        block = block_at(x, block, o_lane, work, batch, False, C)
        if x < block.high:
            place = place_at(x, block)
            sequence = sequence_at(batch, place.i_n, C)
            item = piece_at(x, place, costs_of(sequence, batch, C), work, C)
            if item.pieces > 0:
                part = item.i_piece
                if not C.SHARED:
                    part = gl.where(item.pieces > 1, part, -1)
                offer(table, count, item, part, place.i_n, sequence, batch, False, C)
                count += 1
            if NOTED:
                write_entry(p_entries, x, item, sequence, work.entries > 0, C)
        elif NOTED:
            if work.entries > 0:
                write_no_entry(p_entries, x)
        i_round += 1
        x = round_of(i_round, i_program, work)
    return count


@gluon.jit
def schedule_shares(table, p_entries, i_program, o_lane, work, batch, C):
    """The same where it is shared by keys."""
    count = batch.num_sequences * 0
    i_line, i_own, i_program = place_on_lines(i_program, work)
    write_no_entry(p_entries, i_program)
    x = i_own * work.share
    end = gl.where(i_own < work.programs // work.lines, x + work.share, x)
    block = first_block(o_lane, batch, True)
    while x < end:
        block = block_at(x, block, o_lane, work, batch, True, C)
        if x < block.high:
            place = place_at(x, block)
            sequence = sequence_at(batch, place.i_n, C)
            item, x = share_at(x, end, i_own, place, costs_of(sequence, batch, C), work, C)
            if item.pieces > 0:
                item = on_line(item, i_line, i_program - i_own, work)
                own = gl.where(item.i_piece == 0, 2 * i_program + 1, 2 * i_program)
                # First, as numbers of a share would take registers until later.
                write_entry(p_entries, i_program, item, sequence, False, C)
                part = gl.where(item.pieces > 1, own, -1)
                offer(table, count, item, part, place.i_n, sequence, batch, True, C)
                count += 1
        else:
            x = end
    return count


@gluon.jit
def offer(table, count, item, part, i_n, sequence, batch, BY_SHARE: gl.constexpr, C):
    """Put an item into the next slot, once that is empty."""
    fields = fields_of(item, part, i_n, sequence, batch, BY_SHARE, C)
    await_readers(table, count)
    put(table, count, fields)


@gluon.jit
def await_readers(table, i):
    """Wait until every role has read what is in the slot of item i. The first items find slots that nobody read."""
    mbarrier.wait(table.empty.index(i % SLOTS), (i // SLOTS & 1) ^ 1)


@gluon.jit
def fields_of(item, part, i_n, sequence, batch, BY_SHARE: gl.constexpr, C):
    """The numbers of an item, in one store's vector."""
    i_tile = item.i_tile.to(gl.int32)
    keys = keys_of(sequence, i_tile, batch.left, batch.right, C)
    count = keys.cached_tiles + keys.new_tiles
    if BY_SHARE:
        from_tile, to_tile = tiles_of_share(count, item)
    else:
        from_tile, to_tile = tiles_of_piece(count, item)
    fields = gl.full([FIELDS], 1, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    for level in gl.static_range(C.JOINED):
        fields = with_field(fields, ENDS + level, load_end(batch, i_n, level))
    fields = with_field(fields, BEGIN, sequence.begin)
    fields = with_field(fields, Q_LEN, sequence.q_len)
    fields = with_field(fields, CONTEXT, sequence.context)
    fields = with_field(fields, LENGTH, sequence.length)
    fields = with_field(fields, VALID, sequence.valid)
    fields = with_field(fields, I_TILE, i_tile)
    fields = with_field(fields, I_HEAD, item.i_head)
    fields = with_field(fields, FROM_TILE, from_tile)
    fields = with_field(fields, TO_TILE, to_tile)
    fields = with_field(fields, PART, part)
    fields = with_field(fields, SHARED_BY_KEYS, part * 0 + BY_SHARE)
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
    ends = ()
    for level in gl.static_range(C.JOINED):
        ends = ends + (get(table.numbers, first + ENDS + level, WARPS),)
    return Tile(
        get(table.numbers, first + BEGIN, WARPS), get(table.numbers, first + Q_LEN, WARPS),
        get(table.numbers, first + CONTEXT, WARPS), get(table.numbers, first + LENGTH, WARPS),
        get(table.numbers, first + VALID, WARPS) != 0, get(table.numbers, first + I_TILE, WARPS),
        i_head % C.HEADS_KV, i_head // C.HEADS_KV, get(table.numbers, first + FROM_TILE, WARPS),
        get(table.numbers, first + TO_TILE, WARPS), get(table.numbers, first + PART, WARPS),
        get(table.numbers, first + SHARED_BY_KEYS, WARPS) != 0, get(table.numbers, first + I_N, WARPS), ends,
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
    count = tile.to_tile - tile.from_tile
    return Loop(keys.low, keys.cached_high, keys.high, start, count, first_new, to_new, tile.ends)


@gluon.jit
def inside_of(loop, all_low, all_high, C):
    """The tiles that all rows see whole, where these all see the keys from ``all_low`` to before ``all_high``."""
    cut = (gl.minimum(all_high, loop.cached_high) - loop.start) // C.BLOCK_N
    low = cut * 0
    high = cut
    if C.HAS_LEFT:
        low = (all_low - loop.start + C.BLOCK_N - 1) // C.BLOCK_N
    if C.NEW_KV:
        start = loop.start + loop.to_new
        high = (gl.minimum(all_high, loop.high) - start) // C.BLOCK_N
        if C.HAS_LEFT:
            # New keys begin before the last tile of cached ones ends: only keys tell whether rows see these whole.
            new_low = (all_low - start + C.BLOCK_N - 1) // C.BLOCK_N
            before_new = all_low < start + loop.first_new * C.BLOCK_N
            low = gl.where(before_new, low, gl.maximum(new_low, loop.first_new))
    return Inside(low, cut, high, partial_tiles(loop, C))


@gluon.jit
def is_inside(i, inside, loop, C):
    """Whether all rows see the whole of tile i."""
    whole = i < inside.high
    if C.NEW_KV:
        whole = whole & ((i < inside.cut) | (i >= loop.first_new))
    if C.HAS_LEFT:
        whole = whole & (i >= inside.low)
    if C.JOINED:
        whole = whole & is_full(i, inside.partial, C)
    return whole
