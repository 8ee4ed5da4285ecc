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
from blocksparse_attn.kernels.softmax import LOG2_E, dot_by_parts, finite, power, soft_capped
from blocksparse_attn.kernels.tiles import (
    PADDED,
    keys_of_sequence,
    list_of,
    load_tile,
    locate,
    segment,
    wide,
)


class BackwardConfig(NamedTuple):
    """What the kernels are compiled for, see ``PortableConfig``."""

    KIND: int
    GROUP: int
    HEADS_KV: int
    D: int
    BLOCK_D: int
    DV: int
    BLOCK_DV: int
    Q_BLOCK: int
    K_BLOCK: int
    BLOCK_M: int
    BLOCK_N: int
    SOFTCAP: bool
    HAS_LEFT: bool
    WIDE: bool
    STAGES: int


class Given(NamedTuple):
    """Pointers: q, k, v, d_out; out, contiguous; lse, d_lse and delta, contiguous as lse is; d_lse may be None."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    out: Any
    lse: Any
    d_lse: Any
    delta: Any


class GivenStrides(NamedTuple):
    """By (sequence, token, head, element)."""

    q: Any
    k: Any
    v: Any
    d_out: Any


class Head(NamedTuple):
    """A tile's rows: offsets of their first elements in q, d_out and, as rows of all heads, in contiguous tensors."""

    q: Any
    d_out: Any
    row: Any
    lse: Any
    mask: Any


@triton.jit
def rows_of_head(batch, i_b, token, i_h, m_row, strides, H: tl.constexpr):
    """Where tokens [BLOCK_M] of a head lie; i_b: the sequence of a padded batch, otherwise 0."""
    i_h = i_h.to(tl.int64)
    return Head(
        i_b * strides.q[0] + token * strides.q[1] + i_h * strides.q[2],
        i_b * strides.d_out[0] + token * strides.d_out[1] + i_h * strides.d_out[2],
        (i_b * batch.rows + token) * H + i_h,
        (i_b * H + i_h) * batch.rows + token,
        m_row,
    )


@triton.jit
def key_tile(p_k, p_v, off_k, off_v, fits, strides, config: tl.constexpr):
    """Keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV], zeros where they do not fit."""
    o_dk = wide(tl.arange(0, config.BLOCK_D), config.WIDE) * strides.k[3]
    o_dv = wide(tl.arange(0, config.BLOCK_DV), config.WIDE) * strides.v[3]
    b_k = load_tile(p_k, off_k, o_dk, fits, config.D, config.BLOCK_D)
    b_v = load_tile(p_v, off_v, o_dv, fits, config.DV, config.BLOCK_DV)
    return b_k, b_v


@triton.jit
def row_tile(given, rows, strides, config: tl.constexpr):
    """Queries [BLOCK_M, BLOCK_D] and gradients of outputs [BLOCK_M, BLOCK_DV], zeros outside of the mask."""
    o_d = wide(tl.arange(0, config.BLOCK_D), config.WIDE) * strides.q[3]
    o_dv = wide(tl.arange(0, config.BLOCK_DV), config.WIDE) * strides.d_out[3]
    b_q = load_tile(given.q, rows.q, o_d, rows.mask, config.D, config.BLOCK_D)
    b_do = load_tile(given.d_out, rows.d_out, o_dv, rows.mask, config.DV, config.BLOCK_DV)
    return b_q, b_do


@triton.jit
def weights(b_a, b_b, b_lse, seen, scoring, SOFTCAP: tl.constexpr):
    """p = exp(score - lse) of the products a b^T, 0 where not seen, and the derivative of capping.

    b_lse: broadcast to the products, finite.
    """
    NATURAL: tl.constexpr = b_a.dtype == tl.float32
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    if NATURAL:
        b_s = dot_by_parts(b_a, b_b)
    else:
        b_s = tl.dot(b_a, tl.trans(b_b))
    b_s = b_s * scoring.scale
    slope = 1.0
    if SOFTCAP:
        b_s = soft_capped(b_s, scoring.softcap, NATURAL)
        share = b_s / scoring.softcap
        slope = 1.0 - share * share
    b_s = tl.where(seen, (b_s - b_lse) * UNIT, float("-inf"))
    return power(b_s, NATURAL), slope


@triton.jit
def add_product(acc, b_a, b_b):
    """acc + a b, a in b's dtype."""
    if b_b.dtype == tl.float32:
        # Without tensor cores one sum over all would round as often as there are rows: each tile has its own.
        acc = tl.fma(tl.dot(b_a, b_b, input_precision="ieee"), 1.0, acc)
    else:
        acc = tl.dot(b_a.to(b_b.dtype), b_b, acc)
    return acc


@triton.jit
def product(b_a, b_b):
    """a b^T."""
    if b_a.dtype == tl.float32:
        b_c = dot_by_parts(b_a, b_b)
    else:
        b_c = tl.dot(b_a, tl.trans(b_b))
    return b_c


@triton.jit
def store_rows(p, row, b_x, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a contiguous tensor [.., D]."""
    o_d = tl.arange(0, BLOCK_D)
    m_tile = mask[:, None] & (o_d < D)[None, :]
    tl.store(p + row[:, None] * D + o_d[None, :], b_x.to(p.dtype.element_ty), mask=m_tile)


@triton.jit(
    do_not_specialize=["rows", "sequences", "keys", "s_crow", "s_col", "layout_rows", "entries", "slots", "left"]
)
def backward_queries(
    given, lists, bounds, p_dq, rows, sequences, keys, s_crow, s_col, layout_rows, entries, slots, scores, left,
    strides, config: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, and delta of its rows, which ``backward_keys`` reads.

    Tiles lie at multiples of BLOCK_M in a sequence's positions.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    PER_BLOCK: tl.constexpr = config.K_BLOCK // BLOCK_N
    H: tl.constexpr = config.GROUP * config.HEADS_KV
    BLOCK_D: tl.constexpr = config.BLOCK_D
    batch = Batch(bounds, sequences, rows, keys)
    layout = Layout(lists, s_crow, s_col, layout_rows, entries)
    scoring = Scoring(scores[0], scores[1], left)
    pid = tl.program_id(0)
    # Heads that share keys come one after the other.
    i_h = pid // (slots * config.GROUP) * config.GROUP + pid % config.GROUP
    i_n, i_slot, begin, q_len = locate(batch, pid // config.GROUP % slots, BLOCK_M, 2, config.KIND)
    k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, config.KIND)
    context = length - q_len
    i_tile = (length - 1) // BLOCK_M - i_slot
    if (q_len > 0) & (i_slot >= 0) & (i_tile >= context // BLOCK_M):
        position = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        m_row = (position >= context) & (position < length)
        position = tl.minimum(tl.maximum(position, context), length - 1)
        i_b = begin * 0
        if config.KIND == PADDED:
            i_b = begin // rows
        own = rows_of_head(batch, i_b, begin - i_b * rows + (position - context), i_h, m_row, strides, H)
        b_q, b_do = row_tile(given, own, strides, config)
        o_dv = tl.arange(0, config.BLOCK_DV)
        b_out = load_tile(given.out, own.row * config.DV, o_dv, m_row, config.DV, config.BLOCK_DV)
        b_lse = finite(tl.load(given.lse + own.lse, mask=m_row, other=0.0))
        b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
        if given.d_lse is not None:
            b_delta -= tl.load(given.d_lse + own.lse, mask=m_row, other=0.0)
        tl.store(given.delta + own.lse, b_delta, mask=m_row)

        high = tl.minimum(i_tile * BLOCK_M + (BLOCK_M - 1), length - 1) + 1
        low = high * 0
        if config.HAS_LEFT:
            low = tl.maximum(tl.maximum(i_tile * BLOCK_M, context) - left, 0)
        columns = (high - 1) // config.K_BLOCK + 1
        from_entry, to_entry = list_of(layout, i_h, i_tile * BLOCK_M // config.Q_BLOCK, possible)
        i_kv = (i_h // config.GROUP).to(tl.int64)
        p_k = given.k + i_kv * strides.k[2] + i_b * strides.k[0]
        p_v = given.v + i_kv * strides.v[2] + i_b * strides.v[0]
        p_list = lists.col + i_h.to(tl.int64) * s_col + from_entry
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in tl.range(0, (to_entry - from_entry) * PER_BLOCK, num_stages=config.STAGES):
            column = tl.load(p_list + i // PER_BLOCK)
            # A column out of bounds, or whose keys no row may see, is walked without effect.
            column = tl.where((column >= 0) & (column < columns), column, columns)
            o_key = column * config.K_BLOCK + i % PER_BLOCK * BLOCK_N + tl.arange(0, BLOCK_N)
            m_key = (o_key >= low) & (o_key < high)
            seen = o_key[None, :] <= position[:, None]
            if config.HAS_LEFT:
                seen = seen & (o_key[None, :] >= position[:, None] - left)
            at = k_begin + o_key
            b_k, b_v = key_tile(p_k, p_v, at * strides.k[1], at * strides.v[1], m_key, strides, config)
            b_p, slope = weights(b_q, b_k, b_lse[:, None], seen & m_row[:, None], scoring, config.SOFTCAP)
            b_ds = b_p * (product(b_do, b_v) - b_delta[:, None]) * slope
            # Where nothing is seen a value may be NaN.
            acc = add_product(acc, tl.where(seen, b_ds, 0.0), b_k)
        store_rows(p_dq, own.row, acc * scoring.scale, m_row, config.D, config.BLOCK_D)


@triton.jit(
    do_not_specialize=["rows", "sequences", "keys", "s_crow", "s_col", "layout_columns", "entries", "slots", "left"]
)
def backward_keys(
    given, lists, bounds, p_dk, p_dv, rows, sequences, keys, s_crow, s_col, layout_columns, entries, slots, scores,
    left, strides, config: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values of a kv head; ``lists`` are those of the transposed layout."""
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
    pid = tl.program_id(0)
    i_kv = pid // slots
    # Keys are cut into segments and tiles as queries are.
    all_keys = Batch(Bounds(bounds.k_starts, bounds.k_ends, None, None), sequences, keys, rows)
    i_n, i_tile, first_key, k_len = locate(all_keys, pid % slots, BLOCK_N, 1, KIND)
    if (k_len > 0) & (i_tile >= 0) & (i_tile * BLOCK_N < k_len):
        i_s = tl.maximum(i_n, 0)
        i_q, begin, q_len = segment(batch, i_s * 3 + 1 if KIND == PADDED else i_s + 1, KIND)
        k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, KIND)
        possible = possible & (q_len > 0) & (length == k_len)
        context = length - q_len
        o_n = tl.arange(0, BLOCK_N)
        o_key = i_tile * BLOCK_N + o_n
        m_key = o_key < k_len
        i_b = first_key * 0
        if KIND == PADDED:
            i_b = first_key // keys
        at = first_key - i_b * keys + o_key
        p_k = given.k + i_kv.to(tl.int64) * strides.k[2] + i_b * strides.k[0]
        p_v = given.v + i_kv.to(tl.int64) * strides.v[2] + i_b * strides.v[0]
        b_k, b_v = key_tile(p_k, p_v, at * strides.k[1], at * strides.v[1], m_key & possible, strides, config)
        q_first = begin
        if KIND == PADDED:
            q_first = begin - i_b * rows
        acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for i_g in range(config.GROUP):
            i_h = i_kv * config.GROUP + i_g
            from_entry, to_entry = list_of(layout, i_h, i_tile * BLOCK_N // config.K_BLOCK, possible)
            p_list = lists.col + i_h.to(tl.int64) * s_col + from_entry
            for i in tl.range(0, (to_entry - from_entry) * PER_ROW, num_stages=config.STAGES):
                i_row = tl.load(p_list + i // PER_ROW)
                # A row behind the last query is walked without effect.
                i_row = tl.where((i_row >= 0) & (i_row <= (length - 1) // config.Q_BLOCK), i_row, -1)
                position = i_row * config.Q_BLOCK + i % PER_ROW * BLOCK_M + tl.arange(0, BLOCK_M)
                m_row = (position >= context) & (position < length) & (i_row >= 0)
                own = rows_of_head(batch, i_b, q_first + (position - context), i_h, m_row, strides, H)
                b_q, b_do = row_tile(given, own, strides, config)
                b_lse = finite(tl.load(given.lse + own.lse, mask=m_row, other=0.0))
                b_delta = tl.load(given.delta + own.lse, mask=m_row, other=0.0)
                seen = (o_key[:, None] <= position[None, :]) & m_row[None, :] & m_key[:, None]
                if config.HAS_LEFT:
                    seen = seen & (o_key[:, None] >= position[None, :] - left)
                b_p, slope = weights(b_k, b_q, b_lse[None, :], seen, scoring, config.SOFTCAP)  # [BLOCK_N, BLOCK_M]
                acc_v = add_product(acc_v, b_p, b_do)
                b_ds = b_p * (product(b_v, b_do) - b_delta[None, :]) * slope
                acc_k = add_product(acc_k, tl.where(seen, b_ds, 0.0), b_q)
        row = (first_key + o_key) * config.HEADS_KV + i_kv
        store_rows(p_dk, row, acc_k * scoring.scale, m_key, config.D, config.BLOCK_D)
        store_rows(p_dv, row, acc_v, m_key, config.DV, config.BLOCK_DV)
