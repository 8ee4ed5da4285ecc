"""What the sm_90 kernel is compiled for, and the values that its warps share, in groups with names."""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon

# Rows of a consumer warpgroup, the M of its WGMMA instructions.
ROWS: tl.constexpr = tl.constexpr(64)
# Rows whose masked values are zeroed together.
STRIP: tl.constexpr = tl.constexpr(16)
# Pieces of tiles that are looked up ahead, the one that is worked on included.
SLOTS: tl.constexpr = tl.constexpr(4)


class Config(NamedTuple):
    """Compile-time values; ``launch`` makes them from a problem and its plan."""

    GROUP: int  # query heads that share a kv head
    HEADS_KV: int
    D: int  # head size of queries and keys
    DV: int  # that of values and outputs
    K_TILES: tuple[int, ...]  # columns of D in tiles, each a power of two: 64 and 32 for 96
    V_TILES: tuple[int, ...]  # the same of DV
    PAGE: int
    BOX: int  # rows that one TMA load brings: a page or a part of one
    NEW_BOX: int  # the same of new rows, which lie side by side
    BLOCK_N: int
    HEADS: int  # query heads in a tile
    HEAD_TILES: int  # tiles of the query heads of a kv head
    TOKENS: int  # tokens in a tile
    CONSUMERS: int  # warpgroups that multiply
    GROUPS: int  # of ROWS rows in a tile: one a consumer, or one for two, each of which has a tile of V_TILES
    STAGES: int  # pipeline depth, of keys and of values
    K_UNITS: int  # of 64 columns of a tile's keys that there is memory for, where keys come in such; or 0
    V_STAGES: int  # of values, each of V_KEYS keys
    V_KEYS: int  # BLOCK_N, or half of it where two stages of whole tiles do not fit
    Q_IN_REGISTERS: int  # tiles of queries in registers, whose products read only keys from shared memory
    IN_PARTS: bool  # tiles may be cut, and their partial results merged
    IS_FP8: bool  # the cache holds 8-bit floats
    WIDENED: bool  # which another kernel has widened to float16
    QUANTIZED_Q: bool  # queries are rounded to e4m3
    K_FP8: bool  # and multiply cached keys of e4m3 as they are
    K_TOKENS: bool  # keys in the cache have a scale each, not one for a kv head
    V_TOKENS: bool
    PACKED: bool  # pages of a head are [D / 8, tokens, 8] of keys, [DV, tokens] of values
    NEW_KV: bool  # the new keys and values are tensors of their own
    LIMIT: int  # the largest number of an 8-bit out, else 0
    ALIBI: bool
    SOFTCAP: bool
    CAPPING: int  # of capped scores whose weights are relative to a constant: see capped.py
    LOADING: int  # registers a thread of the warps that load and schedule beside two consumers
    DRAFT: bool  # new tokens see each other as a mask says
    HAS_LEFT: bool
    HAS_RIGHT: bool
    SKIP_DECODE: bool
    SHARED: bool  # a level of a cascade, but the last: its rows see all keys, and its results stay in parts
    CARRIED: int  # levels of a cascade before this one, whose parts are added
    JOINED: int  # those whose keys a sequence has before its own: see kernels/join.py


@gluon.constexpr_function
def width_of(tile, bits):
    """Columns of a tile that one TMA load brings: shared memory is swizzled over 128 bytes at most."""
    return min(tile, 1024 // bits)


@gluon.constexpr_function
def is_gathered(C):
    """Whether cached keys come row by row: pages of which no TMA box has whole groups of eight rows."""
    return C.PAGE % 8 != 0


@gluon.constexpr_function
def comes_box_by_box(tiles, bits, C):
    """Whether cached keys, or values, of one box a row are loaded box by box, and not all boxes of a tile at once. Of
    tiles that may be cut many boxes come ahead.

    On an H100, over pages of 16: 8 chunks of 512 behind 8192 with heads of 64 324 us, so 346; of 128 in 8 bits 31 that
    decode behind 8192 210, so 219, a chunk of 2048 behind 30720 1750, so 1760; but of 128 in 16 bits 512 behind 131072
    426, so 407. New keys beside them, 8-bit queries, and decoding with heads of 64 were not timed.
    """
    ahead = C.IN_PARTS and C.BLOCK_N // C.BOX > 8 and not (C.IS_FP8 or C.PACKED)
    other = C.NEW_KV or C.K_FP8 or ahead
    return column_of(tiles, len(tiles)) * bits <= 1024 and (C.IS_FP8 or C.CONSUMERS > 1) and not other


@gluon.constexpr_function
def comes_ahead(C):
    """Whether the pages of a tile of cached keys are looked up while the tile before it is loaded, and its boxes come
    one by one: of prompts, whose tiles are whole and short, and where a tile comes in more boxes than are looked up at
    once, those of 8 rows.

    On an H100, over pages of 16: 8 x 1024 with heads of 128 179 us, so 211; not unrolled 189. On an H200, 4 x 512
    behind 16384 over pages of 8: heads of 64 675 us, so 927, of 192 1475, so 1517, of 128 950, so 940; over pages of 24
    of 96 902, so 994; capped heads of 80 behind 60000 3138, so 4361.
    """
    plain = not (C.NEW_KV or C.IS_FP8 or C.PACKED) and C.CONSUMERS > 1
    return plain and (not C.IN_PARTS or C.BLOCK_N // C.BOX > 8)


@gluon.constexpr_function
def asks_first(C):
    """Whether a consumer asks for an item's queries before all else: kernels of two programs an SM that were timed so,
    those of large heads and those whose warps cap scores for themselves.
    """
    return C.CONSUMERS == 1 and (C.LOADING == 40 or C.CAPPING == 4)


@gluon.constexpr_function
def follows_seldom(C):
    """Whether a row's max follows its scores only once it is past by ``SLACK``: accumulators are seldom rescaled then,
    which takes large heads as long as half of a tile's softmax. New keys and cascades were not timed; what
    decodes gains nothing.

    4 x 512 behind 16384 on an H200: heads of 256 1630 us, so 1736, of 192 1364, so 1400, over pages of 64 1305, so
    1367, of 1 1590, so 1659; but of 128 945, so 935, and of 96 920, so 882.
    """
    other = C.IS_FP8 or C.SOFTCAP or C.ALIBI or C.DRAFT or C.SHARED or C.CARRIED or C.JOINED or C.NEW_KV
    return 128 < C.DV <= 256 and C.D == C.DV and C.CONSUMERS > 1 and not other


@gluon.constexpr_function
def masks_by_side(C):
    """Whether a masked tile looks at one end of its rows' windows where all rows see beyond the other: by two programs
    an SM, whose windows are short, so that two tiles of three are masked.

    On an H200, windows of 128: 4 x 512 behind 16384, 64 / 8 heads of 64 43.9 us, so 46.6, 4 x 2048 of 80 208.6, so
    216.1, 16 x 2048 of 192 144.7, so 146.9; but capped ones of 64 90.2, so 89.6, and of 256 178.7, so 177.2.
    """
    other = C.SOFTCAP or C.IS_FP8 or C.ALIBI or C.DRAFT or C.NEW_KV or C.JOINED
    by_two = C.CONSUMERS == 1 and C.BLOCK_N == (64 if max(C.D, C.DV) <= 128 else 32) and max(C.D, C.DV) <= 192
    return C.HAS_LEFT and by_two and not (other or C.PAGE % 8)


@gluon.constexpr_function
def units_in(C):
    """Units of 64 columns, each in a stage of its own, that a tile's keys come in."""
    return C.D // 64 if C.K_UNITS else 1


@gluon.constexpr_function
def own_tiles(tiles, first, C):
    """The numbers of the tiles of columns that are the first consumer's or the second one's: all, or every other."""
    step = C.CONSUMERS // C.GROUPS
    return tuple(range(0 if first or step == 1 else 1, len(tiles), step))


@gluon.constexpr_function
def begin_with(tiles, others):
    """Whether the first of these tiles are as wide as the others, all of them."""
    return tiles[: len(others)] == others


@gluon.constexpr_function
def column_of(tiles, i):
    """The first column of tile i."""
    return sum(tiles[:i])


@gluon.constexpr_function
def begin_of(tiles, i, size):
    """The first column that tile i holds: a head's last one begins in the one before where it is wider than what is
    left, as what lies beyond a row is loaded too, to become 0.
    """
    return min(column_of(tiles, i), max(size - tiles[i], 0))


class Strides(NamedTuple):
    """Of scales by kv head, and where there is one for each token by (page, token) too; of q and out by (token, head,
    element); or in units of 8 and None, where elements lie side by side and rows at whole 16 bytes. Of caches that are
    gathered by (page, token, head) in units of 8, else None.
    """

    k_scale: int
    v_scale: int
    k_tokens: tuple[int, ...]
    v_tokens: tuple[int, ...]
    q: tuple[int | None, ...]
    out: tuple[int | None, ...]
    k_cache: tuple[int, ...] | None = None
    v_cache: tuple[int, ...] | None = None


class Pointers(NamedTuple):
    """What consumers load and store; None for what there is not."""

    q: object
    alibi: object
    sinks: object
    scales: object
    out: object
    lse: object
    parts: object
    draft: object


class Sizes(NamedTuple):
    """What differs between calls: rows, pages, strides of lse by (head, token) and of the block table's rows; and the
    tokens that a row sees to its left and right, itself left out, INT32_MAX - 1 and less.
    """

    rows: object
    num_blocks: object
    lse_head: object
    lse_token: object
    s_table: object
    left: object
    right: object


class Tile(NamedTuple):
    """A piece of a tile of queries: its sequence's first row, new tokens, older tokens, all tokens and whether that can
    be, the tile's number, kv head and head tile, the piece's tiles of keys; -1 or where its partial result goes, and
    whether it lies there by the program's share; the sequence's number; where the keys of each joined level end.
    """

    begin: object
    q_len: object
    context: object
    length: object
    valid: object
    i_tile: object
    i_kv: object
    i_hb: object
    from_tile: object
    to_tile: object
    part: object
    by_share: object
    i_n: object
    ends: object


class Loop(NamedTuple):
    """The tiles of keys that a piece's main loop takes: cached ones first, then new ones.

    Tile i begins at key ``start + i * BLOCK_N``, from tile ``first_new`` on ``to_new`` keys later. Any row sees keys
    from ``low`` to before ``high``, of the cached ones to before ``cached_high``. ``ends``: those of joined levels.
    """

    low: object
    cached_high: object
    high: object
    start: object
    count: object
    first_new: object
    to_new: object
    ends: object


class Inside(NamedTuple):
    """The tiles of a loop that all rows see whole, found once for a piece: those from ``low`` to before ``high``, of
    cached ones to before ``cut``. Of these the last ones of joined levels are left out, where they are not full.
    """

    low: object
    cut: object
    high: object
    partial: object


class Bounds(NamedTuple):
    """Of a tile of keys and a source, cached or new: the first key and the end of those that any row sees, whether all
    rows see the whole tile, and whether its first keys, and its last ones.
    """

    low: object
    high: object
    whole: object
    from_first: object
    to_last: object


class Tokens(NamedTuple):
    """Where the scales of single tokens are found: pointers, strides, the block table, sizes; and where they go."""

    k_scale: object
    v_scale: object
    strides: object
    p_table: object
    sizes: object
    memory: object


class Source(NamedTuple):
    """Where a producer finds keys or values: a row of the block table, the pages that there are, a kv head; and, of new
    ones, all rows, and the row of position 0, were all of a sequence's keys new.
    """

    p_row: object
    num_blocks: object
    i_kv: object
    rows: object
    new_row: object


@gluon.constexpr_function
def converter_warps(C):
    """Of each converter: keys and values have one each, or values alone one as large."""
    return 4 if C.K_FP8 else 2


@gluon.constexpr_function
def has_light_consumers(C):
    """Whether consumers over an 8-bit cache leave registers to its converters and to the warps that load."""
    return C.LOADING > 56 and not (C.NEW_KV or C.K_TOKENS or C.V_TOKENS)
