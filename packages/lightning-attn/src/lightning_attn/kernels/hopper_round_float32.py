"""``hopper_round.lane_states`` in float32: products of bfloat16 parts, as ``hopper_float32`` makes them."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_attn.kernels.decay import base_two_rate, decay_over, rest_of_rate
from lightning_attn.kernels.hopper_float32_step import follow
from lightning_attn.kernels.hopper_parts import allocate_parts, product_layout
from lightning_attn.kernels.hopper_ring import pieces_of
from lightning_attn.kernels.hopper_round import Call, items_of, lane_of, lanes_up_to, rows_of_item
from lightning_attn.kernels.hopper_rows import opaque, store_state, zero_state
from lightning_attn.kernels.schedule import Batch, Counts, rows_of_head


@gluon.jit(do_not_specialize=["rows", "num_sequences"])
def lane_states(
    p_k, p_v, p_slopes, p_cu, p_final, p_partial, rows, num_sequences, reach, scale, strides, sizes: gl.constexpr
):
    """``hopper_round.lane_states`` by two launches, with its arguments otherwise."""
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    L_S: gl.constexpr = product_layout(BLOCK_D)
    s_k, s_v = strides.k, strides.v
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    call = Call(batch, p_slopes, None, p_final, p_partial, None, reach, scale, strides)
    k_parts = ()
    for p in gl.static_range(min(2, pieces_of(sizes))):  # noqa: B007 (Triton takes no _)
        k_parts = k_parts + (allocate_parts(CHUNK, BLOCK_D),)
    weighted = allocate_parts(CHUNK, BLOCK_E)
    up_to = lanes_up_to(call, sizes, sizes.WARPS)
    for i_item in range(gl.program_id(0), items_of(call, up_to, sizes), gl.num_programs(0)):
        first, last = rows_of_item(call, up_to, i_item, sizes)
        lane = lane_of(call, up_to, i_item, first, last, sizes)
        if lane.work.chunks > 0:
            i_h = lane.work.i_h.to(gl.int64)
            k = rows_of_head(p_k, s_k, lane.i_n, i_h, sizes.RATIO_K)
            v = rows_of_head(p_v, s_v, lane.i_n, i_h, sizes.RATIO_V)
            rate = base_two_rate(p_slopes, i_h)
            rates = (rate, rest_of_rate(p_slopes, i_h, rate))
            S = zero_state(sizes)
            chunks, column = lane.work.chunks, lane.work.column
            S = follow((k_parts, weighted), (k, v), S, rates, 1.0, lane.start, lane.end, chunks, column, sizes)
            # Found again: in the loop over chunks the registers are needed.
            i_same = opaque(gl.to_tensor(i_item))
            first, last = rows_of_item(call, up_to, i_same, sizes)
            lane = lane_of(call, up_to, i_same, first, last, sizes)
            o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_S))
            o_e = lane.work.column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_S))
            rate = base_two_rate(p_slopes, lane.work.i_h)
            behind = decay_over(rate, rest_of_rate(p_slopes, lane.work.i_h, rate), lane.away) * scale
            decayed_S = ()
            for p in gl.static_range(pieces_of(sizes)):
                decayed_S = decayed_S + (S[p] * behind,)
            store_state(lane.states, lane.slot, lane.work.i_h, o_d, o_e, decayed_S, sizes)
