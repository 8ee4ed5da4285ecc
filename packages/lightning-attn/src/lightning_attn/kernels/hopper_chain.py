"""Segments of a sequence that pass their states on, one to the next, within one launch on sm_90.

A program makes the state that its segment would leave had it begun from zero (``own_state``), waits for the state
before the segment, passes on the one behind it, and only then makes the outputs: of k and v, which it reads again,
most is in the L2 cache by then. A chain is the segments of one sequence, head and tile; its turn counts the segments
that have passed a state on. Two slots a chain are enough: who passes a state on has read the one before, and so had
all ahead of it.

Programs wait only for such as come before them in the grid, which a GPU starts in that order.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lightning_attn.kernels.decay import decayed
from lightning_attn.kernels.hopper_ring import load_own, state_layout
from lightning_attn.kernels.hopper_rows import load_state, store_tile, store_weights, zero_after
from lightning_attn.kernels.schedule import state_pointers


@gluon.jit
def own_chunk(tensors, ring, buffers, work, i, acc_S, decay, length, sizes: gl.constexpr, MASKED: gl.constexpr):
    """The state after chunk i, of ``length`` rows."""
    CHUNK: gl.constexpr = sizes.CHUNK
    D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    STAGES: gl.constexpr = sizes.STAGES
    stride: gl.constexpr = -CHUNK if sizes.REVERSED else CHUNK
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout(sizes), 2)
    stage = i % STAGES
    k_tile = ring.k.index(stage).reshape([CHUNK, D])
    v_tile = ring.v.index(stage).reshape([CHUNK, BLOCK_E])
    mbarrier.wait(ring.full_k.index(stage), (i // STAGES) & 1)
    mbarrier.wait(ring.full_v.index(stage), (i // STAGES) & 1)
    fence_async_shared()
    tl.debug_barrier()
    # Past this barrier no warp is still in the chunk before: its stage takes the chunk that is STAGES - 1 ahead.
    load_own(tensors, ring, work, i + STAGES - 1, stride, sizes)
    if MASKED:
        zero_after(k_tile, length, CHUNK, D, sizes.WARPS)
        zero_after(v_tile, length, CHUNK, BLOCK_E, sizes.WARPS)
        fence_async_shared()
        tl.debug_barrier()
    b_entering = buffers.entering.load(gl.SliceLayout(0, operand))
    b_v = v_tile.permute((1, 0)).load(operand)
    b_v = (b_v.to(gl.float32) * b_entering[None, :]).to(v_tile.dtype)
    next_S = warpgroup_mma(b_v, k_tile, acc_S * decay, is_async=True)
    return warpgroup_mma_wait(0, deps=[next_S])


@gluon.jit
def own_state(tensors, ring, buffers, work, rate, o_i, o_k, rest, scale, sizes: gl.constexpr, IN_UNITS: gl.constexpr):
    """The state that work.own chunks leave behind from zero. rest: rows of a short one, backwards the first of all."""
    CHUNK: gl.constexpr = sizes.CHUNK
    D: gl.constexpr = sizes.BLOCK_D
    REVERSED: gl.constexpr = sizes.REVERSED
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    acc_S = gl.zeros([BLOCK_E, D], gl.float32, state_layout(sizes))
    decay = gl.exp2(-rate * CHUNK)
    whole_from = 0
    if REVERSED:
        # Backwards the short chunk is the first, which a decay may have forgotten.
        if (rest > 0) & (work.own == work.chunks):
            whole_from = 1
            store_weights(buffers, rate, o_i, o_k, rest, scale, REVERSED, SHORT=True, IN_UNITS=IN_UNITS)
            acc_S = own_chunk(tensors, ring, buffers, work, 0, acc_S, decay, rest, sizes, MASKED=True)
    store_weights(buffers, rate, o_i, o_k, CHUNK, scale, REVERSED, SHORT=False, IN_UNITS=IN_UNITS)
    for i in range(whole_from, work.own):
        acc_S = own_chunk(tensors, ring, buffers, work, i, acc_S, decay, CHUNK, sizes, MASKED=False)
    return acc_S


@gluon.jit
def await_turn(p_turn, turn):
    """Wait until a chain's turn has come."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .b32 now;
        waiting:
        ld.acquire.gpu.global.b32 now, [$1];
        setp.lt.s32 early, now, $2;
        @early bra waiting;
        mov.b32 $0, now;
        }""",
        "=r,l,r", [p_turn, turn], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@gluon.jit
def end_turn(p_turn, turn):
    """Say that a chain's turn is over, and what all threads have stored before is there for the next one.

    Turns only grow, so that nobody waits for ever where sequences with bad bounds share a chain.
    """
    tl.debug_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first red.release.gpu.global.max.s32 [$1], $2;
        mov.b32 $0, thread;
        }""",
        "=r,l,r", [p_turn, turn], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def state_before(carried, chain, i_h, turn, o_d, o_e, sizes: gl.constexpr):
    """What the segment before has passed on."""
    return load_state(carried, chain * 2 + turn % 2, i_h, o_d, o_e, sizes, FRESH=True)


@gluon.jit
def pass_on(carried, chain, i_h, turn, o_d, o_e, before_S, own_S, rates, tokens, sizes: gl.constexpr):
    """Store the state behind a segment of so many tokens for the next one."""
    rate, rest = rates
    b_S = decayed(before_S, rate, tokens, rest) + own_S
    p_tile = state_pointers(carried, chain * 2 + (turn + 1) % 2, i_h.to(gl.int64), o_d, o_e)
    store_tile(p_tile, o_d, o_e, b_S, sizes)
