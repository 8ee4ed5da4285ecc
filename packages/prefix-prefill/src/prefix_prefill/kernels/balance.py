"""How persistent programs share a batch's work, known on the device alone: each finds its pieces of tiles by itself.

Work is a line. Its unit is either a piece of a tile, which programs take in turn, or the time of one key, of which
each program takes one share of equal length, which cuts at most two tiles (stream-K, arXiv 2301.03598):

pieces   tiles whole, or in as many pieces as fill the programs: no tile is cut that need not be, and with a number of
         pieces fixed by the caller a sequence keeps its bits in every batch
shares   where lengths differ so much that whole tiles would leave programs idle

Pieces of several sequences come band by band, those of most keys first: tiles of like cost side by side, as programs
take as many of each. Sequence by sequence, 8 prompts of 1024 gave one program 1.44 times the mean: the rounds of 132
programs kept step with the tiles of a prompt.

What a tile costs is taken to rise with its number, as causal rows see more keys, up to the window or the length; sums
over tiles are then known in closed form, and no program walks the batch.

A warp looks an item up while attention waits for it, at first with nothing in its caches, instructions among it: there
is little code, pieces are counted in 32 bits, in which sums across a warp are one instruction, and a block of sequences
is summed up once for all of a program's items that lie there.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from prefix_prefill.kernels.batch import sequence_at
from prefix_prefill.kernels.costs import (
    OVERHEAD,
    Costs,
    cost_before,
    costs_of,
    last_cost,
    quotient,
    tile_at,
    tiles_below,
)

# Sequences that are looked at together.
LANES: tl.constexpr = tl.constexpr(32)
# The fewest keys that a piece of a tile is worth, and what is lost by merging; a tile of twice as many stays whole.
LEAST: tl.constexpr = tl.constexpr(512)
# The fewest of a tile of few rows, which are merged quickly: 16 pieces of 126 keys take 12.8 us, 4 of 500 14.9 (H100).
# As each takes time to merge, they are longer the more keys there are.
LEAST_OF_FEW: tl.constexpr = tl.constexpr(128)
MERGING: tl.constexpr = tl.constexpr(512)
# The most pieces on a line: numbers of pieces fit in 32 bits, the first ones past the end too; and the most tiles that
# are counted of a lane's sequences.
MOST_PIECES: tl.constexpr = tl.constexpr(2**30)
MOST_TILES: tl.constexpr = tl.constexpr(2**23)
# Keys and values that programs find in the cache again, though each is at other ones.
CACHE_BYTES: tl.constexpr = tl.constexpr(32 * 2**20)
# Groups of heads whose tiles stand side by side.
MOST_GROUPS: tl.constexpr = tl.constexpr(32)
# Bands that the longest tile's keys are cut into: more would scatter the tiles that read the same keys.
BANDS: tl.constexpr = tl.constexpr(16)
# Of which one holds all tiles.
ALL_KEYS: tl.constexpr = tl.constexpr(2**30)


class Work(NamedTuple):
    """How programs share: ``line`` whether by shares of ``share`` keys, else by pieces, ``num_splits`` of each tile or,
    if that is 0, of at most ``piece`` keys; the most pieces that the line has, the programs, and the entries that a
    merge reads; whether pieces come band by band; and of shares, the lines side by side, each of as many heads.
    """

    line: object
    share: object
    piece: object
    num_splits: object
    most: object
    programs: object
    entries: object
    in_bands: object
    lines: object


class Block(NamedTuple):
    """LANES sequences on the line, of pieces a band of their tiles: the number of the first, where each ends, from
    where to where they lie together, and the band.
    """

    first: object
    ends: object
    low: object
    high: object
    band: object


class Band(NamedTuple):
    """Tiles that cost from ``low`` to less than ``width`` more keys; of the last one, ``low`` is ``least``."""

    low: object
    width: object
    least: object


class Place(NamedTuple):
    """A sequence's position on the line: its number, from where it lies, and which band of its tiles does."""

    i_n: object
    low: object
    band: object


class Item(NamedTuple):
    """A piece of a tile: which of all kv heads' head tiles, which tile; of its tiles of keys those from ``low`` to
    before ``high`` parts of ``parts``; the number of the piece and of how many, 0 if it is none.

    ``first``: of a tile cut into shares, the program of its second piece; else -1.
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
def pieces_of(costs, work, C):
    """In how many pieces each tile of a sequence is cut."""
    pieces = costs.tiles * 0 + work.num_splits
    if work.num_splits == 0:
        least: tl.constexpr = LEAST_OF_FEW if C.GROUPS == 1 and not C.SHARED else LEAST
        keys = last_cost(costs, C) - OVERHEAD
        pieces = tl.where(keys < 2 * least, 1, (keys + work.piece - 1) // work.piece)
    return pieces


@triton.jit
def first_band(costs, work, C):
    """The band of the tiles that cost most of those of LANES sequences."""
    low = work.most * 0
    width = low + ALL_KEYS
    least = low
    if work.in_bands:
        longest = tl.max(tl.where(costs.tiles > 0, last_cost(costs, C) - OVERHEAD, 0), 0)
        least = tl.minimum(tl.min(tl.where(costs.tiles > 0, costs.base, ALL_KEYS), 0), longest)
        width = tl.maximum(longest // BANDS + 1, C.BLOCK_N)
        low = least + (longest - least) // width * width
    return Band(low, width, least)


@triton.jit
def extent_of(costs, band, work, C):
    """How many pieces of a band sequences have."""
    tiles = tiles_below(band.low + band.width, costs, C) - tiles_below(band.low, costs, C)
    return tiles * pieces_of(costs, work, C) * (C.HEADS_KV * C.HEAD_TILES)


@triton.jit
def first_block(o_lane, batch, BY_SHARE: tl.constexpr):
    """The block before the first one."""
    none = batch.num_sequences * 0
    ends = o_lane * 0
    low = none
    if BY_SHARE:
        ends = ends.to(tl.int64)
        low = low.to(tl.int64)
    return Block(none - 1 - LANES, ends, low, low, Band(none, none, none))


@triton.jit
def block_at(x, block, o_lane, work, batch, BY_SHARE: tl.constexpr, C):
    """The sequences about x, from ``block`` on; the last ones if they all lie before it."""
    first = block.first
    ends = block.ends
    low = block.low
    high = block.high
    band = block.band
    while (high <= x) & ((first + LANES <= batch.num_sequences) | (band.low > band.least)):
        is_last = band.low <= band.least
        first += tl.where(is_last, LANES, 0)
        costs = costs_of(sequence_at(batch, first + o_lane, C), batch, C)
        low = high
        if BY_SHARE:
            ends = low + tl.cumsum(cost_before(costs.tiles, costs, C) * (C.HEADS_KV * C.HEAD_TILES // work.lines), 0)
        else:
            band = Band(band.low - band.width, band.width, band.least)
            if is_last:
                band = first_band(costs, work, C)
            ends = low + tl.cumsum(extent_of(costs, band, work, C), 0)
        high = tl.max(ends, 0)
    return Block(first, ends, low, high, band)


@triton.jit
def place_at(x, block):
    """The sequence of a block at x."""
    passed = block.ends <= x
    low = tl.max(tl.where(passed, block.ends, block.low), 0)
    return Place(block.first + tl.sum(passed.to(tl.int32), 0), low, block.band)


@triton.jit
def most_pieces(num_splits, batch, C):
    """How many pieces there may be, as ``plan.most_tiles`` has it: bounds that decrease would make more, and parts of
    them have no memory.
    """
    most = (batch.rows // C.TOKENS + tl.minimum(batch.num_sequences + 2, batch.rows)).to(tl.int64)
    return tl.minimum(most * (C.HEADS_KV * C.HEAD_TILES) * num_splits, MOST_PIECES).to(tl.int32)


@triton.jit
def by_number(programs, num_splits, batch, C):
    """How programs share a batch whose tiles are each in ``num_splits`` pieces."""
    most = most_pieces(num_splits, batch, C)
    none = most.to(tl.int64)
    entries = tl.where(num_splits > 1, most, 0)
    in_bands = (most > programs) & (batch.num_sequences > 1)
    return Work(programs < 0, none, most, most * 0 + num_splits, most, programs, entries, in_bands, most * 0 + 1)


@triton.jit
def share_work(o_lane, programs, num_splits, batch, C):
    """How the programs of a launch share a batch, each computes the same; and from which block on they look for pieces:
    the first one, where its sequences have been looked at.
    """
    work = by_number(programs, num_splits, batch, C)
    block = first_block(o_lane, batch, False)
    if num_splits == 0:
        work, block = by_lengths(o_lane, programs, batch, C)
    return work, block


@triton.jit
def by_lengths(o_lane, programs, batch, C):
    """How they share it where no number of pieces is given."""
    HEADS: tl.constexpr = C.HEADS_KV * C.HEAD_TILES
    none = o_lane * 0
    all_costs = none.to(tl.int64)
    all_keys = none.to(tl.float32)
    all_tiles = none
    longest = none
    shortest = none + (2**31 - 1)
    smallest = shortest
    sequences = none
    costs = Costs(none, none, none, none)
    # The first block last: of that the costs are kept.
    blocks = (batch.num_sequences + 2 + LANES - 1) // LANES
    for i in range(blocks):
        sequence = sequence_at(batch, (blocks - 1 - i) * LANES - 1 + o_lane, C)
        costs = costs_of(sequence, batch, C)
        there = costs.tiles > 0
        last = last_cost(costs, C)
        all_costs += cost_before(costs.tiles, costs, C)
        # So that impossible bounds do not look like few tiles.
        all_tiles = tl.minimum(all_tiles + tl.minimum(costs.tiles, MOST_TILES), MOST_TILES // HEADS)
        all_keys += tl.where(there, sequence.length, 0).to(tl.float32)
        sequences += there.to(tl.int32)
        longest = tl.maximum(longest, tl.where(there, last, 0))
        shortest = tl.minimum(shortest, tl.where(there, last, 2**31 - 1))
        smallest = tl.minimum(smallest, tl.where(there, costs.base + OVERHEAD, 2**31 - 1))
    longest = tl.max(longest, 0)
    tiles = tl.maximum(tl.sum(all_tiles, 0) * HEADS, 1)
    splits = tl.maximum(programs // tiles, 1)
    least = longest * 0 + LEAST
    if C.GROUPS == 1 and not C.SHARED:
        least = tl.maximum(tl.sqrt(8.0 * longest.to(tl.float32)).to(tl.int32), LEAST_OF_FEW)
    keys = longest - OVERHEAD
    piece = tl.maximum((keys + splits - 1) // splits, least)
    line = programs < 0
    share = line.to(tl.int64)
    lines = lines_of(programs, C)
    if (keys < 2 * least) | ((splits > 1) & (keys < piece + MERGING)):
        # No tile is worth a cut, and nothing need be merged; what follows is not even fetched.
        splits = splits * 0 + 1
    else:
        # What decides between the two ways need not be exact.
        total = tl.sum(all_costs.to(tl.float32), 0) * HEADS
        mean = total / programs
        # How long either way takes. Whole tiles: the mean, the programs that idle in the last round, when the shortest
        # pieces are at work, and how unlike the tiles of a band are; and no less than the longest.
        whole = tl.maximum(mean, piece.to(tl.float32))
        if splits == 1:
            idle = (tiles + programs - 1) // programs * programs - tiles
            unlike = tl.minimum(longest // BANDS, longest - tl.min(shortest, 0))
            uneven = mean + idle * tl.min(smallest, 0).to(tl.float32) / programs + unlike
            whole = tl.maximum(uneven, longest.to(tl.float32))
        # Shares: the merging; and where tiles have their keys in common, and those are more than the cache holds, each
        # program reads them from memory for itself.
        on_line = programs // lines
        apart = tl.maximum(total / (on_line * lines), 2 * LEAST)
        kept = tl.sum(all_keys, 0) * (C.HEADS_KV * C.D * (2 if C.IS_FP8 and not C.WIDENED else 4)) <= CACHE_BYTES
        # Many tiles are slower apart though it holds them: 3 x 1500 behind 1000 324 us on an H200, whole 234.
        alone = (not kept) | (tiles >= 2 * programs)
        apart += tl.where(alone & (tiles > tl.sum(sequences, 0) * HEADS), 0.25 * apart, 0.0) + MERGING
        if not C.SHARED:
            # Who takes the results of a shared level looks for them by number of the piece.
            line = apart < whole
        if line:
            share = quotient(tl.sum(all_costs, 0) * (HEADS // lines) + on_line - 1, on_line)
            share = tl.maximum(share, 2 * LEAST)
    most = most_pieces(splits, batch, C)
    most = tl.where(splits > 1, tl.minimum(tiles * splits, most), most)
    entries = tl.where(line, programs, tl.where(splits > 1, most, 0))
    # Where tiles are cut for want of any, those of short sequences are cut into fewer.
    in_bands = (tiles > programs) & (batch.num_sequences > 1)
    work = Work(line, share, piece, tl.where(splits > 1, 0, 1), most, programs, entries, in_bands, lines)
    ends = none
    low = batch.num_sequences * 0
    band = Band(low, low, low)
    if not line:
        band = first_band(costs, work, C)
        ends = tl.cumsum(extent_of(costs, band, work, C), 0)
    return work, Block(low - 1, ends, low, tl.max(ends, 0), band)


@triton.jit
def lines_of(programs, C):
    """How many lines of shares lie side by side: where tiles are of few rows, one for each head, so that programs read
    all heads' keys of a token at a time, which lie together; if no more than one program in 32 is idle then.
    """
    HEADS: tl.constexpr = C.HEADS_KV * C.HEAD_TILES
    lines = programs * 0 + 1
    if C.GROUPS == 1 and not C.SHARED:
        lines = tl.where(programs % HEADS * 32 <= programs, HEADS, 1)
    return lines


@triton.jit
def place_on_lines(i_program, work):
    """A program's line, its number there, and its number where those of a line follow each other. Who has none comes
    last.
    """
    on_line = work.programs // work.lines
    i_line = i_program % work.lines
    i_own = i_program // work.lines
    return i_line, i_own, tl.where(i_own < on_line, i_line * on_line + i_own, i_program)


@triton.jit
def round_of(i_round, i_program, work):
    """Where on the line of pieces a program's next one is. Rounds go forth and back: who took the most of one takes the
    least of the next.
    """
    i = tl.where(i_round % 2 == 1, work.programs - 1 - i_program, i_program)
    return i_round * work.programs + i


@triton.jit
def heads_together(costs, C):
    """How many heads' tiles stand side by side: all, or half of them, or a quarter, down to those whose keys and values
    the cache holds.

    Programs drift apart, and read those of all heads from memory again then: a prompt of 65536, 8 kv heads, takes 58.4
    ms on an H100, one head after another, and 62.8 all together.
    """
    HEADS: tl.constexpr = C.HEADS_KV * C.HEAD_TILES
    BYTES: tl.constexpr = C.D * (2 if C.IS_FP8 and not C.WIDENED else 4)
    together = costs.tiles * 0 + HEADS
    bytes_of_head = costs.cap.to(tl.int64) * BYTES
    while (together * bytes_of_head > CACHE_BYTES) & (together % 2 == 0) & (together * MOST_GROUPS > HEADS):
        together = together // 2
    return together


@triton.jit
def piece_at(x, place, costs, work, C):
    """The piece at x, where work is shared by pieces.

    Of all tiles of a band the first pieces come first, so that programs read the same keys at a time; of these the last
    tile, which has most keys. Where heads come group by group, every other group begins with the first tile, and the
    last one with the last: so neighbours on the line always cost about the same, and what comes last costs least.
    """
    HEADS: tl.constexpr = C.HEADS_KV * C.HEAD_TILES
    pieces = pieces_of(costs, work, C)
    own = x - place.low
    from_tile = tiles_below(place.band.low, costs, C)
    tiles = tiles_below(place.band.low + place.band.width, costs, C) - from_tile
    together = heads_together(costs, C)
    i_head = own % HEADS
    i_all = own // HEADS
    from_last = own >= 0
    if together < HEADS:
        of_group = tl.maximum(tiles * pieces, 1) * together
        i_group = own // of_group
        own_in_group = own - i_group * of_group
        i_all = own_in_group // together
        i_head = i_group * together + own_in_group % together
        from_last = (HEADS // together - i_group) % 2 == 1
    i_piece = i_all // tl.maximum(tiles, 1)
    i_tile = i_all - i_piece * tiles
    i_tile = tl.where(from_last, tiles - 1 - i_tile, i_tile)
    # Impossible bounds may be of more pieces than 32 bits count.
    there = (own >= 0) & (i_piece < pieces) & (i_tile >= 0)
    i_tile += from_tile
    return Item(i_head, i_tile, i_piece, i_piece + 1, pieces, i_piece, tl.where(there, pieces, 0), costs.tiles * 0 - 1)


@triton.jit
def tiles_of_piece(count, item):
    """Of the tiles of keys of a tile those of one of its pieces, from the first to before the last, in 32 bits."""
    begin = count * 0
    end = count
    if item.parts > 1:
        each = count // item.parts
        rest = count - each * item.parts
        begin = each * item.low + rest * item.low // item.parts
        end = each * item.high + rest * item.high // item.parts
    return begin, end


@triton.jit
def tiles_of_share(count, item):
    """The same of a program's share of a tile."""
    tiles = count.to(tl.int64)
    return quotient(tiles * item.low, item.parts).to(tl.int32), quotient(tiles * item.high, item.parts).to(tl.int32)


@triton.jit
def on_line(item, i_line, i_first, work):
    """A share's item with the number of its head, and of its programs, among all of them."""
    i_head = item.i_head * work.lines + i_line
    return Item(
        i_head, item.i_tile, item.low, item.high, item.parts, item.i_piece, item.pieces, item.first + i_first
    )  # fmt: skip


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
