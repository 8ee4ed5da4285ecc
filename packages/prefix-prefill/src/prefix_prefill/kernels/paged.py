"""Softmax attention of new tokens over a paged cache and themselves, in one pass over the keys, on every target.

The softmax is taken online (arXiv 1805.02867, as FlashAttention does), of 16-bit numbers in base 2: scores carry a
factor log2(e), so that exp2 serves. float32 would show that rounding; its scores are natural. A program walks the
cached keys first, then, where these are tensors of their own, the new ones.
"""

import triton
import triton.language as tl

from prefix_prefill.kernels.merge import (
    LN_2,
    LOG2_E,
    exponential,
    finite,
    logarithm,
    normalised,
    store_results,
    with_sink,
)
from prefix_prefill.kernels.tiles import cap, keys_of_tile, lengths, locate, part_of, share, visible


@triton.jit
def wide(o, WIDE: tl.constexpr):
    """Offsets along a head in 64 bits, only where a head's elements lie that far apart."""
    if WIDE:
        o = o.to(tl.int64)
    return o


@triton.jit
def decoded(bits, FP8: tl.constexpr, dtype: tl.constexpr):
    """What 8-bit floats stand for, from their bits: exact, and on targets too that do not know the type.

    FP8 is 4 for e4m3 (no infinity, its NaN is all ones), 5 for e5m2, which is the upper half of a float16.
    """
    if FP8 == 0:
        x = bits
    elif FP8 == 5:
        x = (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:
        magnitude = (bits & 0x7F).to(tl.uint16)
        # An exponent's bias is 7 there, 15 in float16.
        normal = ((magnitude << 7) + (8 << 10)).to(tl.float16, bitcast=True).to(tl.float32)
        x = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        x = tl.where(magnitude == 0x7F, float("nan"), x)
        x = tl.where(bits >= 0x80, -x, x).to(dtype)
    return x


@triton.jit
def power(x, NATURAL: tl.constexpr):
    """e or 2 to the power of x."""
    if NATURAL:
        y = exponential(x)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def dot_by_parts(b_q, b_k):
    """q k^T, [BLOCK_M, BLOCK_N], of float32: sums of a few products each, which round less than one sum of all."""
    EACH: tl.constexpr = 32 if b_q.shape[1] > 64 else 16
    PARTS: tl.constexpr = b_q.shape[1] // EACH
    q_parts = tl.permute(tl.reshape(b_q, [b_q.shape[0], PARTS, EACH]), (1, 0, 2))
    k_parts = tl.permute(tl.reshape(b_k, [b_k.shape[0], PARTS, EACH]), (1, 2, 0))
    return tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)


@triton.jit
def load_across(
    p_v, p_row, at, o_dv, s_v, num_blocks, low, high,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, BOX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Values [BLOCK_N, BLOCK_D] where a page's places, not a head's elements, lie next to each other.

    BOX places of a page lie together, and are loaded together: masks are of whole boxes, or each would be of one place.
    """
    o_box = at + tl.arange(0, BLOCK_N // BOX) * BOX
    o_in = tl.arange(0, BOX)
    m_box = o_box < high
    if MASKED:
        m_box = m_box & (o_box + BOX > low)
    block = tl.load(p_row + o_box // PAGE, mask=m_box, other=-1).to(tl.int64)
    m_box = (block >= 0) & (block < num_blocks)
    # A remainder is not known to be a multiple: places would be loaded one by one.
    off = tl.where(m_box, block, 0) * s_v[0] + tl.multiple_of(o_box % PAGE, BOX)
    m_tile = m_box[:, None, None]
    if D != BLOCK_D:
        m_tile = m_tile & (tl.arange(0, BLOCK_D) < D)[None, :, None]
    b_v = tl.load(p_v + off[:, None, None] + o_dv[None, :, None] + o_in[None, None, :], mask=m_tile, other=0)
    if MASKED:
        o_key = o_box[:, None] + o_in[None, :]
        b_v = tl.where(((o_key >= low) & (o_key < high))[:, None, :], b_v, 0)
    return tl.reshape(tl.permute(b_v, (0, 2, 1)), [BLOCK_N, BLOCK_D])


@triton.jit
def update(
    acc, m, total, b_q, p_k, p_v, off_k, off_v, o_dk, o_dv, fits, o_key, position, b_ks, b_vs, factor, softcap, slope,
    left, right, low, high, p_row, at, s_v, num_blocks,
    PAGE: tl.constexpr, BOX: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into the running output, maximum and sum of a tile of rows.

    ``factor`` times q.k is the score. ``fits``: keys that exist; the others are read as zeros. With K_SCALED each key's
    score is multiplied by b_ks, with V_SCALED each value by b_vs. BOX: as in ``load_across``, or 0.
    """
    dtype: tl.constexpr = b_q.dtype
    NATURAL: tl.constexpr = dtype == tl.float32
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    BLOCK_N: tl.constexpr = o_key.shape[0]
    m_key = fits
    if MASKED:
        # Values of keys that no row sees are left out of the product: 0 times NaN would be NaN.
        m_key = fits & (o_key >= low) & (o_key < high)
    m_tile = m_key[:, None]
    if D != BLOCK_D:
        m_tile = m_tile & (tl.arange(0, BLOCK_D) < D)[None, :]
    b_k = decoded(tl.load(p_k + off_k[:, None] + o_dk[None, :], mask=m_tile, other=0), FP8, dtype)  # [BLOCK_N, BLOCK_D]
    if NATURAL:
        b_s = dot_by_parts(b_q, b_k)
    else:
        b_s = tl.dot(b_q, tl.trans(b_k))  # [BLOCK_M, BLOCK_N]
    if K_SCALED:
        b_s = b_s * b_ks[None, :]
    if SOFTCAP:
        b_s = cap(b_s * factor, softcap, NATURAL) * UNIT
    else:
        b_s = b_s * (factor * UNIT)
    if ALIBI:
        b_s += slope[:, None] * (o_key[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = visible(o_key[None, :], position[:, None], left, right, HAS_LEFT, HAS_RIGHT)
        b_s = tl.where(seen & ((o_key >= low) & (o_key < high))[None, :], b_s, float("-inf"))
    new_m = tl.maximum(m, tl.max(b_s, 1))
    b_p = power(b_s - finite(new_m)[:, None], NATURAL)
    decay = power(m - finite(new_m), NATURAL)
    new_total = total * decay + tl.sum(b_p, 1)
    if BOX:
        b_v = load_across(p_v, p_row, at, o_dv, s_v, num_blocks, low, high, D, BLOCK_D, BLOCK_N, PAGE, BOX, MASKED)
    else:
        b_v = tl.load(p_v + off_v[:, None] + o_dv[None, :], mask=m_tile, other=0)
    b_v = decoded(b_v, FP8, dtype)  # [BLOCK_N, BLOCK_D]
    most = 1.0
    if V_SCALED:
        # Relative to the tile's largest scale, so that 16 bits hold the weights as well as without scales.
        most = tl.max(tl.abs(b_vs), 0)
        b_p = b_p * (b_vs / tl.where(most == 0, 1.0, most))[None, :]
    if V_SCALED or NATURAL:
        # Without a matrix unit one sum over all keys would round as often as there are keys: each tile has its own.
        acc = tl.fma(tl.dot(b_p.to(dtype), b_v, input_precision="ieee"), most, acc * decay[:, None])
    else:
        acc = tl.dot(b_p.to(dtype), b_v, acc * decay[:, None], input_precision="ieee")
    return acc, new_m, new_total


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_blocks", "capacity", "s_table", "places", "left", "right"])
def attend(
    p_q, p_k, p_v, p_k_cache, p_v_cache, p_table, p_cu, p_seqlens, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale,
    p_out, p_lse, p_part, p_part_lse,
    rows, num_sequences, num_blocks, capacity, s_table, places, scale, softcap, left, right, k_factor, v_factor,
    out_factor, s_q, s_k, s_v, s_k_cache, s_v_cache, s_k_scale, s_v_scale, s_out, s_lse,
    GROUP: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BOX: tl.constexpr, X: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, FP8: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, LIMIT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SKIP_DECODE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of one tile over one split of their keys.

    Strides are (token, head, element) of q, k, v and out, (page, place, head, element / X, element % X) of the caches,
    (page, place, head) of scales, (head, token) of lse; where X elements of a key lie together, STEP is the stride of
    places, otherwise 0. With SPLITS > 1 results go to p_part [SPLITS, rows, H, D] and p_part_lse [SPLITS, H, rows],
    without sinks, otherwise to p_out and p_lse.
    """
    HEADS: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    APART: tl.constexpr = p_k is not None
    NATURAL: tl.constexpr = p_q.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    i_kv, i_w, i_hb, i_split = part_of(pid, places, HEADS_KV, HEAD_TILES)

    i_n, i_tile, begin, q_len = locate(p_cu, i_w, num_sequences, rows, TOKENS)
    context, length, possible = lengths(p_seqlens, i_n, num_sequences, q_len, capacity, APART)
    skipped = False
    if SKIP_DECODE:
        skipped = possible & (q_len == 1)
    if (q_len > 0) & (not skipped):
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_t = i_tile * TOKENS + o_m // HEADS
        o_g = i_hb * HEADS + o_m % HEADS
        m_row = (o_m < TOKENS * HEADS) & (o_t < q_len) & (o_g < GROUP)
        o_t = tl.minimum(o_t, q_len - 1)
        o_h = i_kv * GROUP + tl.minimum(o_g, GROUP - 1)
        row = begin + o_t
        m_tile = m_row[:, None]
        if D != BLOCK_D:
            m_tile = m_tile & (o_d < D)[None, :]
        o_d_wide = wide(o_d, WIDE)
        b_q = tl.load(p_q + (row * s_q[0] + o_h.to(tl.int64) * s_q[1])[:, None] + o_d_wide[None, :] * s_q[2],
                      mask=m_tile, other=0.0)  # [BLOCK_M, BLOCK_D]  # fmt: skip
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if p_alibi is not None:
            slope = tl.load(p_alibi + o_h).to(tl.float32) * (1.0 if NATURAL else LOG2_E)
        position = context + o_t

        low, high = keys_of_tile(context, length, i_tile, q_len, left, right, TOKENS, HAS_LEFT, HAS_RIGHT)
        high = tl.where(possible, high, low)
        # The keys that all rows see, up to the end of a tile of keys.
        all_low = low
        all_high = high
        if HAS_LEFT:
            all_low = tl.maximum(context + tl.minimum((i_tile + 1) * TOKENS, q_len) - 1, left) - left
        if HAS_RIGHT:
            all_high = tl.minimum(high, context + i_tile * TOKENS + 1 + tl.minimum(right, length))
        # Each part of the keys is walked in tiles of its own, the cached ones from the tile that holds ``low`` on.
        cached_high = high
        if APART:
            cached_high = tl.minimum(high, context)
        cached_first = low // BLOCK_N
        cached_tiles = tl.maximum((cached_high + BLOCK_N - 1) // BLOCK_N - cached_first, 0)
        new_tiles = 0
        new_first = 0
        if APART:
            new_first = tl.maximum(low - context, 0) // BLOCK_N
            new_tiles = tl.maximum((high - context + BLOCK_N - 1) // BLOCK_N - new_first, 0)
        from_tile, to_tile = share(cached_tiles + new_tiles, i_split, SPLITS)

        factor = scale
        own_v = 1.0
        if K_SCALED:
            k_scales = p_k_scale + i_kv.to(tl.int64) * s_k_scale[2]
        if V_SCALED:
            v_scales = p_v_scale + i_kv.to(tl.int64) * s_v_scale[2]
        if K_SCALED == 1:
            factor = scale * tl.load(k_scales)
        if V_SCALED == 1:
            own_v = tl.load(v_scales)
        cached_factor = factor * k_factor
        own_v = own_v * v_factor

        o_n = tl.arange(0, BLOCK_N)
        k_head = p_k_cache + i_kv.to(tl.int64) * s_k_cache[2]
        v_head = p_v_cache + i_kv.to(tl.int64) * s_v_cache[2]
        # A stride of 8 is not known to be one of whole 16 bytes: only multiples of 16 are compiled for as such.
        s_place = STEP if STEP else s_k_cache[1]
        o_dk = o_d_wide // X * s_k_cache[3] + o_d_wide % X * s_k_cache[4]
        o_dv = o_d_wide * s_v_cache[4]
        p_row = p_table + tl.minimum(tl.maximum(i_n, 0), num_sequences - 1).to(tl.int64) * s_table
        first = (cached_first + tl.minimum(from_tile, cached_tiles)) * BLOCK_N
        last = (cached_first + tl.minimum(to_tile, cached_tiles)) * BLOCK_N
        # Edges of a window, of causality and of the sequence are in tiles that not all rows see whole.
        whole_from = tl.minimum(tl.maximum((all_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, first), last)
        whole_to = tl.maximum(tl.minimum(tl.minimum(all_high, cached_high) // BLOCK_N * BLOCK_N, last), whole_from)
        for PHASE in tl.static_range(3):
            start = first if PHASE == 0 else (whole_from if PHASE == 1 else whole_to)
            stop = whole_from if PHASE == 0 else (whole_to if PHASE == 1 else last)
            if PHASE == 1 or PHASE == 2 or HAS_LEFT:
                for at in tl.range(start, stop, BLOCK_N, num_stages=STAGES if PHASE == 1 else 1):
                    o_key = at + o_n
                    block = tl.load(p_row + o_key // PAGE, mask=o_key < cached_high, other=-1).to(tl.int64)
                    fits = (block >= 0) & (block < num_blocks)
                    block = tl.where(fits, block, 0)
                    place = (o_key % PAGE).to(tl.int64)
                    b_ks = o_n.to(tl.float32)
                    b_vs = b_ks
                    if K_SCALED == 2:
                        b_ks = tl.load(k_scales + block * s_k_scale[0] + place * s_k_scale[1],
                                       mask=fits & (o_key >= low), other=0.0)  # fmt: skip
                    if V_SCALED == 2:
                        b_vs = tl.load(v_scales + block * s_v_scale[0] + place * s_v_scale[1],
                                       mask=fits & (o_key >= low), other=0.0)  # fmt: skip
                    acc, m, total = update(
                        acc, m, total, b_q, k_head, v_head, block * s_k_cache[0] + place * s_place,
                        block * s_v_cache[0] + place * s_v_cache[1], o_dk, o_dv, fits, o_key, position, b_ks, b_vs,
                        cached_factor, softcap, slope, left, right, low, cached_high, p_row, at, s_v_cache, num_blocks,
                        PAGE, BOX, D, BLOCK_D, FP8, K_SCALED == 2, V_SCALED == 2, SOFTCAP, p_alibi is not None,
                        HAS_LEFT, HAS_RIGHT, PHASE != 1,
                    )  # fmt: skip
        acc = acc * own_v
        if APART:
            k_head = p_k + begin * s_k[0] + i_kv.to(tl.int64) * s_k[1]
            v_head = p_v + begin * s_v[0] + i_kv.to(tl.int64) * s_v[1]
            start = (new_first + tl.maximum(from_tile - cached_tiles, 0)) * BLOCK_N
            stop = (new_first + tl.maximum(to_tile - cached_tiles, 0)) * BLOCK_N
            # Few tiles, most of them on the diagonal.
            for at in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
                o_new = at + o_n
                o_key = context + o_new
                fits = o_new < q_len
                o_row = tl.minimum(o_new, q_len - 1).to(tl.int64)
                acc, m, total = update(
                    acc, m, total, b_q, k_head, v_head, o_row * s_k[0], o_row * s_v[0], o_d_wide * s_k[2],
                    o_d_wide * s_v[2], fits, o_key, position, o_n, o_n, scale, softcap, slope, left, right, low, high,
                    p_row, at, s_v_cache, num_blocks, PAGE, 0, D, BLOCK_D, 0, False, False, SOFTCAP,
                    p_alibi is not None, HAS_LEFT, HAS_RIGHT, True,
                )  # fmt: skip

        if not NATURAL:
            m = m * LN_2
        if SPLITS == 1:
            if p_sinks is not None:
                b_sink = tl.load(p_sinks + o_h).to(tl.float32)
                b_sink = tl.where(possible, b_sink, float("-inf"))
                acc, m, total = with_sink(acc, m, total, b_sink)
            store_results(
                p_out, p_lse, p_out_scale, out_factor, acc, m, total, row * s_out[0] + o_h.to(tl.int64) * s_out[1],
                o_h.to(tl.int64) * s_lse[0] + row * s_lse[1], o_d_wide * s_out[2], m_row, m_tile, LIMIT,
            )  # fmt: skip
        else:
            H: tl.constexpr = GROUP * HEADS_KV
            place = i_split.to(tl.int64) * rows + row
            tl.store(p_part + (place * H + o_h)[:, None] * D + o_d[None, :], normalised(acc, total), mask=m_tile)
            tl.store(p_part_lse + (i_split.to(tl.int64) * H + o_h) * rows + row, logarithm(m, total), mask=m_row)
