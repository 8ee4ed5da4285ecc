"""Shared memory of the kernel for sm_90: rings of stages with their barriers, and the queue of work items.

Every buffer has a ``full`` barrier, on which whoever reads it waits, and an ``empty`` one, on which whoever fills it
waits. The i-th use of a ring of STAGES is in stage ``i % STAGES``; a reader waits for phase ``i // STAGES & 1``, a
writer for the opposite one, so that its first waits return at once.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Rows of a consumer warpgroup, and columns of a TMA box: 128 bytes of 16-bit elements, over which shared memory is
# swizzled.
ROWS: tl.constexpr = tl.constexpr(64)
COLUMNS: tl.constexpr = tl.constexpr(64)
# Rows of values that are zeroed together: one repetition of the swizzle.
STRIP: tl.constexpr = tl.constexpr(8)
# The position of keys that are not there: after all others, and 64 more do not overflow.
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 128)
# Work items in the queue.
QUEUE: tl.constexpr = tl.constexpr(2)
# Tiles of small blocks that the scheduler has looked for ahead of the loaders.
WALKED: tl.constexpr = tl.constexpr(8)


# Where a work item keeps what, see ``Item``.
VALID: tl.constexpr = tl.constexpr(0)
START: tl.constexpr = tl.constexpr(1)
TOKEN: tl.constexpr = tl.constexpr(2)
BATCH: tl.constexpr = tl.constexpr(3)
CONTEXT: tl.constexpr = tl.constexpr(4)
LENGTH: tl.constexpr = tl.constexpr(5)
POSSIBLE: tl.constexpr = tl.constexpr(6)
HEAD: tl.constexpr = tl.constexpr(7)
SPLIT: tl.constexpr = tl.constexpr(8)
ROW: tl.constexpr = tl.constexpr(9)
ALL_ROWS: tl.constexpr = tl.constexpr(10)
SEQUENCE: tl.constexpr = tl.constexpr(11)
K_BEGIN: tl.constexpr = tl.constexpr(12)
ITEM_SIZE: tl.constexpr = tl.constexpr(13)

# What a tile of keys is for a consumer: for none of its rows, seen whole by all of them, to be masked; or no tile, but
# the end of the work item.
SKIPPED: tl.constexpr = tl.constexpr(0)
WHOLE: tl.constexpr = tl.constexpr(1)
MASKED: tl.constexpr = tl.constexpr(2)
NO_TILE: tl.constexpr = tl.constexpr(-1)


class Item(NamedTuple):
    """A work item: 64 rows of one head for each consumer, A and B, and one split of the keys that they list.

    It is kept in shared memory, number by number: a consumer reads most of them after its main loop, and would
    otherwise hold them in registers through it. ``start``: the position of the first row in its sequence. ``token`` and
    ``row``: add a position to get a row of q, out and lse, in sequence ``i_b`` of a padded batch, and one of the
    partial results. Positions from ``context`` to ``length`` - 1 are queries.
    """

    valid: Any
    start: Any
    token: Any
    i_b: Any
    context: Any
    length: Any
    possible: Any
    i_h: Any
    i_split: Any
    row: Any
    all_rows: Any
    i_n: Any
    k_begin: Any


class Ring(NamedTuple):
    """Stages of a ring buffer: the same bytes as the boxes that TMA fills and as the tiles that WGMMA reads.

    Head sizes that are no power of two are in two pieces, the second of which has boxes and tiles of its own.
    """

    boxes: Any
    tiles: Any
    tail_boxes: Any
    tails: Any
    full: Any
    empty: Any


class Queue(NamedTuple):
    """Work items in flight from the scheduler to the other roles.

    ``lists``: of each, the first and the last + 1 of the entries that each LIST_ROWS rows list, in 32 cells as a warp
    has threads. With AS_FREE one more ``full`` barrier is for the end of an item's loads of keys, see ``await_end``.
    """

    items: Any
    lists: Any
    full: Any
    empty: Any


class Walked(NamedTuple):
    """Tiles in flight from the scheduler to both loaders, with TABLE.

    ``pieces`` [2 WALKED, 32]: of each tile, where its pieces are, NOWHERE after the last, and which lists have them.
    """

    pieces: Any
    full: Any
    empty: Any


class Channels(NamedTuple):
    """All that roles share.

    ``modes``: what the tile in a stage of keys is for A, then for B. ``keys`` and ``bits`` [STAGES, 32]: where each of
    its pieces begins, counted from the item's first row, and which lists have it. Without TABLE ``keys`` are where each
    of two pieces begins, for A, then for B, counted from its own first row, and NOWHERE where that does not list it;
    ``bits`` are the same, number by number.
    ``strips``: the values again, 8 rows each. ``out_tiles``: where outputs are staged.
    """

    q: Any
    k: Any
    v: Any
    queue: Any
    walked: Any
    modes: Any
    keys: Any
    bits: Any
    strips: Any
    tail_strips: Any
    out_tiles: Any
    out_tails: Any
    scale: Any


@gluon.jit
def put(cells, i, number, num_warps: gl.constexpr):
    """Keep a number in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    cells.index(i).store((gl.full([1], 0, cells.dtype, layout) + number).to(cells.dtype))


@gluon.jit
def get(cells, i, num_warps: gl.constexpr = 4):
    """A number that ``put`` kept."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    return gl.max(cells.index(i).load(layout), 0)


@gluon.jit
def put_item(items, base, item):
    """Keep a work item; by one warp."""
    put(items, base + VALID, item.valid, 1)
    put(items, base + START, item.start, 1)
    put(items, base + TOKEN, item.token, 1)
    put(items, base + BATCH, item.i_b, 1)
    put(items, base + CONTEXT, item.context, 1)
    put(items, base + LENGTH, item.length, 1)
    put(items, base + POSSIBLE, item.possible, 1)
    put(items, base + HEAD, item.i_h, 1)
    put(items, base + SPLIT, item.i_split, 1)
    put(items, base + ROW, item.row, 1)
    put(items, base + ALL_ROWS, item.all_rows, 1)
    put(items, base + SEQUENCE, item.i_n, 1)
    put(items, base + K_BEGIN, item.k_begin, 1)


@gluon.jit
def barriers(count: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def ring_of(
    dtype: gl.constexpr, COUNT: gl.constexpr, TILE: gl.constexpr, BOX: gl.constexpr, BLOCK_D: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """COUNT tiles of TILE rows, as boxes of BOX rows and as WGMMA reads them: 64 columns of all rows, then the next.

    The TAIL columns behind the first BLOCK_D have a box of 64 too, for the sake of one TMA descriptor for both.
    """
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BOXES: gl.constexpr = COUNT * (TILE // BOX)
    boxes = gl.allocate_shared_memory(dtype, [BOXES * (BLOCK_D // COLUMNS), 1, 1, BOX, COLUMNS], box_layout)
    tiles = boxes._reinterpret(dtype, [COUNT, TILE, BLOCK_D], tile_layout)
    tail_boxes = boxes
    tails = tiles
    if TAIL:
        tail_boxes = gl.allocate_shared_memory(dtype, [BOXES, 1, 1, BOX, COLUMNS], box_layout)
        tails = tail_boxes._reinterpret(dtype, [COUNT, TILE, COLUMNS], tile_layout)
    return boxes, tiles, tail_boxes, tails


@gluon.jit
def barriers_of_rings(
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr, OWN: gl.constexpr
):  # fmt: skip
    """Full and empty barriers of the rings of keys, of values and of queries.

    OWN: how many more of values that have landed come behind those of the stages, for tiles whose last values are
    zeroed before they are handed on.
    """
    k_full = barriers(STAGES)
    v_full = barriers(STAGES + OWN)
    k_empty = barriers(STAGES)
    v_empty = barriers(STAGES)
    q_full = barriers(Q_STAGES)
    q_empty = barriers(Q_STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(OWN):
        mbarrier.init(v_full.index(STAGES + i), count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    return k_full, k_empty, v_full, v_empty, q_full, q_empty


@gluon.jit
def make_channels(dtype: gl.constexpr, scale, config: gl.constexpr):
    """Allocate shared memory and initialise barriers."""
    cell_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    consumers: gl.constexpr = config.BLOCK_M // ROWS
    STAGES: gl.constexpr = config.STAGES
    Q_STAGES: gl.constexpr = config.Q_STAGES
    k_boxes, k_tiles, k_tail_boxes, k_tails = ring_of(
        dtype, STAGES, config.BLOCK_N, config.BOX, config.BLOCK_D, config.TAIL_D
    )
    v_boxes, v_tiles, v_tail_boxes, v_tails = ring_of(
        dtype, STAGES, config.BLOCK_N, config.BOX, config.BLOCK_DV, config.TAIL_DV
    )
    q_boxes, q_tiles, q_tail_boxes, q_tails = ring_of(
        dtype, Q_STAGES * consumers, ROWS, ROWS, config.BLOCK_D, config.TAIL_D
    )
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    num_strips: gl.constexpr = STAGES * (config.BLOCK_DV // COLUMNS) * (config.BLOCK_N // STRIP)
    strips = v_boxes._reinterpret(dtype, [num_strips, STRIP, COLUMNS], tile_layout)
    tail_strips = strips
    if config.TAIL_DV:
        num_tail_strips: gl.constexpr = STAGES * (config.BLOCK_N // STRIP)
        tail_strips = v_tail_boxes._reinterpret(dtype, [num_tail_strips, STRIP, COLUMNS], tile_layout)
    # Outputs go where the queries were, if they are as wide.
    out_tiles = q_tiles
    out_tails = q_tails
    if (config.BLOCK_DV != config.BLOCK_D) | (config.TAIL_DV != config.TAIL_D):
        _, out_tiles, _, out_tails = ring_of(dtype, consumers, ROWS, ROWS, config.BLOCK_DV, config.TAIL_DV)

    k_full, k_empty, v_full, v_empty, q_full, q_empty = barriers_of_rings(STAGES, Q_STAGES, consumers, 1)
    ENDS: gl.constexpr = 1 if config.AS_FREE and not config.TABLE else 0
    # Among these, as one barrier more that roles are given has them hold addresses in registers: 1.1 of the time.
    queue_full = barriers(QUEUE + ENDS)
    queue_empty = barriers(QUEUE)
    if ENDS:
        mbarrier.init(queue_full.index(QUEUE), count=1)
    for i in gl.static_range(QUEUE):
        mbarrier.init(queue_full.index(i), count=1)
        # The consumers, and the producers of keys and of values.
        mbarrier.init(queue_empty.index(i), count=consumers + 2)

    items = gl.allocate_shared_memory(gl.int32, [QUEUE * ITEM_SIZE, 1], cell_layout)
    scale_cell = gl.allocate_shared_memory(gl.float32, [1, 1], cell_layout)
    lists = gl.allocate_shared_memory(gl.int32, [QUEUE * 2, 32], cell_layout)
    modes = gl.allocate_shared_memory(gl.int32, [STAGES * consumers, 1], cell_layout)
    keys = gl.allocate_shared_memory(gl.int32, [STAGES, 32], cell_layout)
    bits = keys._reinterpret(gl.int32, [STAGES * 32, 1], cell_layout)
    walked = Walked(lists, queue_full, queue_empty)
    if config.TABLE:
        bits = gl.allocate_shared_memory(gl.int32, [STAGES, 32], cell_layout)
        pieces = gl.allocate_shared_memory(gl.int32, [2 * WALKED, 32], cell_layout)
        walked = Walked(pieces, barriers(WALKED), barriers(WALKED))
        for i in gl.static_range(WALKED):
            mbarrier.init(walked.full.index(i), count=1)
            # Both loaders.
            mbarrier.init(walked.empty.index(i), count=2)
    put(scale_cell, 0, scale, 4)
    fence_async_shared()
    return Channels(
        Ring(q_boxes, q_tiles, q_tail_boxes, q_tails, q_full, q_empty),
        Ring(k_boxes, k_tiles, k_tail_boxes, k_tails, k_full, k_empty),
        Ring(v_boxes, v_tiles, v_tail_boxes, v_tails, v_full, v_empty),
        Queue(items, lists, queue_full, queue_empty),
        walked,
        modes,
        keys,
        bits,
        strips,
        tail_strips,
        out_tiles,
        out_tails,
        scale_cell,
    )
