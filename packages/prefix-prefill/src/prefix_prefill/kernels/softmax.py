"""Online softmax: the pieces that the attention and merge kernels share.

Running maxima and lse are natural logarithms here: in base 2 they would be rounded once more, and a large one shows it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# A row's largest number is scaled to 2^7 and more before it is rounded to e4m3, which ends at 448.
E4M3_ROOM: tl.constexpr = tl.constexpr(7)


class Target(NamedTuple):
    """Where a tile of rows is stored: offsets of rows in out and lse, of elements in a row, and masks."""

    off_out: object
    off_lse: object
    o_d: object
    m_row: object
    m_tile: object


@triton.jit
def visible(o_key, position, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether rows at ``position`` see these keys, as far as window and causality go; all operands broadcast."""
    distance = o_key - position
    seen = distance == distance
    if HAS_LEFT:
        seen = seen & (distance >= -left)
    if HAS_RIGHT:
        seen = seen & (distance <= right)
    return seen


@triton.jit
def halves_of(bits):
    """The bits of rows' masks of drafts, 63 each, as two numbers of 32."""
    return bits.to(tl.int32), ((bits >> 32) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def drafted(o_new, low, high):
    """Whether rows with masks of these halves see new tokens ``o_new``, below 0 older ones; all operands broadcast.

    Tokens past the last bit are seen by none: the highest bit of ``high`` is 0.
    """
    bits = tl.where(o_new < 32, low, high) >> tl.where(o_new < 32, o_new & 31, tl.minimum(o_new - 32, 31))
    return (o_new < 0) | ((bits & 1) != 0)


@triton.jit
def powers_of_two(most, ROOM: tl.constexpr):
    """2^(e - ROOM) and its inverse, for each number and its exponent e, as far as both are normal numbers."""
    bits = tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, (1 + ROOM) << 23)
    bits = tl.minimum(bits, 253 << 23) - (ROOM << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def quantised_rows(b_q):
    """Queries [M, D], each row rounded to e4m3 in units of a power of two, as their dtype holds it."""
    b_x = b_q.to(tl.float32)
    power, inverse = powers_of_two(tl.max(tl.abs(b_x), 1), E4M3_ROOM)
    return (rounded_to_e4m3(b_x * inverse[:, None]) * power[:, None]).to(b_q.dtype)


@triton.jit
def rounded_to_e4m3(x):
    """float32 below 448 in size as e4m3 has it, in float32: not every target converts. A NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    # To the even one of two as near, 3 bits behind the first; below 2^-6 to multiples of 2^-9.
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    small = (x + 24576.0) - 24576.0
    near = tl.where(tl.abs(x) < 0.015625, small, rounded.to(tl.float32, bitcast=True))
    return tl.where(x == x, near, x)


@triton.jit
def tanh(x):
    """To three units in the last place: x times a quotient of polynomials in x^2.

    A quotient of powers would cancel where x is small, as scores far below a soft cap are, and take more instructions.
    """
    # From there on it is 1 to a rounding. Not by minimum and maximum, which would drop a NaN.
    x = tl.where(x > 8.5, 8.5, x)
    x = tl.where(x < -8.5, -8.5, x)
    s = x * x
    p = tl.fma(s, 1.4269198741569144e-08, 2.1251020771966284e-05)
    p = tl.fma(s, p, 0.0035340253374178663)
    p = tl.fma(s, p, 0.134132456228055)
    p = tl.fma(s, p, 0.9999999881845028)
    q = tl.fma(s, 8.145110711011622e-07, 0.0003348862376508875)
    q = tl.fma(s, q, 0.02602274548657976)
    q = tl.fma(s, q, 0.4674656835762914)
    q = tl.fma(s, q, 1.0)
    # 1 / q, which is from 1 to 320, in half of a division's instructions: a rounded one, and a step of Newton's.
    r = tl.rsqrt(q)
    r = r * r
    r = r * tl.fma(-q, r, 2.0)
    return x * p * r


@triton.jit
def exponential(x):
    """e^x for x <= 0, to a unit in the last place; the hardware's exp2 of a rounded x log2(e) is off by several.

    2^j e^r with an integer j and |r| <= log(2) / 2, the power series of e^r up to r^7.
    """
    x = tl.where(x < -110.0, -110.0, x)
    j = tl.floor(x * LOG2_E + 0.5)
    # log(2) in two parts, the first with so few digits that its product with j is exact.
    r = tl.fma(j, -1.4286068203094172e-06, tl.fma(j, -0.693145751953125, x))
    y = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    y = tl.fma(r, y, 1.0 / 120)
    y = tl.fma(r, y, 1.0 / 24)
    y = tl.fma(r, y, 1.0 / 6)
    y = tl.fma(r, y, 0.5)
    y = tl.fma(r * r, y, r) + 1.0
    return y * tl.exp2(j)


@triton.jit
def finite(running_max):
    """What to subtract before exponentiation: the running max, and 0 for a row that has seen no key."""
    return tl.where(running_max == float("-inf"), 0.0, running_max)


@triton.jit
def with_sink(acc, running_max, row_sum, b_sink):
    """A sink: a logit in the denominator only."""
    new_max = tl.maximum(running_max, b_sink)
    rescale = exponential(running_max - finite(new_max))
    return acc * rescale[:, None], new_max, row_sum * rescale + exponential(b_sink - finite(new_max))


@triton.jit
def normalised(acc, row_sum):
    """acc / row_sum, and 0 for a row that saw no key."""
    return tl.div_rn(acc, tl.where(row_sum == 0, 1.0, row_sum)[:, None])


@triton.jit
def log_sum_exp(running_max, row_sum):
    """running_max + log(row_sum), and -inf for a row that saw no key."""
    return tl.where(row_sum == 0, float("-inf"), running_max + tl.log(tl.where(row_sum == 0, 1.0, row_sum)))


@triton.jit
def store_results(p_out, p_lse, p_out_scale, out_scale, b_out, b_lse, target, LIMIT: tl.constexpr):
    """Epilogue: the output over its scale, clamped to +-LIMIT unless that is 0, and lse if there is memory for it."""
    if p_out_scale is not None:
        out_scale = out_scale * tl.load(p_out_scale)
    b_out = tl.div_rn(b_out, out_scale)
    if LIMIT:
        b_out = tl.where(b_out > LIMIT, LIMIT, tl.where(b_out < -LIMIT, -LIMIT, b_out))
    p_tile = p_out + target.off_out[:, None] + target.o_d[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=target.m_tile)
    if p_lse is not None:
        tl.store(p_lse + target.off_lse, b_lse, mask=target.m_row)
