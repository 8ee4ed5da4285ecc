"""How programs share a batch that nobody has cut: each finds on the device, from the lengths, what is its own.

Sequences lie on a line, each as long as its blocks of keys and what it costs beside them. The programs of a tile of
rows take equal shares of the line, so that lengths may be as unlike as they like, and a share cuts at most two
sequences (stream-K, arXiv 2301.03598). What share k has of sequence b is partial result ``b + k``, a number that no
other has: along the line one of the two always rises. So no program counts more than the sums of lengths. Of short
sequences, which are whole, programs may only look which are long.
"""

from typing import Any

from tilelang_mla.kernels.common import WARP, macro
from tilelang_mla.kernels.decode.by_length import MOST_LONG, MOST_SORTED, TURNS_SORTED, take_by_length, turns_by_length
from tilelang_mla.kernels.decode.extents import (
    CUTS,
    END,
    FIRST,
    LAST,
    LEAST,
    LIMIT,
    LISTED,
    LONGEST,
    LOW,
    MOST,
    MOST_EXTENT,
    NUMBER,
    SIZE,
    SUMS,
    TILE,
    TOGETHER,
    TOP,
    TURNS,
    extent_of,
    overhead_of,
)
from tilelang_mla.kernels.decode.groups import SHARED, TAKEN, write_work
from tilelang_mla.kernels.decode.schedule import OF_PRODUCER, length_of, place_of, places_taken

# Threads that add up lengths, at most.
_LANES = 64
# Positions on the line stay below 2^31: a sequence that is longer than its part of so many counts as that.
_LINE = 2**30
# Rows of partial results that are written and read again by all programs together in the time of a block.
_MERGED_ROWS = 1024
# What cutting takes beside merging, in blocks, of sequences of one length two more; which part of a share programs may
# be idle for a block of merging; and how much longer than a share and a half none may be that is left whole.
_CUTTING, _IDLE, _FAR = 2, 32, 10
# Sequences, rows and blocks of a share, at least, of which few long ones are cut and the others whole.
_FEWEST, _CUT_ROWS, _FEWEST_BLOCKS = 32, 32, 8
# Blocks of an equal part, at least.
_LEAST_EVEN = 3


def lanes_of(S: Any) -> int:
    """Threads that add up lengths: their sums lie where rows of a block's keys are told of later."""
    return min(_LANES, S.block_n)


@macro
def find_share(T, S, launch, inputs, memory, thread, serial):
    """Write down a program's share. All threads take part; of the text in C, which has one, each lane in turn."""
    lanes, batch = lanes_of(S), inputs.block_table.shape[0]
    most = T.alloc_var(T.int32, init=T.truncdiv(_LINE, batch))
    each = T.alloc_var(T.int32, init=T.truncdiv(batch + (lanes - 1), lanes))
    for lane in T.serial(lanes if serial else 1):
        add_lengths(T, S, inputs, memory, most, each, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes // TOGETHER if serial else 1):
        add_sums(T, S, memory, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes if serial else 1):
        look_for_share(T, S, launch, inputs, memory, most, each, lane if serial else thread, serial)
    T.sync_threads()
    if S.ahead:
        if memory.share[LIMIT] > 0:
            take_by_length(T, S, launch, inputs, memory, thread, serial)


@macro
def add_lengths(T, S, inputs, memory, most, each, lane):
    """A lane's sum of sequences that lie side by side."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        own = T.alloc_var(T.int32, init=0)
        if S.ahead:
            longest = T.alloc_var(T.int32, init=0)
        for i in T.unroll(T.min(each, batch - lane * each), unroll_factor=4):
            length, blocks, extent = extent_of(T, S, inputs, lane * each + i, most, 1)
            own = own + extent
            if S.ahead:
                longest = T.max(longest, extent)
        memory.at_page[0, lane] = own
        if S.ahead:
            memory.at_row[0, lane] = longest


@macro
def add_sums(T, S, memory, lane):
    if lane < lanes_of(S) // TOGETHER:
        together = T.alloc_var(T.int32, init=0)
        if S.ahead:
            longest = T.alloc_var(T.int32, init=0)
        for i in T.serial(TOGETHER):
            together = together + memory.at_page[0, lane * TOGETHER + i]
            if S.ahead:
                longest = T.max(longest, memory.at_row[0, lane * TOGETHER + i])
        if S.ahead:
            memory.share[SUMS + lane] = together
            memory.share[LONGEST + lane] = longest
        else:
            memory.at_row[0, lane] = together
    if lane == 0:
        # Of a program behind the end of the line.
        memory.share[FIRST] = 0
        memory.share[LAST] = -1


@macro
def look_for_share(T, S, launch, inputs, memory, most, each, lane, serial):
    """Whose sequences hold the beginning or the end of the share notes which they are."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        total, before = sums_before(T, S, memory, lane)
        low = T.alloc_var(T.int32, init=before)
        own_most = T.alloc_var(T.int32, init=most)
        size = size_of_share(T, S, launch, inputs, most, total)
        if S.ahead:
            line = (size, total, before)
            size, least, total, own, own_low, limit, cuts, top, even = leave_whole(
                T, S, launch, inputs, memory, each, lane, line, serial
            )
            low = own_low
            if even > 0:
                own_most = least
        number = T.alloc_var(T.int32, init=T.truncdiv(launch.i_program, launch.row_tiles))
        begin = T.alloc_var(T.int32, init=number * size)
        last = T.alloc_var(T.int32, init=T.min(begin + size, total) - 1)
        if lane == 0:
            memory.share[SIZE] = size
            memory.share[MOST] = own_most
            memory.share[NUMBER] = number
            memory.share[TILE] = launch.i_program - number * launch.row_tiles
            if S.ahead:
                memory.share[LEAST] = least
                memory.share[LIMIT] = limit
                memory.share[CUTS] = cuts
                memory.share[TOP] = top
                memory.share[END] = total
                memory.share[LISTED] = 0
        if low <= last and begin < low + (own if S.ahead else memory.at_page[0, lane]):
            # Not unrolled: what runs once takes the time of its instructions' way from memory.
            for i in T.unroll(T.min(each, batch - lane * each), unroll_factor=1):
                length, blocks, extent = extent_of(T, S, inputs, lane * each + i, own_most, least if S.ahead else 1)
                if low <= begin and begin < low + extent:
                    memory.share[FIRST] = lane * each + i
                    memory.share[LOW] = low - overhead_of(S) * even if S.ahead else low
                if low <= last and last < low + extent:
                    memory.share[LAST] = lane * each + i
                low = low + extent


@macro
def take_long_first(T, S, launch, inputs, memory, thread, serial):
    """Write down which sequences a program takes by turns: those of more blocks than one first, of all of them."""
    lanes, batch = lanes_of(S), inputs.block_table.shape[0]
    each = T.alloc_var(T.int32, init=T.truncdiv(batch + (lanes - 1), lanes))
    for lane in T.serial(lanes if serial else 1):
        count_long(T, S, inputs, memory, each, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes // TOGETHER if serial else 1):
        add_sums(T, S, memory, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes if serial else 1):
        look_for_turns(T, S, launch, inputs, memory, each, lane if serial else thread)
    T.sync_threads()


def is_long(T: Any, S: Any, inputs: Any, i_b: Any) -> Any:
    """Whether a sequence has more blocks than one; any that cannot be has as many as it likes."""
    return length_of(T, inputs, i_b) > S.block_n


@macro
def count_long(T, S, inputs, memory, each, lane):
    """A lane's number of long sequences, of those that lie side by side."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        own = T.alloc_var(T.int32, init=0)
        for i in T.unroll(T.min(each, batch - lane * each), unroll_factor=4):
            own = own + T.if_then_else(is_long(T, S, inputs, lane * each + i), 1, 0)
        memory.at_page[0, lane] = own


@macro
def look_for_turns(T, S, launch, inputs, memory, each, lane):
    """Whose sequences have the places of the program's turns notes which they are."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        long, low = sums_before(T, S, memory, lane)
        own = T.alloc_var(T.int32, init=T.max(T.min(each, batch - lane * each), 0))
        own_long = T.alloc_var(T.int32, init=memory.at_page[0, lane])
        short = T.alloc_var(T.int32, init=long + lane * each - low)
        turns = places_taken(T, launch, inputs)
        for turn in T.unroll(turns, unroll_factor=1):
            place = T.alloc_var(T.int32, init=T.truncdiv(place_of(T, launch, turn), launch.row_tiles))
            # Of the lane's long or short ones, which it is.
            which = T.alloc_var(T.int32, init=place - T.if_then_else(place < long, low, short))
            if which >= 0 and which < T.if_then_else(place < long, own_long, own - own_long):
                for i in T.unroll(own, unroll_factor=1):
                    alike = T.alloc_var(T.int32, init=0)
                    if is_long(T, S, inputs, lane * each + i) == (place < long):
                        alike = 1
                    if alike == 1 and which == 0:
                        memory.share[TAKEN + turn] = lane * each + i
                    which = which - alike


def sum_of(S: Any, memory: Any, i: Any) -> Any:
    """The sum of eight lanes."""
    return memory.share[SUMS + i] if S.ahead else memory.at_row[0, i]


@macro
def sums_before(T, S, memory, lane):
    """The sum of all lanes, and of those before one."""
    total = T.alloc_var(T.int32, init=0)
    low = T.alloc_var(T.int32, init=0)
    for i in T.serial(lanes_of(S) // TOGETHER):
        if i < T.truncdiv(lane, TOGETHER):
            low = low + sum_of(S, memory, i)
        total = total + sum_of(S, memory, i)
    for i in T.unroll(T.truncmod(lane, TOGETHER), unroll_factor=1):
        low = low + memory.at_page[0, T.truncdiv(lane, TOGETHER) * TOGETHER + i]
    return total, low


@macro
def size_of_share(T, S, launch, inputs, most, total):
    """How long shares are: all programs have one, unless merging so many costs more than it saves."""
    batch, rows = inputs.q.shape[:2]
    shares = T.alloc_var(T.int32, init=T.truncdiv(launch.num_programs, launch.row_tiles))
    size = T.alloc_var(T.int32, init=T.truncdiv(total + shares - 1, shares))
    least = T.sqrt(T.cast(total, T.float32) * T.cast(rows, T.float32) * T.float32(1 / _MERGED_ROWS))
    size = T.max(size, T.cast(least, T.int32))
    if not S.ahead:
        # Sequences of one length, which may be left whole: the most of a share against a share and the merging.
        length, blocks, extent = extent_of(T, S, inputs, 0, most, 1)
        if T.cast(batch, T.int64) * extent == total:
            whole = T.alloc_var(T.int32, init=T.truncdiv(batch + shares - 1, shares) * extent)
            if whole - size <= T.truncdiv(2 * shares * rows, _MERGED_ROWS):
                size = whole
    return size


@macro
def leave_whole(T, S, launch, inputs, memory, each, lane, line, serial):
    """The size of a share where sequences may be left whole, the most that one takes against a share and the merging:
    then each counts as the longest, so that shares begin where sequences do. Else what ``line`` has, of cut ones.

    With it the least blocks that a sequence counts for, the end of the line, the lane's part of it, and its beginning;
    and how long shares of whole sequences may be that are sorted by their lengths first, 0 if that cannot be. As 163
    shapes had it that were timed cut and whole (H200, variants.jsonl).
    """
    batch, rows = inputs.q.shape[:2]
    size = T.alloc_var(T.int32, init=line[0])
    least = T.alloc_var(T.int32, init=1)
    end = T.alloc_var(T.int32, init=line[1])
    own = T.alloc_var(T.int32, init=memory.at_page[0, lane])
    low = T.alloc_var(T.int32, init=line[2])
    limit = T.alloc_var(T.int32, init=0)
    longest = T.alloc_var(T.int32, init=0)
    for i in T.serial(lanes_of(S) // TOGETHER):
        longest = T.max(longest, memory.share[LONGEST + i])
    cuts = T.alloc_var(T.int32, init=0)
    top = T.alloc_var(T.int32, init=longest)
    # No rule below would have it whole: seen soon, as few short sequences wait for it.
    if longest <= size + T.truncdiv(size, 2) + _FAR:
        shares = T.alloc_var(T.int32, init=T.truncdiv(launch.num_programs, launch.row_tiles))
        turns = T.alloc_var(T.int32, init=T.truncdiv(batch + shares - 1, shares))
        # What all partial results take, in blocks; and how much longer than others a share may be where programs that
        # have nothing to do leave the memory's speed to those, as keys are read once.
        merging = T.alloc_var(T.int32, init=T.min(T.truncdiv(end + size - 1, size), shares) * rows)
        merging = T.truncdiv(merging, _MERGED_ROWS)
        idle = T.alloc_var(T.int32, init=T.min(size, 2**20) * T.if_then_else(launch.row_tiles == 1, merging, 1))
        idle = T.truncdiv(idle, _IDLE)
        alike = T.alloc_var(T.int32, init=0)
        if batch * longest == end:
            alike = 1
        most_sorted = T.alloc_var(T.int32, init=T.if_then_else(merging >= 4, MOST_SORTED, 256))
        if merging >= 2 and turns > 1 and turns <= TURNS_SORTED and batch <= most_sorted:
            limit = size + merging + T.truncdiv(merging, 2) - 2 + idle
        of_whole = T.alloc_var(T.int32, init=size + _CUTTING + T.truncdiv(merging + 1 - alike, 2) + 2 * alike + idle)
        if T.cast(turns, T.int64) * longest <= of_whole and (alike == 1 or limit == 0):
            size = turns * longest
            least = longest - overhead_of(S)
            end = batch * longest
            own = T.min(each, batch - lane * each) * longest
            low = lane * each * longest
            limit = 0
        if longest > limit:
            limit = 0
    elif batch >= _FEWEST and batch <= MOST_SORTED and longest <= MOST_EXTENT:
        # Of few long ones among short ones the long ones are cut alone.
        short = T.alloc_var(T.int32, init=(end - MOST_LONG * longest) * 4)
        if short <= 3 * batch * size and size >= _FEWEST_BLOCKS and launch.row_tiles == 1 and rows >= _CUT_ROWS:
            short_ones, others = without_long(T, S, memory, batch, each, lane, size, serial)
            if 4 * short_ones <= 3 * others * size and others >= batch - MOST_LONG * each:
                cuts = 1
                limit = size + T.truncdiv(size, 2) + 2
                top = size + overhead_of(S)
    even = T.alloc_var(T.int32, init=0)
    if limit == 0 and least == 1:
        parts, each_part = parts_alike(T, S, launch, inputs, end, size, longest - overhead_of(S))
        if parts > 0:
            # As long as its parts on the line, and its beginning costs nothing there.
            even = 1
            size = each_part
            least = parts * size - overhead_of(S)
            end = batch * parts * size
            own = T.min(each, batch - lane * each) * parts * size
            low = lane * each * parts * size
    return size, least, end, own, low, limit, cuts, top, even


@macro
def without_long(T, S, memory, batch, each, lane, size, serial):
    """How long sequences are in all, and how many, of lanes none of whose is longer than a share.

    Warps find it each for itself, a lane of theirs for two.
    """
    short = T.alloc_var(T.int32, init=0)
    others = T.alloc_var(T.int32, init=0)
    own = T.alloc_var(T.int32, init=0 if serial else T.bitwise_and(lane, WARP - 1))
    for i in T.unroll(lanes_of(S) if serial else lanes_of(S) // WARP, unroll_factor=2):
        if memory.at_row[0, own] <= size + overhead_of(S):
            short = short + memory.at_page[0, own]
            others = others + T.max(T.min(each, batch - own * each), 0)
        own = own + (1 if serial else WARP)
    if not serial:
        for i in T.unroll(5):
            short = short + T.shfl_xor(short, T.shift_left(1, i))
            others = others + T.shfl_xor(others, T.shift_left(1, i))
    return short, others


@macro
def parts_alike(T, S, launch, inputs, total, size, blocks):
    """In how many parts each sequence is cut, and how long they are, where no program has two; 0 if they are too long.

    Who begins a second sequence waits for what it stores of the first, with all others reading.
    """
    batch, rows = inputs.q.shape[:2]
    parts = T.alloc_var(T.int32, init=0)
    even = T.alloc_var(T.int32, init=_LEAST_EVEN)
    shares = T.alloc_var(T.int32, init=T.truncdiv(launch.num_programs, launch.row_tiles))
    merging = T.alloc_var(T.int32, init=T.truncdiv(shares * rows, _MERGED_ROWS))
    idle = T.alloc_var(T.int32, init=T.min(size, 2**20) * T.if_then_else(launch.row_tiles == 1, merging, 1))
    most = T.alloc_var(T.int32, init=size + T.truncdiv(idle, _IDLE))
    if 2 * batch <= shares and T.cast(batch, T.int64) * blocks <= T.cast(shares, T.int64) * most:
        parts = T.truncdiv(shares, batch)
        # Shares are as long as merging lets them, or may be shorter by a beginning.
        even = T.max(even, size - T.if_then_else(size * shares - total >= shares, 0, overhead_of(S)))
        even = T.max(even, T.truncdiv(blocks + parts - 1, parts))
        parts = T.if_then_else(even <= most, T.truncdiv(blocks + even - 1, even), 0)
    return parts, even


@macro
def turns_of(T, S, launch, inputs, memory):
    """How many work items a program has."""
    turns = T.alloc_var(T.int32, init=0)
    if S.known:
        turns = 1
    elif launch.scheduled == SHARED:
        turns = memory.share[LAST] - memory.share[FIRST] + 1
        if S.ahead:
            if memory.share[LIMIT] > 0:
                turns = turns_by_length(T, inputs, memory)
    else:
        turns = places_taken(T, launch, inputs)
    return turns


@macro
def tell_share(T, S, launch, inputs, memory, pieces, slot, turn, thread):
    """Write down the work item that a share has of a sequence, and where the next sequence begins.

    Of each sequence one program notes, for the combine kernel, its first partial result and how many it has. What is
    known of a share stays in shared memory: the producer has no registers to spare.
    """
    if thread == 0:
        share, size = memory.share, memory.share[SIZE]
        i_b = T.alloc_var(T.int32, init=share[FIRST] + turn)
        if S.ahead:
            if share[LISTED] > 0:
                i_b = share[TURNS + turn]
        length, blocks, extent = extent_of(T, S, inputs, i_b, share[MOST], share[LEAST] if S.ahead else 1)
        i_share = T.alloc_var(T.int32, init=share[NUMBER])
        tile = T.alloc_var(T.int32, init=share[TILE])
        begin = T.alloc_var(T.int32, init=share[LOW] + overhead_of(S))
        i_first = T.alloc_var(T.int32, init=T.truncdiv(begin, size))
        i_last = T.alloc_var(T.int32, init=T.truncdiv(share[LOW] + extent - 1, size))
        first = T.alloc_var(T.int32, init=T.max(i_share * size - begin, 0))
        last = T.alloc_var(T.int32, init=T.min((i_share + 1) * size - begin, blocks))
        if S.ahead:
            # Of parts of a sequence that is shorter than others.
            first = T.min(first, blocks)
        own_parts = T.alloc_var(T.int32, init=i_last - i_first + 1)
        if i_share == i_last:
            last = blocks
        if i_share < i_first:
            # The share ends before the sequence's first block.
            own_parts = 0
            last = first
        if S.ahead:
            if share[LIMIT] > 0:
                own_parts = 1
                i_first = i_share
                first = 0
                last = blocks
        write_work(S, memory.told, slot, i_b, own_parts, length, i_b + i_share, tile, first, last)
        if i_share == i_first and tile == 0:
            pieces[2 * i_b] = i_b + i_share
            pieces[2 * i_b + 1] = own_parts
        share[LOW] = share[LOW] + extent
    T.sync_threads(OF_PRODUCER, S.producers)
