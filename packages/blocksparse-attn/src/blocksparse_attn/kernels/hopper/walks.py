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
def column_of(walk, entry, end, config: gl.constexpr):
    """The column of an entry, of one list or of each [LISTS]: -1 after the list's end."""
    PER_BLOCK: gl.constexpr = config.K_BLOCK // config.PIECE
    return gl.load(walk.col + entry // PER_BLOCK, mask=entry < end, other=-1)


@gluon.jit
def keys_at(walk, entry, end, column, config: gl.constexpr):
    """The position of the keys of an entry, of which ``column_of`` is the column, and NOWHERE after the list's end.

    Columns that are not there come just before NOWHERE, where no row sees them.
    """
    PER_BLOCK: gl.constexpr = config.K_BLOCK // config.PIECE
    at = column * config.K_BLOCK + entry % PER_BLOCK * config.PIECE
    at = gl.where((column >= 0) & (column < walk.columns), at, NOWHERE - 1)
    return gl.where(entry < end, at, NOWHERE)


@gluon.jit
def keys_of(walk, entry, end, config: gl.constexpr):
    return keys_at(walk, entry, end, column_of(walk, entry, end, config), config)


class Run(NamedTuple):
    """Pieces one behind the other that the same lists have: where the first is, how many, and those lists as bits."""

    at: Any
    count: Any
    bits: Any


@gluon.jit
def positions(walk, entries, config: gl.constexpr):
    """What is known of the first entry of each list; with TABLE what is left of a run of pieces too, none as yet."""
    if config.UNIFORM:
        at = (keys_of(walk, entries[0], walk.end[0], config), keys_of(walk, entries[1], walk.end[1], config))
    else:
        at = column_of(walk, entries, walk.end, config)
        if config.TABLE:
            at = (at, Run(walk.start * 0, walk.start * 0, walk.start * 0))
    return at


@gluon.jit
def pieces_alike(walk, o_entry, o_at, wanted, least, config: gl.constexpr):
    """How many pieces the lists at ``least`` have one behind the other there, and no others: at least one."""
    PER_BLOCK: gl.constexpr = config.K_BLOCK // config.PIECE
    mine = o_at == least
    # Up to the end of the block, of the list, of what its rows see, or to where another list goes on.
    count = gl.minimum(PER_BLOCK - o_entry % PER_BLOCK, walk.end - o_entry)
    count = gl.where(wanted, gl.minimum(count, (walk.last - least) // config.PIECE + 1), count)
    count = gl.where(mine, count, (o_at - least) // config.PIECE)
    count = gl.maximum(gl.min(count, 0), 1)
    if config.HAS_LEFT:
        count = gl.where(least + (config.PIECE - 1) >= walk.low, count, 1)
    return count


@gluon.jit
def next_run(walk, o_entry, o_column, config: gl.constexpr):
    """The next pieces that a row of some list sees, one but with TABLE: its position is NOWHERE after the last.

    All lists are walked once, in whatever order they are; rising ones meet where they list the same. ``o_column`` are
    the columns of the entries ``o_entry``, loaded ahead: nothing waits for them before the next run is looked for.
    """
    o_bit = bits_of_lists(config)
    bits = walk.start * 0
    least = bits
    count = bits + 1
    searching = bits == 0
    while searching:
        o_at = keys_at(walk, o_entry, walk.end, o_column, config)
        least = gl.min(o_at, 0)
        mine = o_at == least
        wanted = mine & (least <= walk.last)
        if config.HAS_LEFT:
            wanted = wanted & (least + (config.PIECE - 1) >= walk.low)
        bits = gl.sum(gl.where(wanted, o_bit, 0), 0)
        if config.TABLE and config.K_BLOCK > config.PIECE:
            count = pieces_alike(walk, o_entry, o_at, wanted, least, config)
        o_entry += gl.where(mine, count, 0)
        o_column = column_of(walk, o_entry, walk.end, config)
        searching = (bits == 0) & (least < NOWHERE)
    return Run(least, count, bits), o_entry, o_column


@gluon.jit
def tile_of_runs(walk, o_entry, ahead, config: gl.constexpr):
    """``next_tile`` of a table: a run is looked for once, however many of its pieces a tile takes."""
    PIECES: gl.constexpr = config.BLOCK_N // config.PIECE
    o_piece = lanes()
    o_column, run = ahead
    at = o_piece * 0 + NOWHERE
    bits = o_piece * 0
    filled = walk.start * 0
    while filled < PIECES:
        if run.count == 0:
            run, o_entry, o_column = next_run(walk, o_entry, o_column, config)
        taken = gl.minimum(run.count, PIECES - filled)
        if run.at == NOWHERE:
            taken = PIECES - filled
        else:
            here = (o_piece >= filled) & (o_piece < filled + taken)
            at = gl.where(here, run.at + (o_piece - filled) * config.PIECE, at)
            bits = gl.where(here, run.bits, bits)
            run = Run(run.at + taken * config.PIECE, run.count - taken, run.bits)
        filled += taken
    return at, bits, o_entry, (o_column, run)


@gluon.jit
def next_of_two(walk, entries, at_entries, config: gl.constexpr):
    """``next_run`` of two lists. Were bits made in the loop, ptxas would no longer take numbers for uniform."""
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
    """The pieces of the next tile, as ``piece_of`` takes them, and which lists have each, as bits."""
    at = ()
    bits = ()
    if config.TABLE:
        at, bits, entries, at_entries = tile_of_runs(walk, entries, at_entries, config)
    else:
        for _ in gl.static_range(config.BLOCK_N // config.PIECE):
            if config.UNIFORM:
                one, its_bits, entries, at_entries = next_of_two(walk, entries, at_entries, config)
            else:
                run, entries, at_entries = next_run(walk, entries, at_entries, config)
                one, its_bits = run.at, run.bits
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
