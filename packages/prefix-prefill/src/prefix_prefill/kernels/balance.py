"""How persistent programs share a batch's work, known on the device alone: each finds its pieces of tiles by itself.

Work is a line. Its unit is either a piece of a tile, and programs take every so manieth, or the time of one key, and
each program takes one share of equal length, which cuts at most two tiles (stream-K, arXiv 2301.03598):

pieces   tiles whole, or in as many pieces as fill the programs: no tile is cut that need not be, and with a number of
         pieces fixed by the caller a sequence keeps its bits in every batch
shares   where lengths differ so much that whole tiles would leave programs idle

What a tile costs is taken to rise with its number, as causal rows see more keys, up to the window or the length; sums
over tiles are then known in closed form, and no program walks the batch.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from prefix_prefill.kernels.batch import sequence_at

# Sequences that are looked at together.
LANES: tl.constexpr = tl.constexpr(64)
# A tile's beginning and end take the time of so many keys.
OVERHEAD: tl.constexpr = tl.constexpr(192)
# The fewest keys that a piece of a tile is worth, and what is lost by merging.
LEAST: tl.constexpr = tl.constexpr(512)
MERGING: tl.constexpr = tl.constexpr(512)
# Keys and values that programs find in the cache again, though each is at other ones.
CACHE_BYTES: tl.constexpr = tl.constexpr(32 * 2**20)


class Costs(NamedTuple):
    """Of the tiles of a sequence for one head, in keys: tile i costs ``base + i * TOKENS``, from tile ``ramp`` on
    ``cap``, and OVERHEAD beside.
    """

    tiles: object
    base: object
    cap: object
    ramp: object


class Work(NamedTuple):
    """How programs share: ``line`` whether by shares of ``share`` keys, else by pieces, ``num_splits`` of each tile or,
    if that is 0, of at most ``piece`` keys; the length of the line, the programs, and the entries that a merge reads.
    """

    line: object
    share: object
    piece: object
    num_splits: object
    total: object
    programs: object
    entries: object


class Place(NamedTuple):
    """A sequence's place on the line: its number, and from where to where it lies."""

    i_n: object
    low: object
    high: object


class Item(NamedTuple):
    """A piece of a tile: which of all kv heads' head tiles, which tile; of its tiles of keys those from ``low`` to
    before ``high`` parts of ``parts``; the number of the piece and of how many, 0 if it is none.

    ``first``: of a tile cut into shares, the program of its second piece; else its place on the line.
    """

    i_head: object
    i_tile: object
    low: object
    high: object
    parts: object
    i_piece: object
    pieces: object
    first: object


@triton.jit
def quotient(a, b):
    """a // b, from 0 to below 2^53, by way of float64: integers of 64 bits are divided by a function call."""
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.int64)


@triton.jit
def costs_of(sequence, batch, C):
    """What the tiles of a sequence, or of a block of sequences, cost."""
    tiles = ((sequence.q_len + C.TOKENS - 1) // C.TOKENS).to(tl.int64)
    length = sequence.length.to(tl.int64)
    cap = length
    base = length
    if C.HAS_RIGHT:
        right = tl.minimum(length, batch.right)
        base = sequence.context + C.TOKENS + right
        if C.HAS_LEFT:
            cap = tl.minimum(length, tl.minimum(length, batch.left) + C.TOKENS + right)
        base = tl.minimum(base, cap)
    ramp = tl.minimum(tiles, (cap - base + C.TOKENS - 1) // C.TOKENS)
    return Costs(tiles, base, cap, ramp)


@triton.jit
def cost_before(i, costs, C):
    """What the tiles before tile i cost."""
    rising = tl.minimum(i, costs.ramp)
    return i * OVERHEAD + rising * costs.base + rising * (rising - 1) // 2 * C.TOKENS + (i - rising) * costs.cap


@triton.jit
def tile_at(x, costs, C):
    """The tile that is being worked on when the tiles of a head have cost x."""
    level = cost_before(costs.ramp, costs, C)
    # The larger root of a quadratic equation, in the form that does not cancel; then made exact.
    b = (costs.base + OVERHEAD).to(tl.float32) - 0.5 * C.TOKENS
    far = x.to(tl.float32)
    i = (2.0 * far / (b + tl.sqrt(b * b + 2.0 * C.TOKENS * far))).to(tl.int64)
    i = tl.where(cost_before(i, costs, C) > x, i - 1, i)
    i = tl.where(cost_before(i + 1, costs, C) <= x, i + 1, i)
    return tl.where(x >= level, costs.ramp + quotient(tl.maximum(x - level, 0), costs.cap + OVERHEAD), i)


@triton.jit
def last_cost(costs, C):
    """What the last tile costs, which costs most."""
    return tl.minimum(costs.base + (costs.tiles - 1) * C.TOKENS, costs.cap) + OVERHEAD


@triton.jit
def pieces_of(costs, work, C):
    """In how many pieces each tile of a sequence is cut."""
    pieces = costs.tiles * 0 + work.num_splits
    if work.num_splits == 0:
        pieces = quotient(last_cost(costs, C) + work.piece - 1, work.piece)
    return pieces


@triton.jit
def extent(i_n, work, batch, C):
    """How long sequences are on the line."""
    costs = costs_of(sequence_at(batch, i_n, C), batch, C)
    length = cost_before(costs.tiles, costs, C)
    if not work.line:
        length = costs.tiles * pieces_of(costs, work, C)
    return length * (C.HEADS_KV * C.HEAD_TILES)


@triton.jit
def place_at(x, place, o_lane, work, batch, C):
    """The sequence at x on the line, from that of ``place`` on."""
    i_n = place.i_n
    first = i_n
    low = place.low
    before = low
    high = low
    while (high <= x) & (first <= batch.num_sequences):
        ends = before + tl.cumsum(extent(first + o_lane, work, batch, C), 0)
        passed = ends <= x
        i_n += tl.sum(passed.to(tl.int32), 0)
        low = tl.maximum(low, tl.max(tl.where(passed, ends, 0), 0))
        high = tl.min(tl.where(passed, 2**62, ends), 0)
        before = tl.max(ends, 0)
        high = tl.where(high == 2**62, before, high)
        first += LANES
    return Place(i_n, low, high)


@triton.jit
def share_work(o_lane, programs, num_splits, batch, C):
    """How the programs of a launch share a batch. Each computes the same."""
    HEADS: tl.constexpr = C.HEADS_KV * C.HEAD_TILES
    none = o_lane.to(tl.int64) * 0
    all_costs = none
    all_tiles = none
    all_keys = none
    longest = none
    shortest = none + 2**40
    smallest = shortest
    sequences = none
    for first in range(-1, batch.num_sequences + 1, LANES):
        sequence = sequence_at(batch, first + o_lane, C)
        costs = costs_of(sequence, batch, C)
        there = costs.tiles > 0
        last = last_cost(costs, C)
        all_costs += cost_before(costs.tiles, costs, C)
        all_tiles += costs.tiles
        all_keys += tl.where(there, sequence.length, 0)
        sequences += there.to(tl.int64)
        longest = tl.maximum(longest, tl.where(there, last, 0))
        shortest = tl.minimum(shortest, tl.where(there, last, 2**40))
        smallest = tl.minimum(smallest, tl.where(there, costs.base + OVERHEAD, 2**40))
    total = tl.sum(all_costs, 0) * HEADS
    tiles = tl.maximum(tl.sum(all_tiles, 0) * HEADS, 1)
    longest = tl.max(longest, 0)
    share = tl.maximum(quotient(total + programs - 1, programs), 2 * LEAST)
    splits = tl.maximum(quotient(programs, tiles), 1)
    piece = tl.maximum(quotient(longest + splits - 1, splits), 2 * LEAST)
    # How long either way takes. Whole tiles: the mean, the programs that idle in the last round, when the shortest
    # pieces are at work, and how unlike the sequences are.
    pieces = tiles * splits
    idle = quotient(pieces + programs - 1, programs) * programs - pieces
    whole = tl.maximum(quotient(total, programs), piece)
    if splits == 1:
        whole = quotient(total + idle * tl.min(smallest, 0), programs) + longest - tl.min(shortest, 0)
    # Shares: the merging; and where tiles have their keys in common, and those are more than the cache holds, each
    # program reads them from memory for itself.
    apart = share + MERGING
    kept = tl.sum(all_keys, 0) * (C.HEADS_KV * C.D * (2 if C.IS_FP8 else 4)) <= CACHE_BYTES
    if (not kept) & (tiles > tl.sum(sequences, 0) * HEADS):
        apart += share // 4
    line = (num_splits == 0) & (apart < whole)
    if C.SHARED:
        # Who takes their results looks for them by number of the piece.
        line = num_splits < 0
    each = tl.where(num_splits > 0, num_splits, splits)
    # Where tiles are cut for want of any, those of short sequences are cut into fewer.
    num_splits = tl.where(splits > 1, num_splits, each)
    work = Work(line, share, piece, num_splits, total, programs, total)
    if not line:
        total = tiles * each
        if num_splits == 0:
            lengths = none
            for first in range(-1, batch.num_sequences + 1, LANES):
                lengths += extent(first + o_lane, work, batch, C)
            total = tl.sum(lengths, 0)
        # As ``plan.most_tiles`` has it: bounds that decrease would make more, and parts of them have no memory.
        most = batch.rows // C.TOKENS + tl.minimum(batch.num_sequences + 2, batch.rows)
        total = tl.minimum(total, most.to(tl.int64) * HEADS * each)
    entries = tl.where(line, 2 * programs, tl.where(each > 1, total, 0))
    return Work(line, share, piece, num_splits, total, programs, entries)


@triton.jit
def first_place(i_program, work):
    """Where on the line a program begins, and before where it ends."""
    begin = tl.where(work.line, i_program * work.share, i_program)
    end = tl.where(work.line, tl.minimum(begin + work.share, work.total), work.total)
    return begin, end


@triton.jit
def piece_at(x, i_program, place, costs, work, C):
    """The piece at x, where work is shared by pieces, and the x of the program's next one.

    Of all tiles the first pieces come first, so that programs read the same keys at a time; of these the last tile,
    which has most keys. Rounds go forth and back: who took the most of one takes the least of the next.
    """
    HEADS: tl.constexpr = C.HEADS_KV * C.HEAD_TILES
    pieces = pieces_of(costs, work, C)
    own = x - place.low
    i_all = own // HEADS
    i_piece = quotient(i_all, tl.maximum(costs.tiles, 1))
    i_tile = costs.tiles - 1 - (i_all - i_piece * costs.tiles)
    after = quotient(x, work.programs) + 1
    following = after * work.programs + tl.where(after % 2 == 1, work.programs - 1 - i_program, i_program)
    return Item(own % HEADS, i_tile, i_piece, i_piece + 1, pieces, i_piece, pieces, x - i_piece * 0), following


@triton.jit
def snapped(x, low, high):
    """Where a cut at x falls: at an edge of the tile that lies from low to high, rather than less than LEAST off it."""
    inner = tl.where(x < low + LEAST, low, tl.where(x > high - LEAST, high, x))
    return tl.where(x <= low, low, tl.where(x >= high, high, inner))


@triton.jit
def share_at(x, end, i_program, place, costs, work, C):
    """What a program's share has of the tile at x, nothing if pieces are 0, and the x of the next tile.

    A tile is cut at the programs' beginnings that lie from LEAST behind its own to LEAST before its end.
    """
    each = cost_before(costs.tiles, costs, C)
    i_head = quotient(x - place.low, tl.maximum(each, 1))
    head_low = place.low + i_head * each
    i_tile = tile_at(x - head_low, costs, C)
    low = head_low + cost_before(i_tile, costs, C)
    high = head_low + cost_before(i_tile + 1, costs, C)
    first_cut = quotient(low + LEAST + work.share - 1, work.share)
    cuts = tl.maximum(quotient(tl.maximum(high - LEAST, 0), work.share) - first_cut + 1, 0)
    begin = snapped(i_program * work.share, low, high)
    to = snapped(end, low, high)
    i_piece = tl.where(begin > low, i_program - first_cut + 1, 0)
    pieces = tl.where(to > begin, cuts + 1, 0)
    return Item(i_head, i_tile, begin - low, to - low, high - low, i_piece, pieces, first_cut), high
