"""What the kernel for sm_90 does with a chunk: its outputs are stored, and the state after it is returned."""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lightning_attn.kernels.decay import into_float16, inverse
from lightning_attn.kernels.hopper_ring import expect_chunk, load_chunk, state_layout, tile_of
from lightning_attn.kernels.hopper_rows import opaque, tile_layout, zero_after


class Buffers(NamedTuple):
    """Shared memory beside the ring: scores as an operand, tiles of outputs being stored, and decay weights.

    up: what a query's scores are scaled by (float16 alone).
    """

    scores: Any
    o: Any
    within: Any
    seeing: Any
    entering: Any
    up: Any


class Chunk(NamedTuple):
    """Chunk i, of ``length`` rows from ``row`` on; its step loads the one that begins at row ``ahead``."""

    i: Any
    row: Any
    ahead: Any
    length: Any


@gluon.constexpr_function
def out_layout(sizes):
    """Registers of outputs [BLOCK_E, queries], accumulators."""
    along = min(sizes.WARPS, sizes.BLOCK_E // 16)
    return gl.NVMMADistributedLayout(
        [3, 0], [along, sizes.WARPS // along], [16, sizes.CHUNK * along // sizes.WARPS, 16]
    )


@gluon.constexpr_function
def columns_by_lanes(sizes):
    """Columns of outputs that lanes store, beside 64 that TMA does, where one program has both by roles: 16 or 32.

    TMA takes as long for a row of 16 bytes as for one of 128.
    """
    rest = sizes.E - 64
    is_few = sizes.BLOCK_E == 128 and sizes.BLOCK_D == 64 and sizes.D > 64 and 0 < rest <= 32
    return (16 if rest <= 16 else 32) if is_few else 0


@gluon.constexpr_function
def scores_registers(CHUNK, WARPS):
    """Registers of scores [keys, queries], accumulators. Of two warpgroups each has all rows of half the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, CHUNK * 4 // WARPS, 16])


@gluon.constexpr_function
def out_stages(STAGES):
    """Tiles of outputs being stored: one beside two stages, so that two programs fit in the memory of an SM."""
    return 2 if STAGES > 2 else 1


@gluon.jit
def values_entering(ring, buffers, v_tile, stage, phase, sizes: gl.constexpr):
    """A chunk's values with the weights with which they enter the state, transposed, as an operand in registers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout(sizes), 2)
    mbarrier.wait(ring.full_v.index(stage), phase)
    b_entering = buffers.entering.load(gl.SliceLayout(0, operand))
    b_v = v_tile.permute((1, 0)).load(operand)
    return (b_v.to(gl.float32) * b_entering[None, :]).to(v_tile.dtype)


@gluon.jit
def await_chunk(ring, stage, phase, length, sizes: gl.constexpr, MASKED: gl.constexpr):
    """Wait for a chunk's q and k, and, of a short one, for v: rows of another sequence are zeroed."""
    CHUNK: gl.constexpr = sizes.CHUNK
    mbarrier.wait(ring.full_q.index(stage), phase)
    mbarrier.wait(ring.full_k.index(stage), phase)
    if MASKED:
        mbarrier.wait(ring.full_v.index(stage), phase)
        zero_after(tile_of(ring.k, stage, sizes), length, CHUNK, sizes.BLOCK_D, sizes.WARPS)
        v_tile = ring.v.index(stage).reshape([CHUNK, sizes.BLOCK_E])
        zero_after(v_tile, length, CHUNK, sizes.BLOCK_E, sizes.WARPS)
        fence_async_shared()
        tl.debug_barrier()


@gluon.jit
def begin_scores(ring, stage, sizes: gl.constexpr):
    """Scores being multiplied: [keys, queries], in float16 [queries, keys]."""
    CHUNK: gl.constexpr = sizes.CHUNK
    L_SCORES: gl.constexpr = scores_registers(CHUNK, sizes.WARPS)
    b_zero = gl.zeros([CHUNK, CHUNK], gl.float32, L_SCORES)
    first = tile_of(ring.k, stage, sizes)
    second = tile_of(ring.q, stage, sizes)
    if first.dtype == gl.float16:
        first, second = second, first
    return warpgroup_mma(first, second.permute((1, 0)), b_zero, use_acc=False, is_async=True)


@gluon.jit
def store_scores(buffers, b_scores, sizes: gl.constexpr):
    """Make the weighted scores an operand; behind a barrier, they are."""
    dtype: gl.constexpr = buffers.scores.dtype
    L_SCORES: gl.constexpr = scores_registers(sizes.CHUNK, sizes.WARPS)
    b_scores = b_scores * buffers.within.load(L_SCORES)
    if dtype == gl.float16:
        b_up_scores, _ = into_float16(gl.max(gl.abs(b_scores), axis=1))
        buffers.up.store(b_up_scores)
        buffers.scores.permute((1, 0)).store((b_scores * b_up_scores[:, None]).to(dtype))
    else:
        buffers.scores.store(b_scores.to(dtype))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def weighted(buffers, b_seen, b_down, sizes: gl.constexpr):
    """What queries see of the state, with its weights. b_down: of the state's scaling in float16."""
    L_O: gl.constexpr = out_layout(sizes)
    b_seeing = buffers.seeing.load(gl.SliceLayout(0, L_O))
    if b_down is not None:
        b_seen = b_seen * gl.convert_layout(b_down, gl.SliceLayout(1, L_O))[:, None]
        b_seeing = b_seeing * buffers.up.load(gl.SliceLayout(0, L_O))
    return b_seen * b_seeing[None, :]


@gluon.jit
def free_tile(buffers, b_o, sizes: gl.constexpr):
    """Outputs in their own dtype, and all warps where one more tile of them can be stored."""
    dtype: gl.constexpr = buffers.scores.dtype
    if dtype == gl.float16:
        b_o = b_o * inverse(buffers.up.load(gl.SliceLayout(0, out_layout(sizes))))[None, :]
    b_o = b_o.to(dtype)
    tma.store_wait(out_stages(sizes.STAGES) - 1)
    tl.debug_barrier()
    return b_o


@gluon.jit
def store_outputs(d_o, buffers, o, work, chunk, b_o, sizes: gl.constexpr, MASKED: gl.constexpr):
    """Begin to store a chunk's outputs [BLOCK_E, queries]."""
    o_tile = buffers.o.index(chunk.i % out_stages(sizes.STAGES))
    store_tile_of_outputs(d_o, o_tile, o, work, chunk, b_o, sizes, MASKED)


@gluon.jit
def store_tile_of_outputs(d_o, o_tile, o, work, chunk, b_o, sizes: gl.constexpr, MASKED: gl.constexpr):
    """``store_outputs`` through this tile of shared memory."""
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    o_tile.reshape([CHUNK, BLOCK_E]).permute((1, 0)).store(b_o)
    if MASKED:
        tl.debug_barrier()
        layout: gl.constexpr = tile_layout(BLOCK_E, sizes.WARPS)
        o_row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        o_e = work.column + gl.arange(0, BLOCK_E, gl.SliceLayout(0, layout))
        p_tile = o.p + (chunk.row + o_row)[:, None].to(gl.int64) * o.stride + o_e[None, :] * o.element
        m = o_row[:, None] < chunk.length
        if sizes.E % BLOCK_E:
            m = m & (o_e[None, :] < sizes.E)
        gl.store(p_tile, o_tile.reshape([CHUNK, BLOCK_E]).load(layout), mask=m)
    else:
        fence_async_shared()
        tl.debug_barrier()
        REST: gl.constexpr = columns_by_lanes(sizes)
        if REST:
            o_first = o_tile.slice(0, 64, dim=3)
            tma.async_copy_shared_to_global(d_o, [work.i_box, work.i_h, chunk.row, work.column], o_first)
            lanes: gl.constexpr = gl.BlockedLayout([1, 2], [64 // REST, REST // 2], [sizes.WARPS, 1], [1, 0])
            o_row = gl.arange(0, CHUNK, gl.SliceLayout(1, lanes))
            o_e = 64 + gl.arange(0, REST, gl.SliceLayout(0, lanes))
            b_rest = o_tile.reshape([CHUNK, BLOCK_E]).slice(64, REST, dim=1).load(lanes)
            p_tile = o.p + (chunk.row + o_row)[:, None].to(gl.int64) * o.stride + o_e[None, :] * o.element
            gl.store(p_tile, b_rest, mask=o_e[None, :] < sizes.E)
        else:
            tma.async_copy_shared_to_global(d_o, [work.i_box, work.i_h, chunk.row, work.column], o_tile)


@gluon.jit
def step(
    tensors, ring, buffers, o, work, chunk, acc_S, decay, sizes: gl.constexpr, MASKED: gl.constexpr,
    SNAPSHOTS: gl.constexpr,
):  # fmt: skip
    """One chunk: store its outputs, return the state after it."""
    dtype: gl.constexpr = buffers.scores.dtype
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    L_O: gl.constexpr = out_layout(sizes)
    operand_of_o: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    i_load = chunk.i + work.own
    stage = i_load % sizes.STAGES
    q_tile = tile_of(ring.q, stage, sizes)
    k_tile = tile_of(ring.k, stage, sizes)
    v_tile = ring.v.index(stage).reshape([CHUNK, BLOCK_E])
    phase = (i_load // sizes.STAGES) & 1
    await_chunk(ring, stage, phase, chunk.length, sizes, MASKED)
    scores = begin_scores(ring, stage, sizes)
    b_down = None
    if dtype == gl.float16:
        b_up, b_down = into_float16(gl.max(gl.abs(acc_S), axis=1))
        b_S = gl.convert_layout(opaque((acc_S * b_up[:, None]).to(dtype)), operand_of_o)
    else:
        b_S = gl.convert_layout(opaque(acc_S.to(dtype)), operand_of_o)
    # Were the state read after the next WGMMAs have been issued, ptxas would wait for them first.
    decayed_S = acc_S * decay
    b_zero = gl.zeros([BLOCK_E, CHUNK], gl.float32, L_O)
    seen = warpgroup_mma(b_S, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)  # [BLOCK_E, queries]
    # While those two are multiplied; with snapshots there are no registers to spare.
    if not (MASKED or SNAPSHOTS):
        b_v = values_entering(ring, buffers, v_tile, stage, phase, sizes)
    store_scores(buffers, warpgroup_mma_wait(1, deps=[scores]), sizes)
    # Past this barrier no warp is still in the chunk before: its stage takes the chunk that is STAGES - 1 ahead.
    expect_chunk(tensors, ring, work, chunk.i + sizes.STAGES - 1, sizes)
    if sizes.STAGES == 2:
        # The next step waits for it.
        load_chunk(tensors, ring, work, chunk.i + 1, chunk.ahead, sizes)
    if MASKED or SNAPSHOTS:
        b_v = values_entering(ring, buffers, v_tile, stage, phase, sizes)
    b_seen = weighted(buffers, warpgroup_mma_wait(0, deps=[seen]), b_down, sizes)
    out = warpgroup_mma(v_tile.permute((1, 0)), buffers.scores, b_seen, is_async=True)
    next_S = warpgroup_mma(b_v, k_tile, decayed_S, is_async=True)
    b_o = free_tile(buffers, warpgroup_mma_wait(1, deps=[out]), sizes)  # [BLOCK_E, queries]
    if sizes.STAGES > 2:
        load_chunk(tensors, ring, work, chunk.i + sizes.STAGES - 1, chunk.ahead, sizes)
    store_outputs(tensors[3], buffers, o, work, chunk, b_o, sizes, MASKED)
    return warpgroup_mma_wait(0, deps=[next_S])
