"""States of what heads remember, for NVIDIA's sm_90 in 16 bits: a warp loads, by TMA, what four warps multiply.

What a head remembers of a sequence is cut into lanes, of a segment's tokens or, where that would be more than
``LANES``, of as many as it takes, counted from the end that they are weighted from. Each is a program's;
``what_is_remembered`` adds them up, from the furthest to the nearest. Where they begin depends on the head and on its
own sequence alone, so that bits do too.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lightning_attn.kernels.decay import base_two_rate, decay_over, entering, rest_of_rate
from lightning_attn.kernels.hopper_ring import Work, pieces_of, state_layout
from lightning_attn.kernels.hopper_rows import store_state, zero_state
from lightning_attn.kernels.hopper_states import add_chunk, load_chunk, new_stages, short_values, values_of
from lightning_attn.kernels.schedule import Batch, Counts, States, bounds, carried_slot, locate, program
from lightning_attn.kernels.states import decayed_initial, tile_of_state, tile_offsets, tokens_in_reach, zero_tile


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
def lanes_of(batch, sizes: tl.constexpr):
    return tl.minimum(tl.cdiv(batch.count.rows, sizes.SEGMENT), sizes.LANES)


@gluon.jit
def load(d_k, d_v, stages, work, first_row, stride: gl.constexpr, sizes: gl.constexpr):
    """Fill the ring with all chunks; the first one begins at ``first_row``."""
    for i in range(work.chunks):
        load_chunk(d_k, d_v, stages, work, i, gl.where(i == 0, first_row, work.start + i * stride), sizes)


@gluon.jit
def add_lane(stages, work, states, slot, p_slopes, scale, rest, away, sizes: gl.constexpr):
    """Add up a lane and store it. rest: rows of a short chunk, the first. away: tokens between the lane and the end."""
    CHUNK: gl.constexpr = sizes.CHUNK
    REVERSED: gl.constexpr = sizes.REVERSED
    L_S: gl.constexpr = state_layout(sizes)
    if work.chunks > 0:
        o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = work.column + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(1, L_S))
        o_k = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.DotOperandLayout(0, L_S, 2)))
        rate = base_two_rate(p_slopes, work.i_h)
        lost = rest_of_rate(p_slopes, work.i_h, rate)
        S = zero_state(sizes)
        b_entering = entering(rate, o_k, CHUNK, 1.0, REVERSED)
        if rest > 0:
            b_v = short_values(stages, 0, rest, entering(rate, o_k, rest, 1.0, REVERSED), sizes)
        else:
            b_v = values_of(stages.v, stages.full, 0, True, b_entering, sizes)
        decay = decay_over(rate, lost, gl.to_tensor(CHUNK))
        for i in range(work.chunks):
            has_next = i + 1 < work.chunks
            S, b_v = add_chunk(stages.k, stages.v, stages.full, i, S, b_v, decay, has_next, b_entering, sizes)
            mbarrier.arrive(stages.empty.index(i % sizes.STAGES))
        behind = decay_over(rate, lost, away) * scale
        decayed_S = ()
        for p in gl.static_range(pieces_of(sizes)):
            decayed_S = decayed_S + (S[p] * behind,)
        store_state(states, slot, work.i_h, o_d, o_e, decayed_S, sizes)


@gluon.jit(do_not_specialize=["rows", "num_sequences"])
def lane_states(
    d_k, d_v, p_slopes, p_cu, p_final, p_partial, rows, num_sequences, reach, scale, strides, sizes: gl.constexpr
):
    """The sum of a lane for 64 columns of a head. Where it is the only one it is the state, but for the initial one."""
    CHUNK: gl.constexpr = sizes.CHUNK
    stride: gl.constexpr = -CHUNK if sizes.REVERSED else CHUNK
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    i_e, i_h, i_w = program(sizes.H, (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E)
    if sizes.BY_LANES:
        lanes = lanes_of(batch, sizes)
        i_n = i_w // lanes
        lane = i_w % lanes
        first, last = bounds(batch, i_n)
    else:
        i_n, lane, first, last = locate(batch, i_w, sizes.SEGMENT)
    tokens = gl.where(i_n < num_sequences, tokens_in_reach(p_slopes, i_h, reach, last - first), 0).to(gl.int32)
    of_lane = tokens_of_lane(tokens, sizes)
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    away = gl.minimum(lane, sizes.LANES) * of_lane
    furthest = gl.minimum(away + of_lane, tokens)
    chunks = gl.where((away < tokens) & (lane < sizes.LANES), (furthest - away + CHUNK - 1) // CHUNK, 0)
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
    slot = gl.where(is_whole, i_n.to(gl.int64), slot_of_lane(batch, i_n, first.to(gl.int64), lane, sizes))
    i_box = i_n.to(gl.int32) if p_cu is None else 0
    work = Work(i_box, i_h // sizes.RATIO_K, i_h // sizes.RATIO_V, i_h, i_e * sizes.BLOCK_E, start, chunks)
    stages = new_stages(d_k, d_v, sizes)
    gl.warp_specialize([
        (add_lane, (stages, work, states, slot, p_slopes, scale, rest, away, sizes)),
        (load, (d_k, d_v, stages, work, first_row, stride, sizes)),
    ], [1], [40])  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_sequences"])
def what_is_remembered(
    p_slopes, p_cu, p_initial, p_final, p_partial, rows, num_sequences, reach, strides, sizes: tl.constexpr
):  # fmt: skip
    """The states of heads of several lanes, or that go on from an initial state, or have no tokens."""
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
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
    if (tokens > of_lane) | (tokens == 0) | (p_initial is not None):
        o_d, o_e = tile_offsets(i_tile, sizes)
        b_S = zero_tile(sizes)
        if p_initial is not None:
            b_S = decayed_initial(initial, i_n, i_h, o_d, o_e, p_slopes, last - first, sizes)
        of = tl.cdiv(tokens, of_lane)
        slot = tl.where(is_whole, i_n.to(tl.int64), slot_of_lane(batch, i_n, first, of * 0, sizes))
        p_lanes, m = tile_of_state(of_lanes, slot, i_h, o_d, o_e, sizes)
        # So many are on their way.
        for i in tl.range(0, of, num_stages=8):
            b_S += tl.load(p_lanes + (of - 1 - i).to(tl.int64) * of_lanes.strides.slot, mask=m, other=0.0)
        p_tile, m = tile_of_state(final, i_n, i_h, o_d, o_e, sizes)
        tl.store(p_tile, b_S, mask=m)
