"""Attention to blocks that are listed for each token and kv head, on every target; prefill and decode.

A tile is the query heads of a kv head for one token, or for a few that follow each other. One token's list is walked in
its own order, several small blocks at a time. A tile of several tokens walks what any of them lists, each block once,
and masks the tokens that do not.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blocksparse_attn.kernels.groups import Batch, Cache, Rows, Scoring, Strides, Visible
from blocksparse_attn.kernels.softmax import softmax_step, store, update
from blocksparse_attn.kernels.tiles import (
    PAGED,
    keys_of_sequence,
    load_tile,
    locate,
    sequence_of,
    share,
    slot_of,
    split_row,
)
from blocksparse_attn.kernels.unite import (
    HEADER,
    LAST,
    Part,
    keys_of_numbers,
    numbers_of,
    piece_of,
    size_of_work,
)


class SelectedConfig(NamedTuple):
    """What the kernel is compiled for, see ``PortableConfig``.

    BLOCK: tokens of a block; PIECE: of these, in a tile. TOPK_P: entries of a list, rounded up to a power of two.
    TOKENS: of a tile. IS_FP8: the cache holds e4m3; NATIVE: which the GPU has an instruction to widen; PAIRS: read two
    at a time, see ``halves_of_e4m3``, so that strides of k and v count pairs. K_SCALES and V_SCALES: 0, 1 or as many as
    kv heads. ONE_PAGE: a tile of keys lies within one page, which is looked up once for all of it. DEPENDENT: it may
    start before the kernel ahead of it has ended, and the kernel behind it before it has. NEIGHBOURS: 0, or tokens
    whose lists have been united: where they make MOST_UNITED blocks or fewer, those tokens are for the kernel with
    TOKENS of NEIGHBOURS, otherwise for that with 1. MAPPED: lists are united by a map of all blocks, see unite.py.
    ABOVE_0: the scale is above 0, and tiles of several tokens scale their scores as they subtract the running max.
    """

    GROUP: int
    HEADS_KV: int
    D: int
    BLOCK_D: int
    DV: int
    BLOCK_DV: int
    PAGE: int
    BLOCK: int
    PIECE: int
    TOPK: int
    TOPK_P: int
    BLOCK_M: int
    BLOCK_N: int
    TOKENS: int
    STAGES: int
    CAUSAL: bool
    IS_FP8: bool
    NATIVE: bool
    PAIRS: bool
    K_SCALES: int
    V_SCALES: int
    ONE_PAGE: bool
    WIDE: bool
    DEPENDENT: bool
    NEIGHBOURS: int
    MOST_UNITED: int
    MAPPED: bool
    ABOVE_0: bool


class Inputs(NamedTuple):
    """Pointers: q, the caches, the lists and the scales of the caches."""

    q: Any
    k: Any
    v: Any
    indices: Any
    k_scale: Any
    v_scale: Any


class Numbers(NamedTuple):
    """The softmax's scale, factors of keys and values, and strides of q, k, v, out and lse and, by (token, head), of
    the lists."""

    softmax_scale: Any
    k_factor: Any
    v_factor: Any
    strides: Any
    s_indices: Any


class Places(NamedTuple):
    """Of a tile's keys and values: pointers, and offsets of their first elements."""

    k: Any
    v: Any
    off_k: Any
    off_v: Any


# What e4m3 is multiplied by as it is widened from its bits, with no instruction of the GPU's for it.
WIDENED: tl.constexpr = tl.constexpr(2.0**-8)


@triton.jit
def from_e4m3(b_x, NATIVE: tl.constexpr):
    """e4m3, given as its bits, in float16, which holds all of its values; times WIDENED unless NATIVE."""
    if NATIVE:
        b_y = b_x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The bits of a float16 whose exponent is biased by 8 more.
        bits = b_x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        b_y = tl.where((bits & 0x7F) == 0x7F, 0x7E00, half).to(tl.int16).to(tl.float16, bitcast=True)
    return b_y


@triton.jit
def halves_of_e4m3(b_x):
    """Two neighbours in e4m3, given as the 16 bits of both, in float16: those in even columns, and those in odd ones.

    Elements of 16 bits come from shared memory as products want them, by LDSM, values too, where those of 8 bits would
    be read one by one. No tensor of 8 bits may stand between, or Triton lays the products out for it.
    """
    even = tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, 0x0020; mov.b32 {lo, hi}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, lo; }",
        "=r,r", [b_x], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    odd = tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, 0x0031; mov.b32 {lo, hi}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, lo; }",
        "=r,r", [b_x], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    return even, odd


@triton.jit
def split_pairs(b_x):
    """The elements of each row in even columns, and those in odd ones."""
    return tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]))


@triton.jit
def in_float16(b_q):
    """bfloat16 rows as float16 and the powers of two [rows] that they were divided by.

    To meet keys of e4m3 in float16, which costs a GPU a quarter of what it takes to widen them to bfloat16. What is
    below 2^-24 of a row's largest element is rounded.
    """
    b_q = b_q.to(tl.float32)
    exponent = tl.max(b_q.to(tl.int32, bitcast=True) & 0x7F800000, 1)
    unit = tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))
    return (b_q / unit[:, None]).to(tl.float16), unit


@triton.jit
def factor_of(p_scale, i_kv, factor, SCALES: tl.constexpr, config: tl.constexpr):
    """What a product with the keys, or values, of a kv head is multiplied by."""
    if SCALES:
        factor = factor * tl.load(p_scale + (i_kv if SCALES > 1 else 0))
    if config.IS_FP8 and not config.NATIVE:
        factor = factor / WIDENED
    return factor


@triton.jit
def step(acc, running_max, row_sum, b_q, cache, at, o_key, listed, visible, scoring, strides, config: tl.constexpr):
    """The keys ``o_key`` [BLOCK_N] for a tile of rows, of which ``listed`` [BLOCK_M, 1] have them.

    ``at``: the first of them, where they lie in one page. Keys from ``visible.high`` on are not read.
    """
    if config.ONE_PAGE:
        # One address for all, and offsets that are the same for every tile.
        page, slot, fits = slot_of(cache, at, visible.high, config.PAGE)
        p_k = cache.k + page * strides.k[0] + slot * strides.k[1]
        p_v = cache.v + page * strides.v[0] + slot * strides.v[1]
        o_slot = tl.arange(0, config.BLOCK_N).to(tl.int64)
        off_k, off_v = o_slot * strides.k[1], o_slot * strides.v[1]
    else:
        page, slot, fits = slot_of(cache, o_key, visible.high, config.PAGE)
        p_k, p_v = cache.k, cache.v
        off_k = page * strides.k[0] + slot * strides.k[1]
        off_v = page * strides.v[0] + slot * strides.v[1]
    seen = o_key[None, :] <= visible.position[:, None]
    # The values of a key that no row sees are not loaded: 0 times NaN would be NaN.
    m_key = fits & (o_key < visible.high)
    if config.TOKENS > 1:
        seen = seen & listed
    places = Places(p_k, p_v, off_k, off_v)
    return multiplied(acc, running_max, row_sum, b_q, places, m_key, seen, scoring, strides, config)


@triton.jit
def multiplied(acc, running_max, row_sum, b_q, places, m_key, seen, scoring, strides, config: tl.constexpr):
    """The keys at these places for a tile of rows, of which ``seen`` [BLOCK_M, BLOCK_N] see them."""
    EACH: tl.constexpr = 2 if config.PAIRS else 1
    o_dk = tl.arange(0, config.BLOCK_D // EACH) * strides.k[3]
    o_dv = tl.arange(0, config.BLOCK_DV // EACH) * strides.v[3]
    b_k = load_tile(places.k, places.off_k, o_dk, m_key, config.D // EACH, config.BLOCK_D // EACH)
    b_v = load_tile(places.v, places.off_v, o_dv, m_key, config.DV // EACH, config.BLOCK_DV // EACH)
    if config.PAIRS:
        k_even, k_odd = halves_of_e4m3(b_k)
        v_even, v_odd = halves_of_e4m3(b_v)
        b_s = tl.dot(b_q[1], tl.trans(k_odd), tl.dot(b_q[0], tl.trans(k_even)))
        weights, rescale, running_max, row_sum = softmax_step(b_s, running_max, row_sum, seen, scoring, False, False)
        weights = weights.to(tl.float16)
        even = tl.dot(weights, v_even, acc[0] * rescale[:, None])
        odd = tl.dot(weights, v_odd, acc[1] * rescale[:, None])
        acc = (even, odd)
    else:
        if config.IS_FP8:
            b_k = from_e4m3(b_k, config.NATIVE).to(b_q.dtype)
            b_v = from_e4m3(b_v, config.NATIVE).to(b_q.dtype)
        if config.ABOVE_0 and config.TOKENS > 1 and b_q.dtype != tl.float32:
            b_s = tl.dot(b_q, tl.trans(b_k))
            weights, rescale, running_max, row_sum = softmax_step(
                b_s, running_max, row_sum, seen, scoring, False, False, True
            )
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None])
        else:
            acc, running_max, row_sum = update(acc, running_max, row_sum, b_q, b_k, b_v, seen, scoring, False)
    return acc, running_max, row_sum


@triton.jit
def walk_map(
    acc, running_max, row_sum, b_q, b_row, cache, part, whole, scoring, strides, EDGE: tl.constexpr,
    config: tl.constexpr,
):  # fmt: skip
    """Some tiles of a united list. Their blocks are loaded two tiles ahead and their pages one, as each waits for the
    last; ``b_row``: the bits of the rows' tokens."""
    number = numbers_of(part.numbers, part.first, part.pieces, config)
    next_number = numbers_of(part.numbers, part.first + 1, part.pieces, config)
    next_key, next_tokens, next_page = keys_of_numbers(number, part.first, whole, cache.pages, EDGE, config)
    for i in tl.range(part.first, part.end, num_stages=config.STAGES):
        o_key, tokens, page = next_key, next_tokens, next_page
        number = next_number
        next_number = numbers_of(part.numbers, i + 2, part.pieces, config)
        next_key, next_tokens, next_page = keys_of_numbers(number, i + 1, whole, cache.pages, EDGE, config)
        fits = (page >= 0) & (page < cache.num_pages)
        page = page.to(tl.int64)
        slot = (o_key % config.PAGE).to(tl.int64)
        off_k = page * strides.k[0] + slot * strides.k[1]
        off_v = page * strides.v[0] + slot * strides.v[1]
        seen = (tokens[None, :] & b_row[:, None]) != 0
        acc, running_max, row_sum = multiplied(
            acc, running_max, row_sum, b_q, Places(cache.k, cache.v, off_k, off_v), fits, seen, scoring, strides, config
        )
    return acc, running_max, row_sum


@triton.jit
def listed_block(p_list, i, config: tl.constexpr):
    """The blocks of tile i, -1 behind the end of the list."""
    i_piece = piece_of(i, config)
    PER_BLOCK: tl.constexpr = config.BLOCK // config.PIECE
    return tl.load(p_list + i_piece // PER_BLOCK, mask=i_piece < config.TOPK * PER_BLOCK, other=-1)


@triton.jit
def is_ours(p_work, i_kv, i_n, i_tile, begin, q_len, keys, there, config: tl.constexpr):
    """Whether the tokens of a tile are for this kernel, see ``SelectedConfig``; those of no sequence are for tiles."""
    N: tl.constexpr = config.NEIGHBOURS
    i_w = begin // N + (i_n + 1) + (q_len - 1) // N - i_tile * config.TOKENS // N
    p_tile = p_work + (i_w * config.HEADS_KV + i_kv) * size_of_work(keys, N, config)
    united = tl.load(p_tile, mask=there & (i_n >= 0), other=0) <= config.MOST_UNITED
    return there & (united == (config.TOKENS > 1))


@triton.jit(
    do_not_specialize=[
        "rows", "sequences", "keys", "num_pages", "s_table", "num_splits", "s_lse_sequence", "s_lse_head",
    ]
)  # fmt: skip
def attend_selected(
    inputs, p_table, bounds, p_sinks, outputs, p_work, rows, sequences, keys, num_pages, s_table, num_splits,
    s_lse_sequence, s_lse_head, numbers, config: tl.constexpr,
):  # fmt: skip
    """One tile over one split of what its tokens list."""
    if config.DEPENDENT:
        tl.extra.cuda.gdc_wait()
        if config.PAIRS:
            # Without results to merge the next step's programs find room beside these: 32 sequences 25.6 us, not 29.4.
            if num_splits == 1:
                tl.extra.cuda.gdc_launch_dependents()
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    TOKENS: tl.constexpr = config.TOKENS
    # 32 sequences 24.7 us for 27.0 (H200). Keys of 16 bits take 1.02 of the time, and more rows more registers.
    SUMS_APART: tl.constexpr = config.PAIRS and TOKENS == 1 and BLOCK_M == 16
    HEADS: tl.constexpr = config.GROUP if config.GROUP < BLOCK_M else BLOCK_M
    HEAD_TILES: tl.constexpr = (config.GROUP + HEADS - 1) // HEADS
    PIECES: tl.constexpr = config.BLOCK_N // config.PIECE
    PER_BLOCK: tl.constexpr = config.BLOCK // config.PIECE
    s = numbers.strides
    strides = Strides(s.q, s.k, s.v, s.out, (s_lse_sequence, s_lse_head, s.lse))
    batch = Batch(bounds, sequences, rows, keys)
    # The kv heads come one after the other, so that the keys of one stay in the L2 cache. Nothing is divided by numbers
    # of the call: a step of decoding would wait for it.
    i_hb, i_w = tl.program_id(0) % HEAD_TILES, tl.program_id(0) // HEAD_TILES
    i_split, i_kv = tl.program_id(1), tl.program_id(2)
    if TOKENS == 1:
        # A slot is a row. Its list does not wait for the sequence.
        p_list = inputs.indices + i_w.to(tl.int64) * numbers.s_indices[0] + i_kv.to(tl.int64) * numbers.s_indices[1]
        from_tile, to_tile = share((config.TOPK * PER_BLOCK + PIECES - 1) // PIECES, i_split, num_splits)
        next_block = listed_block(p_list, from_tile, config)
        i_n, begin, q_len, length, possible = sequence_of(batch, i_w, PAGED)
        i_tile = (i_w - begin).to(tl.int32)
        there = i_w >= 0
    else:
        i_n, i_slot, begin, q_len = locate(batch, i_w, TOKENS, 1, PAGED)
        i_tile = (q_len - 1) // TOKENS - i_slot
        there = (q_len > 0) & (i_slot >= 0) & (i_tile >= 0)
        _, length, possible = keys_of_sequence(batch, i_n, q_len, PAGED)
    context = length - q_len
    if config.NEIGHBOURS:
        there = is_ours(p_work, i_kv, i_n, i_tile, begin, q_len, keys, there, config)
    if there:
        o_m = tl.arange(0, BLOCK_M)
        o_t = i_tile * TOKENS + o_m // HEADS
        o_g = i_hb * HEADS + o_m % HEADS
        m_row = (o_m < TOKENS * HEADS) & (o_t < q_len) & (o_g < config.GROUP)
        o_t = tl.minimum(o_t, q_len - 1)
        o_h = i_kv * config.GROUP + tl.minimum(o_g, config.GROUP - 1)
        row = begin + o_t
        i_b, token, all_rows = split_row(batch, begin, row, PAGED)
        off_q = token * strides.q[1] + o_h.to(tl.int64) * strides.q[2]
        o_d = tl.arange(0, config.BLOCK_D) * strides.q[3]
        b_q = load_tile(inputs.q, off_q, o_d, m_row, config.D, config.BLOCK_D)

        position = context + o_t
        high = context + tl.minimum((i_tile + 1) * TOKENS, q_len)
        if not config.CAUSAL:
            position = position * 0 + (length - 1)
            high = length
        behind = (high - 1) // config.BLOCK + 1
        blocks = tl.where(possible, behind, 0)
        k_factor = factor_of(inputs.k_scale, i_kv, numbers.k_factor, config.K_SCALES, config)
        v_factor = factor_of(inputs.v_scale, i_kv, numbers.v_factor, config.V_SCALES, config)
        scale = numbers.softmax_scale * k_factor
        if config.IS_FP8 and b_q.dtype == tl.bfloat16:
            b_q, unit = in_float16(b_q)
            scale = scale * unit[:, None]
        scoring = Scoring(scale, 0.0, 0)
        p_pages = p_table + tl.maximum(i_n, 0).to(tl.int64) * s_table
        o_kv = i_kv.to(tl.int64)
        p_k, p_v = inputs.k, inputs.v
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if config.PAIRS:
            p_k = p_k.to(tl.pointer_type(tl.int16), bitcast=True)
            p_v = p_v.to(tl.pointer_type(tl.int16), bitcast=True)
            b_q = split_pairs(b_q)
            acc = split_pairs(acc)
        cache = Cache(p_k + o_kv * strides.k[2], p_v + o_kv * strides.v[2], p_pages, 0, num_pages)
        visible = Visible(position, 0, high)
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if SUMS_APART:
            row_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        else:
            row_sum = tl.zeros([BLOCK_M], tl.float32)
        o_n = tl.arange(0, config.BLOCK_N)
        if TOKENS == 1:
            for i in tl.range(from_tile, to_tile, num_stages=config.STAGES):
                # Entries that list nothing are walked without effect.
                block = tl.where((next_block >= 0) & (next_block < blocks), next_block, behind)
                next_block = listed_block(p_list, i + 1, config)
                at = block * config.BLOCK + piece_of(i, config) % PER_BLOCK * config.PIECE
                o_key = at + o_n % config.PIECE
                acc, running_max, row_sum = step(
                    acc, running_max, row_sum, b_q, cache, at, o_key, None, visible, scoring, strides, config
                )
        else:
            ENTRIES: tl.constexpr = TOKENS * config.TOPK_P
            p_tile = p_work + (i_w.to(tl.int64) * config.HEADS_KV + i_kv) * size_of_work(keys, TOKENS, config)
            pieces = tl.load(p_tile) * PER_BLOCK
            from_tile, to_tile = share((pieces + PIECES - 1) // PIECES, i_split, num_splits)
            p_tile += HEADER
            if config.MAPPED:
                b_row = tl.where(o_m // HEADS < TOKENS, 1 << (o_m // HEADS % TOKENS), 0)
                # Of the last blocks of a list, which rise, the first tokens do not see all keys.
                whole = high
                if config.CAUSAL:
                    whole = context + i_tile * TOKENS + 1
                o_last = pieces // PER_BLOCK - 1 - tl.arange(0, 32)
                last = tl.load(p_tile + tl.maximum(o_last, 0), mask=o_last >= 0, other=0)
                edges = tl.sum((((last >> TOKENS) + 1) * config.BLOCK > whole).to(tl.int32), 0)
                middle = tl.maximum(pieces - edges * PER_BLOCK, 0) // PIECES
                middle = tl.minimum(tl.maximum(middle, from_tile), to_tile)
                acc, running_max, row_sum = walk_map(
                    acc, running_max, row_sum, b_q, b_row, cache, Part(p_tile, from_tile, middle, pieces), whole,
                    scoring, strides, False, config,
                )  # fmt: skip
                acc, running_max, row_sum = walk_map(
                    acc, running_max, row_sum, b_q, b_row, cache, Part(p_tile, middle, to_tile, pieces), whole,
                    scoring, strides, True, config,
                )  # fmt: skip
            else:
                for i in tl.range(from_tile, to_tile, num_stages=config.STAGES):
                    i_piece = piece_of(i, config)
                    own = tl.load(p_tile + i_piece // PER_BLOCK)
                    tokens = tl.load(p_tile + ENTRIES + i_piece // PER_BLOCK)
                    end = visible.high + i_piece * 0
                    if config.CAUSAL:
                        end = tl.minimum(end, context + i_tile * TOKENS + (tokens >> LAST) + 1)
                    at = own * config.BLOCK + i_piece % PER_BLOCK * config.PIECE
                    listed = (m_row & (((tokens >> (o_m // HEADS)) & 1) != 0))[:, None]
                    o_key = at + o_n % config.PIECE
                    acc, running_max, row_sum = step(
                        acc, running_max, row_sum, b_q, cache, at, o_key, listed,
                        Visible(position, 0, end), scoring, strides, config,
                    )  # fmt: skip
        if SUMS_APART:
            row_sum = tl.sum(row_sum, 1)
        if config.DEPENDENT:
            # Earlier, programs that wait would be in the way of those that load: 8 sequences 16.8 us for 15.9 (H200).
            tl.extra.cuda.gdc_launch_dependents()
        if config.PAIRS:
            acc = tl.reshape(tl.join(acc[0], acc[1]), [BLOCK_M, BLOCK_DV])
        acc = acc * v_factor
        tile = Rows(row, o_h, i_b, token, all_rows, possible, m_row)
        store(
            acc, running_max, row_sum, tile, i_split, num_splits, p_sinks, outputs, strides, config,
            inputs.q.dtype.element_ty == tl.float32,
        )  # fmt: skip
