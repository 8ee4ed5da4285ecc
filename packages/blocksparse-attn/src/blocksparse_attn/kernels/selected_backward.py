"""Gradients of attention to blocks that are listed for each token and kv head, on every target; deterministic.

``backward_tokens``: a tile is the query heads of a kv head for one token, and walks its list again.
``backward_pieces``: a tile is keys of one block and one page, and walks the tokens that list them, of all sequences
that share the page.

Formulas as in ``backward``; which keys a token sees of a piece is a number, its reach, see
``selected.gradients.lists``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blocksparse_attn.kernels.backward import add_product, product
from blocksparse_attn.kernels.softmax import LOG2_E, power
from blocksparse_attn.kernels.tiles import load_tile, wide


class SelectedBackwardConfig(NamedTuple):
    """What the kernels are compiled for, see ``SelectedConfig``.

    PIECE: keys of one block and one page. ENTRIES: pieces of a token's list. BLOCK_N: of the kernel of tokens, keys of
    a tile, which are those of several small pieces; of that of pieces, those of one, and more where that is small.
    TOKEN_ROWS: of a tile for one token: several tokens make a tile, or several tiles a token.
    WIDE: elements of one head lie 2^31 or more apart.
    """

    GROUP: int
    HEADS_KV: int
    D: int
    BLOCK_D: int
    DV: int
    BLOCK_DV: int
    PAGE: int
    PIECE: int
    ENTRIES: int
    BLOCK_M: int
    TOKEN_ROWS: int
    BLOCK_N: int
    STAGES: int
    K_SCALES: int
    V_SCALES: int
    WIDE: bool


class Given(NamedTuple):
    """Pointers: q, the caches, d_out; out, contiguous; lse, d_lse and delta [Hq, T], contiguous; scales of the caches.

    d_lse and the scales may be None.
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    out: Any
    lse: Any
    d_lse: Any
    delta: Any
    k_scale: Any
    v_scale: Any


class Scales(NamedTuple):
    """Of scores, of keys and of values."""

    softmax: Any
    k: Any
    v: Any


class SlotStrides(NamedTuple):
    """Of q and d_out by (token, head, element); of caches and their gradients by (page, slot, head, element)."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    d_k: Any
    d_v: Any


@triton.jit
def scales_of(given, scales, i_kv, config: tl.constexpr):
    """What scores, and products with values, of a kv head are multiplied by."""
    of_scores, of_values = scales.softmax * scales.k, scales.v
    if config.K_SCALES:
        of_scores = of_scores * tl.load(given.k_scale + (i_kv if config.K_SCALES > 1 else 0))
    if config.V_SCALES:
        of_values = of_values * tl.load(given.v_scale + (i_kv if config.V_SCALES > 1 else 0))
    return of_scores, of_values


@triton.jit
def place(slot, i_kv, strides, PAGE: tl.constexpr):
    """Offsets of slots, counted from the pool's first, of a kv head."""
    return slot // PAGE * strides[0] + slot % PAGE * strides[1] + i_kv.to(tl.int64) * strides[2]


@triton.jit
def query_rows(given, token, o_h, m_row, strides, config: tl.constexpr):
    """Queries [BLOCK_M, BLOCK_D] and gradients of outputs [BLOCK_M, BLOCK_DV]."""
    token, o_h = token.to(tl.int64), o_h.to(tl.int64)
    o_d = wide(tl.arange(0, config.BLOCK_D), config.WIDE) * strides.q[2]
    o_dv = wide(tl.arange(0, config.BLOCK_DV), config.WIDE) * strides.d_out[2]
    off_q = token * strides.q[0] + o_h * strides.q[1]
    off_do = token * strides.d_out[0] + o_h * strides.d_out[1]
    b_q = load_tile(given.q, off_q, o_d, m_row, config.D, config.BLOCK_D)
    b_do = load_tile(given.d_out, off_do, o_dv, m_row, config.DV, config.BLOCK_DV)
    return b_q, b_do


@triton.jit
def key_rows(given, slot, i_kv, m_key, strides, config: tl.constexpr):
    """Keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV]."""
    o_d = wide(tl.arange(0, config.BLOCK_D), config.WIDE) * strides.k[3]
    o_dv = wide(tl.arange(0, config.BLOCK_DV), config.WIDE) * strides.v[3]
    b_k = load_tile(given.k, place(slot, i_kv, strides.k, config.PAGE), o_d, m_key, config.D, config.BLOCK_D)
    b_v = load_tile(given.v, place(slot, i_kv, strides.v, config.PAGE), o_dv, m_key, config.DV, config.BLOCK_DV)
    return b_k, b_v


@triton.jit
def weights_and_gradients(b_s, b_dp, b_lse, b_delta, seen, scale, dtype: tl.constexpr):
    """p = exp(scale * b_s - lse), and the gradient of the scores, of that of p, ``b_dp``; 0 where nothing is seen."""
    NATURAL: tl.constexpr = dtype == tl.float32
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    b_p = power(tl.where(seen, b_s * (scale * UNIT) - b_lse * UNIT, float("-inf")), NATURAL)
    # What nothing sees may be NaN.
    b_ds = tl.where(seen, b_p * (b_dp - b_delta), 0.0)
    return b_p.to(dtype), b_ds.to(dtype)


@triton.jit
def lse_of(given, at, m_row):
    """lse of rows, +inf for those that there are not and for those that saw nothing: they have no weights."""
    b_lse = tl.load(given.lse + at, mask=m_row, other=float("-inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit(do_not_specialize=["tokens"])
def backward_tokens(given, p_slot, p_reach, p_dq, tokens, scales, strides, config: tl.constexpr):
    """The gradient of the query heads of a kv head for one token, and delta, which ``backward_pieces`` reads."""
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_D: tl.constexpr = config.BLOCK_D
    PIECES: tl.constexpr = config.BLOCK_N // config.PIECE
    HEAD_TILES: tl.constexpr = (config.GROUP + BLOCK_M - 1) // BLOCK_M
    H: tl.constexpr = config.GROUP * config.HEADS_KV
    pid = tl.program_id(0)
    i_kv = pid // HEAD_TILES % config.HEADS_KV
    token = (pid // (HEAD_TILES * config.HEADS_KV)).to(tl.int64)
    o_g = pid % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_g < config.GROUP
    o_h = i_kv * config.GROUP + o_g
    b_q, b_do = query_rows(given, token, o_h, m_row, strides, config)
    row = token * H + o_h
    at = o_h.to(tl.int64) * tokens + token
    o_dv = tl.arange(0, config.BLOCK_DV)
    m_out = m_row[:, None] & (o_dv < config.DV)[None, :]
    b_out = tl.load(given.out + row[:, None] * config.DV + o_dv[None, :], mask=m_out, other=0.0)
    b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
    if given.d_lse is not None:
        b_delta -= tl.load(given.d_lse + at, mask=m_row, other=0.0)
    tl.store(given.delta + at, b_delta, mask=m_row)
    b_lse = lse_of(given, at, m_row)

    scale, factor = scales_of(given, scales, i_kv, config)
    o_n = tl.arange(0, config.BLOCK_N)
    first = (token * config.HEADS_KV + i_kv) * config.ENTRIES
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.range(0, (config.ENTRIES + PIECES - 1) // PIECES, num_stages=config.STAGES):
        i_entry = i * PIECES + o_n // config.PIECE
        there = i_entry < config.ENTRIES
        slot = tl.load(p_slot + first + i_entry, mask=there, other=0) + o_n % config.PIECE
        m_key = o_n % config.PIECE < tl.load(p_reach + first + i_entry, mask=there, other=0)
        b_k, b_v = key_rows(given, slot, i_kv, m_key, strides, config)
        _, b_ds = weights_and_gradients(
            product(b_q, b_k), product(b_do, b_v) * factor, b_lse[:, None], b_delta[:, None], m_key[None, :], scale,
            b_k.dtype,
        )  # fmt: skip
        acc = add_product(acc, b_ds, b_k)
    o_d = tl.arange(0, config.BLOCK_D)
    m_tile = m_row[:, None] & (o_d < config.D)[None, :]
    p_rows = p_dq + row[:, None] * config.D + o_d[None, :]
    tl.store(p_rows, (acc * scale).to(p_dq.dtype.element_ty), mask=m_tile)


@triton.jit
def store_keys(p, slot, i_kv, b_x, m_key, strides, config: tl.constexpr, D: tl.constexpr):
    """Gradients of keys, or of values, contiguous along a head."""
    o_d = tl.arange(0, b_x.shape[1])
    m_tile = m_key[:, None] & (o_d < D)[None, :]
    off = place(slot, i_kv, strides, config.PAGE)
    tl.store(p + off[:, None] + o_d[None, :], b_x.to(p.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["tokens"])
def backward_pieces(given, p_begins, p_token, p_reach, p_dk, p_dv, tokens, scales, strides, config: tl.constexpr):
    """The gradients of one piece of keys and values of a kv head."""
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    ROWS: tl.constexpr = config.TOKEN_ROWS
    HEAD_TILES: tl.constexpr = (config.GROUP + ROWS - 1) // ROWS
    TOKENS: tl.constexpr = BLOCK_M // ROWS
    pid = tl.program_id(0).to(tl.int64)
    i_kv = pid % config.HEADS_KV
    o_n = tl.arange(0, BLOCK_N)
    m_key = o_n < config.PIECE
    slot = pid // config.HEADS_KV * config.PIECE + tl.minimum(o_n, config.PIECE - 1)
    begin, end = tl.load(p_begins + pid), tl.load(p_begins + pid + 1)
    scale, factor = scales_of(given, scales, i_kv, config)
    b_k, b_v = key_rows(given, slot, i_kv, m_key & (begin < end), strides, config)
    o_m = tl.arange(0, BLOCK_M)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    tiles = ((end - begin + (TOKENS - 1)) // TOKENS).to(tl.int32) * HEAD_TILES
    for i in tl.range(0, tiles, num_stages=config.STAGES):
        i_entry = begin + i // HEAD_TILES * TOKENS + o_m // ROWS
        o_g = i % HEAD_TILES * ROWS + o_m % ROWS
        m_row = (i_entry < end) & (o_g < config.GROUP)
        token = tl.load(p_token + i_entry, mask=m_row, other=0)
        reach = tl.load(p_reach + i_entry, mask=m_row, other=0)
        o_h = i_kv * config.GROUP + o_g
        b_q, b_do = query_rows(given, token, o_h, m_row, strides, config)
        at = o_h * tokens + token
        b_p, b_ds = weights_and_gradients(
            product(b_k, b_q), product(b_v, b_do) * factor, lse_of(given, at, m_row)[None, :],
            tl.load(given.delta + at, mask=m_row, other=0.0)[None, :], o_n[:, None] < reach[None, :], scale,
            b_q.dtype,
        )  # fmt: skip
        acc_v = add_product(acc_v, b_p, b_do)
        acc_k = add_product(acc_k, b_ds, b_q)
    store_keys(p_dk, slot, i_kv, acc_k * scale, m_key, strides.d_k, config, config.D)
    store_keys(p_dv, slot, i_kv, acc_v * factor, m_key, strides.d_v, config, config.DV)
