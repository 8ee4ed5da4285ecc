"""Prefill in chunks for NVIDIA's sm_90, in 16 bits: ``chunked.prefill`` with asynchronous loads and MMAs.

One warpgroup a program, or two that make a head's scores once for 128 columns; and one program an SM. TMA loads run
STAGES - 1 chunks ahead, and each of a chunk's four WGMMAs (hopper_step.py) overlaps with converting or storing an
operand or result of another:

    scores = k q^T              while S is made an operand
    seen = S^T q^T              while v, weighted, and the weighted scores are
    o^T = seen + v^T scores
    S^T' = (v entering)^T k + decayed S^T       while o is converted and stored

There are no consumer warps, so the ring of stages has full barriers alone: a stage is free again once all warps have
passed the barrier in the middle of the next chunk's step. Its loads are issued behind a barrier that is there anyway,
at the step's end, but of two stages at once.

In float16 scores are [queries, keys], so that each query's largest score, which they are scaled by (see chunked.py),
is found among four threads.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lightning_attn.kernels.chunked import in_units
from lightning_attn.kernels.decay import base_two_rate, decay_over, rest_of_rate, unit_of
from lightning_attn.kernels.hopper_apart import items_of, locate_item, wait_for_ahead, wait_for_call
from lightning_attn.kernels.hopper_chain import await_turn, end_turn, own_state, pass_on, state_before
from lightning_attn.kernels.hopper_groups import Decays, HeadRows, Operands, Pools, Span
from lightning_attn.kernels.hopper_long import (
    await_shares,
    end_share,
    locate_share,
    own_chunks,
    rows_of_sequence,
    shares_of_segment,
    state_before_share,
)
from lightning_attn.kernels.hopper_ring import (
    Ring,
    Work,
    expect_chunk,
    load_chunk,
    load_own,
    state_layout,
)
from lightning_attn.kernels.hopper_rows import (
    hidden_zero,
    load_state,
    single_token,
    store_snapshots,
    store_state,
    store_weights,
    store_zeros,
    zero_state,
)
from lightning_attn.kernels.hopper_step import Buffers, Chunk, out_stages, scores_registers, step
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    Snapshots,
    States,
    bounds,
    carried_slot,
    chain_of,
    chunks_in_reach,
    has_initial,
    item,
    locate,
    next_snapshot,
    rows_of_head,
    segment_rows,
    slot_of,
)


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def prefill(
    d_q, d_k, d_v, d_o, p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_carried, p_turns,
    p_positions, p_snapshot_slots, rows, num_sequences, num_slots, num_snapshots, scale, strides, sizes: gl.constexpr,
):  # fmt: skip
    """``chunked.prefill`` with TMA descriptors of q, k, v, o: [sequences, heads, rows, D or E], boxes of one chunk.

    A box may have more columns, 64 or 128, than there are: TMA loads zeros for the others, and stores none of them.

    p_q, p_k, p_v None: sequences of one token are chunks as others are. CHAINED: segments pass their states on, in
    p_carried, two slots a chain; p_turns, of as many chains, heads and tiles, begins as zeros. APART: see
    hopper_apart.py. LONG: see hopper_long.py, where p_turns counts who has read a slot of the pool, if states go there.
    """
    tensors = Operands(d_q, d_k, d_v, d_o)
    pointers = Operands(p_q, p_k, p_v, p_o)
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    snapshots = Snapshots(p_positions, p_snapshot_slots, num_snapshots)
    pools = Pools(
        States(p_initial, strides.initial), States(p_final, strides.final), States(p_carried, strides.carried)
    )
    decays = Decays(p_slopes, scale)
    programs = gl.num_programs(0)
    if sizes.APART:
        if not sizes.DEPENDENT_LAUNCH:
            wait_for_ahead(batch, sizes)
        for i_item in range(gl.program_id(0), items_of(batch, sizes), programs):
            items = items_of(batch, sizes)
            prefill_item(i_item, items, tensors, pointers, batch, pools, p_turns, snapshots, decays, strides, sizes)
            tl.debug_barrier()
        # What is behind waits for this launch, and so for the tokens.
        tl.extra.cuda.gdc_wait()
    else:
        prefill_item(
            gl.program_id(0), programs, tensors, pointers, batch, pools, p_turns, snapshots, decays, strides, sizes
        )


@gluon.jit
def prefill_item(
    i_item, items, tensors, pointers, batch, pools, p_turns, snapshots, decays, strides, sizes: gl.constexpr
):
    """What one program of as many as there are items does."""
    CHUNK: gl.constexpr = sizes.CHUNK
    D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    SEGMENT: gl.constexpr = sizes.SEGMENT
    STAGES: gl.constexpr = sizes.STAGES
    REVERSED: gl.constexpr = sizes.REVERSED
    d_q, d_k, d_v, d_o = tensors
    initial, final, carried = pools
    p_slopes, scale = decays
    TILES: gl.constexpr = (sizes.E + BLOCK_E - 1) // BLOCK_E
    CHAINED: gl.constexpr = sizes.CHAINED
    # A ragged batch's prompts come last, as engines have it: begun first, they run beside the rows of one token.
    LAST_FIRST: gl.constexpr = REVERSED if CHAINED else SEGMENT > 0 or batch.p_cu is not None
    # Of a dense call nothing is read before. On an H200, 32 heads of 72, us: 180 with the wait here, below 170.
    IS_DENSE: gl.constexpr = batch.p_cu is None and batch.p_slots is None
    if not IS_DENSE:
        wait_for_call(batch, sizes)
    LONG: gl.constexpr = sizes.LONG > 0
    if LONG:
        i_e, i_h, i_n, i_segment, i_share = locate_share(batch, i_item, items, sizes)
        i_segment, first, last = rows_of_sequence(batch, i_n, i_segment, i_share, sizes)
    else:
        i_e, i_h, i_w = item(i_item, items, sizes.H, TILES, LAST_FIRST)
        if sizes.APART:
            i_n, i_segment, first, last = locate_item(batch, i_w, sizes)
        else:
            i_n, i_segment, first, last = locate(batch, i_w, SEGMENT, CHAINED)
    # TMA coordinates have 32 bits.
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    begin, end = segment_rows(first, last, i_segment, SEGMENT)
    length = last - first
    slot = slot_of(batch, i_n)
    column = i_e * BLOCK_E
    lead = 0
    o = rows_of_head(pointers.o, strides.o, i_n, i_h.to(gl.int64), 1)
    if IS_DENSE:
        wait_for_call(batch, sizes)
    if pointers.q is not None:
        # Loaded with the bounds and the slot, not after them: for one token each wait for memory shows.
        has = has_initial(batch, i_n)
        # There may be a program for a second segment of it, which has no rows.
        is_token = (length == 1) & (slot >= 0) & (begin < end)
        if LONG:
            is_token = is_token & (i_share < 0)
        if is_token:
            i_first = i_n * 0
            q = rows_of_head(pointers.q, strides.q, i_first, i_h.to(gl.int64), sizes.RATIO_QK)
            k = rows_of_head(pointers.k, strides.k, i_first, i_h.to(gl.int64), sizes.RATIO_QK)
            v = rows_of_head(pointers.v, strides.v, i_first, i_h.to(gl.int64), sizes.RATIO_V)
            single_token(HeadRows(q, k, v, o), begin, column, pools, has, slot, i_h, decays, sizes)
            # No chunk is left.
            end = begin
        if LONG:
            i_share, shares = shares_of_segment(batch, i_n, begin, end, i_share, items, sizes)
            if shares == 0:
                end = begin
            if shares > 1:
                of_segment = (end - begin + CHUNK - 1) // CHUNK
                lead = own_chunks(i_share, shares, of_segment)
                end = gl.minimum(end, begin + own_chunks(i_share + 1, shares, of_segment) * CHUNK)
                begin += lead * CHUNK
    if slot < 0:
        if sizes.DEPENDENT_LAUNCH:
            wait_for_ahead(batch, sizes)
        store_zeros(o, begin, end, column, sizes)
        if batch.p_cu is not None:
            if (i_n == batch.count.sequences) & (i_segment == 0):
                # Rows before the first sequence.
                before, _ = bounds(batch, 0)
                store_zeros(o, 0, before.to(gl.int32), column, sizes)
    elif begin < end:
        # The packed rows of a ragged batch are one box.
        i_box = i_n.to(gl.int32) if batch.p_cu is None else 0
        i_h_qk = i_h // sizes.RATIO_QK
        i_h_v = i_h // sizes.RATIO_V
        dtype: gl.constexpr = d_q.dtype
        if LONG:
            span = Span(i_n, i_segment, first, length, begin, end, slot)
            ahead = Work(i_box, i_h_qk, i_h_v, i_h, column, begin - lead * CHUNK, lead)
            S = state_before_share(tensors, pools, batch, span, ahead, decays, sizes)
        q_stages = gl.allocate_shared_memory(dtype, [STAGES] + d_q.block_type.shape, d_q.layout)
        k_stages = gl.allocate_shared_memory(dtype, [STAGES] + d_k.block_type.shape, d_k.layout)
        v_stages = gl.allocate_shared_memory(dtype, [STAGES] + d_v.block_type.shape, d_v.layout)
        o_tiles = gl.allocate_shared_memory(dtype, [out_stages(STAGES)] + d_o.block_type.shape, d_o.layout)
        scores_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        scores = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], scores_layout)
        full_q = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full_q.index(i), count=1)
            mbarrier.init(full_k.index(i), count=1)
            mbarrier.init(full_v.index(i), count=1)
        fence_async_shared()
        ring = Ring(q_stages, k_stages, v_stages, full_q, full_k, full_v)

        rest = (end - begin) % CHUNK
        chunks = (end - begin + CHUNK - 1) // CHUNK
        # Chunk i begins at start + i * stride. The short one is the sequence's last, in either direction.
        stride: gl.constexpr = -CHUNK if REVERSED else CHUNK
        start = begin
        if REVERSED:
            start += (chunks - 1) * CHUNK
        own = 0
        if CHAINED:
            # Who has another segment behind it.
            has_next = begin > first if REVERSED else end < last
            in_reach = chunks_in_reach(base_two_rate(p_slopes, i_h), sizes)
            # At least one: who has another segment behind it passes a state on.
            own = gl.where(has_next, gl.minimum(chunks, gl.maximum(in_reach, 1)), 0)
        work = Work(i_box, i_h_qk, i_h_v, i_h, column, start, chunks, own)
        for i in gl.static_range(STAGES - 1):
            if CHAINED:
                load_own(tensors, ring, work, i, stride, sizes)
            else:
                expect_chunk(tensors, ring, work, i, sizes)
                load_chunk(tensors, ring, work, i, start + i * stride, sizes)

        L_S: gl.constexpr = state_layout(sizes)
        L_SCORES: gl.constexpr = scores_registers(CHUNK, sizes.WARPS)
        o_d = hidden_zero(sizes) + gl.arange(0, D, gl.SliceLayout(0, L_S))
        o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_S))
        if not LONG:
            S = zero_state(sizes)
        is_carried = False
        if sizes.DEPENDENT_LAUNCH:
            wait_for_ahead(batch, sizes)
        if CHAINED:
            turn = (length + SEGMENT - 1) // SEGMENT - 1 - i_segment if REVERSED else i_segment
            is_carried = turn > 0
        elif SEGMENT:
            is_carried = length > SEGMENT
            if is_carried and lead == 0:
                i_state = carried_slot(batch, i_n, first, SEGMENT) + i_segment
                S = load_state(carried, i_state.to(gl.int64), i_h, o_d, o_e, sizes)
        if initial.p is not None:
            if has_initial(batch, i_n) and not is_carried and lead == 0:
                S = load_state(initial, slot, i_h, o_d, o_e, sizes)
        FP16: gl.constexpr = dtype == gl.float16
        IN_UNITS: gl.constexpr = FP16 and REVERSED
        if IN_UNITS:
            S = in_units(S, 1.0 / unit_of(scale))

        rate = base_two_rate(p_slopes, i_h)
        # The layouts of queries and keys where their weights are needed.
        o_i = hidden_zero(sizes) + gl.arange(0, CHUNK, gl.SliceLayout(0, L_SCORES))
        o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, L_SCORES))
        o_k = hidden_zero(sizes) + gl.arange(0, CHUNK, gl.SliceLayout(0, gl.DotOperandLayout(0, L_S, 2)))
        distance = o_i[None, :] - o_j[:, None]
        # In float16 rows are queries, and columns keys.
        if REVERSED != FP16:
            distance = -distance
        b_within = gl.where(distance >= 0, gl.exp2(-rate * gl.maximum(distance, 0).to(gl.float32)) * scale, 0.0)
        # In shared memory, for want of registers; swizzled so that a warp's eight rows have no bank conflicts.
        within_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        within_smem = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], within_layout, b_within)
        row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        seeing_smem = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
        entering_smem = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
        up_smem = None
        if FP16:
            up_smem = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
        buffers = Buffers(scores, o_tiles, within_smem, seeing_smem, entering_smem, up_smem)
        lost = rest_of_rate(p_slopes, i_h, rate)
        decay = decay_over(rate, lost, gl.to_tensor(CHUNK))
        if CHAINED:
            if length > SEGMENT:
                chain = chain_of(batch, i_n, first, SEGMENT)
                p_turn = p_turns + (chain * sizes.H + i_h) * TILES + i_e
                own_S = own_state(tensors, ring, buffers, work, rate, o_i, o_k, rest, scale, sizes, IN_UNITS)
                if is_carried:
                    await_turn(p_turn, turn)
                    S = state_before(carried, chain, i_h, turn, o_d, o_e, sizes)
                if own > 0:
                    pass_on(carried, chain, i_h, turn, o_d, o_e, S[0], own_S, (rate, lost), end - begin, sizes)
                    end_turn(p_turn, turn + 1)

        SNAPSHOTS: gl.constexpr = snapshots.p_positions is not None
        whole_from = 0
        whole_to = chunks
        if REVERSED:
            if rest > 0:
                whole_from = 1
                store_weights(buffers, rate, o_i, o_k, rest, scale, REVERSED, SHORT=True, IN_UNITS=IN_UNITS)
                rest_decay = decay_over(rate, lost, rest)
                short = Chunk(0, start, start + (STAGES - 1) * stride, rest)
                S = (step(tensors, ring, buffers, o, work, short, S[0], rest_decay, sizes, True, SNAPSHOTS),)
        else:
            if rest > 0:
                whole_to = chunks - 1
        store_weights(buffers, rate, o_i, o_k, CHUNK, scale, REVERSED, SHORT=False, IN_UNITS=IN_UNITS)
        if snapshots.p_positions is not None:
            # A segment stores the states at its chunks' ends; the state before the first one is the sequence's own.
            stop = next_snapshot(snapshots, batch, i_n, begin, CHUNK)
            if stop == begin:
                if begin == first:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, o_d, o_e, S, sizes)
                stop = next_snapshot(snapshots, batch, i_n, stop + 1, CHUNK)
        for i in range(whole_from, whole_to):
            row = start + i * stride
            chunk = Chunk(i, row, row + (STAGES - 1) * stride, CHUNK)
            S = (step(tensors, ring, buffers, o, work, chunk, S[0], decay, sizes, False, SNAPSHOTS),)
            if snapshots.p_positions is not None:
                if row + CHUNK == stop:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, o_d, o_e, S, sizes)
                    stop = next_snapshot(snapshots, batch, i_n, stop + 1, CHUNK)
        if not REVERSED:
            if rest > 0:
                rate = base_two_rate(p_slopes, i_h)
                store_weights(buffers, rate, o_i, o_k, rest, scale, REVERSED, SHORT=True, IN_UNITS=IN_UNITS)
                rest_decay = decay_over(rate, rest_of_rate(p_slopes, i_h, rate), rest)
                # No chunk is ahead of it.
                short = Chunk(chunks - 1, start + (chunks - 1) * stride, 0, rest)
                S = (step(tensors, ring, buffers, o, work, short, S[0], rest_decay, sizes, True, SNAPSHOTS),)
        tma.store_wait(0)
        if LONG and p_turns is not None:
            begins_in_pool = shares > 1
            if SEGMENT:
                begins_in_pool = begins_in_pool & (length <= SEGMENT)
            if begins_in_pool:
                if has_initial(batch, i_n):
                    p_count = p_turns + (slot * sizes.H + i_h) * TILES + i_e
                    if i_share + 1 < shares:
                        end_share(p_count)
                    else:
                        await_shares(p_count, shares - 1)
        if final.p is not None:
            # Read again: in the main loop the registers are needed.
            first_again, last_again = bounds(batch, i_n)
            is_last = end == last_again
            if REVERSED:
                is_last = begin == first_again
            if is_last:
                if IN_UNITS:
                    S = in_units(S, unit_of(scale))
                store_state(final, slot_of(batch, i_n), i_h, o_d, o_e, S, sizes)
