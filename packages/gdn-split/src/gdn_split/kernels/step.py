"""Device code: a decode step of Gated DeltaNet from the projections to the gated outputs, in one launch.

A program takes one sequence and some V heads of one QK head, and holds a head's state (or a slice of its Dv) in
registers while its tokens pass: the state crosses memory once each way. Drafts are verified by the same steps without
the writes, and committed by them without the outputs.

With S the state before a token, decayed by g: ``S^T k`` and ``S^T q`` come out of one pass over it, so that the output
``(g S + k u^T)^T q = g S^T q + (k . q) u`` does not wait for the new state.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.split import columns_of_b_and_a, columns_of_group, load_weights, wait_for_inputs


class Step(NamedTuple):
    """Constants of a step: blocks of Dk and Dv, and the state's strides along these.

    K_INNER: whether Dk, and not Dv, is the state's inner dimension. RUN: how it is cut, see below.
    """

    BLOCK_K: int
    BLOCK_V: int
    S_K: int
    S_V: int
    K_INNER: bool
    RUN: int
    QK_NORM: bool
    WRITES: bool


class StepStrides(NamedTuple):
    """Row strides of projections, strides of the states' slots and heads, and of the results' rows and heads."""

    qkvz: Any
    ba: Any
    conv_slot: Any
    slot: Any
    head: Any
    out: Any
    out_head: Any


class Taps(NamedTuple):
    """A block of channels on its way through the convolution: the current input and those before it, newest first."""

    x_0: Any
    x_1: Any
    x_2: Any
    x_3: Any


class Filter(NamedTuple):
    """The convolution of a block of channels: w_i is the weight on x_i."""

    w_0: Any
    w_1: Any
    w_2: Any
    w_3: Any
    bias: Any


class Out(NamedTuple):
    """A head's rows of outputs and, before the norm, of what is left in memory meanwhile."""

    p: Any
    stride: Any
    p_raw: Any
    s_raw: Any


class Gate(NamedTuple):
    """The learned numbers of a V head."""

    rate: Any
    dt_bias: Any


@triton.jit
def load_filter(p_weight, p_bias, o_c, m_c, conv: tl.constexpr, BLOCK: tl.constexpr):
    b_w = load_weights(p_weight, o_c, m_c, conv.S_WEIGHT_CHANNEL, conv.S_WEIGHT_TAP, conv.WIDTH).to(tl.float32)
    even, odd = tl.split(tl.reshape(b_w, [BLOCK, 2, 2]))
    w_3, w_1 = tl.split(even)
    w_2, w_0 = tl.split(odd)
    bias = w_0
    if p_bias is not None:
        bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    return Filter(w_0, w_1, w_2, w_3, bias)


@triton.jit
def two_blocks(o_1, o_2, c_1, c_2, width, BLOCK: tl.constexpr):
    """Channels, columns of mixed_qkvz and mask of two blocks, one behind the other, from their first ones on."""
    o = tl.arange(0, 2 * BLOCK)
    second = o >= BLOCK
    o = o % BLOCK
    return tl.where(second, o_2, o_1) + o, tl.where(second, c_2, c_1) + o, o < width


@triton.jit
def halves(b, BLOCK: tl.constexpr):
    """The two blocks, each by itself."""
    return tl.split(tl.trans(tl.reshape(b, [2, BLOCK])))


@triton.jit
def load_taps(x, c_x, m_x, p_slot, o_c, m_c, conv: tl.constexpr):
    """The first token's input, at columns c_x of the row x, and the state's: channels o_c."""
    x_0 = tl.load(x + c_x, mask=m_x, other=0.0).to(tl.float32)
    p_1 = p_slot + o_c.to(tl.int64) * conv.S_CHANNEL + (conv.WIDTH - 2) * conv.S_TAP
    x_1 = tl.load(p_1, mask=m_c, other=0.0).to(tl.float32)
    x_2 = x_1
    x_3 = x_1
    if conv.WIDTH > 2:
        x_2 = tl.load(p_1 - conv.S_TAP, mask=m_c, other=0.0).to(tl.float32)
    if conv.WIDTH > 3:
        x_3 = tl.load(p_1 - 2 * conv.S_TAP, mask=m_c, other=0.0).to(tl.float32)
    return Taps(x_0, x_1, x_2, x_3)


@triton.jit
def store_taps(taps, p_slot, o_c, m_c, conv: tl.constexpr):
    """The state after the last token."""
    dtype: tl.constexpr = p_slot.dtype.element_ty
    p_1 = p_slot + o_c.to(tl.int64) * conv.S_CHANNEL + (conv.WIDTH - 2) * conv.S_TAP
    tl.store(p_1, taps.x_0.to(dtype), mask=m_c)
    if conv.WIDTH > 2:
        tl.store(p_1 - conv.S_TAP, taps.x_1.to(dtype), mask=m_c)
    if conv.WIDTH > 3:
        tl.store(p_1 - 2 * conv.S_TAP, taps.x_2.to(dtype), mask=m_c)


@triton.jit
def advance_taps(taps, x, c_x, m):
    """The next token's input, at column c_x of the row x if there is one, and those before it."""
    x_0 = tl.load(x + c_x, mask=m, other=0.0).to(tl.float32)
    return Taps(x_0, taps.x_0, taps.x_1, taps.x_2)


@triton.jit
def convolved(taps, weights, conv: tl.constexpr):
    acc = taps.x_0 * weights.w_0 + taps.x_1 * weights.w_1
    if conv.WIDTH > 2:
        acc += taps.x_2 * weights.w_2
    if conv.WIDTH > 3:
        acc += taps.x_3 * weights.w_3
    if conv.HAS_BIAS:
        acc += weights.bias
    if conv.SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    return acc


@triton.jit
def decay_of(a, gate):
    """exp(g), g = -exp(A_log) softplus(a + dt_bias). Past 20 softplus is its argument, to float32's last place."""
    x = a + gate.dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.exp(-gate.rate * softplus)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


# A state's tile is [runs, outer dimension, RUN]: the inner dimension, Dk or Dv, is cut into runs, so that a row of
# threads reads a run at a time and holds few columns of many rows. Vectors over Dk and Dv are brought into its form.


@triton.jit
def along_inner(b, RUN: tl.constexpr):
    RUNS: tl.constexpr = b.shape[0] // RUN
    return tl.reshape(b, [RUNS, RUN])[:, None, :]


@triton.jit
def along_k(b_k, step: tl.constexpr):
    """A vector over Dk [BLOCK_K] beside the state's tile."""
    if step.K_INNER:
        b = along_inner(b_k, step.RUN)
    else:
        b = b_k[None, :, None]
    return b


@triton.jit
def along_v(b_v, step: tl.constexpr):
    """A vector over Dv [BLOCK_V] likewise."""
    if step.K_INNER:
        b = b_v[None, :, None]
    else:
        b = along_inner(b_v, step.RUN)
    return b


@triton.jit
def sum_over_k(b_S, step: tl.constexpr):
    """[BLOCK_V]; behind the tile's own dimensions there may be more."""
    BLOCK_V: tl.constexpr = step.BLOCK_V
    if step.K_INNER:
        b = tl.sum(tl.sum(b_S, axis=0), axis=1)
    else:
        b = tl.sum(b_S, axis=1)
        if len(b.shape) == 3:
            b = tl.reshape(b, [BLOCK_V, 2])
        else:
            b = tl.reshape(b, [BLOCK_V])
    return b


@triton.jit
def products(b_q, b_k):
    """q . q, k . k and q . k."""
    squares = tl.join(b_q * b_q, b_k * b_k)
    b = tl.join(squares, tl.join(b_q * b_k, b_q * b_k))
    own, cross = tl.split(tl.sum(b, axis=0))
    qq, kk = tl.split(own)
    qk, _ = tl.split(cross)
    return qq, kk, qk


@triton.jit
def tile_of_state(p_head, first_v, sizes: tl.constexpr, step: tl.constexpr):
    """Pointers to the tile of a head's state from column first_v of Dv on, and which of them lie in it."""
    RUN: tl.constexpr = step.RUN
    # Not by along_inner, so that the compiler sees what is contiguous.
    if step.K_INNER:
        RUNS: tl.constexpr = step.BLOCK_K // RUN
        o_k = tl.arange(0, RUNS)[:, None, None] * RUN + tl.arange(0, RUN)[None, None, :]
        o_v = first_v + tl.arange(0, step.BLOCK_V)[None, :, None]
    else:
        RUNS: tl.constexpr = step.BLOCK_V // RUN
        o_k = tl.arange(0, step.BLOCK_K)[None, :, None]
        o_v = first_v + tl.arange(0, RUNS)[:, None, None] * RUN + tl.arange(0, RUN)[None, None, :]
    return p_head + o_k * step.S_K + o_v * step.S_V, (o_k < sizes.HQ) & (o_v < sizes.HV)


@triton.jit
def load_state(p_tile, m, sizes: tl.constexpr, step: tl.constexpr):
    """No mask where none is needed."""
    if sizes.HQ % step.BLOCK_K or sizes.HV % step.BLOCK_V:
        b_S = tl.load(p_tile, mask=m, other=0.0)
    else:
        b_S = tl.load(p_tile)
    return b_S.to(tl.float32)


@triton.jit
def store_state(p_tile, m, b_S, sizes: tl.constexpr, step: tl.constexpr):
    if sizes.HQ % step.BLOCK_K or sizes.HV % step.BLOCK_V:
        tl.store(p_tile, b_S.to(p_tile.dtype.element_ty), mask=m)
    else:
        tl.store(p_tile, b_S.to(p_tile.dtype.element_ty))


@triton.jit
def delta_step(b_S, b_q, b_k, b_v, decay, beta, scale, step: tl.constexpr, HAS_OUT: tl.constexpr):
    """The state after a token, and what q reads of it."""
    if HAS_OUT:
        # Sums that can be taken together are: each costs barriers among all warps.
        qq, kk, qk = products(b_q, b_k)
        if step.QK_NORM:
            r_q = tl.rsqrt(qq + 1e-6) * scale
            r_k = tl.rsqrt(kk + 1e-6)
        else:
            r_q = scale
            r_k = 1.0
        b_k *= r_k
        b_q *= r_q
        if step.K_INNER:
            b_Sk = sum_over_k(b_S * along_k(b_k, step), step)
            b_Sq = sum_over_k(b_S * along_k(b_q, step), step)
        else:
            both = tl.join(b_S * along_k(b_q, step), b_S * along_k(b_k, step))
            b_Sq, b_Sk = tl.split(sum_over_k(both, step))
        b_u = beta * (b_v - decay * b_Sk)
        b_o = decay * b_Sq + (qk * r_q * r_k) * b_u
    else:
        if step.QK_NORM:
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, axis=0) + 1e-6)
        b_u = beta * (b_v - decay * sum_over_k(b_S * along_k(b_k, step), step))
        b_o = b_u
    return b_S * decay + along_k(b_k, step) * along_v(b_u, step), b_o


@triton.jit
def gated(b_o, b_z, p_norm, o_v, eps, sizes: tl.constexpr):
    """RMSNorm over a head's outputs, times the weight, times silu(z)."""
    b_w = tl.load(p_norm + o_v, mask=o_v < sizes.HV, other=0.0).to(tl.float32)
    mean = tl.sum(b_o * b_o, axis=0) / sizes.HV
    return b_o * tl.rsqrt(mean + eps) * b_w * b_z * sigmoid(b_z)


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
        b_o = gated(b_o, b_z, p_norm, o, eps, sizes)
        tl.store(out.p + i_t * out.stride + o, b_o.to(out.p.dtype.element_ty), mask=m)


@triton.jit
def store_nothing(p_out, s_out, TOKENS: tl.constexpr, sizes: tl.constexpr):
    """The outputs of padding: zeros."""
    BLOCK: tl.constexpr = sizes.BLOCK_V
    o = tl.arange(0, BLOCK)
    b_zero = tl.zeros([BLOCK], p_out.dtype.element_ty)
    for t in range(TOKENS):
        tl.store(p_out + tl.cast(t, tl.int64) * s_out + o, b_zero, mask=o < sizes.HV)


@triton.jit
def row_of_token(p_path, t, tokens, TOKENS: tl.constexpr):
    """Which of a sequence's rows is its token t: itself, or node t of the accepted path, clamped."""
    t = tl.minimum(t, tokens - 1)
    if p_path is not None:
        t = tl.minimum(tl.maximum(tl.load(p_path + t), 0), TOKENS - 1)
    return tl.cast(t, tl.int64)


@triton.jit
def is_last_to_read(p_arrived, counter, PROGRAMS: tl.constexpr):
    """Whether this is the last of PROGRAMS to come here, which puts the counter back to 0 for the next launch."""
    last = True
    if PROGRAMS > 1:
        last = tl.atomic_add(p_arrived + counter, 1, sem="acq_rel") == PROGRAMS - 1
        if last:
            tl.store(p_arrived + counter, 0)
    return last


@triton.jit(do_not_specialize=["num_slots", "path_length"])
def advance(
    p_qkvz, p_ba, p_conv, p_weight, p_bias, p_pool, p_slots, p_a_log, p_dt_bias, p_norm, p_accepted, p_path,
    p_arrived, p_raw, p_out, num_slots, path_length, scale, eps, strides, sizes: tl.constexpr, conv: tl.constexpr,
    step: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a sequence, or the first accepted ones, through one V head.

    p_out None: only the states advance. p_raw [rows, V heads, Dv] float32: where a head is taken in slices, its outputs
    before the norm. p_arrived [slots, QK heads], zeros before and after: of a QK head's programs the last to have read
    the convolution's state of q and k writes it.
    """
    NQK: tl.constexpr = sizes.NQK
    R: tl.constexpr = sizes.R
    HQ: tl.constexpr = sizes.HQ
    HV: tl.constexpr = sizes.HV
    TOKENS: tl.constexpr = conv.TOKENS
    BLOCK_K: tl.constexpr = step.BLOCK_K
    BLOCK_V: tl.constexpr = step.BLOCK_V
    SLICES: tl.constexpr = (HV + BLOCK_V - 1) // BLOCK_V
    wait_for_inputs(DEPENDENT)
    i_p = tl.program_id(0)
    head = i_p % (NQK * R)
    i_g = head // R
    i_n = (i_p // (NQK * R)).to(tl.int64)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    tokens = TOKENS
    if p_accepted is not None:
        accepted = tl.load(p_accepted + i_n)
        possible = (accepted >= 0) & (accepted <= path_length) & live
        tokens = tl.where(possible, accepted, 0).to(tl.int32)
    if p_path is not None:
        p_path += i_n * path_length
    p_x = p_qkvz + i_n * TOKENS * strides.qkvz
    p_ba += i_n * TOKENS * strides.ba
    if p_out is not None:
        p_out += i_n * TOKENS * strides.out + head * strides.out_head
    if live & (tokens > 0):
        c_q, c_k, c_v, c_z = columns_of_group(i_g, sizes)
        c_v += head % R * HV
        c_z += head % R * HV
        c_b, c_a = columns_of_b_and_a(head, sizes)
        p_slot = p_conv + slot * strides.conv_slot
        # q and k as one block, and v and z: of fewer elements than threads the compiler would load each as often as it
        # is used.
        o_qk, c_qk, m_qk = two_blocks(i_g * HQ, (NQK + i_g) * HQ, c_q, c_k, HQ, BLOCK_K)
        for i in range(SLICES):
            first_v = i * BLOCK_V
            first_channel = 2 * NQK * HQ + head * HV + first_v
            o_vz, c_vz, m_vz = two_blocks(first_channel, 0, c_v + first_v, c_z + first_v, HV - first_v, BLOCK_V)
            m_v = m_vz & (tl.arange(0, 2 * BLOCK_V) < BLOCK_V)
            if p_norm is None or SLICES > 1:
                m_vz = m_v
            x = p_x + row_of_token(p_path, 0, tokens, TOKENS) * strides.qkvz
            qk_taps = load_taps(x, c_qk, m_qk, p_slot, o_qk, m_qk, conv)
            vz_taps = load_taps(x, c_vz, m_vz, p_slot, o_vz, m_v, conv)
            rate = tl.exp(tl.load(p_a_log + head).to(tl.float32))
            gate = Gate(rate, tl.load(p_dt_bias + head).to(tl.float32))
            # The state last: it is on its way while the convolution is computed.
            p_tile, m_tile = tile_of_state(p_pool + slot * strides.slot + head * strides.head, first_v, sizes, step)
            b_S = load_state(p_tile, m_tile, sizes, step)
            for t in range(tokens):
                i_t = row_of_token(p_path, t, tokens, TOKENS)
                beta = sigmoid(tl.load(p_ba + i_t * strides.ba + c_b).to(tl.float32))
                decay = decay_of(tl.load(p_ba + i_t * strides.ba + c_a).to(tl.float32), gate)
                # Loaded for each token: kept, they would cost registers that the state needs.
                w_qk = load_filter(p_weight, p_bias, o_qk, m_qk, conv, 2 * BLOCK_K)
                w_v = load_filter(p_weight, p_bias, o_vz, m_v, conv, 2 * BLOCK_V)
                b_q, b_k = halves(convolved(qk_taps, w_qk, conv), BLOCK_K)
                b_v, b_z = halves(tl.where(m_v, convolved(vz_taps, w_v, conv), vz_taps.x_0), BLOCK_V)
                if step.WRITES:
                    if t == tokens - 1:
                        # All threads have read what is now written: those that share a channel, and other programs.
                        tl.debug_barrier()
                        store_taps(vz_taps, p_slot, o_vz, m_v, conv)
                        if i == SLICES - 1:
                            if is_last_to_read(p_arrived, slot * NQK + i_g, R):
                                store_taps(qk_taps, p_slot, o_qk, m_qk, conv)
                x = p_x + row_of_token(p_path, t + 1, tokens, TOKENS) * strides.qkvz
                more = t + 1 < tokens
                b_S, b_o = delta_step(b_S, b_q, b_k, b_v, decay, beta, scale, step, p_out is not None)
                if step.WRITES:
                    if t == tokens - 1:
                        store_state(p_tile, m_tile, b_S, sizes, step)
                if p_out is not None:
                    o_v = first_v + tl.arange(0, BLOCK_V)
                    if p_norm is not None and SLICES > 1:
                        p_head = p_raw + ((i_n * TOKENS + i_t) * (NQK * R) + head) * HV
                        tl.store(p_head + o_v, b_o, mask=o_v < HV)
                    else:
                        if p_norm is not None:
                            b_o = gated(b_o, b_z, p_norm, o_v, eps, sizes)
                        tl.store(p_out + i_t * strides.out + o_v, b_o.to(p_out.dtype.element_ty), mask=o_v < HV)
                qk_taps = advance_taps(qk_taps, x, c_qk, m_qk & more)
                vz_taps = advance_taps(vz_taps, x, c_vz, m_vz & more)
        if p_norm is not None and SLICES > 1:
            out = Out(p_out, strides.out, p_raw + (i_n * TOKENS * (NQK * R) + head) * HV, NQK * R * HV)
            norm_of_slices(out, p_x + c_z, strides.qkvz, p_norm, tokens, eps, sizes)
    elif p_out is not None:
        store_nothing(p_out, strides.out, TOKENS, sizes)
