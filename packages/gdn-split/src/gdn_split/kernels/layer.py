"""Device code: what the kernels of a Gated DeltaNet layer's tokens share: convolution, gates, delta rule, norm.

A state stays in registers while tokens pass.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.split import load_weights


class Step(NamedTuple):
    """Constants of a step: blocks of Dk and Dv, and the state's strides along these.

    SLICES: of BLOCK_V columns in a head, each of which another program takes.
    K_INNER: whether Dk, and not Dv, is the state's inner dimension. RUN, LANES: how a tile is cut, see below. GROUP: QK
    heads whose inputs one program keeps. CHUNK: tokens whose inputs are loaded together. AHEAD: how many programs later
    what a program fetches into the L2 cache is used; 0: it fetches nothing. EARLY: whether the state is
    written before the outputs are normed. STREAMS: whether what is written of it is the first to leave the L2 cache.
    FIRST: whether all is loaded before any branch, and the state before anything is computed.
    """

    BLOCK_K: int
    BLOCK_V: int
    SLICES: int
    S_K: int
    S_V: int
    K_INNER: bool
    RUN: int
    LANES: int
    QK_NORM: bool
    WRITES: bool
    GROUP: int
    CHUNK: int
    AHEAD: int
    EARLY: bool
    STREAMS: bool
    FIRST: bool


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


class Token(NamedTuple):
    """What a token does to a head's state, and how it is read: q and k normed, the decay and beta of the head."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any


class Gate(NamedTuple):
    """The learned numbers of a V head."""

    a_log: Any
    dt_bias: Any


@triton.jit
def load_filter_of_two(p_weight, p_bias, o_1, o_2, width, o_c, m_c, conv: tl.constexpr, BLOCK: tl.constexpr):
    """The filter of channels o_c of two blocks of a width, which begin at o_1 and o_2.

    Weights that lie in one row are loaded as one: a thread then takes as many channels of them as of the inputs, which
    else would be moved between threads.
    """
    if conv.WIDTH == 4 and conv.S_WEIGHT_CHANNEL == 4 and conv.S_WEIGHT_TAP == 1:
        o_w, _, m_w = two_blocks(4 * o_1, 4 * o_2, 0, 0, 4 * width, 4 * BLOCK)
        b_w = tl.reshape(tl.load(p_weight + o_w, mask=m_w, other=0.0), [2 * BLOCK, 4])
    else:
        b_w = load_weights(p_weight, o_c, m_c, conv.S_WEIGHT_CHANNEL, conv.S_WEIGHT_TAP, conv.WIDTH)
    return filter_of_weights(b_w.to(tl.float32), p_bias, o_c, m_c, 2 * BLOCK)


@triton.jit
def load_filter(p_weight, p_bias, o_c, m_c, conv: tl.constexpr, BLOCK: tl.constexpr):
    b_w = load_weights(p_weight, o_c, m_c, conv.S_WEIGHT_CHANNEL, conv.S_WEIGHT_TAP, conv.WIDTH).to(tl.float32)
    return filter_of_weights(b_w, p_bias, o_c, m_c, BLOCK)


@triton.jit
def filter_of_weights(b_w, p_bias, o_c, m_c, BLOCK: tl.constexpr):
    """Of weights [BLOCK, 4]."""
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
def halves(b):
    """The two blocks of [2, BLOCK], each by itself."""
    return tl.split(tl.trans(b))


@triton.jit
def load_taps(p_slot, o_c, m_c, conv: tl.constexpr):
    """The state's inputs of channels o_c, the newest of them as x_0."""
    p_1 = p_slot + o_c.to(tl.int64) * conv.S_CHANNEL + (conv.WIDTH - 2) * conv.S_TAP
    x_1 = tl.load(p_1, mask=m_c, other=0.0).to(tl.float32)
    x_2 = x_1
    x_3 = x_1
    if conv.WIDTH > 2:
        x_2 = tl.load(p_1 - conv.S_TAP, mask=m_c, other=0.0).to(tl.float32)
    if conv.WIDTH > 3:
        x_3 = tl.load(p_1 - 2 * conv.S_TAP, mask=m_c, other=0.0).to(tl.float32)
    return Taps(x_1, x_2, x_3, x_3)


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
    """Of a block of v and z, [2, BLOCK]: v convolved, and the norm's weight times silu(z)."""
    b = tl.where(m_v, convolved(taps, weights, conv), taps.x_0)
    if conv.SILU:
        b *= sigmoid(b)
    else:
        b *= tl.where(m_v, 1.0, sigmoid(b))
    return tl.reshape(b * b_norm, [2, BLOCK])


@triton.jit
def exponential(x):
    """exp(x) to a unit in the last place; a GPU's own, which is of base 2, is given a rounded x / ln 2."""
    # Beyond these it is 0 or infinite in float32.
    x = tl.where(x < -105.0, -105.0, tl.where(x > 89.0, 89.0, x))
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts, of which the first has few enough digits for exact products.
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    series = 1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))))
    # 2^n in two factors: n may lie past the exponents of float32's normal numbers.
    first = n.to(tl.int32) >> 1
    second = n.to(tl.int32) - first
    value = (1.0 + (r + (r * r) * series)) * ((first + 127) << 23).to(tl.float32, bitcast=True)
    return value * ((second + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as precise where it is small: log(1 + t) = 2 artanh(t / (2 + t)), t being 1 at most."""
    t = exponential(-tl.abs(x))
    s = 2.0 * t / (2.0 + t)
    z = 0.25 * s * s
    series = 1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15))))))
    return tl.where(x > 0.0, x, 0.0) + (s + s * z * series)


@triton.jit
def log_decay(a, gate):
    """g = -exp(A_log) softplus(a + dt_bias)."""
    return -exponential(gate.a_log) * softplus(a + gate.dt_bias)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid_and_slope(x):
    """1 / (1 + exp(-x)) and its derivative, both to a few units in the last place however small they are."""
    t = exponential(-tl.abs(x))
    d = 1.0 + t
    r = 1.0 / d
    # A GPU's quotient is off by up to two such units: a step of Newton's.
    r = tl.fma(r, tl.fma(-d, r, 1.0), r)
    return tl.where(x < 0.0, t * r, r), t * r * r


@triton.jit
def quick_sigmoid(x, HOPPER: tl.constexpr):
    """1 / (1 + exp(-x)), on sm_90 without what is done for denormal numbers: a fifth of a walk's instructions."""
    if HOPPER:
        b = tl.inline_asm_elementwise(
            """
            {
                .reg .f32 t;
                mul.f32 t, $1, 0fBFB8AA3B;
                ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        b = sigmoid(x)
    return b


# A state's tile. Where Dk is the inner dimension: [runs of Dk, Dv, RUN]. Where Dv is: [Dk / LANES, runs of Dv, LANES,
# RUN], of which a warp holds LANES rows of a run at a time, and other warps other runs. Either way what is summed over
# Dk lies within a warp, most of it within a thread. Vectors over Dk and Dv are converted to the tile's layout.


@triton.jit
def along_k(b_k, step: tl.constexpr):
    """A vector over Dk [BLOCK_K] beside the state's tile."""
    if step.K_INNER:
        b = tl.reshape(b_k, [step.BLOCK_K // step.RUN, step.RUN])[:, None, :]
    else:
        b = tl.reshape(b_k, [step.BLOCK_K // step.LANES, step.LANES])[:, None, :, None]
    return b


@triton.jit
def as_values(b_v, step: tl.constexpr):
    """A vector over Dv [BLOCK_V] in the form that sums over Dk have."""
    if step.K_INNER:
        b = b_v
    else:
        b = tl.reshape(b_v, [step.BLOCK_V // step.RUN, step.RUN])
    return b


@triton.jit
def offsets_of_values(step: tl.constexpr):
    """0 to BLOCK_V in that form."""
    if step.K_INNER:
        o = tl.arange(0, step.BLOCK_V)
    else:
        o = tl.arange(0, step.BLOCK_V // step.RUN)[:, None] * step.RUN + tl.arange(0, step.RUN)[None, :]
    return o


@triton.jit
def along_v(b, step: tl.constexpr):
    """A vector of that form beside the state's tile."""
    if step.K_INNER:
        b = b[None, :, None]
    else:
        b = b[None, :, None, :]
    return b


@triton.jit
def sum_over_k(b_S, step: tl.constexpr):
    return tl.sum(tl.sum(b_S, axis=0), axis=1)


@triton.jit
def tile_of_state(p_head, first_v, sizes: tl.constexpr, step: tl.constexpr):
    """Pointers to the tile of a head's state from column first_v of Dv on, and which of them lie in it."""
    RUN: tl.constexpr = step.RUN
    # Not by reshapes, so that the compiler sees what is contiguous.
    if step.K_INNER:
        o_k = tl.arange(0, step.BLOCK_K // RUN)[:, None, None] * RUN + tl.arange(0, RUN)[None, None, :]
        o_v = first_v + tl.arange(0, step.BLOCK_V)[None, :, None]
    else:
        LANES: tl.constexpr = step.LANES
        o_k = tl.arange(0, step.BLOCK_K // LANES)[:, None, None, None] * LANES
        o_k = o_k + tl.arange(0, LANES)[None, None, :, None]
        o_v = tl.arange(0, step.BLOCK_V // RUN)[None, :, None, None] * RUN
        o_v = first_v + o_v + tl.arange(0, RUN)[None, None, None, :]
    p_tile = p_head + o_k * step.S_K + o_v * step.S_V
    # What is said of the outer dimensions is their rank: neighbouring threads are given the more contiguous ones, and
    # of those that are alike Triton 3.6 takes the first, 3.7 the last.
    if RUN > 3 and (step.S_K == 1 if step.K_INNER else step.S_V == 1):
        p_tile = tl.max_contiguous(p_tile, [1, 2, RUN] if step.K_INNER else [1, 2, 3, RUN])
    return p_tile, (o_k < sizes.HQ) & (o_v < sizes.HV)


@triton.jit
def load_state(p_tile, m, sizes: tl.constexpr, step: tl.constexpr):
    """No mask where none is needed."""
    if sizes.HQ % step.BLOCK_K or sizes.HV % step.BLOCK_V:
        b_S = tl.load(p_tile, mask=m, other=0.0)
    else:
        b_S = tl.load(p_tile)
    return b_S


@triton.jit
def store_state(p_tile, m, b_S, sizes: tl.constexpr, step: tl.constexpr):
    CACHED: tl.constexpr = ".cs" if step.STREAMS else ""
    if sizes.HQ % step.BLOCK_K or sizes.HV % step.BLOCK_V:
        tl.store(p_tile, b_S.to(p_tile.dtype.element_ty), mask=m, cache_modifier=CACHED)
    else:
        tl.store(p_tile, b_S.to(p_tile.dtype.element_ty), cache_modifier=CACHED)


@triton.jit
def normed(b_qk, scale, step: tl.constexpr):
    """Of a block of q and k, [2, BLOCK_K]: q, scaled, and k, each over its norm."""
    b = tl.reshape(b_qk, [2, step.BLOCK_K])
    is_q = tl.arange(0, 2)[:, None] == 0
    if step.QK_NORM:
        b *= tl.rsqrt(tl.sum(b * b, axis=1, keep_dims=True) + 1e-6)
    return b * tl.where(is_q, scale, 1.0)


@triton.jit
def again(b_S, zero):
    """The state: if of 16 bits, as the compiler does not know it, which would keep it in float32 rather than convert it
    twice. zero: 0, which it does not know either, or None.
    """
    if zero is not None and b_S.dtype.primitive_bitwidth == 16:
        bits = b_S.to(tl.int16, bitcast=True)
        bits = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [bits, zero.to(tl.int16)], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        b_S = bits.to(b_S.dtype, bitcast=True)
    return b_S


@triton.jit
def delta_step(b_S, token, step: tl.constexpr, HAS_OUT: tl.constexpr, TOGETHER: tl.constexpr, zero=None):
    """The state after a token, and what q reads of it. TOGETHER: k and q read the state before it."""
    b_k = along_k(token.k, step)
    b_v = as_values(token.v, step)
    if HAS_OUT and TOGETHER:
        b_q = along_k(token.q, step)
        b_old = b_S.to(tl.float32)
        b_of_k = sum_over_k(b_old * b_k, step)
        b_of_q = sum_over_k(b_old * b_q, step)
        b_u = token.beta * (b_v - token.decay * b_of_k)
        b_S = again(b_S, zero).to(tl.float32) * token.decay + b_k * along_v(b_u, step)
        b_o = token.decay * b_of_q + b_u * sum_over_k(b_k * b_q, step)
    else:
        b_S *= token.decay
        b_u = token.beta * (b_v - sum_over_k(b_S * b_k, step))
        b_S += b_k * along_v(b_u, step)
        b_o = b_u
        if HAS_OUT:
            b_o = sum_over_k(b_S * along_k(token.q, step), step)
    return b_S, b_o


@triton.jit
def gated(b_o, b_gate, eps, sizes: tl.constexpr):
    """RMSNorm over a head's outputs, b_gate being the weight times silu(z)."""
    squares = b_o * b_o
    if len(squares.shape) == 2:
        squares = tl.sum(squares, axis=1)
    mean = tl.sum(squares, axis=0) / sizes.HV
    return b_o * tl.rsqrt(mean + eps) * b_gate
