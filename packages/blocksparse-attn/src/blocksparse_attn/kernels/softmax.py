"""The online softmax (arXiv 1805.02867, as FlashAttention does it), and the epilogue of a tile.

For 16-bit inputs it is taken in base 2: scores carry a factor log2(e), so that exp2 serves. float32 would show that
rounding: its scores are natural. The logarithms that are stored are natural for all.
"""

import triton
import triton.language as tl

from blocksparse_attn.kernels.tiles import wide

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
def power(x, NATURAL: tl.constexpr):
    """e or 2 to the power of x."""
    if NATURAL:
        y = exponential(x)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def finite(running_max):
    """What to subtract before exponentiation: the running max, and 0 for a row that has seen no score."""
    return tl.where(running_max == float("-inf"), 0.0, running_max)


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
def in_parts(b_q, b_k):
    """Parts of the heads of q and k [PARTS, BLOCK_M or EACH, EACH or BLOCK_N]; a sum by parts rounds less than one sum
    over the head."""
    EACH: tl.constexpr = 32 if b_q.shape[1] > 64 else 16
    PARTS: tl.constexpr = b_q.shape[1] // EACH
    q_parts = tl.permute(tl.reshape(b_q, [b_q.shape[0], PARTS, EACH]), (1, 0, 2))
    return q_parts, tl.permute(tl.reshape(b_k, [b_k.shape[0], PARTS, EACH]), (1, 2, 0))


@triton.jit
def dot_by_parts(b_q, b_k):
    """q k^T [BLOCK_M, BLOCK_N] of float32."""
    q_parts, k_parts = in_parts(b_q, b_k)
    return tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)


@triton.jit
def thirds(b_x):
    """float32 in three parts that add up to it, of 11, 11 and 2 bits: tensor cores take these as they are."""
    high = (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    rest = tl.where(b_x == high, 0.0, b_x - high)
    middle = (rest.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, middle, rest - middle


@triton.jit
def small_products(high, middle, low, other_high, other_middle, other_low):
    """Of a product of two tensors in thirds all but the largest part, the smallest first; what is left out is below
    2^-33 of it."""
    acc = tl.dot(low, other_high, input_precision="tf32")
    acc = tl.dot(high, other_low, acc, input_precision="tf32")
    acc = tl.dot(middle, other_middle, acc, input_precision="tf32")
    acc = tl.dot(middle, other_high, acc, input_precision="tf32")
    return tl.dot(high, other_middle, acc, input_precision="tf32")


@triton.jit
def product_of_thirds(b_a, b_b):
    """a b of float32 on tensor cores, which round sums towards 0 at each step: the largest part is summed by itself."""
    high, middle, low = thirds(b_a)
    b_high, b_middle, b_low = thirds(b_b)
    small = small_products(high, middle, low, b_high, b_middle, b_low)
    return tl.dot(high, b_high, input_precision="tf32") + small


@triton.jit
def by_elements(b_x, b_y, AXIS: tl.constexpr):
    """q k^T, or weights times values, of few rows of float32: products one by one, where b_y has been loaded to.

    Dots of fewer than 16 rows are padded, and take keys and values through shared memory.
    """
    b_y = tl.reshape(b_y, [1, b_y.shape[0], b_y.shape[1]])
    return tl.sum(tl.expand_dims(b_x, 3 - AXIS) * b_y, AXIS)


@triton.jit
def softmax_step(
    b_s, running_max, row_sum, seen, scoring, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr,
    ABOVE_0: tl.constexpr = False,
):  # fmt: skip
    """Weights of products of queries and keys, what the past is rescaled by, the new running max and row sum.

    seen [BLOCK_M, BLOCK_N]: which rows see which keys. ABOVE_0: the scale is, and there is no cap: the largest product
    is that of the largest score, and one FMA scales and subtracts. A row sum [BLOCK_M, BLOCK_N] stays apart by columns:
    to add them up, the warps that have some wait for each other.
    """
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    scale = scoring.scale * UNIT
    if SOFTCAP:
        b_s = tanh(b_s * (scoring.scale / scoring.softcap)) * (scoring.softcap * UNIT)
    elif not ABOVE_0:
        b_s = b_s * scale
    b_s = tl.where(seen, b_s, float("-inf"))
    most = tl.max(b_s, 1)
    if ABOVE_0:
        most = most * scale
    new_max = tl.maximum(running_max, most)
    if ABOVE_0:
        # By rows: a scalar gives other code, which no GPU has timed.
        b_s = b_s * (scale + tl.zeros_like(new_max))[:, None]
    b_p = power(b_s - finite(new_max)[:, None], NATURAL)
    rescale = power(running_max - finite(new_max), NATURAL)
    if len(row_sum.shape) == 2:
        new_sum = row_sum * rescale[:, None] + b_p
    else:
        new_sum = row_sum * rescale + tl.sum(b_p, 1)
    return b_p, rescale, new_max, new_sum


@triton.jit
def update(
    acc, running_max, row_sum, b_q, b_k, b_v, seen, scoring, SOFTCAP: tl.constexpr, THIRDS: tl.constexpr = False
):  # fmt: skip
    """One step of the online softmax: a tile of keys and values into the accumulator, running max and row sum.

    See ``softmax_step``. Values of keys that no row sees must be finite. THIRDS: float32 is multiplied in three parts.
    """
    NATURAL: tl.constexpr = b_q.dtype == tl.float32
    FEW: tl.constexpr = b_q.shape[0] < 16
    if FEW:
        b_s = by_elements(b_q, b_k, 2)
    elif THIRDS:
        q_parts, k_parts = in_parts(b_q, b_k)
        b_s = tl.sum(product_of_thirds(q_parts, k_parts), 0)
    elif NATURAL:
        b_s = dot_by_parts(b_q, b_k)
    else:
        b_s = tl.dot(b_q, tl.trans(b_k))  # [BLOCK_M, BLOCK_N]
    b_p, rescale, new_max, new_sum = softmax_step(b_s, running_max, row_sum, seen, scoring, SOFTCAP, NATURAL)
    if FEW:
        acc = tl.fma(by_elements(b_p, b_v, 1), 1.0, acc * rescale[:, None])
    elif THIRDS:
        acc = tl.fma(product_of_thirds(b_p, b_v), 1.0, acc * rescale[:, None])
    elif NATURAL:
        # Without tensor cores one sum over all keys would round as often as there are keys: each tile has its own.
        acc = tl.fma(tl.dot(b_p, b_v, input_precision="ieee"), 1.0, acc * rescale[:, None])
    else:
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None])
    return acc, new_max, new_sum


@triton.jit
def with_sink(acc, running_max, row_sum, b_sink):
    """A logit that stands in the denominator only."""
    new_max = tl.maximum(running_max, b_sink)
    rescale = exponential(running_max - finite(new_max))
    return acc * rescale[:, None], new_max, row_sum * rescale + exponential(b_sink - finite(new_max))


@triton.jit
def normalised(acc, row_sum):
    """acc / row_sum, and 0 for a row that saw nothing."""
    return tl.div_rn(acc, tl.where(row_sum == 0, 1.0, row_sum)[:, None])


@triton.jit
def log_sum_exp(running_max, row_sum):
    """running_max + log(row_sum), and -inf for a row that saw nothing."""
    return tl.where(row_sum == 0, float("-inf"), running_max + tl.log(tl.where(row_sum == 0, 1.0, row_sum)))


@triton.jit
def store(
    acc, running_max, row_sum, rows, i_split, num_splits, p_sinks, outputs, strides, config: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile: its results, with sinks, or a split's partial results, without; see ``Outputs``."""
    H: tl.constexpr = config.GROUP * config.HEADS_KV
    off_out = rows.i_b * strides.out[0] + rows.token * strides.out[1] + rows.head.to(tl.int64) * strides.out[2]
    off_lse = rows.i_b * strides.lse[0] + rows.head.to(tl.int64) * strides.lse[1] + rows.token * strides.lse[2]
    o_d = tl.arange(0, config.BLOCK_DV)
    o_d_out = wide(o_d, config.WIDE) * strides.out[3]
    if not NATURAL:
        running_max = running_max * LN_2
    m_tile = rows.mask[:, None]
    if config.DV != config.BLOCK_DV:
        m_tile = m_tile & (o_d < config.DV)[None, :]
    if num_splits == 1:
        if p_sinks is not None:
            b_sink = tl.load(p_sinks + rows.head).to(tl.float32)
            b_sink = tl.where(rows.possible, b_sink, float("-inf"))
            acc, running_max, row_sum = with_sink(acc, running_max, row_sum, b_sink)
        b_out = normalised(acc, row_sum)
        p_out = outputs.out + off_out[:, None] + o_d_out[None, :]
        tl.store(p_out, b_out.to(outputs.out.dtype.element_ty), mask=m_tile)
        if outputs.lse is not None:
            tl.store(outputs.lse + off_lse, log_sum_exp(running_max, row_sum), mask=rows.mask)
    else:
        i_part = i_split.to(tl.int64) * rows.total + rows.row
        p_part = outputs.part + (i_part * H + rows.head)[:, None] * config.DV + o_d[None, :]
        if NATURAL:
            b_part = normalised(acc, row_sum)
        else:
            # One quotient a row: a result of 16 bits does not show that its product is rounded once more.
            b_part = acc * (1.0 / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
        tl.store(p_part, b_part, mask=m_tile)
        b_lse = tl.where(rows.possible, log_sum_exp(running_max, row_sum), float("inf"))
        p_part_lse = outputs.part_lse + (i_split.to(tl.int64) * H + rows.head) * rows.total + rows.row
        tl.store(p_part_lse, b_lse, mask=rows.mask)
