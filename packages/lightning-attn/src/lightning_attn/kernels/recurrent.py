"""Token by token: the recurrence as it is written, in float32. Decoding, verifying and committing drafts share it.

A draft's output and a committed state therefore have the bits that decoding its tokens one by one would give, in a pool
of 16 bits too, since each token's state is rounded as decoding stores it.

So does ``prefill``, with compensated sums, for a caller that pins such a plan.
"""

import triton
import triton.language as tl

from lightning_attn.kernels.chunked import store_zeros
from lightning_attn.kernels.decay import base_two_rate, decayed, kept_and_lost
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    Rows,
    Snapshots,
    States,
    bounds,
    has_initial,
    program,
    rows_of_head,
    slot_of,
)


@triton.jit
def load_row(rows, row, o, WIDTH: tl.constexpr):
    return tl.load(rows.p + row * rows.stride + o * rows.element, mask=o < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def tile_pointers(states, slot, i_h, o_d, o_e):
    strides = states.strides
    p_tile = states.p + slot * strides.slot + i_h * strides.head
    return p_tile + o_d[:, None] * strides.d + o_e[None, :] * strides.e


@triton.jit
def load_tile(states, slot, i_h, o_d, o_e, sizes: tl.constexpr):
    """A state's columns o_e, [BLOCK_D, BLOCK_E] in float32, 0 outside the state. No mask where none is needed."""
    p_tile = tile_pointers(states, slot, i_h, o_d, o_e)
    if sizes.D % sizes.BLOCK_D or sizes.E % sizes.BLOCK_E:
        b_S = tl.load(p_tile, mask=(o_d[:, None] < sizes.D) & (o_e[None, :] < sizes.E), other=0.0)
    else:
        b_S = tl.load(p_tile)
    return b_S.to(tl.float32)


@triton.jit
def store_tile(states, slot, i_h, o_d, o_e, b_S, sizes: tl.constexpr):
    """The reverse of load_tile."""
    p_tile = tile_pointers(states, slot, i_h, o_d, o_e)
    b_S = b_S.to(states.p.dtype.element_ty)
    if sizes.D % sizes.BLOCK_D or sizes.E % sizes.BLOCK_E:
        tl.store(p_tile, b_S, mask=(o_d[:, None] < sizes.D) & (o_e[None, :] < sizes.E))
    else:
        tl.store(p_tile, b_S)


@triton.jit
def advance(b_S, b_k, b_v, rate):
    """exp(-s) S + k v^T: [BLOCK_D, BLOCK_E] in float32.

    FMAs are explicit: a compiler would choose them anew for each kernel, and bits would differ between kernels.
    """
    kept, lost = kept_and_lost(rate, 1)
    return tl.fma(b_S, kept, tl.fma(b_S, lost, b_k[:, None] * b_v[None, :]))


@triton.jit
def advance_compensated(b_S, b_error, b_k, b_v, kept, lost):
    """``advance`` over many tokens, with compensated summation (Kahan, 1965)."""
    b_kept = b_S * kept
    b_new = tl.fma(b_S, lost, b_k[:, None] * b_v[None, :]) + b_error * kept
    b_next = b_kept + b_new
    return b_next, b_new - (b_next - b_kept)


@triton.jit
def locate_head(p_slots, sizes: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """A program's tile of columns, its head and sequence, and the sequence's slot in the pool."""
    i_e, i_h, i_n = program(sizes.H, (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E)
    i_h = i_h.to(tl.int64)
    i_n = i_n.to(tl.int64)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    return i_e, i_h, i_n, tl.load(p_slots + i_n).to(tl.int64)


@triton.jit
def accepted_tokens(p_accepted, i_n, TOKENS: tl.constexpr):
    """How many of a sequence's tokens are taken: all, or the accepted ones if that is a possible number, else none."""
    if p_accepted is None:
        tokens = TOKENS
    else:
        accepted = tl.load(p_accepted + i_n)
        tokens = tl.where((accepted >= 0) & (accepted <= TOKENS), accepted, 0).to(tl.int32)
    return tokens


@triton.jit
def locate_tile(p_slots, p_slopes, p_pool, strides, sizes: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """A program's sequence and head, the pool, the sequence's slot in it, its tile of a state, and the decay rate."""
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    BLOCK_E: tl.constexpr = sizes.BLOCK_E
    i_e, i_h, i_n, slot = locate_head(p_slots, sizes, DEPENDENT_LAUNCH)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_e = (i_e * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    return i_n, i_h, States(p_pool, strides.pool), slot, o_d, o_e, base_two_rate(p_slopes, i_h)


@triton.jit
def store_zero_rows(o, tokens, i_h, o_e, sizes: tl.constexpr):
    """The outputs of a sequence whose slot is padding."""
    BLOCK_E: tl.constexpr = sizes.BLOCK_E
    b_zero = tl.zeros([BLOCK_E], o.p.dtype.element_ty)
    for i_t in range(tokens):
        tl.store(o.p + (i_h * 0 + i_t) * o.stride + o_e * o.element, b_zero, mask=o_e < sizes.E)


@triton.jit(do_not_specialize=["num_slots"])
def decode(
    p_q, p_k, p_v, p_pool, p_slots, p_slopes, p_accepted, p_o, num_slots, scale, strides,
    TOKENS: tl.constexpr, sizes: tl.constexpr, WRITES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, or the first accepted of them, of one sequence and head, BLOCK_E columns of its state.

    p_q None: no outputs.
    """
    D: tl.constexpr = sizes.D
    E: tl.constexpr = sizes.E
    i_n, i_h, pool, slot, o_d, o_e, rate = locate_tile(p_slots, p_slopes, p_pool, strides, sizes, DEPENDENT_LAUNCH)
    tokens = accepted_tokens(p_accepted, i_n, TOKENS)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    # The first token's rows are loaded while the slot, and then the state, is waited for; the next ones' while a token
    # is computed.
    b_k = load_row(k, 0, o_d, D)
    b_v = load_row(v, 0, o_e, E)
    if p_q is not None:
        q = rows_of_head(p_q, strides.q, i_n, i_h, sizes.RATIO_QK)
        o = rows_of_head(p_o, strides.o, i_n, i_h, 1)
        b_q = load_row(q, 0, o_d, D)
    if (slot < 0) | (slot >= num_slots):
        if p_q is not None:
            store_zero_rows(o, TOKENS, i_h, o_e, sizes)
    elif tokens > 0:
        b_S = load_tile(pool, slot, i_h, o_d, o_e, sizes)
        for i_t in range(tokens):
            b_S = advance(b_S, b_k, b_v, rate)
            if WRITES:
                if i_t == tokens - 1:
                    store_tile(pool, slot, i_h, o_d, o_e, b_S, sizes)
            b_now = b_S
            if TOKENS > 1:
                # What the next token would read, had decoding stored it.
                b_S = b_S.to(p_pool.dtype.element_ty).to(tl.float32)
                ahead = tl.minimum(i_t + 1, TOKENS - 1).to(tl.int64)
                b_k = load_row(k, ahead, o_d, D)
                b_v = load_row(v, ahead, o_e, E)
            if p_q is not None:
                b_o = tl.sum(b_now * b_q[:, None], axis=0) * scale
                p_row = o.p + (i_h * 0 + i_t) * o.stride + o_e * o.element
                tl.store(p_row, b_o.to(p_o.dtype.element_ty), mask=o_e < E)
                if TOKENS > 1:
                    b_q = load_row(q, ahead, o_d, D)


@triton.jit(do_not_specialize=["rows", "num_slots", "num_snapshots"])
def finish_snapshots(
    p_k, p_v, p_slopes, p_cu, p_slots, p_pool, p_positions, p_snapshot_slots, rows, num_slots, num_snapshots,
    strides, sizes: tl.constexpr,
):  # fmt: skip
    """Advance each snapshot, stored after whole chunks, by the tokens between there and its position."""
    pool = States(p_pool, strides.pool)
    s_k, s_v = strides.k, strides.v
    i_e, i_h, i_snapshot = program(sizes.H, (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E)
    i_h = i_h.to(tl.int64)
    i_n = (i_snapshot // num_snapshots).to(tl.int64)
    # Clamped before they are subtracted: the difference of 64-bit bounds may not fit in 64 bits.
    begin, end = bounds(Batch(p_cu, p_slots, None, Counts(rows, i_n + 1, num_slots)), i_n)
    length = end - begin
    position = tl.load(p_positions + i_snapshot).to(tl.int64)
    target = tl.load(p_snapshot_slots + i_snapshot).to(tl.int64)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    missing = (position % sizes.CHUNK).to(tl.int32)
    wanted = (position >= 1) & (position <= length) & (target >= 0) & (target < num_slots)
    if wanted & (slot >= 0) & (slot < num_slots) & (missing > 0):
        o_d = tl.arange(0, sizes.BLOCK_D).to(tl.int64)
        o_e = (i_e * sizes.BLOCK_E + tl.arange(0, sizes.BLOCK_E)).to(tl.int64)
        row = begin + position - missing
        k = rows_of_head(p_k, s_k, i_n * 0, i_h, sizes.RATIO_QK)
        v = rows_of_head(p_v, s_v, i_n * 0, i_h, sizes.RATIO_V)
        k, v = Rows(k.p + row * k.stride, k.stride, k.element), Rows(v.p + row * v.stride, v.stride, v.element)
        b_S = load_tile(pool, target, i_h, o_d, o_e, sizes)
        rate = base_two_rate(p_slopes, i_h)
        for i_t in range(missing):
            b_k = load_row(k, i_h * 0 + i_t, o_d, sizes.D)
            b_v = load_row(v, i_h * 0 + i_t, o_e, sizes.E)
            b_S = advance(b_S, b_k, b_v, rate)
        store_tile(pool, target, i_h, o_d, o_e, b_S, sizes)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def prefill(
    p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_positions, p_snapshot_slots,
    rows, num_sequences, num_slots, num_snapshots, scale, strides, sizes: tl.constexpr,
):  # fmt: skip
    """``chunked.prefill`` in chunks of one token, without segments."""
    D: tl.constexpr = sizes.D
    E: tl.constexpr = sizes.E
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    BLOCK_E: tl.constexpr = sizes.BLOCK_E
    REVERSED: tl.constexpr = sizes.REVERSED
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    snapshots = Snapshots(p_positions, p_snapshot_slots, num_snapshots)
    initial, final = States(p_initial, strides.initial), States(p_final, strides.final)
    i_e, i_h, i_n = program(sizes.H, (E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(tl.int64)
    begin, end = bounds(batch, i_n)
    slot = slot_of(batch, i_n)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_e = (i_e * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    q = rows_of_head(p_q, strides.q, i_n, i_h, sizes.RATIO_QK)
    k = rows_of_head(p_k, strides.k, i_n, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_n, i_h, sizes.RATIO_V)
    o = rows_of_head(p_o, strides.o, i_n, i_h, 1)
    if slot < 0:
        store_zeros(o, begin, end, tl.arange(0, 32), o_e, E, 32)
        if p_cu is not None:
            if i_n == batch.count.sequences:
                # Rows before the first sequence.
                before, _ = bounds(batch, 0)
                store_zeros(o, 0, before, tl.arange(0, 32), o_e, E, 32)
    elif begin < end:
        b_S = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
        if p_initial is not None:
            if has_initial(batch, i_n):
                b_S = load_tile(initial, slot, i_h, o_d, o_e, sizes)
        b_error = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
        rate = base_two_rate(p_slopes, i_h)
        kept, lost = kept_and_lost(rate, 1)
        row = begin
        if REVERSED:
            row = end - 1
        # A token's rows are loaded while the token before it is computed.
        b_q = load_row(q, row, o_d, D)
        b_k = load_row(k, row, o_d, D)
        b_v = load_row(v, row, o_e, E)
        for t in range(begin, end):
            row = t
            ahead = tl.minimum(t + 1, end - 1)
            if REVERSED:
                row = begin + end - 1 - t
                ahead = begin + end - 1 - ahead
            b_next_q = load_row(q, ahead, o_d, D)
            b_next_k = load_row(k, ahead, o_d, D)
            b_next_v = load_row(v, ahead, o_e, E)
            # Backwards a token is added before the state decays, and carries the scale (see chunked.py): the initial
            # state does not decay at the first token, and the final one decays once more.
            if REVERSED:
                first_kept = tl.where(t == begin, 1.0, kept)
                first_lost = tl.where(t == begin, 0.0, lost)
                b_S, b_error = advance_compensated(b_S, b_error, b_k * scale, b_v, first_kept, first_lost)
                b_o = tl.sum(b_S * b_q[:, None], axis=0)
            else:
                b_S, b_error = advance_compensated(b_S, b_error, b_k, b_v, kept, lost)
                b_o = tl.sum(b_S * b_q[:, None], axis=0) * scale
            # Stored as the first row of a tile in the state's layout, each element of which one thread holds. Every
            # thread has b_o, and converting its layout would have them all write it to the same shared memory.
            b_tile = tl.where(o_d[:, None] == 0, b_o[None, :], b_S).to(p_o.dtype.element_ty)
            p_tile = o.p + row * o.stride + (o_d[:, None] * 0 + o_e[None, :]) * o.element
            tl.store(p_tile, b_tile, mask=(o_d[:, None] == 0) & (o_e[None, :] < E))
            if p_positions is not None:
                for i_p in range(snapshots.count):
                    i_snapshot = i_n * snapshots.count + i_p
                    target = tl.load(p_snapshot_slots + i_snapshot).to(tl.int64)
                    wanted = tl.load(p_positions + i_snapshot).to(tl.int64) == t + 1 - begin
                    if wanted & (target >= 0) & (target < batch.count.slots):
                        store_tile(final, target, i_h, o_d, o_e, b_S, sizes)
            b_q = b_next_q
            b_k = b_next_k
            b_v = b_next_v
        if REVERSED:
            b_S = decayed(b_S, rate, 1)
        if p_final is not None:
            store_tile(final, slot, i_h, o_d, o_e, b_S, sizes)
