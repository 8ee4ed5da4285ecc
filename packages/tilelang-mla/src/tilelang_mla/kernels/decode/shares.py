"""How programs share a batch that nobody has cut: each finds on the device, from the lengths, what is its own.

Sequences lie on a line, each as long as its blocks of keys and OVERHEAD. The programs of a tile of rows take equal
shares of the line, so that lengths may be as unlike as they like, and a share cuts at most two sequences (stream-K,
arXiv 2301.03598). What share k has of sequence b is partial result ``b + k``, a number that no other has: along the
line one of the two always rises. So no program counts more than the sums of lengths.
"""

from typing import Any

from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.decode.groups import SHARED, write_work
from tilelang_mla.kernels.decode.schedule import OF_PRODUCER, capacity_of, length_of, places_taken

# Threads that add up lengths, at most, and how many of their sums one adds up.
_LANES, _TOGETHER = 64, 8
# What a sequence costs beside its blocks, in blocks: its beginning and end.
_OVERHEAD = 1
# Positions on the line stay below 2^31: a sequence that is longer than its part of so many counts as that.
_LINE = 2**30
# Rows of partial results that are written and read again by all programs together in the time of a block.
_MERGED_ROWS = 1024
# What is known of a program's share: its first and last sequence, where the first begins on the line, and its size.
_FIRST, _LAST, _LOW, _SIZE = 0, 1, 2, 3


def lanes_of(S: Any) -> int:
    """Threads that add up lengths: their sums lie where rows of a block's keys are told of later."""
    return min(_LANES, S.block_n)


@macro
def extent_of(T, S, inputs, i_b):
    """A sequence's keys, none if their number cannot be; their blocks; and how long it is on the line."""
    batch = inputs.block_table.shape[0]
    capacity = capacity_of(T, inputs)
    length = T.alloc_var(T.int32, init=length_of(T, inputs, i_b))
    if length < 0 or T.cast(length, T.int64) > capacity:
        length = 0
    blocks = T.alloc_var(T.int32, init=T.truncdiv(length, S.block_n))
    if length > blocks * S.block_n:
        blocks = blocks + 1
    # Who has no keys has a part too, which writes zeros.
    extent = T.alloc_var(T.int32, init=T.max(T.min(blocks, T.truncdiv(_LINE, batch)), 1) + _OVERHEAD)
    return length, blocks, extent


@macro
def find_share(T, S, launch, inputs, memory, thread, serial):
    """Write down a program's share. All threads take part; of the text in C, which has one, each lane in turn."""
    lanes = lanes_of(S)
    for lane in T.serial(lanes if serial else 1):
        add_lengths(T, S, inputs, memory, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes // _TOGETHER if serial else 1):
        add_sums(T, S, memory, lane if serial else thread)
    T.sync_threads()
    for lane in T.serial(lanes if serial else 1):
        look_for_share(T, S, launch, inputs, memory, lane if serial else thread)
    T.sync_threads()


@macro
def add_lengths(T, S, inputs, memory, lane):
    """A lane's sum of sequences that lie side by side."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        each = T.alloc_var(T.int32, init=T.truncdiv(batch + (lanes_of(S) - 1), lanes_of(S)))
        own = T.alloc_var(T.int32, init=0)
        for i in T.serial(each):
            if lane * each + i < batch:
                length, blocks, extent = extent_of(T, S, inputs, lane * each + i)
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
def look_for_share(T, S, launch, inputs, memory, lane):
    """Whose sequences hold the beginning or the end of the share notes which they are."""
    batch = inputs.block_table.shape[0]
    if lane < lanes_of(S):
        total = T.alloc_var(T.int32, init=0)
        low = T.alloc_var(T.int32, init=0)
        for i in T.serial(lanes_of(S) // _TOGETHER):
            if i < T.truncdiv(lane, _TOGETHER):
                low = low + memory.at_row[0, i]
            total = total + memory.at_row[0, i]
        for i in T.serial(T.truncmod(lane, _TOGETHER)):
            low = low + memory.at_page[0, T.truncdiv(lane, _TOGETHER) * _TOGETHER + i]
        size = size_of_share(T, S, launch, inputs, total)
        begin = T.alloc_var(T.int32, init=T.truncdiv(launch.i_program, launch.row_tiles) * size)
        last = T.alloc_var(T.int32, init=T.min(begin + size, total) - 1)
        if lane == 0:
            memory.share[_SIZE] = size
        if low <= last and begin < low + memory.at_page[0, lane]:
            each = T.alloc_var(T.int32, init=T.truncdiv(batch + (lanes_of(S) - 1), lanes_of(S)))
            for i in T.serial(each):
                if lane * each + i < batch:
                    length, blocks, extent = extent_of(T, S, inputs, lane * each + i)
                    if low <= begin and begin < low + extent:
                        memory.share[_FIRST] = lane * each + i
                        memory.share[_LOW] = low
                    if low <= last and last < low + extent:
                        memory.share[_LAST] = lane * each + i
                    low = low + extent


@macro
def size_of_share(T, S, launch, inputs, total):
    """How long shares are: all programs have one, unless merging so many costs more than it saves."""
    batch, rows = inputs.q.shape[:2]
    shares = T.alloc_var(T.int32, init=T.truncdiv(launch.num_programs, launch.row_tiles))
    size = T.alloc_var(T.int32, init=T.truncdiv(total + shares - 1, shares))
    least = T.sqrt(T.cast(total, T.float32) * T.cast(rows, T.float32) * T.float32(1 / _MERGED_ROWS))
    size = T.max(size, T.cast(least, T.int32))
    # Sequences of one length, which may be left whole: the most of a share against a share and the merging.
    length, blocks, extent = extent_of(T, S, inputs, 0)
    whole = T.alloc_var(T.int32, init=T.truncdiv(batch + shares - 1, shares) * extent)
    if T.cast(batch, T.int64) * extent == total and whole - size <= T.truncdiv(2 * shares * rows, _MERGED_ROWS):
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
        length, blocks, extent = extent_of(T, S, inputs, i_b)
        i_share = T.alloc_var(T.int32, init=T.truncdiv(launch.i_program, launch.row_tiles))
        tile = T.alloc_var(T.int32, init=launch.i_program - i_share * launch.row_tiles)
        begin = T.alloc_var(T.int32, init=share[_LOW] + _OVERHEAD)
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
