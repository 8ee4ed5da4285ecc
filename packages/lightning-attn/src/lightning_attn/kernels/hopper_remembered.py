"""States of what heads remember, for NVIDIA's sm_90 in 16 bits: a warp loads, by TMA, what four warps multiply.

What a head remembers of a sequence is cut into lanes, of a segment's tokens or, where that would be more than
``LANES``, of as many as it takes, counted from the end that they are weighted from. Each is a program's;
``what_is_remembered`` adds them up, from the furthest to the nearest. Where they begin depends on the head and on its
own sequence alone, so that bits do too.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lightning_attn.kernels.decay import base_two_rate, decay_over, entering, rest_of_rate
from lightning_attn.kernels.hopper_ring import Work, factor_of, for_piece, pieces_of, state_layout
from lightning_attn.kernels.hopper_rows import store_state, zero_state
from lightning_attn.kernels.hopper_states import load_chunk, new_stages, short_values, values_of
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    States,
    bounds,
    carried_slot,
    locate,
    program,
    sequence_of,
    state_pointers,
)
from lightning_attn.kernels.states import tile_of_state, tile_offsets, tokens_in_reach, zero_tile


@triton.jit
def tokens_of_lane(tokens, sizes: tl.constexpr):
    """Tokens of each lane, whole chunks, of these."""
    of_all = tl.cdiv(tl.cdiv(tokens, sizes.LANES), sizes.CHUNK) * sizes.CHUNK
    return tl.maximum(of_all, sizes.SEGMENT)


@triton.jit
def slot_of_lane(batch, i_n, first, lane, sizes: tl.constexpr):
    """Where the sum of a lane is kept: of few sequences ``LANES`` each."""
    if sizes.BY_LANES:
        slot = i_n.to(tl.int64) * lanes_of(batch, sizes) + lane
    else:
        slot = carried_slot(batch, i_n, first, sizes.SEGMENT) + lane
    return slot


@triton.jit
def behind_initial(b_S, initial, i_n, i_h, o_d, o_e, p_slopes, length, sizes: tl.constexpr):
    """The state of what tokens leave, and what is left of the initial one. An FMA, for the same bits wherever it is."""
    p_tile, m = tile_of_state(initial, i_n, i_h, o_d, o_e, sizes)
    b_initial = tl.load(p_tile, mask=m, other=0.0)
    rate = base_two_rate(p_slopes, i_h)
    # Without tokens every bit stays.
    decay = decay_over(rate, rest_of_rate(p_slopes, i_h, rate), length)
    return tl.where(length > 0, tl.fma(b_initial, decay, b_S), b_initial)


@triton.jit
def lanes_of(batch, sizes: tl.constexpr):
    return tl.minimum(tl.cdiv(batch.count.rows, sizes.SEGMENT), sizes.LANES)


# Lanes of which one program adds up so many loads at once.
LANES_AT_ONCE = gl.constexpr(4)


class LaneCall(NamedTuple):
    """What of a call a lane's sum needs."""

    p_slopes: Any
    initial: Any
    final: Any
    p_counts: Any
    sequences: Any
    scale: Any


class Lane(NamedTuple):
    """The ``index``-th lane ``of`` so many of a head and sequence, which has ``length`` rows, and where it is stored.

    rest: rows of a short chunk, the first. away: tokens between the lane and the end that it is weighted from.
    """

    i_n: Any
    index: Any
    of: Any
    states: Any
    slot: Any
    length: Any
    rest: Any
    away: Any


@gluon.jit
def load(d_k, d_v, stages, work, first_row, stride: gl.constexpr, sizes: gl.constexpr):
    """Fill the ring with all chunks; the first one begins at ``first_row``."""
    for i in range(work.chunks):
        load_chunk(d_k, d_v, stages, work, i, gl.where(i == 0, first_row, work.start + i * stride), sizes)


@gluon.jit
def sum_of_lane(stages, chunks, before, rest, rates, sizes: gl.constexpr):
    """The sum of a lane's chunks, before which the ring had so many. rest: rows of a short one, the first.

    Values are weighted from the lane's end, so that nothing is done to a sum between two products.
    """
    CHUNK: gl.constexpr = sizes.CHUNK
    REVERSED: gl.constexpr = sizes.REVERSED
    PIECES: gl.constexpr = pieces_of(sizes)
    rate, lost = rates
    o_k = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.DotOperandLayout(0, state_layout(sizes), 2)))
    S = zero_state(sizes)
    b_entering = entering(rate, o_k, CHUNK, 1.0, REVERSED)
    behind = decay_over(rate, lost, (chunks - 1) * CHUNK)
    if rest > 0:
        b_v = short_values(stages, before, rest, entering(rate, o_k, rest, 1.0, REVERSED) * behind, sizes)
    else:
        b_v = values_of(stages.v, stages.full, before, True, b_entering * behind, sizes)
    for i in range(chunks):
        stage = (before + i) % sizes.STAGES
        issued = ()
        for p in gl.static_range(PIECES):
            b_v_of, k_tile = for_piece(b_v, p, sizes), factor_of(stages.k, stage, p, sizes)
            issued = issued + (warpgroup_mma(b_v_of, k_tile, S[p], is_async=True),)
        behind = decay_over(rate, lost, (chunks - 2 - i) * CHUNK)
        b_v = values_of(stages.v, stages.full, before + i + 1, i + 1 < chunks, b_entering * behind, sizes)
        S = ()
        for p in gl.static_range(PIECES):
            S = S + (warpgroup_mma_wait(PIECES - 1 - p, deps=[issued[p]]),)
        tl.debug_barrier()
        mbarrier.arrive(stages.empty.index(stage))
    return S


@gluon.jit
def add_lane(stages, work, call, lane, sizes: gl.constexpr):
    """Add up a lane and store it; in a call of one launch, all lanes of the head, once they are there."""
    L_S: gl.constexpr = state_layout(sizes)
    if work.chunks > 0:
        o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = work.column + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(1, L_S))
        rate = base_two_rate(call.p_slopes, work.i_h)
        lost = rest_of_rate(call.p_slopes, work.i_h, rate)
        S = sum_of_lane(stages, work.chunks, 0, lane.rest, (rate, lost), sizes)
        behind = decay_over(rate, lost, lane.away) * call.scale
        decayed_S = ()
        for p in gl.static_range(pieces_of(sizes)):
            decayed_S = decayed_S + (S[p] * behind,)
        store_state(lane.states, lane.slot, work.i_h, o_d, o_e, decayed_S, sizes)
    if call.p_counts is not None:
        count_lane(work, call, lane, sizes)


@gluon.jit
def count_lane(work, call, lane, sizes: gl.constexpr):
    """Count a lane that has been stored; the last one's program adds up all of the head. Of none there is no count."""
    if (lane.of > 1) & (work.chunks > 0):
        tl.debug_barrier()
        TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
        i_state = lane.i_n.to(gl.int64) * sizes.H + work.i_h
        count = gl.atomic_add(call.p_counts + i_state * TILES + work.column // sizes.BLOCK_E, 1)
        if count == lane.of - 1:
            add_up_lanes(work, call, lane, sizes)
    else:
        is_alone = lane.index == 0
        if call.initial.p is None:
            is_alone = is_alone & (lane.of == 0)
        if is_alone & (lane.of <= 1) & (lane.i_n < call.sequences):
            add_up_lanes(work, call, lane, sizes)


@gluon.jit
def add_up_lanes(work, call, lane, sizes: gl.constexpr):
    """Add up the lanes of a head, from the furthest to the nearest, and what is left of the initial state.

    The bits are those of ``what_is_remembered``, whoever adds up.
    """
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    COLUMNS: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, sizes.WARPS], [0, 1])
    o_e = work.column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, layout))
    i_h = work.i_h.to(gl.int64)
    tl.debug_barrier()
    for column in range(0, sizes.D, COLUMNS):
        o_d = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        m = (o_d[None, :] < sizes.D) & (o_e[:, None] < sizes.E)
        b_S = gl.zeros([BLOCK_E, COLUMNS], gl.float32, layout)
        p_lanes = state_pointers(lane.states, lane.slot - lane.index, i_h, o_d, o_e)
        for i in range(0, lane.of, LANES_AT_ONCE):
            b_lanes = ()
            for j in gl.static_range(LANES_AT_ONCE):
                at = lane.of - 1 - i - j
                p_lane = p_lanes + at.to(gl.int64) * lane.states.strides.slot
                # Others' are in the L2 cache alone. To add -0 changes no bit.
                b_lanes = b_lanes + (gl.load(p_lane, mask=m & (at >= 0), other=-0.0, cache_modifier=".cg"),)
            for j in gl.static_range(LANES_AT_ONCE):
                b_S += b_lanes[j]
        if call.initial.p is not None:
            b_S = behind_initial(b_S, call.initial, lane.i_n, i_h, o_d, o_e, call.p_slopes, lane.length, sizes)
        gl.store(state_pointers(call.final, lane.i_n.to(gl.int64), i_h, o_d, o_e), b_S, mask=m)


@gluon.jit
def locate_lane(batch, i_w, sizes: gl.constexpr):
    """``locate``; of few sequences by one load of all bounds, not by a search whose steps each wait for one."""
    SEGMENT: gl.constexpr = sizes.SEGMENT
    if batch.p_cu is None:
        i_n, lane, first, last = locate(batch, i_w, SEGMENT)
    else:
        i_n = i_w * 0
        if batch.count.sequences < 64:
            o_n = gl.arange(0, 64, gl.BlockedLayout([2], [32], [sizes.WARPS], [0]))
            m = o_n <= batch.count.sequences
            begin = gl.load(batch.p_cu + o_n, mask=m, other=0).to(gl.int64)
            begin = gl.minimum(gl.maximum(begin, 0), batch.count.rows)
            i_n += gl.sum((m & (begin // SEGMENT + o_n <= i_w)).to(gl.int32), axis=0) - 1
        else:
            i_n += sequence_of(batch, i_w, SEGMENT)
        i_n = gl.maximum(i_n, 0)
        first, last = bounds(batch, i_n)
        lane = (i_w - (first // SEGMENT + i_n)).to(gl.int32)
        # Indices before the first sequence's have no rows.
        last = gl.where(lane < 0, first, last)
        i_n = gl.where(lane < 0, batch.count.sequences, i_n)
        lane = gl.maximum(lane, 0)
    return i_n, lane, first, last


@gluon.jit(do_not_specialize=["rows", "num_sequences"])
def lane_states(
    d_k, d_v, p_slopes, p_cu, p_initial, p_final, p_partial, p_counts, rows, num_sequences, reach, scale, strides,
    sizes: gl.constexpr,
):  # fmt: skip
    """The sum of a lane for 64 columns of a head. Where it is the only one it is the state, but for the initial one.

    p_counts: zeros, one a sequence, head and tile. With them this is the only launch.
    """
    CHUNK: gl.constexpr = sizes.CHUNK
    stride: gl.constexpr = -CHUNK if sizes.REVERSED else CHUNK
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    i_e, i_h, i_w = program(sizes.H, (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E)
    if sizes.BY_LANES:
        lanes = lanes_of(batch, sizes)
        i_n = i_w // lanes
        index = i_w % lanes
        first, last = bounds(batch, i_n)
    else:
        i_n, index, first, last = locate_lane(batch, i_w, sizes)
    tokens = gl.where(i_n < num_sequences, tokens_in_reach(p_slopes, i_h, reach, last - first), 0).to(gl.int32)
    of_lane = tokens_of_lane(tokens, sizes)
    of = gl.cdiv(tokens, of_lane)
    length = last - first
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    away = gl.minimum(index, sizes.LANES) * of_lane
    furthest = gl.minimum(away + of_lane, tokens)
    chunks = gl.where((away < tokens) & (index < sizes.LANES), (furthest - away + CHUNK - 1) // CHUNK, 0)
    rest = (furthest - away) % CHUNK
    if sizes.REVERSED:
        start = first + away + (chunks - 1) * CHUNK
        first_row = start
    else:
        # A short chunk is the furthest, and begins where it does.
        first_row = last - furthest
        start = first_row + gl.where(rest > 0, rest - CHUNK, 0)
    is_whole = tokens <= of_lane
    states = States(gl.where(is_whole, p_final, p_partial), strides.final)
    slot = gl.where(is_whole, i_n.to(gl.int64), slot_of_lane(batch, i_n, first.to(gl.int64), index, sizes))
    i_box = i_n.to(gl.int32) if p_cu is None else 0
    work = Work(i_box, i_h // sizes.RATIO_K, i_h // sizes.RATIO_V, i_h, i_e * sizes.BLOCK_E, start, chunks)
    initial, final = States(p_initial, strides.initial), States(p_final, strides.final)
    call = LaneCall(p_slopes, initial, final, p_counts, num_sequences, scale)
    lane = Lane(i_n, index, of, states, slot, length, rest, away)
    stages = new_stages(d_k, d_v, sizes)
    gl.warp_specialize([
        (add_lane, (stages, work, call, lane, sizes)),
        (load, (d_k, d_v, stages, work, first_row, stride, sizes)),
    ], [1], [40])  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_sequences"])
def what_is_remembered(
    p_slopes, p_cu, p_initial, p_final, p_partial, rows, num_sequences, reach, strides, sizes: tl.constexpr
):  # fmt: skip
    """The states of heads of several lanes, or that go on from an initial state, or have no tokens."""
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    TILES_D: tl.constexpr = (sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D
    i_tile, i_h, i_n = program(sizes.H, TILES_D * ((sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E))
    i_h = i_h.to(tl.int64)
    first, last = bounds(batch, i_n)
    tokens = tokens_in_reach(p_slopes, i_h, reach, last - first).to(tl.int32)
    of_lane = tokens_of_lane(tokens, sizes)
    is_whole = tokens <= of_lane
    initial, final = States(p_initial, strides.initial), States(p_final, strides.final)
    of_lanes = States(tl.where(is_whole, p_final, p_partial), strides.final)
    # What is loaded up to here no launch ahead has written.
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    if (tokens > of_lane) | (tokens == 0) | (p_initial is not None):
        o_d, o_e = tile_offsets(i_tile, sizes)
        b_S = zero_tile(sizes)
        of = tl.cdiv(tokens, of_lane)
        slot = tl.where(is_whole, i_n.to(tl.int64), slot_of_lane(batch, i_n, first, of * 0, sizes))
        p_lanes, m = tile_of_state(of_lanes, slot, i_h, o_d, o_e, sizes)
        # So many are on their way.
        for i in tl.range(0, of, num_stages=8):
            b_S += tl.load(p_lanes + (of - 1 - i).to(tl.int64) * of_lanes.strides.slot, mask=m, other=0.0)
        if p_initial is not None:
            b_S = behind_initial(b_S, initial, i_n, i_h, o_d, o_e, p_slopes, last - first, sizes)
        p_tile, m = tile_of_state(final, i_n, i_h, o_d, o_e, sizes)
        tl.store(p_tile, b_S, mask=m)
