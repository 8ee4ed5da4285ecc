"""Token by token: the recurrence as it is written, in float32. Decoding, checking drafts and taking them over share it.

A draft's output and a committed state therefore have the bits that decoding its tokens one by one would give, in a pool
of 16 bits too, since each token's state is rounded as decoding stores it.

Prefill of float16 and float32 walks so too (``walk``): tensor cores round what they multiply to 11 bits, three products
that make up for it take more registers than there are, and a warp that holds its tile of the state needs neither.
"""

import triton
import triton.language as tl

from lightning_attn.kernels.chunked import bounds, has_initial, program, slot_of, store_zeros
from lightning_attn.kernels.decay import base_two_rate, decayed, kept_and_lost


@triton.jit
def load_row(p_row, o, s_element, WIDTH: tl.constexpr):
    return tl.load(p_row + o * s_element, mask=o < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def tile_pointers(p_state, slot, i_h, o_d, o_e, s_state):
    return p_state + slot * s_state[0] + i_h * s_state[1] + o_d[:, None] * s_state[2] + o_e[None, :] * s_state[3]


@triton.jit
def load_tile(p_state, slot, i_h, o_d, o_e, s_state, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A state's columns o_e, [BLOCK_D, BLOCK_E] in float32, 0 outside the state. No mask where none is needed."""
    p_tile = tile_pointers(p_state, slot, i_h, o_d, o_e, s_state)
    if D % BLOCK_D or E % BLOCK_E:
        b_S = tl.load(p_tile, mask=(o_d[:, None] < D) & (o_e[None, :] < E), other=0.0)
    else:
        b_S = tl.load(p_tile)
    return b_S.to(tl.float32)


@triton.jit
def store_tile(p_state, slot, i_h, o_d, o_e, s_state, b_S, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The reverse of load_tile."""
    p_tile = tile_pointers(p_state, slot, i_h, o_d, o_e, s_state)
    b_S = b_S.to(p_state.dtype.element_ty)
    if D % BLOCK_D or E % BLOCK_E:
        tl.store(p_tile, b_S, mask=(o_d[:, None] < D) & (o_e[None, :] < E))
    else:
        tl.store(p_tile, b_S)


@triton.jit
def advance(b_S, b_k, b_v, rate):
    """exp(-s) S + k v^T: [BLOCK_D, BLOCK_E] in float32.

    Where products and sums are fused is said here and not left to a compiler, which would choose for each kernel anew.
    """
    kept, lost = kept_and_lost(rate, 1)
    return tl.fma(b_S, kept, tl.fma(b_S, lost, b_k[:, None] * b_v[None, :]))


@triton.jit
def advance_and_remember(b_S, b_error, b_k, b_v, kept, lost):
    """``advance`` over many tokens: what rounding takes away from one sum is added to the next (Kahan, 1965)."""
    b_kept = b_S * kept
    b_new = tl.fma(b_S, lost, b_k[:, None] * b_v[None, :]) + b_error * kept
    b_next = b_kept + b_new
    return b_next, b_new - (b_next - b_kept)


@triton.jit(do_not_specialize=["num_slots"])
def recur(
    p_q, p_k, p_v, p_pool, p_slots, p_slopes, p_accepted, p_o, num_slots, scale, s_q, s_k, s_v, s_pool, s_o,
    TOKENS: tl.constexpr, H: tl.constexpr, RATIO_QK: tl.constexpr, RATIO_V: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, WRITES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, or the first accepted of them, of one sequence and head, BLOCK_E columns of its state.

    Strides are (sequence, token, head, element) of q, k, v, o and (slot, head, d, e) of the pool. p_q None: no outputs.
    """
    i_e, i_h, i_n = program(H, (E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(tl.int64)
    i_n = i_n.to(tl.int64)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(p_slots + i_n).to(tl.int64)
    tokens = TOKENS
    if p_accepted is not None:
        accepted = tl.load(p_accepted + i_n)
        tokens = tl.where((accepted >= 0) & (accepted <= TOKENS), accepted, 0).to(tl.int32)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_e = (i_e * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    p_k += i_n * s_k[0] + (i_h // RATIO_QK) * s_k[2]
    p_v += i_n * s_v[0] + (i_h // RATIO_V) * s_v[2]
    # The first token's rows are on their way while the slot, and then the state, is waited for; the next ones' while
    # a token is computed.
    rate = base_two_rate(p_slopes, i_h)
    b_k = load_row(p_k, o_d, s_k[3], D)
    b_v = load_row(p_v, o_e, s_v[3], E)
    if p_q is not None:
        p_q += i_n * s_q[0] + (i_h // RATIO_QK) * s_q[2]
        p_o += i_n * s_o[0] + i_h * s_o[2]
        b_q = load_row(p_q, o_d, s_q[3], D)
    if (slot < 0) | (slot >= num_slots):
        if p_q is not None:
            b_zero = tl.zeros([BLOCK_E], p_o.dtype.element_ty)
            for i_t in range(TOKENS):
                tl.store(p_o + (i_h * 0 + i_t) * s_o[1] + o_e * s_o[3], b_zero, mask=o_e < E)
    elif tokens > 0:
        b_S = load_tile(p_pool, slot, i_h, o_d, o_e, s_pool, D, E, BLOCK_D, BLOCK_E)
        for i_t in range(tokens):
            b_S = advance(b_S, b_k, b_v, rate)
            if WRITES:
                if i_t == tokens - 1:
                    store_tile(p_pool, slot, i_h, o_d, o_e, s_pool, b_S, D, E, BLOCK_D, BLOCK_E)
            b_now = b_S
            if TOKENS > 1:
                # What the next token would read, had decoding stored it.
                b_S = b_S.to(p_pool.dtype.element_ty).to(tl.float32)
                ahead = tl.minimum(i_t + 1, TOKENS - 1).to(tl.int64)
                b_k = load_row(p_k + ahead * s_k[1], o_d, s_k[3], D)
                b_v = load_row(p_v + ahead * s_v[1], o_e, s_v[3], E)
            if p_q is not None:
                b_o = tl.sum(b_now * b_q[:, None], axis=0) * scale
                tl.store(p_o + (i_h * 0 + i_t) * s_o[1] + o_e * s_o[3], b_o.to(p_o.dtype.element_ty), mask=o_e < E)
                if TOKENS > 1:
                    b_q = load_row(p_q + ahead * s_q[1], o_d, s_q[3], D)


@triton.jit(do_not_specialize=["rows", "num_slots", "num_snapshots"])
def finish_snapshots(
    p_k, p_v, p_slopes, p_cu, p_slots, p_pool, p_positions, p_snapshot_slots, rows, num_slots, num_snapshots, s_k, s_v,
    s_pool, H: tl.constexpr, RATIO_QK: tl.constexpr, RATIO_V: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Advance each snapshot, stored at a place of whole chunks, by the tokens between there and its position."""
    i_e, i_h, i_snapshot = program(H, (E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(tl.int64)
    i_n = (i_snapshot // num_snapshots).to(tl.int64)
    # Clamped before they are subtracted: the difference of 64-bit bounds may not fit in 64 bits.
    begin, end = bounds(p_cu, i_n, i_n + 1, rows)
    length = end - begin
    position = tl.load(p_positions + i_snapshot).to(tl.int64)
    target = tl.load(p_snapshot_slots + i_snapshot).to(tl.int64)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    missing = (position % CHUNK).to(tl.int32)
    wanted = (position >= 1) & (position <= length) & (target >= 0) & (target < num_slots)
    if wanted & (slot >= 0) & (slot < num_slots) & (missing > 0):
        o_d = tl.arange(0, BLOCK_D).to(tl.int64)
        o_e = (i_e * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
        row = begin + position - missing
        p_k += row * s_k[1] + (i_h // RATIO_QK) * s_k[2]
        p_v += row * s_v[1] + (i_h // RATIO_V) * s_v[2]
        b_S = load_tile(p_pool, target, i_h, o_d, o_e, s_pool, D, E, BLOCK_D, BLOCK_E)
        rate = base_two_rate(p_slopes, i_h)
        for i_t in range(missing):
            b_k = load_row(p_k + (i_h * 0 + i_t) * s_k[1], o_d, s_k[3], D)
            b_v = load_row(p_v + (i_h * 0 + i_t) * s_v[1], o_e, s_v[3], E)
            b_S = advance(b_S, b_k, b_v, rate)
        store_tile(p_pool, target, i_h, o_d, o_e, s_pool, b_S, D, E, BLOCK_D, BLOCK_E)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def walk(
    p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_positions, p_snapshot_slots,
    rows, num_sequences, num_slots, num_snapshots, scale, s_q, s_k, s_v, s_o, s_initial, s_final,
    H: tl.constexpr, RATIO_QK: tl.constexpr, RATIO_V: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """``chunked.walk`` in chunks of one token, without segments."""
    i_e, i_h, i_n = program(H, (E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(tl.int64)
    begin, end = bounds(p_cu, i_n, num_sequences, rows)
    slot = slot_of(p_slots, i_n, num_sequences, num_slots)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_e = (i_e * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    p_q += i_n.to(tl.int64) * s_q[0] + (i_h // RATIO_QK) * s_q[2]
    p_k += i_n.to(tl.int64) * s_k[0] + (i_h // RATIO_QK) * s_k[2]
    p_v += i_n.to(tl.int64) * s_v[0] + (i_h // RATIO_V) * s_v[2]
    p_o += i_n.to(tl.int64) * s_o[0] + i_h * s_o[2]
    if slot < 0:
        store_zeros(p_o, begin, end, tl.arange(0, 32), o_e, s_o, E, 32)
        if p_cu is not None:
            if i_n == num_sequences:
                # Rows before the first sequence.
                before, _ = bounds(p_cu, 0, num_sequences, rows)
                store_zeros(p_o, 0, before, tl.arange(0, 32), o_e, s_o, E, 32)
    elif begin < end:
        b_S = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
        if p_initial is not None:
            if has_initial(p_initial, p_has, i_n, num_sequences):
                b_S = load_tile(p_initial, slot, i_h, o_d, o_e, s_initial, D, E, BLOCK_D, BLOCK_E)
        b_error = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
        rate = base_two_rate(p_slopes, i_h)
        kept, lost = kept_and_lost(rate, 1)
        row = begin
        if REVERSED:
            row = end - 1
        # A token's rows are loaded while the token before it is computed.
        b_q = load_row(p_q + row * s_q[1], o_d, s_q[3], D)
        b_k = load_row(p_k + row * s_k[1], o_d, s_k[3], D)
        b_v = load_row(p_v + row * s_v[1], o_e, s_v[3], E)
        for t in range(begin, end):
            row = t
            ahead = tl.minimum(t + 1, end - 1)
            if REVERSED:
                row = begin + end - 1 - t
                ahead = begin + end - 1 - ahead
            b_next_q = load_row(p_q + ahead * s_q[1], o_d, s_q[3], D)
            b_next_k = load_row(p_k + ahead * s_k[1], o_d, s_k[3], D)
            b_next_v = load_row(p_v + ahead * s_v[1], o_e, s_v[3], E)
            # Backwards a token is added before the state decays, and carries the scale: see chunked.py. So the state
            # that goes in has not decayed at the first token yet, and the one that comes out does once more.
            if REVERSED:
                first_kept = tl.where(t == begin, 1.0, kept)
                first_lost = tl.where(t == begin, 0.0, lost)
                b_S, b_error = advance_and_remember(b_S, b_error, b_k * scale, b_v, first_kept, first_lost)
                b_o = tl.sum(b_S * b_q[:, None], axis=0)
            else:
                b_S, b_error = advance_and_remember(b_S, b_error, b_k, b_v, kept, lost)
                b_o = tl.sum(b_S * b_q[:, None], axis=0) * scale
            # In the first row of a tile of the state's, which one thread each holds. Every thread has b_o, and a change
            # of its layout would have them all write it to the same shared memory.
            b_tile = tl.where(o_d[:, None] == 0, b_o[None, :], b_S).to(p_o.dtype.element_ty)
            p_tile = p_o + row * s_o[1] + (o_d[:, None] * 0 + o_e[None, :]) * s_o[3]
            tl.store(p_tile, b_tile, mask=(o_d[:, None] == 0) & (o_e[None, :] < E))
            if p_positions is not None:
                for i_p in range(num_snapshots):
                    i_snapshot = i_n * num_snapshots + i_p
                    target = tl.load(p_snapshot_slots + i_snapshot).to(tl.int64)
                    wanted = tl.load(p_positions + i_snapshot).to(tl.int64) == t + 1 - begin
                    if wanted & (target >= 0) & (target < num_slots):
                        store_tile(p_final, target, i_h, o_d, o_e, s_final, b_S, D, E, BLOCK_D, BLOCK_E)
            b_q = b_next_q
            b_k = b_next_k
            b_v = b_next_v
        if REVERSED:
            b_S = decayed(b_S, rate, 1)
        if p_final is not None:
            store_tile(p_final, slot, i_h, o_d, o_e, s_final, b_S, D, E, BLOCK_D, BLOCK_E)
