"""Softmax attention of new tokens over a paged cache and themselves, in one pass over the keys, on every target.

The softmax is online (arXiv 1805.02867, as in FlashAttention), of 16-bit numbers in base 2: scores carry a factor
log2(e), so that exp2 serves. float32 would show that rounding; its scores are natural. The main loop takes the cached
keys first, then, where they are tensors of their own, the new ones.
"""

import triton
import triton.language as tl

from prefix_prefill.kernels.groups import CONSTANT_FIELDS, Excess, Keys, Pages, Rows, Scoring, Source
from prefix_prefill.kernels.merge import include
from prefix_prefill.kernels.schedule import find_tile, key_range, lengths, program_tile, split_range
from prefix_prefill.kernels.softmax import (
    LN_2,
    LOG2_E,
    Target,
    drafted,
    exponential,
    finite,
    halves_of,
    log_sum_exp,
    normalised,
    quantised_rows,
    store_results,
    tanh,
    visible,
    with_sink,
)


@triton.jit
def wide(o, WIDE: tl.constexpr):
    """Offsets along a head in 64 bits, only where a head's elements lie that far apart."""
    if WIDE:
        o = o.to(tl.int64)
    return o


@triton.jit
def decoded(bits, FP8: tl.constexpr, dtype: tl.constexpr):
    """8-bit floats from their bits: exact, and on targets too that do not know the type.

    FP8 is 4 for e4m3 (no infinity, its NaN is all ones), 5 for e5m2, which is the upper half of a float16.
    """
    if FP8 == 0:
        x = bits
    elif FP8 == 5:
        x = (bits.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:
        bits = bits.to(tl.uint8, bitcast=True)
        magnitude = (bits & 0x7F).to(tl.uint16)
        # The exponent's bias is 7 there, 15 in float16.
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
def dot_in_parts(b_q, b_k):
    """q k^T, [BLOCK_M, BLOCK_N], of float32: sums of a few products each, which round less than one sum of all."""
    EACH: tl.constexpr = 32 if b_q.shape[1] > 64 else 16
    PARTS: tl.constexpr = b_q.shape[1] // EACH
    q_parts = tl.permute(tl.reshape(b_q, [b_q.shape[0], PARTS, EACH]), (1, 0, 2))
    k_parts = tl.permute(tl.reshape(b_k, [b_k.shape[0], PARTS, EACH]), (1, 2, 0))
    return tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)


@triton.jit
def load_transposed(p_v, o_dv, pages, low, high, MASKED: tl.constexpr, C):
    """Values [BLOCK_N, BLOCK_DV] where a page's tokens, not a head's elements, are contiguous.

    BOX contiguous tokens of a page are loaded together, and masked together, or each would be loaded by itself.
    """
    o_box = pages.at + tl.arange(0, C.BLOCK_N // C.BOX) * C.BOX
    o_in = tl.arange(0, C.BOX)
    m_box = o_box < high
    if MASKED:
        m_box = m_box & (o_box + C.BOX > low)
    block = tl.load(pages.p_row + o_box // C.PAGE, mask=m_box, other=-1).to(tl.int64)
    m_box = (block >= 0) & (block < pages.num_blocks)
    # Triton does not know a remainder to be a multiple: tokens would be loaded one by one.
    off = tl.where(m_box, block, 0) * pages.s_page + tl.multiple_of(o_box % C.PAGE, C.BOX)
    m_tile = m_box[:, None, None]
    if C.DV != C.BLOCK_DV:
        m_tile = m_tile & (tl.arange(0, C.BLOCK_DV) < C.DV)[None, :, None]
    b_v = tl.load(p_v + off[:, None, None] + o_dv[None, :, None] + o_in[None, None, :], mask=m_tile, other=0)
    if MASKED:
        o_key = o_box[:, None] + o_in[None, :]
        b_v = tl.where(((o_key >= low) & (o_key < high))[:, None, :], b_v, 0)
    return tl.reshape(tl.permute(b_v, (0, 2, 1)), [C.BLOCK_N, C.BLOCK_DV])


@triton.jit
def load_packed(keys, m_key, C):
    """Keys [BLOCK_N, BLOCK_D] in the order of memory: CHUNK elements, then those of the page's next token."""
    o_chunk = tl.arange(0, C.BLOCK_D // C.CHUNK)
    m_tile = m_key[None, :, None]
    if C.D != C.BLOCK_D:
        m_tile = m_tile & (o_chunk * C.CHUNK < C.D)[:, None, None]
    o_chunk = wide(o_chunk, C.WIDE) * keys.s_dk[0]
    o_x = wide(tl.arange(0, C.CHUNK), C.WIDE) * keys.s_dk[1]
    p_tile = keys.p_k + keys.off_k[None, :, None] + o_chunk[:, None, None] + o_x[None, None, :]
    return tl.reshape(tl.permute(tl.load(p_tile, mask=m_tile, other=0), (1, 0, 2)), [C.BLOCK_N, C.BLOCK_D])


@triton.jit
def added(total, excess, rescale, addend):
    """total * rescale + addend, and its excess: Kahan's sum, whose error does not grow with the number of addends."""
    scaled = total * rescale
    addend = addend - excess * rescale
    new = scaled + addend
    return new, (new - scaled) - addend


@triton.jit
def update(
    acc, running_max, row_sum, excess, rows, keys, scoring, pages, ALIBI: tl.constexpr, source: tl.constexpr, C
):  # fmt: skip
    """One tile of keys and values into the accumulator, running max and row sum of a tile of rows.

    Keys that do not exist are loaded as zeros.
    """
    dtype: tl.constexpr = rows.q.dtype
    NATURAL: tl.constexpr = dtype == tl.float32
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    low = scoring.low
    high = scoring.high
    o_key = keys.o_key
    m_key = keys.exists
    if source.MASKED:
        # Values of keys that no row sees are not loaded: a weight of 0 times NaN would be NaN.
        m_key = m_key & (o_key >= low) & (o_key < high)
    if source.BOX and C.CHUNK:
        b_k = load_packed(keys, m_key, C)
    else:
        m_k = m_key[:, None]
        if C.D != C.BLOCK_D:
            m_k = m_k & (tl.arange(0, C.BLOCK_D) < C.D)[None, :]
        b_k = tl.load(keys.p_k + keys.off_k[:, None] + keys.o_dk[None, :], mask=m_k, other=0)
    b_k = decoded(b_k, source.FP8, dtype)  # [BLOCK_N, BLOCK_D]
    if NATURAL:
        b_s = dot_in_parts(rows.q, b_k)
    else:
        b_s = tl.dot(rows.q, tl.trans(b_k))  # [BLOCK_M, BLOCK_N]
    if source.K_SCALED:
        b_s = b_s * keys.k_scale[None, :]
    if C.SOFTCAP:
        b_s = tanh(b_s * (scoring.scale / scoring.softcap)) * (scoring.softcap * UNIT)
    else:
        b_s = b_s * (scoring.scale * UNIT)
    if ALIBI:
        b_s += rows.slope[:, None] * (o_key[None, :] - rows.position[:, None]).to(tl.float32)
    if source.MASKED:
        seen = visible(o_key[None, :], rows.position[:, None], scoring.left, scoring.right, C.HAS_LEFT, C.HAS_RIGHT)
        if C.DRAFT:
            o_new = (o_key - scoring.context)[None, :]
            seen = seen & drafted(o_new, rows.draft_low[:, None], rows.draft_high[:, None])
        b_s = tl.where(seen & ((o_key >= low) & (o_key < high))[None, :], b_s, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(b_s, 1))
    b_p = power(b_s - finite(new_max)[:, None], NATURAL)
    rescale = power(running_max - finite(new_max), NATURAL)
    if NATURAL:
        # A row may see thousands of tiles.
        new_sum, excess_sum = added(row_sum, excess.row_sum, rescale, tl.sum(b_p, 1))
    else:
        new_sum = row_sum * rescale + tl.sum(b_p, 1)
    if source.BOX:
        b_v = load_transposed(keys.p_v, keys.o_dv, pages, low, high, source.MASKED, C)
    else:
        m_v = m_key[:, None]
        if C.DV != C.BLOCK_DV:
            m_v = m_v & (tl.arange(0, C.BLOCK_DV) < C.DV)[None, :]
        b_v = tl.load(keys.p_v + keys.off_v[:, None] + keys.o_dv[None, :], mask=m_v, other=0)
    b_v = decoded(b_v, source.FP8, dtype)  # [BLOCK_N, BLOCK_DV]
    most = 1.0
    if source.V_SCALED:
        # Relative to the tile's largest scale, so that 16 bits hold the weights as well as without scales.
        most = tl.max(tl.abs(keys.v_scale), 0)
        b_p = b_p * (keys.v_scale / tl.where(most == 0, 1.0, most))[None, :]
    if NATURAL:
        # Without a matrix unit one sum over all keys would round as often as there are keys: each tile has its own.
        product = tl.dot(b_p, b_v, input_precision="ieee") * most
        acc, excess_acc = added(acc, excess.acc, rescale[:, None], product)
        excess = Excess(excess_acc, excess_sum)
    elif source.V_SCALED:
        acc = tl.fma(tl.dot(b_p.to(dtype), b_v), most, acc * rescale[:, None])
    else:
        acc = tl.dot(b_p.to(dtype), b_v, acc * rescale[:, None])
    return acc, new_max, new_sum, excess


@triton.jit
def with_levels(acc, running_max, row_sum, p_levels, row, o_h, o_d, m_row, m_out, rows, C):
    """Rows of a cascade's last level together with their parts of the levels before."""
    for i in tl.static_range(C.CARRIED):
        pieces = tl.load(p_levels[3 * i + 2] + row, mask=m_row, other=0)
        for i_piece in range(tl.max(pieces, 0)):
            m_piece = m_row & (i_piece < pieces)
            o_part = ((row * 0 + i_piece) * rows + row) * (C.GROUP * C.HEADS_KV) + o_h
            b_lse = tl.load(p_levels[3 * i + 1] + o_part, mask=m_piece, other=float("-inf"))
            p_part = p_levels[3 * i] + o_part[:, None] * C.DV + o_d[None, :]
            b_part = tl.load(p_part, mask=m_out & m_piece[:, None], other=0.0)
            acc, running_max, row_sum = include(acc, running_max, row_sum, b_part, b_lse)
    return acc, running_max, row_sum


@triton.jit(
    do_not_specialize=[
        "rows", "num_sequences", "num_blocks", "capacity", "s_table", "s_lse_head", "s_lse_token", "num_slots",
        "num_splits", "left", "right",
    ]
)  # fmt: skip
def attend(
    p_q, p_k, p_v, p_k_cache, p_v_cache, p_batch, p_per_head, p_scales, results, p_levels,
    rows, num_sequences, num_blocks, capacity, s_table, s_lse_head, s_lse_token, num_slots, num_splits, left, right,
    scores, numbers, config: tl.constexpr,
):  # fmt: skip
    """Rows of one tile over one split of their keys.

    ``p_batch`` are block table, cu_seqlens_q, seqlens_k and draft_mask, ``p_per_head`` slopes and sinks, ``p_scales``
    k_scale, v_scale and out_scale. ``results`` are ``Results``: where there are several splits, the workspace takes
    them, without sinks. Their number differs from batch to batch and is not compiled in.

    Of a cascade's last level ``p_levels`` are, of each level before, parts [pieces, rows, H, D], their lse [pieces,
    rows, H] and how many pieces there are of each row. Of a level before, which writes such, ``p_levels[0]`` is that
    number, and the workspace takes the others.
    """
    C: tl.constexpr = config if CONSTANT_FIELDS else config._replace()
    p_table, p_cu, p_seqlens, p_draft = p_batch
    p_alibi, p_sinks = p_per_head
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    TOKENS: tl.constexpr = C.TOKENS
    HEAD_TILES: tl.constexpr = (C.GROUP + C.HEADS - 1) // C.HEADS
    H: tl.constexpr = C.GROUP * C.HEADS_KV
    ALIBI: tl.constexpr = p_alibi is not None
    NATURAL: tl.constexpr = p_q.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    i_kv, i_slot, i_hb, i_split = program_tile(pid, num_slots, C.HEADS_KV, HEAD_TILES)

    i_n, i_tile, begin, q_len = find_tile(p_cu, i_slot, num_sequences, rows, TOKENS)
    context, length, valid = lengths(p_seqlens, i_n, num_sequences, q_len, capacity, C.NEW_KV, C.SHARED)
    skipped = False
    if C.SKIP_DECODE:
        skipped = valid & (q_len == 1)
    if (q_len > 0) & (not skipped):
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_dv = tl.arange(0, BLOCK_DV)
        o_t = i_tile * TOKENS + o_m // C.HEADS
        o_g = i_hb * C.HEADS + o_m % C.HEADS
        m_row = (o_m < TOKENS * C.HEADS) & (o_t < q_len) & (o_g < C.GROUP)
        o_t = tl.minimum(o_t, q_len - 1)
        o_h = i_kv * C.GROUP + tl.minimum(o_g, C.GROUP - 1)
        row = begin + o_t
        m_q = m_row[:, None]
        if C.D != BLOCK_D:
            m_q = m_q & (o_d < C.D)[None, :]
        m_out = m_row[:, None]
        if C.DV != BLOCK_DV:
            m_out = m_out & (o_dv < C.DV)[None, :]
        o_d_wide = wide(o_d, C.WIDE)
        o_dv_wide = wide(o_dv, C.WIDE)
        p_rows = p_q + (row * numbers.strides.q[0] + o_h.to(tl.int64) * numbers.strides.q[1])[:, None]
        b_q = tl.load(p_rows + o_d_wide[None, :] * numbers.strides.q[2], mask=m_q, other=0.0)  # [BLOCK_M, BLOCK_D]
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        excess = Excess(acc, row_sum) if NATURAL else Excess(row_sum, row_sum)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if ALIBI:
            slope = tl.load(p_alibi + o_h).to(tl.float32) * (1.0 if NATURAL else LOG2_E)
        draft_low = 0
        draft_high = 0
        if C.DRAFT:
            draft_low, draft_high = halves_of(tl.load(p_draft + row, mask=m_row, other=0))
        if C.QUANTIZED_Q:
            b_q = quantised_rows(b_q)
        tile = Rows(b_q, context + o_t, slope, draft_low, draft_high)

        low, high = key_range(context, length, i_tile, q_len, left, right, TOKENS, C.HAS_LEFT, C.HAS_RIGHT)
        high = tl.where(valid, high, low)
        # The keys that all rows see, up to the end of a tile of keys.
        all_low = low
        all_high = high
        if C.HAS_LEFT:
            all_low = tl.maximum(context + tl.minimum((i_tile + 1) * TOKENS, q_len) - 1, left) - left
        if C.HAS_RIGHT:
            all_high = tl.minimum(high, context + i_tile * TOKENS + 1 + tl.minimum(right, length))
        if C.DRAFT:
            all_high = tl.minimum(all_high, context)
        # Cached and new keys have tiles of their own, the cached ones from the tile that holds ``low`` on.
        cached_high = high
        if C.NEW_KV:
            cached_high = tl.minimum(high, context)
        cached_first = low // BLOCK_N
        cached_tiles = tl.maximum((cached_high + BLOCK_N - 1) // BLOCK_N - cached_first, 0)
        new_tiles = 0
        new_first = 0
        if C.NEW_KV:
            new_first = tl.maximum(low - context, 0) // BLOCK_N
            new_tiles = tl.maximum((high - context + BLOCK_N - 1) // BLOCK_N - new_first, 0)
        from_tile, to_tile = split_range(cached_tiles + new_tiles, i_split, num_splits)

        scale = scores.softmax_scale
        v_scale = 1.0
        if C.K_SCALED:
            p_k_scales = p_scales[0] + i_kv.to(tl.int64) * numbers.strides.k_scale[2]
        if C.V_SCALED:
            p_v_scales = p_scales[1] + i_kv.to(tl.int64) * numbers.strides.v_scale[2]
        if C.K_SCALED == 1:
            scale = scale * tl.load(p_k_scales)
        if C.V_SCALED == 1:
            v_scale = tl.load(p_v_scales)
        cached_scale = scale * numbers.k_scale
        v_scale = v_scale * numbers.v_scale

        o_n = tl.arange(0, BLOCK_N)
        p_k_head = p_k_cache + i_kv.to(tl.int64) * numbers.strides.k_cache[2]
        p_v_head = p_v_cache + i_kv.to(tl.int64) * numbers.strides.v_cache[2]
        # A stride of 8 is not known to be one of whole 16 bytes: Triton specialises on multiples of 16 only.
        s_token = C.STEP if C.STEP else numbers.strides.k_cache[1]
        o_dk = o_d_wide // C.X * numbers.strides.k_cache[3] + o_d_wide % C.X * numbers.strides.k_cache[4]
        o_dv_cached = o_dv_wide * numbers.strides.v_cache[4]
        p_row = p_table + tl.minimum(tl.maximum(i_n, 0), num_sequences - 1).to(tl.int64) * s_table
        first = (cached_first + tl.minimum(from_tile, cached_tiles)) * BLOCK_N
        last = (cached_first + tl.minimum(to_tile, cached_tiles)) * BLOCK_N
        # Edges of a window, of causality and of the sequence are in tiles that not all rows see whole: masked loops
        # before and after the interior.
        whole_from = tl.minimum(tl.maximum((all_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, first), last)
        whole_to = tl.maximum(tl.minimum(tl.minimum(all_high, cached_high) // BLOCK_N * BLOCK_N, last), whole_from)
        scoring = Scoring(cached_scale, scores.softcap, left, right, low, cached_high, context)
        for PHASE in tl.static_range(3):
            start = first if PHASE == 0 else (whole_from if PHASE == 1 else whole_to)
            stop = whole_from if PHASE == 0 else (whole_to if PHASE == 1 else last)
            if PHASE == 1 or PHASE == 2 or C.HAS_LEFT:
                for at in tl.range(start, stop, BLOCK_N, num_stages=C.STAGES if PHASE == 1 else 1):
                    o_key = at + o_n
                    block = tl.load(p_row + o_key // C.PAGE, mask=o_key < cached_high, other=-1).to(tl.int64)
                    exists = (block >= 0) & (block < num_blocks)
                    block = tl.where(exists, block, 0)
                    token = (o_key % C.PAGE).to(tl.int64)
                    b_ks = o_n.to(tl.float32)
                    b_vs = b_ks
                    if C.K_SCALED == 2:
                        b_ks = tl.load(
                            p_k_scales + block * numbers.strides.k_scale[0] + token * numbers.strides.k_scale[1],
                            mask=exists & (o_key >= low), other=0.0,
                        )  # fmt: skip
                    if C.V_SCALED == 2:
                        b_vs = tl.load(
                            p_v_scales + block * numbers.strides.v_scale[0] + token * numbers.strides.v_scale[1],
                            mask=exists & (o_key >= low), other=0.0,
                        )  # fmt: skip
                    keys = Keys(
                        p_k_head, p_v_head, block * numbers.strides.k_cache[0] + token * s_token,
                        block * numbers.strides.v_cache[0] + token * numbers.strides.v_cache[1], o_dk, o_dv_cached,
                        o_key, exists, b_ks, b_vs, numbers.strides.k_cache[3:],
                    )  # fmt: skip
                    acc, running_max, row_sum, excess = update(
                        acc, running_max, row_sum, excess, tile, keys, scoring,
                        Pages(p_row, at, num_blocks, numbers.strides.v_cache[0]), ALIBI,
                        Source(C.BOX, C.FP8, C.K_SCALED == 2, C.V_SCALED == 2, PHASE != 1), C,
                    )  # fmt: skip
        acc = acc * v_scale
        if NATURAL:
            excess = Excess(excess.acc * v_scale, excess.row_sum)
        if C.NEW_KV:
            p_k_head = p_k + begin * numbers.strides.k[0] + i_kv.to(tl.int64) * numbers.strides.k[1]
            p_v_head = p_v + begin * numbers.strides.v[0] + i_kv.to(tl.int64) * numbers.strides.v[1]
            start = (new_first + tl.maximum(from_tile - cached_tiles, 0)) * BLOCK_N
            stop = (new_first + tl.maximum(to_tile - cached_tiles, 0)) * BLOCK_N
            scoring = Scoring(scores.softmax_scale, scores.softcap, left, right, low, high, context)
            # Few tiles, most of them on the diagonal: masked, all of them.
            for at in tl.range(start, stop, BLOCK_N, num_stages=C.STAGES):
                o_new = at + o_n
                o_key = context + o_new
                exists = o_new < q_len
                o_row = tl.minimum(o_new, q_len - 1).to(tl.int64)
                keys = Keys(
                    p_k_head, p_v_head, o_row * numbers.strides.k[0], o_row * numbers.strides.v[0],
                    o_d_wide * numbers.strides.k[2], o_dv_wide * numbers.strides.v[2], o_key, exists, o_n, o_n, None,
                )  # fmt: skip
                acc, running_max, row_sum, excess = update(
                    acc, running_max, row_sum, excess, tile, keys, scoring,
                    Pages(p_row, at, num_blocks, numbers.strides.v_cache[0]), ALIBI,
                    Source(0, 0, False, False, True), C,
                )  # fmt: skip

        if not NATURAL:
            running_max = running_max * LN_2
        if C.CARRIED:
            if valid & (i_split == 0):
                acc, running_max, row_sum = with_levels(
                    acc, running_max, row_sum, p_levels, row, o_h, o_dv, m_row, m_out, rows, C
                )
        if p_sinks is not None:
            # Of splits the merge kernel counts it, once.
            b_sink = tl.load(p_sinks + o_h).to(tl.float32)
            b_sink = tl.where(valid & (num_splits == 1), b_sink, float("-inf"))
            acc, running_max, row_sum = with_sink(acc, running_max, row_sum, b_sink)
        # Made in either branch: made before them, they take registers that spill on sm_100.
        if C.SHARED or num_splits > 1:
            part = (i_split.to(tl.int64) * rows + row) * H + o_h
            part_lse = (i_split.to(tl.int64) * H + o_h) * rows + row
            if C.SHARED:
                part_lse = part
                tl.store(p_levels[0] + row, o_t * 0 + num_splits, mask=m_row & (o_h == 0) & (i_split == 0))
            p_part_lse = results.workspace + num_splits.to(tl.int64) * rows * (H * C.DV)
            p_part = results.workspace + part[:, None] * C.DV + o_dv[None, :]
            tl.store(p_part, normalised(acc, row_sum), mask=m_out)
            tl.store(p_part_lse + part_lse, log_sum_exp(running_max, row_sum), mask=m_row)
        else:
            target = Target(
                row * numbers.strides.out[0] + o_h.to(tl.int64) * numbers.strides.out[1],
                o_h.to(tl.int64) * s_lse_head + row * s_lse_token,
                o_dv_wide * numbers.strides.out[2], m_row, m_out,
            )  # fmt: skip
            b_out = normalised(acc, row_sum)
            b_lse = log_sum_exp(running_max, row_sum)
            store_results(results.out, results.lse, p_scales[2], numbers.out_scale, b_out, b_lse, target, C.LIMIT)
