"""Parts of a softmax over different keys, brought together: the splits of one call, or the results of two.

Maxima and logarithms are natural ones here: by way of base 2 they would be rounded once more, and a large one shows it.
"""

import triton
import triton.language as tl

from prefix_prefill.kernels.tiles import lengths, locate

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
def with_sink(acc, m, total, b_sink):
    """A logit that stands in the denominator only."""
    new_m = tl.maximum(m, b_sink)
    decay = exponential(m - finite(new_m))
    return acc * decay[:, None], new_m, total * decay + exponential(b_sink - finite(new_m))


@triton.jit
def finite(m):
    """What to subtract before exponentiation: the largest score, and 0 for a row that has none."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def normalised(acc, total):
    """acc / total, and 0 for a row that saw nothing."""
    return tl.div_rn(acc, tl.where(total == 0, 1.0, total)[:, None])


@triton.jit
def logarithm(m, total):
    """m + log(total), and -inf for a row that saw nothing."""
    return tl.where(total == 0, float("-inf"), m + tl.log(tl.where(total == 0, 1.0, total)))


@triton.jit
def store_results(p_out, p_lse, p_out_scale, out_factor, acc, m, total, off_out, off_lse, o_d_out, m_row, m_tile,
                  LIMIT: tl.constexpr):  # fmt: skip
    """The output over its scale, within +-LIMIT if there is one, and the natural logarithm of the sum, if wanted."""
    out_scale = out_factor
    if p_out_scale is not None:
        out_scale = out_factor * tl.load(p_out_scale)
    b_out = tl.div_rn(normalised(acc, total), out_scale)
    if LIMIT:
        b_out = tl.where(b_out > LIMIT, LIMIT, tl.where(b_out < -LIMIT, -LIMIT, b_out))
    tl.store(p_out + off_out[:, None] + o_d_out[None, :], b_out.to(p_out.dtype.element_ty), mask=m_tile)
    if p_lse is not None:
        tl.store(p_lse + off_lse, logarithm(m, total), mask=m_row)


@triton.jit
def include(acc, m, total, b_part, b_lse):
    """One more part, its output normalised. A part that saw nothing may hold anything."""
    new_m = tl.maximum(m, b_lse)
    decay = exponential(m - finite(new_m))
    weight = exponential(b_lse - finite(new_m))
    b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_part.to(tl.float32))
    return acc * decay[:, None] + b_part * weight[:, None], new_m, total * decay + weight


@triton.jit(do_not_specialize=["rows", "num_sequences", "capacity", "places"])
def merge_splits(
    p_cu, p_seqlens, p_sinks, p_out_scale, p_out, p_lse, p_part, p_part_lse,
    rows, num_sequences, capacity, places, out_factor, s_out, s_lse,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    APART: tl.constexpr, LIMIT: tl.constexpr, SKIP_DECODE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Results from their parts: p_part [SPLITS, rows, H, D], p_part_lse [SPLITS, H, rows]."""
    pid = tl.program_id(0)
    i_h = (pid // places).to(tl.int64)
    i_n, i_tile, begin, q_len = locate(p_cu, pid % places, num_sequences, rows, TOKENS)
    _, _, possible = lengths(p_seqlens, i_n, num_sequences, q_len, capacity, APART)
    skipped = False
    if SKIP_DECODE:
        skipped = possible & (q_len == 1)
    if (q_len > 0) & (not skipped):
        o_t = i_tile * TOKENS + tl.arange(0, TOKENS)
        o_d = tl.arange(0, BLOCK_D)
        m_row = o_t < q_len
        m_tile = m_row[:, None] & (o_d < D)[None, :]
        row = begin + tl.minimum(o_t, q_len - 1)
        acc = tl.zeros([TOKENS, BLOCK_D], tl.float32)
        m = tl.full([TOKENS], float("-inf"), tl.float32)
        total = tl.zeros([TOKENS], tl.float32)
        for i_split in range(SPLITS):
            split = row * 0 + i_split
            b_part = tl.load(
                p_part + ((split * rows + row) * H + i_h)[:, None] * D + o_d[None, :], mask=m_tile, other=0.0
            )
            b_lse = tl.load(p_part_lse + (split * H + i_h) * rows + row, mask=m_row, other=float("-inf"))
            acc, m, total = include(acc, m, total, b_part, b_lse)
        if p_sinks is not None:
            b_sink = tl.zeros([TOKENS], tl.float32) + tl.load(p_sinks + i_h).to(tl.float32)
            acc, m, total = with_sink(acc, m, total, tl.where(possible, b_sink, float("-inf")))
        o_d_out = o_d
        if WIDE:
            o_d_out = o_d.to(tl.int64)
        store_results(
            p_out, p_lse, p_out_scale, out_factor, acc, m, total, row * s_out[0] + i_h * s_out[1],
            i_h * s_lse[0] + row * s_lse[1], o_d_out * s_out[2], m_row, m_tile, LIMIT,
        )  # fmt: skip


@triton.jit
def load_lse(p_lse, mask):
    """Logarithms of a part given to us, where +inf says as well as -inf that it saw no key: FlashMLA writes that."""
    b_lse = tl.load(p_lse, mask=mask, other=float("-inf"))
    return tl.where(b_lse == float("inf"), float("-inf"), b_lse)


@triton.jit(do_not_specialize=["rows"])
def merge_states(
    p_out_a, p_lse_a, p_out_b, p_lse_b, p_out, p_lse, rows, s_out_a, s_lse_a, s_out_b, s_lse_b, s_out, s_lse,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Two results over different keys: outputs [rows, H, D] by (row, head, element), lse [H, rows] by (head, row)."""
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    o_t = pid // H * TOKENS + tl.arange(0, TOKENS)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    m_row = o_t < rows
    m_tile = m_row[:, None] & (o_d < D)[None, :]
    row = o_t.to(tl.int64)
    acc = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    m = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    b_a = tl.load(
        p_out_a + (row * s_out_a[0] + i_h * s_out_a[1])[:, None] + o_d[None, :] * s_out_a[2], mask=m_tile, other=0.0
    )
    b_lse = load_lse(p_lse_a + i_h * s_lse_a[0] + row * s_lse_a[1], m_row)
    acc, m, total = include(acc, m, total, b_a, b_lse)
    b_b = tl.load(
        p_out_b + (row * s_out_b[0] + i_h * s_out_b[1])[:, None] + o_d[None, :] * s_out_b[2], mask=m_tile, other=0.0
    )
    b_lse = load_lse(p_lse_b + i_h * s_lse_b[0] + row * s_lse_b[1], m_row)
    acc, m, total = include(acc, m, total, b_b, b_lse)
    store_results(
        p_out, p_lse, None, 1.0, acc, m, total, row * s_out[0] + i_h * s_out[1], i_h * s_lse[0] + row * s_lse[1],
        o_d * s_out[2], m_row, m_tile, 0,
    )  # fmt: skip
