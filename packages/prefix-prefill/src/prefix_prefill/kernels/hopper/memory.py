"""Shared memory of the sm_90 kernel: rings of tiles with their barriers, and what consumers have beside."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from prefix_prefill.kernels.hopper.config import COLUMNS, STRIP


class Ring(NamedTuple):
    """A ring buffer in shared memory: tile i of keys, or of values, goes to stage ``i % STAGES``.

    ``boxes`` are the stages as TMA writes them, ``tiles`` the same bytes as they are read. Who fills a stage waits for
    its ``empty`` barrier and completes ``full``; who reads it waits for ``full`` and arrives at ``empty``. A barrier
    tells only odd phases from even ones: i // STAGES is the phase.
    """

    boxes: object
    tiles: object
    full: object
    empty: object


class Memory(NamedTuple):
    """What consumers have beside the rings: a tile of queries and of outputs (the same bytes), strips of 16 rows of the
    values, positions of rows, and a barrier for the edges of the keys.
    """

    q: object
    out: object
    v_strips: object
    positions: object
    zeroed: object


@gluon.jit
def wait_full(ring, i, C):
    """Until tile i has arrived."""
    mbarrier.wait(ring.full.index(i % C.STAGES), i // C.STAGES & 1)


@gluon.jit
def wait_empty(ring, i, C):
    """Until the stage of tile i is free. At first it is: waiting for the phase before the first returns at once."""
    mbarrier.wait(ring.empty.index(i % C.STAGES), (i // C.STAGES & 1) ^ 1)


@gluon.jit
def release(ring, i, C):
    """The stage of tile i has been read."""
    mbarrier.arrive(ring.empty.index(i % C.STAGES))


@gluon.jit
def barriers(C):
    """One barrier a stage."""
    return gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def tile_boxes(dtype: gl.constexpr, C):
    """Memory for all stages of 16-bit keys, or values, in boxes of BOX rows and COLUMNS columns."""
    count: gl.constexpr = C.STAGES * (C.BLOCK_D // COLUMNS) * (C.BLOCK_N // C.BOX)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    return gl.allocate_shared_memory(dtype, [count, 1, 1, C.BOX, COLUMNS], layout)


@gluon.jit
def fp8_boxes(d_cache, C):
    """Memory for all stages of 8-bit keys, or values, in boxes of BOX rows and WIDTH columns."""
    count: gl.constexpr = C.STAGES * (C.BLOCK_D // C.WIDTH) * (C.BLOCK_N // C.BOX)
    return gl.allocate_shared_memory(d_cache.dtype, [count, 1, 1, C.BOX, C.WIDTH], d_cache.layout)


@gluon.jit
def as_tiles(boxes, C):
    """Boxes as WGMMA reads them: COLUMNS columns of all rows of a stage, then the next COLUMNS."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return boxes._reinterpret(boxes.dtype, [C.STAGES, C.BLOCK_N, C.BLOCK_D], layout)


@gluon.jit
def as_strips(boxes, C):
    """Boxes as strips of STRIP rows and COLUMNS columns."""
    count: gl.constexpr = C.STAGES * (C.BLOCK_D // COLUMNS) * (C.BLOCK_N // STRIP)
    return boxes._reinterpret(boxes.dtype, [count, STRIP, COLUMNS], gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def as_fp8_tiles(boxes, C):
    """Boxes of 8-bit floats by WIDTH columns of all rows of a stage."""
    layout: gl.constexpr = gl.NVMMASharedLayout(C.WIDTH, 8, rank=2)
    return boxes._reinterpret(boxes.dtype, [C.STAGES * (C.BLOCK_D // C.WIDTH), C.BLOCK_N, C.WIDTH], layout)


@gluon.jit
def edge_barrier(C):
    """Where consumers wait until all have zeroed their strips of a tile."""
    zeroed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(zeroed.index(0), count=C.CONSUMERS)
    return zeroed
