"""Cached keys and values row by row, of pages that are no whole groups of eight rows, the least that TMA loads.

A warp copies 16 bytes a lane, asynchronously, to where TMA would put them. The addresses of a tile's keys are looked up
while the tile before it is copied.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from prefix_prefill.kernels.hopper.config import begin_of, width_of
from prefix_prefill.kernels.hopper.memory import as_strips, wait_empty

# Rows whose addresses are looked up together.
COPIED: gl.constexpr = gl.constexpr(32)


class Pool(NamedTuple):
    """Cached keys or values: a pointer, strides by (page, token, head) in units of 8 elements; the ring's memory in
    strips of rows, and a slot for where a tile's keys lie.
    """

    pointer: object
    strides: object
    strips: object
    places: object


@gluon.jit
def pool_of(pointer, strides, ring, TILES: gl.constexpr):
    """A pool whose rows go to a ring."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places = gl.allocate_shared_memory(gl.int64, [ring.tiles[0].shape[1] // COPIED, COPIED], layout)
    return Pool(pointer, strides, as_strips(ring, TILES, COPIED), places)


@gluon.jit
def places_of_keys(key, pool, source, loop, KEYS: gl.constexpr, C):
    """Where the keys of a tile lie, in units of 8 elements; -1 for those that no row sees, or whose pages do not exist.

    Found here, once for a key, as to each row 8 lanes copy, twice where heads are of 128.
    """
    o_key = key + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [1], [0]))
    seen = o_key < loop.cached_high
    if C.HAS_LEFT:
        seen = seen & (o_key >= loop.low)
    block = gl.load(source.p_row + o_key // C.PAGE, mask=seen, other=-1)
    place = block.to(gl.int64) * pool.strides[0]
    if C.PAGE > 1:
        place += (o_key % C.PAGE).to(gl.int64) * pool.strides[1]
    return gl.where((block >= 0) & (block < source.num_blocks), place, -1)


@gluon.jit
def gather_cached(pool, ring, before, count, source, loop, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """Load ``count`` tiles of cached keys, or of values, each as soon as its stage is empty; ``before`` were before."""
    KEYS: gl.constexpr = ring.tiles[0].shape[1]
    slots = pool.places._reinterpret(gl.int64, [1, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p_head = pool.pointer + source.i_kv.to(gl.int64) * pool.strides[2] * 8
    places = places_of_keys(loop.start, pool, source, loop, KEYS, C)
    for i in range(count):
        stage = (before + i) % ring.full.shape[0]
        slots.index(0).store(places)
        tl.debug_barrier()
        places = places_of_keys(loop.start + (i + 1) * KEYS, pool, source, loop, KEYS, C)
        wait_empty(ring, before + i)
        for strip in range(KEYS // COPIED):
            for t in gl.static_range(len(TILES)):
                copy_strip(pool, p_head, stage, strip, TILES, t, SIZE, C)
        # Counts its own arrivals, one a lane, which follow the copies; the stage waits for one more.
        async_copy.mbarrier_arrive(ring.full.index(stage))
        tl.debug_barrier()
        mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def copy_strip(pool, p_head, stage, strip, TILES: gl.constexpr, T: gl.constexpr, SIZE: gl.constexpr, C):
    """Copy the columns of tile T of a strip of rows. Rows that no one sees, and columns past the head's, become 0."""
    WIDTH: gl.constexpr = width_of(TILES[T], 16)
    COUNT: gl.constexpr = TILES[T] // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    o_column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    place = pool.places.index(strip).load(gl.SliceLayout(1, layout))
    # Of the sign alone, and with what differs between lanes added first, for each row there is an instruction less.
    there = (place >> 32).to(gl.int32) >= 0
    BEGIN: gl.constexpr = begin_of(TILES, T, SIZE)
    p_lane = p_head + BEGIN + o_column
    p_tile = p_lane[None, :] + (place * 8)[:, None]
    for i_c in gl.static_range(COUNT):
        mask = there[:, None] & (BEGIN + i_c * WIDTH + o_column < SIZE)[None, :]
        to = pool.strips[T].index((stage * COUNT + i_c) * pool.places.shape[0] + strip)
        async_copy.async_copy_global_to_shared(to, p_tile + i_c * WIDTH, mask)
