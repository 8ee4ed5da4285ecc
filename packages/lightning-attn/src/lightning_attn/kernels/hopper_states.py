"""``chunked.segment_states`` for NVIDIA's sm_90, in 16 bits: a warp loads, by TMA, what four warps multiply.

A segment has few chunks, and its state nothing but them: what counts is that all of them are on their way at once.
"""

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

from lightning_attn.kernels.chunked import in_units
from lightning_attn.kernels.decay import base_two_rate, decay_over, entering, rest_of_rate, unit_of
from lightning_attn.kernels.hopper_ring import Work, factor_of, for_piece, pieces_of, state_layout, tile_of
from lightning_attn.kernels.hopper_rows import store_state, zero_after, zero_state
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    States,
    carried_slot,
    chunks_in_reach,
    locate_state,
    program,
    segment_rows,
    slot_of,
)


class Stages(NamedTuple):
    """A ring of keys, in pieces, and values."""

    k: Any
    v: Any
    full: Any
    empty: Any


@gluon.jit
def new_stages(d_k, d_v, sizes: gl.constexpr):
    """The ring, empty."""
    STAGES: gl.constexpr = sizes.STAGES
    k_stages = ()
    for i in gl.static_range(pieces_of(sizes)):  # noqa: B007 (Triton takes no _)
        k_stages = k_stages + (gl.allocate_shared_memory(d_k.dtype, [STAGES] + d_k.block_type.shape, d_k.layout),)
    v_stages = gl.allocate_shared_memory(d_v.dtype, [STAGES] + d_v.block_type.shape, d_v.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return Stages(k_stages, v_stages, full, empty)


@gluon.jit
def load_chunk(d_k, d_v, stages, work, i, row, sizes: gl.constexpr):
    """Fill a stage of the ring, once it is empty, with the chunk that begins at a row: the i-th of the program."""
    PIECES: gl.constexpr = pieces_of(sizes)
    STAGES: gl.constexpr = sizes.STAGES
    stage = i % STAGES
    full = stages.full.index(stage)
    mbarrier.wait(stages.empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full, PIECES * d_k.block_type.nbytes + d_v.block_type.nbytes)
    v_place = [work.i_box, work.i_h_v, row, work.column]
    tma.async_copy_global_to_shared(d_v, v_place, full, stages.v.index(stage))
    for p in gl.static_range(PIECES):
        place = [work.i_box, work.i_h_qk, row, p * sizes.BLOCK_D]
        tma.async_copy_global_to_shared(d_k, place, full, stages.k[p].index(stage))


@gluon.jit
def load(d_k, d_v, stages, work, stride: gl.constexpr, sizes: gl.constexpr):
    """Fill the ring with all chunks."""
    for i in range(work.chunks):
        load_chunk(d_k, d_v, stages, work, i, work.start + i * stride, sizes)


@gluon.jit
def values_of(v_tiles, full, i, is_there, b_entering, sizes: gl.constexpr):
    """The weighted values of chunk i, an operand; of one that is not there, whatever the ring has."""
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout(sizes), 2)
    stage = i % sizes.STAGES
    v_tile = v_tiles.index(stage).reshape([sizes.CHUNK, sizes.BLOCK_E])
    mbarrier.wait(full.index(stage), (i // sizes.STAGES) & 1, pred=is_there)
    return (v_tile.permute((1, 0)).load(operand).to(gl.float32) * b_entering[None, :]).to(v_tile.dtype)


@gluon.jit
def short_values(stages, i, length, b_entering, sizes: gl.constexpr):
    """Those of chunk i, of ``length`` rows: others are zeroed, of keys too."""
    CHUNK: gl.constexpr = sizes.CHUNK
    stage = i % sizes.STAGES
    mbarrier.wait(stages.full.index(stage), (i // sizes.STAGES) & 1)
    for p in gl.static_range(pieces_of(sizes)):
        zero_after(tile_of(stages.k[p], stage, sizes), length, CHUNK, sizes.BLOCK_D, sizes.WARPS)
    zero_after(stages.v.index(stage).reshape([CHUNK, sizes.BLOCK_E]), length, CHUNK, sizes.BLOCK_E, sizes.WARPS)
    fence_async_shared()
    tl.debug_barrier()
    return values_of(stages.v, stages.full, i, True, b_entering, sizes)


@gluon.jit
def add_chunk(k_tiles, v_tiles, full, i, S, b_v, decay, has_next, b_entering, sizes: gl.constexpr):
    """The state after chunk i, of values b_v, and those of the next one, which are loaded while it is multiplied."""
    PIECES: gl.constexpr = pieces_of(sizes)
    stage = i % sizes.STAGES
    issued = ()
    for p in gl.static_range(PIECES):
        b_v_of, k_tile = for_piece(b_v, p, sizes), factor_of(k_tiles, stage, p, sizes)
        issued = issued + (warpgroup_mma(b_v_of, k_tile, S[p] * decay, is_async=True),)
    b_next = values_of(v_tiles, full, i + 1, has_next, b_entering, sizes)
    done = ()
    for p in gl.static_range(PIECES):
        done = done + (warpgroup_mma_wait(PIECES - 1 - p, deps=[issued[p]]),)
    tl.debug_barrier()
    return done, b_next


@gluon.jit
def add_up(stages, work, carried, i_state, p_slopes, scale, rest, away, sizes: gl.constexpr):
    """Add up the state of a part of a segment, and store it as it is where the segment ends.

    rest: rows of a short chunk, which is the first where there is one. away: tokens of the segment behind the part.
    """
    CHUNK: gl.constexpr = sizes.CHUNK
    REVERSED: gl.constexpr = sizes.REVERSED
    L_S: gl.constexpr = state_layout(sizes)
    IN_UNITS: gl.constexpr = REVERSED and stages.v.dtype == gl.float16
    if work.chunks > 0:
        o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = work.column + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(1, L_S))
        o_k = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.DotOperandLayout(0, L_S, 2)))
        rate = base_two_rate(p_slopes, work.i_h)
        lost = rest_of_rate(p_slopes, work.i_h, rate)
        of_keys = scale / unit_of(scale) if IN_UNITS else scale
        S = zero_state(sizes)
        b_entering = entering(rate, o_k, CHUNK, of_keys, REVERSED)
        # Of the first chunk, which there is no state before to decay.
        if REVERSED:
            if rest > 0:
                b_v = short_values(stages, 0, rest, entering(rate, o_k, rest, of_keys, REVERSED), sizes)
            else:
                b_v = values_of(stages.v, stages.full, 0, True, b_entering, sizes)
        else:
            b_v = values_of(stages.v, stages.full, 0, True, b_entering, sizes)
        decay = decay_over(rate, lost, gl.to_tensor(CHUNK))
        for i in range(work.chunks):
            has_next = i + 1 < work.chunks
            S, b_v = add_chunk(stages.k, stages.v, stages.full, i, S, b_v, decay, has_next, b_entering, sizes)
            mbarrier.arrive(stages.empty.index(i % sizes.STAGES))
        if IN_UNITS:
            S = in_units(S, unit_of(scale))
        if sizes.PART < sizes.SEGMENT:
            behind = decay_over(rate, lost, away)
            decayed_S = ()
            for p in gl.static_range(pieces_of(sizes)):
                decayed_S = decayed_S + (S[p] * behind,)
            S = decayed_S
        store_state(carried, i_state, work.i_h, o_d, o_e, S, sizes)


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def segment_states(
    d_k, d_v, p_slopes, p_cu, p_slots, p_carried, rows, num_sequences, num_slots, scale, strides, sizes: gl.constexpr
):
    """``chunked.segment_states`` with TMA descriptors of k and v, in boxes of a chunk and 64 columns.

    Each part of a segment is a program's. Those that the decay forgets before the segment's end are nobody's.
    """
    CHUNK: gl.constexpr = sizes.CHUNK
    SEGMENT: gl.constexpr = sizes.SEGMENT
    PART: gl.constexpr = sizes.PART
    PARTS: gl.constexpr = SEGMENT // PART
    REVERSED: gl.constexpr = sizes.REVERSED
    batch = Batch(p_cu, p_slots, None, Counts(rows, num_sequences, num_slots))
    carried = States(p_carried, strides.carried)
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    i_e, i_h, i_w = program(sizes.H, (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E)
    i_n, i_segment, first, last = locate_state(batch, i_w // PARTS, SEGMENT, REVERSED)
    i_state = carried_slot(batch, i_n, first, SEGMENT) + i_segment
    # TMA coordinates have 32 bits.
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    begin, end = segment_rows(first, last, i_segment, SEGMENT)
    tokens = chunks_in_reach(base_two_rate(p_slopes, i_h), sizes) * CHUNK
    stride: gl.constexpr = -CHUNK if REVERSED else CHUNK
    rest = 0
    # Parts count from the end at which the next segment is.
    away = i_w % PARTS * PART
    tokens = gl.minimum(away + PART, tokens)
    if REVERSED:
        has_next = begin > first
        i_state -= 1
        end = gl.minimum(end, begin + tokens)
        begin += away
        chunks = (end - begin + CHUNK - 1) // CHUNK
        start = begin + (chunks - 1) * CHUNK
        rest = (end - begin) % CHUNK
    else:
        # Who has another segment behind it is whole.
        has_next = end < last
        i_state += 1
        begin = end - tokens
        chunks = (end - away - begin) // CHUNK
        start = begin
    chunks = gl.where(has_next & (slot_of(batch, i_n) >= 0), chunks, 0)
    # The packed rows of a ragged batch are one box.
    i_box = i_n.to(gl.int32) if p_cu is None else 0
    work = Work(i_box, i_h // sizes.RATIO_QK, i_h // sizes.RATIO_V, i_h, i_e * sizes.BLOCK_E, start, chunks)
    stages = new_stages(d_k, d_v, sizes)
    gl.warp_specialize([
        (add_up, (stages, work, carried, i_state * PARTS + away // PART, p_slopes, scale, rest, away, sizes)),
        (load, (d_k, d_v, stages, work, stride, sizes)),
    ], [1], [40])  # fmt: skip
