"""The tile scheduler of decoding by a plan: which parts a program takes, and what a part is.

The work items of a schedule are (part, tile of rows), heaviest parts first; of a plan without one each sequence has
``num_splits`` parts, in order. For calls without a plan see shares.py.
"""

from typing import Any, NamedTuple

from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.decode.groups import AS_PLANNED, LONG_FIRST, PLANNED, TAKEN, Launch, write_work

# The named barrier of the producer; 0 is that of all threads, and TileLang keeps 1 and 2 for itself.
OF_PRODUCER = 7
# What is found of a part's sequence, in shared memory: its number, its first part, the one behind its last, its length;
# and of pairs of programs how many sequences have the part.
_SEQUENCE, _FIRST, _END, _LENGTH, _OWNERS = 0, 1, 2, 3, 4


class Owner(NamedTuple):
    """A sequence that may own a part: its first part, the one behind its last, and its length."""

    begin: Any
    end: Any
    length: Any


def place_of(T: Any, launch: Launch, turn: Any) -> Any:
    """Snake order: programs take a place each, and turn back, so that none gets the costliest of every turn."""
    i_program, num_programs = launch.i_program, launch.num_programs
    return turn * num_programs + T.if_then_else(turn % 2 == 0, i_program, num_programs - 1 - i_program)


@macro
def places_taken(T, launch, inputs):
    """How many places a program takes."""
    places = T.alloc_var(T.int32, init=launch.num_parts * launch.row_tiles)
    if launch.scheduled == PLANNED:
        last = inputs.first_part[inputs.block_table.shape[0]]
        places = T.min(T.max(last, 0), launch.num_parts) * launch.row_tiles
    turns = T.alloc_var(T.int32, init=T.truncdiv(places, launch.num_programs))
    if place_of(T, launch, turns) < places:
        turns = turns + 1
    return turns


@macro
def part_of(T, S, launch, inputs, memory, turn):
    """The part at a place, and its tile of rows; :func:`find_part` finds that one behind the last is none."""
    place = T.alloc_var(T.int32, init=place_of(T, launch, turn))
    part = T.alloc_var(T.int32, init=T.truncdiv(place, launch.row_tiles))
    tile = T.alloc_var(T.int32, init=place - part * launch.row_tiles)
    if launch.ordered == AS_PLANNED:
        part = inputs.order[part]
    if S.ahead:
        if launch.ordered == LONG_FIRST:
            part = memory.share[TAKEN + turn]
    return part, tile


def length_of(T: Any, inputs: Any, i_b: Any) -> Any:
    """A sequence's keys; where each query token has a number of its own, the last one's, which is the greatest.

    Of a list the entries that count: all, or as many as ``lists`` lists have in common.
    """
    lengths = inputs.seqlens_k
    if inputs.lists is not None:
        i_length = T.truncdiv(i_b, T.max(inputs.lists, 1))
        return T.if_then_else(inputs.lists == 0, inputs.block_table.shape[1], lengths[i_length])
    return lengths[i_b] if len(lengths.shape) == 1 else lengths[i_b, lengths.shape[1] - 1]


def capacity_of(T: Any, inputs: Any) -> Any:
    """The most keys that a sequence may have."""
    columns = T.cast(inputs.block_table.shape[1], T.int64)
    return columns if inputs.lists is not None else columns * inputs.kv.shape[1]


@macro
def owner_of(T, launch, inputs, i_b):
    """The fields of an :class:`Owner`."""
    begin = T.alloc_var(T.int32, init=0)
    end = T.alloc_var(T.int32, init=0)
    length = T.alloc_var(T.int32, init=0)
    if launch.scheduled == PLANNED and i_b < inputs.block_table.shape[0]:
        begin = inputs.first_part[i_b]
        end = inputs.first_part[i_b + 1]
        length = length_of(T, inputs, i_b)
    return begin, end, length


@macro
def note_nothing(S, found):
    found[_SEQUENCE] = -1
    if S.paired:
        found[_OWNERS] = 0


@macro
def note_owner(T, S, found, i_b, begin, end, length):
    found[_SEQUENCE] = i_b
    found[_FIRST] = begin
    found[_END] = end
    found[_LENGTH] = length
    if S.paired:
        T.atomic_add(found[_OWNERS], 1)


@macro
def look_for_owner(T, S, launch, inputs, found, part, own, thread, count):
    """Of the sequences of one of ``count`` threads, that of its number is ``own``."""
    if own.begin <= part and part < own.end:
        note_owner(T, S, found, thread, own.begin, own.end, own.length)
    # Not unrolled: one who copies row by row has no registers to spare.
    for i in T.unroll(T.truncdiv(inputs.block_table.shape[0] - 1, count), unroll_factor=1):
        i_other = (i + 1) * count + thread
        begin, end, length = owner_of(T, launch, inputs, i_other)
        if begin <= part and part < end:
            note_owner(T, S, found, i_other, begin, end, length)


@macro
def find_part(T, S, launch, inputs, memory, slot, part, tile, own, thread, count):
    """Write down the work item of a part, found by ``count`` threads, each of which brings the owner of its number.

    Loads that wait for each other take a microsecond each: whoever finds the sequence has read all there is to know.
    """
    batch = inputs.block_table.shape[0]
    found = memory.found
    # What was found before has been read by all.
    T.sync_threads(OF_PRODUCER, S.producers)
    if thread == 0:
        note_nothing(S, found)
    T.sync_threads(OF_PRODUCER, S.producers)
    if launch.scheduled == PLANNED:
        look_for_owner(T, S, launch, inputs, found, part, own, thread, count)
    else:
        if thread == 0:
            i_own = T.alloc_var(T.int32, init=T.truncdiv(part, launch.num_splits))
            if part >= 0 and i_own < batch:
                note_owner(
                    T, S, found, i_own, i_own * launch.num_splits, (i_own + 1) * launch.num_splits,
                    length_of(T, inputs, i_own),
                )  # fmt: skip
    T.sync_threads(OF_PRODUCER, S.producers)
    if thread == 0:
        tell_part(T, S, launch, inputs, memory, slot, part, tile)
    T.sync_threads(OF_PRODUCER, S.producers)


@macro
def blocks_of(T, S, inputs, sequence):
    """How many keys a sequence has, none if its length is none that it may have, and how many blocks of them."""
    length = T.alloc_var(T.int32, init=length_of(T, inputs, sequence))
    if length < 0 or T.cast(length, T.int64) > capacity_of(T, inputs):
        length = 0
    blocks = T.alloc_var(T.int32, init=T.truncdiv(length, S.block_n))
    if length > blocks * S.block_n:
        blocks = blocks + 1
    return length, blocks


@macro
def tell_own(T, S, launch, inputs, memory, slot, thread):
    """Write down a program's one work item, which each thread knows by the program's number. The Work's fields."""
    if S.joined:
        fields = tell_half(T, S, launch, inputs, memory, slot, thread)
    else:
        fields = tell_even(T, S, launch, inputs, memory, slot, thread)
    return fields


@macro
def tell_even(T, S, launch, inputs, memory, slot, thread):
    """The same of as many parts of each list as ``num_splits``, cut as :func:`tell_part` does."""
    num_parts = T.alloc_var(T.int32, init=launch.num_splits)
    part = T.alloc_var(T.int32, init=T.truncdiv(launch.i_program, launch.row_tiles))
    tile = T.alloc_var(T.int32, init=launch.i_program - part * launch.row_tiles)
    sequence = T.alloc_var(T.int32, init=T.truncdiv(part, num_parts))
    i_share = T.alloc_var(T.int32, init=part - sequence * num_parts)
    length, blocks = blocks_of(T, S, inputs, sequence)
    share = T.alloc_var(T.int32, init=T.truncdiv(blocks, num_parts))
    rest = T.alloc_var(T.int32, init=blocks - share * num_parts)
    first = T.alloc_var(T.int32, init=share * i_share + T.truncdiv(rest * i_share, num_parts))
    last = T.alloc_var(T.int32, init=share * (i_share + 1) + T.truncdiv(rest * (i_share + 1), num_parts))
    if thread == 0:
        write_work(S, memory.told, slot, sequence, num_parts, length, part, tile, first, last)
    first_row = T.alloc_var(T.int32, init=tile * S.rows)
    steps = T.alloc_var(T.int32, init=last - first)
    return sequence, num_parts, length, part, first_row, first, steps


@macro
def tell_half(T, S, launch, inputs, memory, slot, thread):
    """Write down a part of a list of two, which programs side by side join: each knows it at once. Its Work's fields.

    As :func:`tell_part` cuts it.
    """
    sequence = T.alloc_var(T.int32, init=T.truncdiv(launch.i_program, 2))
    length, blocks = blocks_of(T, S, inputs, sequence)
    half = T.alloc_var(T.int32, init=T.truncdiv(blocks, 2))
    first = T.alloc_var(T.int32, init=T.if_then_else(launch.i_program % 2 == 0, 0, half))
    last = T.alloc_var(T.int32, init=T.if_then_else(launch.i_program % 2 == 0, half, blocks))
    if thread == 0:
        write_work(S, memory.told, slot, sequence, 2, length, launch.i_program, 0, first, last)
    num_parts = T.alloc_var(T.int32, init=2)
    first_row = T.alloc_var(T.int32, init=0)
    steps = T.alloc_var(T.int32, init=last - first)
    return sequence, num_parts, length, launch.i_program, first_row, first, steps


@macro
def tell_part(T, S, launch, inputs, memory, slot, part, tile):
    """One thread's: from what was found to a work item, clamped so that bad device values lead out of no tensor."""
    found = memory.found
    capacity = capacity_of(T, inputs)
    # Clamped to the grid, as the merge kernel does, before they are subtracted: far bounds would wrap.
    own_first = T.alloc_var(T.int32, init=T.max(found[_FIRST], 0))
    i_share = T.alloc_var(T.int32, init=part - own_first)
    own_parts = T.alloc_var(T.int32, init=T.min(found[_END], launch.num_parts) - own_first)
    own_length = T.alloc_var(T.int32, init=found[_LENGTH])
    # Of bounds that do not rise two threads may have found something, and either be the last to say so. Programs of a
    # pair, each of which waits for the other's keys, would have unlike numbers of blocks: such a part is nobody's.
    if S.paired:
        if found[_OWNERS] > 1:
            own_parts = 0
    if found[_SEQUENCE] < 0 or part < 0 or part >= launch.num_parts or i_share < 0 or i_share >= own_parts:
        own_parts = 0
    if own_length < 0 or T.cast(own_length, T.int64) > capacity:
        own_length = 0
    first = T.alloc_var(T.int32, init=0)
    last = T.alloc_var(T.int32, init=0)
    if own_parts > 0:
        # blocks * i_share / own_parts, rounded down, without a product of more than 32 bits.
        blocks = T.alloc_var(T.int32, init=T.truncdiv(own_length, S.block_n))
        if own_length > blocks * S.block_n:
            blocks = blocks + 1
        share = T.alloc_var(T.int32, init=T.truncdiv(blocks, own_parts))
        rest = T.alloc_var(T.int32, init=blocks - share * own_parts)
        first = share * i_share + T.truncdiv(rest * i_share, own_parts)
        last = share * (i_share + 1) + T.truncdiv(rest * (i_share + 1), own_parts)
        # Of more parts of a sequence than a plan makes, 46340, the products above may wrap.
        first = T.max(T.min(first, blocks), 0)
        last = T.max(T.min(last, blocks), first)
    write_work(S, memory.told, slot, T.max(found[_SEQUENCE], 0), own_parts, own_length, part, tile, first, last)
