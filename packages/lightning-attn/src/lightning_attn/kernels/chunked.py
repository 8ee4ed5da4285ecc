"""Prefill in chunks, on every target. The chunked form is Lightning Attention-2's (arXiv 2401.04658).

With i and j the 0-based positions in a chunk of L tokens and a = exp(-s), query i sees key j <= i with weight a^(i-j)
and the state before the chunk with a^(i+1); key j enters the new state with a^(L-1-j) and the old state with a^L. No
exponent is above 0. The gradients are the same kernel over other tensors, for dk and dv from the last token to the
first (REVERSED): query i then sees keys j >= i with weight a^(j-i) and the state with a^(L-1-i), and key j enters with
a^(j+1), so that the two vectors of weights swap.

The state is held transposed, [E, D], as are scores, [keys, queries], and outputs, [E, queries]: the state is then the
operand that a tensor core takes from registers, and only the scores go through shared memory.

Products of float32 are float32's own (PRECISION: six of bfloat16 parts, or FMAs). In float16 a state or a score may be
past the range of its dtype where no output is: a state's row and a query's scores are scaled by powers of two on the
way into a product, and their results back. Backwards a key enters with the scale, which may leave nothing of a value:
the state is then held in units of a power of two near it. A value's decayed product loses less than its own spacing.
"""

import triton
import triton.language as tl

from lightning_attn.kernels.decay import (
    base_two_rate,
    decayed,
    entering,
    into_float16,
    kept_and_lost,
    rest_of_rate,
    seeing,
    unit_of,
)
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    Snapshots,
    States,
    bounds,
    carried_slot,
    chunks_in_reach,
    has_initial,
    locate,
    locate_state,
    next_snapshot,
    program,
    rows_of_head,
    segment_rows,
    slot_of,
    snapshot_slot,
    state_pointers,
)


@triton.jit
def offsets(o_tile, stride, WIDE: tl.constexpr):
    """Where a tile's rows or columns begin, in 64 bits only if a tile needs them: they take twice the registers."""
    if WIDE:
        o_tile = o_tile.to(tl.int64)
    return o_tile * stride


@triton.jit
def load_tile(rows, row, o_row, o_column, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Rows from ``row`` on x columns, 0 past ``length`` rows and ``WIDTH`` columns. No mask of columns without need."""
    p_first = rows.p + row * rows.stride
    m = o_row[:, None] < length
    if WIDTH % BLOCK:
        m = m & (o_column[None, :] < WIDTH)
    p_tile = p_first + offsets(o_row, rows.stride, WIDE)[:, None] + offsets(o_column, rows.element, WIDE)[None, :]
    return tl.load(p_tile, mask=m, other=0.0)


@triton.jit
def rows_into_float16(S):
    """Powers of two that bring each row of a state's pieces into float16's range, and their inverses: [BLOCK_E]."""
    largest = tl.max(tl.abs(S[0]), axis=1)
    for i in tl.static_range(1, len(S)):
        largest = tl.maximum(largest, tl.max(tl.abs(S[i]), axis=1))
    return into_float16(largest)


@triton.jit
def in_units(S, factor):
    """All pieces of a state times a factor."""
    scaled = ()
    for i in tl.static_range(len(S)):
        scaled = scaled + (S[i] * factor,)
    return scaled


@triton.jit
def step(q, k, v, o, S, b_within, rates, scale, row, end, i_e, sizes: tl.constexpr):
    """The chunk that begins at ``row``: outputs are stored, the state after it is returned. q None: no outputs.

    rates: the decay rate, and what rounding has lost of it.
    """
    rate, rest = rates
    CHUNK: tl.constexpr = sizes.CHUNK
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    BLOCK_E: tl.constexpr = sizes.BLOCK_E
    PRECISION: tl.constexpr = sizes.PRECISION
    length = tl.minimum(end - row, CHUNK).to(tl.int32)
    o_c = tl.arange(0, CHUNK)
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    FP16: tl.constexpr = v.p.dtype.element_ty == tl.float16
    b_seeing = seeing(rate, o_c, length, scale, sizes.REVERSED)
    if FP16 and sizes.REVERSED:
        unit = unit_of(scale)
        b_seeing = b_seeing * unit
        b_entering = entering(rate, o_c, length, scale / unit, sizes.REVERSED)
    else:
        b_entering = entering(rate, o_c, length, scale, sizes.REVERSED)
    if FP16 and q is not None:
        b_up, b_down = rows_into_float16(S)
    b_v = load_tile(v, row, o_c, o_e, length, sizes.E, BLOCK_E, sizes.WIDE)  # [CHUNK, BLOCK_E]
    b_weighted_v = tl.trans((b_v * b_entering[:, None]).to(b_v.dtype))
    b_seen = tl.zeros([BLOCK_E, CHUNK], tl.float32)
    b_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    next_S = ()
    for i in tl.static_range((sizes.D + BLOCK_D - 1) // BLOCK_D):
        o_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        b_k = load_tile(k, row, o_c, o_d, length, sizes.D, BLOCK_D, sizes.WIDE)  # [CHUNK, BLOCK_D]
        if q is not None:
            b_q = load_tile(q, row, o_c, o_d, length, sizes.D, BLOCK_D, sizes.WIDE)  # [CHUNK, BLOCK_D]
            b_S = S[i]
            if FP16:
                b_S = b_S * b_up[:, None]
            b_seen = tl.dot(b_S.to(b_q.dtype), tl.trans(b_q), b_seen, PRECISION)  # [BLOCK_E, queries]
            b_scores = tl.dot(b_k, tl.trans(b_q), b_scores, PRECISION)  # [keys, queries]
        b_decayed = decayed(S[i], rate, length, rest)
        if PRECISION is None:
            next_S = next_S + (tl.dot(b_weighted_v, b_k, b_decayed),)
        else:
            # Tensor cores cut off what they add to an accumulator, chunk after chunk in one direction.
            next_S = next_S + (tl.dot(b_weighted_v, b_k, None, PRECISION) + b_decayed,)
    if q is not None:
        b_scores = b_scores * b_within
        if FP16:
            b_up_scores, b_down_scores = into_float16(tl.max(tl.abs(b_scores), axis=0))
            b_scores = b_scores * b_up_scores[None, :]
            b_seeing = b_seeing * b_up_scores
            b_seen = b_seen * b_down[:, None]
        b_o = tl.dot(tl.trans(b_v), b_scores.to(b_v.dtype), b_seen * b_seeing[None, :], PRECISION)
        if FP16:
            b_o = b_o * b_down_scores[None, :]
        b_o = tl.trans(b_o)
        p_tile = o.p + row * o.stride + offsets(o_c, o.stride, sizes.WIDE)[:, None]
        p_tile += offsets(o_e, o.element, sizes.WIDE)[None, :]
        m = (o_c[:, None] < length) & (o_e[None, :] < sizes.E)
        tl.store(p_tile, b_o.to(o.p.dtype.element_ty), mask=m)
    return next_S


@triton.jit
def single_token(rows, row, S, rate, scale, final, slot, i_h, i_e, sizes: tl.constexpr):
    """``step`` for a sequence of one token, in float32: it is bound by its state, for which no chunk is waited for.

    rows: q, k, v and o of its heads. The state is stored.
    """
    q, k, v, o = rows
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    BLOCK_E: tl.constexpr = sizes.BLOCK_E
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    m_e = o_e < sizes.E
    b_v = tl.load(v.p + row * v.stride + o_e.to(tl.int64) * v.element, mask=m_e, other=0.0).to(tl.float32)
    kept, lost = kept_and_lost(rate, 1)
    b_o = tl.zeros([BLOCK_E], tl.float32)
    for i in tl.static_range((sizes.D + BLOCK_D - 1) // BLOCK_D):
        o_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        m_d = o_d < sizes.D
        b_k = tl.load(k.p + row * k.stride + o_d.to(tl.int64) * k.element, mask=m_d, other=0.0).to(tl.float32)
        b_q = tl.load(q.p + row * q.stride + o_d.to(tl.int64) * q.element, mask=m_d, other=0.0).to(tl.float32)
        b_S = tl.fma(S[i], kept, tl.fma(S[i], lost, b_v[:, None] * b_k[None, :]))
        b_o += tl.sum(b_S * b_q[None, :], axis=1)
        store_piece(final, slot, i_h, i, i_e, b_S, sizes)
    p_row = o.p + row * o.stride + o_e.to(tl.int64) * o.element
    tl.store(p_row, (b_o * scale).to(o.p.dtype.element_ty), mask=m_e)


@triton.jit
def zero_state(sizes: tl.constexpr):
    """A state's tile [BLOCK_E, D] as pieces [BLOCK_E, BLOCK_D]: an operand that wide would not fit in registers."""
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    BLOCK_E: tl.constexpr = sizes.BLOCK_E
    S = ()
    for i in tl.static_range((sizes.D + BLOCK_D - 1) // BLOCK_D):  # noqa: B007 (Triton takes no _)
        S = S + (tl.zeros([BLOCK_E, BLOCK_D], tl.float32),)
    return S


@triton.jit
def load_piece(states, slot, i_h, i, i_e, sizes: tl.constexpr):
    """Piece i of tile i_e of a state, [BLOCK_E, BLOCK_D] in float32, 0 outside the state."""
    o_d = i * sizes.BLOCK_D + tl.arange(0, sizes.BLOCK_D)
    o_e = i_e * sizes.BLOCK_E + tl.arange(0, sizes.BLOCK_E)
    p_piece = state_pointers(states, slot, i_h, o_d, o_e)
    if sizes.D % sizes.BLOCK_D or sizes.E % sizes.BLOCK_E:
        b_piece = tl.load(p_piece, mask=(o_d[None, :] < sizes.D) & (o_e[:, None] < sizes.E), other=0.0)
    else:
        b_piece = tl.load(p_piece)
    return b_piece.to(tl.float32)


@triton.jit
def store_piece(states, slot, i_h, i, i_e, b_piece, sizes: tl.constexpr):
    """The reverse of load_piece."""
    o_d = i * sizes.BLOCK_D + tl.arange(0, sizes.BLOCK_D)
    o_e = i_e * sizes.BLOCK_E + tl.arange(0, sizes.BLOCK_E)
    p_piece = state_pointers(states, slot, i_h, o_d, o_e)
    b_piece = b_piece.to(states.p.dtype.element_ty)
    if sizes.D % sizes.BLOCK_D or sizes.E % sizes.BLOCK_E:
        tl.store(p_piece, b_piece, mask=(o_d[None, :] < sizes.D) & (o_e[:, None] < sizes.E))
    else:
        tl.store(p_piece, b_piece)


@triton.jit
def load_state(states, slot, i_h, i_e, sizes: tl.constexpr):
    """All pieces of a state's tile."""
    S = ()
    for i in tl.static_range((sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D):
        S = S + (load_piece(states, slot, i_h, i, i_e, sizes),)
    return S


@triton.jit
def store_state(states, slot, i_h, i_e, S, sizes: tl.constexpr):
    """The reverse of load_state."""
    for i in tl.static_range((sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D):
        store_piece(states, slot, i_h, i, i_e, S[i], sizes)


@triton.jit
def store_zeros(o, begin, end, o_c, o_e, E: tl.constexpr, CHUNK: tl.constexpr):
    """Zero rows begin to end of one head's tile of columns."""
    for row in range(begin, end, CHUNK):
        o_row = row + o_c
        p_tile = o.p + o_row[:, None].to(tl.int64) * o.stride + o_e[None, :].to(tl.int64) * o.element
        b_zero = tl.zeros([CHUNK, o_e.shape[0]], o.p.dtype.element_ty)
        tl.store(p_tile, b_zero, mask=(o_row[:, None] < end) & (o_e[None, :] < E))


@triton.jit
def store_snapshots(snapshots, batch, states, i_n, at, i_h, i_e, S, sizes: tl.constexpr):
    """Store the state at this row for every snapshot that wants it."""
    for i_p in range(snapshots.count):
        slot = snapshot_slot(snapshots, batch, i_n, i_p, at, sizes.CHUNK)
        if slot >= 0:
            store_state(states, slot, i_h, i_e, S, sizes)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def prefill(
    p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_carried, p_positions, p_snapshot_slots,
    rows, num_sequences, num_slots, num_snapshots, scale, strides, sizes: tl.constexpr,
):  # fmt: skip
    """One sequence, or one segment of it, for one head and BLOCK_E columns of its state.

    p_initial and p_final None: from a zero state, and the last is dropped. SEGMENT > 0: segments of that many rows,
    in parallel, start from the states in p_carried.
    """
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    snapshots = Snapshots(p_positions, p_snapshot_slots, num_snapshots)
    initial, final, carried = (
        States(p_initial, strides.initial),
        States(p_final, strides.final),
        States(p_carried, strides.carried),
    )
    i_e, i_h, i_w = program(sizes.H, (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E, sizes.SEGMENT > 0)
    i_h = i_h.to(tl.int64)
    i_n, i_segment, first, last = locate(batch, i_w, sizes.SEGMENT)
    begin, end = segment_rows(first, last, i_segment, sizes.SEGMENT)
    length = last - first
    o_c = tl.arange(0, sizes.CHUNK)
    o_e = i_e * sizes.BLOCK_E + tl.arange(0, sizes.BLOCK_E)
    slot = slot_of(batch, i_n)
    q = rows_of_head(p_q, strides.q, i_n, i_h, sizes.RATIO_QK)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    o = rows_of_head(p_o, strides.o, i_n, i_h, 1)
    if slot < 0:
        store_zeros(o, begin, end, o_c, o_e, sizes.E, sizes.CHUNK)
        if p_cu is not None:
            if (i_n == batch.count.sequences) & (i_segment == 0):
                # Rows before the first sequence.
                before, _ = bounds(batch, 0)
                store_zeros(o, 0, before, o_c, o_e, sizes.E, sizes.CHUNK)
    elif begin < end:
        IN_UNITS: tl.constexpr = sizes.REVERSED and p_v.dtype.element_ty == tl.float16
        S = zero_state(sizes)
        is_carried = False
        if sizes.SEGMENT:
            is_carried = length > sizes.SEGMENT
            if is_carried:
                S = load_state(carried, carried_slot(batch, i_n, first, sizes.SEGMENT) + i_segment, i_h, i_e, sizes)
        if p_initial is not None:
            if has_initial(batch, i_n) and not is_carried:
                S = load_state(initial, slot, i_h, i_e, sizes)
        if IN_UNITS:
            S = in_units(S, 1.0 / unit_of(scale))

        rate = base_two_rate(p_slopes, i_h)
        rates = (rate, rest_of_rate(p_slopes, i_h, rate))
        # [keys, queries]
        distance = o_c[None, :] - o_c[:, None]
        if sizes.REVERSED:
            distance = -distance
        b_within = tl.where(distance >= 0, tl.exp2(-rate * tl.maximum(distance, 0).to(tl.float32)) * scale, 0.0)
        if p_positions is not None:
            # A segment stores the states at its chunks' ends; the state before the first one is the sequence's own.
            stop = next_snapshot(snapshots, batch, i_n, begin, sizes.CHUNK)
            if stop == begin:
                if begin == first:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, i_e, S, sizes)
                stop = next_snapshot(snapshots, batch, i_n, stop + 1, sizes.CHUNK)
        TAKES_TOKENS: tl.constexpr = p_cu is not None and p_positions is None and p_final is not None
        if TAKES_TOKENS and not sizes.REVERSED:
            if length == 1:
                single_token((q, k, v, o), begin, S, rate, scale, final, slot, i_h, i_e, sizes)
                # No chunk is left, nor a state to store.
                end = begin
        last_row = begin + (end - begin - 1) // sizes.CHUNK * sizes.CHUNK
        for c in tl.range(begin, end, sizes.CHUNK, num_stages=sizes.STAGES):
            row = c
            if sizes.REVERSED:
                row = begin + last_row - c
            S = step(q, k, v, o, S, b_within, rates, scale, row, end, i_e, sizes)
            if p_positions is not None:
                if row + sizes.CHUNK == stop:
                    store_snapshots(snapshots, batch, final, i_n, stop, i_h, i_e, S, sizes)
                    stop = next_snapshot(snapshots, batch, i_n, stop + 1, sizes.CHUNK)
        if p_final is not None:
            is_last = end - first == length
            if sizes.REVERSED:
                is_last = begin == first
            if is_last:
                if IN_UNITS:
                    S = in_units(S, unit_of(scale))
                store_state(final, slot, i_h, i_e, S, sizes)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def segment_states(
    p_k, p_v, p_slopes, p_cu, p_slots, p_carried, rows, num_sequences, num_slots, scale, strides, sizes: tl.constexpr
):
    """The state that each segment would leave behind had it started from zero, stored in the slot of the next one."""
    batch = Batch(p_cu, p_slots, None, Counts(rows, num_sequences, num_slots))
    carried = States(p_carried, strides.carried)
    s_k, s_v = strides.k, strides.v
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    i_e, i_h, i_w = program(sizes.H, (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E)
    i_h = i_h.to(tl.int64)
    i_n, i_segment, first, last = locate_state(batch, i_w, sizes.SEGMENT, sizes.REVERSED)
    begin, end = segment_rows(first, last, i_segment, sizes.SEGMENT)
    slot = slot_of(batch, i_n)
    has_next = end < last
    next_segment = i_segment + 1
    if sizes.REVERSED:
        has_next = begin > first
        next_segment = i_segment - 1
    if (slot >= 0) & (begin < end) & has_next:
        k = rows_of_head(p_k, s_k, i_n, i_h, sizes.RATIO_QK)
        v = rows_of_head(p_v, s_v, i_n, i_h, sizes.RATIO_V)
        rate = base_two_rate(p_slopes, i_h)
        tokens = chunks_in_reach(rate, sizes) * sizes.CHUNK
        if sizes.REVERSED:
            end = tl.minimum(end, begin + tokens)
        else:
            begin = tl.maximum(begin, end - tokens)
        rates = (rate, rest_of_rate(p_slopes, i_h, rate))
        S = zero_state(sizes)
        last_row = begin + (end - begin - 1) // sizes.CHUNK * sizes.CHUNK
        for c in tl.range(begin, end, sizes.CHUNK, num_stages=sizes.STAGES):
            row = c
            if sizes.REVERSED:
                row = begin + last_row - c
            S = step(None, k, v, None, S, None, rates, scale, row, end, i_e, sizes)
        next_slot = carried_slot(batch, i_n, first, sizes.SEGMENT) + next_segment
        if sizes.REVERSED and p_v.dtype.element_ty == tl.float16:
            S = in_units(S, unit_of(scale))
        store_state(carried, next_slot, i_h, i_e, S, sizes)
