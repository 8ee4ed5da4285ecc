"""Attention to blocks that are listed for each token and kv head, block by block: each is read once for many tokens.

``number_entries`` numbers what lists hold. Entries that are counted are sorted by ``begin_numbers`` and
``place_entries``. ``attend_blocks``: entries of all lists, sorted by kv head, so that the queries of one stay in the L2
cache, sequence and block, are cut into chunks, one for each program, which loads a
block's keys and values and walks the tokens of the chunk that list it. ``combine_blocks`` merges the partial results of
a token's blocks.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blocksparse_attn.kernels.groups import Batch, Cache
from blocksparse_attn.kernels.softmax import LN_2, LOG2_E, finite
from blocksparse_attn.kernels.tiles import PAGED, load_tile, sequence_of, slot_of

# Instead of a scale of 0, by which -inf would be NaN.
LEAST_SCALE: tl.constexpr = tl.constexpr(1e-30)
# Counts that a program sets to 0 at a time.
ZEROS: tl.constexpr = tl.constexpr(32)


class BlocksConfig(NamedTuple):
    """What the kernels are compiled for, see ``SelectedConfig``.

    NOTHING: the number of an entry that lists nothing, the largest of its dtype.
    HEADS_P: kv heads, TOKEN_ROWS: query heads of one, both rounded up to a power of two. CHUNK: entries of a program.
    TILE: tokens of a tile for what they share, 0: not; LEAST_BLOCKS: fewer are not shared.
    """

    NOTHING: int
    GROUP: int
    HEADS_KV: int
    HEADS_P: int
    D: int
    BLOCK_D: int
    DV: int
    BLOCK_DV: int
    PAGE: int
    BLOCK: int
    TOPK: int
    TOPK_P: int
    TOKEN_ROWS: int
    BLOCK_M: int
    CHUNK: int
    STAGES: int
    CAUSAL: bool
    K_SCALES: int
    V_SCALES: int
    TILE: int
    LEAST_BLOCKS: int


class Entries(NamedTuple):
    """Pointers: sorted numbers, ``(head * sequences + sequence) * blocks + block``, int16 or int32; where an entry
    stood, int64, or int32 of those that ``place_entries`` has placed; and, by that, how many keys of its block the
    token sees, int32. ``total``: how many entries there are, None where all are, with those that list nothing last."""

    number: Any
    order: Any
    reach: Any
    total: Any


class Factors(NamedTuple):
    """The softmax's scale, and factors of keys and values."""

    softmax: Any
    k: Any
    v: Any


class BlockStrides(NamedTuple):
    """Of q and out by (token, head, element); of caches by (page, slot, head, element)."""

    q: Any
    k: Any
    v: Any
    out: Any


@triton.jit(do_not_specialize=["rows", "sequences", "keys", "blocks", "counts"])
def number_entries(
    p_indices, bounds, p_number, p_reach, p_inside, p_counts, rows, sequences, keys, blocks, counts, s_indices,
    config: tl.constexpr,
):  # fmt: skip
    """The numbers of all entries and how far they reach, see ``Entries``, by where they stand; and int8: which rows are
    of a sequence of possible lengths. The ``counts``, if there are any, become 0."""
    TOPK: tl.constexpr = config.TOPK
    batch = Batch(bounds, sequences, rows, keys)
    row = tl.program_id(0).to(tl.int64)
    i_n, begin, q_len, length, possible = sequence_of(batch, row, PAGED)
    high = length
    if config.CAUSAL:
        high = length - q_len + (row - begin).to(tl.int32) + 1
    high = tl.where(possible, high, 0)
    o_e = tl.arange(0, config.HEADS_P * config.TOPK_P)
    i_kv, i_e = o_e // config.TOPK_P, o_e % config.TOPK_P
    m_e = (i_kv < config.HEADS_KV) & (i_e < TOPK)
    block = tl.load(p_indices + row * s_indices[0] + i_kv.to(tl.int64) * s_indices[1] + i_e, mask=m_e, other=-1)
    there = (block >= 0) & (block < (high + (config.BLOCK - 1)) // config.BLOCK)
    number = tl.where(there, (i_kv * sequences + i_n) * blocks + block, config.NOTHING)
    reach = tl.where(there, tl.minimum(high - block * config.BLOCK, config.BLOCK), 0)
    place = row * (config.HEADS_KV * TOPK) + i_kv * TOPK + i_e
    tl.store(p_number + place, number.to(p_number.dtype.element_ty), mask=m_e)
    tl.store(p_reach + place, reach, mask=m_e)
    tl.store(p_inside + row, possible.to(tl.int8))
    if p_counts is not None:
        for first in range(tl.program_id(0) * ZEROS, counts, tl.num_programs(0) * ZEROS):
            o_c = first + tl.arange(0, ZEROS)
            tl.store(p_counts + o_c, o_c * 0, mask=o_c < counts)


@triton.jit(do_not_specialize=["rows"])
def share_entries(p_number, p_reach, p_shared, p_counts, rows, config: tl.constexpr):
    """Write down what the tokens of a tile share, and take it from their entries: a program for a tile and kv head.

    What is left is counted by its numbers, where there are ``p_counts``.

    Candidates are the middle token's blocks. One is shared if half of the tokens list it and see it whole; none is
    where these are fewer than LEAST_BLOCKS. ``p_shared``: their numbers, which tokens list each, as bits, and how many
    there are.
    """
    TOKENS: tl.constexpr = config.TILE
    TOPK: tl.constexpr = config.TOPK
    pid = tl.program_id(0).to(tl.int64)
    first, i_kv = pid // config.HEADS_KV * TOKENS, pid % config.HEADS_KV
    o_e = tl.arange(0, TOKENS * config.TOPK_P)
    o_token, i_e = o_e // config.TOPK_P, o_e % config.TOPK_P
    m_e = (first + o_token < rows) & (i_e < TOPK)
    place = ((first + o_token) * config.HEADS_KV + i_kv) * TOPK + i_e
    number = tl.load(p_number + place, mask=m_e, other=config.NOTHING).to(tl.int32)
    whole = tl.load(p_reach + place, mask=m_e, other=0) == config.BLOCK
    o_c = tl.arange(0, config.TOPK_P)
    p_middle = p_number + ((first + TOKENS // 2) * config.HEADS_KV + i_kv) * TOPK + o_c
    there = (o_c < TOPK) & (first + TOKENS // 2 < rows)
    candidate = tl.load(p_middle, mask=there, other=config.NOTHING).to(tl.int32)
    same = (candidate[:, None] == number[None, :]) & (candidate < config.NOTHING)[:, None] & whole[None, :]
    chosen = tl.sum(same.to(tl.int32), 1) >= TOKENS // 2
    count = tl.sum(chosen.to(tl.int32), 0)
    chosen = chosen & (count >= config.LEAST_BLOCKS)
    bits = tl.sum(same.to(tl.int32) << o_token[None, :], 1)
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    p_tile = p_shared + pid * (2 * config.TOPK_P + 1)
    tl.store(p_tile + 2 * config.TOPK_P, tl.where(count >= config.LEAST_BLOCKS, count, 0))
    tl.store(p_tile + rank, candidate, mask=chosen)
    tl.store(p_tile + config.TOPK_P + rank, bits, mask=chosen)
    # All have read the lists before they are changed.
    tl.debug_barrier()
    taken = m_e & (tl.max((same & chosen[:, None]).to(tl.int32), 0) != 0)
    tl.store(p_number + place, tl.full(place.shape, config.NOTHING, p_number.dtype.element_ty), mask=taken)
    tl.store(p_reach + place, tl.zeros(place.shape, tl.int32), mask=taken)
    if p_counts is not None:
        counted = m_e & (number < config.NOTHING) & (taken == 0)
        tl.atomic_add(p_counts + number, tl.full(number.shape, 1, tl.int32), mask=counted, sem="relaxed")


@triton.jit(do_not_specialize=["numbers"])
def begin_numbers(p_counts, numbers, EACH: tl.constexpr):
    """How often each number occurs becomes where those of it begin; behind the last one, how many there are in all."""
    before = numbers * 0
    for first in range(0, numbers, EACH):
        o_c = first + tl.arange(0, EACH)
        count = tl.load(p_counts + o_c, mask=o_c < numbers, other=0)
        tl.store(p_counts + o_c, before + tl.cumsum(count, 0) - count, mask=o_c < numbers)
        before += tl.sum(count, 0)
    tl.store(p_counts + numbers, before)


@triton.jit(do_not_specialize=["entries"])
def place_entries(p_number, p_counts, p_sorted, p_order, entries, EACH: tl.constexpr, config: tl.constexpr):
    """Entries to where those of their number begin, one behind the other as they come; results are the same in any
    order of these, as each is of one row."""
    o_e = tl.program_id(0) * EACH + tl.arange(0, EACH)
    number = tl.load(p_number + o_e, mask=o_e < entries, other=config.NOTHING)
    there = number < config.NOTHING
    at = tl.atomic_add(p_counts + number.to(tl.int32), tl.full([EACH], 1, tl.int32), mask=there, sem="relaxed")
    tl.store(p_sorted + at, number, mask=there)
    tl.store(p_order + at, o_e, mask=there)


@triton.jit
def scaled(p_scale, i_kv, factor, SCALES: tl.constexpr):
    if SCALES:
        factor = factor * tl.load(p_scale + (i_kv if SCALES > 1 else 0))
    return factor


@triton.jit
def block_of_keys(inputs, p_table, i_block, i_kv, reach, blocks, num_pages, s_table, strides, config: tl.constexpr):
    """Keys and values of the first ``reach`` of a block of all sequences' and of a kv head; zeros behind them, and of
    pages that do not exist."""
    i_kv = i_kv.to(tl.int64)
    p_pages = p_table + (i_block // blocks).to(tl.int64) * s_table
    cache = Cache(inputs.k + i_kv * strides.k[2], inputs.v + i_kv * strides.v[2], p_pages, 0, num_pages)
    first = i_block % blocks * config.BLOCK
    page, slot, fits = slot_of(cache, first + tl.arange(0, config.BLOCK), first + reach, config.PAGE)
    m_key = fits & (tl.arange(0, config.BLOCK) < reach)
    o_d = tl.arange(0, config.BLOCK_D) * strides.k[3]
    o_dv = tl.arange(0, config.BLOCK_DV) * strides.v[3]
    b_k = load_tile(cache.k, page * strides.k[0] + slot * strides.k[1], o_d, m_key, config.D, config.BLOCK_D)
    b_v = load_tile(cache.v, page * strides.v[0] + slot * strides.v[1], o_dv, m_key, config.DV, config.BLOCK_DV)
    return b_k, b_v


@triton.jit
def queries_of(p_q, order, i_kv, o_g, m_row, strides, config: tl.constexpr):
    """Queries [BLOCK_M, BLOCK_D] of the tokens of entries, by where these stood."""
    off_q = order // (config.HEADS_KV * config.TOPK) * strides.q[0]
    off_q += (i_kv * config.GROUP + o_g).to(tl.int64) * strides.q[1]
    return load_tile(p_q, off_q, tl.arange(0, config.BLOCK_D) * strides.q[2], m_row, config.D, config.BLOCK_D)


@triton.jit(do_not_specialize=["entries", "blocks", "all_blocks", "num_pages", "s_table"])
def attend_blocks(
    inputs, p_table, listed, p_part, p_part_lse, entries, blocks, all_blocks, num_pages, s_table, factors, strides,
    config: tl.constexpr,
):  # fmt: skip
    """Partial results of the entries of one chunk: part [entries, GROUP, DV], part_lse [entries, GROUP] in base 2.

    ``blocks``: of a sequence; ``all_blocks``: of all.
    """
    ROWS: tl.constexpr = config.TOKEN_ROWS
    TOKENS: tl.constexpr = config.BLOCK_M // ROWS
    base = tl.program_id(0).to(tl.int64) * config.CHUNK
    if listed.total is not None:
        entries = tl.load(listed.total)
    o_c = tl.arange(0, config.CHUNK)
    own = tl.load(listed.number + base + o_c, mask=base + o_c < entries, other=config.NOTHING).to(tl.int32)
    own_reach = tl.load(listed.reach + tl.load(listed.order + base + o_c, mask=own < config.NOTHING, other=0))
    o_m = tl.arange(0, config.BLOCK_M)
    o_n = tl.arange(0, config.BLOCK)
    o_first, o_g = o_m // ROWS, o_m % ROWS
    m_g = o_g < config.GROUP
    o_dv = tl.arange(0, config.BLOCK_DV)
    done = 0
    number = tl.load(listed.number + base, mask=base < entries, other=config.NOTHING).to(tl.int32)
    while number < config.NOTHING:
        count = tl.sum((own == number).to(tl.int32), 0)
        reach = tl.max(tl.where(own == number, own_reach, 0), 0)
        i_kv, i_block = number // all_blocks, number % all_blocks
        b_k, b_v = block_of_keys(inputs, p_table, i_block, i_kv, reach, blocks, num_pages, s_table, strides, config)
        # Only tokens in the block itself, and the last block of a sequence, want a mask.
        edge = tl.min(tl.where(own == number, own_reach, config.BLOCK), 0) < config.BLOCK
        scale = scaled(inputs.k_scale, i_kv, factors.softmax * factors.k, config.K_SCALES) * LOG2_E
        # Above 0 the largest product is that of the largest score, and one FMA scales and subtracts.
        b_k = tl.where(scale < 0, -b_k, b_k)
        scale = tl.maximum(tl.abs(scale), LEAST_SCALE)
        factor = scaled(inputs.v_scale, i_kv, factors.v, config.V_SCALES)
        p_order = listed.order + base + done
        next_order = tl.load(p_order + o_first, mask=o_first < count, other=0).to(tl.int64)
        next_q = queries_of(inputs.q, next_order, i_kv, o_g, (o_first < count) & m_g, strides, config)
        then_order = tl.load(p_order + o_first + TOKENS, mask=o_first + TOKENS < count, other=0).to(tl.int64)
        # Triton's pipeline would ask for queries behind the products, as it looks up whose they are: each step would
        # wait for its own.
        for i in tl.range(0, (count + (TOKENS - 1)) // TOKENS, num_stages=config.STAGES):
            i_entry = i * TOKENS + o_first
            m_row = (i_entry < count) & m_g
            order, b_q = next_order, next_q
            next_order = then_order
            next_q = queries_of(inputs.q, next_order, i_kv, o_g, (i_entry + TOKENS < count) & m_g, strides, config)
            then_order = tl.load(p_order + i_entry + 2 * TOKENS, mask=i_entry + 2 * TOKENS < count, other=0).to(
                tl.int64
            )
            sees = tl.load(listed.reach + order, mask=m_row, other=0)
            b_s = tl.dot(b_q, tl.trans(b_k))
            if edge:
                b_s = tl.where(o_n[None, :] < sees[:, None], b_s, float("-inf"))
            row_max = tl.max(b_s, 1) * scale
            b_p = tl.exp2(b_s * scale - finite(row_max)[:, None])
            row_sum = tl.sum(b_p, 1)
            safe = tl.where(row_sum == 0, 1.0, row_sum)
            b_o = tl.dot(b_p.to(b_v.dtype), b_v) * (factor / safe)[:, None]
            row = order * config.GROUP + o_g
            m_tile = m_row[:, None]
            if config.DV != config.BLOCK_DV:
                m_tile = m_tile & (o_dv < config.DV)[None, :]
            p_rows = p_part + row[:, None] * config.DV + o_dv[None, :]
            # Partial results would take the place of queries in the L2 cache.
            tl.store(p_rows, b_o.to(p_part.dtype.element_ty), mask=m_tile, cache_modifier=".cs")
            tl.store(p_part_lse + row, tl.where(row_sum == 0, float("-inf"), row_max + tl.log2(safe)), mask=m_row)
        done += count
        more = (done < config.CHUNK) & (base + done < entries)
        number = tl.load(listed.number + base + done, mask=more, other=config.NOTHING).to(tl.int32)


@triton.jit(do_not_specialize=["s_lse_head"])
def combine_blocks(
    p_part, p_part_lse, p_reach, p_inside, p_shared, p_shared_part, p_shared_lse, p_sinks, p_out, p_lse, s_lse_head,
    s_lse, strides, config: tl.constexpr,
):  # fmt: skip
    """The results of the query heads of a kv head for one token, of its blocks' partial results and of what it shares.

    ``p_inside`` int8: which tokens are of a sequence of possible lengths; only these have a sink.
    """
    ROWS: tl.constexpr = config.TOKEN_ROWS
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    pid = tl.program_id(0).to(tl.int64)
    token, i_kv = pid // config.HEADS_KV, pid % config.HEADS_KV
    o_k, o_g = tl.arange(0, config.TOPK_P), tl.arange(0, ROWS)
    m_g = o_g < config.GROUP
    sees = tl.load(p_reach + pid * config.TOPK + o_k, mask=o_k < config.TOPK, other=0) > 0
    p_own = p_part_lse + pid * (config.TOPK * config.GROUP) + o_g
    b_lse = tl.load(
        p_own[None, :] + o_k[:, None] * config.GROUP, mask=sees[:, None] & m_g[None, :], other=float("-inf")
    )
    row_max = tl.max(b_lse, 0)
    b_sink = tl.full([ROWS], float("-inf"), tl.float32)
    if p_sinks is not None:
        inside = tl.load(p_inside + token) != 0
        b_sink = tl.load(p_sinks + i_kv * config.GROUP + o_g, mask=m_g & inside, other=float("-inf")).to(tl.float32)
        b_sink = b_sink * LOG2_E
        row_max = tl.maximum(row_max, b_sink)
    o_dv = tl.arange(0, BLOCK_DV)
    m_dv = m_g[:, None] & (o_dv < config.DV)[None, :]
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    b_shared = tl.full([ROWS], float("-inf"), tl.float32)
    if config.TILE:
        i_tile = token // config.TILE * config.HEADS_KV + i_kv
        m_shared = m_g & (tl.load(p_shared + i_tile * (2 * config.TOPK_P + 1) + 2 * config.TOPK_P) > 0)
        b_shared = tl.load(p_shared_lse + pid * config.GROUP + o_g, mask=m_shared, other=float("-inf"))
        row_max = tl.maximum(row_max, b_shared)
        p_rows = p_shared_part + (pid * config.GROUP + o_g)[:, None] * config.DV + o_dv[None, :]
        b_o = tl.load(p_rows, mask=m_dv & m_shared[:, None], other=0.0).to(tl.float32)
        weight = tl.exp2(b_shared - finite(row_max))
        acc = tl.where(weight[:, None] > 0, weight[:, None] * b_o, 0.0)
    row_sum = tl.sum(tl.exp2(b_lse - finite(row_max)[None, :]), 0) + tl.exp2(b_sink - finite(row_max))
    row_sum += tl.exp2(b_shared - finite(row_max))
    for i in tl.range(0, config.TOPK, loop_unroll_factor=4):
        m_entry = m_g & (tl.load(p_reach + pid * config.TOPK + i) > 0)
        weight = tl.exp2(tl.load(p_own + i * config.GROUP, mask=m_entry, other=float("-inf")) - finite(row_max))
        row = (pid * config.TOPK + i) * config.GROUP + o_g
        p_rows = p_part + row[:, None] * config.DV + o_dv[None, :]
        b_o = tl.load(p_rows, mask=m_dv & m_entry[:, None], other=0.0).to(tl.float32)
        # A block that weighs nothing may hold what is not finite.
        acc += tl.where(weight[:, None] > 0, weight[:, None] * b_o, 0.0)
    safe = tl.where(row_sum == 0, 1.0, row_sum)
    o_h = i_kv * config.GROUP + o_g
    p_rows = (
        p_out + token * strides.out[0] + o_h[:, None] * strides.out[1] + o_dv[None, :].to(tl.int64) * strides.out[2]
    )
    tl.store(p_rows, (acc / safe[:, None]).to(p_out.dtype.element_ty), mask=m_dv)
    if p_lse is not None:
        found = tl.where(row_sum == 0, float("-inf"), (row_max + tl.log2(safe)) * LN_2)
        tl.store(p_lse + o_h * s_lse_head + token * s_lse, found, mask=m_g)
