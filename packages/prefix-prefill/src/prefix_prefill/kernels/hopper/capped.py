"""Weights of capped scores on sm_90, relative to a constant.

A cap bounds scores from both sides. In bfloat16, which has float32's exponents, weights need no running max then:
nothing waits for the largest score of a tile, and no accumulator is rescaled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.hopper.softmax import masked, sum_of_lanes
from prefix_prefill.kernels.softmax import LOG2_E

# No weight is less than 2^-LEAST_POWER, so that values times weights are seldom too small a number.
LEAST_POWER: gl.constexpr = gl.constexpr(102.0)
# Up to here, 0.2 times twice log2(e), which is a score of 0.2 times the cap, two terms serve.
NEAR: gl.constexpr = gl.constexpr(0.577)
# And up to here, 0.8 times that, four.
MIDDLE: gl.constexpr = gl.constexpr(2.308)
# 1 / (1 + 2^x).
SIGMOID: gl.constexpr = gl.constexpr(
    "{ .reg .f32 d; ex2.approx.ftz.f32 d, $1; add.f32 d, d, 0f3F800000; rcp.approx.ftz.f32 $0, d; }"
)


# What ``exponents_by_warps`` does with so many numbers of a lane at a time. Operands are as many results and scores,
# and each of seven numbers as often.
_COUNT = 16
_SCORES = [f"${_COUNT + i}" for i in range(_COUNT)]
_NEAR, _CUBED, _REFERENCE, _SCALE, _CAP, _NEAREST, _MIDDLE = (f"${(2 + i) * _COUNT}" for i in range(7))
_BY_WARPS = [
    ".reg .f32 m, s, t, k0, k1, k2, k3; .reg .pred far;",
    f"abs.f32 m, {_SCORES[0]};",
    *(f"abs.f32 s, {score}; max.f32 m, m, s;" for score in _SCORES[1:]),
    f"setp.gtu.f32 far, m, {_NEAREST}; vote.sync.any.pred far, far, 0xffffffff; @far bra.uni MIDDLE;",
    *(
        f"mul.f32 s, {score}, {score}; fma.rn.f32 s, s, {_CUBED}, {_NEAR}; fma.rn.f32 ${i}, {score}, s, {_REFERENCE};"
        for i, score in enumerate(_SCORES)
    ),
    f"bra.uni DONE; MIDDLE: setp.gtu.f32 far, m, {_MIDDLE}; vote.sync.any.pred far, far, 0xffffffff; @far bra.uni FAR;",
    f"mul.f32 k0, {_CAP}, {_SCALE}; mul.f32 t, {_SCALE}, {_SCALE}; mul.f32 k1, k0, t; mul.f32 k2, k1, t;",
    # Those of ``middle_exponents``.
    "mul.f32 k3, k2, t; mul.f32 k3, k3, 0fB7F46281; mul.f32 k2, k2, 0f3A6E5963; mul.f32 k1, k1, 0fBCA38EAE;",
    "mul.f32 k0, k0, 0f3EFFFEDB;",
    *(
        f"mul.f32 s, {score}, {score}; fma.rn.f32 t, s, k3, k2; fma.rn.f32 t, s, t, k1; fma.rn.f32 t, s, t, k0;"
        f"fma.rn.f32 ${i}, {score}, t, {_REFERENCE};"
        for i, score in enumerate(_SCORES)
    ),
    # Those of ``exponents``: the first is log2(e), the second -2.
    f"bra.uni DONE; FAR: mul.f32 k0, {_CAP}, 0f3FB8AA3B; add.f32 k1, k0, {_REFERENCE}; mul.f32 k0, k0, 0fC0000000;",
    *(
        f"mul.f32 s, {score}, {_SCALE}; ex2.approx.ftz.f32 s, s; add.f32 s, s, 0f3F800000;"
        f"rcp.approx.ftz.f32 s, s; fma.rn.f32 ${i}, s, k0, k1;"
        for i, score in enumerate(_SCORES)
    ),
    "DONE:",
]
ELEMENTS: gl.constexpr = gl.constexpr(_COUNT)
BY_WARPS: gl.constexpr = gl.constexpr("{ " + " ".join(_BY_WARPS) + " }")
OPERANDS: gl.constexpr = gl.constexpr(",".join(["=f"] * _COUNT + ["f"] * (8 * _COUNT)))


@gluon.jit
def reference_of(cap):
    """What weights are relative to, in base 2: the cap, or less where weights of twice that would be too small."""
    return gl.minimum(cap * LOG2_E, LEAST_POWER - cap * LOG2_E)


@gluon.jit
def exponents(scores, scale, cap):
    """Scores capped, in base 2, less the reference: cap tanh(z) = cap - 2 cap / (1 + e^2z), to 2^-22 of the cap."""
    b_x = gl.inline_asm_elementwise(SIGMOID, "=f,f", [scores * scale], dtype=gl.float32, is_pure=True, pack=1)
    return gl.fma(b_x, -2.0 * LOG2_E * cap, cap * LOG2_E - reference_of(cap))


@gluon.jit
def near_exponents(scores, scale, cap):
    """The same of scores up to 0.2 of the cap: z - z^3 / 3, its factors those of the least error there, 2^-15 of z."""
    unit = cap * scale
    factor = gl.fma(scores * scores, -0.01970316 * unit * scale * scale, 0.4999869 * unit)
    return gl.fma(scores, factor, -reference_of(cap))


@gluon.jit
def middle_exponents(scores, scale, cap):
    """The same up to 0.8 of the cap, by two terms more, 2^-15 of z."""
    unit = cap * scale
    power = scale * scale
    b_y = scores * scores
    factor = gl.fma(b_y, -2.9132936e-05 * unit * power * power * power, 0.00090922994 * unit * power * power)
    factor = gl.fma(b_y, gl.fma(b_y, factor, -0.019965496 * unit * power), 0.49999127 * unit)
    return gl.fma(scores, factor, -reference_of(cap))


@gluon.jit
def exponents_by_warps(scores, scale, cap):
    """As ``near_exponents`` where a warp's scores are up to 0.2 of the cap, else up to 0.8 as ``middle_exponents``,
    else as ``exponents``: each warp for itself, 16 numbers a lane at a time, and no warp waits for the others.
    """
    unit = cap * scale
    # Powers of the scale are normal numbers.
    nearest = gl.where((scale > 1e-10) & (scale < 1e10), NEAR / scale, -1.0)
    middle = gl.where((scale > 1e-4) & (scale < 1e4), MIDDLE / scale, -1.0)
    cubed = -0.01970316 * unit * scale * scale
    given = [scores, 0.4999869 * unit, cubed, -reference_of(cap), scale, cap, nearest, middle]
    return gl.inline_asm_elementwise(BY_WARPS, OPERANDS, given, dtype=gl.float32, is_pure=True, pack=ELEMENTS)


@gluon.jit
def added(b_x, row_sum, V, C):
    """Weights and the row sum, from exponents."""
    weights = gl.exp2(b_x)
    return weights.to(V.dtype), row_sum + sum_of_lanes(weights, C)


@gluon.jit
def added_large(scores, size, scale, row_sum, scoring, V, C):
    """The same from scores that are up to ``size``, once scaled, more than 0.2 of the cap."""
    if C.CAPPING == 3:
        if (size <= MIDDLE) & (scale > 1e-4) & (scale < 1e4):
            weights, new_sum = added(middle_exponents(scores, scale, scoring.cap), row_sum, V, C)
        else:
            weights, new_sum = added(exponents(scores, scale, scoring.cap), row_sum, V, C)
    else:
        weights, new_sum = added(exponents(scores, scale, scoring.cap), row_sum, V, C)
    return weights, new_sum


@gluon.jit
def update_by_constant(scores, row_sum, scale, key, bounds, scoring, V, C):
    """The weights of a tile, and the new row sum.

    With CAPPING 2 tiles of no score above 0.2 of the cap, which most are, go without an exponential and a reciprocal,
    with 3 those of none above 0.8 of it, too.
    """
    if C.CAPPING == 4:
        # Two branches: see ``update_tile``.
        if bounds.whole:
            weights, new_sum = added(exponents_by_warps(scores, scale, scoring.cap), row_sum, V, C)
        else:
            b_x = exponents_by_warps(scores, scale, scoring.cap)
            weights, new_sum = added(masked(b_x, key, bounds, scoring, V, C), row_sum, V, C)
    elif bounds.whole:
        if C.CAPPING >= 2:
            size = gl.max(gl.max(gl.abs(scores), 1), 0) * scale
            # The scale's third power is a normal number.
            if (size <= NEAR) & (scale > 1e-10) & (scale < 1e10):
                weights, new_sum = added(near_exponents(scores, scale, scoring.cap), row_sum, V, C)
            else:
                weights, new_sum = added_large(scores, size, scale, row_sum, scoring, V, C)
        else:
            weights, new_sum = added(exponents(scores, scale, scoring.cap), row_sum, V, C)
    else:
        b_x = exponents(scores, scale, scoring.cap)
        weights, new_sum = added(masked(b_x, key, bounds, scoring, V, C), row_sum, V, C)
    return weights, new_sum
