"""Online softmax of the sm_90 kernel, on tiles of scores in registers."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.hopper.config import ROWS, follows_seldom, masks_by_side
from prefix_prefill.kernels.hopper.drafts import only_drafted
from prefix_prefill.kernels.hopper.items import context_of
from prefix_prefill.kernels.softmax import LOG2_E, finite

# Where bfloat16 is multiplied as float16, a row's largest number is scaled to 2^14 and more, and so is a weight of 1:
# what is 2^-28 times as large is then still a normal number.
HEADROOM: gl.constexpr = gl.constexpr(14)
HEADROOM_INVERSE: gl.constexpr = gl.constexpr(2.0**-14)
# Up to here the series of a capped score serves: 2 is a score of log(2) times the cap. And its first three terms.
SMALL: gl.constexpr = gl.constexpr(2.0)
SMALLER: gl.constexpr = gl.constexpr(0.5)
# By how much, in base 2, scores may be past a max that follows them seldom: weights are 256 at most, which float16
# holds, and sums of 2^32 of them float32.
SLACK: gl.constexpr = gl.constexpr(8.0)
# The least normal number of float32, or a little more.
TINY: gl.constexpr = gl.constexpr(1.2e-38)


# Of ``tanh_of_halves``: what is done with each of four numbers before its reciprocal, with all, and with each after it.
_BEFORE = """
abs.f32 a{0}, ${1}; min.f32 d{0}, a{0}, 0f41F00000; ex2.approx.ftz.f32 d{0}, d{0}; add.f32 d{0}, d{0}, 0f3F800000;
"""
_RECIPROCALS = """
mul.f32 p, d0, d1; mul.f32 q, d2, d3; mul.f32 r, p, q; rcp.approx.ftz.f32 r, r; mul.f32 q, q, r; mul.f32 p, p, r;
mul.f32 r0, d1, q; mul.f32 r1, d0, q; mul.f32 r2, d3, p; mul.f32 r3, d2, p;
"""
_AFTER = """
fma.rn.f32 r{0}, r{0}, 0fC0000000, 0f3F800000; min.NaN.f32 r{0}, r{0}, a{0}; copysign.f32 r{0}, ${1}, r{0};
mul.f32 p, ${1}, ${1}; fma.rn.f32 q, p, 0fB341238E, 0f35C30FD9; fma.rn.f32 q, p, q, 0fB806F703;
fma.rn.f32 q, p, q, 0f3A2EB6C5; fma.rn.f32 q, p, q, 0fBC63580C; fma.rn.f32 q, p, q, 0f3EB17218; mul.f32 q, q, ${1};
setp.le.f32 small, a{0}, 0f40000000; selp.f32 ${0}, q, r{0}, small;
"""
_OF_FOUR = [text.format(i, 4 + i) for text in (_BEFORE, _AFTER) for i in range(4)]
TANH_OF_HALVES: gl.constexpr = gl.constexpr(
    "{ .reg .f32 a0, a1, a2, a3, d0, d1, d2, d3, r0, r1, r2, r3, p, q, r; .reg .pred small;"
    + "".join([*_OF_FOUR[:4], _RECIPROCALS, *_OF_FOUR[4:]])
    + "}"
)


class Scoring(NamedTuple):
    """What makes scores of products: their scale, for cached keys and for new ones (with a soft cap that of what it
    takes, in base 2: twice the scores over the cap), the cap and the window, and, of each row, the slope, and in shared
    memory the position and the halves of its mask of drafts; the item in the table.
    """

    cached_scale: object
    scale: object
    cap: object
    window: object
    slope: object
    positions: object
    draft: object
    item: object


class Variant(NamedTuple):
    """Constants of a consumer's making.

    SIGNED: the scale of scores may be negative. RESCALED: there is one for each row, and weights and row sums are
    2^HEADROOM times as large. dtype: of weights. L_S: the layout of scores. OWN: the tiles of a head's values
    that this consumer accumulates. OWN_Q: those of queries that it loads.
    """

    SIGNED: object
    RESCALED: object
    dtype: object
    L_S: object
    OWN: object
    OWN_Q: object


class TileScales(NamedTuple):
    """Scales of tokens in shared memory, the tile's place in the ring, whether it is of cached keys, which alone have
    any, and what those of values are multiplied by.
    """

    memory: object
    at: object
    cached: object
    factor: object


@gluon.constexpr_function
def acc_layout(columns, bits=16):
    """Registers of an accumulator [64, columns] of WGMMA, of operands of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def lanes_layout():
    """Registers of [64, 4]: of each row a number for each of the four lanes that have it in ``acc_layout``."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[ROWS, 4],
    )  # fmt: skip


@gluon.jit
def largest(scores, V, C):
    """The largest score of each row: of pairs, of fours, and so on, since each maximum waits for those before it."""
    b_s = gl.reshape(scores, [ROWS, C.BLOCK_N // 32, 4, 4, 2])
    return gl.convert_layout(gl.max(gl.max(gl.max(gl.max(b_s, 4), 2), 1), 1), gl.SliceLayout(1, V.L_S))


@gluon.jit
def sum_of_lanes(weights, C):
    """The sums of a tile's rows [ROWS, 4], each lane's own part: through the main loop no lane waits for another."""
    b_p = gl.reshape(weights, [ROWS, C.BLOCK_N // 8, 4, 2])
    return gl.convert_layout(gl.sum(gl.sum(b_p, 3), 1), lanes_layout())


@gluon.jit
def row_sum_of(lanes, V):
    """Row sums, from those of lanes."""
    return gl.convert_layout(gl.sum(lanes, 1), gl.SliceLayout(1, V.L_S))


@gluon.jit
def unit_of(most):
    """The power of two of a number's exponent, and its inverse, as far as both are normal numbers."""
    bits = gl.minimum(gl.maximum(most.to(gl.int32, bitcast=True) & 0x7F800000, 1 << 23), 253 << 23)
    return bits.to(gl.float32, bitcast=True), ((254 << 23) - bits).to(gl.float32, bitcast=True)


@gluon.jit
def larger_unit(memory, at, cached, unit, C):
    """Where values have a scale each: the unit that the accumulator is in from the tile at ``at`` in the ring on, and
    what is multiplied to come to it: the tile's scales and the accumulator. It only grows, so that sums always fit.
    """
    factor = unit
    ratio = unit
    if C.V_TOKENS:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        own = gl.max(memory.units.index(at % (C.STAGES + 1)).load(layout), 0)
        if C.NEW_KV:
            own = gl.where(cached, own, 1.0)
        new_unit, inverse = unit_of(gl.maximum(unit, own))
        factor = own * inverse
        ratio = unit * inverse
        unit = new_unit
    return unit, factor, ratio


@gluon.jit
def series(x, cap):
    """cap tanh(x log(2) / 2) log2(e) / x, where |x| <= SMALL, to 2^-26 and roundings."""
    y = x * x
    b = gl.fma(y, -6.487604787699e-08 * cap, 2.0967040382123326e-06 * cap)
    b = gl.fma(y, b, -4.6423240716483864e-05 * cap)
    b = gl.fma(y, b, 0.0009615285875879475 * cap)
    b = gl.fma(y, b, -0.0200187967133182 * cap)
    return gl.fma(y, b, 0.5 * cap)


@gluon.jit
def short_series(x, cap, unit):
    """The same of x unit over x, where |x unit| <= SMALLER, to 2^-24 and roundings."""
    y = x * x
    a = 0.5 * cap * unit
    power = unit * unit
    return gl.fma(y, gl.fma(y, 0.0018926938833429034 * a * power * power, -0.0400354573795074 * a * power), a)


@gluon.jit
def tanh_of_halves(x):
    """tanh(x log(2) / 2), of numbers of any size: by a series up to SMALL, elsewhere 1 - 2 / (1 + 2^x).

    The unit that makes exponentials makes reciprocals too, and a capped softmax waits for it: so four share one, that
    of their product. Numbers above 30, of which products would overflow, are taken as 30. A NaN stays where it is.
    """
    return gl.inline_asm_elementwise(TANH_OF_HALVES, "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def natural_log_sum_exp(running_max, row_sum, unit):
    """log(2^running_max row_sum), and -inf for a row that saw no key; running_max in units of a rounded unit log2(e).

    What undoes that factor is taken in two parts, so that a large score is rounded once. Where the factor is 0, or too
    small to be divided by, running_max is all bias, in units of log2(e).
    """
    unit = gl.where(unit < TINY, 1.0, unit)
    rounded = unit * LOG2_E
    ratio = unit / rounded
    rest = gl.fma(-ratio, rounded, unit) / rounded
    log_sum = gl.log(gl.where(row_sum == 0, 1.0, row_sum))
    return gl.where(
        row_sum == 0, float("-inf"), gl.fma(finite(running_max), ratio, gl.fma(finite(running_max), rest, log_sum))
    )


@gluon.jit
def update(scores, running_max, row_sum, scale, key, bounds, scoring, scales, MASKED: gl.constexpr, V, C):
    """Weights relative to the new running max, that max, the new row sum, and what the accumulator is rescaled by.

    ``key`` is the tile's first; ``row_sum`` has a part for each lane; ``scales`` are those of tokens, where there are
    any: keys' are folded into scores, values' into weights.
    """
    scores = biased(scores, scale, key, scoring, scales, V, C)
    if MASKED:
        scores = masked(scores, key, bounds, scoring, V, C)
    return weighed(scores, running_max, row_sum, scale, scales, V, C)


@gluon.jit
def biased(scores, scale, key, scoring, scales, V, C):
    """Scores as they are compared: scaled where their order is not that of q.k, capped, with slopes."""
    scores = times_k_scales(scores, scales, V, C)
    b_scale = scale
    if V.RESCALED:
        b_scale = scale[:, None]
    if C.SOFTCAP:
        scores = tanh_of_halves(scores * b_scale) * (scoring.cap * LOG2_E)
    elif V.SIGNED or C.ALIBI:
        scores = scores * b_scale
    if C.ALIBI:
        position = scoring.positions.load(gl.SliceLayout(1, V.L_S))
        o_key = key + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, V.L_S))
        scores += scoring.slope[:, None] * (o_key[None, :] - position[:, None]).to(gl.float32)
    return scores


@gluon.jit
def masked(scores, key, bounds, scoring, V, C):
    """Scores, -inf of keys that a row does not see."""
    position = scoring.positions.load(gl.SliceLayout(1, V.L_S))
    o_key = key + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, V.L_S))
    low = bounds.low
    high = bounds.high
    # The last key that a row sees, and the first; written so that no sum overflows.
    last = position * 0 + (high - 1)
    if C.DRAFT:
        low_bits = scoring.draft[0].load(gl.SliceLayout(1, V.L_S))
        high_bits = scoring.draft[1].load(gl.SliceLayout(1, V.L_S))
        # Looked up again: through the main loop it would take a register.
        o_first = key - context_of(scoring.item[0], scoring.item[1], 4)
        scores = only_drafted(scores, low_bits, high_bits, o_first, high - key, V, C)
    elif C.HAS_RIGHT:
        last = position + gl.minimum(scoring.window.right, last - position)
    if masks_by_side(C):
        first = position - gl.minimum(scoring.window.left, position - low)
        if bounds.from_first:
            scores = gl.where(o_key[None, :] <= last[:, None], scores, float("-inf"))
        else:
            if bounds.to_last:
                scores = gl.where(o_key[None, :] >= first[:, None], scores, float("-inf"))
            else:
                seen = (o_key[None, :] <= last[:, None]) & (o_key[None, :] >= first[:, None])
                scores = gl.where(seen, scores, float("-inf"))
    else:
        seen = o_key[None, :] <= last[:, None]
        if C.HAS_LEFT:
            first = position - gl.minimum(scoring.window.left, position - low)
            seen = seen & (o_key[None, :] >= first[:, None])
        if C.HAS_LEFT or not C.DRAFT:
            scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def weighed(scores, running_max, row_sum, scale, scales, V, C):
    """The rest of ``update``."""
    shift: gl.constexpr = HEADROOM if V.RESCALED else 0
    most = largest(scores, V, C)
    if V.SIGNED or C.SOFTCAP or C.ALIBI:
        new_max = gl.maximum(running_max, most)
        weights = gl.exp2(scores - (finite(new_max) - shift)[:, None])
    else:
        b_scale = scale
        if V.RESCALED:
            b_scale = scale[:, None]
        # A scale of 0 or more keeps the order; multiplied here, it costs no instruction.
        if follows_seldom(C):
            new_max = gl.where(most * scale > running_max + SLACK, most * scale, running_max)
        else:
            new_max = gl.maximum(running_max, most * scale)
        weights = gl.exp2(scores * b_scale - (finite(new_max) - shift)[:, None])
    return summed(weights, running_max, new_max, row_sum, scales, V, C)


@gluon.jit
def times_k_scales(scores, scales, V, C):
    """Scores, those of keys whose tokens have scales times these."""
    if C.K_TOKENS:
        k_scale = scales.memory.k.index(scales.at % (C.STAGES + 1)).load(gl.SliceLayout(0, V.L_S))
        if C.NEW_KV:
            k_scale = gl.where(scales.cached, k_scale, 1.0)
        scores = scores * k_scale[None, :]
    return scores


@gluon.jit
def summed(weights, running_max, new_max, row_sum, scales, V, C):
    """What ``update`` returns, from a tile's weights, and the running max before it and after."""
    rescale = gl.exp2(running_max - finite(new_max))
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, lanes_layout()))[:, None]
    row_sum += sum_of_lanes(weights, C)
    if C.V_TOKENS:
        v_scale = scales.memory.v.index(scales.at % (C.STAGES + 1)).load(gl.SliceLayout(0, V.L_S))
        if C.NEW_KV:
            v_scale = gl.where(scales.cached, v_scale, 1.0)
        weights = weights * (v_scale * scales.factor)[None, :]
    return weights.to(V.dtype), new_max, row_sum, rescale


@gluon.jit
def update_capped(scores, running_max, row_sum, scale, key, bounds, scoring, scales, V, C):
    """``update`` of a tile that all rows see, with a soft cap and no slopes.

    Most tiles have no score above 0.17 of the cap, in size, or none above 0.69. There a series takes the place of an
    exponential and of a reciprocal; and as the cap keeps the order, the largest score of a row is capped once. On an
    H200 an instruction an element takes the time of nearly three, whichever it is: fewer terms are worth a branch.
    """
    shift: gl.constexpr = HEADROOM if V.RESCALED else 0
    b_x = times_k_scales(scores, scales, V, C)
    # A scale above 0 that all rows share is multiplied into the series.
    unit = scale
    if V.RESCALED:
        b_x = b_x * scale[:, None]
        unit = 1.0
    elif V.SIGNED:
        b_x = b_x * scale
        unit = 1.0
    most = gl.max(b_x, 1)
    size = gl.max(gl.maximum(most, -gl.min(b_x, 1)), 0) * unit
    # The unit's fifth power is a normal number.
    if (size <= SMALLER) & (unit > 1e-7) & (unit < 1e7):
        new_max = gl.maximum(running_max, most * short_series(most, scoring.cap, unit))
        weights = gl.exp2(gl.fma(b_x, short_series(b_x, scoring.cap, unit), (shift - finite(new_max))[:, None]))
        weights, new_max, new_sum, rescale = summed(weights, running_max, new_max, row_sum, scales, V, C)
    else:
        if size <= SMALL:
            b_x = b_x * unit
            most = most * unit
            new_max = gl.maximum(running_max, most * series(most, scoring.cap))
            weights = gl.exp2(gl.fma(b_x, series(b_x, scoring.cap), (shift - finite(new_max))[:, None]))
            weights, new_max, new_sum, rescale = summed(weights, running_max, new_max, row_sum, scales, V, C)
        else:
            weights, new_max, new_sum, rescale = update(
                scores, running_max, row_sum, scale, key, bounds, scoring, scales, False, V, C
            )
    return weights, new_max, new_sum, rescale


@gluon.jit
def update_first(scores, running_max, row_sum, scale, key, bounds, scoring, scales, V, C):
    """``update_tile`` of a piece's first tile, with which no WGMMA overlaps: in one branch, which is less code."""
    if C.SOFTCAP and not C.ALIBI:
        weights, new_max, new_sum, rescale = update_tile(
            scores, running_max, row_sum, scale, key, bounds, scoring, scales, V, C
        )
    else:
        scores = biased(scores, scale, key, scoring, scales, V, C)
        if not bounds.whole:
            scores = masked(scores, key, bounds, scoring, V, C)
        weights, new_max, new_sum, rescale = weighed(scores, running_max, row_sum, scale, scales, V, C)
    return weights, new_max, new_sum, rescale


@gluon.jit
def update_tile(scores, running_max, row_sum, scale, key, bounds, scoring, scales, V, C):
    """``update``, masked only where some row does not see the whole tile.

    Two branches: in straight code ptxas moves the softmax past the wait for the WGMMA that it is to overlap with.
    """
    if bounds.whole:
        if C.SOFTCAP and not C.ALIBI:
            weights, new_max, new_sum, rescale = update_capped(
                scores, running_max, row_sum, scale, key, bounds, scoring, scales, V, C
            )
        else:
            weights, new_max, new_sum, rescale = update(
                scores, running_max, row_sum, scale, key, bounds, scoring, scales, False, V, C
            )
    else:
        weights, new_max, new_sum, rescale = update(
            scores, running_max, row_sum, scale, key, bounds, scoring, scales, True, V, C
        )
    return weights, new_max, new_sum, rescale
