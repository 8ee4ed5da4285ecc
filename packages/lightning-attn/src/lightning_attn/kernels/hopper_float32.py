"""Prefill in chunks for NVIDIA's sm_90, in float32: ``chunked.prefill`` with WGMMAs of bfloat16 parts.

A float32 is the sum of three bfloat16 parts of 8 bits each, and a product the sum of six of theirs: what is left out is
below float32's rounding. Parts lie in shared memory, where WGMMAs read them. Two warpgroups a program, each with half
of the columns of every product; the state, and a chunk's q and k, are taken in pieces of 64 columns, of which two sets
of parts take turns: while the products of one piece are made, the next one is cut into parts.

    scores += k q^T    seen += S^T q^T    S^T' = decayed S^T + (v entering)^T k    in flight together, piece by piece
    o^T = seen + v^T scores

A state has 128 rows at most. A larger one is two, of two launches whose outputs are added up (``sizes.IN_TURN``
or ``BESIDE``; see halves.py). Several programs may share a segment, as those by roles.

Tensor cores cut off what they add to an accumulator, toward zero: every sum starts from zero, with its smallest terms,
and has at most 64 columns; sums of these, and with what was there before, are made in registers.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_attn.kernels.decay import base_two_rate, rest_of_rate
from lightning_attn.kernels.hopper_apart import items_of, locate_item, wait_for_ahead
from lightning_attn.kernels.hopper_float32_step import (
    allocate_pieces,
    first_pieces,
    follow,
    step,
)
from lightning_attn.kernels.hopper_groups import Decays, HeadRows, Operands, Pools, Span
from lightning_attn.kernels.hopper_long import locate_share, rows_of_sequence, shares_of_segment
from lightning_attn.kernels.hopper_parts import allocate_parts, product_layout, rows_layout
from lightning_attn.kernels.hopper_ring import pieces_of
from lightning_attn.kernels.hopper_rows import (
    single_token,
    state_before,
    store_snapshots,
    store_state,
    zero_state,
)
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    Snapshots,
    States,
    bounds,
    carried_slot,
    chunks_before,
    chunks_in_reach,
    has_initial,
    item,
    locate,
    locate_state,
    next_snapshot,
    program,
    rows_of_head,
    segment_rows,
    shares_of,
    slot_of,
)


@gluon.jit
def store_zeros(o, begin, end, column, sizes: gl.constexpr):
    """Zero rows begin to end of one head's BLOCK_E columns."""
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    layout: gl.constexpr = rows_layout(BLOCK_E)
    o_row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(0, layout))
    b_zero = gl.zeros([CHUNK, BLOCK_E], gl.float32, layout)
    for row in range(begin, end, CHUNK):
        p_tile = o.p + (row + o_row)[:, None].to(gl.int64) * o.stride + o_e[None, :].to(gl.int64) * o.element
        gl.store(p_tile, b_zero, mask=((row + o_row)[:, None] < end) & (o_e[None, :] < sizes.E))


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def prefill(
    p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_carried, p_positions, p_snapshot_slots,
    rows, num_sequences, num_slots, num_snapshots, scale, strides, sizes: gl.constexpr,
):  # fmt: skip
    """``chunked.prefill``, with its arguments. APART: see hopper_apart.py."""
    pointers = Operands(p_q, p_k, p_v, p_o)
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    snapshots = Snapshots(p_positions, p_snapshot_slots, num_snapshots)
    pools = Pools(
        States(p_initial, strides.initial), States(p_final, strides.final), States(p_carried, strides.carried)
    )
    decays = Decays(p_slopes, scale)
    programs = gl.num_programs(0)
    if sizes.BESIDE == 1:
        # All that this launch has waited for has ended.
        tl.extra.cuda.gdc_launch_dependents()
    if sizes.APART:
        wait_for_ahead(batch, sizes)
        for i_item in range(gl.program_id(0), items_of(batch, sizes), programs):
            items = items_of(batch, sizes)
            prefill_item(i_item, items, pointers, batch, pools, snapshots, decays, strides, sizes)
            tl.debug_barrier()
        # What is behind waits for this launch, and so for the tokens.
        tl.extra.cuda.gdc_wait()
    else:
        prefill_item(gl.program_id(0), programs, pointers, batch, pools, snapshots, decays, strides, sizes)
    if sizes.BESIDE == 2:
        # What is behind waits for this launch, and so for both.
        tl.extra.cuda.gdc_wait()


@gluon.jit
def prefill_item(i_item, items, pointers, batch, pools, snapshots, decays, strides, sizes: gl.constexpr):
    """What one program of as many as there are items does."""
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    SEGMENT: gl.constexpr = sizes.SEGMENT
    REVERSED: gl.constexpr = sizes.REVERSED
    initial, final, carried = pools
    p_slopes, scale = decays
    TILES: gl.constexpr = (sizes.E + BLOCK_E - 1) // BLOCK_E
    i_e, i_h, i_w = item(i_item, items, sizes.H, TILES, SEGMENT > 0)
    i_h = i_h.to(gl.int64)
    # Not backwards, nor what dq is made of, which leaves no state.
    PLAIN: gl.constexpr = snapshots.p_positions is None and final.p is not None and not REVERSED
    SHARED: gl.constexpr = sizes.SHARED and PLAIN and not (sizes.APART or sizes.IN_TURN)
    LONG: gl.constexpr = SHARED and sizes.LONG > 0
    i_share = 0
    shares = 1
    if SHARED:
        shares = shares_of(batch, sizes.H * TILES, SEGMENT)
        i_share = i_w % shares
        i_w = i_w // shares
    # Of all segments, or of the long ones alone.
    are_long = False
    if LONG:
        are_long = shares == 1
    if sizes.APART:
        i_n, i_segment, first, last = locate_item(batch, i_w, sizes)
    elif LONG:
        i_n = i_w * 0
        i_segment = i_w * 0
        first = i_w.to(gl.int64) * 0
        last = first
        if are_long:
            i_e, i_head, i_n, i_segment, i_share = locate_share(batch, i_item, items, sizes)
            i_h = i_head.to(gl.int64)
            i_segment, first, last = rows_of_sequence(batch, i_n, i_segment, i_share, sizes)
        else:
            i_n, i_segment, first, last = locate(batch, i_w, SEGMENT)
            i_segment += i_n * 0
    else:
        i_n, i_segment, first, last = locate(batch, i_w, SEGMENT)
    i_n = i_n.to(gl.int64)
    q = rows_of_head(pointers.q, strides.q, i_n, i_h, sizes.RATIO_QK)
    k = rows_of_head(pointers.k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(pointers.v, strides.v, i_n, i_h, sizes.RATIO_V)
    o = rows_of_head(pointers.o, strides.o, i_n, i_h, 1)
    # A sequence's rows are counted in 32 bits.
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    begin, end = segment_rows(first, last, i_segment, SEGMENT)
    length = last - first
    slot = slot_of(batch, i_n)
    column = i_e * BLOCK_E
    lead = 0
    if SHARED:
        of_segment = (end - begin + CHUNK - 1) // CHUNK
        if batch.p_cu is not None:
            if initial.p is not None:
                # Its last program stores a state in the slot that the others would begin from.
                shares = gl.where(length <= SEGMENT, 1, shares)
        if LONG:
            if are_long:
                is_own = i_share < 0
                i_share, shares = shares_of_segment(batch, i_n, begin, end, i_share, items, sizes)
                is_alone = shares == 0
                if initial.p is not None:
                    is_alone = is_alone | (length <= SEGMENT)
                # Of one program the others have no chunks.
                i_share = gl.where(is_alone, gl.where(is_own, 0, 1), i_share)
                shares = gl.where(is_alone, 1, shares)
        lead = chunks_before(i_share, shares, of_segment)
        upto = chunks_before(i_share + 1, shares, of_segment)
        end = gl.where(upto > lead, gl.minimum(end, begin + upto * CHUNK), begin)
    if batch.p_cu is not None and PLAIN:
        # There may be a program for a second segment of it, which has no rows.
        if (length == 1) & (slot >= 0) & (begin < end):
            has = has_initial(batch, i_n)
            single_token(HeadRows(q, k, v, o), begin, column, pools, has, slot, i_h, decays, sizes)
            # No chunk is left.
            end = begin
    if slot < 0:
        store_zeros(o, begin + lead * CHUNK, end, column, sizes)
        if batch.p_cu is not None:
            if (i_n == batch.count.sequences) & (i_segment == 0) & (i_share == 0):
                # Rows before the first sequence.
                before, _ = bounds(batch, 0)
                store_zeros(o, 0, before.to(gl.int32), column, sizes)
    elif begin < end:
        parts = allocate_pieces(sizes)
        chunks = (end - begin + CHUNK - 1) // CHUNK
        # Chunk i begins at start + i * stride. The short one is the sequence's last, in either direction.
        stride: gl.constexpr = -CHUNK if REVERSED else CHUNK
        start = begin
        if REVERSED:
            start += (chunks - 1) * CHUNK
        L_S: gl.constexpr = product_layout(BLOCK_D)
        o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_S))
        span = Span(i_n, i_segment, first, length, begin, end, slot)
        S, _ = state_before(pools, batch, span, i_h, o_d, o_e, sizes)
        rate = base_two_rate(p_slopes, i_h)
        rates = (rate, rest_of_rate(p_slopes, i_h, rate))
        if snapshots.p_positions is not None:
            # A segment stores the states at its chunks' ends; the state before the first one is the sequence's own.
            stop = next_snapshot(snapshots, batch, i_n, begin, CHUNK)
            if stop == begin:
                if begin == first:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, o_d, o_e, S, sizes)
                stop = next_snapshot(snapshots, batch, i_n, stop + 1, CHUNK)
        if SHARED:
            if lead > 0:
                # Up to its own chunks, with the bits that whoever takes the others gives the state.
                S = follow((parts.k, parts.weighted), (k, v), S, rates, scale, begin, end, lead, column, sizes)
                start += lead * CHUNK
                chunks -= lead
        of_first = gl.minimum(end - start, CHUNK)
        ahead = first_pieces(parts, q, k, v, S, rates, scale, start, of_first, column, sizes)
        for i in range(chunks):
            row = start + i * stride
            next_length = gl.where(i + 1 < chunks, end - row - stride, 0)
            following = (q, k, v, row + stride, next_length)
            of_chunk = gl.minimum(end - row, CHUNK)
            S, ahead = step(
                parts, ahead, following, o, S, rates, scale, row, of_chunk, column, sizes
            )  # fmt: skip
            if snapshots.p_positions is not None:
                if row + CHUNK == stop:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, o_d, o_e, S, sizes)
                    stop = next_snapshot(snapshots, batch, i_n, stop + 1, CHUNK)
        if final.p is not None:
            is_last = end == last
            if REVERSED:
                is_last = begin == first
            if is_last:
                store_state(final, slot, i_h, o_d, o_e, S, sizes)


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def segment_states(
    p_k, p_v, p_slopes, p_cu, p_slots, p_carried, rows, num_sequences, num_slots, scale, strides, sizes: gl.constexpr
):
    """``chunked.segment_states``, with its arguments."""
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    SEGMENT: gl.constexpr = sizes.SEGMENT
    REVERSED: gl.constexpr = sizes.REVERSED
    batch = Batch(p_cu, p_slots, None, Counts(rows, num_sequences, num_slots))
    carried = States(p_carried, strides.carried)
    i_e, i_h, i_w = program(sizes.H, (sizes.E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(gl.int64)
    i_n, i_segment, first, last = locate_state(batch, i_w, SEGMENT, sizes.REVERSED)
    i_n = i_n.to(gl.int64)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    begin, end = segment_rows(first, last, i_segment, SEGMENT)
    slot = slot_of(batch, i_n)
    has_next = end < last
    next_segment = i_segment + 1
    if REVERSED:
        has_next = begin > first
        next_segment = i_segment - 1
    if (slot >= 0) & (begin < end) & has_next:
        rate = base_two_rate(p_slopes, i_h)
        rates = (rate, rest_of_rate(p_slopes, i_h, rate))
        tokens = chunks_in_reach(rate, sizes) * CHUNK
        if REVERSED:
            end = gl.minimum(end, begin + tokens)
        else:
            begin = gl.maximum(begin, end - tokens)
        k_parts = ()
        for p in gl.static_range(min(2, pieces_of(sizes))):  # noqa: B007 (Triton takes no _)
            k_parts = k_parts + (allocate_parts(CHUNK, BLOCK_D),)
        weighted = allocate_parts(CHUNK, BLOCK_E)
        chunks = (end - begin + CHUNK - 1) // CHUNK
        start = begin
        if REVERSED:
            start += (chunks - 1) * CHUNK
        L_S: gl.constexpr = product_layout(BLOCK_D)
        column = i_e * BLOCK_E
        o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_S))
        S = zero_state(sizes)
        S = follow((k_parts, weighted), (k, v), S, rates, scale, start, end, chunks, column, sizes)
        i_state = carried_slot(batch, i_n, first, SEGMENT) + next_segment
        store_state(carried, i_state.to(gl.int64), i_h, o_d, o_e, S, sizes)
