"""Attention to listed blocks of keys, on every target.

``attend_lists``: a tile is rows of one head and of one row of its layout, and walks that row's list; prefill.
``attend_packed``: a tile is the query heads of a kv head, for one token or a few, and walks the blocks that any of its
rows lists, so that keys and values are read once for all of them; decoding.
"""

import triton
import triton.language as tl

from blocksparse_attn.kernels.groups import Batch, Cache, Layout, Rows, Scoring, Strides, Visible
from blocksparse_attn.kernels.softmax import store, update
from blocksparse_attn.kernels.tiles import (
    head_of,
    keys_of_sequence,
    keys_of_tile,
    list_of,
    load_across,
    load_tile,
    locate,
    part_of,
    rows_of_tile,
    share,
    slot_of,
    split_row,
    wide,
)


@triton.jit
def with_lse(strides, s_lse_sequence, s_lse_head):
    """All strides of a call, those of lse by (sequence, head, token)."""
    return Strides(strides.q, strides.k, strides.v, strides.out, (s_lse_sequence, s_lse_head, strides.lse))


# Columns that a packed tile looks at together: the bits of a number.
BITS: tl.constexpr = tl.constexpr(64)


@triton.jit
def step(
    acc, running_max, row_sum, b_q, cache, o_key, listed, visible, scoring, strides, config: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """The keys ``o_key`` [BLOCK_N] for a tile of rows.

    MIXED: not all rows list them, ``listed`` [BLOCK_M, BLOCK_N or 1] says which do; the rows are of TOKENS tokens.
    """
    page, slot, fits = slot_of(cache, o_key, visible.high, config.PAGE)
    seen = o_key[None, :] <= visible.position[:, None]
    m_key = fits & (o_key < visible.high)
    if config.HAS_LEFT:
        seen = seen & (o_key[None, :] >= visible.position[:, None] - scoring.left)
        m_key = m_key & (o_key >= visible.low)
    m_value = m_key
    if MIXED:
        seen = seen & listed
        if config.TOKENS > 1:
            # The values of a key that no row sees are not loaded: 0 times NaN would be NaN. Rows of one token, or of
            # one list, see all from low to high.
            m_value = m_key & (tl.max(seen.to(tl.int32), 0) != 0)
    o_dk = wide(tl.arange(0, config.BLOCK_D), config.WIDE)
    o_dk = o_dk // config.X * strides.k[3] + o_dk % config.X * strides.k[4]
    o_dv = wide(tl.arange(0, config.BLOCK_DV), config.WIDE) * strides.v[4]
    # A stride of 8 is not known to be one of whole 16 bytes: Triton specialises on multiples of 16 alone.
    s_slot = config.STEP if config.STEP else strides.k[1]
    b_k = load_tile(cache.k, page * strides.k[0] + slot * s_slot, o_dk, m_key, config.D, config.BLOCK_D)
    if config.BOX:
        b_v = load_across(cache, o_key, o_dv, strides.v[0], visible, config)
        if MIXED and config.TOKENS > 1:
            b_v = tl.where(m_value[:, None], b_v, 0.0)
    else:
        off_v = page * strides.v[0] + slot * strides.v[1]
        b_v = load_tile(cache.v, off_v, o_dv, m_value, config.DV, config.BLOCK_DV)
    return update(acc, running_max, row_sum, b_q, b_k, b_v, seen, scoring, config.SOFTCAP, config.THIRDS)


@triton.jit(
    do_not_specialize=[
        "rows", "sequences", "keys", "num_pages", "s_table", "s_crow", "s_col", "layout_rows", "entries", "slots",
        "num_splits", "s_lse_sequence", "s_lse_head", "left",
    ]
)  # fmt: skip
def attend_lists(
    p_q, p_k, p_v, lists, p_table, bounds, p_sinks, outputs, rows, sequences, keys, num_pages, s_table, s_crow, s_col,
    layout_rows, entries, slots, num_splits, s_lse_sequence, s_lse_head, scores, left, strides, config: tl.constexpr,
):  # fmt: skip
    """Rows of one tile over one split of their row of the layout; columns may be in any order.

    Tiles lie at multiples of BLOCK_M in a sequence's positions.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    PIECES: tl.constexpr = config.BLOCK_N // config.PIECE
    PER_BLOCK: tl.constexpr = config.K_BLOCK // config.PIECE
    batch = Batch(bounds, sequences, rows, keys)
    layout = Layout(lists, s_crow, s_col, layout_rows, entries)
    scoring = Scoring(scores[0], scores[1], left)
    strides = with_lse(strides, s_lse_sequence, s_lse_head)
    pid = tl.program_id(0)
    i_g, i_split, i_w, i_kv = part_of(pid, slots, num_splits, config.GROUP)
    i_n, i_slot, begin, q_len = locate(batch, i_w, BLOCK_M, 2, config.KIND)
    k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, config.KIND)
    context = length - q_len
    i_tile = (length - 1) // BLOCK_M - i_slot
    if (q_len > 0) & (i_slot >= 0) & (i_tile >= context // BLOCK_M):
        position, m_row = rows_of_tile(i_tile, context, length, BLOCK_M)
        row = begin + (position - context)
        i_h = i_kv * config.GROUP + i_g
        i_b, token, all_rows = split_row(batch, begin, row, config.KIND)
        off_q = i_b * strides.q[0] + token * strides.q[1] + i_h.to(tl.int64) * strides.q[2]
        o_d = wide(tl.arange(0, config.BLOCK_D), config.WIDE) * strides.q[3]
        b_q = load_tile(p_q, off_q, o_d, m_row, config.D, config.BLOCK_D)

        low, high = keys_of_tile(i_tile, context, length, left, BLOCK_M, config.HAS_LEFT)
        columns = (high - 1) // config.K_BLOCK + 1
        p_list = lists.col + i_h.to(tl.int64) * s_col
        from_entry, to_entry = list_of(layout, i_h, i_tile * BLOCK_M // config.Q_BLOCK, possible)
        count = (to_entry - from_entry) * PER_BLOCK
        from_tile, to_tile = share((count + PIECES - 1) // PIECES, i_split, num_splits)
        k_head = head_of(p_k, i_b, i_kv, strides.k, config.KIND)
        v_head = head_of(p_v, i_b, i_kv, strides.v, config.KIND)
        p_pages = p_table + tl.maximum(i_n, 0).to(tl.int64) * s_table if config.PAGE else p_table
        cache = Cache(k_head, v_head, p_pages, k_begin, num_pages)
        visible = Visible(position, low, high)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        o_n = tl.arange(0, config.BLOCK_N)
        for i in tl.range(from_tile, to_tile, num_stages=config.STAGES):
            # One number where a tile lies within a block.
            i_piece = i
            if PIECES > 1:
                i_piece = i * PIECES + o_n // config.PIECE
            column = tl.load(p_list + from_entry + i_piece // PER_BLOCK, mask=i_piece < count, other=-1)
            # A column out of bounds, or whose keys no row may see, is walked without effect.
            column = tl.where((column >= 0) & (column < columns), column, columns)
            o_key = column * config.K_BLOCK + i_piece % PER_BLOCK * config.PIECE + o_n % config.PIECE
            acc, running_max, row_sum = step(
                acc, running_max, row_sum, b_q, cache, o_key, None, visible, scoring, strides, config, False
            )
        tile = Rows(row, position * 0 + i_h, i_b, token, all_rows, possible, m_row)
        store(
            acc, running_max, row_sum, tile, i_split, num_splits, p_sinks, outputs, strides, config,
            p_q.dtype.element_ty == tl.float32,
        )  # fmt: skip


@triton.jit
def lowest_bit(bits):
    """Which is the lowest set bit of a number other than 0: the exponent of its value."""
    power = tl.abs((bits & -bits).to(tl.float32))
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def listed_columns(p_lists, begin, end, first, last, PIECE: tl.constexpr):
    """The columns from ``first`` to ``last`` - 1, at most BITS, that each row lists, as bits [BLOCK_M].

    No column may be listed twice. Lists are read PIECE entries at a time.
    """
    bits = begin.to(tl.int64) * 0
    for at in range(0, tl.max(end - begin, 0), PIECE):
        o_entry = at + tl.arange(0, PIECE)[None, :]
        # Added to the pointer in two steps: an index into a list has 32 bits, and one past its end may have more.
        column = tl.load((p_lists + begin)[:, None] + o_entry, mask=o_entry < (end - begin)[:, None], other=-1)
        wanted = (column >= first) & (column < last)
        bit = tl.where(wanted, column - first, 0).to(tl.int64)
        bits += tl.sum(tl.where(wanted, (bit * 0 + 1) << bit, 0), 1)
    return bits


@triton.jit
def merged(p_rows, p_columns, p_lists, begin, end, first, last):
    """Store the columns from ``first`` to ``last`` - 1 that any row lists, rising, and as bits the rows that do.

    Returns how many there are. No column may be listed twice. The memory is this program's own.
    """
    BLOCK_M: tl.constexpr = begin.shape[0]
    EACH: tl.constexpr = 512
    PIECE: tl.constexpr = 4096 // BLOCK_M
    for at in range(0, last - first, EACH):
        o_c = at + tl.arange(0, EACH)
        tl.store(p_rows + o_c, o_c * 0, mask=o_c < last - first)
    tl.debug_barrier()
    o_bit = ((tl.arange(0, BLOCK_M) * 0 + 1) << tl.arange(0, BLOCK_M))[:, None]
    for at in range(0, tl.max(end - begin, 0), PIECE):
        o_entry = at + tl.arange(0, PIECE)[None, :]
        # Added to the pointer in two steps: an index into a list has 32 bits, and one past its end may have more.
        column = tl.load((p_lists + begin)[:, None] + o_entry, mask=o_entry < (end - begin)[:, None], other=-1)
        wanted = (column >= first) & (column < last)
        tl.atomic_or(p_rows + tl.where(wanted, column - first, 0), o_bit + column * 0, mask=wanted, sem="relaxed")
    tl.debug_barrier()
    count = first * 0
    for at in range(0, last - first, EACH):
        o_c = at + tl.arange(0, EACH)
        # Past the L1 cache, in which atomic operations leave no trace.
        rows = tl.load(p_rows + o_c, mask=o_c < last - first, other=0, cache_modifier=".cg")
        found = rows != 0
        place = count + tl.cumsum(found.to(tl.int32), 0) - 1
        # Places are those of columns before, and of these, which all threads have read.
        tl.debug_barrier()
        tl.store(p_rows + place, rows, mask=found)
        tl.store(p_columns + place, first + o_c, mask=found)
        count += tl.sum(found.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit(
    do_not_specialize=[
        "rows", "sequences", "keys", "num_pages", "s_table", "s_crow", "s_col", "layout_rows", "entries", "slots",
        "num_splits", "s_lse_sequence", "s_lse_head", "left",
    ]
)  # fmt: skip
def attend_packed(
    p_q, p_k, p_v, lists, p_table, bounds, p_sinks, outputs, rows, sequences, keys, num_pages, s_table, s_crow, s_col,
    layout_rows, entries, slots, num_splits, s_lse_sequence, s_lse_head, scores, left, strides, config: tl.constexpr,
):  # fmt: skip
    """``attend_lists`` for rows that each have a list: row m is head ``m % HEADS`` of token ``m // HEADS``.

    The splits share the columns. A program looks at BITS of them at a time or, where a tile gathers several blocks,
    merges its lists first: BITS small blocks are few tiles, before and behind which loads would be waited for.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    HEADS: tl.constexpr = config.GROUP if config.GROUP < BLOCK_M else BLOCK_M
    HEAD_TILES: tl.constexpr = (config.GROUP + HEADS - 1) // HEADS
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    # Lists of small blocks are long, and read again for every BITS columns; gfx942 has no scalar registers for more.
    ENTRIES: tl.constexpr = 64 if config.K_BLOCK >= 64 or config.BLOCK_N <= 16 else 256
    PIECES: tl.constexpr = config.BLOCK_N // config.PIECE
    PER_BLOCK: tl.constexpr = config.K_BLOCK // config.PIECE
    batch = Batch(bounds, sequences, rows, keys)
    layout = Layout(lists, s_crow, s_col, layout_rows, entries)
    scoring = Scoring(scores[0], scores[1], left)
    strides = with_lse(strides, s_lse_sequence, s_lse_head)
    pid = tl.program_id(0)
    i_hb, i_split, i_w, i_kv = part_of(pid, slots, num_splits, HEAD_TILES)
    i_n, i_slot, begin, q_len = locate(batch, i_w, config.TOKENS, 1, config.KIND)
    k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, config.KIND)
    context = length - q_len
    i_tile = (q_len - 1) // config.TOKENS - i_slot
    if (q_len > 0) & (i_slot >= 0) & (i_tile >= 0):
        o_m = tl.arange(0, BLOCK_M)
        o_t = i_tile * config.TOKENS + o_m // HEADS
        o_g = i_hb * HEADS + o_m % HEADS
        m_row = (o_m < config.TOKENS * HEADS) & (o_t < q_len) & (o_g < config.GROUP)
        o_t = tl.minimum(o_t, q_len - 1)
        o_h = i_kv * config.GROUP + tl.minimum(o_g, config.GROUP - 1)
        position = context + o_t
        row = begin + o_t
        i_b, token, all_rows = split_row(batch, begin, row, config.KIND)
        off_q = i_b * strides.q[0] + token * strides.q[1] + o_h.to(tl.int64) * strides.q[2]
        o_d = wide(tl.arange(0, config.BLOCK_D), config.WIDE) * strides.q[3]
        b_q = load_tile(p_q, off_q, o_d, m_row, config.D, config.BLOCK_D)

        high = context + tl.minimum((i_tile + 1) * config.TOKENS, q_len)
        low = high * 0
        if config.HAS_LEFT:
            low = tl.maximum(context + i_tile * config.TOKENS - left, 0)
        p_lists = lists.col + o_h.to(tl.int64) * s_col
        from_entry, to_entry = list_of(layout, o_h, position // config.Q_BLOCK, m_row & possible)
        first_column = low // config.K_BLOCK
        columns = (high - 1) // config.K_BLOCK + 1
        if PIECES > 1:
            # Rows of positions that the layout does not reach list nothing.
            reach = tl.minimum(layout_rows.to(tl.int64) * config.Q_BLOCK, keys)
            width = ((reach + (config.K_BLOCK - 1)) // config.K_BLOCK).to(tl.int32)
            columns = tl.maximum(tl.minimum(columns, width), first_column)
            width = tl.maximum((width + num_splits - 1) // num_splits, 1)
        from_column, to_column = share(columns - first_column, i_split, num_splits)
        from_column += first_column
        to_column = tl.where(possible, to_column + first_column, from_column)
        k_head = head_of(p_k, i_b, i_kv, strides.k, config.KIND)
        v_head = head_of(p_v, i_b, i_kv, strides.v, config.KIND)
        p_pages = p_table + tl.maximum(i_n, 0).to(tl.int64) * s_table if config.PAGE else p_table
        cache = Cache(k_head, v_head, p_pages, k_begin, num_pages)
        visible = Visible(position, low, high)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        o_bit = tl.arange(0, BITS).to(tl.int64)
        o_n = tl.arange(0, config.BLOCK_N)
        column = from_column
        if PIECES > 1:
            p_rows = lists.memory + pid.to(tl.int64) * 2 * width
            count = merged(p_rows, p_rows + width, p_lists, from_entry, to_entry, from_column, to_column) * PER_BLOCK
            for i in tl.range(0, (count + PIECES - 1) // PIECES, num_stages=config.STAGES):
                i_piece = i * PIECES + o_n // config.PIECE
                o_column = tl.load(p_rows + width + i_piece // PER_BLOCK, mask=i_piece < count, other=0)
                o_rows = tl.load(p_rows + i_piece // PER_BLOCK, mask=i_piece < count, other=0)
                o_key = o_column * config.K_BLOCK + i_piece % PER_BLOCK * config.PIECE + o_n % config.PIECE
                # What no piece is left for lies behind all keys.
                o_key = tl.where(i_piece < count, o_key, high)
                listed = ((o_rows[None, :] >> o_m[:, None]) & 1) != 0
                acc, running_max, row_sum = step(
                    acc, running_max, row_sum, b_q, cache, o_key, listed, visible, scoring, strides, config, True
                )
        else:
            # Inside a ``for`` with another loop in it Triton would not pipeline the loop over keys.
            while column < to_column:
                bits = listed_columns(
                    p_lists, from_entry, to_entry, column, tl.minimum(column + BITS, to_column), ENTRIES
                )  # [BLOCK_M]
                anywhere = tl.max((bits[:, None] >> o_bit[None, :]) & 1, 0)  # [BITS]
                left_over = tl.sum(anywhere << o_bit, 0)
                count = tl.sum(anywhere, 0).to(tl.int32) * PER_BLOCK
                for i in tl.range(0, (count + PIECES - 1) // PIECES, num_stages=config.STAGES):
                    i_bit = lowest_bit(left_over)
                    o_key = (column + i_bit) * config.K_BLOCK + i % PER_BLOCK * config.PIECE + o_n
                    listed = (((bits >> i_bit) & 1) != 0)[:, None]
                    left_over = tl.where(i % PER_BLOCK == PER_BLOCK - 1, left_over & (left_over - 1), left_over)
                    acc, running_max, row_sum = step(
                        acc, running_max, row_sum, b_q, cache, o_key, listed, visible, scoring, strides, config, True
                    )
                column += BITS
        tile = Rows(row, o_h, i_b, token, all_rows, possible, m_row)
        store(
            acc, running_max, row_sum, tile, i_split, num_splits, p_sinks, outputs, strides, config,
            p_q.dtype.element_ty == tl.float32,
        )  # fmt: skip
