"""Device code: what the kernels of a Gated DeltaNet layer's tokens share: convolution, gates, delta rule, norm.

With S the state before a token, decayed by g: ``S^T k`` and ``S^T q`` come out of one pass over it, so that the output
``(g S + k u^T)^T q = g S^T q + (k . q) u`` does not wait for the new state.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.split import load_weights


class Step(NamedTuple):
    """Constants of a step: blocks of Dk and Dv, and the state's strides along these.

    K_INNER: whether Dk, and not Dv, is the state's inner dimension. RUN: how it is cut, see below. GROUP: the QK heads
    whose inputs one program keeps.
    """

    BLOCK_K: int
    BLOCK_V: int
    S_K: int
    S_V: int
    K_INNER: bool
    RUN: int
    QK_NORM: bool
    WRITES: bool
    GROUP: int


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
    return acc


@triton.jit
def activated(b, conv: tl.constexpr):
    if conv.SILU:
        b = b * sigmoid(b)
    return b


@triton.jit
def values_and_gates(taps, weights, b_norm, m_v, conv: tl.constexpr, BLOCK: tl.constexpr):
    """Of a block of v and z: v convolved, and the norm's weight times silu(z)."""
    b = tl.where(m_v, convolved(taps, weights, conv), taps.x_0)
    if conv.SILU:
        b *= sigmoid(b)
    else:
        b *= tl.where(m_v, 1.0, sigmoid(b))
    return halves(b * b_norm, BLOCK)


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
def gated(b_o, b_gate, eps, sizes: tl.constexpr):
    """RMSNorm over a head's outputs, b_gate being the weight times silu(z)."""
    mean = tl.sum(b_o * b_o, axis=0) / sizes.HV
    return b_o * tl.rsqrt(mean + eps) * b_gate
