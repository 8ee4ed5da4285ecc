"""Device code: the projection split fused with a causal convolution's update.

Names as in split.py. States of any strides go tap by tap; those in vectors by threads of four adjacent channels.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.layer import quick_sigmoid
from gdn_split.kernels.split import Rows, columns_of_group, load_weights, move_b_and_a, wait_for_inputs


class Convolution(NamedTuple):
    """Constants of the convolution: strides of state and weight, tokens of a sequence, and channels of a block.

    FOURS: whether a thread takes four adjacent channels, of a state of three taps. BLOCK_Z: columns of z in a block.
    HOPPER: whether the instructions of sm_90 are there.
    """

    S_CHANNEL: int
    S_TAP: int
    S_WEIGHT_CHANNEL: int
    S_WEIGHT_TAP: int
    TOKENS: int
    WIDTH: int
    HAS_BIAS: bool
    SILU: bool
    BLOCK: int
    BLOCK_Z: int = 0
    FOURS: bool = False
    HOPPER: bool = False


@triton.jit
def taps_of(b_w, BLOCK: tl.constexpr):
    """The columns of a tile [BLOCK, 4], last first, each [1, BLOCK] float32."""
    even, odd = tl.split(tl.reshape(b_w, [BLOCK, 2, 2]))
    w_3, w_1 = tl.split(even)
    w_2, w_0 = tl.split(odd)
    return (
        w_0[None, :].to(tl.float32),
        w_1[None, :].to(tl.float32),
        w_2[None, :].to(tl.float32),
        w_3[None, :].to(tl.float32),
    )


@triton.jit
def as_loaded(b, SAME: tl.constexpr):
    """An input: of the state's dtype as it was loaded, since so it is stored; else in float32, as it is multiplied."""
    if not SAME:
        b = b.to(tl.float32)
    return b


@triton.jit
def convolve_rows(x, y, o_row, o_c, m_row, m_state, taps, weights, b_bias, conv: tl.constexpr):
    """Convolve TOKENS rows from o_row on; what the state keeps of them. Where m_state is not set, results are 0.

    What masks leave out of loads is undefined, and is neither put out nor kept.
    x_0 of `taps` is the current input, x_1 the newest before it, and so on; w_i of `weights` is the weight on x_i.
    """
    TOKENS: tl.constexpr = conv.TOKENS
    WIDTH: tl.constexpr = conv.WIDTH
    x_0, x_1, x_2, x_3 = taps
    w_0, w_1, w_2, w_3 = weights
    for t in range(TOKENS):
        acc = x_0.to(tl.float32) * w_0 + x_1.to(tl.float32) * w_1
        if WIDTH > 2:
            acc += x_2.to(tl.float32) * w_2
        if WIDTH > 3:
            acc += x_3.to(tl.float32) * w_3
            x_3 = x_2
        if conv.HAS_BIAS:
            acc += b_bias
        if conv.SILU:
            acc *= quick_sigmoid(acc, conv.HOPPER)
        acc = tl.where(m_state, acc, 0.0)
        tl.store(y.p + (o_row + t) * y.stride + o_c, acc.to(y.p.dtype.element_ty), mask=m_row)
        if WIDTH > 2:
            x_2 = x_1
        x_1 = x_0
        p_next = x.p + (o_row + t + 1) * x.stride + o_c
        x_0 = tl.load(p_next, mask=m_row & (t + 1 < TOKENS)).to(x_0.dtype)
    return x_1, x_2, x_3


@triton.jit
def convolve(x, y, p_state, p_weight, p_bias, o_row, m_seq, m_live, o_c, m_c, conv: tl.constexpr):
    """Advance the convolution of the channels o_c by TOKENS rows, for the sequences that start at rows o_row.

    x begins at what becomes channel 0, p_state [SEQUENCES, 1] points at channel 0 of each sequence's slot. Sequences
    that are not live get zeros and leave the state alone.
    """
    S_TAP: tl.constexpr = conv.S_TAP
    WIDTH: tl.constexpr = conv.WIDTH
    SAME: tl.constexpr = x.p.dtype.element_ty == p_state.dtype.element_ty
    m_state = m_live[:, None] & m_c[None, :]
    m_row = m_seq[:, None] & m_c[None, :]
    # What needs no slot is loaded first, to overlap with the dependent loads of slot and state.
    b_w = load_weights(p_weight, o_c, m_c, conv.S_WEIGHT_CHANNEL, conv.S_WEIGHT_TAP, WIDTH)
    b_bias = 0.0
    if conv.HAS_BIAS:
        b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    x_0 = as_loaded(tl.load(x.p + o_row[:, None] * x.stride + o_c[None, :], mask=m_row), SAME)
    p_1 = p_state + o_c.to(tl.int64)[None, :] * conv.S_CHANNEL + (WIDTH - 2) * S_TAP
    x_1 = as_loaded(tl.load(p_1, mask=m_state), SAME)
    x_2 = x_1
    x_3 = x_1
    if WIDTH > 2:
        x_2 = as_loaded(tl.load(p_1 - S_TAP, mask=m_state), SAME)
    if WIDTH > 3:
        x_3 = as_loaded(tl.load(p_1 - 2 * S_TAP, mask=m_state), SAME)
    taps, weights = (x_0, x_1, x_2, x_3), taps_of(b_w, conv.BLOCK)
    x_1, x_2, x_3 = convolve_rows(x, y, o_row[:, None], o_c[None, :], m_row, m_state, taps, weights, b_bias, conv)
    tl.store(p_1, x_1.to(p_state.dtype.element_ty), mask=m_state)
    if WIDTH > 2:
        tl.store(p_1 - S_TAP, x_2.to(p_state.dtype.element_ty), mask=m_state)
    if WIDTH > 3:
        tl.store(p_1 - 2 * S_TAP, x_3.to(p_state.dtype.element_ty), mask=m_state)


@triton.jit
def apart(b):
    """The four elements along the last dimension of b [A, B, 4], each [A, B]."""
    even, odd = tl.split(tl.reshape(b, [b.shape[0], b.shape[1], 2, 2]))
    b_0, b_2 = tl.split(even)
    b_1, b_3 = tl.split(odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def together(b_0, b_1, b_2, b_3):
    """The inverse of apart."""
    b = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))
    return tl.reshape(b, [b_0.shape[0], b_0.shape[1], 4])


@triton.jit
def weights_of_fours(p_weight, S_CHANNEL: tl.constexpr, S_TAP: tl.constexpr):
    """The weights w_i on x_i of the channels a, b, c and d of each four, whose first weights p_weight points at."""
    p_tap = p_weight + tl.arange(0, 4)[None, None, :] * S_TAP
    a_3, a_2, a_1, a_0 = apart(tl.load(p_tap).to(tl.float32))
    b_3, b_2, b_1, b_0 = apart(tl.load(p_tap + S_CHANNEL).to(tl.float32))
    c_3, c_2, c_1, c_0 = apart(tl.load(p_tap + 2 * S_CHANNEL).to(tl.float32))
    d_3, d_2, d_1, d_0 = apart(tl.load(p_tap + 3 * S_CHANNEL).to(tl.float32))
    return (
        together(a_0, b_0, c_0, d_0),
        together(a_1, b_1, c_1, d_1),
        together(a_2, b_2, c_2, d_2),
        together(a_3, b_3, c_3, d_3),
    )


@triton.jit
def load_fours(p_first, mask, conv: tl.constexpr):
    """x_1, x_2 and x_3 of the channels a, b, c and d of each four: three vectors, of taps or of channels."""
    p = p_first + tl.arange(0, 4)[None, None, :]
    if conv.S_CHANNEL == 1:
        x_1 = tl.load(p + 2 * conv.S_TAP, mask=mask)
        x_2 = tl.load(p + conv.S_TAP, mask=mask)
        x_3 = tl.load(p, mask=mask)
    else:
        a_3, a_2, a_1, b_3 = apart(tl.load(p, mask=mask))
        b_2, b_1, c_3, c_2 = apart(tl.load(p + 4, mask=mask))
        c_1, d_3, d_2, d_1 = apart(tl.load(p + 8, mask=mask))
        x_1 = together(a_1, b_1, c_1, d_1)
        x_2 = together(a_2, b_2, c_2, d_2)
        x_3 = together(a_3, b_3, c_3, d_3)
    return x_1, x_2, x_3


@triton.jit
def store_fours(p_first, x_1, x_2, x_3, mask, conv: tl.constexpr):
    p = p_first + tl.arange(0, 4)[None, None, :]
    dtype: tl.constexpr = p_first.dtype.element_ty
    if conv.S_CHANNEL == 1:
        tl.store(p + 2 * conv.S_TAP, x_1.to(dtype), mask=mask)
        tl.store(p + conv.S_TAP, x_2.to(dtype), mask=mask)
        tl.store(p, x_3.to(dtype), mask=mask)
    else:
        a_1, b_1, c_1, d_1 = apart(x_1.to(dtype))
        a_2, b_2, c_2, d_2 = apart(x_2.to(dtype))
        a_3, b_3, c_3, d_3 = apart(x_3.to(dtype))
        tl.store(p, together(a_3, a_2, a_1, b_3), mask=mask)
        tl.store(p + 4, together(b_2, b_1, c_3, c_2), mask=mask)
        tl.store(p + 8, together(c_1, d_3, d_2, d_1), mask=mask)


@triton.jit
def load_slots(p_slots, o_seq, m_seq, num_slots):
    """The sequences' slots, and which are live: one outside the pool counts as padding."""
    o_slot = tl.load(p_slots + o_seq, mask=m_seq, other=-1).to(tl.int64)
    m_live = (o_slot >= 0) & (o_slot < num_slots)
    return tl.where(m_live, o_slot, 0), m_live


class States(NamedTuple):
    """The convolution's states: their address, how far slots are apart and how many there are; sequences' slots."""

    p: Any
    stride: Any
    count: Any
    p_slots: Any
    sequences: Any


@triton.jit
def convolve_fours(
    x, y, states, p_weight, p_bias, i_n, first, conv: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """As convolve, of the BLOCK channels from `first` on and of SEQUENCES sequences from i_n on, one after the other.

    The three taps of a channel lie together, and all channels, or the channels of each tap. A thread takes four
    adjacent channels, whose taps are three vectors either way, so that nothing passes between threads: nor do weights,
    which is why sequences are a dimension of a block only where one has too few channels for a warp.
    """
    TOGETHER: tl.constexpr = min(SEQUENCES, max(1, 128 // conv.BLOCK))
    TOKENS: tl.constexpr = conv.TOKENS
    SAME: tl.constexpr = x.p.dtype.element_ty == states.p.dtype.element_ty
    o_four = (first + 4 * tl.arange(0, conv.BLOCK // 4))[None, :, None]
    o_c = o_four + tl.arange(0, 4)[None, None, :]
    o_first = o_four.to(tl.int64)
    found = ()
    for s in tl.static_range(SEQUENCES // TOGETHER):
        o_seq = i_n + s * TOGETHER + tl.arange(0, TOGETHER)
        m_seq = o_seq < states.sequences
        o_slot, m_live = load_slots(states.p_slots, o_seq, m_seq, states.count)
        p_first = states.p + (o_slot * states.stride)[:, None, None] + o_first * conv.S_CHANNEL
        found = found + (((o_seq * TOKENS)[:, None, None], m_seq[:, None, None], m_live[:, None, None], p_first),)
    weights = weights_of_fours(p_weight + o_first * conv.S_WEIGHT_CHANNEL, conv.S_WEIGHT_CHANNEL, conv.S_WEIGHT_TAP)
    b_bias = 0.0
    if conv.HAS_BIAS:
        b_bias = tl.load(p_bias + o_c).to(tl.float32)
    # Of all sequences all is asked for before the first is computed.
    inputs = ()
    for s in tl.static_range(SEQUENCES // TOGETHER):
        o_row, m_row, m_state, p_first = found[s]
        x_0 = tl.load(x.p + o_row * x.stride + o_c, mask=m_row)
        x_1, x_2, x_3 = load_fours(p_first, m_state, conv)
        inputs = inputs + ((x_0, x_1, x_2, x_3),)
    for s in tl.static_range(SEQUENCES // TOGETHER):
        o_row, m_row, m_state, p_first = found[s]
        x_0, x_1, x_2, x_3 = inputs[s]
        taps = (as_loaded(x_0, SAME), as_loaded(x_1, SAME), as_loaded(x_2, SAME), as_loaded(x_3, SAME))
        x_1, x_2, x_3 = convolve_rows(x, y, o_row, o_c, m_row, m_state, taps, weights, b_bias, conv)
        store_fours(p_first, x_1, x_2, x_3, m_state, conv)


@triton.jit
def copy_z(
    qkvz, z, p_slots, i_p, sequences, num_slots, sizes: tl.constexpr, conv: tl.constexpr, SEQUENCES: tl.constexpr
):  # fmt: skip
    """BLOCK_Z columns of z of SEQUENCES sequences: those of program i_p of such."""
    V: tl.constexpr = sizes.R * sizes.HV
    TILES: tl.constexpr = (V + conv.BLOCK_Z - 1) // conv.BLOCK_Z
    i_g = i_p // TILES % sizes.NQK
    o_seq = (i_p // (TILES * sizes.NQK)).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    m_seq = o_seq < sequences
    _, m_live = load_slots(p_slots, o_seq, m_seq, num_slots)
    _, _, _, c_z = columns_of_group(i_g, sizes)
    o_z = i_p % TILES * conv.BLOCK_Z + tl.arange(0, conv.BLOCK_Z)[None, :]
    m_z = m_seq[:, None] & (o_z < V)
    for t in range(conv.TOKENS):
        o_row = (o_seq * conv.TOKENS + t)[:, None]
        b_z = tl.load(qkvz.p + o_row * qkvz.stride + c_z + o_z, mask=m_z)
        tl.store(z.p + o_row * z.stride + i_g * V + o_z, tl.where(m_live[:, None], b_z, 0), mask=m_z)


@triton.jit(do_not_specialize=["sequences", "num_slots"])
def split_and_convolve(
    p_qkvz, p_ba, p_state, p_weight, p_bias, p_slots, p_qkv, p_z, p_b, p_a, sequences, num_slots, strides,
    sizes: tl.constexpr, conv: tl.constexpr, SEQUENCES: tl.constexpr, ROWS_BA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program takes SEQUENCES sequences through BLOCK columns of q, k or v, or more of z, or ROWS_BA rows through
    b and a.

    q, k and v share their instructions at different columns: a kernel this short is slowed by instruction fetch. What
    takes longest is started first.
    """
    NQK: tl.constexpr = sizes.NQK
    HQ: tl.constexpr = sizes.HQ
    V: tl.constexpr = sizes.R * sizes.HV
    BLOCK: tl.constexpr = conv.BLOCK
    TOKENS: tl.constexpr = conv.TOKENS
    TILES_Q: tl.constexpr = (HQ + BLOCK - 1) // BLOCK
    TILES_V: tl.constexpr = (V + BLOCK - 1) // BLOCK
    TILES_Z: tl.constexpr = (V + conv.BLOCK_Z - 1) // conv.BLOCK_Z
    TILES: tl.constexpr = 2 * TILES_Q + TILES_V
    wait_for_inputs(DEPENDENT)
    i_p = tl.program_id(0)
    rows = sequences.to(tl.int64) * TOKENS
    groups = tl.cdiv(sequences, SEQUENCES) * NQK
    if i_p < groups * TILES:
        i_t = i_p % TILES
        i_g = i_p // TILES % NQK
        i_n = (i_p // (TILES * NQK)).to(tl.int64) * SEQUENCES
        c_q, c_k, c_v, c_z = columns_of_group(i_g, sizes)
        is_k = i_t >= TILES_Q
        is_v = i_t >= 2 * TILES_Q
        c_x = tl.where(is_v, c_v, tl.where(is_k, c_k, c_q))
        c_y = tl.where(is_v, 2 * NQK * HQ + i_g * V, tl.where(is_k, NQK + i_g, i_g) * HQ)
        c_tile = (i_t - tl.where(is_v, 2 * TILES_Q, tl.where(is_k, TILES_Q, 0))) * BLOCK
        x, y = Rows(p_qkvz + (c_x - c_y), strides.qkvz), Rows(p_qkv, strides.qkv)
        if conv.FOURS:
            states = States(p_state, strides.slot, num_slots, p_slots, sequences)
            convolve_fours(x, y, states, p_weight, p_bias, i_n, c_y + c_tile, conv, SEQUENCES)
        else:
            o_seq = i_n + tl.arange(0, SEQUENCES)
            m_seq = o_seq < sequences
            o_slot, m_live = load_slots(p_slots, o_seq, m_seq, num_slots)
            p_slot = p_state + (o_slot * strides.slot)[:, None]
            o_tile = tl.arange(0, BLOCK)
            # A mask that is provably true where tiles fit, so that loads stay 16 bytes wide.
            if HQ % BLOCK == 0 and V % BLOCK == 0:
                m_c = o_tile < BLOCK
            else:
                m_c = c_tile + o_tile < tl.where(is_v, V, HQ)
            o_c = c_y + c_tile + o_tile
            convolve(x, y, p_slot, p_weight, p_bias, o_seq * TOKENS, m_seq, m_live, o_c, m_c, conv)
    elif i_p < groups * (TILES + TILES_Z):
        qkvz, z = Rows(p_qkvz, strides.qkvz), Rows(p_z, strides.z)
        copy_z(qkvz, z, p_slots, i_p - groups * TILES, sequences, num_slots, sizes, conv, SEQUENCES)
    else:
        o_row_ba = (i_p - groups * (TILES + TILES_Z)).to(tl.int64) * ROWS_BA + tl.arange(0, ROWS_BA)
        m_row_ba = o_row_ba < rows
        _, m_live_ba = load_slots(p_slots, o_row_ba // TOKENS, m_row_ba, num_slots)
        ba, b, a = Rows(p_ba, strides.ba), Rows(p_b, strides.b), Rows(p_a, strides.a)
        move_b_and_a(ba, b, a, o_row_ba, m_row_ba, m_live_ba, sizes, False)
