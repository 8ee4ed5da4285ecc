"""The role of hopper_roles.py that advances a state from chunk to chunk, and stores outputs."""

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
from lightning_attn.kernels.decay import (
    advanced,
    base_two_rate,
    decay_over,
    into_float16,
    rest_of_rate,
    unit_of,
)
from lightning_attn.kernels.hopper_groups import State, Waiting
from lightning_attn.kernels.hopper_lead import is_shared, lead_up
from lightning_attn.kernels.hopper_ring import (
    factor_of,
    for_piece,
    is_copied,
    piece_layout,
    pieces_of,
    state_layout,
    width_of,
)
from lightning_attn.kernels.hopper_rows import (
    columns_of_piece,
    load_tile,
    opaque,
    rows_of_piece,
    single_token,
    state_before,
    store_snapshots,
    store_state,
    store_weights,
    store_zeros,
)
from lightning_attn.kernels.hopper_step import Chunk, out_layout, store_tile_of_outputs, weighted
from lightning_attn.kernels.schedule import (
    bounds,
    carried_slot,
    chunks_in_reach,
    has_initial,
    next_snapshot,
    nth_segment,
    slot_of,
)


@gluon.jit
def outputs(tiles, b_o, sizes: gl.constexpr):
    """Outputs in their own dtype."""
    dtype: gl.constexpr = tiles.scores.dtype
    if dtype == gl.float16:
        b_o = b_o * tiles.down.load(gl.SliceLayout(0, out_layout(sizes)))[None, :]
    return b_o.to(dtype)


@gluon.jit
def scaled_by(S, sizes: gl.constexpr):
    """What brings a state's columns into float16's range, and its inverse."""
    b_most = gl.abs(S[0])
    for p in gl.static_range(1, pieces_of(sizes)):
        if width_of(sizes, p) == sizes.BLOCK_D:
            b_most = gl.maximum(b_most, gl.abs(S[p]))
    b_largest = gl.max(b_most, axis=1)
    LAST: gl.constexpr = pieces_of(sizes) - 1
    if width_of(sizes, LAST) < sizes.BLOCK_D:
        b_largest = gl.maximum(b_largest, columns_of_piece(gl.max(gl.abs(S[LAST]), axis=1), 0, sizes))
    return into_float16(b_largest)


@gluon.jit
def as_operand(S, p: gl.constexpr, b_up, sizes: gl.constexpr, dtype: gl.constexpr):
    """Piece p of a state as an operand."""
    b_S = S[p]
    if dtype == gl.float16:
        b_S = b_S * columns_of_piece(b_up, p, sizes)[:, None]
    return gl.convert_layout(opaque(b_S.to(dtype)), gl.DotOperandLayout(0, out_layout(sizes), 2))


@gluon.jit
def ahead_of(S, sizes: gl.constexpr, dtype: gl.constexpr):
    """What the next chunk's queries see a state by, where there are registers for it: operands and, in float16, what
    undoes their scaling.
    """
    ahead = ()
    if has_registers(sizes):
        b_up = None
        if dtype == gl.float16:
            b_up, b_down = scaled_by(S, sizes)
        for p in gl.static_range(pieces_of(sizes)):
            ahead = ahead + (as_operand(S, p, b_up, sizes, dtype),)
        if dtype == gl.float16:
            ahead = ahead + (b_down,)
    return ahead


@gluon.jit
def step(d_o, stages, tiles, o, work, chunk, state, waiting, decay, sizes: gl.constexpr):
    """One chunk: the state after it, and its outputs, which are stored unless the next step is to do so.

    state: the one before it.
    """
    S = state.pieces
    CHUNK: gl.constexpr = sizes.CHUNK
    STAGES: gl.constexpr = sizes.STAGES
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    PIECES: gl.constexpr = pieces_of(sizes)
    dtype: gl.constexpr = tiles.scores.dtype
    L_O: gl.constexpr = out_layout(sizes)
    operand: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    AHEAD: gl.constexpr = has_registers(sizes)
    stage = chunk.i % STAGES
    stage_before = (chunk.i + STAGES - 1) % STAGES
    phase = (chunk.i // STAGES) & 1
    v_tile = stages.v.index(stage).reshape([CHUNK, BLOCK_E])
    b_up = None
    b_down = None
    if dtype == gl.float16:
        if AHEAD:
            b_down = state.ahead[PIECES]
        else:
            b_up, b_down = scaled_by(S, sizes)
    mbarrier.wait(stages.full.index(stage), phase)
    if is_copied(sizes):
        # What lanes copied, WGMMA reads by another proxy.
        fence_async_shared()
    seen = gl.zeros([BLOCK_E, CHUNK], gl.float32, L_O)  # [BLOCK_E, queries]
    issued = ()
    # Two pieces at a time: the operands of more would not fit in registers.
    for first in gl.static_range(0, PIECES, 2):
        if first > 0:
            seen = warpgroup_mma_wait(2, deps=[seen])
        decayed_S = ()
        for p in gl.static_range(first, min(first + 2, PIECES)):
            if AHEAD:
                b_S = state.ahead[p]
            else:
                b_S = as_operand(S, p, b_up, sizes, dtype)
            decayed_S = decayed_S + (S[p] * decay,)
            q_tile = factor_of(stages.q, stage, p, sizes)
            seen = warpgroup_mma(b_S, q_tile.permute((1, 0)), seen, use_acc=p > 0, is_async=True)
        if first == 0:
            mbarrier.wait(stages.full_v.index(stage), phase)
            b_entering = tiles.entering.load(gl.SliceLayout(0, operand))
            b_v = (v_tile.permute((1, 0)).load(operand).to(gl.float32) * b_entering[None, :]).to(dtype)
        for p in gl.static_range(first, min(first + 2, PIECES)):
            k_tile = factor_of(stages.k, stage, p, sizes)
            b_v_of = for_piece(b_v, p, sizes)
            issued = issued + (warpgroup_mma(b_v_of, k_tile, decayed_S[p - first], is_async=True),)
    if has_registers(sizes):
        if waiting.are_there:
            o_tile = stages.v.index(stage_before)
            store_tile_of_outputs(d_o, o_tile, o, work, chunk_before(chunk, sizes), waiting.outputs, sizes, False)
    else:
        release_values(stages, chunk, sizes)
    seen = warpgroup_mma_wait(PIECES - (PIECES - 1) // 2 * 2, deps=[seen])
    mbarrier.wait(tiles.ready.index(0), chunk.i & 1)
    if dtype == gl.float16:
        b_seen = seen * gl.convert_layout(b_down, gl.SliceLayout(1, L_O))[:, None]
        b_seen = b_seen * tiles.up.load(gl.SliceLayout(0, L_O))[None, :]
    else:
        b_seen = weighted(tiles, seen, b_down, sizes)
    out = warpgroup_mma(v_tile.permute((1, 0)), tiles.scores, b_seen, is_async=True)
    ahead = ()
    if AHEAD:
        # Not more than `out` is left.
        S = ()
        for p in gl.static_range(PIECES):
            S = S + (warpgroup_mma_wait(1, deps=[issued[p]]),)
        ahead = ahead_of(S, sizes, dtype)
        b_o = outputs(tiles, warpgroup_mma_wait(0, deps=[out]), sizes)
        release_values(stages, chunk, sizes)
    else:
        results = warpgroup_mma_wait(0, deps=(out,) + issued)
        S = results[1:]
        b_o = outputs(tiles, results[0], sizes)
        tl.debug_barrier()
    mbarrier.arrive(stages.empty.index(stage))
    if not AHEAD:
        store_now(d_o, stages, o, work, chunk, b_o, sizes)
    return State(S, ahead), b_o


@gluon.jit
def store_now(d_o, stages, o, work, chunk, b_o, sizes: gl.constexpr):
    """Begin to store the outputs of a chunk, or store a short one's."""
    o_tile = stages.v.index(chunk.i % sizes.STAGES)
    if chunk.length < sizes.CHUNK:
        store_tile_of_outputs(d_o, o_tile, o, work, chunk, b_o, sizes, True)
        # No TMA has stored them: the next values must not be written before they have been read.
        fence_async_shared()
    else:
        store_tile_of_outputs(d_o, o_tile, o, work, chunk, b_o, sizes, False)


@gluon.constexpr_function
def has_registers(sizes):
    """Whether they have room for a chunk's outputs, which then wait for the next one's products to be stored beside,
    and for the state as the next one's operand.
    """
    return sizes.D <= 128


@gluon.jit
def release_values(stages, chunk, sizes: gl.constexpr):
    """Outputs of the chunk before have left the tile that they were stored from: values may come there."""
    tma.store_wait(0)
    tl.debug_barrier()
    mbarrier.arrive(stages.empty_v.index((chunk.i + sizes.STAGES - 1) % sizes.STAGES), pred=chunk.i > 0)


@gluon.jit
def chunk_before(chunk, sizes: gl.constexpr):
    """The whole chunk that goes before one."""
    stride: gl.constexpr = -sizes.CHUNK if sizes.REVERSED else sizes.CHUNK
    return Chunk(chunk.i - 1, chunk.row - stride, 0, sizes.CHUNK)


@gluon.jit
def sum_up(S, own, batch, span, decays, i_h, o_d, o_e, sizes: gl.constexpr):
    """The state before a segment, of the one before the sequence and what each segment before leaves by itself.

    It has the bits of ``carried.carry_states``, and waits for no launch of that.
    """
    PARTS: gl.constexpr = sizes.SEGMENT // sizes.PART
    REVERSED: gl.constexpr = sizes.REVERSED
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    rate = base_two_rate(decays.p_slopes, i_h)
    lost = rest_of_rate(decays.p_slopes, i_h, rate)
    segments = (span.length + sizes.SEGMENT - 1) // sizes.SEGMENT
    first_slot = carried_slot(batch, span.i_n, span.first, sizes.SEGMENT)
    reach = chunks_in_reach(rate, sizes) * sizes.CHUNK
    for i in range(1, nth_segment(span.i_segment, segments, REVERSED) + 1):
        i_own = (first_slot + nth_segment(i, segments, REVERSED)) * PARTS
        length = gl.minimum(span.length - nth_segment(i - 1, segments, REVERSED) * sizes.SEGMENT, sizes.SEGMENT)
        made = gl.minimum(reach, length)
        next_S = ()
        for p in gl.static_range(pieces_of(sizes)):
            o_row, o_column = rows_of_piece(o_d, p, sizes), columns_of_piece(o_e, p, sizes)
            b_own = gl.zeros([BLOCK_E, width_of(sizes, p)], gl.float32, piece_layout(sizes, p))
            for i_part in range(PARTS):
                # From one on that is not in reach, parts have not been made.
                if i_part * sizes.PART < made:
                    b_own += load_tile(own, i_own + i_part, i_h, o_row, o_column, sizes)
            next_S = next_S + (advanced(S[p], rate, length, lost, b_own),)
        S = next_S
    return S


@gluon.jit
def begin_state(pools, batch, span, i_h, o_d, o_e, decays, sizes: gl.constexpr, IN_UNITS: gl.constexpr):
    """The state before a program's first row."""
    S, is_carried = state_before(pools, batch, span, i_h, o_d, o_e, sizes)
    if sizes.SUMMED:
        if (span.length > sizes.SEGMENT) & (not is_carried):
            S = sum_up(S, pools.carried, batch, span, decays, i_h, o_d, o_e, sizes)
    if IN_UNITS:
        S = in_units(S, 1.0 / unit_of(decays.scale))
    return S


@gluon.jit
def follow(
    tensors, stages, tiles, rows, work, span, batch, pools, snapshots, decays, sizes: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Advance the state over all chunks and store the outputs of its own; and what needs no chunks."""
    CHUNK: gl.constexpr = sizes.CHUNK
    REVERSED: gl.constexpr = sizes.REVERSED
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    L_S: gl.constexpr = state_layout(sizes)
    L_O: gl.constexpr = out_layout(sizes)
    d_o = tensors[3]
    final = pools.final
    o = rows.o
    p_slopes = decays.p_slopes
    scale = decays.scale
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    if TOKENS:
        if span.is_token:
            has = has_initial(batch, span.i_n)
            single_token(rows, span.begin, work.column, pools, has, span.slot, work.i_h, decays, sizes)
    if span.slot < 0:
        store_zeros(o, span.begin, span.end, work.column, sizes)
        if batch.p_cu is not None:
            if (span.i_n == batch.count.sequences) & (span.i_segment == 0):
                # Rows before the first sequence.
                before, _ = bounds(batch, 0)
                store_zeros(o, 0, before.to(gl.int32), work.column, sizes)
    if work.chunks > 0:
        FP16: gl.constexpr = tiles.scores.dtype == gl.float16
        IN_UNITS: gl.constexpr = FP16 and REVERSED
        o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = work.column + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(1, L_S))
        # Weights of a chunk's rows are made by a thread each.
        o_row = gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [sizes.WARPS], [0]))
        o_k = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.DotOperandLayout(0, L_S, 2)))
        S = begin_state(pools, batch, span, work.i_h, o_d, o_e, decays, sizes, IN_UNITS)
        if is_shared(sizes):
            S = lead_up(stages, work, S, p_slopes, scale, o_k, sizes)
            mbarrier.arrive(tiles.led.index(0))
        state = State(S, ahead_of(S, sizes, tiles.scores.dtype))
        rate = base_two_rate(p_slopes, work.i_h)
        lost = rest_of_rate(p_slopes, work.i_h, rate)
        # The short chunk, backwards the first, else the last, is a part of its own.
        between = work.lead if REVERSED else work.chunks
        if span.short >= 0:
            between = 1 if REVERSED else span.short
        first = between if REVERSED else work.lead
        stop = 0
        if snapshots.p_positions is not None:
            # A segment stores the states at its chunks' ends; the state before the first one is the sequence's own.
            stop = next_snapshot(snapshots, batch, span.i_n, span.begin, CHUNK)
            if stop == span.begin:
                if span.begin == span.first:
                    store_snapshots(snapshots, batch, final, span.i_n, stop, work.i_h, o_d, o_e, state.pieces, sizes)
                stop = next_snapshot(snapshots, batch, span.i_n, stop + 1, CHUNK)
        stride: gl.constexpr = -CHUNK if REVERSED else CHUNK
        b_o = gl.zeros([BLOCK_E, CHUNK], tiles.scores.dtype, L_O)
        for i_part in range(2):
            is_short = (i_part == 0) == REVERSED
            part_from = gl.where(i_part == 0, work.lead, between)
            part_to = gl.where(i_part == 0, between, work.chunks)
            if part_from < part_to:
                length = gl.where(is_short, span.rest, CHUNK)
                store_weights(tiles, rate, o_row, o_row, length, scale, REVERSED, SHORT=True, IN_UNITS=IN_UNITS)
                decay = decay_over(rate, lost, gl.to_tensor(length))
                # Rows of a short chunk have been zeroed before that.
                mbarrier.wait(tiles.ready.index(0), part_from & 1, pred=is_short)
                for i in range(part_from, part_to):
                    row = work.start + i * stride
                    chunk = Chunk(i, row, 0, length)
                    waiting = Waiting(b_o, i > first)
                    state, b_o = step(d_o, stages, tiles, o, work, chunk, state, waiting, decay, sizes)
                    if snapshots.p_positions is not None:
                        if row + CHUNK == stop:
                            store_snapshots(
                                snapshots, batch, final, span.i_n, stop, work.i_h, o_d, o_e, state.pieces, sizes
                            )
                            stop = next_snapshot(snapshots, batch, span.i_n, stop + 1, CHUNK)
                if has_registers(sizes):
                    if (part_to == work.chunks) | is_short:
                        last = Chunk(part_to - 1, work.start + (part_to - 1) * stride, 0, length)
                        store_now(d_o, stages, o, work, last, b_o, sizes)
        tma.store_wait(0)
        if final.p is not None:
            # Read again: in the main loop the registers are needed.
            first, last = bounds(batch, span.i_n)
            is_last = span.end == last
            if REVERSED:
                is_last = span.begin == first
            if is_last:
                S = state.pieces
                if IN_UNITS:
                    S = in_units(S, unit_of(scale))
                store_state(final, slot_of(batch, span.i_n), work.i_h, o_d, o_e, S, sizes)
