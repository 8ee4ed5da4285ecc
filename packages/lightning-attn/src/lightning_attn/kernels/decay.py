"""The decay exp(-s) over distances, with no exponent above 0; and powers of two that keep float16 in its range."""

import triton
import triton.language as tl


@triton.jit
def base_two_rate(p_slopes, i_h):
    """The decay rate for exp2: 0 for a rate below 0 and for NaN, so that no exponent is above 0.

    exp(-256) is 0 in float32: a rate above counts as 256, of which every multiple is finite.
    """
    return clamped(tl.load(p_slopes + i_h)) * 1.4426950408889634


@triton.jit
def clamped(rate):
    return tl.minimum(tl.where(rate > 0.0, rate, 0.0), 256.0)


@triton.jit
def rest_of_rate(p_slopes, i_h, rate):
    """What ``base_two_rate`` has lost by rounding its product and the logarithm."""
    slope = clamped(tl.load(p_slopes + i_h))
    # The second factor is float32's log2(e) as it is; the third what it falls short of.
    return tl.fma(slope, 1.44269502162933349609375, -rate) + slope * 1.9259629911266617e-08


@triton.jit
def decay_over(rate, rest, tokens):
    """exp(-s tokens) to float32's precision, however small.

    Over many tokens the exponent's own rounding is an error of the result that no sum with other tokens hides.
    """
    tokens = tokens.to(tl.float32)
    exponent = rate * tokens
    short = tl.fma(rate, tokens, -exponent) + rest * tokens
    return tl.exp2(-exponent) * (1 - short * 0.6931471805599453)


@triton.jit
def over_tokens(rate, tokens, rest):
    """The decay over so many tokens; with a ``rest``, to float32's precision."""
    return tl.exp2(-rate * tokens.to(tl.float32)) if rest is None else decay_over(rate, rest, tokens)


@triton.jit
def from_start(rate, o_row, rest=None):
    """exp2(-rate (row + 1)): the decay between the state before a chunk and its rows, those included."""
    return over_tokens(rate, o_row + 1, rest)


@triton.jit
def to_end(rate, o_row, length, rest=None):
    """exp2(-rate (length - 1 - row)): the decay between a chunk's rows and its end.

    1 for rows past the end; what they multiply is masked.
    """
    return over_tokens(rate, tl.maximum(length - 1 - o_row, 0), rest)


@triton.jit
def seeing(rate, o_row, length, scale, REVERSED: tl.constexpr, rest=None):
    """The weight of the state before its chunk for each query."""
    return to_end(rate, o_row, length, rest) if REVERSED else from_start(rate, o_row, rest) * scale


@triton.jit
def entering(rate, o_row, length, scale, REVERSED: tl.constexpr, rest=None):
    """The weight with which each key and value enter the state after their chunk."""
    return from_start(rate, o_row, rest) * scale if REVERSED else to_end(rate, o_row, length, rest)


@triton.jit
def kept_and_lost(rate, tokens, rest=None):
    """Factors with which a state S becomes ``S kept + (S lost + update)`` after these tokens.

    Where the decay is near 1 they are 1 and exp2(-rate tokens) - 1, else 0 and the decay: a factor near 1 would be
    rounded the same way at every token, an error that accumulates.
    """
    if rest is None:
        decay = tl.exp2(-rate * tokens)
    else:
        decay = decay_over(rate, rest, tokens)
    exponent = rate * tokens * 0.6931471805599453
    # The series of exp(-x) - 1 up to x^6; its next term is below the rounding of float32 for x < 1/4. FMAs are
    # explicit, for the same bits in kernels that let the compiler fuse and in others.
    series = tl.fma(exponent, -1 / 6, 1.0)
    series = tl.fma(exponent * (-1 / 5), series, 1.0)
    series = tl.fma(exponent * (-1 / 4), series, 1.0)
    series = tl.fma(exponent * (-1 / 3), series, 1.0)
    series = tl.fma(exponent * (-1 / 2), series, 1.0) * -exponent
    is_small = exponent < 0.25
    return tl.where(is_small, 1.0, 0.0), tl.where(is_small, series, decay)


@triton.jit
def decayed(b_S, rate, tokens, rest=None):
    """The state after these tokens, without their updates."""
    kept, lost = kept_and_lost(rate, tokens, rest)
    return b_S * kept + b_S * lost


@triton.jit
def advanced(b_S, rate, tokens, rest, b_own):
    """The state after these tokens, which leave b_own by themselves. FMAs are explicit: other kernels have its bits."""
    kept, lost = kept_and_lost(rate, tokens, rest)
    return advanced_by(b_S, kept, lost, b_own)


@triton.jit
def advanced_by(b_S, kept, lost, b_own):
    """``advanced``, of what ``kept_and_lost`` gave."""
    return tl.fma(b_S, kept, tl.fma(b_S, lost, b_own))


@triton.jit
def into_float16(largest):
    """A power of two that brings values of at most ``largest`` below 2^15, and its inverse.

    The largest is scaled to 2^14 or more if it is 2^-41 or more: below that, even 2^16 of it is no float16.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 86 * 2**23)
    up = (255 * 2**23 - exponent + 13 * 2**23).to(tl.float32, bitcast=True)
    return up, inverse(up)


@triton.jit
def inverse(power):
    """Of powers of two that ``into_float16`` gave."""
    return (254 * 2**23 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def unit_of(scale):
    """The power of two next below |scale|, from 2^-40 to 2^40."""
    # In the interpreter the scale is a number, which has no bits.
    scale = tl.where(tl.program_id(0) >= 0, scale, 1.0)
    exponent = scale.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 87 * 2**23), 167 * 2**23)
    return exponent.to(tl.float32, bitcast=True)
