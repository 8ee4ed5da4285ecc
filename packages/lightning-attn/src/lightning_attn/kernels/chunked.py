"""Prefill in chunks, in bfloat16, on every target. The chunked form is Lightning Attention-2's (arXiv 2401.04658).

With i and j the 0-based places in a chunk of L tokens and a = exp(-s), query i sees key j <= i with weight a^(i-j) and
the state before the chunk with a^(i+1); key j enters the new state with a^(L-1-j) and the old state with a^L. No
exponent is above 0. The gradients are the same walk over other tensors, for dk and dv from the last token to the first
(REVERSED): query i then sees keys j >= i with a^(j-i) and the state with a^(L-1-i), and key j enters with a^(j+1), so
that the two vectors of weights change places.

The state is held transposed, [E, D], as are scores, [keys, queries], and outputs, [E, queries]: the state is then the
operand that a tensor core takes from registers, and only the scores pass through shared memory.
"""

import triton
import triton.language as tl

from lightning_attn.kernels.decay import base_two_rate, decayed, entering, seeing


@triton.jit
def program(H: tl.constexpr, TILES: tl.constexpr):
    """Tile, head and place in the grid. One dimension: of the others a grid has 65535 at most."""
    pid = tl.program_id(0)
    return pid % TILES, (pid // TILES) % H, pid // (TILES * H)


@triton.jit
def bounds(p_cu, i_n, num_sequences, rows):
    """The rows of a sequence, clamped; sequence ``num_sequences`` stands for the rows after the last one."""
    if p_cu is None:
        begin = i_n.to(tl.int64) * 0
        end = begin + rows
    else:
        begin = tl.minimum(tl.maximum(tl.load(p_cu + i_n).to(tl.int64), 0), rows)
        after = tl.load(p_cu + i_n + 1, mask=i_n < num_sequences, other=rows).to(tl.int64)
        end = tl.minimum(tl.maximum(after, begin), rows)
    return begin, end


@triton.jit
def first_segment(p_cu, i_n, rows, SEGMENT: tl.constexpr):
    """The grid place of a ragged sequence's first segment: no two sequences' segments meet, whatever their lengths."""
    return tl.minimum(tl.maximum(tl.load(p_cu + i_n).to(tl.int64), 0), rows) // SEGMENT + i_n


@triton.jit
def carried_place(p_cu, i_n, begin, rows, SEGMENT: tl.constexpr):
    """Where the states before a sequence's segments lie one after the other, if it has more than one segment.

    A sequence of n > SEGMENT rows has at most n // SEGMENT + 1 segments, which is what f + min(i, f) leaves room for,
    f being the whole segments of rows before sequence i.
    """
    if p_cu is None:
        place = i_n.to(tl.int64) * tl.cdiv(rows, SEGMENT)
    else:
        before = begin // SEGMENT
        place = before + tl.minimum(before, i_n)
    return place


@triton.jit
def locate(p_cu, i_w, num_sequences, rows, SEGMENT: tl.constexpr):
    """Sequence, segment and the sequence's rows of grid place i_w. Segments past the sequence's last have no rows."""
    if SEGMENT == 0:
        i_n = i_w
        i_segment = 0
    elif p_cu is None:
        i_n = i_w // tl.cdiv(rows, SEGMENT)
        i_segment = i_w % tl.cdiv(rows, SEGMENT)
    else:
        i_n = i_w * 0
        above = i_w * 0 + num_sequences + 1
        while above - i_n > 1:
            middle = (i_n + above) // 2
            if first_segment(p_cu, middle, rows, SEGMENT) <= i_w:
                i_n = middle
            else:
                above = middle
        i_segment = (i_w - first_segment(p_cu, i_n, rows, SEGMENT)).to(tl.int32)
    begin, end = bounds(p_cu, i_n, num_sequences, rows)
    # Places before the first sequence's are nobody's.
    end = tl.where(i_segment < 0, begin, end)
    return i_n, tl.maximum(i_segment, 0), begin, end


@triton.jit
def slot_of(p_slots, i_n, num_sequences, num_slots):
    """The sequence's slot in the pool, -1 for padding and for the rows of no sequence."""
    if p_slots is None:
        slot = i_n.to(tl.int64)
    else:
        slot = tl.load(p_slots + i_n, mask=i_n < num_sequences, other=-1).to(tl.int64)
        slot = tl.where((slot >= 0) & (slot < num_slots), slot, -1)
    return slot


@triton.jit
def has_initial(p_initial, p_has, i_n, num_sequences):
    """Whether the sequence starts from a state of the pool."""
    if p_initial is None:
        has = False
    elif p_has is None:
        has = True
    else:
        has = tl.load(p_has + i_n, mask=i_n < num_sequences, other=0) != 0
    return has


@triton.jit
def offsets(o_place, stride, WIDE: tl.constexpr):
    """Where a tile's rows or columns begin, in 64 bits only if a tile needs them: they take twice the registers."""
    if WIDE:
        o_place = o_place.to(tl.int64)
    return o_place * stride


@triton.jit
def load_tile(p, o_row, o_column, s_tensor, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Rows x columns of one head, 0 past ``length`` rows and ``WIDTH`` columns. A mask of columns only where needed."""
    m = o_row[:, None] < length
    if WIDTH % BLOCK:
        m = m & (o_column[None, :] < WIDTH)
    p_tile = p + offsets(o_row, s_tensor[1], WIDE)[:, None] + offsets(o_column, s_tensor[3], WIDE)[None, :]
    return tl.load(p_tile, mask=m, other=0.0)


@triton.jit
def step(
    p_q, p_k, p_v, p_o, S, b_within, rate, scale, row, end, i_e, s_q, s_k, s_v, s_o,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    REVERSED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The chunk that begins at ``row``: outputs are stored, the state after it is returned. p_q None: no outputs."""
    length = tl.minimum(end - row, CHUNK).to(tl.int32)
    o_c = tl.arange(0, CHUNK)
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    b_seeing = seeing(rate, o_c, length, scale, REVERSED)
    b_entering = entering(rate, o_c, length, scale, REVERSED)
    b_v = load_tile(p_v + row * s_v[1], o_c, o_e, s_v, length, E, BLOCK_E, WIDE)  # [CHUNK, BLOCK_E]
    b_weighted_v = tl.trans((b_v * b_entering[:, None]).to(b_v.dtype))
    b_seen = tl.zeros([BLOCK_E, CHUNK], tl.float32)
    b_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    next_S = ()
    for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
        o_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        b_k = load_tile(p_k + row * s_k[1], o_c, o_d, s_k, length, D, BLOCK_D, WIDE)  # [CHUNK, BLOCK_D]
        if p_q is not None:
            b_q = load_tile(p_q + row * s_q[1], o_c, o_d, s_q, length, D, BLOCK_D, WIDE)  # [CHUNK, BLOCK_D]
            b_seen = tl.dot(S[i].to(b_q.dtype), tl.trans(b_q), b_seen)  # [BLOCK_E, queries]
            b_scores = tl.dot(b_k, tl.trans(b_q), b_scores)  # [keys, queries]
        next_S = next_S + (tl.dot(b_weighted_v, b_k, decayed(S[i], rate, length)),)
    if p_q is not None:
        b_scores = (b_scores * b_within).to(b_v.dtype)
        b_o = tl.trans(tl.dot(tl.trans(b_v), b_scores, b_seen * b_seeing[None, :]))
        p_tile = p_o + row * s_o[1] + offsets(o_c, s_o[1], WIDE)[:, None] + offsets(o_e, s_o[3], WIDE)[None, :]
        m = (o_c[:, None] < length) & (o_e[None, :] < E)
        tl.store(p_tile, b_o.to(p_o.dtype.element_ty), mask=m)
    return next_S


@triton.jit
def zero_state(D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """A state's tile [BLOCK_E, D] as pieces [BLOCK_E, BLOCK_D]: an operand that wide would not fit in registers."""
    S = ()
    for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):  # noqa: B007 (Triton takes no _)
        S = S + (tl.zeros([BLOCK_E, BLOCK_D], tl.float32),)
    return S


@triton.jit
def state_pointers(p_state, slot, i_h, o_d, o_e, s_state):
    """A tile of a state, transposed: [e, d]."""
    p_tile = p_state + slot * s_state[0] + i_h * s_state[1]
    return p_tile + o_d.to(tl.int64)[None, :] * s_state[2] + o_e.to(tl.int64)[:, None] * s_state[3]


@triton.jit
def load_piece(p_state, slot, i_h, i, i_e, s_state, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Piece i of tile i_e of a state, [BLOCK_E, BLOCK_D] in float32, 0 outside the state."""
    o_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    p_piece = state_pointers(p_state, slot, i_h, o_d, o_e, s_state)
    if D % BLOCK_D or E % BLOCK_E:
        b_piece = tl.load(p_piece, mask=(o_d[None, :] < D) & (o_e[:, None] < E), other=0.0)
    else:
        b_piece = tl.load(p_piece)
    return b_piece.to(tl.float32)


@triton.jit
def store_piece(p_state, slot, i_h, i, i_e, s_state, b_piece, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The reverse of load_piece."""
    o_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    p_piece = state_pointers(p_state, slot, i_h, o_d, o_e, s_state)
    b_piece = b_piece.to(p_state.dtype.element_ty)
    if D % BLOCK_D or E % BLOCK_E:
        tl.store(p_piece, b_piece, mask=(o_d[None, :] < D) & (o_e[:, None] < E))
    else:
        tl.store(p_piece, b_piece)


@triton.jit
def load_state(p_state, slot, i_h, i_e, s_state, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """All pieces of a state's tile."""
    S = ()
    for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
        S = S + (load_piece(p_state, slot, i_h, i, i_e, s_state, D, E, BLOCK_D, BLOCK_E),)
    return S


@triton.jit
def store_state(p_state, slot, i_h, i_e, s_state, S, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The reverse of load_state."""
    for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
        store_piece(p_state, slot, i_h, i, i_e, s_state, S[i], D, E, BLOCK_D, BLOCK_E)


@triton.jit
def store_zeros(p_o, begin, end, o_c, o_e, s_o, E: tl.constexpr, CHUNK: tl.constexpr):
    """Zero rows begin to end of one head's tile of columns."""
    for row in range(begin, end, CHUNK):
        o_row = row + o_c
        p_tile = p_o + o_row[:, None].to(tl.int64) * s_o[1] + o_e[None, :].to(tl.int64) * s_o[3]
        b_zero = tl.zeros([CHUNK, o_e.shape[0]], p_o.dtype.element_ty)
        tl.store(p_tile, b_zero, mask=(o_row[:, None] < end) & (o_e[None, :] < E))


@triton.jit
def next_snapshot(p_positions, p_cu, i_n, num_sequences, rows, num_snapshots, at, CHUNK: tl.constexpr):
    """The first row >= ``at``, whole chunks from the sequence's start, at which a snapshot wants the state."""
    first, last = bounds(p_cu, i_n, num_sequences, rows)
    # Past every row that is ever reached.
    row = last + CHUNK
    for i_p in range(num_snapshots):
        position = tl.load(p_positions + i_n * num_snapshots + i_p).to(tl.int64)
        floor = first + position // CHUNK * CHUNK
        wanted = (position >= 1) & (position <= last - first) & (floor >= at)
        row = tl.where(wanted, tl.minimum(row, floor), row)
    return row.to(tl.int32)


@triton.jit
def snapshot_slot(
    p_positions, p_targets, p_cu, i_n, i_p, num_sequences, rows, num_snapshots, at, num_slots, CHUNK: tl.constexpr
):
    """The slot of snapshot i_p of a sequence if its position lies in the chunk that begins ``at`` this row, else -1.

    Of a position inside the chunk the rest is added by ``recurrent.finish_snapshots``.
    """
    first, last = bounds(p_cu, i_n, num_sequences, rows)
    position = tl.load(p_positions + i_n * num_snapshots + i_p).to(tl.int64)
    slot = tl.load(p_targets + i_n * num_snapshots + i_p).to(tl.int64)
    wanted = (position >= 1) & (position <= last - first) & (first + position // CHUNK * CHUNK == at)
    return tl.where(wanted & (slot < num_slots), slot, -1)


@triton.jit
def store_snapshots(
    p_positions, p_targets, p_cu, i_n, num_sequences, rows, num_snapshots, at, p_pool, num_slots, i_h, i_e, s_pool, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the state at this row for every snapshot that wants it."""
    for i_p in range(num_snapshots):
        slot = snapshot_slot(
            p_positions, p_targets, p_cu, i_n, i_p, num_sequences, rows, num_snapshots, at, num_slots, CHUNK
        )
        if slot >= 0:
            store_state(p_pool, slot, i_h, i_e, s_pool, S, D, E, BLOCK_D, BLOCK_E)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def walk(
    p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_carried, p_positions, p_snapshot_slots,
    rows, num_sequences, num_slots, num_snapshots, scale, s_q, s_k, s_v, s_o, s_initial, s_final, s_carried,
    H: tl.constexpr, RATIO_QK: tl.constexpr, RATIO_V: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
    REVERSED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Walk one sequence, or one segment of it, for one head and BLOCK_E columns of its state.

    Strides are (sequence, row, head, element) of q, k, v, o and (slot, head, d, e) of states. p_cu None: sequences of
    ``rows`` rows each; otherwise packed rows. p_initial and p_final None: from a zero state, and the last is dropped.
    SEGMENT > 0: segments of that many rows, walked at the same time, start from the states in p_carried.
    """
    i_e, i_h, i_w = program(H, (E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(tl.int64)
    i_n, i_segment, begin, end = locate(p_cu, i_w, num_sequences, rows, SEGMENT)
    first = begin
    length = end - begin
    if SEGMENT:
        begin = tl.minimum(first + i_segment * SEGMENT, end)
        end = tl.minimum(begin + SEGMENT, end)
    o_c = tl.arange(0, CHUNK)
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    slot = slot_of(p_slots, i_n, num_sequences, num_slots)
    p_q += i_n.to(tl.int64) * s_q[0] + (i_h // RATIO_QK) * s_q[2]
    p_k += i_n.to(tl.int64) * s_k[0] + (i_h // RATIO_QK) * s_k[2]
    p_v += i_n.to(tl.int64) * s_v[0] + (i_h // RATIO_V) * s_v[2]
    p_o += i_n.to(tl.int64) * s_o[0] + i_h * s_o[2]
    if slot < 0:
        store_zeros(p_o, begin, end, o_c, o_e, s_o, E, CHUNK)
        if p_cu is not None:
            if (i_n == num_sequences) & (i_segment == 0):
                # Rows before the first sequence.
                before, _ = bounds(p_cu, 0, num_sequences, rows)
                store_zeros(p_o, 0, before, o_c, o_e, s_o, E, CHUNK)
    elif begin < end:
        S = zero_state(D, BLOCK_D, BLOCK_E)
        is_carried = False
        if SEGMENT:
            is_carried = length > SEGMENT
            if is_carried:
                place = carried_place(p_cu, i_n, first, rows, SEGMENT) + i_segment
                S = load_state(p_carried, place, i_h, i_e, s_carried, D, E, BLOCK_D, BLOCK_E)
        if p_initial is not None:
            if has_initial(p_initial, p_has, i_n, num_sequences) and not is_carried:
                S = load_state(p_initial, slot, i_h, i_e, s_initial, D, E, BLOCK_D, BLOCK_E)

        rate = base_two_rate(p_slopes, i_h)
        # [keys, queries]
        distance = o_c[None, :] - o_c[:, None]
        if REVERSED:
            distance = -distance
        b_within = tl.where(distance >= 0, tl.exp2(-rate * tl.maximum(distance, 0).to(tl.float32)) * scale, 0.0)
        if p_positions is not None:
            # A segment stores the states at its chunks' ends; the state before the first one is the sequence's own.
            stop = next_snapshot(p_positions, p_cu, i_n, num_sequences, rows, num_snapshots, begin, CHUNK)
            if stop == begin:
                if begin == first:
                    store_snapshots(
                        p_positions, p_snapshot_slots, p_cu, i_n, num_sequences, rows, num_snapshots, stop, p_final,
                        num_slots, i_h, i_e, s_final, S, D, E, BLOCK_D, BLOCK_E, CHUNK,
                    )  # fmt: skip
                stop = next_snapshot(p_positions, p_cu, i_n, num_sequences, rows, num_snapshots, stop + 1, CHUNK)
        last_row = begin + (end - begin - 1) // CHUNK * CHUNK
        for c in tl.range(begin, end, CHUNK, num_stages=STAGES):
            row = c
            if REVERSED:
                row = begin + last_row - c
            S = step(
                p_q, p_k, p_v, p_o, S, b_within, rate, scale, row, end, i_e, s_q, s_k, s_v, s_o,
                D, E, BLOCK_D, BLOCK_E, CHUNK, REVERSED, WIDE,
            )  # fmt: skip
            if p_positions is not None:
                if row + CHUNK == stop:
                    store_snapshots(
                        p_positions, p_snapshot_slots, p_cu, i_n, num_sequences, rows, num_snapshots, stop, p_final,
                        num_slots, i_h, i_e, s_final, S, D, E, BLOCK_D, BLOCK_E, CHUNK,
                    )  # fmt: skip
                    stop = next_snapshot(p_positions, p_cu, i_n, num_sequences, rows, num_snapshots, stop + 1, CHUNK)
        if p_final is not None:
            is_last = end - first == length
            if REVERSED:
                is_last = begin == first
            if is_last:
                store_state(p_final, slot, i_h, i_e, s_final, S, D, E, BLOCK_D, BLOCK_E)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def segment_states(
    p_k, p_v, p_slopes, p_cu, p_slots, p_carried, rows, num_sequences, num_slots, scale, s_k, s_v, s_carried,
    H: tl.constexpr, RATIO_QK: tl.constexpr, RATIO_V: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
    REVERSED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The state that each segment would leave behind had it started from zero, stored in the place of the next one."""
    i_e, i_h, i_w = program(H, (E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(tl.int64)
    i_n, i_segment, first, last = locate(p_cu, i_w, num_sequences, rows, SEGMENT)
    begin = tl.minimum(first + i_segment * SEGMENT, last)
    end = tl.minimum(begin + SEGMENT, last)
    slot = slot_of(p_slots, i_n, num_sequences, num_slots)
    has_next = end < last
    next_segment = i_segment + 1
    if REVERSED:
        has_next = begin > first
        next_segment = i_segment - 1
    if (slot >= 0) & (begin < end) & has_next:
        p_k += i_n.to(tl.int64) * s_k[0] + (i_h // RATIO_QK) * s_k[2]
        p_v += i_n.to(tl.int64) * s_v[0] + (i_h // RATIO_V) * s_v[2]
        rate = base_two_rate(p_slopes, i_h)
        # From 2^-150 on a weight is 0 in float32: chunks that far from the next segment are not read.
        reach = tl.minimum(150.0 / tl.maximum(rate, 1e-30), SEGMENT + 0.0).to(tl.int32)
        chunks_in_reach = tl.cdiv(reach, CHUNK)
        if REVERSED:
            end = tl.minimum(end, begin + chunks_in_reach * CHUNK)
        else:
            begin = tl.maximum(begin, end - chunks_in_reach * CHUNK)
        S = zero_state(D, BLOCK_D, BLOCK_E)
        last_row = begin + (end - begin - 1) // CHUNK * CHUNK
        for c in tl.range(begin, end, CHUNK, num_stages=STAGES):
            row = c
            if REVERSED:
                row = begin + last_row - c
            S = step(
                None, p_k, p_v, None, S, None, rate, scale, row, end, i_e, s_k, s_k, s_v, s_v,
                D, E, BLOCK_D, BLOCK_E, CHUNK, REVERSED, WIDE,
            )  # fmt: skip
        place = carried_place(p_cu, i_n, first, rows, SEGMENT) + next_segment
        store_state(p_carried, place, i_h, i_e, s_carried, S, D, E, BLOCK_D, BLOCK_E)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def carry_states(
    p_slopes, p_cu, p_slots, p_has, p_initial, p_carried, rows, num_sequences, num_slots, s_initial, s_carried,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    SEGMENT: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Turn each segment's own state into the state before the next one, from a sequence's initial state on.

    The initial state is stored too: a pool's slot is overwritten while the segments are walked.
    """
    # One piece of one tile: nothing passes between pieces.
    PIECES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    i_tile, i_h, i_n = program(H, PIECES * ((E + BLOCK_E - 1) // BLOCK_E))
    i_e = i_tile // PIECES
    i = i_tile % PIECES
    i_h = i_h.to(tl.int64)
    first, last = bounds(p_cu, i_n, num_sequences, rows)
    slot = slot_of(p_slots, i_n, num_sequences, num_slots)
    if (last - first > SEGMENT) & (slot >= 0):
        b_S = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        if p_initial is not None:
            if has_initial(p_initial, p_has, i_n, num_sequences):
                b_S = load_piece(p_initial, slot, i_h, i, i_e, s_initial, D, E, BLOCK_D, BLOCK_E)
        rate = base_two_rate(p_slopes, i_h)
        place = carried_place(p_cu, i_n, first, rows, SEGMENT)
        segments = tl.cdiv(last - first, SEGMENT)
        for i_step in range(segments):
            i_segment = i_step
            if REVERSED:
                i_segment = segments - 1 - i_step
            if i_step > 0:
                b_S += load_piece(p_carried, place + i_segment, i_h, i, i_e, s_carried, D, E, BLOCK_D, BLOCK_E)
            store_piece(p_carried, place + i_segment, i_h, i, i_e, s_carried, b_S, D, E, BLOCK_D, BLOCK_E)
            of_segment = tl.minimum(last - first - i_segment * SEGMENT, SEGMENT)
            b_S = decayed(b_S, rate, of_segment)
