"""Device code: a decode step of Gated DeltaNet from the projections to the gated outputs, in one launch.

A program takes one V head of a sequence, or a slice of its Dv, and holds that state in registers while its tokens pass:
the state crosses memory once each way. Drafts are verified by the same steps without the writes, and committed by them
without the outputs.
"""

import triton
import triton.language as tl

from gdn_split.kernels.ahead import fetch_ahead, slot_ahead
from gdn_split.kernels.inputs import Given, Layer, load_gates, load_inputs, load_rows, row_of_token, token_offsets
from gdn_split.kernels.layer import (
    Out,
    Taps,
    Token,
    activated,
    as_values,
    convolved,
    delta_step,
    gated,
    halves,
    load_state,
    log_decay,
    normed,
    offsets_of_values,
    sigmoid,
    store_state,
    store_taps,
    tile_of_state,
    values_and_gates,
)
from gdn_split.kernels.split import columns_of_group, wait_for_inputs


@triton.jit
def norm_of_slices(out, p_z, s_z, p_norm, tokens, eps, sizes: tl.constexpr):
    """What :func:`gated` does, for a head whose outputs other threads have left in memory, a slice at a time."""
    tl.debug_barrier()
    o = tl.arange(0, sizes.BLOCK_V)
    m = o < sizes.HV
    for t in range(tokens):
        i_t = tl.cast(t, tl.int64)
        b_o = tl.load(out.p_raw + i_t * out.s_raw + o, mask=m, other=0.0)
        b_z = tl.load(p_z + i_t * s_z + o, mask=m, other=0.0).to(tl.float32)
        b_gate = tl.load(p_norm + o, mask=m, other=0.0).to(tl.float32) * b_z * sigmoid(b_z)
        b_o = gated(b_o, b_gate, eps, sizes)
        tl.store(out.p + i_t * out.stride + o, b_o.to(out.p.dtype.element_ty), mask=m)


@triton.jit
def norm_by_the_last(
    out, p_count, p_z, s_z, p_norm, eps, sizes: tl.constexpr, conv: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Norm a head's outputs, if this is the last of the programs that take its slices. It puts the counter back."""
    # All threads have left theirs.
    tl.debug_barrier()
    if tl.atomic_add(p_count, 1, sem="acq_rel") == step.SLICES - 1:
        tl.store(p_count, 0)
        norm_of_slices(out, p_z, s_z, p_norm, conv.TOKENS, eps, sizes)


@triton.jit
def store_output(out, b_o, b_gate, i_t, o_v, m_o, eps, NORM: tl.constexpr, sizes: tl.constexpr, step: tl.constexpr):
    """A token's output, or what :func:`norm_of_slices` makes one of."""
    if NORM and step.SLICES > 1:
        tl.store(out.p_raw + i_t * out.s_raw + o_v, b_o, mask=m_o)
    else:
        if NORM:
            b_o = gated(b_o, as_values(b_gate, step), eps, sizes)
        tl.store(out.p + i_t * out.stride + o_v, b_o.to(out.p.dtype.element_ty), mask=m_o)


@triton.jit
def store_nothing(p_out, s_out, TOKENS: tl.constexpr, sizes: tl.constexpr):
    """The outputs of padding: zeros."""
    BLOCK: tl.constexpr = sizes.BLOCK_V
    o = tl.arange(0, BLOCK)
    b_zero = tl.zeros([BLOCK], p_out.dtype.element_ty)
    for t in range(TOKENS):
        tl.store(p_out + tl.cast(t, tl.int64) * s_out + o, b_zero, mask=o < sizes.HV)


@triton.jit
def keep_shared_inputs(x, p_path, p_slot, p_count, i_u, tokens, strides, sizes: tl.constexpr, conv: tl.constexpr,
                step: tl.constexpr):  # fmt: skip
    """Write the convolution's state of GROUP QK heads' q and k, once the programs that read it have counted themselves.

    Programs of lower indices than this one's, which were started before it: waiting for them comes to an end. The
    counter goes back to 0 for the next launch.
    """
    NQK: tl.constexpr = sizes.NQK
    BLOCK_K: tl.constexpr = step.BLOCK_K
    GROUP: tl.constexpr = step.GROUP
    dtype: tl.constexpr = p_slot.dtype.element_ty
    o = tl.arange(0, 2 * GROUP * BLOCK_K)
    i_g = i_u * GROUP + o // (2 * BLOCK_K)
    is_k = o // BLOCK_K % 2 == 1
    o_k = o % BLOCK_K
    c_q, c_k, _, _ = columns_of_group(i_g, sizes)
    column = tl.where(is_k, c_k, c_q) + o_k
    channel = tl.where(is_k, NQK + i_g, i_g) * sizes.HQ + o_k
    m = (o_k < sizes.HQ) & (i_g < NQK)
    p_1 = p_slot + channel.to(tl.int64) * conv.S_CHANNEL + (conv.WIDTH - 2) * conv.S_TAP
    # All is read before a tap is written.
    x_1 = load_kept(x, p_path, column, p_1, 1, m, tokens, strides, conv)
    x_2 = x_1
    x_3 = x_1
    if conv.WIDTH > 2:
        x_2 = load_kept(x, p_path, column, p_1, 2, m, tokens, strides, conv)
    if conv.WIDTH > 3:
        x_3 = load_kept(x, p_path, column, p_1, 3, m, tokens, strides, conv)
    readers = sizes.R * step.SLICES * tl.minimum(GROUP, NQK - i_u * GROUP)
    arrived = tl.atomic_add(p_count, 0, sem="acq_rel")
    while arrived < readers:
        arrived = tl.atomic_add(p_count, 0, sem="acq_rel")
    tl.debug_barrier()
    # Not stored: sequences that share a slot, which they must not, shall not wait for ever.
    tl.atomic_add(p_count, -readers)
    tl.store(p_1, x_1.to(dtype), mask=m)
    if conv.WIDTH > 2:
        tl.store(p_1 - conv.S_TAP, x_2.to(dtype), mask=m)
    if conv.WIDTH > 3:
        tl.store(p_1 - 2 * conv.S_TAP, x_3.to(dtype), mask=m)


@triton.jit
def load_kept(x, p_path, column, p_1, i, m, tokens, strides, conv: tl.constexpr):
    """The input i tokens before the one that comes next: of these tokens, or of those before them."""
    t = tokens - i
    new = t >= 0
    row = row_of_token(p_path, tl.maximum(t, 0), tokens, conv.TOKENS)
    b_new = tl.load(x + row * strides.qkvz + column, mask=m & new, other=0.0).to(tl.float32)
    b_old = tl.load(p_1 + (t + 1) * conv.S_TAP, mask=m & (t < 0), other=0.0).to(tl.float32)
    return b_new + b_old


@triton.jit
def at_place(b, j: tl.constexpr, step: tl.constexpr):
    """The number of token j, in every thread."""
    if step.CHUNK > 1:
        b = tl.sum(tl.where(token_offsets(step) == j, b, 0.0), axis=0)
    return b


@triton.jit
def gates_of_tokens(b, a, gate, live, EVEN: tl.constexpr):
    """Decay and beta of tokens: of those that are none 1 and 0."""
    decay = log_decay(a.to(tl.float32), gate)
    beta = sigmoid(b.to(tl.float32))
    if not EVEN:
        decay = tl.where(live, decay, 0.0)
        beta = tl.where(live, beta, 0.0)
    return tl.exp(decay), beta


@triton.jit
def moved_on(x, taps, live, EVEN: tl.constexpr):
    """The taps under which an input x comes, if its token is one."""
    new = x.to(tl.float32)
    if EVEN:
        moved = Taps(new, taps.x_0, taps.x_1, taps.x_2)
    else:
        moved = Taps(
            tl.where(live, new, taps.x_0), tl.where(live, taps.x_0, taps.x_1), tl.where(live, taps.x_1, taps.x_2),
            tl.where(live, taps.x_2, taps.x_3),
        )  # fmt: skip
    return moved


@triton.jit(do_not_specialize=["sequences", "num_slots", "path_length"])
def advance(
    p_qkvz, p_ba, p_conv, p_weight, p_bias, p_pool, p_slots, p_a_log, p_dt_bias, p_norm, p_accepted, p_path,
    p_counts, p_raw, p_out, sequences, num_slots, path_length, scale, eps, strides, sizes: tl.constexpr,
    conv: tl.constexpr, step: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a sequence, or the first accepted ones, through one V head.

    p_out None: only the states advance. p_raw [rows, V heads, Dv] float32: where a head is taken in slices, its outputs
    before the norm. p_counts, zeros before and after: [slots, UPDATERS] counters of the programs that have read a state
    of q and k, for :func:`keep_shared_inputs`, and behind them [slots, V heads] of those that have left their slice of
    a head's outputs; the latter alone, of each sequence, if nothing is written.
    """
    NQK: tl.constexpr = sizes.NQK
    R: tl.constexpr = sizes.R
    HV: tl.constexpr = sizes.HV
    TOKENS: tl.constexpr = conv.TOKENS
    BLOCK_V: tl.constexpr = step.BLOCK_V
    CHUNK: tl.constexpr = step.CHUNK
    SLICES: tl.constexpr = step.SLICES
    # Whether several programs read a state of q and k, and what they leave of a head's outputs wants a norm.
    SHARED: tl.constexpr = step.WRITES and R * SLICES > 1
    PARTS: tl.constexpr = p_norm is not None and SLICES > 1
    # Whether each chunk is full.
    EVEN: tl.constexpr = TOKENS % CHUNK == 0 and p_accepted is None
    EARLY: tl.constexpr = step.EARLY and TOKENS <= CHUNK and p_out is not None
    # Registers hold k and q of two tokens; of one, the state as it was read.
    TOGETHER: tl.constexpr = EARLY and CHUNK < 3
    PACKED: tl.constexpr = EARLY and TOKENS == 1
    # And, along Dk, the outputs of four, which then wait for the state to be written.
    DEFER: tl.constexpr = EARLY and (CHUNK < 3 or step.K_INNER)
    wait_for_inputs(DEPENDENT)
    # Behind the programs of heads those that keep the inputs of q and k, which several programs read.
    UPDATERS: tl.constexpr = (NQK + step.GROUP - 1) // step.GROUP if SHARED else 0
    PROGRAMS: tl.constexpr = NQK * R * SLICES
    i_p = tl.program_id(0)
    keeps = i_p >= sequences * PROGRAMS
    head = i_p // SLICES % (NQK * R)
    i_g = head // R
    i_n = (i_p // PROGRAMS).to(tl.int64)
    i_u = 0
    if SHARED:
        i_u = (i_p - sequences * PROGRAMS) % UPDATERS
        i_n = tl.where(keeps, (i_p - sequences * PROGRAMS) // UPDATERS, i_p // PROGRAMS).to(tl.int64)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    if step.AHEAD:
        later = slot_ahead(p_slots, sequences, num_slots, sizes, step)
    tokens = TOKENS
    if p_accepted is not None:
        accepted = tl.load(p_accepted + i_n)
        possible = (accepted >= 0) & (accepted <= path_length) & live
        tokens = tl.where(possible, accepted, 0).to(tl.int32)
    if p_path is not None:
        p_path += i_n * path_length
    p_x = p_qkvz + i_n * TOKENS * strides.qkvz
    p_ba += i_n * TOKENS * strides.ba
    layer = Layer(p_weight, p_bias, p_a_log, p_dt_bias, p_norm)
    given = Given(p_x, p_ba, p_path, tokens)
    if step.FIRST:
        first_v = i_p % SLICES * BLOCK_V
        p_slot = p_conv + slot * strides.conv_slot
        takes = live & (tokens > 0) & ~keeps
        place, loaded = load_inputs(layer, given, p_slot, head, first_v, takes, strides, sizes, conv, step)
        tl.debug_barrier()
        p_tile, m_tile = tile_of_state(p_pool + slot * strides.slot + head * strides.head, first_v, sizes, step)
        b_read = tl.load(p_tile, mask=m_tile & takes, other=0.0)
        if step.AHEAD:
            fetch_ahead(p_qkvz, p_conv, p_pool, later, strides, sizes, conv, step)
        # The compiler would save registers by computing, and so waiting, before it loads the state.
        tl.debug_barrier()
    if keeps:
        if SHARED:
            if live & (tokens > 0):
                p_count = p_counts + slot * UPDATERS + i_u
                p_kept = p_conv + slot * strides.conv_slot
                keep_shared_inputs(p_x, p_path, p_kept, p_count, i_u, tokens, strides, sizes, conv, step)
    elif live & (tokens > 0):
        if step.FIRST:
            b_S = b_read
        else:
            first_v = i_p % SLICES * BLOCK_V
            p_slot = p_conv + slot * strides.conv_slot
            place, loaded = load_inputs(layer, given, p_slot, head, first_v, None, strides, sizes, conv, step)
            p_tile, m_tile = tile_of_state(p_pool + slot * strides.slot + head * strides.head, first_v, sizes, step)
            b_S = load_state(p_tile, m_tile, sizes, step)
            if step.AHEAD:
                fetch_ahead(p_qkvz, p_conv, p_pool, later, strides, sizes, conv, step)
        o_qk, c_qk, m_qk, o_vz, c_vz, m_vz, m_v, c_z, c_b, c_a = place
        qk_taps, vz_taps, w_qk, w_v, gate, b_norm, x_qk, x_vz, b, a = loaded
        o_v = first_v + offsets_of_values(step)
        if not PACKED:
            b_S = b_S.to(tl.float32)
        zero = None
        if PACKED and DEPENDENT:
            zero = path_length >> 31
        # Always so, which the compiler does not know: it would save registers by computing, and so waiting, before
        # it loads the state.
        if sequences > 0:
            p_raws = p_raw
            if PARTS:
                p_raws += (i_n * TOKENS * (NQK * R) + head) * HV
            p_rows = p_out
            if p_out is not None:
                p_rows += i_n * TOKENS * strides.out + head * strides.out_head
            out = Out(p_rows, strides.out, p_raws, NQK * R * HV)
            for first in range(0, tokens, CHUNK):
                # The inputs of all tokens are prepared before the first one updates the state.
                qk = ()
                vz = ()
                decays, betas = gates_of_tokens(b, a, gate, first + token_offsets(step) < tokens, EVEN)
                for j in tl.static_range(CHUNK):
                    is_token = first + j < tokens
                    qk_taps = moved_on(x_qk[j], qk_taps, is_token, EVEN)
                    vz_taps = moved_on(x_vz[j], vz_taps, is_token, EVEN)
                    b_qk = normed(activated(convolved(qk_taps, w_qk, conv), conv), scale, step)
                    b_vz = values_and_gates(vz_taps, w_v, b_norm, m_v, conv, BLOCK_V)
                    qk = qk + (b_qk,)
                    vz = vz + (b_vz,)
                if step.WRITES:
                    if first + CHUNK >= tokens:
                        # All threads have read what is now written: those that share a channel, and other programs.
                        tl.debug_barrier()
                        if SHARED:
                            p_count = p_counts + slot * UPDATERS + i_g // step.GROUP
                            # What q and k were normed by was summed behind a barrier, and so has been read: no need
                            # to wait for all that is under way.
                            if step.EARLY and step.QK_NORM:
                                tl.atomic_add(p_count, 1, sem="relaxed")
                            else:
                                tl.atomic_add(p_count, 1, sem="release")
                        else:
                            store_taps(qk_taps, p_slot, o_qk, m_qk, conv)
                        store_taps(vz_taps, p_slot, o_vz, m_v, conv)
                if TOKENS > CHUNK:
                    # The next chunk's inputs are on their way while this one is computed.
                    x_qk = load_rows(p_x, p_path, first + CHUNK, tokens, c_qk, m_qk, strides.qkvz, conv, step)
                    x_vz = load_rows(p_x, p_path, first + CHUNK, tokens, c_vz, m_vz, strides.qkvz, conv, step)
                    b, a = load_gates(p_ba, p_path, first + CHUNK, tokens, c_b, c_a, strides.ba, conv, step)
                outs = ()
                for j in tl.static_range(CHUNK):
                    b_q, b_k = halves(qk[j])
                    b_v, b_gate = halves(vz[j])
                    token = Token(b_q, b_k, b_v, at_place(decays, j, step), at_place(betas, j, step))
                    b_next, b_o = delta_step(b_S, token, step, p_out is not None, TOGETHER, zero)
                    if not PACKED:
                        b_S = b_next
                    if EARLY and not DEFER and step.WRITES and j == CHUNK - 1:
                        store_state(p_tile, m_tile, b_next, sizes, step)
                    if p_out is not None and not DEFER:
                        i_t = row_of_token(p_path, first + j, tokens, TOKENS)
                        m_o = (o_v < HV) & (EVEN or first + j < tokens)
                        store_output(out, b_o, b_gate, i_t, o_v, m_o, eps, p_norm is not None, sizes, step)
                    outs = outs + ((b_o, b_gate),)
                if DEFER:
                    # Norms wait for all threads; stores, begun before them, for none.
                    if step.WRITES:
                        store_state(p_tile, m_tile, b_next, sizes, step)
                    for j in tl.static_range(CHUNK):
                        b_o, b_gate = outs[j]
                        i_t = row_of_token(p_path, first + j, tokens, TOKENS)
                        m_o = (o_v < HV) & (EVEN or first + j < tokens)
                        store_output(out, b_o, b_gate, i_t, o_v, m_o, eps, p_norm is not None, sizes, step)
            if step.WRITES and not EARLY:
                store_state(p_tile, m_tile, b_S, sizes, step)
            if PARTS:
                # Drafts may be verified at the same time from one slot.
                p_count = p_counts + i_n * (NQK * R) + head
                if step.WRITES:
                    p_count = p_counts + tl.cast(num_slots, tl.int64) * UPDATERS + slot * (NQK * R) + head
                norm_by_the_last(out, p_count, p_x + c_z, strides.qkvz, p_norm, eps, sizes, conv, step)
    elif p_out is not None:
        p_out += i_n * TOKENS * strides.out + head * strides.out_head
        store_nothing(p_out, strides.out, TOKENS, sizes)
