"""How programs share a batch that nobody has cut: each finds on the device, from the lengths, what is its own.

Sequences lie on a line, each as long as its blocks of keys and what it costs beside them. The programs of a tile of
rows take equal shares of the line, so that lengths may be as unlike as they like, and a share cuts at most two
sequences (stream-K, arXiv 2301.03598). What share k has of sequence b is partial result ``b + k``, a number that no
other has: along the line one of the two always rises. So no program counts more than the sums of lengths. Of short
sequences, which are whole, programs may only look which are long.
"""

from typing import Any

from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.decode.groups import SHARED, TAKEN, write_work
from tilelang_mla.kernels.decode.schedule import OF_PRODUCER, capacity_of, length_of, place_of, places_taken

# Threads that add up lengths, at most, and how many of their sums one adds up.
_LANES, _TOGETHER = 64, 8
# Positions on the line stay below 2^31: a sequence that is longer than its part of so many counts as that.
_LINE = 2**30
# Rows of partial results that are written and read again by all programs together in the time of a block.
_MERGED_ROWS = 1024
# What is known of a program's share: its first and last sequence, where the first begins on the line, and its size; the
# most blocks that a sequence counts for; and the number of the share, and of its tile of rows.
_FIRST, _LAST, _LOW, _SIZE, _MOST, _NUMBER, _TILE = range(TAKEN)


def lanes_of(S: Any) -> int:
    """Threads that add up lengths: their sums lie where rows of a block's keys are told of later."""
    return min(_LANES, S.block_n)


def overhead_of(S: Any) -> int:
    """What a sequence costs beside its blocks, in blocks: its beginning and end.

    With two for one short ones beside 100,000 keys take 0.86 to 0.95 of the time at 64 rows and more (H200); others
    were not timed.
    """
    return 2 if S.ahead else 1


def cutting_of(T: Any, S: Any, shares: Any, rows: Any) -> Any:
    """What it takes to cut sequences of one length, in blocks."""
    return T.truncdiv((1 if S.ahead else 2) * shares * rows, _MERGED_ROWS)


@macro
def extent_of(T, S, inputs, i_b, most):
    """A sequence's keys, none if their number cannot be; their blocks; and how long it is on the line.

    most: blocks that it counts for there.
    """
    capacity = capacity_of(T, inputs)
    length = T.alloc_var(T.int32, init=length_of(T, inputs, i_b))
    if length < 0 or T.cast(length, T.int64) > capacity:
        length = 0
    blocks = T.alloc_var(T.int32, init=T.truncdiv(length, S.block_n))
    if length > blocks * S.block_n:
        blocks = blocks + 1
    # Who has no keys has a part too, which writes zeros.
    extent = T.alloc_var(T.int32, init=T.max(T.min(blocks, most), 1) + overhead_of(S))
    return length, blocks, extent


@macro
def find_share(T, S, launch, inputs, memory, thread, serial):
    """Write down a program's share. All threads take part; of the text in C, which has one, each lane in turn."""
    lanes, batch = lanes_of(S), inputs.block_table.shape[0]
    most = T.alloc_var(T.int32, init=T.truncdiv(_LINE, batch))
    each = T.alloc_var(T.int32, init=T.truncdiv(batch + (lanes - 1), lanes))
    for lane in T.serial(lanes if serial else 1):
        add_lengths(T, S, inputs, memory, most, each, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes // _TOGETHER if serial else 1):
        add_sums(T, S, memory, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes if serial else 1):
        look_for_share(T, S, launch, inputs, memory, most, each, lane if serial else thread)
    T.sync_threads()


@macro
def add_lengths(T, S, inputs, memory, most, each, lane):
    """A lane's sum of sequences that lie side by side."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        own = T.alloc_var(T.int32, init=0)
        for i in T.unroll(T.min(each, batch - lane * each), unroll_factor=4):
            length, blocks, extent = extent_of(T, S, inputs, lane * each + i, most)
            own = own + extent
        memory.at_page[0, lane] = own


@macro
def add_sums(T, S, memory, lane):
    if lane < lanes_of(S) // _TOGETHER:
        together = T.alloc_var(T.int32, init=0)
        for i in T.serial(_TOGETHER):
            together = together + memory.at_page[0, lane * _TOGETHER + i]
        memory.at_row[0, lane] = together
    if lane == 0:
        # Of a program behind the end of the line.
        memory.share[_FIRST] = 0
        memory.share[_LAST] = -1


@macro
def look_for_share(T, S, launch, inputs, memory, most, each, lane):
    """Whose sequences hold the beginning or the end of the share notes which they are."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        total, before = sums_before(T, S, memory, lane)
        low = T.alloc_var(T.int32, init=before)
        size = size_of_share(T, S, launch, inputs, most, total)
        number = T.alloc_var(T.int32, init=T.truncdiv(launch.i_program, launch.row_tiles))
        begin = T.alloc_var(T.int32, init=number * size)
        last = T.alloc_var(T.int32, init=T.min(begin + size, total) - 1)
        if lane == 0:
            memory.share[_SIZE] = size
            memory.share[_MOST] = most
            memory.share[_NUMBER] = number
            memory.share[_TILE] = launch.i_program - number * launch.row_tiles
        if low <= last and begin < low + memory.at_page[0, lane]:
            # Not unrolled: what runs once takes the time of its instructions' way from memory.
            for i in T.unroll(T.min(each, batch - lane * each), unroll_factor=1):
                length, blocks, extent = extent_of(T, S, inputs, lane * each + i, most)
                if low <= begin and begin < low + extent:
                    memory.share[_FIRST] = lane * each + i
                    memory.share[_LOW] = low
                if low <= last and last < low + extent:
                    memory.share[_LAST] = lane * each + i
                low = low + extent


@macro
def take_long_first(T, S, launch, inputs, memory, thread, serial):
    """Write down which sequences a program takes by turns: those of more blocks than one first, of all of them."""
    lanes, batch = lanes_of(S), inputs.block_table.shape[0]
    each = T.alloc_var(T.int32, init=T.truncdiv(batch + (lanes - 1), lanes))
    for lane in T.serial(lanes if serial else 1):
        count_long(T, S, inputs, memory, each, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes // _TOGETHER if serial else 1):
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


@macro
def sums_before(T, S, memory, lane):
    """The sum of all lanes, and of those before one."""
    total = T.alloc_var(T.int32, init=0)
    low = T.alloc_var(T.int32, init=0)
    for i in T.serial(lanes_of(S) // _TOGETHER):
        if i < T.truncdiv(lane, _TOGETHER):
            low = low + memory.at_row[0, i]
        total = total + memory.at_row[0, i]
    for i in T.unroll(T.truncmod(lane, _TOGETHER), unroll_factor=1):
        low = low + memory.at_page[0, T.truncdiv(lane, _TOGETHER) * _TOGETHER + i]
    return total, low


@macro
def size_of_share(T, S, launch, inputs, most, total):
    """How long shares are: all programs have one, unless merging so many costs more than it saves."""
    batch, rows = inputs.q.shape[:2]
    shares = T.alloc_var(T.int32, init=T.truncdiv(launch.num_programs, launch.row_tiles))
    size = T.alloc_var(T.int32, init=T.truncdiv(total + shares - 1, shares))
    least = T.sqrt(T.cast(total, T.float32) * T.cast(rows, T.float32) * T.float32(1 / _MERGED_ROWS))
    size = T.max(size, T.cast(least, T.int32))
    # Sequences of one length, which may be left whole: the most of a share against a share and the merging.
    length, blocks, extent = extent_of(T, S, inputs, 0, most)
    if T.cast(batch, T.int64) * extent == total:
        whole = T.alloc_var(T.int32, init=T.truncdiv(batch + shares - 1, shares) * extent)
        if whole - size <= cutting_of(T, S, shares, rows):
            size = whole
    return size


@macro
def turns_of(T, S, launch, inputs, memory):
    """How many work items a program has."""
    turns = T.alloc_var(T.int32, init=0)
    if S.joined:
        turns = 1
    elif launch.scheduled == SHARED:
        turns = memory.share[_LAST] - memory.share[_FIRST] + 1
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
        share, size = memory.share, memory.share[_SIZE]
        i_b = T.alloc_var(T.int32, init=share[_FIRST] + turn)
        length, blocks, extent = extent_of(T, S, inputs, i_b, share[_MOST])
        i_share = T.alloc_var(T.int32, init=share[_NUMBER])
        tile = T.alloc_var(T.int32, init=share[_TILE])
        begin = T.alloc_var(T.int32, init=share[_LOW] + overhead_of(S))
        i_first = T.alloc_var(T.int32, init=T.truncdiv(begin, size))
        i_last = T.alloc_var(T.int32, init=T.truncdiv(share[_LOW] + extent - 1, size))
        first = T.alloc_var(T.int32, init=T.max(i_share * size - begin, 0))
        last = T.alloc_var(T.int32, init=T.min((i_share + 1) * size - begin, blocks))
        own_parts = T.alloc_var(T.int32, init=i_last - i_first + 1)
        if i_share == i_last:
            last = blocks
        if i_share < i_first:
            # The share ends before the sequence's first block.
            own_parts = 0
            last = first
        write_work(S, memory.told, slot, i_b, own_parts, length, i_b + i_share, tile, first, last)
        if i_share == i_first and tile == 0:
            pieces[2 * i_b] = i_b + i_share
            pieces[2 * i_b + 1] = own_parts
        share[_LOW] = share[_LOW] + extent
    T.sync_threads(OF_PRODUCER, S.producers)
