"""Gradients of attention to listed blocks of keys, on every target; deterministic.

``backward_queries``: a tile is rows of one head and of one row of its layout, as in ``attend_lists``, and walks that
row's list again. ``backward_keys``: a tile is keys of one block, and walks, for one query head of its kv head after the
other, the rows that list the block, which a transposed layout tells.

The weights are made anew from lse, ``p = exp(score - lse)``; with ``delta = sum(d_out * out) - d_lse`` the gradient of
a score is ``p (d_out v^T - delta)``. Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blocksparse_attn.kernels.groups import Batch, Bounds, Layout, Scoring
from blocksparse_attn.kernels.softmax import LOG2_E, dot_by_parts, power, tanh
from blocksparse_attn.kernels.tiles import (
    PADDED,
    keys_of_sequence,
    keys_of_tile,
    list_of,
    locate,
    rows_of_tile,
    segment,
    wide,
)


class Given(NamedTuple):
    """Pointers: q, k, v, d_out; out, contiguous; lse, d_lse and delta, contiguous as lse is; d_lse may be None.

    ``stats``: a workspace [H, slots, BLOCK_M, 2] by the tiles of ``backward_queries``: what is subtracted from a row's
    scores, in their unit, +inf for rows that there are not and for those that saw nothing; and delta.
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    out: Any
    lse: Any
    d_lse: Any
    delta: Any
    stats: Any


class GivenStrides(NamedTuple):
    """By (sequence, token, head, element)."""

    q: Any
    k: Any
    v: Any
    d_out: Any


class Head(NamedTuple):
    """Where a token of a head lies: offsets of its first element in q and d_out, its row of [rows, H], its lse."""

    q: Any
    d_out: Any
    row: Any
    lse: Any


@triton.jit
def place_of(batch, i_b, token, i_h, strides, H: tl.constexpr):
    """i_b: the sequence of a padded batch, otherwise 0; ``token`` of it, which may lie before the first."""
    i_h = i_h.to(tl.int64)
    return Head(
        i_b * strides.q[0] + token * strides.q[1] + i_h * strides.q[2],
        i_b * strides.d_out[0] + token * strides.d_out[1] + i_h * strides.d_out[2],
        (i_b * batch.rows + token) * H + i_h,
        (i_b * H + i_h) * batch.rows + token,
    )


@triton.jit
def load_rows(p, first, fits, strides, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """The rows [n, BLOCK_D] from ``first`` on, counted from that at ``p``; zeros where they do not fit [n].

    One address for all, and offsets of 32 bits that are the same for every tile.
    """
    o_d = wide(tl.arange(0, BLOCK_D), WIDE) * strides[3]
    o_row = wide(tl.arange(0, fits.shape[0]), WIDE) * strides[1]
    m_tile = fits[:, None]
    if D != BLOCK_D:
        m_tile = m_tile & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(p + first.to(tl.int64) * strides[1] + o_row[:, None] + o_d[None, :], mask=m_tile, other=0.0)


@triton.jit
def row_tile(given, own, first, fits, strides, config: tl.constexpr):
    """Queries [BLOCK_M, BLOCK_D] and gradients of outputs [BLOCK_M, BLOCK_DV] from the row ``first`` on."""
    b_q = load_rows(given.q + own.q, first, fits, strides.q, config.D, config.BLOCK_D, config.WIDE)
    b_do = load_rows(given.d_out + own.d_out, first, fits, strides.d_out, config.DV, config.BLOCK_DV, config.WIDE)
    return b_q, b_do


@triton.jit
def key_tile(p_k, p_v, first, fits, strides, config: tl.constexpr):
    """Keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV] from the row ``first`` on."""
    b_k = load_rows(p_k, first, fits, strides.k, config.D, config.BLOCK_D, config.WIDE)
    b_v = load_rows(p_v, first, fits, strides.v, config.DV, config.BLOCK_DV, config.WIDE)
    return b_k, b_v


@triton.jit
def store_rows(p, row, b_x, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a contiguous tensor [.., D]."""
    o_d = tl.arange(0, BLOCK_D)
    m_tile = mask[:, None] & (o_d < D)[None, :]
    tl.store(p + row[:, None] * D + o_d[None, :], b_x.to(p.dtype.element_ty), mask=m_tile)


@triton.jit
def in_registers(b_x):
    """The same numbers, which Triton does not know to be loaded: WGMMA's first operand then stays in registers.

    From shared memory two products of 64 x 32 read as long as they multiply.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=True, pack=2)


@triton.jit
def product(b_a, b_b):
    """a b^T."""
    if b_a.dtype == tl.float32:
        b_c = dot_by_parts(b_a, b_b)
    else:
        b_c = tl.dot(b_a, tl.trans(b_b))
    return b_c


@triton.jit
def add_product(acc, b_a, b_b):
    """acc + a b."""
    if b_b.dtype == tl.float32:
        # Without tensor cores one sum over all would round as often as there are rows: each tile has its own.
        acc = tl.fma(tl.dot(b_a, b_b, input_precision="ieee"), 1.0, acc)
    else:
        acc = tl.dot(b_a, b_b, acc)
    return acc


@triton.jit
def within(x, low, high):
    """low <= x < high, in one comparison."""
    return (x - low).to(tl.uint32) < (high - low).to(tl.uint32)


@triton.jit
def seen_by(o_key, position, left, HAS_LEFT: tl.constexpr):
    """Which keys which queries see, broadcast."""
    seen = o_key <= position
    if HAS_LEFT:
        seen = seen & (o_key >= position - left)
    return seen


@triton.jit
def is_edge(first, last, first_key, last_key, left, HAS_LEFT: tl.constexpr):
    """Whether some query from ``first`` to ``last`` does not see some key from ``first_key`` to ``last_key``."""
    edge = last_key > first
    if HAS_LEFT:
        edge = edge | (first_key < last - left)
    return edge


@triton.jit
def score_gradients(
    b_s, b_dp, b_lse, b_delta, o_key, position, edge, scoring, config: tl.constexpr, dtype: tl.constexpr
):
    """p = exp(score - lse) of the products ``b_s``, and the gradient of the scores, of that of p, ``b_dp``.

    Keys, and what there is one of a query, are broadcast to the products. Only tiles of an edge are masked: with masks
    for all, a third of a loop's instructions would make them.
    """
    NATURAL: tl.constexpr = dtype == tl.float32
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    slope = 1.0
    if config.SOFTCAP:
        share = tanh(b_s * (scoring.scale / scoring.softcap))
        slope = 1.0 - share * share
        b_s = share * (scoring.softcap * UNIT) - b_lse
    else:
        b_s = b_s * (scoring.scale * UNIT) - b_lse
    # Not in the branches: Triton 3.6 does not pipeline a loop in which a product is first used in one.
    b_dp = b_dp - b_delta
    if edge:
        seen = seen_by(o_key, position, scoring.left, config.HAS_LEFT)
        b_p = power(tl.where(seen, b_s, float("-inf")), NATURAL)
        # Where nothing is seen a value may be NaN.
        b_ds = tl.where(seen, b_p * b_dp * slope, 0.0).to(dtype)
        b_p = b_p.to(dtype)
    else:
        b_p = power(b_s, NATURAL)
        b_ds = (b_p * b_dp * slope).to(dtype)
        b_p = b_p.to(dtype)
    return b_p, b_ds


@triton.jit(
    do_not_specialize=["rows", "sequences", "keys", "s_crow", "s_col", "layout_rows", "entries", "slots", "left"]
)
def backward_queries(
    given, lists, bounds, p_dq, rows, sequences, keys, s_crow, s_col, layout_rows, entries, slots, scores, left,
    strides, config: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, and what ``backward_keys`` reads of its rows.

    Tiles lie at multiples of BLOCK_M in a sequence's positions.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    PER_BLOCK: tl.constexpr = config.K_BLOCK // BLOCK_N
    H: tl.constexpr = config.GROUP * config.HEADS_KV
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    NATURAL: tl.constexpr = given.q.dtype.element_ty == tl.float32
    batch = Batch(bounds, sequences, rows, keys)
    layout = Layout(lists, s_crow, s_col, layout_rows, entries)
    scoring = Scoring(scores[0], scores[1], left)
    pid = tl.program_id(0)
    # Heads that share keys come one after the other.
    i_h = pid // (slots * config.GROUP) * config.GROUP + pid % config.GROUP
    i_w = pid // config.GROUP % slots
    i_n, i_slot, begin, q_len = locate(batch, i_w, BLOCK_M, 2, config.KIND)
    k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, config.KIND)
    context = length - q_len
    i_tile = (length - 1) // BLOCK_M - i_slot
    if (q_len > 0) & (i_slot >= 0) & (i_tile >= context // BLOCK_M):
        position, m_row = rows_of_tile(i_tile, context, length, BLOCK_M)
        i_b = begin * 0
        if config.KIND == PADDED:
            i_b = begin // rows
        # All is counted from the token at position 0.
        own = place_of(batch, i_b, begin - i_b * rows - context, i_h, strides, H)
        b_q, b_do = row_tile(given, own, i_tile * BLOCK_M, m_row, strides, config)
        row = own.row + position.to(tl.int64) * H
        o_dv = tl.arange(0, BLOCK_DV)
        m_out = m_row[:, None] & (o_dv < config.DV)[None, :]
        b_out = tl.load(given.out + row[:, None] * config.DV + o_dv[None, :], mask=m_out, other=0.0)
        b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
        if given.d_lse is not None:
            b_delta -= tl.load(given.d_lse + own.lse + position, mask=m_row, other=0.0)
        tl.store(given.delta + own.lse + position, b_delta, mask=m_row)
        b_lse = tl.load(given.lse + own.lse + position, mask=m_row, other=float("-inf"))
        b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse if NATURAL else b_lse * LOG2_E)
        i_stats = i_h.to(tl.int64) * slots + (i_w - i_slot + i_tile - context // BLOCK_M)
        p_stats = given.stats + i_stats * (2 * BLOCK_M) + 2 * tl.arange(0, BLOCK_M)
        tl.store(p_stats, b_lse)
        tl.store(p_stats + 1, b_delta)

        low, high = keys_of_tile(i_tile, context, length, left, BLOCK_M, config.HAS_LEFT)
        columns = (high - 1) // config.K_BLOCK + 1
        from_entry, to_entry = list_of(layout, i_h, i_tile * BLOCK_M // config.Q_BLOCK, possible)
        i_kv = (i_h // config.GROUP).to(tl.int64)
        p_k = given.k + i_b * strides.k[0] + k_begin * strides.k[1] + i_kv * strides.k[2]
        p_v = given.v + i_b * strides.v[0] + k_begin * strides.v[1] + i_kv * strides.v[2]
        p_list = lists.col + i_h.to(tl.int64) * s_col + from_entry
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        first = tl.maximum(i_tile * BLOCK_M, context)
        last = tl.minimum(i_tile * BLOCK_M + (BLOCK_M - 1), length - 1)
        count = (to_entry - from_entry) * PER_BLOCK
        # Entries are loaded an iteration ahead: what they list can be asked for at once.
        following = tl.load(p_list, mask=count > 0, other=-1)
        for i in tl.range(0, count, num_stages=config.STAGES):
            column = following
            following = tl.load(p_list + (i + 1) // PER_BLOCK, mask=i + 1 < count, other=-1)
            # A column out of bounds, or whose keys no row may see, is walked without effect.
            column = tl.where((column >= 0) & (column < columns), column, columns)
            first_key = column * config.K_BLOCK + i % PER_BLOCK * BLOCK_N
            o_key = first_key + tl.arange(0, BLOCK_N)
            m_key = (o_key >= low) & (o_key < high)
            b_k, b_v = key_tile(p_k, p_v, first_key, m_key, strides, config)
            edge = is_edge(first, last, first_key, first_key + (BLOCK_N - 1), left, config.HAS_LEFT)
            _, b_ds = score_gradients(
                product(b_q, b_k), product(b_do, b_v), b_lse[:, None], b_delta[:, None], o_key[None, :],
                position[:, None], edge, scoring, config, b_k.dtype,
            )  # fmt: skip
            acc = add_product(acc, b_ds, b_k)
        store_rows(p_dq, row, acc * scoring.scale, m_row, config.D, BLOCK_D)


@triton.jit(
    do_not_specialize=[
        "rows", "sequences", "keys", "s_crow", "s_col", "layout_columns", "entries", "slots", "slots_q", "left",
    ]
)  # fmt: skip
def backward_keys(
    given, lists, bounds, p_dk, p_dv, rows, sequences, keys, s_crow, s_col, layout_columns, entries, slots, slots_q,
    scores, left, strides, config: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values of a kv head; ``lists`` are those of the transposed layout.

    ROWS: BLOCK_M of ``backward_queries``, a multiple of this kernel's. TOGETHER: kv heads whose tiles come in turn; the
    first tiles of a head, which most queries see, are the heaviest.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    PER_ROW: tl.constexpr = config.Q_BLOCK // BLOCK_M
    H: tl.constexpr = config.GROUP * config.HEADS_KV
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    KIND: tl.constexpr = config.KIND
    batch = Batch(bounds, sequences, rows, keys)
    layout = Layout(lists, s_crow, s_col, layout_columns, entries)
    scoring = Scoring(scores[0], scores[1], left)
    i_of_heads = tl.program_id(0) % (slots * TOGETHER)
    i_kv = tl.program_id(0) // (slots * TOGETHER) * TOGETHER + i_of_heads % TOGETHER
    # Keys are cut into segments and tiles as queries are.
    all_keys = Batch(Bounds(bounds.k_starts, bounds.k_ends, None, None), sequences, keys, rows)
    i_n, i_tile, first_key, k_len = locate(all_keys, i_of_heads // TOGETHER, BLOCK_N, 1, KIND)
    if (k_len > 0) & (i_tile >= 0) & (i_tile * BLOCK_N < k_len):
        i_s = tl.maximum(i_n, 0)
        i_s = i_s * 3 + 1 if KIND == PADDED else i_s + 1
        i_q, begin, q_len = segment(batch, i_s, KIND)
        k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, KIND)
        possible = possible & (q_len > 0) & (length == k_len)
        context = length - q_len
        o_m = tl.arange(0, BLOCK_M)
        o_key = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_key = o_key < k_len
        i_b = first_key * 0
        if KIND == PADDED:
            i_b = first_key // keys
        at = first_key - i_b * keys
        p_k = given.k + i_b * strides.k[0] + at * strides.k[1] + i_kv.to(tl.int64) * strides.k[2]
        p_v = given.v + i_b * strides.v[0] + at * strides.v[1] + i_kv.to(tl.int64) * strides.v[2]
        b_k, b_v = key_tile(p_k, p_v, i_tile * BLOCK_N, m_key & possible, strides, config)
        if config.HELD:
            b_k = in_registers(b_k)
        token = begin - context
        if KIND == PADDED:
            token -= begin // rows * rows
        # Where the workspace has the tile at position 0, were there one; the first that there is.
        slot = begin // ROWS + i_s * 2 - context // ROWS
        lowest = context // BLOCK_M * BLOCK_M
        last_row = (length - 1) // config.Q_BLOCK
        acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for i_g in range(config.GROUP):
            i_h = i_kv * config.GROUP + i_g
            from_entry, to_entry = list_of(layout, i_h, i_tile * BLOCK_N // config.K_BLOCK, possible)
            p_list = lists.col + i_h.to(tl.int64) * s_col + from_entry
            p_stats = given.stats + (i_h.to(tl.int64) * slots_q + slot) * (2 * ROWS) + tl.arange(0, 2 * BLOCK_M)
            own = place_of(batch, i_b, token, i_h, strides, H)
            count = (to_entry - from_entry) * PER_ROW
            following = tl.load(p_list, mask=count > 0, other=-1)
            for i in tl.range(0, count, num_stages=config.STAGES):
                i_row = following
                following = tl.load(p_list + (i + 1) // PER_ROW, mask=i + 1 < count, other=-1)
                first = i_row * config.Q_BLOCK + i % PER_ROW * BLOCK_M
                # A row behind the last query, or a tile before the first, is walked without effect.
                there = within(i_row, 0, last_row + 1) & within(first, lowest, length)
                first = tl.where(there, first, -BLOCK_M)
                position = first + o_m
                m_row = within(position, context, length)
                b_q, b_do = row_tile(given, own, first, m_row, strides, config)
                edge = is_edge(
                    first, first + (BLOCK_M - 1), i_tile * BLOCK_N, i_tile * BLOCK_N + (BLOCK_N - 1), left,
                    config.HAS_LEFT,
                )  # fmt: skip
                b_s = product(b_k, b_q)  # [BLOCK_N, BLOCK_M]
                b_dp = product(b_v, b_do)
                # Only now, as they take registers.
                b_lse, b_delta = tl.split(tl.reshape(tl.load(p_stats + tl.maximum(first, lowest) * 2), [BLOCK_M, 2]))
                b_p, b_ds = score_gradients(
                    b_s, b_dp, b_lse[None, :], b_delta[None, :], o_key[:, None],
                    position[None, :], edge, scoring, config, b_q.dtype,
                )  # fmt: skip
                acc_v = add_product(acc_v, b_p, b_do)
                acc_k = add_product(acc_k, b_ds, b_q)
        row = (first_key + o_key) * config.HEADS_KV + i_kv
        store_rows(p_dk, row, acc_k * scoring.scale, m_key, config.D, BLOCK_D)
        store_rows(p_dv, row, acc_v, m_key, config.DV, BLOCK_DV)
