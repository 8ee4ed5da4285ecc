"""The lists of a work item, merged: the pieces that its tiles gather, and what each tile is for a consumer.

A warp walks them, a thread each; or, with UNIFORM, the two of A and B by numbers that all threads have alike, as TMA
wants them: prompts of 8192 and 32768 tokens take 0.985 and 0.99 of the time, a chunk over pages of 16 0.974.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse_attn.kernels.hopper.memory import MASKED, NO_TILE, NOWHERE, ROWS, SKIPPED, WHOLE
from blocksparse_attn.kernels.hopper.pieces import lanes, one_of


class Walk(NamedTuple):
    """The lists of a work item, each of LIST_ROWS rows, in entries of PIECE keys.

    ``end`` [LISTS]: behind the last entry. ``last`` [LISTS]: the last position that a row of each sees; ``low``: the
    first that any does. ``absent``: the lists of rows that are no queries, as bits. ``columns``: blocks that there are.
    With UNIFORM ``end`` and ``last`` are pairs, and ``absent`` is not asked for.
    """

    col: Any
    end: Any
    last: Any
    low: Any
    left: Any
    start: Any
    absent: Any
    columns: Any


@gluon.jit
def bits_of_lists(config: gl.constexpr):
    """A bit for each list of a work item, 0 in the threads that have none."""
    o_list = lanes()
    LISTS: gl.constexpr = config.BLOCK_M // config.LIST_ROWS
    return gl.where(o_list < LISTS, 1, 0) << o_list


@gluon.jit
def walk_of(p_list, o_entry, o_end, start, context, length, left, config: gl.constexpr):
    """How the lists of a work item are walked, and from which entries on."""
    if config.UNIFORM:
        o_last = (gl.minimum(start + (ROWS - 1), length - 1), gl.minimum(start + (2 * ROWS - 1), length - 1))
        o_entry = (one_of(o_entry, 0), one_of(o_entry, 1))
        o_end = (one_of(o_end, 0), one_of(o_end, 1))
        absent = start * 0
    else:
        o_first = start + lanes() * config.LIST_ROWS
        o_last = gl.minimum(o_first + (config.LIST_ROWS - 1), length - 1)
        absent = gl.sum(gl.where(o_last < gl.maximum(o_first, context), bits_of_lists(config), 0), 0)
    last = gl.minimum(start + (config.BLOCK_M - 1), length - 1)
    low = start * 0
    if config.HAS_LEFT:
        low = gl.maximum(gl.maximum(start, context) - left, 0)
    return Walk(p_list, o_end, o_last, low, left, start, absent, last // config.K_BLOCK + 1), o_entry


@gluon.jit
def keys_of(walk, entry, end, config: gl.constexpr):
    """The position of the keys of an entry, of one list or of each [LISTS], and NOWHERE after the list's end.

    Columns that are not there come just before NOWHERE, where no row sees them.
    """
    PER_BLOCK: gl.constexpr = config.K_BLOCK // config.PIECE
    inside = entry < end
    column = gl.load(walk.col + entry // PER_BLOCK, mask=inside, other=-1)
    at = column * config.K_BLOCK + entry % PER_BLOCK * config.PIECE
    at = gl.where((column >= 0) & (column < walk.columns), at, NOWHERE - 1)
    return gl.where(inside, at, NOWHERE)


@gluon.jit
def positions(walk, entries, config: gl.constexpr):
    """``keys_of`` of each list."""
    if config.UNIFORM:
        at = (keys_of(walk, entries[0], walk.end[0], config), keys_of(walk, entries[1], walk.end[1], config))
    else:
        at = keys_of(walk, entries, walk.end, config)
    return at


@gluon.jit
def next_piece(walk, o_entry, o_at, config: gl.constexpr):
    """The next piece that a row of some list sees: its position, or NOWHERE, and the lists that have it, as bits.

    All lists are walked once, in whatever order they are; rising ones meet where they list the same. ``o_at`` are the
    positions of the entries ``o_entry``.
    """
    o_bit = bits_of_lists(config)
    bits = walk.start * 0
    least = bits
    searching = bits == 0
    while searching:
        least = gl.min(o_at, 0)
        mine = o_at == least
        wanted = mine & (least <= walk.last)
        if config.HAS_LEFT:
            wanted = wanted & (least + (config.PIECE - 1) >= walk.low)
        bits = gl.sum(gl.where(wanted, o_bit, 0), 0)
        o_entry += mine.to(gl.int32)
        o_at = keys_of(walk, o_entry, walk.end, config)
        searching = (bits == 0) & (least < NOWHERE)
    return least, bits, o_entry, o_at


@gluon.jit
def next_of_two(walk, entries, at_entries, config: gl.constexpr):
    """``next_piece`` of two lists. Were bits made in the loop, ptxas would no longer take numbers for uniform."""
    entry_a, entry_b = entries
    at_a, at_b = at_entries
    least = at_a
    for_a = at_a < 0
    for_b = for_a
    searching = at_a >= 0
    while searching:
        least = gl.minimum(at_a, at_b)
        first_a = at_a == least
        first_b = at_b == least
        for_a = first_a & (least <= walk.last[0])
        for_b = first_b & (least <= walk.last[1])
        if config.HAS_LEFT:
            near = least + (config.PIECE - 1) >= walk.low
            for_a = for_a & near
            for_b = for_b & near
        entry_a += first_a.to(gl.int32)
        entry_b += first_b.to(gl.int32)
        at_a = keys_of(walk, entry_a, walk.end[0], config)
        at_b = keys_of(walk, entry_b, walk.end[1], config)
        searching = (for_a == 0) & (for_b == 0) & (least < NOWHERE)
    return least, for_a.to(gl.int32) | for_b.to(gl.int32) << 1, (entry_a, entry_b), (at_a, at_b)


@gluon.jit
def next_tile(walk, entries, at_entries, config: gl.constexpr):
    """The pieces of the next tile, as ``next_piece`` has them one by one, and as ``piece_of`` takes them."""
    PIECES: gl.constexpr = config.BLOCK_N // config.PIECE
    o_piece = lanes()
    at = ()
    bits = ()
    if config.TABLE:
        at = o_piece * 0 + NOWHERE
        bits = o_piece * 0
    for i_piece in gl.static_range(PIECES):
        if config.UNIFORM:
            one, its_bits, entries, at_entries = next_of_two(walk, entries, at_entries, config)
        else:
            one, its_bits, entries, at_entries = next_piece(walk, entries, at_entries, config)
        if config.TABLE:
            at = gl.where(o_piece == i_piece, one, at)
            bits = gl.where(o_piece == i_piece, its_bits, bits)
        else:
            at = at + (one,)
            bits = bits + (its_bits,)
    return at, bits, entries, at_entries


@gluon.jit
def mode_for(walk, at, bits, i_half: gl.constexpr, config: gl.constexpr):
    """What a tile is for a consumer: see SKIPPED, WHOLE and MASKED."""
    GROUPS: gl.constexpr = ROWS // config.LIST_ROWS
    ALL: gl.constexpr = (1 << GROUPS) - 1
    PIECES: gl.constexpr = config.BLOCK_N // config.PIECE
    own = (bits >> (i_half * GROUPS)) & ALL
    first = walk.start + i_half * ROWS
    # What rows see that are no queries does not matter.
    whole = ((own | (walk.absent >> (i_half * GROUPS))) & ALL) == ALL
    whole = whole & (at <= first - (config.PIECE - 1))
    if config.HAS_LEFT:
        whole = whole & (at >= first + (ROWS - 1) - walk.left)
    whole = whole | (lanes() >= PIECES)
    mode = gl.where(gl.min(whole.to(gl.int32), 0) != 0, WHOLE, MASKED)
    return gl.where(gl.max(own, 0) != 0, mode, SKIPPED)


@gluon.jit
def places_for(walk, at, bits, i_half: gl.constexpr, config: gl.constexpr):
    """Where both pieces of a tile begin, from a consumer's first row, or NOWHERE; the one twice if there is one."""
    LAST: gl.constexpr = config.BLOCK_N // config.PIECE - 1
    first = walk.start + i_half * ROWS
    place = gl.where((bits[0] >> i_half) & 1 != 0, at[0] - first, NOWHERE)
    second = gl.where((bits[LAST] >> i_half) & 1 != 0, at[LAST] - first, NOWHERE)
    return place, second


@gluon.jit
def mode_at(walk, places, config: gl.constexpr):
    """``mode_for`` of ``places_for``."""
    latest = gl.maximum(places[0], places[1])
    earliest = gl.minimum(places[0], places[1])
    whole = latest <= -(config.PIECE - 1)
    if config.HAS_LEFT:
        whole = whole & (earliest >= (ROWS - 1) - walk.left)
    mode = gl.where(whole, WHOLE, MASKED)
    return gl.where(earliest == NOWHERE, SKIPPED, mode)


@gluon.jit
def modes_for(walk, at, bits, valid, config: gl.constexpr):
    """What a tile is for A and for B."""
    if config.TABLE:
        mode_a = mode_for(walk, at, bits, 0, config)
        mode_b = mode_for(walk, at, bits, 1, config)
    else:
        mode_a = mode_at(walk, places_for(walk, at, bits, 0, config), config)
        mode_b = mode_at(walk, places_for(walk, at, bits, 1, config), config)
    return gl.where(valid, mode_a, NO_TILE), gl.where(valid, mode_b, NO_TILE)
