"""Attention over a paged cache for NVIDIA's sm_90, in 16 bits: paged.py's walk with its copies and products in flight.

A warp of its own asks the tensor memory accelerator for keys and values, a page or a part of one at a time; one or two
warpgroups of 64 rows each work on the same tiles. While a tile's values are being multiplied, the scores of the next
one are made and its softmax is taken (FlashAttention-3, arXiv 2407.08608, section 3.2):

    scores = q k_i^T      in flight together with      acc += weights_(i-1) v_(i-1)
    softmax of scores     while the second product runs
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from prefix_prefill.kernels.merge import LN_2, LOG2_E, finite, logarithm
from prefix_prefill.kernels.tiles import cap, keys_of_tile, lengths, locate, share, visible

__all__ = ["TensorDescriptor", "attend", "descriptor_layout"]

# Rows of a warpgroup, and columns that shared memory is swizzled over: 128 bytes.
ROWS: tl.constexpr = tl.constexpr(64)
COLUMNS: tl.constexpr = tl.constexpr(64)
# The least rows of a box.
STRIP: tl.constexpr = tl.constexpr(16)


def descriptor_layout(block: list[int], bits: int) -> gl.NVMMASharedLayout:
    """How a descriptor lays a block of elements of so many bits out in shared memory."""
    return gl.NVMMASharedLayout(block[-1] * bits // 8, bits, rank=len(block))


@gluon.jit
def parts_of(pid, places, HEADS_KV: gl.constexpr, HEAD_TILES: gl.constexpr):
    """Place among the tiles, kv head, tile of its query heads and split of a program."""
    i_w = pid % places
    i_kv = pid // places % HEADS_KV
    i_hb = pid // (places * HEADS_KV) % HEAD_TILES
    i_split = pid // (places * HEADS_KV * HEAD_TILES)
    return i_w, i_kv, i_hb, i_split


@gluon.jit
def later(x):
    """The same number, made where it is asked for: compilers would make it early and keep it in a register."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=1)


@gluon.jit
def rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """Token and head of a tile's rows, and whether there are such."""
    o_t = i_tile * TOKENS + o_m // HEADS
    o_g = i_hb * HEADS + o_m % HEADS
    m_row = (o_m < TOKENS * HEADS) & (o_t < q_len) & (o_g < GROUP)
    return o_t, i_kv * GROUP + gl.minimum(o_g, GROUP - 1), m_row


@gluon.jit
def pointers(p, row, o_h, o_d, s):
    """To rows of heads [ROWS, BLOCK_D], by strides of (token, head, element)."""
    return p + (row.to(gl.int64) * s[0] + o_h.to(gl.int64) * s[1])[:, None] + o_d[None, :] * s[2]


@gluon.jit
def put(notes, i: gl.constexpr, number):
    """Keep a number in shared memory: what is asked for again only after the walk needs no register through it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    notes.index(i).store(gl.full([1], 0, gl.int32, layout) + number.to(gl.int32))


@gluon.jit
def get(notes, i: gl.constexpr):
    """A number that ``put`` kept."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(notes.index(i).load(layout), 0)


@gluon.jit
def fetch(
    d, boxes, arrived, first_box, i_outer, i_head, row, BLOCK_D: gl.constexpr, BOXES: gl.constexpr, WIDTH: gl.constexpr
):
    """Start bringing one box of rows, WIDTH columns at a time. What lies outside of the tensor is filled with 0."""
    for i_c in gl.static_range(BLOCK_D // WIDTH):
        place = boxes.index(first_box + i_c * BOXES)
        tma.async_copy_global_to_shared(d, [i_outer, i_head, row, i_c * WIDTH], arrived, place)


@gluon.jit
def position_of(i, tiles, BLOCK_N: gl.constexpr, APART: gl.constexpr):
    """The position of the first key of a split's tile i."""
    start, _, new_from, to_new = tiles
    at = start + i * BLOCK_N
    if APART:
        at += gl.where(i < new_from, 0, to_new)
    return at


@gluon.jit
def end_of(i, tiles, keys, APART: gl.constexpr):
    """The position before which a tile's keys are its part's, cached or new, and are seen."""
    _, cached_high, high = keys
    if APART:
        cached_high = gl.where(i < tiles[2], cached_high, high)
    return cached_high


@gluon.jit
def cached_of(tiles, APART: gl.constexpr):
    """How many of a split's tiles hold cached keys; they come first."""
    cached = tiles[1]
    if APART:
        cached = gl.minimum(gl.maximum(tiles[2], 0), tiles[1])
    return cached


@gluon.jit
def bring(
    d_cache, d_new, p_row, stored, stored_arrived, stored_free, boxes, arrived, free, i_kv, keys, tiles, new_row, rows,
    num_blocks, BLOCK_D: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, APART: gl.constexpr, HAS_LEFT: gl.constexpr,
):  # fmt: skip
    """Bring the tiles of keys, or of values, each as soon as its place in shared memory is free.

    Cached ones go to ``stored``, WIDTH columns together, new ones to ``boxes``. ``new_row`` is the row at which the key
    of position 0 would be, were all of a sequence's keys new.
    """
    BOXES: gl.constexpr = BLOCK_N // BOX
    ELEMENT_BYTES: gl.constexpr = d_cache.dtype.primitive_bitwidth // 8
    # Pages are looked up a few at a time: all at once would take too many registers.
    MOST: gl.constexpr = 2 if APART and HAS_LEFT else 4
    AT_ONCE: gl.constexpr = BOXES if BOXES < MOST else MOST
    cached = cached_of(tiles, APART)
    for i in range(cached):
        stage = i % STAGES
        # A place is free at first: waiting for the phase before the first one returns at once.
        mbarrier.wait(stored_free.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(stored_arrived.index(stage), BLOCK_N * BLOCK_D * ELEMENT_BYTES)
        at = tiles[0] + i * BLOCK_N
        first_box = stage * BOXES * (BLOCK_D // WIDTH)
        for i_g in range(BOXES // AT_ONCE):
            for i_b in gl.static_range(AT_ONCE):
                box = i_g * AT_ONCE + i_b
                key = at + box * BOX
                block = page_of(p_row, key, keys[0], keys[1], num_blocks, PAGE, BOX, HAS_LEFT)
                fetch(d_cache, stored, stored_arrived.index(stage), first_box + box, block, i_kv, key % PAGE, BLOCK_D,
                      BOXES, WIDTH)  # fmt: skip
    if APART:
        for i in range(cached, tiles[1]):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(arrived.index(stage), BLOCK_N * BLOCK_D * 2)
            at = position_of(i, tiles, BLOCK_N, APART)
            for box in range(BOXES):
                key = at + box * BOX
                row = gl.where((key < keys[2]) & (key + BOX > keys[0]), new_row + key, rows)
                fetch(d_new, boxes, arrived.index(stage), stage * BOXES * (BLOCK_D // COLUMNS) + box, 0, i_kv, row,
                      BLOCK_D, BOXES, COLUMNS)  # fmt: skip


@gluon.jit
def convert(stored, stored_arrived, stored_free, boxes, arrived, free, i, BLOCK_D: gl.constexpr, WIDTH: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    """Turn one tile of 8-bit floats into 16-bit ones, which hold them exactly."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // WIDTH, WIDTH // 16], [4, 1], [1, 0])
    stage = i % STAGES
    phase = i // STAGES & 1
    mbarrier.wait(stored_arrived.index(stage), phase)
    mbarrier.wait(free.index(stage), phase ^ 1)
    for i_c in gl.static_range(BLOCK_D // WIDTH):
        b_tile = stored.index(stage * (BLOCK_D // WIDTH) + i_c).load(layout)
        # By way of float32: from float16 to bfloat16 itself there is only an instruction at the rate of exp2.
        b_tile = b_tile.to(gl.float16).to(gl.float32).to(boxes.dtype)
        boxes.index(stage).slice(i_c * WIDTH, WIDTH, dim=1).store(b_tile)
    fence_async_shared()
    mbarrier.arrive(arrived.index(stage))
    mbarrier.arrive(stored_free.index(stage))


@gluon.jit
def convert_all(
    k_stored, v_stored, stored_barriers, k_tiles, v_tiles, barriers, tiles, BLOCK_D: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Turn the tiles of 8-bit keys and values into 16-bit ones, each as soon as there is a place for it."""
    k_stored_arrived, v_stored_arrived, k_stored_free, v_stored_free = stored_barriers
    k_arrived, v_arrived, k_free, v_free = barriers
    for i in range(cached_of(tiles, APART)):
        convert(k_stored, k_stored_arrived, k_stored_free, k_tiles, k_arrived, k_free, i, BLOCK_D, WIDTH, STAGES)
        convert(v_stored, v_stored_arrived, v_stored_free, v_tiles, v_arrived, v_free, i, BLOCK_D, WIDTH, STAGES)


@gluon.jit
def page_of(p_row, key, low, high, num_blocks, PAGE: gl.constexpr, BOX: gl.constexpr, HAS_LEFT: gl.constexpr):
    """The page that holds a box of keys; for one that no row sees, or that does not exist, one past the last."""
    seen = key < high
    if HAS_LEFT:
        seen = seen & (key + BOX > low)
    block = gl.load(p_row + key // PAGE, mask=seen, other=-1).to(gl.int64)
    return gl.where((block >= 0) & (block < num_blocks), block, num_blocks).to(gl.int32)


@gluon.jit
def zero_strips(strips, first_strip, from_row, to_row, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr):
    """Zero a tile's rows before ``from_row`` and from ``to_row`` on: weights of 0 would not silence NaN there.

    Boxes that lie wholly outside came as zeros.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    begin = from_row // BOX * (BOX // STRIP)
    end = (to_row + BOX - 1) // BOX * (BOX // STRIP)
    for strip in range(begin, end):
        row = strip * STRIP + o_row
        if (strip * STRIP < from_row) | (strip * STRIP + STRIP > to_row):
            for i_c in gl.static_range(BLOCK_D // COLUMNS):
                place = strips.index(first_strip + i_c * (BLOCK_N // STRIP) + strip)
                b_strip = place.load(layout)
                keep = (row >= from_row) & (row < to_row)
                place.store(gl.where(keep[:, None], b_strip, 0.0).to(b_strip.dtype))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def weigh(
    scores, m, total, at, key_low, key_high, position, slope, factor, softcap, left, right, L_S: gl.constexpr,
    BLOCK_N: gl.constexpr, SCALED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Weights relative to the largest score so far, that score, the sum so far, and what the past decays by."""
    o_key = at + gl.arange(0, BLOCK_N, gl.SliceLayout(0, L_S))
    if SOFTCAP:
        scores = cap(scores * factor, softcap, False) * LOG2_E
    elif SCALED or ALIBI:
        scores = scores * factor
    if ALIBI:
        scores += slope[:, None] * (o_key[None, :] - position[:, None]).to(gl.float32)
    if MASKED:
        seen = visible(o_key[None, :], position[:, None], left, right, HAS_LEFT, HAS_RIGHT)
        seen = seen & ((o_key >= key_low) & (o_key < key_high))[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    most = gl.max(scores, 1)
    if SCALED or SOFTCAP or ALIBI:
        new_m = gl.maximum(m, most)
        weights = gl.exp2(scores - finite(new_m)[:, None])
    else:
        # A factor of 0 or more keeps the order; multiplied here, it costs no instruction.
        new_m = gl.maximum(m, most * factor)
        weights = gl.exp2(scores * factor - finite(new_m)[:, None])
    decay = gl.exp2(m - finite(new_m))
    return weights.to(dtype), new_m, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def weigh_tile(
    scores, m, total, at, key_low, key_high, all_low, all_high, position, slope, factor, softcap, left, right,
    L_S: gl.constexpr, BLOCK_N: gl.constexpr, SCALED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """``weigh``, with masks only where some row does not see the whole tile.

    Both ways are branches of their own: in straight code ptxas moves the softmax past the wait for the product that it
    is to run beside.
    """
    if (at >= all_low) & (at + BLOCK_N <= gl.minimum(all_high, key_high)):
        weights, new_m, new_total, decay = weigh(
            scores, m, total, at, key_low, key_high, position, slope, factor, softcap, left, right, L_S, BLOCK_N,
            SCALED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, False, dtype,
        )  # fmt: skip
    else:
        weights, new_m, new_total, decay = weigh(
            scores, m, total, at, key_low, key_high, position, slope, factor, softcap, left, right, L_S, BLOCK_N,
            SCALED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, True, dtype,
        )  # fmt: skip
    return weights, new_m, new_total, decay


@gluon.jit
def multiply(b_p, v_tiles, v_strips, v_arrived, acc, own_v, i, tiles, keys, BLOCK_D: gl.constexpr,
             BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr,
             APART: gl.constexpr):  # fmt: skip
    """Start adding the weighted values of a split's tile i; before the first new ones, scale what the cache gave."""
    if SCALED and APART:
        if i == tiles[2]:
            acc = acc * own_v
    stage = i % STAGES
    mbarrier.wait(v_arrived.index(stage), i // STAGES & 1)
    at = position_of(i, tiles, BLOCK_N, APART)
    from_row = keys[0] - at
    to_row = end_of(i, tiles, keys, APART) - at
    if (from_row > 0) | (to_row < BLOCK_N):
        zero_strips(v_strips, stage * (BLOCK_D // COLUMNS) * (BLOCK_N // STRIP), gl.maximum(from_row, 0),
                    gl.minimum(to_row, BLOCK_N), BLOCK_D, BLOCK_N, BOX)  # fmt: skip
    return warpgroup_mma(b_p, v_tiles.index(stage), acc, is_async=True)


@gluon.jit
def consume(
    p_q, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part, p_part_lse, k_tiles, v_tiles,
    v_strips, q_smem, barriers, notes, i_half, place, keys, tiles, numbers, s_k_scale, s_v_scale, s_q, s_out, s_lse,
    GROUP: gl.constexpr, HEADS_KV: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, BOX: gl.constexpr,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    APART: gl.constexpr, SCALED: gl.constexpr, LIMIT: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile: their outputs, or their part of them."""
    k_arrived, v_arrived, k_free, v_free = barriers
    rows, places, scale, softcap, left, right, k_factor, v_factor, out_factor = numbers
    i_tile, begin, q_len, context, length = place
    HEAD_TILES: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    _, i_kv, i_hb, _ = parts_of(later(gl.program_id(0)), places, HEADS_KV, HEAD_TILES)
    low, cached_high, high = keys
    dtype: gl.constexpr = q_smem.dtype
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ALIBI: gl.constexpr = p_alibi is not None

    q_tile = q_smem.index(i_half)
    o_m = i_half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_IO))
    o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
    p_tile = pointers(p_q, begin + o_t, o_h, o_d, s_q)
    q_tile.store(gl.load(p_tile, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0))
    fence_async_shared()
    tl.debug_barrier()

    o_m = i_half * ROWS + gl.arange(0, ROWS, L_ROW)
    o_t, o_h, _ = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
    position = context + o_t
    slope = gl.zeros([ROWS], gl.float32, L_ROW)
    if ALIBI:
        slope = gl.load(p_alibi + o_h).to(gl.float32) * LOG2_E
    factor = scale
    if not SOFTCAP:
        factor = scale * LOG2_E
    cached_factor = factor
    own_v = v_factor
    if SCALED:
        cached_factor = factor * k_factor
        if p_k_scale is not None:
            cached_factor = cached_factor * gl.load(p_k_scale + i_kv * s_k_scale)
        if p_v_scale is not None:
            own_v = own_v * gl.load(p_v_scale + i_kv * s_v_scale)
    # The keys that all of these rows see.
    all_low = low
    all_high = high
    if HAS_LEFT:
        all_low = gl.maximum(context + i_tile * TOKENS + (i_half * ROWS + ROWS - 1) // HEADS, left) - left
    if HAS_RIGHT:
        all_high = gl.minimum(high, context + i_tile * TOKENS + i_half * ROWS // HEADS + 1 + gl.minimum(right, length))

    m = gl.full([ROWS], float("-inf"), gl.float32, L_ROW)
    total = gl.zeros([ROWS], gl.float32, L_ROW)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, L_O)
    b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, L_S)
    count = tiles[1]
    cached = cached_of(tiles, APART)
    if count > 0:
        mbarrier.wait(k_arrived.index(0), 0)
        scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(0))
        weights, m, total, decay = weigh_tile(
            b_scores, m, total, position_of(0, tiles, BLOCK_N, APART), low, end_of(0, tiles, keys, APART),
            all_low, all_high, position, slope, gl.where(0 < cached, cached_factor, factor), softcap, left, right, L_S,
            BLOCK_N, SCALED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, dtype,
        )  # fmt: skip
        b_p = gl.convert_layout(weights, L_P)
        for i in range(1, count):
            stage = i % STAGES
            mbarrier.wait(k_arrived.index(stage), i // STAGES & 1)
            scores = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            product = multiply(
                b_p, v_tiles, v_strips, v_arrived, acc, own_v, i - 1, tiles, keys, BLOCK_D, BLOCK_N, BOX, STAGES,
                SCALED, APART,
            )  # fmt: skip
            b_scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_free.index(stage))
            weights, m, total, decay = weigh_tile(
                b_scores, m, total, position_of(i, tiles, BLOCK_N, APART), low, end_of(i, tiles, keys, APART),
                all_low, all_high, position, slope, gl.where(i < cached, cached_factor, factor), softcap, left, right,
                L_S, BLOCK_N, SCALED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, dtype,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(v_free.index((i - 1) % STAGES))
            b_p = gl.convert_layout(weights, L_P)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, L_O))[:, None]
        product = multiply(
            b_p, v_tiles, v_strips, v_arrived, acc, own_v, count - 1, tiles, keys, BLOCK_D, BLOCK_N, BOX, STAGES,
            SCALED, APART,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[product])
        if SCALED:
            # Otherwise new ones came after them.
            if cached == count:
                acc = acc * own_v

    _, i_kv, i_hb, i_split = parts_of(later(gl.program_id(0)), places, HEADS_KV, HEAD_TILES)
    i_tile = get(notes, 0)
    begin = get(notes, 1)
    q_len = get(notes, 2)
    possible = get(notes, 3) != 0
    o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
    if SPLITS == 1:
        if p_sinks is not None:
            b_sink = gl.load(p_sinks + o_h).to(gl.float32) * LOG2_E
            b_sink = gl.where(possible, b_sink, float("-inf"))
            new_m = gl.maximum(m, b_sink)
            decay = gl.exp2(m - finite(new_m))
            total = total * decay + gl.exp2(b_sink - finite(new_m))
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, L_O))[:, None]
            m = new_m
        out_scale = out_factor
        if p_out_scale is not None:
            out_scale = out_factor * gl.load(p_out_scale)
        if p_lse is not None:
            row = (begin + o_t).to(gl.int64)
            gl.store(p_lse + o_h.to(gl.int64) * s_lse[0] + row * s_lse[1], logarithm(m, total) * LN_2, mask=m_row)
        sum_inverse = 1.0 / (gl.where(total == 0, 1.0, total) * out_scale)
        acc = acc * gl.convert_layout(sum_inverse, gl.SliceLayout(1, L_O))[:, None]
        if LIMIT:
            acc = gl.where(acc > LIMIT, LIMIT, gl.where(acc < -LIMIT, -LIMIT, acc))
    else:
        row = begin + o_t
        place_of_lse = (i_split.to(gl.int64) * (GROUP * HEADS_KV) + o_h) * rows + row
        gl.store(p_part_lse + place_of_lse, logarithm(m, total), mask=m_row)
        acc = acc * gl.convert_layout(1.0 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, L_O))[:, None]

    if SPLITS == 1 and p_out.dtype.element_ty == dtype:
        # By way of q's place, so that each row is stored in whole lines.
        tl.debug_barrier()
        q_tile.store(acc.to(dtype))
        tl.debug_barrier()
        o_m = i_half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
        o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
        p_tile = pointers(p_out, begin + o_t, o_h, o_d, s_out)
        gl.store(p_tile, q_tile.load(L_IO), mask=m_row[:, None] & (o_d < D)[None, :])
    else:
        o_m = i_half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_O))
        o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_O))
        o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
        if SPLITS == 1:
            p_tile = pointers(p_out, begin + o_t, o_h, o_d, s_out)
            gl.store(p_tile, acc.to(p_out.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])
        else:
            row = i_split.to(gl.int64) * rows + begin + o_t
            p_tile = p_part + (row * (GROUP * HEADS_KV) + o_h)[:, None] * D + o_d[None, :]
            gl.store(p_tile, acc, mask=m_row[:, None] & (o_d < D)[None, :])


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_blocks", "capacity", "s_table", "places", "left", "right"])
def attend(
    d_k_cache, d_v_cache, d_k, d_v,
    p_q, p_table, p_cu, p_seqlens, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part,
    p_part_lse,
    rows, num_sequences, num_blocks, capacity, s_table, places, scale, softcap, left, right, k_factor, v_factor,
    out_factor, s_k_scale, s_v_scale, s_q, s_out, s_lse,
    GROUP: gl.constexpr, HEADS_KV: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, PAGE: gl.constexpr,
    BOX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, LIMIT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SKIP_DECODE: gl.constexpr, STAGES: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    """``paged.attend`` with the caches as descriptors of [blocks, kv heads, places, D], and, where APART, new keys and
    values as ones of [1, kv heads, rows, D]; in boxes of BOX rows and 64 columns, or 128 of 8-bit floats if there are
    as many. Such caches are SCALED, by numbers, by tensors with one scale for all, or with one for each kv head.
    """
    SCALED: gl.constexpr = d_k_cache.dtype.primitive_bitwidth == 8
    HEADS: gl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    TOKENS: gl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    HALVES: gl.constexpr = BLOCK_M // ROWS
    pid = gl.program_id(0)
    i_w, i_kv, i_hb, i_split = parts_of(pid, places, HEADS_KV, HEAD_TILES)
    i_n, i_tile, begin, q_len = locate(p_cu, i_w, num_sequences, rows, TOKENS)
    context, length, possible = lengths(p_seqlens, i_n, num_sequences, q_len, capacity, APART)
    skipped = False
    if SKIP_DECODE:
        skipped = possible & (q_len == 1)
    if (q_len > 0) & (not skipped):
        low, high = keys_of_tile(context, length, i_tile, q_len, left, right, TOKENS, HAS_LEFT, HAS_RIGHT)
        high = gl.where(possible, high, low)
        cached_high = high
        if APART:
            cached_high = gl.minimum(high, context)
        cached_first = low // BLOCK_N
        cached_tiles = gl.maximum((cached_high + BLOCK_N - 1) // BLOCK_N - cached_first, 0)
        new_start = cached_tiles * 0
        new_tiles = new_start
        if APART:
            new_first = gl.maximum(low - context, 0) // BLOCK_N
            new_tiles = gl.maximum((high - context + BLOCK_N - 1) // BLOCK_N - new_first, 0)
            new_start = context + (new_first - cached_tiles) * BLOCK_N
        from_tile, to_tile = share(cached_tiles + new_tiles, i_split, SPLITS)
        p_row = p_table + gl.minimum(gl.maximum(i_n, 0), num_sequences - 1).to(gl.int64) * s_table

        dtype: gl.constexpr = p_q.dtype.element_ty
        box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
        tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        count: gl.constexpr = STAGES * (BLOCK_D // COLUMNS) * (BLOCK_N // BOX)
        k_boxes = gl.allocate_shared_memory(dtype, [count, 1, 1, BOX, COLUMNS], box_layout)
        v_boxes = gl.allocate_shared_memory(dtype, [count, 1, 1, BOX, COLUMNS], box_layout)
        # The same bytes as the products take them: 64 columns of all rows, then the next 64.
        k_tiles = k_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], tile_layout)
        v_tiles = v_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], tile_layout)
        v_strips = v_boxes._reinterpret(
            dtype, [STAGES * (BLOCK_D // COLUMNS) * (BLOCK_N // STRIP), STRIP, COLUMNS], tile_layout
        )
        q_smem = gl.allocate_shared_memory(dtype, [HALVES, ROWS, BLOCK_D], tile_layout)
        k_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_arrived.index(i), count=1)
            mbarrier.init(v_arrived.index(i), count=1)
            mbarrier.init(k_free.index(i), count=HALVES)
            mbarrier.init(v_free.index(i), count=HALVES)
        k_stored = k_boxes
        v_stored = v_boxes
        k_stored_arrived = k_arrived
        v_stored_arrived = v_arrived
        k_stored_free = k_free
        v_stored_free = v_free
        WIDTH: gl.constexpr = d_k_cache.block_type.shape[3]
        if SCALED:
            # 8-bit tiles arrive in places of their own, from which a warpgroup makes 16-bit ones.
            stored: gl.constexpr = STAGES * (BLOCK_D // WIDTH) * (BLOCK_N // BOX)
            k_stored = gl.allocate_shared_memory(d_k_cache.dtype, [stored, 1, 1, BOX, WIDTH], d_k_cache.layout)
            v_stored = gl.allocate_shared_memory(d_k_cache.dtype, [stored, 1, 1, BOX, WIDTH], d_k_cache.layout)
            k_stored_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            v_stored_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            k_stored_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            v_stored_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            for i in gl.static_range(STAGES):
                mbarrier.init(k_stored_arrived.index(i), count=1)
                mbarrier.init(v_stored_arrived.index(i), count=1)
                mbarrier.init(k_stored_free.index(i), count=1)
                mbarrier.init(v_stored_free.index(i), count=1)
        notes = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        put(notes, 0, i_tile)
        put(notes, 1, begin)
        put(notes, 2, q_len)
        put(notes, 3, possible)
        fence_async_shared()
        barriers = (k_arrived, v_arrived, k_free, v_free)
        # Rows are fewer than 2^31, as tokens always are.
        place = (i_tile, begin.to(gl.int32), q_len, context, length)
        keys = (low, cached_high, high)
        # The split's tiles: where the first begins, how many there are, the first of new keys, and the step to these.
        start = (cached_first + from_tile) * BLOCK_N
        tiles = (start, to_tile - from_tile, cached_tiles - from_tile, new_start - cached_first * BLOCK_N)
        new_row = begin.to(gl.int32) - context
        i_half = i_w * 0
        numbers = (rows, places, scale, softcap, left, right, k_factor, v_factor, out_factor)
        # Registers a thread: a multiprocessor has 65536, and a warp that only starts copies needs few.
        if SCALED:
            stored_layout: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 8, rank=2)
            shape: gl.constexpr = [STAGES * (BLOCK_D // WIDTH), BLOCK_N, WIDTH]
            k_stored_tiles = k_stored._reinterpret(d_k_cache.dtype, shape, stored_layout)
            v_stored_tiles = v_stored._reinterpret(d_k_cache.dtype, shape, stored_layout)
            stored_barriers = (k_stored_arrived, v_stored_arrived, k_stored_free, v_stored_free)
            if HALVES == 1:
                gl.warp_specialize([
                    (consume, (
                        p_q, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part, p_part_lse,
                        k_tiles, v_tiles, v_strips, q_smem, barriers, notes, i_half, place, keys, tiles, numbers,
                        s_k_scale, s_v_scale, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                        BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                    )),
                    (convert_all, (
                        k_stored_tiles, v_stored_tiles, stored_barriers, k_tiles, v_tiles, barriers, tiles, BLOCK_D,
                        WIDTH, STAGES, APART,
                    )),
                    (bring, (
                        d_k_cache, d_k, p_row, k_stored, k_stored_arrived, k_stored_free, k_boxes,
                        k_arrived, k_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                        BLOCK_N, STAGES, APART, HAS_LEFT,
                    )),
                    (bring, (
                        d_v_cache, d_v, p_row, v_stored, v_stored_arrived, v_stored_free, v_boxes,
                        v_arrived, v_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                        BLOCK_N, STAGES, APART, HAS_LEFT,
                    )),
                ], [4, 1, 1], [104, 24, 24])  # fmt: skip
            else:
                gl.warp_specialize([
                    (consume, (
                        p_q, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part, p_part_lse,
                        k_tiles, v_tiles, v_strips, q_smem, barriers, notes, i_half, place, keys, tiles, numbers,
                        s_k_scale, s_v_scale, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                        BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                    )),
                    (consume, (
                        p_q, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part, p_part_lse,
                        k_tiles, v_tiles, v_strips, q_smem, barriers, notes, i_half + 1, place, keys, tiles,
                        numbers, s_k_scale, s_v_scale, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS,
                        TOKENS, BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                    )),
                    (convert_all, (
                        k_stored_tiles, v_stored_tiles, stored_barriers, k_tiles, v_tiles, barriers, tiles, BLOCK_D,
                        WIDTH, STAGES, APART,
                    )),
                    (bring, (
                        d_k_cache, d_k, p_row, k_stored, k_stored_arrived, k_stored_free, k_boxes,
                        k_arrived, k_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                        BLOCK_N, STAGES, APART, HAS_LEFT,
                    )),
                    (bring, (
                        d_v_cache, d_v, p_row, v_stored, v_stored_arrived, v_stored_free, v_boxes,
                        v_arrived, v_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                        BLOCK_N, STAGES, APART, HAS_LEFT,
                    )),
                ], [4, 4, 1, 1], [184, 104, 24, 24])  # fmt: skip
        elif HALVES == 1:
            gl.warp_specialize([
                (consume, (
                    p_q, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part, p_part_lse,
                    k_tiles, v_tiles, v_strips, q_smem, barriers, notes, i_half, place, keys, tiles, numbers,
                    s_k_scale, s_v_scale, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                    BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                )),
                (bring, (
                    d_k_cache, d_k, p_row, k_stored, k_stored_arrived, k_stored_free, k_boxes,
                    k_arrived, k_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                    BLOCK_N, STAGES, APART, HAS_LEFT,
                )),
                (bring, (
                    d_v_cache, d_v, p_row, v_stored, v_stored_arrived, v_stored_free, v_boxes,
                    v_arrived, v_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                    BLOCK_N, STAGES, APART, HAS_LEFT,
                )),
            ], [1, 1], [24, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (consume, (
                    p_q, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part, p_part_lse,
                    k_tiles, v_tiles, v_strips, q_smem, barriers, notes, i_half, place, keys, tiles, numbers,
                    s_k_scale, s_v_scale, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                    BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                )),
                (consume, (
                    p_q, p_alibi, p_sinks, p_k_scale, p_v_scale, p_out_scale, p_out, p_lse, p_part, p_part_lse,
                    k_tiles, v_tiles, v_strips, q_smem, barriers, notes, i_half + 1, place, keys, tiles,
                    numbers, s_k_scale, s_v_scale, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS,
                    TOKENS, BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                )),
                (bring, (
                    d_k_cache, d_k, p_row, k_stored, k_stored_arrived, k_stored_free, k_boxes,
                    k_arrived, k_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                    BLOCK_N, STAGES, APART, HAS_LEFT,
                )),
                (bring, (
                    d_v_cache, d_v, p_row, v_stored, v_stored_arrived, v_stored_free, v_boxes,
                    v_arrived, v_free, i_kv, keys, tiles, new_row, rows, num_blocks, BLOCK_D, WIDTH, PAGE, BOX,
                    BLOCK_N, STAGES, APART, HAS_LEFT,
                )),
            ], [4, 1, 1], [240, 24, 24])  # fmt: skip
