"""Queries of the sm_90 kernel that are copied ahead: while results are stored, those of the next item arrive.

load v  --full-->  consume  --empty-->  load v
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from prefix_prefill.kernels.hopper.config import ROWS, column_of, width_of
from prefix_prefill.kernels.hopper.memory import tile_layout
from prefix_prefill.kernels.hopper.rows import rows_of

# Rows whose addresses are made together.
COPIED: gl.constexpr = gl.constexpr(32)


class Queries(NamedTuple):
    """A ring of two stages: the pointer and strides of q, memory in strips of rows, barriers."""

    pointer: object
    strides: object
    strips: object
    full: object
    empty: object


@gluon.constexpr_function
def strips_of(tile, C):
    """The shape of a tile of queries, of all stages and groups, as strips of rows of 128 bytes or less."""
    width = width_of(tile, 16)
    return [C.Q_STAGES * C.GROUPS * (tile // width) * (ROWS // COPIED), COPIED, width]


@gluon.jit
def queries_of(pointer, strides, tiles, C):
    """The ring over memory for tiles of queries."""
    strips = ()
    for t in gl.static_range(len(C.K_TILES)):
        strips = strips + (
            tiles[t]._reinterpret(tiles[t].dtype, strips_of(C.K_TILES[t], C), tile_layout(C.K_TILES[t], 16)),
        )
    full = gl.allocate_shared_memory(gl.int64, [C.Q_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [C.Q_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(C.Q_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=C.CONSUMERS)
    # The third stride is None, which nothing can return.
    return Queries(pointer, (strides[0], strides[1]), strips, full, empty)


@gluon.jit
def await_queries(ring, i_item, C):
    """Until those of item i have arrived."""
    mbarrier.wait(ring.full.index(i_item % C.Q_STAGES), i_item // C.Q_STAGES & 1)
    # What lanes copied, WGMMA reads by another proxy.
    fence_async_shared()


@gluon.jit
def copy_queries(ring, tile, i_item, C):
    """Copy those of item i, as soon as its stage is empty: nobody reads it, or stores results through it."""
    stage = i_item % C.Q_STAGES
    mbarrier.wait(ring.empty.index(stage), (i_item // C.Q_STAGES & 1) ^ 1)
    for strip in range(C.GROUPS * ROWS // COPIED):
        for t in gl.static_range(len(C.K_TILES)):
            copy_strip(ring, tile, stage, strip, t, C)
    # Counts its own arrivals, one a lane, which follow the copies; the stage waits for one more.
    async_copy.mbarrier_arrive(ring.full.index(stage))
    tl.debug_barrier()
    mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def copy_strip(ring, tile, stage, strip, T: gl.constexpr, C):
    """Copy the columns of tile T of a strip of rows. Rows that there are not, and columns past the head's, become 0."""
    WIDTH: gl.constexpr = width_of(C.K_TILES[T], 16)
    COUNT: gl.constexpr = C.K_TILES[T] // WIDTH
    STRIPS: gl.constexpr = ROWS // COPIED
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    o_t, o_h, m_row = rows_of(strip * COPIED + gl.arange(0, COPIED, gl.SliceLayout(1, layout)), tile, C)
    o_row = (tile.begin + o_t).to(gl.int64) * ring.strides[0] + o_h.to(gl.int64) * ring.strides[1]
    o_column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    p_lane = ring.pointer + column_of(C.K_TILES, T) + o_column
    p_strip = p_lane[None, :] + (o_row * 8)[:, None]
    for i_c in gl.static_range(COUNT):
        mask = m_row[:, None] & (column_of(C.K_TILES, T) + i_c * WIDTH + o_column < C.D)[None, :]
        at = ((stage * C.GROUPS + strip // STRIPS) * COUNT + i_c) * STRIPS + strip % STRIPS
        async_copy.async_copy_global_to_shared(ring.strips[T].index(at), p_strip + i_c * WIDTH, mask)
