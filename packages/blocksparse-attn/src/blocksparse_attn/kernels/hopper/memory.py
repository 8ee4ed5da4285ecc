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

# Rows of a consumer warpgroup, keys of an entry of the merged lists, and columns of a TMA box: 128 bytes of 16-bit
# elements, over which shared memory is swizzled.
ROWS: tl.constexpr = tl.constexpr(64)
KEYS: tl.constexpr = tl.constexpr(64)
COLUMNS: tl.constexpr = tl.constexpr(64)
# Rows of values that are zeroed together: one repetition of the swizzle.
STRIP: tl.constexpr = tl.constexpr(8)
# The position of keys that are not there: after all others, and 64 more do not overflow.
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 128)
# Work items in the queue.
QUEUE: tl.constexpr = tl.constexpr(2)


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
FROM_A: tl.constexpr = tl.constexpr(13)
END_A: tl.constexpr = tl.constexpr(14)
LAST_A: tl.constexpr = tl.constexpr(15)
FROM_B: tl.constexpr = tl.constexpr(16)
END_B: tl.constexpr = tl.constexpr(17)
LAST_B: tl.constexpr = tl.constexpr(18)
ITEM_SIZE: tl.constexpr = tl.constexpr(19)

# A tile of keys has a header: for A, then for B, where each half of it begins, counted from the consumer's first row,
# or NOWHERE if the consumer does not list that half; and whether it is a tile, or the end of the work item.
HEADER_SIZE: tl.constexpr = tl.constexpr(5)
HEADER_VALID: tl.constexpr = tl.constexpr(4)


class Item(NamedTuple):
    """A work item: 64 rows of one head for each consumer, A and B, and one split of their keys.

    It is kept in shared memory, number by number: a consumer reads most of them after its main loop, and would
    otherwise hold them in registers through it. ``start``: the position of the first row in its sequence. ``token`` and
    ``row``: add a position to get a row of q, out and lse, in sequence ``i_b`` of a padded batch, and one of the
    partial results. Positions from ``context`` to ``length`` - 1 are queries. ``from_a`` to ``end_a`` are A's entries
    of 64 keys, and ``last_a`` is the last position that its rows see; so for B.
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
    from_a: Any
    end_a: Any
    last_a: Any
    from_b: Any
    end_b: Any
    last_b: Any


class Ring(NamedTuple):
    """Stages of a ring buffer: the same bytes as the boxes that TMA fills and as the tiles that WGMMA reads."""

    boxes: Any
    tiles: Any
    full: Any
    empty: Any


class Queue(NamedTuple):
    """Work items in flight from the scheduler to the other roles."""

    items: Any
    full: Any
    empty: Any


class Channels(NamedTuple):
    """All that roles share. ``strips``: the values again, 8 rows each. ``out_tiles``: where outputs are staged."""

    q: Any
    k: Any
    v: Any
    queue: Any
    headers: Any
    strips: Any
    out_tiles: Any
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
    put(items, base + FROM_A, item.from_a, 1)
    put(items, base + END_A, item.end_a, 1)
    put(items, base + LAST_A, item.last_a, 1)
    put(items, base + FROM_B, item.from_b, 1)
    put(items, base + END_B, item.end_b, 1)
    put(items, base + LAST_B, item.last_b, 1)


@gluon.jit
def barriers(count: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


@gluon.jit
def make_channels(dtype: gl.constexpr, scale, config: gl.constexpr):
    """Allocate shared memory and initialise barriers."""
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    cell_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    consumers: gl.constexpr = config.BLOCK_M // ROWS
    STAGES: gl.constexpr = config.STAGES
    Q_STAGES: gl.constexpr = config.Q_STAGES
    q_count: gl.constexpr = Q_STAGES * consumers * (config.BLOCK_D // COLUMNS)
    k_count: gl.constexpr = STAGES * (config.BLOCK_D // COLUMNS) * (config.BLOCK_N // config.BOX)
    v_count: gl.constexpr = STAGES * (config.BLOCK_DV // COLUMNS) * (config.BLOCK_N // config.BOX)
    q_boxes = gl.allocate_shared_memory(dtype, [q_count, 1, 1, ROWS, COLUMNS], box_layout)
    k_boxes = gl.allocate_shared_memory(dtype, [k_count, 1, 1, config.BOX, COLUMNS], box_layout)
    v_boxes = gl.allocate_shared_memory(dtype, [v_count, 1, 1, config.BOX, COLUMNS], box_layout)
    # The same bytes as WGMMA reads them: 64 columns of all rows, then the next 64.
    q_tiles = q_boxes._reinterpret(dtype, [Q_STAGES * consumers, ROWS, config.BLOCK_D], tile_layout)
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, config.BLOCK_N, config.BLOCK_D], tile_layout)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, config.BLOCK_N, config.BLOCK_DV], tile_layout)
    num_strips: gl.constexpr = STAGES * (config.BLOCK_DV // COLUMNS) * (config.BLOCK_N // STRIP)
    strips = v_boxes._reinterpret(dtype, [num_strips, STRIP, COLUMNS], tile_layout)
    # Outputs go where the queries were, if they are as wide.
    out_tiles = q_tiles
    if config.BLOCK_DV != config.BLOCK_D:
        out_tiles = gl.allocate_shared_memory(dtype, [consumers, ROWS, config.BLOCK_DV], tile_layout)

    k_full = barriers(STAGES)
    # One more for tiles whose last values are zeroed before they are handed on.
    v_full = barriers(STAGES + 1)
    k_empty = barriers(STAGES)
    v_empty = barriers(STAGES)
    q_full = barriers(Q_STAGES)
    q_empty = barriers(Q_STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=consumers)
        mbarrier.init(v_empty.index(i), count=consumers)
    mbarrier.init(v_full.index(STAGES), count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=consumers)
    queue_full = barriers(QUEUE)
    queue_empty = barriers(QUEUE)
    for i in gl.static_range(QUEUE):
        mbarrier.init(queue_full.index(i), count=1)
        # The consumers, and the producers of keys and of values.
        mbarrier.init(queue_empty.index(i), count=consumers + 2)

    items = gl.allocate_shared_memory(gl.int32, [QUEUE * ITEM_SIZE, 1], cell_layout)
    scale_cell = gl.allocate_shared_memory(gl.float32, [1, 1], cell_layout)
    headers = gl.allocate_shared_memory(gl.int32, [STAGES * HEADER_SIZE, 1], cell_layout)
    put(scale_cell, 0, scale, 4)
    fence_async_shared()
    return Channels(
        Ring(q_boxes, q_tiles, q_full, q_empty),
        Ring(k_boxes, k_tiles, k_full, k_empty),
        Ring(v_boxes, v_tiles, v_full, v_empty),
        Queue(items, queue_full, queue_empty),
        headers,
        strips,
        out_tiles,
        scale_cell,
    )
