"""Whole sequences by turns, the longest first: how programs sort a batch, each for itself, and all of them alike.

A counting sort by steps of length: sequences have places behind all of greater steps, and those of lower numbers of
their own. What a warp has of a step it knows at once. Few sequences that are longer than a share come first, and are
cut by programs that take no others. What runs once takes the time of its instructions' way from memory, so that this
text is to be short.
"""

from typing import Any

from tilelang_mla.kernels.common import WARP, macro
from tilelang_mla.kernels.decode.extents import (
    CUTS,
    END,
    EXTENTS,
    FIRST,
    LAST,
    LIMIT,
    LISTED,
    LONG,
    LOW,
    MOST_EXTENT,
    NUMBER,
    SIZE,
    TOP,
    TURNS,
    VAIN,
    WHICH,
    WHOLE,
    extent_of,
)

# Sequences that programs sort by their lengths, at most, and threads, which have two; turns that they take them in;
# and long ones that are cut, at most.
MOST_SORTED, _THREADS, TURNS_SORTED, MOST_LONG = 768, 384, 8, 8
# Steps of length, the last of long ones, half as many where threads have two sequences: warps count what they have of
# them in the bytes of words, and a lane adds up two.
_STEPS = 64
COUNTS = MOST_SORTED // WARP * _STEPS // 8
# What a thread keeps of a sequence: its extent, and below that its step, and how many of its warp before it are of the
# same; then its extent, and below that its place.
_PLACES = 2048


@macro
def take_by_length(T, S, launch, inputs, memory, thread, serial):
    """Whole sequences by turns in snake order, the longest first, if no share of them is longer than the limit."""
    batch = inputs.block_table.shape[0]
    share = memory.share
    rounds = T.alloc_var(T.int32, init=T.truncdiv(batch + (_THREADS - 1), _THREADS))
    if serial:
        rounds = batch
    if not serial:
        # One that the compiler does not know: what it makes of the thread's number it keeps for the roles, too, and the
        # loop of scores had to spill one of its own, each block.
        thread = T.shfl_sync(thread, T.bitwise_and(thread, WARP - 1))
    kept = T.alloc_shared((MOST_SORTED,), T.int32) if serial else T.alloc_local((2,), T.int32)
    steps = T.alloc_var(T.int32, init=T.if_then_else(batch <= _THREADS, _STEPS, _STEPS // 2))
    for i in T.serial(COUNTS if serial else 1):
        clear_counts(memory, i if serial else thread)
    if thread == 0:
        share[VAIN] = 0
    T.sync_threads()
    for i in T.unroll(rounds, unroll_factor=1):
        counted = count_one(T, S, inputs, memory, steps, i if serial else i * _THREADS + thread, serial)
        keep(kept, i, counted, serial)
    T.sync_threads()
    for i in T.serial(WARP if serial else 1):
        add_steps(T, memory, batch, steps, WARP - 1 - i if serial else thread, serial)
    T.sync_threads()
    if share[LONG] <= MOST_LONG:
        for i in T.unroll(rounds, unroll_factor=1):
            placed = place_one(T, memory, steps, i if serial else i * _THREADS + thread, kept_of(T, kept, i, serial))
            keep(kept, i, placed, serial)
        T.sync_threads()
        shares = T.alloc_var(T.int32, init=T.truncdiv(launch.num_programs, launch.row_tiles))
        whole, size, end = shares_of_whole(T, memory, shares)
        for i in T.serial(COUNTS if serial else 1):
            clear_counts(memory, i if serial else thread)
        T.sync_threads()
        for i in T.unroll(rounds, unroll_factor=1):
            give_one(T, memory, whole, i if serial else i * _THREADS + thread, kept_of(T, kept, i, serial))
        T.sync_threads()
        for i in T.serial(COUNTS if serial else 1):
            weigh_share(memory, i if serial else thread)
        T.sync_threads()
        if thread == 0:
            note_share(T, memory, whole, size, end)
    else:
        if thread == 0:
            share[LIMIT] = 0
    T.sync_threads()


@macro
def keep(kept, i, what, serial):
    if serial:
        kept[i] = what
    elif i == 0:
        kept[0] = what
    else:
        kept[1] = what


def kept_of(T: Any, kept: Any, i: Any, serial: bool) -> Any:
    return kept[i] if serial else T.if_then_else(i == 0, kept[0], kept[1])


@macro
def clear_counts(memory, i):
    if i < COUNTS:
        memory.counts[i] = 0


def word_of(T: Any, steps: Any, warp: Any, step: Any) -> Any:
    """Where a warp counts its sequences of a step, in one of four bytes."""
    return warp * T.shift_right(steps, 2) + T.shift_right(step, 2)


def count_in(T: Any, memory: Any, steps: Any, warp: Any, step: Any) -> Any:
    """How many of a warp's sequences are of a step."""
    return T.bitwise_and(T.shift_right(memory.counts[word_of(T, steps, warp, step)], 8 * T.bitwise_and(step, 3)), 255)


@macro
def count_one(T, S, inputs, memory, steps, i_b, serial):
    """Count a sequence; its extent, its step, and how many of its warp before it are of the same."""
    top = memory.share[TOP]
    counted = T.alloc_var(T.int32, init=-1)
    step = T.alloc_var(T.int32, init=-1)
    before = T.alloc_var(T.int32, init=0)
    if i_b < inputs.block_table.shape[0]:
        length, blocks, extent = extent_of(T, S, inputs, i_b, MOST_EXTENT, 1)
        step = T.if_then_else(extent <= top, T.truncdiv(extent * (steps - 2), top), steps - 1)
        counted = extent * _PLACES + step * WARP
    if serial:
        before = count_in(T, memory, steps, T.shift_right(i_b, 5), step)
    else:
        lower = T.shift_left(T.uint32(1), T.cast(T.bitwise_and(i_b, WARP - 1), T.uint32)) - T.uint32(1)
        before = T.cast(T.popcount(T.bitwise_and(T.match_any_sync(step), lower)), T.int32)
    if step >= 0:
        T.atomic_add(
            memory.counts[word_of(T, steps, T.shift_right(i_b, 5), step)], T.shift_left(1, 8 * T.bitwise_and(step, 3))
        )
        counted = counted + before
    return counted


@macro
def add_steps(T, memory, batch, steps, lane, serial):
    """Where sequences of a lane's two steps begin, behind those of all that are longer, and how many are long."""
    if lane < WARP:
        count = T.alloc_var(T.int32, init=0)
        lower = T.alloc_var(T.int32, init=0)
        if lane < T.shift_right(steps, 1):
            for warp in T.unroll(T.shift_right(batch + (WARP - 1), 5), unroll_factor=2):
                count = count + count_in(T, memory, steps, warp, 2 * lane + 1)
                lower = lower + count_in(T, memory, steps, warp, 2 * lane)
        total = T.alloc_var(T.int32, init=count + lower)
        if serial:
            if lane + 1 < WARP:
                total = total + memory.at_row[0, lane + 1]
            memory.at_row[0, lane] = total
        else:
            for i in T.unroll(5):
                other = T.alloc_var(T.int32, init=T.shfl_down(total, T.shift_left(1, i)))
                if lane + T.shift_left(1, i) < WARP:
                    total = total + other
        memory.at_page[0, 2 * lane + 1] = total - count - lower
        memory.at_page[0, 2 * lane] = total - lower
        if lane == T.shift_right(steps, 1) - 1:
            memory.share[LONG] = count


@macro
def place_one(T, memory, steps, i_b, counted):
    """A sequence's extent, and its place; which long ones there are, and how long they are."""
    placed = T.alloc_var(T.int32, init=counted)
    if placed >= 0:
        step = T.alloc_var(T.int32, init=T.bitwise_and(T.shift_right(placed, 5), _STEPS - 1))
        extent = T.alloc_var(T.int32, init=T.shift_right(placed, 11))
        place = T.alloc_var(T.int32, init=memory.at_page[0, step] + T.bitwise_and(placed, WARP - 1))
        for warp in T.unroll(T.shift_right(i_b, 5), unroll_factor=2):
            place = place + count_in(T, memory, steps, warp, step)
        placed = extent * _PLACES + place
        if place < memory.share[LONG]:
            memory.share[WHICH + place] = i_b
            memory.share[EXTENTS + place] = extent
    return placed


@macro
def shares_of_whole(T, memory, shares):
    """How many shares have whole sequences, how long the others are, and the end of their line.

    Programs that begin and end one piece of a long sequence have one block less. Of two long ones none has a piece.
    """
    share = memory.share
    whole = T.alloc_var(T.int32, init=shares)
    size = T.alloc_var(T.int32, init=share[SIZE])
    end = T.alloc_var(T.int32, init=0)
    if share[CUTS] > 0:
        for i in T.unroll(share[LONG], unroll_factor=1):
            end = end + share[EXTENTS + i]
        whole = T.min(T.truncdiv(share[END] - end + size, size + 1), shares - 1)
        rest = T.alloc_var(T.int32, init=T.max(shares - whole - share[LONG] + 1, 1))
        size = T.max(T.truncdiv(end + rest - 1, rest), 1)
        end = 0
        for i in T.unroll(share[LONG], unroll_factor=1):
            end = end + T.truncdiv(share[EXTENTS + i] + size - 1, size)
        whole = shares - end
        end = end * size
    return whole, size, end


def place_of_turn(T: Any, shares: Any, number: Any, turn: Any) -> Any:
    """Snake order, as programs take the parts of a plan."""
    return turn * shares + T.if_then_else(turn % 2 == 0, number, shares - 1 - number)


@macro
def give_one(T, memory, whole, i_b, placed):
    """A whole sequence is one of a share's turns, and as long as it is there."""
    share = memory.share
    place = T.alloc_var(T.int32, init=T.bitwise_and(placed, _PLACES - 1) - share[LONG])
    if placed >= 0 and place >= 0:
        turn = T.alloc_var(T.int32, init=T.truncdiv(place, T.max(whole, 1)))
        number = T.alloc_var(T.int32, init=place_of_turn(T, whole, place - turn * whole, turn) - turn * whole)
        if turn < TURNS_SORTED and whole > 0 and number < COUNTS:
            T.atomic_add(memory.counts[number], T.shift_right(placed, 11))
            if number == share[NUMBER]:
                share[TURNS + turn] = i_b
        else:
            share[VAIN] = 1


@macro
def weigh_share(memory, number):
    """Sorting was in vain if a share is too long. Whoever finds so writes the same."""
    if number < COUNTS:
        if memory.counts[number] > memory.share[LIMIT]:
            memory.share[VAIN] = 1


@macro
def note_share(T, memory, whole, size, end):
    """What a program has: whole sequences, or a share of the line of long ones, or of that of all if it was in vain."""
    share = memory.share
    number = T.alloc_var(T.int32, init=share[NUMBER] - whole)
    share[WHOLE] = whole
    share[LISTED] = 1 - share[VAIN]
    if share[VAIN] > 0:
        share[LIMIT] = 0
    elif number >= 0:
        share[LIMIT] = 0
        share[NUMBER] = number
        share[SIZE] = size
        begin = T.alloc_var(T.int32, init=number * size)
        last = T.alloc_var(T.int32, init=T.min(begin + size, end) - 1)
        low = T.alloc_var(T.int32, init=0)
        for i in T.unroll(share[LONG], unroll_factor=1):
            high = T.alloc_var(T.int32, init=low + T.truncdiv(share[EXTENTS + i] + size - 1, size) * size)
            if low <= begin and begin < high:
                share[FIRST] = i
                share[LOW] = low
            if low <= last and last < high:
                share[LAST] = i
            low = high
        for i in T.unroll(share[LAST] - share[FIRST] + 1, unroll_factor=1):
            share[TURNS + i] = share[WHICH + share[FIRST] + i]


@macro
def turns_by_length(T, inputs, memory):
    """How many whole sequences a share has."""
    share = memory.share
    count = T.alloc_var(T.int32, init=inputs.block_table.shape[0] - share[LONG])
    turns = T.alloc_var(T.int32, init=T.truncdiv(count, share[WHOLE]))
    if place_of_turn(T, share[WHOLE], share[NUMBER], turns) < count:
        turns = turns + 1
    return turns
