"""``hopper_remembered.lane_states`` by programs that go round the lanes that there are: of larger heads and, in
``hopper_round_float32``, of float32.

Values are weighted from a lane's end, so that nothing is done to a sum between two products. Of many short sequences
of smaller heads a program each is quicker.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_attn.kernels.decay import base_two_rate, decay_over, rest_of_rate
from lightning_attn.kernels.hopper_remembered import (
    LaneCall,
    count_lane,
    lanes_of,
    slot_of_lane,
    sum_of_lane,
    tokens_of_lane,
)
from lightning_attn.kernels.hopper_ring import Work, pieces_of, state_layout
from lightning_attn.kernels.hopper_rows import store_state
from lightning_attn.kernels.hopper_states import load_chunk, new_stages
from lightning_attn.kernels.schedule import Batch, Counts, States, bounds
from lightning_attn.kernels.states import tokens_in_reach


class Call(NamedTuple):
    """What of a call both kinds of warps need. p_counts: as ``hopper_remembered.lane_states`` has them."""

    batch: Any
    p_slopes: Any
    p_initial: Any
    p_final: Any
    p_partial: Any
    p_counts: Any
    reach: Any
    scale: Any
    strides: Any


class Lane(NamedTuple):
    """A lane's chunks and where they lie; ``rest``: rows of a short one, the first, which begins at ``first_row``.

    away: tokens between the lane and the end that they are weighted from. index, of: which of how many. length: rows of
    the sequence. start, end: where the first of whole chunks from the lane's own first row would begin, and the row
    after its last.
    """

    i_n: Any
    start: Any
    end: Any
    work: Any
    states: Any
    slot: Any
    first_row: Any
    rest: Any
    away: Any
    index: Any
    of: Any
    length: Any


@gluon.constexpr_function
def heads_together(sizes, WARPS):
    """Each warp has all heads."""
    heads = max(32, 1 << (sizes.H - 1).bit_length())
    return gl.BlockedLayout([heads // 32], [32], [WARPS], [0])


@gluon.jit
def of_warp(number):
    """The same number of 32 bits, of which ptxas knows that a warp's threads have one.

    Where it does not, what a ring's stage is found by, it waits for each WGMMA before the next.
    """
    asm: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(asm, "=r,r", [number], number.dtype, is_pure=False, pack=1)


@gluon.jit
def longest_of(batch, sizes: gl.constexpr, WARPS: gl.constexpr):
    """At least as many tokens as any sequence has."""
    longest = gl.to_tensor(batch.count.rows).to(gl.int32)
    if batch.p_cu is not None:
        if (batch.count.sequences > 1) & (batch.count.sequences <= 512):
            longest = longest * 0
            for i in range(0, batch.count.sequences, 128):
                o_n = i + gl.arange(0, 128, gl.BlockedLayout([4], [32], [WARPS], [0]))
                mask = o_n < batch.count.sequences
                begin = gl.load(batch.p_cu + o_n, mask=mask, other=0).to(gl.int64)
                end = gl.load(batch.p_cu + o_n + 1, mask=mask, other=0).to(gl.int64)
                begin = gl.minimum(gl.maximum(begin, 0), batch.count.rows)
                end = gl.minimum(end, batch.count.rows)
                longest = gl.maximum(longest, gl.max((end - begin).to(gl.int32), axis=0))
    return longest


@gluon.jit
def lanes_up_to(call, sizes: gl.constexpr, WARPS: gl.constexpr):
    """How many lanes a sequence has of each head at most, added up: as many as any may have, where all are begun."""
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    o_h = gl.arange(0, max(32, 1 << (sizes.H - 1).bit_length()), heads_together(sizes, WARPS))
    most = lanes_of(call.batch, sizes)
    lanes = o_h * 0 + most
    if call.batch.count.sequences * most * (sizes.H * TILES) > gl.num_programs(0):
        longest = longest_of(call.batch, sizes, WARPS)
        tokens = tokens_in_reach(call.p_slopes, gl.minimum(o_h, sizes.H - 1), call.reach, longest).to(gl.int32)
        lanes = gl.minimum((tokens + sizes.SEGMENT - 1) // sizes.SEGMENT, sizes.LANES)
        if call.p_counts is not None:
            # Who has no tokens has a state all the same, for which there is no launch behind.
            lanes = gl.maximum(lanes, 1)
    return tl.cumsum(gl.where(o_h < sizes.H, lanes, 0), 0)


@gluon.jit
def items_of(call, up_to, sizes: gl.constexpr):
    """How many items there are: a lane of a sequence and head, for 64 columns each."""
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    return of_warp(gl.max(up_to, axis=0)) * call.batch.count.sequences * TILES


@gluon.jit
def sequence_of_item(up_to, i_item, sizes: gl.constexpr):
    """Of one sequence come all heads, whose rows lie side by side: of one head, and all sequences, DRAM is slower."""
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    return i_item // TILES // gl.maximum(of_warp(gl.max(up_to, axis=0)), 1)


@gluon.jit
def rows_of_item(call, up_to, i_item, sizes: gl.constexpr):
    """The rows of an item's sequence, loaded ahead of it: each wait for memory shows."""
    i_n = gl.minimum(sequence_of_item(up_to, i_item, sizes), call.batch.count.sequences - 1)
    first, last = bounds(call.batch, i_n)
    return first.to(gl.int32), last.to(gl.int32)


@gluon.jit
def begin(call, sizes: gl.constexpr, WARPS: gl.constexpr):
    """``lanes_up_to``, and the rows of the sequence of a program's first item."""
    # Of one sequence they are loaded beside its heads' rates.
    first, last = bounds(call.batch, gl.program_id(0) * 0)
    first, last = first.to(gl.int32), last.to(gl.int32)
    up_to = lanes_up_to(call, sizes, WARPS)
    if call.batch.count.sequences > 1:
        first, last = rows_of_item(call, up_to, gl.program_id(0), sizes)
    return up_to, first, last


@gluon.jit
def lane_of(call, up_to, i_item, first, last, sizes: gl.constexpr):
    """The i-th lane, of a sequence of these rows; without chunks where that is too short for it."""
    CHUNK: gl.constexpr = sizes.CHUNK
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    batch = call.batch
    i_e = i_item % TILES
    i_n = sequence_of_item(up_to, i_item, sizes)
    # Heads that remember most are the last ones in models.
    i_pair = of_warp(gl.max(up_to, axis=0)) * (i_n + 1) - 1 - i_item // TILES
    i_h = of_warp(gl.sum((up_to <= i_pair).to(gl.int32), axis=0))
    lane = of_warp(i_pair - gl.max(gl.where(up_to <= i_pair, up_to, 0), axis=0))
    first = of_warp(first)
    last = of_warp(last)
    tokens = of_warp(tokens_in_reach(call.p_slopes, i_h, call.reach, (last - first).to(gl.int64)).to(gl.int32))
    of_lane = tokens_of_lane(tokens, sizes)
    away = lane * of_lane
    furthest = gl.minimum(away + of_lane, tokens)
    chunks = gl.where(away < tokens, (furthest - away + CHUNK - 1) // CHUNK, 0)
    rest = (furthest - away) % CHUNK
    if sizes.REVERSED:
        start = first + away + (chunks - 1) * CHUNK
        first_row = start
        end = first + furthest
    else:
        # A short chunk is the furthest, and begins where it does.
        first_row = last - furthest
        start = first_row + gl.where(rest > 0, rest - CHUNK, 0)
        end = last - away
    is_whole = tokens <= of_lane
    states = States(gl.where(is_whole, call.p_final, call.p_partial), call.strides.final)
    slot = gl.where(is_whole, i_n.to(gl.int64), slot_of_lane(batch, i_n, first.to(gl.int64), lane, sizes))
    i_box = i_n.to(gl.int32) if batch.p_cu is None else 0
    work = Work(i_box, i_h // sizes.RATIO_K, i_h // sizes.RATIO_V, i_h, i_e * sizes.BLOCK_E, start, chunks)
    of = (tokens + of_lane - 1) // of_lane
    return Lane(i_n, first_row, end, work, states, slot, first_row, rest, away, lane, of, last - first)


@gluon.jit
def load_lanes(d_k, d_v, stages, call, sizes: gl.constexpr):
    """Fill the ring with all chunks of all of a program's lanes."""
    stride: gl.constexpr = -sizes.CHUNK if sizes.REVERSED else sizes.CHUNK
    up_to, first, last = begin(call, sizes, 1)
    before = 0
    for i_item in range(gl.program_id(0), items_of(call, up_to, sizes), gl.num_programs(0)):
        lane = lane_of(call, up_to, i_item, first, last, sizes)
        first, last = rows_of_item(call, up_to, i_item + gl.num_programs(0), sizes)
        work = lane.work
        for i in range(work.chunks):
            row = gl.where(i == 0, lane.first_row, work.start + i * stride)
            load_chunk(d_k, d_v, stages, work, before + i, row, sizes)
        before += work.chunks


@gluon.jit
def add_lanes(stages, call, sizes: gl.constexpr):
    """Add up lanes and store them."""
    up_to, first, last = begin(call, sizes, sizes.WARPS)
    before = 0
    for i_item in range(gl.program_id(0), items_of(call, up_to, sizes), gl.num_programs(0)):
        lane = lane_of(call, up_to, i_item, first, last, sizes)
        first, last = rows_of_item(call, up_to, i_item + gl.num_programs(0), sizes)
        if lane.work.chunks > 0:
            add_lane(stages, lane, before, call, sizes)
        if call.p_counts is not None:
            count_stored(call, lane, sizes)
        before += lane.work.chunks


@gluon.jit
def add_lane(stages, lane, before, call, sizes: gl.constexpr):
    """Add up a lane, before which the ring had so many chunks, and store it."""
    PIECES: gl.constexpr = pieces_of(sizes)
    L_S: gl.constexpr = state_layout(sizes)
    work = lane.work
    o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(0, L_S))
    o_e = work.column + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(1, L_S))
    rate = base_two_rate(call.p_slopes, work.i_h)
    lost = rest_of_rate(call.p_slopes, work.i_h, rate)
    S = sum_of_lane(stages, work.chunks, before, lane.rest, (rate, lost), sizes)
    behind = decay_over(rate, lost, lane.away) * call.scale
    decayed_S = ()
    for p in gl.static_range(PIECES):
        decayed_S = decayed_S + (S[p] * behind,)
    store_state(lane.states, lane.slot, work.i_h, o_d, o_e, decayed_S, sizes)


@gluon.jit
def count_stored(call, lane, sizes: gl.constexpr):
    """``count_lane``, of a program that goes round."""
    initial, final = States(call.p_initial, call.strides.initial), States(call.p_final, call.strides.final)
    of_lane = LaneCall(call.p_slopes, initial, final, call.p_counts, call.batch.count.sequences, call.scale)
    count_lane(lane.work, of_lane, lane, sizes)


@gluon.jit(do_not_specialize=["rows", "num_sequences"])
def lane_states(
    d_k, d_v, p_slopes, p_cu, p_initial, p_final, p_partial, p_counts, rows, num_sequences, reach, scale, strides,
    sizes: gl.constexpr,
):  # fmt: skip
    """The sums of lanes for 64 columns of a head. Where one is the only one it is the state, but for the initial one.

    Lanes that there are come first: a program of none still takes its place on an SM.
    """
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    call = Call(batch, p_slopes, p_initial, p_final, p_partial, p_counts, reach, scale, strides)
    stages = new_stages(d_k, d_v, sizes)
    gl.warp_specialize([
        (add_lanes, (stages, call, sizes)),
        (load_lanes, (d_k, d_v, stages, call, sizes)),
    ], [1], [72])  # fmt: skip
