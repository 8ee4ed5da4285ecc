"""A stage of values as consumers of the sm_90 kernel have it: awaited, without what no row may see, and released."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from prefix_prefill.kernels.hopper.config import ROWS, STRIP, width_of
from prefix_prefill.kernels.hopper.items import is_inside
from prefix_prefill.kernels.hopper.memory import release, wait_full
from prefix_prefill.kernels.hopper.producers import end_of_tile, key_of_tile
from prefix_prefill.kernels.hopper.rows import afresh, row_layout


@gluon.jit
def meet(memory, meetings):
    """Wait until all consumers have come here; ``meetings`` of them were before, and, returned, are now."""
    mbarrier.arrive(memory.meeting.index(0))
    mbarrier.wait(memory.meeting.index(0), meetings & 1)
    return meetings + 1


@gluon.jit
def zero_rows_of_strip(strips, stage, strip, from_row, to_row, T: gl.constexpr, V, C):
    """Zero the rows before ``from_row`` and from ``to_row`` on in a strip of the tile that is a consumer's number T."""
    TILE: gl.constexpr = C.V_TILES[V.OWN[T]]
    COUNT: gl.constexpr = TILE // width_of(TILE, 16)
    layout: gl.constexpr = row_layout(TILE)
    row = strip * STRIP + afresh(gl.arange(0, STRIP, gl.SliceLayout(1, layout)))
    keep = (row >= from_row) & (row < to_row)
    for i_c in gl.static_range(COUNT):
        p_strip = strips[V.OWN[T]].index((stage * COUNT + i_c) * (C.V_KEYS // STRIP) + strip)
        b_strip = p_strip.load(layout)
        p_strip.store(gl.where(keep[:, None], b_strip, 0.0).to(b_strip.dtype))


@gluon.jit
def zero_packed(v, stage, i_group, from_row, to_row, C):
    """The same in all boxes of a stage of packed values that are not whole."""
    TILE: gl.constexpr = C.V_TILES[0]
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [C.BOX // 8, 256 // C.BOX], [1, 4], [0, 1])
    for box in range(i_group, C.BLOCK_N // C.BOX, C.GROUPS):
        key = box * C.BOX + afresh(gl.arange(0, C.BOX, gl.SliceLayout(1, layout)))
        keep = (key >= from_row) & (key < to_row)
        if (box * C.BOX < from_row) | (box * C.BOX + C.BOX > to_row):
            p_box = v.boxes[0].index(stage * (C.BLOCK_N // C.BOX) + box).reshape([TILE, C.BOX]).permute((1, 0))
            p_box.store(gl.where(keep[:, None], p_box.load(layout), 0.0).to(p_box.dtype))


@gluon.constexpr_function
def rows_of_box(strip, C):
    """Of the larger boxes that values come by, at least a strip."""
    return max(C.NEW_BOX if C.NEW_KV else C.BOX, strip)


@gluon.jit
def zero_masked_values(memory, v, stage, i_group, from_row, to_row, meetings, PACKED: gl.constexpr, V, C):
    """Zero the values of a stage before ``from_row`` and from ``to_row`` on: a weight of 0 times NaN would be NaN.

    Boxes that lie wholly outside came as zeros. Two groups of rows share the strips, and wait for each other's.
    """
    if PACKED:
        zero_packed(v, stage, i_group, from_row, to_row, C)
    else:
        BOX: gl.constexpr = rows_of_box(STRIP, C)
        begin = from_row // BOX * (BOX // STRIP)
        end = (to_row + BOX - 1) // BOX * (BOX // STRIP)
        for strip in range(begin + i_group, end, C.GROUPS):
            if (strip * STRIP < from_row) | (strip * STRIP + STRIP > to_row):
                for t in gl.static_range(len(V.OWN)):
                    zero_rows_of_strip(memory.v_strips, stage, strip, from_row, to_row, t, V, C)
    fence_async_shared()
    if C.GROUPS == 1:
        tl.debug_barrier()
    else:
        meetings = meet(memory, meetings)
    return meetings


@gluon.constexpr_function
def stages_in(C):
    """Stages of values that a tile takes."""
    return C.BLOCK_N // C.V_KEYS


@gluon.jit
def release_values(v, i, C):
    """The values of the tile at i have been read."""
    for part in gl.static_range(stages_in(C)):
        release(v, i * stages_in(C) + part)


@gluon.jit
def await_values(v, memory, i, part: gl.constexpr, at, i_group, seen, PACKED: gl.constexpr, V, C):
    """Until the values of tile i, or a part of them, are there, those that no row sees as zeros. Returns how often
    consumers have met.
    """
    before, meetings = at
    loop, inside = seen
    place = (before + i) * stages_in(C) + part
    wait_full(v, place, C)
    if not is_inside(i, inside, loop, C):
        key = key_of_tile(i, loop, C) + part * C.V_KEYS
        from_row = gl.maximum(loop.low - key, 0)
        to_row = gl.minimum(end_of_tile(i, loop, C) - key, C.V_KEYS)
        if C.V_KEYS < C.BLOCK_N:
            # Of one part there may be none that any row sees.
            from_row = gl.minimum(from_row, C.V_KEYS)
            to_row = gl.maximum(to_row, 0)
        # Whole boxes come as zeros or as they are, and no consumer waits for another one.
        if (from_row % rows_of_box(STRIP, C) > 0) | (to_row % rows_of_box(STRIP, C) > 0):
            stage = place % v.full.shape[0]
            meetings = zero_masked_values(memory, v, stage, i_group, from_row, to_row, meetings, PACKED, V, C)
    return meetings


@gluon.jit
def parts_of(weights, C):
    """Weights of the keys of each stage of values that a tile takes."""
    if stages_in(C) == 1:
        parts = (weights,)
    else:
        parts = gl.split(gl.permute(gl.reshape(weights, [ROWS, 2, C.V_KEYS]), (0, 2, 1)))
    return parts
