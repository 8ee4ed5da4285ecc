"""Prefill in chunks for NVIDIA's sm_90, in bfloat16: the walk of chunked.py with its copies and products in flight.

One warpgroup a program, one program a multiprocessor. The tensor memory accelerator brings chunks STAGES - 1 ahead, and
each of a chunk's four products runs while the registers or the shared memory of another are made ready:

    scores = k q^T          with    seen  = S^T q^T     in flight together
    o^T = seen + v^T scores with    S^T' = (v entering)^T k + decayed S^T, while o is converted and stored
"""

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightning_attn.kernels.chunked import (
    bounds,
    carried_place,
    has_initial,
    locate,
    next_snapshot,
    program,
    slot_of,
    snapshot_slot,
    state_pointers,
)
from lightning_attn.kernels.decay import base_two_rate, entering, seeing

__all__ = ["TensorDescriptor", "descriptor_layout", "walk"]


def descriptor_layout(block: list[int]) -> gl.NVMMASharedLayout:
    """How a descriptor lays a block of bfloat16 out in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)


@gluon.jit
def fetch(d_q, d_k, d_v, q_smem, k_smem, v_smem, arrived, i_n, i_h_qk, i_h_v, row, column, pred):
    """Start bringing one chunk of q, k and v."""
    mbarrier.expect(arrived, d_q.block_type.nbytes + d_k.block_type.nbytes + d_v.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(d_q, [i_n, i_h_qk, row, 0], arrived, q_smem, pred=pred)
    tma.async_copy_global_to_shared(d_k, [i_n, i_h_qk, row, 0], arrived, k_smem, pred=pred)
    tma.async_copy_global_to_shared(d_v, [i_n, i_h_v, row, column], arrived, v_smem, pred=pred)


@gluon.constexpr_function
def tile_layout(columns):
    """Rows x columns of 16-bit elements over four warps, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def opaque(values):
    """The same values, in a way that compilers do not see through, nor move against the products.

    Otherwise what is computed from them is computed early and kept in registers, of which there are none to spare.
    """
    bits: gl.constexpr = values.dtype.primitive_bitwidth
    if bits == 64:
        return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [values], values.dtype, is_pure=False, pack=1)
    else:
        pack: gl.constexpr = 32 // bits
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], values.dtype, is_pure=False, pack=pack)


@gluon.jit
def zero_after(smem, length, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zero a tile's rows from ``length`` on: they are another sequence's, whose NaN would survive a weight of 0."""
    layout: gl.constexpr = tile_layout(COLUMNS)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    b_tile = smem.load(layout)
    smem.store(gl.where(o_row[:, None] < length, b_tile, 0.0).to(b_tile.dtype))


@gluon.jit
def step(
    d_q, d_k, d_v, d_o, q_smem, k_smem, v_smem, o_smem, scores_smem, arrived, within_smem, seeing_smem, entering_smem,
    p_o, s_o, acc_S, decay, i, row, ahead_row, length, chunks, i_box, i_h_qk, i_h_v, i_h, column,
    CHUNK: gl.constexpr, D: gl.constexpr, BLOCK_E: gl.constexpr, STAGES: gl.constexpr, L_S: gl.constexpr,
    L_O: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Chunk i, of ``length`` rows from ``row`` on: store its outputs, return the state after it."""
    dtype: gl.constexpr = d_q.dtype
    operand_of_o: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    operand_of_S: gl.constexpr = gl.DotOperandLayout(0, L_S, 2)
    stage = i % STAGES
    q_tile = q_smem.index(stage).reshape([CHUNK, D])
    k_tile = k_smem.index(stage).reshape([CHUNK, D])
    v_tile = v_smem.index(stage).reshape([CHUNK, BLOCK_E])
    # Were the state read after the next products have started, ptxas would wait for them first.
    b_S = gl.convert_layout(opaque(acc_S.to(dtype)), operand_of_o)
    decayed_S = acc_S * decay
    mbarrier.wait(arrived.index(stage), (i // STAGES) & 1)
    if MASKED:
        zero_after(k_tile, length, CHUNK, D)
        zero_after(v_tile, length, CHUNK, BLOCK_E)
        fence_async_shared()
        tl.debug_barrier()
    b_zero = gl.zeros([CHUNK, CHUNK], gl.float32, L_O)
    scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)  # [keys, queries]
    seen = warpgroup_mma(b_S, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)  # [BLOCK_E, queries]
    b_scores = warpgroup_mma_wait(1, deps=[scores])
    scores_smem.store((b_scores * within_smem.load(L_O)).to(dtype))
    fence_async_shared()
    tl.debug_barrier()
    # Past this barrier no warp is still in the chunk before: its stage takes the chunk that is STAGES - 1 ahead.
    ahead = i + STAGES - 1
    free = ahead % STAGES
    fetch(
        d_q, d_k, d_v, q_smem.index(free), k_smem.index(free), v_smem.index(free), arrived.index(free),
        i_box, i_h_qk, i_h_v, ahead_row, column, ahead < chunks,
    )  # fmt: skip
    b_entering = entering_smem.load(gl.SliceLayout(0, operand_of_S))
    b_v = v_tile.permute((1, 0)).load(operand_of_S)
    b_v = (b_v.to(gl.float32) * b_entering[None, :]).to(dtype)
    b_seen = warpgroup_mma_wait(0, deps=[seen])
    b_seeing = seeing_smem.load(gl.SliceLayout(0, L_O))
    out = warpgroup_mma(v_tile.permute((1, 0)), scores_smem, b_seen * b_seeing[None, :], is_async=True)
    next_S = warpgroup_mma(b_v, k_tile, decayed_S, is_async=True)
    b_o = warpgroup_mma_wait(1, deps=[out]).to(dtype)  # [BLOCK_E, queries]
    o_tile = o_smem.index(i % 2)
    tma.store_wait(1)
    tl.debug_barrier()
    o_tile.reshape([CHUNK, BLOCK_E]).permute((1, 0)).store(b_o)
    if MASKED:
        tl.debug_barrier()
        layout: gl.constexpr = tile_layout(BLOCK_E)
        o_row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(0, layout))
        p_tile = p_o + (row + o_row)[:, None].to(gl.int64) * s_o[1] + o_e[None, :] * s_o[3]
        gl.store(p_tile, o_tile.reshape([CHUNK, BLOCK_E]).load(layout), mask=o_row[:, None] < length)
    else:
        fence_async_shared()
        tl.debug_barrier()
        tma.async_copy_shared_to_global(d_o, [i_box, i_h, row, column], o_tile)
    return warpgroup_mma_wait(0, deps=[next_S])


@gluon.jit
def store_zeros(p_o, begin, end, column, s_o, BLOCK_E: gl.constexpr, CHUNK: gl.constexpr):
    """Zero rows begin to end of one head's BLOCK_E columns."""
    layout: gl.constexpr = tile_layout(BLOCK_E)
    o_row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(0, layout))
    b_zero = gl.zeros([CHUNK, BLOCK_E], p_o.dtype.element_ty, layout)
    for row in range(begin, end, CHUNK):
        p_tile = p_o + (row + o_row)[:, None].to(gl.int64) * s_o[1] + o_e[None, :] * s_o[3]
        gl.store(p_tile, b_zero, mask=(row + o_row)[:, None] < end)


@gluon.jit
def store_state(p_state, slot, i_h, o_d, o_e, s_state, acc_S):
    """A state's tile, [e, d]."""
    # Only here: the 32 offsets along d would otherwise be computed before the walk and kept through it.
    s_d = opaque(gl.to_tensor(s_state[2]).to(gl.int64))
    p_tile = state_pointers(p_state, slot, i_h.to(gl.int64), o_d, o_e, (s_state[0], s_state[1], s_d, s_state[3]))
    gl.store(p_tile, acc_S.to(p_state.dtype.element_ty))


@gluon.jit
def store_snapshots(
    p_positions, p_targets, p_cu, i_n, num_sequences, rows, num_snapshots, at, p_pool, num_slots, i_h, o_d, o_e, s_pool,
    acc_S, CHUNK: gl.constexpr,
):  # fmt: skip
    """Store the state at this row for every snapshot that wants it."""
    for i_p in range(num_snapshots):
        slot = snapshot_slot(
            p_positions, p_targets, p_cu, i_n, i_p, num_sequences, rows, num_snapshots, at, num_slots, CHUNK
        )
        if slot >= 0:
            store_state(p_pool, slot, i_h, o_d, o_e, s_pool, acc_S)


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def walk(
    d_q, d_k, d_v, d_o, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_carried, p_positions,
    p_snapshot_slots, rows, num_sequences, num_slots, num_snapshots, scale, s_o, s_initial, s_final, s_carried,
    H: gl.constexpr, RATIO_QK: gl.constexpr, RATIO_V: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    BLOCK_E: gl.constexpr, CHUNK: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr, REVERSED: gl.constexpr,
):  # fmt: skip
    """``chunked.walk`` with q, k, v and o as descriptors of [sequences, heads, rows, D or E], blocks of one chunk."""
    i_e, i_h, i_w = program(H, E // BLOCK_E)
    i_n, i_segment, begin, end = locate(p_cu, i_w, num_sequences, rows, SEGMENT)
    # The tensor memory accelerator counts rows in 32 bits.
    begin = begin.to(gl.int32)
    end = end.to(gl.int32)
    first = begin
    length = end - begin
    if SEGMENT:
        begin = gl.minimum(first + i_segment * SEGMENT, end)
        end = gl.minimum(begin + SEGMENT, end)
    slot = slot_of(p_slots, i_n, num_sequences, num_slots)
    column = i_e * BLOCK_E
    p_o += i_n.to(gl.int64) * s_o[0] + i_h.to(gl.int64) * s_o[2]
    if slot < 0:
        store_zeros(p_o, begin, end, column, s_o, BLOCK_E, CHUNK)
        if p_cu is not None:
            if (i_n == num_sequences) & (i_segment == 0):
                # Rows before the first sequence.
                before, _ = bounds(p_cu, 0, num_sequences, rows)
                store_zeros(p_o, 0, before.to(gl.int32), column, s_o, BLOCK_E, CHUNK)
    elif begin < end:
        # The packed rows of a ragged batch are one box.
        i_box = i_n.to(gl.int32) if p_cu is None else 0
        i_h_qk = i_h // RATIO_QK
        i_h_v = i_h // RATIO_V
        dtype: gl.constexpr = d_q.dtype
        q_smem = gl.allocate_shared_memory(dtype, [STAGES] + d_q.block_type.shape, d_q.layout)
        k_smem = gl.allocate_shared_memory(dtype, [STAGES] + d_k.block_type.shape, d_k.layout)
        v_smem = gl.allocate_shared_memory(dtype, [STAGES] + d_v.block_type.shape, d_v.layout)
        o_smem = gl.allocate_shared_memory(dtype, [2] + d_o.block_type.shape, d_o.layout)
        scores_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        scores_smem = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], scores_layout)
        arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(arrived.index(i), count=1)
        fence_async_shared()

        rest = (end - begin) % CHUNK
        chunks = (end - begin + CHUNK - 1) // CHUNK
        # Chunk i begins at start + i * stride. The one with fewer rows is the sequence's last, whichever way it walks.
        stride: gl.constexpr = -CHUNK if REVERSED else CHUNK
        start = begin
        if REVERSED:
            start += (chunks - 1) * CHUNK
        for i in gl.static_range(STAGES - 1):
            fetch(
                d_q, d_k, d_v, q_smem.index(i), k_smem.index(i), v_smem.index(i), arrived.index(i),
                i_box, i_h_qk, i_h_v, start + i * stride, column, i < chunks,
            )  # fmt: skip

        L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
        L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
        o_d = gl.arange(0, D, gl.SliceLayout(0, L_S))
        o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_S))
        acc_S = gl.zeros([BLOCK_E, D], gl.float32, L_S)
        is_carried = False
        if SEGMENT:
            is_carried = length > SEGMENT
            if is_carried:
                place = carried_place(p_cu, i_n, first, rows, SEGMENT) + i_segment
                acc_S = gl.load(state_pointers(p_carried, place.to(gl.int64), i_h.to(gl.int64), o_d, o_e, s_carried))
        if p_initial is not None:
            if has_initial(p_initial, p_has, i_n, num_sequences) and not is_carried:
                acc_S = gl.load(state_pointers(p_initial, slot, i_h.to(gl.int64), o_d, o_e, s_initial)).to(gl.float32)

        rate = base_two_rate(p_slopes, i_h)
        # The layouts in which queries and keys stand where their weights are needed.
        o_i = gl.arange(0, CHUNK, gl.SliceLayout(0, L_O))
        o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, L_O))
        o_k = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.DotOperandLayout(0, L_S, 2)))
        distance = o_i[None, :] - o_j[:, None]
        if REVERSED:
            distance = -distance
        b_within = gl.where(distance >= 0, gl.exp2(-rate * gl.maximum(distance, 0).to(gl.float32)) * scale, 0.0)
        # In shared memory, for want of registers; swizzled so that a warp's eight rows meet no bank twice.
        within_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        within_smem = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], within_layout, b_within)
        row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        seeing_smem = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
        entering_smem = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
        decay = gl.exp2(-rate * CHUNK)

        whole_from = 0
        whole_to = chunks
        if REVERSED:
            if rest > 0:
                whole_from = 1
                tl.debug_barrier()
                seeing_smem.store(seeing(rate, opaque(o_i), rest, scale, REVERSED))
                entering_smem.store(entering(rate, opaque(o_k), rest, scale, REVERSED))
                acc_S = step(
                    d_q, d_k, d_v, d_o, q_smem, k_smem, v_smem, o_smem, scores_smem, arrived, within_smem, seeing_smem,
                    entering_smem, p_o, s_o, acc_S, gl.exp2(-rate * rest), 0, start,
                    start + (STAGES - 1) * stride, rest, chunks, i_box, i_h_qk, i_h_v, i_h, column,
                    CHUNK, D, BLOCK_E, STAGES, L_S, L_O, MASKED=True,
                )  # fmt: skip
        else:
            if rest > 0:
                whole_to = chunks - 1
        tl.debug_barrier()
        seeing_smem.store(seeing(rate, o_i, CHUNK, scale, REVERSED))
        entering_smem.store(entering(rate, o_k, CHUNK, scale, REVERSED))
        if p_positions is not None:
            # A segment stores the states at its chunks' ends; the state before the first one is the sequence's own.
            stop = next_snapshot(p_positions, p_cu, i_n, num_sequences, rows, num_snapshots, begin, CHUNK)
            if stop == begin:
                if begin == first:
                    store_snapshots(
                        p_positions, p_snapshot_slots, p_cu, i_n, num_sequences, rows, num_snapshots, stop, p_final,
                        num_slots, i_h, o_d, o_e, s_final, acc_S, CHUNK,
                    )  # fmt: skip
                stop = next_snapshot(p_positions, p_cu, i_n, num_sequences, rows, num_snapshots, stop + 1, CHUNK)
        for i in range(whole_from, whole_to):
            row = start + i * stride
            acc_S = step(
                d_q, d_k, d_v, d_o, q_smem, k_smem, v_smem, o_smem, scores_smem, arrived, within_smem, seeing_smem,
                entering_smem, p_o, s_o, acc_S, decay, i, row, row + (STAGES - 1) * stride, CHUNK, chunks, i_box,
                i_h_qk, i_h_v, i_h, column, CHUNK, D, BLOCK_E, STAGES, L_S, L_O, MASKED=False,
            )  # fmt: skip
            if p_positions is not None:
                if row + CHUNK == stop:
                    store_snapshots(
                        p_positions, p_snapshot_slots, p_cu, i_n, num_sequences, rows, num_snapshots, stop, p_final,
                        num_slots, i_h, o_d, o_e, s_final, acc_S, CHUNK,
                    )  # fmt: skip
                    stop = next_snapshot(p_positions, p_cu, i_n, num_sequences, rows, num_snapshots, stop + 1, CHUNK)
        if not REVERSED:
            if rest > 0:
                rate = base_two_rate(p_slopes, i_h)
                tl.debug_barrier()
                seeing_smem.store(seeing(rate, opaque(o_i), rest, scale, REVERSED))
                entering_smem.store(entering(rate, opaque(o_k), rest, scale, REVERSED))
                acc_S = step(
                    d_q, d_k, d_v, d_o, q_smem, k_smem, v_smem, o_smem, scores_smem, arrived, within_smem, seeing_smem,
                    entering_smem, p_o, s_o, acc_S, gl.exp2(-rate * rest), chunks - 1,
                    start + (chunks - 1) * stride, 0, rest, chunks, i_box, i_h_qk, i_h_v, i_h, column,
                    CHUNK, D, BLOCK_E, STAGES, L_S, L_O, MASKED=True,
                )  # fmt: skip
        tma.store_wait(0)
        if p_final is not None:
            # Read again: through the walk its registers serve better.
            first_again, last = bounds(p_cu, i_n, num_sequences, rows)
            is_last = end == last
            if REVERSED:
                is_last = begin == first_again
            if is_last:
                slot = slot_of(p_slots, i_n, num_sequences, num_slots)
                store_state(p_final, slot, i_h, o_d, o_e, s_final, acc_S)
