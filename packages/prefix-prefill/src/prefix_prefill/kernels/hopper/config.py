"""What the sm_90 kernel is compiled for, and the values that its warps share, in groups with names."""

from typing import NamedTuple

import triton.language as tl

# Rows of a consumer warpgroup, the M of its WGMMA instructions.
ROWS: tl.constexpr = tl.constexpr(64)
# 16-bit columns that shared memory is swizzled over: 128 bytes.
COLUMNS: tl.constexpr = tl.constexpr(64)
# The fewest rows of a TMA box.
STRIP: tl.constexpr = tl.constexpr(16)
# At most so many tiles of a program hold keys that do not exist or that no row sees: see ``zero_masked_values``.
EDGES: tl.constexpr = tl.constexpr(3)


class Config(NamedTuple):
    """Compile-time values; ``launch`` makes them from a problem and its plan."""

    GROUP: int  # query heads that share a kv head
    HEADS_KV: int
    D: int  # head size
    BLOCK_D: int  # the next power of two
    PAGE: int
    BOX: int  # rows that one TMA load brings: a page or a part of one
    WIDTH: int  # columns that one TMA load of the cache brings: 128 bytes at most
    BLOCK_N: int
    HEADS: int  # query heads in a tile
    TOKENS: int  # tokens in a tile
    CONSUMERS: int  # warpgroups of ROWS rows
    STAGES: int  # pipeline depth, of keys and of values
    SPLITS: int
    IS_FP8: bool  # the cache holds 8-bit floats
    NEW_KV: bool  # the new keys and values are tensors of their own
    LIMIT: int  # the largest number of an 8-bit out, else 0
    ALIBI: bool
    SOFTCAP: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    SKIP_DECODE: bool


class Strides(NamedTuple):
    """Of scales by kv head, of q and out by (token, head, element), of lse by (head, token)."""

    k_scale: int
    v_scale: int
    q: tuple[int, ...]
    out: tuple[int, ...]
    lse: tuple[int, ...]


class Pointers(NamedTuple):
    """What consumers load and store; None for what there is not."""

    q: object
    alibi: object
    sinks: object
    out: object
    lse: object


class Tile(NamedTuple):
    """A tile of queries: its number in its sequence, the sequence's first row, new tokens, older tokens, all tokens."""

    i_tile: object
    begin: object
    q_len: object
    context: object
    length: object


class Keys(NamedTuple):
    """The keys that any row of a tile sees, from ``low`` to before ``high``, of the cached ones to before
    ``cached_high``; in tiles, cached ones first, from ``cached_first`` on, and new ones; and a split's share of these.
    """

    low: object
    cached_high: object
    high: object
    cached_first: object
    cached_tiles: object
    new_start: object
    from_tile: object
    to_tile: object


class Loop(NamedTuple):
    """The tiles of keys that a program's main loop takes: cached ones first, then new ones.

    Tile i begins at key ``start + i * BLOCK_N``, from tile ``first_new`` on ``to_new`` keys later. Any row sees keys
    from ``low`` to before ``high``, of the cached ones to before ``cached_high``.
    """

    low: object
    cached_high: object
    high: object
    start: object
    count: object
    first_new: object
    to_new: object


class Source(NamedTuple):
    """Where a producer finds keys or values: a row of the block table, the pages that there are, a kv head; and, of new
    ones, all rows, and the row of position 0, were all of a sequence's keys new.
    """

    p_row: object
    num_blocks: object
    i_kv: object
    rows: object
    new_row: object


class Window(NamedTuple):
    """Tokens that a row sees to its left and right, itself left out; INT32_MAX - 1 and less."""

    left: object
    right: object
