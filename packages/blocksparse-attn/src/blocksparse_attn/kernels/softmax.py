"""The online softmax (arXiv 1805.02867, as FlashAttention does), and its parts over different keys brought together.

Of 16-bit numbers it is taken in base 2: scores carry a factor log2(e), so that exp2 serves. float32 would show that
rounding; its scores are natural. Results and parts are natural for all.
"""

import triton
import triton.language as tl

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
def finite(m):
    """What to subtract before exponentiation: the largest score, and 0 for a row that has none."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh; where the quotient would cancel, below 1/4, the series serves, if float32's last digits are wanted."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    y = (1.0 - e) / (1.0 + e)
    y = tl.where(x < 0, -y, y)
    if PRECISE:
        s = x * x
        series = 1.0 + s * (
            -0.3333333333333333
            + s
            * (0.13333333333333333 + s * (-0.05396825396825397 + s * (0.021869488536155203 - s * 0.008863235529902197)))
        )
        y = tl.where(tl.abs(x) < 0.25, x * series, y)
    return y


@triton.jit
def cap(scores, softcap, PRECISE: tl.constexpr):
    """softcap * tanh(scores / softcap)."""
    return softcap * tanh(scores / softcap, PRECISE)


@triton.jit
def dot_by_parts(b_q, b_k):
    """q k^T, [BLOCK_M, BLOCK_N], of float32: sums of a few products each, which round less than one sum of all."""
    EACH: tl.constexpr = 32 if b_q.shape[1] > 64 else 16
    PARTS: tl.constexpr = b_q.shape[1] // EACH
    q_parts = tl.permute(tl.reshape(b_q, [b_q.shape[0], PARTS, EACH]), (1, 0, 2))
    k_parts = tl.permute(tl.reshape(b_k, [b_k.shape[0], PARTS, EACH]), (1, 2, 0))
    return tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)


@triton.jit
def update(acc, m, total, b_q, b_k, b_v, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """One tile of keys and values into the running output, maximum and sum of a tile of rows.

    seen [BLOCK_M, BLOCK_N]: which rows see which keys. Values of keys that no row sees must be finite.
    """
    NATURAL: tl.constexpr = b_q.dtype == tl.float32
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    if NATURAL:
        b_s = dot_by_parts(b_q, b_k)
    else:
        b_s = tl.dot(b_q, tl.trans(b_k))  # [BLOCK_M, BLOCK_N]
    if SOFTCAP:
        b_s = cap(b_s * scale, softcap, NATURAL) * UNIT
    else:
        b_s = b_s * (scale * UNIT)
    b_s = tl.where(seen, b_s, float("-inf"))
    new_m = tl.maximum(m, tl.max(b_s, 1))
    b_p = power(b_s - finite(new_m)[:, None], NATURAL)
    decay = power(m - finite(new_m), NATURAL)
    new_total = total * decay + tl.sum(b_p, 1)
    if NATURAL:
        # Without a matrix unit one sum over all keys would round as often as there are keys: each tile has its own.
        acc = tl.fma(tl.dot(b_p, b_v, input_precision="ieee"), 1.0, acc * decay[:, None])
    else:
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * decay[:, None])
    return acc, new_m, new_total


@triton.jit
def with_sink(acc, m, total, b_sink):
    """A logit that stands in the denominator only."""
    new_m = tl.maximum(m, b_sink)
    decay = exponential(m - finite(new_m))
    return acc * decay[:, None], new_m, total * decay + exponential(b_sink - finite(new_m))


@triton.jit
def normalised(acc, total):
    """acc / total, and 0 for a row that saw nothing."""
    return tl.div_rn(acc, tl.where(total == 0, 1.0, total)[:, None])


@triton.jit
def logarithm(m, total):
    """m + log(total), and -inf for a row that saw nothing."""
    return tl.where(total == 0, float("-inf"), m + tl.log(tl.where(total == 0, 1.0, total)))


@triton.jit
def store(
    p_q, p_sinks, p_out, p_lse, p_part, p_part_lse, acc, m, total, row, o_h, possible, off_out, off_lse, o_d_out, rows,
    i_split, m_row, DV: tl.constexpr, BLOCK_DV: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A tile's results, with sinks, or a split's part of them, without.

    Parts are p_part [SPLITS, rows, H, DV] and p_part_lse [SPLITS, H, rows]; the latter is +inf, which no sum is, in
    rows of no sequence. A head o_h for each row.
    """
    if p_q.dtype.element_ty != tl.float32:
        m = m * LN_2
    m_tile = m_row[:, None]
    o_d = tl.arange(0, BLOCK_DV)
    if DV != BLOCK_DV:
        m_tile = m_tile & (o_d < DV)[None, :]
    if SPLITS == 1:
        if p_sinks is not None:
            b_sink = tl.load(p_sinks + o_h).to(tl.float32)
            acc, m, total = with_sink(acc, m, total, tl.where(possible, b_sink, float("-inf")))
        b_out = normalised(acc, total)
        tl.store(p_out + off_out[:, None] + o_d_out[None, :], b_out.to(p_out.dtype.element_ty), mask=m_tile)
        if p_lse is not None:
            tl.store(p_lse + off_lse, logarithm(m, total), mask=m_row)
    else:
        place = i_split.to(tl.int64) * rows + row
        tl.store(p_part + (place * H + o_h)[:, None] * DV + o_d[None, :], normalised(acc, total), mask=m_tile)
        b_lse = tl.where(possible, logarithm(m, total), float("inf"))
        tl.store(p_part_lse + (i_split.to(tl.int64) * H + o_h) * rows + row, b_lse, mask=m_row)


@triton.jit(do_not_specialize=["rows", "length"])
def merge(
    p_sinks, p_out, p_lse, p_part, p_part_lse, rows, length, s_out, s_lse,
    H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Results from their parts, see ``store``; of a padded batch with ``length`` rows for each sequence."""
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    row = (pid // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_d = tl.arange(0, BLOCK_DV)
    m_row = row < rows
    m_tile = m_row[:, None] & (o_d < DV)[None, :]
    acc = tl.zeros([TOKENS, BLOCK_DV], tl.float32)
    m = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    # What the last part says is read behind the loop, as all agree; Triton wants it to be there before.
    possible = m_row
    for i_split in range(SPLITS):
        split = row * 0 + i_split
        b_part = tl.load(p_part + ((split * rows + row) * H + i_h)[:, None] * DV + o_d[None, :], mask=m_tile, other=0.0)
        b_lse = tl.load(p_part_lse + (split * H + i_h) * rows + row, mask=m_row, other=float("inf"))
        possible = b_lse != float("inf")
        b_lse = tl.where(possible, b_lse, float("-inf"))
        new_m = tl.maximum(m, b_lse)
        decay = exponential(m - finite(new_m))
        weight = exponential(b_lse - finite(new_m))
        # A part that saw nothing may hold anything.
        b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_part)
        acc = acc * decay[:, None] + b_part * weight[:, None]
        total = total * decay + weight
        m = new_m
    if p_sinks is not None:
        b_sink = tl.zeros([TOKENS], tl.float32) + tl.load(p_sinks + i_h).to(tl.float32)
        acc, m, total = with_sink(acc, m, total, tl.where(possible, b_sink, float("-inf")))
    i_n = row * 0
    token = row
    if PADDED:
        i_n = row // length
        token = row % length
    o_d_out = o_d
    if WIDE:
        o_d_out = o_d.to(tl.int64)
    p_tile = p_out + (i_n * s_out[0] + token * s_out[1] + i_h * s_out[2])[:, None] + (o_d_out * s_out[3])[None, :]
    tl.store(p_tile, normalised(acc, total).to(p_out.dtype.element_ty), mask=m_tile)
    if p_lse is not None:
        tl.store(p_lse + i_n * s_lse[0] + i_h * s_lse[1] + token * s_lse[2], logarithm(m, total), mask=m_row)
