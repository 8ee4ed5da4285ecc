"""Prefill in chunks for NVIDIA's sm_90, in float32: ``chunked.prefill`` with WGMMAs of bfloat16 parts.

A float32 is the sum of three bfloat16 parts of 8 bits each, and a product the sum of six of theirs: what is left out is
below float32's rounding. Parts lie in shared memory, where WGMMAs read them; a chunk's q, k and v come through
registers, loaded one chunk ahead. Two warpgroups a program, each with half of the columns of every product:

    scores = k q^T    with    seen = S^T q^T    in flight together
    o^T = seen + v^T scores
    S^T' = decayed S^T + (v entering)^T k,    while the next chunk is loaded

Tensor cores cut off what they add to an accumulator, toward zero: every sum starts from zero, with its smallest terms,
and has at most 64 columns; sums of these, and with what was there before, are made in registers.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from lightning_attn.kernels.decay import base_two_rate, decay_over, decayed, entering, rest_of_rate, seeing
from lightning_attn.kernels.hopper_rows import load_tile, opaque, single_token, store_snapshots, store_state
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    Snapshots,
    States,
    bounds,
    carried_slot,
    has_initial,
    locate,
    locate_state,
    next_snapshot,
    program,
    rows_of_head,
    segment_rows,
    slot_of,
)

# Columns of a sum: those that a tile has between two steps of its swizzle, which is where it can be cut.
STRIP = gl.constexpr(64)


class Parts(NamedTuple):
    """Shared memory: bfloat16 parts, [3, rows, columns], of a chunk's q, k and v, of the state, and of the scores.

    The scores' room is the weighted values' too.
    """

    q: Any
    k: Any
    v: Any
    S: Any
    scores: Any


class ChunkRows(NamedTuple):
    """A chunk of q, k and v in registers, in float32."""

    q: Any
    k: Any
    v: Any


@gluon.constexpr_function
def product_layout(columns):
    """Registers of a product [64, columns], an accumulator over two warpgroups."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@gluon.constexpr_function
def rows_layout(columns):
    """Rows x columns of float32 over eight warps, 16 bytes a thread."""
    return gl.BlockedLayout([1, 4], [128 // columns, columns // 4], [8, 1], [1, 0])


@gluon.jit
def load_rows(rows, row, length, column, WIDTH: gl.constexpr, BLOCK: gl.constexpr, sizes: gl.constexpr):
    """Rows from ``row`` on x BLOCK columns, 0 past ``length`` rows and ``WIDTH`` columns."""
    CHUNK: gl.constexpr = sizes.CHUNK
    layout: gl.constexpr = rows_layout(BLOCK)
    # Addresses are made anew for each chunk: in registers from chunk to chunk they would displace others.
    o_row = opaque(gl.arange(0, CHUNK, gl.SliceLayout(1, layout)))
    o_column = column + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    m = o_row[:, None] < length
    if WIDTH % BLOCK:
        m = m & (o_column[None, :] < WIDTH)
    if sizes.WIDE:
        o_row = o_row.to(gl.int64)
        o_column = o_column.to(gl.int64)
    p_tile = rows.p + row.to(gl.int64) * rows.stride
    return gl.load(p_tile + o_row[:, None] * rows.stride + o_column[None, :] * rows.element, mask=m, other=0.0)


@gluon.jit
def load_chunk(q, k, v, row, length, column, sizes: gl.constexpr):
    """The chunk of ``length`` rows, or the first of so many, that begins at ``row``; zeros where there are none."""
    return ChunkRows(
        load_rows(q, row, length, 0, sizes.D, sizes.BLOCK_D, sizes),
        load_rows(k, row, length, 0, sizes.D, sizes.BLOCK_D, sizes),
        load_rows(v, row, length, column, sizes.E, sizes.BLOCK_E, sizes),
    )


@gluon.jit
def parts_of(values):
    """Three bfloat16 numbers whose sum is each float32.

    In PTX, two at a time: ptxas converts numbers that are read again one by one, far slower than in pairs. What is not
    finite, or not in bfloat16, leaves a NaN among its parts.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 even, odd;
        cvt.rn.bf16x2.f32 $0, $4, $3;
        shl.b32 even, $0, 16;
        and.b32 odd, $0, 0xffff0000;
        sub.f32 even, $3, even;
        sub.f32 odd, $4, odd;
        cvt.rn.bf16x2.f32 $1, odd, even;
        shl.b32 $2, $1, 16;
        sub.f32 even, even, $2;
        and.b32 $2, $1, 0xffff0000;
        sub.f32 odd, odd, $2;
        cvt.rn.bf16x2.f32 $2, odd, even;
        }""",
        "=&r,=&r,=&r,r,r",
        [values],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def store_parts(parts, values):
    first, second, third = parts_of(values)
    parts.index(0).store(first)
    parts.index(1).store(second)
    parts.index(2).store(third)


@gluon.jit
def issue_one(a_tile, b_tile, acc, TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, FIRST: gl.constexpr):
    if FIRST is not None:
        a_tile = a_tile.slice(FIRST, STRIP, dim=1)
        b_tile = b_tile.slice(FIRST, STRIP, dim=1)
    if TRANSPOSED_A:
        a_tile = a_tile.permute((1, 0))
    if TRANSPOSED_B:
        b_tile = b_tile.permute((1, 0))
    return warpgroup_mma(a_tile, b_tile, acc, is_async=True)


@gluon.jit
def issue_product(a, b, acc, TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr, FIRST: gl.constexpr = None):
    """Issue the six WGMMAs of a product of parts, the smallest first: of all columns, or of a strip from FIRST on."""
    acc = issue_one(a.index(2), b.index(0), acc, TRANSPOSED_A, TRANSPOSED_B, FIRST)
    acc = issue_one(a.index(0), b.index(2), acc, TRANSPOSED_A, TRANSPOSED_B, FIRST)
    acc = issue_one(a.index(1), b.index(1), acc, TRANSPOSED_A, TRANSPOSED_B, FIRST)
    acc = issue_one(a.index(1), b.index(0), acc, TRANSPOSED_A, TRANSPOSED_B, FIRST)
    acc = issue_one(a.index(0), b.index(1), acc, TRANSPOSED_A, TRANSPOSED_B, FIRST)
    return issue_one(a.index(0), b.index(0), acc, TRANSPOSED_A, TRANSPOSED_B, FIRST)


@gluon.jit
def issue_strips(a, b, b_zero, COLUMNS: gl.constexpr):
    """Issue a b^T, a sum for each strip of columns."""
    sums = ()
    for i in gl.static_range(COLUMNS // STRIP):
        sums = sums + (issue_product(a, b, b_zero, False, True, i * STRIP),)
    return sums


@gluon.jit
def total(sums, COUNT: gl.constexpr):
    """Of the first so many."""
    b_sum = sums[0]
    for i in gl.static_range(1, COUNT):
        b_sum = b_sum + sums[i]
    return b_sum


@gluon.jit
def step(parts, now, following, o, acc_S, within, rates, scale, row, length, column, sizes: gl.constexpr):
    """One chunk: store its outputs, return the state after it and the next chunk.

    following: q, k, v, and of the next chunk the first row and how many there are from it on.
    """
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    L_O: gl.constexpr = product_layout(CHUNK)
    L_S: gl.constexpr = product_layout(BLOCK_D)
    rate, rest = rates
    store_parts(parts.q, opaque(now.q))
    store_parts(parts.k, opaque(now.k))
    store_parts(parts.v, now.v)
    store_parts(parts.S, opaque(acc_S))
    fence_async_shared()
    tl.debug_barrier()
    b_zero = gl.zeros([CHUNK, CHUNK], gl.float32, L_O)
    STRIPS: gl.constexpr = BLOCK_D // STRIP
    scores = issue_strips(parts.k, parts.q, b_zero, BLOCK_D)  # [keys, queries]
    seen = issue_strips(parts.S, parts.q, b_zero, BLOCK_D)  # [BLOCK_E, queries]
    waited = warpgroup_mma_wait(6 * STRIPS, deps=scores)
    b_scores = total(waited, STRIPS) if STRIPS > 1 else waited
    store_parts(parts.scores, b_scores * within.load(L_O))
    fence_async_shared()
    tl.debug_barrier()
    out = issue_product(parts.v, parts.scores, b_zero, True, False)
    waited = warpgroup_mma_wait(0, deps=seen + (out,))
    b_seen, b_o = total(waited, STRIPS), waited[STRIPS]
    o_i = opaque(gl.arange(0, CHUNK, gl.SliceLayout(0, L_O)))
    b_o = b_o + b_seen * seeing(rate, o_i, length, scale, sizes.REVERSED, rest)[None, :]  # [BLOCK_E, queries]
    o_e = column + opaque(gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_O)))
    p_tile = o.p + row.to(gl.int64) * o.stride
    p_tile = p_tile + o_i[None, :].to(gl.int64) * o.stride + o_e[:, None].to(gl.int64) * o.element
    gl.store(p_tile, b_o, mask=(o_i[None, :] < length) & (o_e[:, None] < sizes.E))
    # Only now are there registers for it.
    q, k, v, next_row, next_length = following
    ahead = load_chunk(q, k, v, next_row, next_length, column, sizes)
    # Past this barrier no warp reads the scores any more.
    tl.debug_barrier()
    o_row = opaque(gl.arange(0, CHUNK, gl.SliceLayout(1, rows_layout(BLOCK_E))))
    store_parts(parts.scores, now.v * entering(rate, o_row, length, scale, sizes.REVERSED, rest)[:, None])
    fence_async_shared()
    tl.debug_barrier()
    update = issue_product(parts.scores, parts.k, gl.zeros([BLOCK_E, BLOCK_D], gl.float32, L_S), True, False)
    acc_S = decayed(acc_S, rate, length, rest) + warpgroup_mma_wait(0, deps=[update])
    # Nor the chunk's parts.
    tl.debug_barrier()
    return acc_S, ahead


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
    """``chunked.prefill``, with its arguments."""
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    SEGMENT: gl.constexpr = sizes.SEGMENT
    REVERSED: gl.constexpr = sizes.REVERSED
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    snapshots = Snapshots(p_positions, p_snapshot_slots, num_snapshots)
    initial, final, carried = (
        States(p_initial, strides.initial),
        States(p_final, strides.final),
        States(p_carried, strides.carried),
    )
    i_e, i_h, i_w = program(sizes.H, (sizes.E + BLOCK_E - 1) // BLOCK_E, SEGMENT > 0)
    i_h = i_h.to(gl.int64)
    i_n, i_segment, first, last = locate(batch, i_w, SEGMENT)
    i_n = i_n.to(gl.int64)
    q = rows_of_head(p_q, strides.q, i_n, i_h, sizes.RATIO_QK)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    o = rows_of_head(p_o, strides.o, i_n, i_h, 1)
    # A sequence's rows are counted in 32 bits.
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    begin, end = segment_rows(first, last, i_segment, SEGMENT)
    length = last - first
    slot = slot_of(batch, i_n)
    column = i_e * BLOCK_E
    TAKES_TOKENS: gl.constexpr = p_cu is not None and p_positions is None and p_final is not None
    if TAKES_TOKENS and not REVERSED:
        if (length == 1) & (slot >= 0):
            has = has_initial(batch, i_n)
            single_token((q, k, v, o), begin, column, p_slopes, initial, final, has, slot, i_h, scale, sizes)
            # No chunk is left.
            end = begin
    if slot < 0:
        store_zeros(o, begin, end, column, sizes)
        if p_cu is not None:
            if (i_n == num_sequences) & (i_segment == 0):
                # Rows before the first sequence.
                before, _ = bounds(batch, 0)
                store_zeros(o, 0, before.to(gl.int32), column, sizes)
    elif begin < end:
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        q_parts = gl.allocate_shared_memory(gl.bfloat16, [3, CHUNK, BLOCK_D], layout)
        k_parts = gl.allocate_shared_memory(gl.bfloat16, [3, CHUNK, BLOCK_D], layout)
        v_parts = gl.allocate_shared_memory(gl.bfloat16, [3, CHUNK, BLOCK_E], layout)
        S_parts = gl.allocate_shared_memory(gl.bfloat16, [3, BLOCK_E, BLOCK_D], layout)
        scores_parts = gl.allocate_shared_memory(gl.bfloat16, [3, CHUNK, CHUNK], layout)
        parts = Parts(q_parts, k_parts, v_parts, S_parts, scores_parts)
        chunks = (end - begin + CHUNK - 1) // CHUNK
        # Chunk i begins at start + i * stride. The short one is the sequence's last, in either direction.
        stride: gl.constexpr = -CHUNK if REVERSED else CHUNK
        start = begin
        if REVERSED:
            start += (chunks - 1) * CHUNK
        now = load_chunk(q, k, v, start, end - start, column, sizes)

        L_S: gl.constexpr = product_layout(BLOCK_D)
        L_O: gl.constexpr = product_layout(CHUNK)
        o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_S))
        acc_S = gl.zeros([BLOCK_E, BLOCK_D], gl.float32, L_S)
        is_carried = False
        if SEGMENT:
            is_carried = length > SEGMENT
            if is_carried:
                i_state = carried_slot(batch, i_n, first, SEGMENT) + i_segment
                acc_S = load_tile(carried, i_state.to(gl.int64), i_h, o_d, o_e, sizes)
        if p_initial is not None:
            if has_initial(batch, i_n) and not is_carried:
                acc_S = load_tile(initial, slot, i_h, o_d, o_e, sizes)
        rate = base_two_rate(p_slopes, i_h)
        rates = (rate, rest_of_rate(p_slopes, i_h, rate))
        o_i = gl.arange(0, CHUNK, gl.SliceLayout(0, L_O))
        o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, L_O))
        distance = o_i[None, :] - o_j[:, None]
        if REVERSED:
            distance = -distance
        b_within = gl.where(distance >= 0, decay_over(rate, rates[1], gl.maximum(distance, 0)) * scale, 0.0)
        # In shared memory, for want of registers; swizzled so that a warp's eight rows have no bank conflicts.
        within = gl.allocate_shared_memory(
            gl.float32, [CHUNK, CHUNK], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]), b_within
        )  # fmt: skip
        if p_positions is not None:
            # A segment stores the states at its chunks' ends; the state before the first one is the sequence's own.
            stop = next_snapshot(snapshots, batch, i_n, begin, CHUNK)
            if stop == begin:
                if begin == first:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, o_d, o_e, (acc_S,), sizes)
                stop = next_snapshot(snapshots, batch, i_n, stop + 1, CHUNK)
        for i in range(chunks):
            row = start + i * stride
            next_length = gl.where(i + 1 < chunks, end - row - stride, 0)
            following = (q, k, v, row + stride, next_length)
            of_chunk = gl.minimum(end - row, CHUNK)
            acc_S, now = step(
                parts, now, following, o, acc_S, within, rates, scale, row, of_chunk, column, sizes
            )  # fmt: skip
            if p_positions is not None:
                if row + CHUNK == stop:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, o_d, o_e, (acc_S,), sizes)
                    stop = next_snapshot(snapshots, batch, i_n, stop + 1, CHUNK)
        if p_final is not None:
            is_last = end == last
            if REVERSED:
                is_last = begin == first
            if is_last:
                store_state(final, slot, i_h, o_d, o_e, (acc_S,), sizes)


@gluon.jit
def own_step(k_parts, v_parts, k, v, now, following, acc_S, rates, scale, length, column, sizes: gl.constexpr):
    """The state after one chunk, without its outputs, and the next chunk. now: of k and v; following: see ``step``."""
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    CHUNK: gl.constexpr = sizes.CHUNK
    rate, rest = rates
    b_k, b_v = now
    o_row = opaque(gl.arange(0, CHUNK, gl.SliceLayout(1, rows_layout(BLOCK_E))))
    store_parts(k_parts, b_k)
    store_parts(v_parts, b_v * entering(rate, o_row, length, scale, sizes.REVERSED, rest)[:, None])
    fence_async_shared()
    tl.debug_barrier()
    b_zero = gl.zeros([BLOCK_E, BLOCK_D], gl.float32, product_layout(BLOCK_D))
    update = issue_product(v_parts, k_parts, b_zero, True, False)
    next_row, next_length = following
    b_next_k = load_rows(k, next_row, next_length, 0, sizes.D, BLOCK_D, sizes)
    b_next_v = load_rows(v, next_row, next_length, column, sizes.E, BLOCK_E, sizes)
    acc_S = decayed(acc_S, rate, length, rest) + warpgroup_mma_wait(0, deps=[update])
    # Past this barrier no warp reads the parts any more.
    tl.debug_barrier()
    return acc_S, b_next_k, b_next_v


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
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        k_parts = gl.allocate_shared_memory(gl.bfloat16, [3, CHUNK, BLOCK_D], layout)
        v_parts = gl.allocate_shared_memory(gl.bfloat16, [3, CHUNK, BLOCK_E], layout)
        rate = base_two_rate(p_slopes, i_h)
        rates = (rate, rest_of_rate(p_slopes, i_h, rate))
        chunks = (end - begin + CHUNK - 1) // CHUNK
        stride: gl.constexpr = -CHUNK if REVERSED else CHUNK
        start = begin
        if REVERSED:
            start += (chunks - 1) * CHUNK
        L_S: gl.constexpr = product_layout(BLOCK_D)
        column = i_e * BLOCK_E
        o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_S))
        acc_S = gl.zeros([BLOCK_E, BLOCK_D], gl.float32, L_S)
        b_k = load_rows(k, start, end - start, 0, sizes.D, BLOCK_D, sizes)
        b_v = load_rows(v, start, end - start, column, sizes.E, BLOCK_E, sizes)
        for i in range(chunks):
            row = start + i * stride
            following = (row + stride, gl.where(i + 1 < chunks, end - row - stride, 0))
            of_chunk = gl.minimum(end - row, CHUNK)
            acc_S, b_k, b_v = own_step(
                k_parts, v_parts, k, v, (b_k, b_v), following, acc_S, rates, scale, of_chunk, column, sizes
            )  # fmt: skip
        i_state = carried_slot(batch, i_n, first, SEGMENT) + next_segment
        store_state(carried, i_state.to(gl.int64), i_h, o_d, o_e, (acc_S,), sizes)
