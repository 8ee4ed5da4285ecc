"""How long sequences are on the line of which programs take shares, and what a program knows of its own share."""

from typing import Any

from tilelang_mla.kernels.common import macro
from tilelang_mla.kernels.decode.groups import MOST_TURNS, TAKEN
from tilelang_mla.kernels.decode.schedule import capacity_of, length_of

# The longest that counts, where sequences are sorted by their lengths.
MOST_EXTENT = 2**14
# Threads whose sums of lengths one adds up.
TOGETHER = 8
# What is known of a program's share: its first and last sequence, where the first begins on the line, and its size; the
# most blocks that a sequence counts for; the number of the share, and of its tile of rows; the least blocks that one
# counts for; how long shares of whole sequences may be, 0 of cut ones, and which such a share has, at most eight.
FIRST, LAST, LOW, SIZE, MOST, NUMBER, TILE, LEAST, LIMIT, TURNS = range(TAKEN + 3)
# Of sequences that are sorted by their lengths: whether the long ones are cut, how many these are, shares of whole
# ones, the end of the line of all, and whether a share is told which are its own; whether sorting was in vain.
CUTS, LONG, WHOLE, END, LISTED, VAIN = range(TURNS + 8, TURNS + 14)
# Beside it, where programs share a batch or take few turns: sums of eight lanes, and the longest sequences of theirs;
# then in their place which sequences are long, and how long they are.
SUMS, LONGEST = TAKEN + MOST_TURNS - 2 * TOGETHER, TAKEN + MOST_TURNS - TOGETHER
WHICH, EXTENTS = SUMS, LONGEST
# The longest of whole sequences that are sorted, at most.
TOP = TAKEN + MOST_TURNS


def overhead_of(S: Any) -> int:
    """What a sequence costs beside its blocks, in blocks: its beginning and end.

    With two for one short ones beside 100,000 keys take 0.86 to 0.95 of the time at 64 rows and more (H200); others
    were not timed.
    """
    return 2 if S.ahead else 1


@macro
def extent_of(T, S, inputs, i_b, most, least):
    """A sequence's keys, none if their number cannot be; their blocks; and how long it is on the line.

    most, least: blocks that it counts for there. Who has no keys has a part too, which writes zeros.
    """
    capacity = capacity_of(T, inputs)
    length = T.alloc_var(T.int32, init=length_of(T, inputs, i_b))
    if length < 0 or T.cast(length, T.int64) > capacity:
        length = 0
    blocks = T.alloc_var(T.int32, init=T.truncdiv(length, S.block_n))
    if length > blocks * S.block_n:
        blocks = blocks + 1
    extent = T.alloc_var(T.int32, init=T.max(T.min(blocks, most), least) + overhead_of(S))
    return length, blocks, extent
