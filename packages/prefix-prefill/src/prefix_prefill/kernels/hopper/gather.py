"""Cached keys and values row by row, of pages that are no whole groups of eight rows, the least that TMA loads.

A warp copies 16 bytes a lane, asynchronously, to where TMA would put them. The pages of a tile are looked up while the
tile before it is copied.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from prefix_prefill.kernels.hopper.config import STRIP, column_of, width_of
from prefix_prefill.kernels.hopper.memory import as_strips, wait_empty


class Pool(NamedTuple):
    """Cached keys or values: a pointer, strides by (page, token, head) in units of 8 elements; the ring's memory in
    strips of rows, and a slot for the pages of a tile's keys.
    """

    pointer: object
    strides: object
    strips: object
    pages: object


@gluon.jit
def pool_of(pointer, strides, ring, TILES: gl.constexpr, C):
    """A pool whose rows go to a ring."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pages = gl.allocate_shared_memory(gl.int32, [C.BLOCK_N // STRIP, STRIP], layout)
    return Pool(pointer, strides, as_strips(ring.boxes, TILES, C), pages)


@gluon.jit
def pages_of_keys(key, source, loop, C):
    """The pages of a tile's keys; -1 for those that no row sees, or that do not exist."""
    o_key = key + gl.arange(0, C.BLOCK_N, gl.BlockedLayout([1], [32], [1], [0]))
    seen = o_key < loop.cached_high
    if C.HAS_LEFT:
        seen = seen & (o_key >= loop.low)
    block = gl.load(source.p_row + o_key // C.PAGE, mask=seen, other=-1)
    return gl.where((block >= 0) & (block < source.num_blocks), block, -1).to(gl.int32)


@gluon.jit
def gather_cached(pool, ring, before, count, source, loop, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """Load ``count`` tiles of cached keys, or of values, each as soon as its stage is empty; ``before`` were before."""
    slots = pool.pages._reinterpret(gl.int32, [1, C.BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p_head = pool.pointer + source.i_kv.to(gl.int64) * pool.strides[2] * 8
    pages = pages_of_keys(loop.start, source, loop, C)
    for i in range(count):
        stage = (before + i) % C.STAGES
        key = loop.start + i * C.BLOCK_N
        slots.index(0).store(pages)
        tl.debug_barrier()
        pages = pages_of_keys(key + C.BLOCK_N, source, loop, C)
        wait_empty(ring, before + i, C)
        for strip in range(C.BLOCK_N // STRIP):
            for t in gl.static_range(len(TILES)):
                copy_strip(pool, p_head, stage, strip, key, TILES, t, SIZE, C)
        # Counts its own arrivals, one a lane, which follow the copies; the stage waits for one more.
        async_copy.mbarrier_arrive(ring.full.index(stage))
        tl.debug_barrier()
        mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def copy_strip(pool, p_head, stage, strip, key, TILES: gl.constexpr, T: gl.constexpr, SIZE: gl.constexpr, C):
    """Copy the columns of tile T of a strip of rows. Rows that no one sees, and columns past the head's, become 0."""
    WIDTH: gl.constexpr = width_of(TILES[T], 16)
    COUNT: gl.constexpr = TILES[T] // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    o_row = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    o_column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    block = pool.pages.index(strip).load(gl.SliceLayout(1, layout))
    o_element = block.to(gl.int64) * pool.strides[0]
    if C.PAGE > 1:
        token = (key + strip * STRIP + o_row) % C.PAGE
        o_element += token.to(gl.int64) * pool.strides[1]
    p_row = p_head + (o_element * 8)[:, None]
    for i_c in gl.static_range(COUNT):
        column = column_of(TILES, T) + i_c * WIDTH + o_column
        mask = (block >= 0)[:, None] & (column < SIZE)[None, :]
        to = pool.strips[T].index((stage * COUNT + i_c) * (C.BLOCK_N // STRIP) + strip)
        async_copy.async_copy_global_to_shared(to, p_row + column[None, :], mask)
