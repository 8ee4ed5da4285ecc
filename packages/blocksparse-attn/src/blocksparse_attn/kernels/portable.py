"""Attention to listed blocks of keys, on every target.

``attend_lists``: a tile is rows of one head and of one row of its layout, and walks that row's list; prefill.
``attend_packed``: a tile is the query heads of a kv head, of one token or a few, and walks the blocks that any of its
rows lists, so that keys and values are read once for all of them; decoding.
"""

import triton
import triton.language as tl

from blocksparse_attn.kernels.softmax import store, update
from blocksparse_attn.kernels.tiles import (
    head_of,
    keys_of_sequence,
    list_of,
    load_across,
    load_tile,
    locate,
    part_of,
    place_in_batch,
    place_of,
    share,
    wide,
)

# Columns whose listing is kept in the bits of a number.
BITS: tl.constexpr = tl.constexpr(64)


@triton.jit
def step(
    acc, m, total, b_q, k_head, v_head, p_row, at, listed, position, low, high, left, k_begin, num_blocks, scale,
    softcap, s_k, s_v,
    KIND: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, BOX: tl.constexpr, X: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, WIDE: tl.constexpr, MIXED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The keys from ``at`` on for a tile of rows.

    MIXED: not all rows list them, ``listed`` [BLOCK_M] says which do; the rows are of TOKENS tokens.
    """
    o_key = at + tl.arange(0, BLOCK_N)
    block, place, fits = place_of(p_row, o_key, high, k_begin, num_blocks, PAGE)
    seen = o_key[None, :] <= position[:, None]
    m_key = fits & (o_key < high)
    if HAS_LEFT:
        seen = seen & (o_key[None, :] >= position[:, None] - left)
        m_key = m_key & (o_key >= low)
    m_value = m_key
    if MIXED:
        seen = seen & listed[:, None]
        if TOKENS > 1:
            # The values of a key that no row sees are left out, of which 0 times NaN would be NaN. Rows of one token,
            # or of one list, see all from low to high.
            m_value = m_key & (tl.max(seen.to(tl.int32), 0) != 0)
    o_dk = wide(tl.arange(0, BLOCK_D), WIDE)
    o_dk = o_dk // X * s_k[3] + o_dk % X * s_k[4]
    o_dv = wide(tl.arange(0, BLOCK_DV), WIDE) * s_v[4]
    # A stride of 8 is not known to be one of whole 16 bytes: only multiples of 16 are compiled for as such.
    s_place = STEP if STEP else s_k[1]
    b_k = load_tile(k_head, block * s_k[0] + place * s_place, o_dk, m_key, D, BLOCK_D)
    if BOX:
        b_v = load_across(v_head, p_row, at, o_dv, s_v, num_blocks, low, high, DV, BLOCK_DV, BLOCK_N, PAGE, BOX)
        if MIXED and TOKENS > 1:
            b_v = tl.where(m_value[:, None], b_v, 0.0)
    else:
        b_v = load_tile(v_head, block * s_v[0] + place * s_v[1], o_dv, m_value, DV, BLOCK_DV)
    return update(acc, m, total, b_q, b_k, b_v, seen, scale, softcap, SOFTCAP)


@triton.jit(
    do_not_specialize=[
        "rows", "num_sequences", "keys", "num_blocks", "s_table", "s_crow", "s_col", "layout_rows", "entries", "places",
        "left",
    ]
)  # fmt: skip
def attend_lists(
    p_q, p_k, p_v, p_crow, p_col, p_table, p_q_starts, p_q_ends, p_k_starts, p_k_ends, p_sinks, p_out, p_lse, p_part,
    p_part_lse,
    rows, num_sequences, keys, num_blocks, s_table, s_crow, s_col, layout_rows, entries, places, scale, softcap, left,
    s_q, s_k, s_v, s_out, s_lse,
    KIND: tl.constexpr, GROUP: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, BOX: tl.constexpr, X: tl.constexpr,
    STEP: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of one tile over one split of their row of the layout; columns may be in any order.

    Strides are (sequence, token, head, element) of q and out, (page or sequence, place, head, element / X, element % X)
    of k and v, (sequence, head, token) of lse; where X elements of a key lie together, STEP is the stride of places,
    otherwise 0. Tiles lie at multiples of BLOCK_M in a sequence's positions.
    """
    PER_BLOCK: tl.constexpr = K_BLOCK // BLOCK_N
    pid = tl.program_id(0)
    i_g, i_split, i_w, i_kv = part_of(pid, places, GROUP, SPLITS)
    i_n, i_place, begin, q_len = locate(p_q_starts, p_q_ends, i_w, num_sequences, rows, BLOCK_M, 2, KIND)
    k_begin, length, possible = keys_of_sequence(p_k_starts, p_k_ends, i_n, q_len, keys, KIND)
    context = length - q_len
    i_tile = (length - 1) // BLOCK_M - i_place
    if (q_len > 0) & (i_place >= 0) & (i_tile >= context // BLOCK_M):
        position = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        m_row = (position >= context) & (position < length)
        position = tl.minimum(tl.maximum(position, context), length - 1)
        row = begin + (position - context)
        i_h = i_kv * GROUP + i_g
        i_b, token, all_rows = place_in_batch(begin, row, rows, num_sequences, KIND)
        off_q = i_b * s_q[0] + token * s_q[1] + i_h.to(tl.int64) * s_q[2]
        b_q = load_tile(p_q, off_q, wide(tl.arange(0, BLOCK_D), WIDE) * s_q[3], m_row, D, BLOCK_D)

        first = tl.maximum(i_tile * BLOCK_M, context)
        # The keys that some row may see.
        high = tl.minimum(i_tile * BLOCK_M + (BLOCK_M - 1), length - 1) + 1
        low = high * 0
        if HAS_LEFT:
            low = tl.maximum(first - left, 0)
        columns = (high - 1) // K_BLOCK + 1
        p_list = p_col + i_h.to(tl.int64) * s_col
        from_entry, to_entry = list_of(p_crow, i_h, i_tile * BLOCK_M // Q_BLOCK, s_crow, layout_rows, entries, possible)
        from_tile, to_tile = share((to_entry - from_entry) * PER_BLOCK, i_split, SPLITS)
        k_head = head_of(p_k, i_b, i_kv, s_k, KIND)
        v_head = head_of(p_v, i_b, i_kv, s_v, KIND)
        p_row = p_table + tl.maximum(i_n, 0).to(tl.int64) * s_table if PAGE else p_table
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for i in tl.range(from_tile, to_tile, num_stages=STAGES):
            column = tl.load(p_list + from_entry + i // PER_BLOCK)
            # A column that is not there, or whose keys no row may see, is walked without effect.
            column = tl.where((column >= 0) & (column < columns), column, columns)
            at = column * K_BLOCK + i % PER_BLOCK * BLOCK_N
            acc, m, total = step(
                acc, m, total, b_q, k_head, v_head, p_row, at, m_row, position, low, high, left, k_begin, num_blocks,
                scale, softcap, s_k, s_v, KIND, D, BLOCK_D, DV, BLOCK_DV, PAGE, BOX, X, STEP, BLOCK_N, SOFTCAP,
                HAS_LEFT, WIDE, False, 1,
            )  # fmt: skip
        store(
            p_q, p_sinks, p_out, p_lse, p_part, p_part_lse, acc, m, total, row, position * 0 + i_h, possible,
            i_b * s_out[0] + token * s_out[1] + i_h.to(tl.int64) * s_out[2],
            i_b * s_lse[0] + i_h.to(tl.int64) * s_lse[1] + token * s_lse[2],
            wide(tl.arange(0, BLOCK_DV), WIDE) * s_out[3], all_rows, i_split, m_row, DV, BLOCK_DV, GROUP * HEADS_KV,
            SPLITS,
        )  # fmt: skip


@triton.jit
def lowest_bit(bits):
    """Which is the lowest bit of a number other than 0: the exponent of what it stands for."""
    power = tl.abs((bits & -bits).to(tl.float32))
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def listed_columns(p_lists, begin, end, first, last, PIECE: tl.constexpr):
    """Of each row the columns from ``first`` to before ``last`` that its list holds, as bits [BLOCK_M]; at most BITS.

    No column may be listed twice.
    """
    bits = begin.to(tl.int64) * 0
    for at in range(0, tl.max(end - begin, 0), PIECE):
        o_entry = at + tl.arange(0, PIECE)[None, :]
        # Added to the pointer one by one: a place in a list has 32 bits, and one behind its end may have more.
        column = tl.load((p_lists + begin)[:, None] + o_entry, mask=o_entry < (end - begin)[:, None], other=-1)
        wanted = (column >= first) & (column < last)
        bit = tl.where(wanted, column - first, 0).to(tl.int64)
        bits += tl.sum(tl.where(wanted, (bit * 0 + 1) << bit, 0), 1)
    return bits


@triton.jit(
    do_not_specialize=[
        "rows", "num_sequences", "keys", "num_blocks", "s_table", "s_crow", "s_col", "layout_rows", "entries", "places",
        "left",
    ]
)  # fmt: skip
def attend_packed(
    p_q, p_k, p_v, p_crow, p_col, p_table, p_q_starts, p_q_ends, p_k_starts, p_k_ends, p_sinks, p_out, p_lse, p_part,
    p_part_lse,
    rows, num_sequences, keys, num_blocks, s_table, s_crow, s_col, layout_rows, entries, places, scale, softcap, left,
    s_q, s_k, s_v, s_out, s_lse,
    KIND: tl.constexpr, GROUP: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, BOX: tl.constexpr, X: tl.constexpr,
    STEP: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """``attend_lists`` with rows that have lists of their own: row m is head ``m % HEADS`` of token ``m // HEADS``, of
    which there are TOKENS.

    The splits share the columns, and a program looks at BITS of them at a time.
    """
    HEADS: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    PER_BLOCK: tl.constexpr = K_BLOCK // BLOCK_N
    pid = tl.program_id(0)
    i_hb, i_split, i_w, i_kv = part_of(pid, places, HEAD_TILES, SPLITS)
    i_n, i_place, begin, q_len = locate(p_q_starts, p_q_ends, i_w, num_sequences, rows, TOKENS, 1, KIND)
    k_begin, length, possible = keys_of_sequence(p_k_starts, p_k_ends, i_n, q_len, keys, KIND)
    context = length - q_len
    i_tile = (q_len - 1) // TOKENS - i_place
    if (q_len > 0) & (i_place >= 0) & (i_tile >= 0):
        o_m = tl.arange(0, BLOCK_M)
        o_t = i_tile * TOKENS + o_m // HEADS
        o_g = i_hb * HEADS + o_m % HEADS
        m_row = (o_m < TOKENS * HEADS) & (o_t < q_len) & (o_g < GROUP)
        o_t = tl.minimum(o_t, q_len - 1)
        o_h = i_kv * GROUP + tl.minimum(o_g, GROUP - 1)
        position = context + o_t
        row = begin + o_t
        i_b, token, all_rows = place_in_batch(begin, row, rows, num_sequences, KIND)
        off_q = i_b * s_q[0] + token * s_q[1] + o_h.to(tl.int64) * s_q[2]
        b_q = load_tile(p_q, off_q, wide(tl.arange(0, BLOCK_D), WIDE) * s_q[3], m_row, D, BLOCK_D)

        high = context + tl.minimum((i_tile + 1) * TOKENS, q_len)
        low = high * 0
        if HAS_LEFT:
            low = tl.maximum(context + i_tile * TOKENS - left, 0)
        p_lists = p_col + o_h.to(tl.int64) * s_col
        from_entry, to_entry = list_of(p_crow, o_h, position // Q_BLOCK, s_crow, layout_rows, entries, m_row & possible)
        first_column = low // K_BLOCK
        from_column, to_column = share((high - 1) // K_BLOCK + 1 - first_column, i_split, SPLITS)
        from_column += first_column
        to_column = tl.where(possible, to_column + first_column, from_column)
        k_head = head_of(p_k, i_b, i_kv, s_k, KIND)
        v_head = head_of(p_v, i_b, i_kv, s_v, KIND)
        p_row = p_table + tl.maximum(i_n, 0).to(tl.int64) * s_table if PAGE else p_table
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        o_bit = tl.arange(0, BITS).to(tl.int64)
        column = from_column
        # Inside of a ``for`` Triton would not pipeline the loop over keys, where another loop is beside it.
        while column < to_column:
            bits = listed_columns(
                p_lists, from_entry, to_entry, column, tl.minimum(column + BITS, to_column), 64
            )  # [BLOCK_M]
            anywhere = tl.max((bits[:, None] >> o_bit[None, :]) & 1, 0)  # [BITS]
            left_over = tl.sum(anywhere << o_bit, 0)
            for i in tl.range(0, tl.sum(anywhere, 0).to(tl.int32) * PER_BLOCK, num_stages=STAGES):
                i_bit = lowest_bit(left_over)
                at = (column + i_bit) * K_BLOCK + i % PER_BLOCK * BLOCK_N
                listed = ((bits >> i_bit) & 1) != 0
                left_over = tl.where(i % PER_BLOCK == PER_BLOCK - 1, left_over & (left_over - 1), left_over)
                acc, m, total = step(
                    acc, m, total, b_q, k_head, v_head, p_row, at, listed, position, low, high, left, k_begin,
                    num_blocks, scale, softcap, s_k, s_v, KIND, D, BLOCK_D, DV, BLOCK_DV, PAGE, BOX, X, STEP, BLOCK_N,
                    SOFTCAP, HAS_LEFT, WIDE, True, TOKENS,
                )  # fmt: skip
            column += BITS
        store(
            p_q, p_sinks, p_out, p_lse, p_part, p_part_lse, acc, m, total, row, o_h, possible,
            i_b * s_out[0] + token * s_out[1] + o_h.to(tl.int64) * s_out[2],
            i_b * s_lse[0] + o_h.to(tl.int64) * s_lse[1] + token * s_lse[2],
            wide(tl.arange(0, BLOCK_DV), WIDE) * s_out[3], all_rows, i_split, m_row, DV, BLOCK_DV, GROUP * HEADS_KV,
            SPLITS,
        )  # fmt: skip
