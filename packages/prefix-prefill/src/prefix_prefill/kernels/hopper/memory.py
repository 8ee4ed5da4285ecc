"""Shared memory of the sm_90 kernel: rings of tiles with their barriers, and what consumers have beside."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from prefix_prefill.kernels.hopper.config import ROWS, is_gathered, width_of


class Ring(NamedTuple):
    """A ring buffer in shared memory: tile i of keys, or tile or half i of values, goes to stage ``i % STAGES``, which
    is ``full.shape[0]``; a stage is of ``tiles[0].shape[1]`` keys.

    A head's columns are one or more tiles: of each, ``boxes`` are the stages as TMA writes them, ``tiles`` the same
    bytes as they are read. Who fills a stage waits for its ``empty`` barrier and completes ``full``; who reads it waits
    for ``full`` and arrives at ``empty``. A barrier tells only odd phases from even ones: i // STAGES is the phase.
    """

    boxes: object
    tiles: object
    full: object
    empty: object


class Scales(NamedTuple):
    """Scales of the tokens in a tile, those of values in units of a power of two that is as large as the largest.

    There is one slot more than stages: a stage of keys is free for the next tile once these are multiplied, when
    consumers may still read the scales.
    """

    k: object
    v: object
    units: object


class Memory(NamedTuple):
    """What consumers have beside the rings: tiles of queries and, in the same bytes or not at all, of outputs; strips
    of 16 rows of the values, positions of rows and halves of their masks of drafts, and a barrier at which consumers
    meet; scales of tokens; the rings as packed keys and values fill them, or None.
    """

    q: object
    out: object
    v_strips: object
    positions: object
    meeting: object
    scales: object
    packed: object


@gluon.jit
def wait_full(ring, i, C):
    """Until tile i has arrived."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(i % STAGES), i // STAGES & 1)
    if is_gathered(C):
        # What lanes copied, WGMMA reads by another proxy.
        fence_async_shared()


@gluon.jit
def wait_empty(ring, i):
    """Until the stage of tile i is empty. At the start all are: waiting for the phase before returns at once."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.empty.index(i % STAGES), (i // STAGES & 1) ^ 1)


@gluon.jit
def release(ring, i):
    """The stage of tile i has been read."""
    mbarrier.arrive(ring.empty.index(i % ring.full.shape[0]))


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """One barrier a stage."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@gluon.constexpr_function
def tile_layout(tile, bits, rank=2):
    """Of tiles of so many columns, and of their boxes: swizzled over the bytes that one TMA load brings of a row."""
    return gl.NVMMASharedLayout(width_of(tile, bits) * bits // 8, bits, rank=rank)


@gluon.constexpr_function
def boxes_in(tile, bits, box, rows):
    """The shape of all stages of a tile as boxes of so many of all rows, one side of WGMMA's tiles after the other."""
    width = width_of(tile, bits)
    return [tile // width * (rows // box), 1, 1, box, width]


@gluon.constexpr_function
def strips_in(tile, strip, rows):
    """Likewise as strips of so many rows."""
    width = width_of(tile, 16)
    return [tile // width * (rows // strip), strip, width]


@gluon.jit
def boxes_of(dtype: gl.constexpr, TILES: gl.constexpr, ALL_ROWS: gl.constexpr, C):
    """Memory for all stages of keys, or of values, so many rows, tile by tile in boxes of BOX rows and 128 bytes."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    boxes = ()
    for t in gl.static_range(len(TILES)):
        memory = gl.allocate_shared_memory(
            dtype, boxes_in(TILES[t], BITS, C.BOX, ALL_ROWS), tile_layout(TILES[t], BITS, 4)
        )
        boxes = boxes + (memory,)
    return boxes


@gluon.constexpr_function
def packed_layout(keys, size, box, is_values):
    """Of a tile [keys, size] that comes in boxes of so many tokens of a packed cache.

    Of keys, 8 tokens by 8 elements lie as WGMMA's core matrices, those of a head's elements one after the other. Of
    values, a box is [size, box], a row of it swizzled over its bytes.
    """
    in_row = [[1 << i, 0] for i in range(box.bit_length() - 1)]
    if not is_values:
        in_row = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    of_head = [[0, 1 << i] for i in range(0 if is_values else 3, size.bit_length() - 1)]
    # Addresses' bits from 7 on are added to as many, from 4 on, as tell the 16 bytes of a row.
    chunks = len(in_row) - 3 if is_values else 0
    for i in range(chunks):
        of_head[3 - chunks + i] = [8 << i, of_head[3 - chunks + i][1]]
    boxes = [[1 << i, 0] for i in range((box if is_values else 8).bit_length() - 1, keys.bit_length() - 1)]
    return gl.SharedLinearLayout(in_row + of_head + boxes)


@gluon.constexpr_function
def step_layout(keys, size):
    """Of 16 elements of the keys in a tile of packed ones: as ``packed_layout``, but for other elements' bits."""
    core = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [0, 8]]
    others = [[0, 0]] * (size.bit_length() - 5)
    return gl.SharedLinearLayout(core + others + [[1 << i, 0] for i in range(3, keys.bit_length() - 1)])


@gluon.jit
def step_of_packed_keys(ring, stage, step, C):
    """What a WGMMA multiplies of a stage of packed keys: 16 elements of each, at an address of their own."""
    dtype: gl.constexpr = ring.tiles[0].dtype
    # Two core matrices are side by side.
    STEPS: gl.constexpr = C.BLOCK_N * C.D // 128
    steps = ring.tiles[0]._reinterpret(
        dtype, [ring.full.shape[0] * STEPS, 1, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    return steps.index(stage * STEPS + step)._reinterpret(dtype, [C.BLOCK_N, 16], step_layout(C.BLOCK_N, C.D))


@gluon.jit
def packed_ring(ring, SIZE: gl.constexpr, IS_VALUES: gl.constexpr, C):
    """A ring as packed keys or values of heads of so many elements fill it, and as WGMMA reads those."""
    dtype: gl.constexpr = ring.boxes[0].dtype
    STAGES: gl.constexpr = ring.full.shape[0]
    layout: gl.constexpr = packed_layout(C.BLOCK_N, SIZE, C.BOX, IS_VALUES)
    tiles = ring.boxes[0]._reinterpret(dtype, [STAGES, C.BLOCK_N, SIZE], layout)
    if IS_VALUES:
        # As TMA swizzles a row of the box, of 32 bytes or more.
        boxes = ring.boxes[0]._reinterpret(
            dtype, [STAGES * C.BLOCK_N // C.BOX, 1, 1, SIZE, C.BOX], gl.NVMMASharedLayout(2 * C.BOX, 16, rank=4)
        )
    else:
        boxes = ring.boxes[0]._reinterpret(
            dtype, [STAGES * C.BLOCK_N // 8, 1, 1, SIZE // 8, 64], gl.NVMMASharedLayout(0, 16, rank=4)
        )
    return Ring((boxes,), (tiles,), ring.full, ring.empty)


@gluon.jit
def with_new_boxes(ring, TILES: gl.constexpr, C):
    """A ring of 16 bits as TMA fills it with new rows."""
    dtype: gl.constexpr = ring.boxes[0].dtype
    ALL_ROWS: gl.constexpr = ring.full.shape[0] * ring.tiles[0].shape[1]
    boxes = ()
    for t in gl.static_range(len(TILES)):
        boxes = boxes + (as_new_boxes(ring.boxes[t], dtype, TILES[t], ALL_ROWS, C),)
    return Ring(boxes, ring.tiles, ring.full, ring.empty)


@gluon.jit
def as_new_boxes(boxes, dtype: gl.constexpr, TILE: gl.constexpr, ALL_ROWS: gl.constexpr, C):
    """All stages of a tile as boxes of new rows."""
    return boxes._reinterpret(dtype, boxes_in(TILE, 16, C.NEW_BOX, ALL_ROWS), tile_layout(TILE, 16, 4))


@gluon.jit
def as_tiles(boxes, TILES: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr):
    """Boxes as WGMMA reads them: as many columns of all rows of a stage as a box has, then the next."""
    dtype: gl.constexpr = boxes[0].dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    tiles = ()
    for t in gl.static_range(len(TILES)):
        tiles = tiles + (boxes[t]._reinterpret(dtype, [STAGES, KEYS, TILES[t]], tile_layout(TILES[t], BITS)),)
    return tiles


@gluon.jit
def as_strips(ring, TILES: gl.constexpr, STRIP: gl.constexpr):
    """A ring as strips of so many rows, in the order of stages, columns and rows."""
    dtype: gl.constexpr = ring.boxes[0].dtype
    ALL_ROWS: gl.constexpr = ring.full.shape[0] * ring.tiles[0].shape[1]
    strips = ()
    for t in gl.static_range(len(TILES)):
        strips = strips + (
            ring.boxes[t]._reinterpret(dtype, strips_in(TILES[t], STRIP, ALL_ROWS), tile_layout(TILES[t], 16)),
        )
    return strips


@gluon.jit
def query_tiles(dtype: gl.constexpr, TILES: gl.constexpr, C):
    """Memory for each group of rows of q, tile by tile."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    tiles = ()
    for t in gl.static_range(len(TILES)):
        memory = gl.allocate_shared_memory(dtype, [C.GROUPS, ROWS, TILES[t]], tile_layout(TILES[t], BITS))
        tiles = tiles + (memory,)
    return tiles


@gluon.jit
def as_dtype(tiles, dtype: gl.constexpr):
    """Tiles as ones of another dtype of as many bits."""
    others = ()
    for t in gl.static_range(len(tiles)):
        others = others + (tiles[t]._reinterpret(dtype, tiles[t].shape, tiles[t].layout),)
    return others


@gluon.jit
def scales_of_tokens(C):
    """Slots for the scales of tokens."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(gl.float32, [C.STAGES + 1, C.BLOCK_N], layout)
    v = gl.allocate_shared_memory(gl.float32, [C.STAGES + 1, C.BLOCK_N], layout)
    units = gl.allocate_shared_memory(gl.float32, [C.STAGES + 1, 1], layout)
    return Scales(k, v, units)


@gluon.jit
def meeting_barrier(C):
    """Where consumers wait until all have written to shared memory what all read."""
    meeting = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(meeting.index(0), count=C.CONSUMERS)
    return meeting
