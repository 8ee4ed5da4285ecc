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
from prefix_prefill.kernels.tiles import cap, keys_of_tile, lengths, locate, part_of, share

__all__ = ["TensorDescriptor", "attend", "descriptor_layout"]

# Rows of a warpgroup, and columns that shared memory is swizzled over: 128 bytes.
ROWS: tl.constexpr = tl.constexpr(64)
COLUMNS: tl.constexpr = tl.constexpr(64)
# The least rows of a box.
STRIP: tl.constexpr = tl.constexpr(16)
# Where bfloat16 is taken as float16, a row's largest number is brought to 2^14 and more, and so is a weight of 1: what
# is 2^-28 times as large is then still a normal number.
HEADROOM: tl.constexpr = tl.constexpr(14)
HEADROOM_INVERSE: tl.constexpr = tl.constexpr(2.0**-14)
# The least normal number of float32, or a little more.
TINY: tl.constexpr = tl.constexpr(1.2e-38)
# A program has at most so many tiles with keys that do not exist or that no row sees.
EDGES: tl.constexpr = tl.constexpr(3)
# Where ``put`` keeps what.
TILE: tl.constexpr = tl.constexpr(0)
BEGIN: tl.constexpr = tl.constexpr(1)
Q_LEN: tl.constexpr = tl.constexpr(2)
POSSIBLE: tl.constexpr = tl.constexpr(3)
HEAD_KV: tl.constexpr = tl.constexpr(4)
HEAD_TILE: tl.constexpr = tl.constexpr(5)
SPLIT: tl.constexpr = tl.constexpr(6)
ALL_ROWS: tl.constexpr = tl.constexpr(7)
NOTES: tl.constexpr = tl.constexpr(8)
OUT_SCALE: tl.constexpr = tl.constexpr(0)
K_FACTOR: tl.constexpr = tl.constexpr(1)
V_FACTOR: tl.constexpr = tl.constexpr(2)
FACTORS: tl.constexpr = tl.constexpr(3)


def descriptor_layout(block: list[int], bits: int) -> gl.NVMMASharedLayout:
    """How a descriptor lays a block of elements of so many bits out in shared memory."""
    return gl.NVMMASharedLayout(block[-1] * bits // 8, bits, rank=len(block))


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
    return p + (row.to(gl.int64) * s[0] + o_h.to(gl.int64) * s[1])[:, None] + o_d.to(gl.int64)[None, :] * s[2]


@gluon.jit
def powers_of_two(most):
    """2^(e - HEADROOM) and its inverse, for each number and its exponent e, as far as both are normal numbers."""
    bits = gl.maximum(most.to(gl.int32, bitcast=True) & 0x7F800000, (1 + HEADROOM) << 23)
    bits = gl.minimum(bits, 253 << 23) - (HEADROOM << 23)
    return bits.to(gl.float32, bitcast=True), ((254 << 23) - bits).to(gl.float32, bitcast=True)


@gluon.jit
def scaled_by(number, p_scale, place):
    """A number times the scale that is there, if there are scales."""
    if p_scale is not None:
        number = number * gl.load(p_scale + place)
    return number


@gluon.jit
def natural_logarithm(m, total, unit):
    """log(2^m total), and -inf for a row that saw nothing, where m is a score in units of ``unit`` log2(e) as rounded.

    What undoes that factor is taken in two parts, so that a large score is rounded once. Where the factor is 0, or too
    small to be divided by, m is all bias, in units of log2(e).
    """
    unit = gl.where(unit < TINY, 1.0, unit)
    rounded = unit * LOG2_E
    ratio = unit / rounded
    rest = gl.fma(-ratio, rounded, unit) / rounded
    log_total = gl.log(gl.where(total == 0, 1.0, total))
    return gl.where(total == 0, float("-inf"), gl.fma(finite(m), ratio, gl.fma(finite(m), rest, log_total)))


@gluon.jit
def put(notes, i: gl.constexpr, number):
    """Keep a number in shared memory: what is asked for again only after the walk needs no register through it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    notes.index(i).store((gl.full([1], 0, notes.dtype, layout) + number).to(notes.dtype))


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
def factor_of(i, cached, cached_factor, factor, APART: gl.constexpr):
    """What makes scores of a tile's products: there is one factor for the cached keys and one for the new ones."""
    if APART:
        cached_factor = gl.where(i < cached, cached_factor, factor)
    return cached_factor


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
        if ELEMENT_BYTES == 1:
            # The place of a new tile is asked for once those that convert have asked for it last: a barrier tells only
            # odd phases from even ones, and from two ahead the past looks like the future.
            last = gl.maximum(cached - 1, 0)
            mbarrier.wait(stored_free.index(last % STAGES), last // STAGES & 1, pred=cached > 0)
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
def convert(
    stored, stored_arrived, stored_free, converted, arrived, free, tiles, BLOCK_D: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, APART: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Turn the tiles of 8-bit keys, or values, into 16-bit ones, which hold them exactly, as soon as there is place."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [num_warps, 1], [1, 0])
    dtype: gl.constexpr = converted.dtype
    for i in range(cached_of(tiles, APART)):
        stage = i % STAGES
        phase = i // STAGES & 1
        mbarrier.wait(stored_arrived.index(stage), phase)
        mbarrier.wait(free.index(stage), phase ^ 1)
        for i_c in gl.static_range(BLOCK_D // WIDTH):
            # A few rows at a time: this warp has hardly any registers.
            for i_r in gl.static_range(BLOCK_N // STRIP):
                b_strip = stored.index(stage * (BLOCK_D // WIDTH) + i_c).slice(i_r * STRIP, STRIP, dim=0).load(layout)
                b_strip = b_strip.to(gl.float16)
                if dtype != gl.float16:
                    # By way of float32: from float16 to bfloat16 itself there is only an instruction at exp2's rate.
                    b_strip = b_strip.to(gl.float32).to(dtype)
                place = converted.index(stage).slice(i_r * STRIP, STRIP, dim=0).slice(i_c * WIDTH, WIDTH, dim=1)
                place.store(b_strip)
        fence_async_shared()
        mbarrier.arrive(arrived.index(stage))
        mbarrier.arrive(stored_free.index(stage))


@gluon.jit
def page_of(p_row, key, low, high, num_blocks, PAGE: gl.constexpr, BOX: gl.constexpr, HAS_LEFT: gl.constexpr):
    """The page that holds a box of keys; for one that no row sees, or that does not exist, one past the last."""
    seen = key < high
    if HAS_LEFT:
        seen = seen & (key + BOX > low)
    block = gl.load(p_row + key // PAGE, mask=seen, other=-1).to(gl.int64)
    return gl.where((block >= 0) & (block < num_blocks), block, num_blocks).to(gl.int32)


@gluon.jit
def zero_strips(
    strips, first_strip, from_row, to_row, zeroed, i_half, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    BOX: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Zero a tile's rows before ``from_row`` and from ``to_row`` on: weights of 0 would not silence NaN there.

    Boxes that lie wholly outside came as zeros. Two warpgroups share the strips, and wait for each other's.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    begin = from_row // BOX * (BOX // STRIP)
    end = (to_row + BOX - 1) // BOX * (BOX // STRIP)
    for strip in range(begin + i_half, end, HALVES):
        row = strip * STRIP + o_row
        if (strip * STRIP < from_row) | (strip * STRIP + STRIP > to_row):
            for i_c in gl.static_range(BLOCK_D // COLUMNS):
                place = strips.index(first_strip + i_c * (BLOCK_N // STRIP) + strip)
                b_strip = place.load(layout)
                keep = (row >= from_row) & (row < to_row)
                place.store(gl.where(keep[:, None], b_strip, 0.0).to(b_strip.dtype))
    fence_async_shared()
    if HALVES == 1:
        tl.debug_barrier()
    else:
        mbarrier.arrive(zeroed)
        mbarrier.wait(zeroed, 0)


@gluon.jit
def weigh(
    scores, m, total, at, key_low, key_high, positions, slope, factor, softcap, left, right, L_S: gl.constexpr,
    BLOCK_N: gl.constexpr, SIGNED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASKED: gl.constexpr, RESCALED: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Weights relative to the largest score so far, that score, the sum so far, and what the past decays by.

    SIGNED: ``factor`` may be negative. RESCALED: it is one for each row, and weights and their sum are 2^HEADROOM times
    as large.
    """
    shift: gl.constexpr = HEADROOM if RESCALED else 0
    b_factor = factor
    if RESCALED:
        b_factor = factor[:, None]
    o_key = at + gl.arange(0, BLOCK_N, gl.SliceLayout(0, L_S))
    if ALIBI or MASKED:
        position = positions.load(gl.SliceLayout(1, L_S))
    if SOFTCAP:
        scores = cap(scores * b_factor, softcap, False) * LOG2_E
    elif SIGNED or ALIBI:
        scores = scores * b_factor
    if ALIBI:
        scores += slope[:, None] * (o_key[None, :] - position[:, None]).to(gl.float32)
    if MASKED:
        # The last key that a row sees, and the first; written so that no sum runs over.
        last = position * 0 + (key_high - 1)
        if HAS_RIGHT:
            last = position + gl.minimum(right, last - position)
        seen = o_key[None, :] <= last[:, None]
        if HAS_LEFT:
            first = position - gl.minimum(left, position - key_low)
            seen = seen & (o_key[None, :] >= first[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    most = gl.max(scores, 1)
    if SIGNED or SOFTCAP or ALIBI:
        new_m = gl.maximum(m, most)
        weights = gl.exp2(scores - (finite(new_m) - shift)[:, None])
    else:
        # A factor of 0 or more keeps the order; multiplied here, it costs no instruction.
        new_m = gl.maximum(m, most * factor)
        weights = gl.exp2(scores * b_factor - (finite(new_m) - shift)[:, None])
    decay = gl.exp2(m - finite(new_m))
    return weights.to(dtype), new_m, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def weigh_tile(
    scores, m, total, at, key_low, key_high, all_low, all_high, positions, slope, factor, softcap, left, right,
    L_S: gl.constexpr, BLOCK_N: gl.constexpr, SIGNED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, APART: gl.constexpr, RESCALED: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """``weigh``, with masks only where some row does not see the whole tile.

    Both ways are branches of their own: in straight code ptxas moves the softmax past the wait for the product that it
    is to run beside.
    """
    if APART:
        all_high = gl.minimum(all_high, key_high)
    if (at >= all_low) & (at + BLOCK_N <= all_high):
        weights, new_m, new_total, decay = weigh(
            scores, m, total, at, key_low, key_high, positions, slope, factor, softcap, left, right, L_S, BLOCK_N,
            SIGNED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, False, RESCALED, dtype,
        )  # fmt: skip
    else:
        weights, new_m, new_total, decay = weigh(
            scores, m, total, at, key_low, key_high, positions, slope, factor, softcap, left, right, L_S, BLOCK_N,
            SIGNED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, True, RESCALED, dtype,
        )  # fmt: skip
    return weights, new_m, new_total, decay


@gluon.jit
def multiply(
    b_p, v_tiles, v_strips, v_arrived, zeroed, acc, own_v, i, i_half, tiles, keys, BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr, APART: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
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
        edge = zeroed
        if HALVES > 1:
            # Such tiles are the first, the last and, between these, the last cached one: a barrier for each.
            edge = zeroed.index(gl.where(i == 0, 0, gl.where(i == tiles[1] - 1, 2, 1)))
        zero_strips(
            v_strips, stage * (BLOCK_D // COLUMNS) * (BLOCK_N // STRIP), gl.maximum(from_row, 0),
            gl.minimum(to_row, BLOCK_N), edge, i_half, BLOCK_D, BLOCK_N, BOX, HALVES,
        )  # fmt: skip
    return warpgroup_mma(b_p, v_tiles.index(stage), acc, is_async=True)


@gluon.jit
def consume(
    p_q, p_alibi, p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half, place, keys, tiles, numbers,
    s_q, s_out, s_lse,
    GROUP: gl.constexpr, HEADS_KV: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, BOX: gl.constexpr,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    APART: gl.constexpr, SCALED: gl.constexpr, LIMIT: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile: their outputs, or their part of them."""
    k_tiles, v_tiles, v_strips, q_smem, out_smem, position_smem, notes, factors = memory
    k_arrived, v_arrived, k_free, v_free, zeroed = barriers
    scale, softcap, left, right = numbers
    i_tile, begin, q_len, context, length = place
    i_kv = get(notes, HEAD_KV)
    i_hb = get(notes, HEAD_TILE)
    low, cached_high, high = keys
    dtype: gl.constexpr = q_smem.dtype
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ALIBI: gl.constexpr = p_alibi is not None
    HALVES: gl.constexpr = q_smem.shape[0]
    # 8-bit floats become float16, which takes one instruction for two; bfloat16 takes four.
    RESCALED: gl.constexpr = dtype != p_q.dtype.element_ty
    SIGNED: gl.constexpr = SCALED and APART

    factor = scale
    if not SOFTCAP:
        factor = scale * LOG2_E
    cached_factor = factor
    own_v = 1.0
    if SCALED:
        cached_factor = factor * get(factors, K_FACTOR)
        if APART:
            own_v = get(factors, V_FACTOR)

    q_tile = q_smem.index(i_half)
    o_m = i_half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_IO))
    o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
    p_tile = pointers(p_q, begin + o_t, o_h, o_d, s_q)
    b_q = gl.load(p_tile, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
    if RESCALED:
        q_power, q_inverse = powers_of_two(gl.max(gl.abs(b_q.to(gl.float32)), 1))
        b_q = b_q.to(gl.float32) * q_inverse[:, None]
    if SCALED and not APART:
        # Below, a factor of 0 or more keeps the order of scores.
        b_q = b_q.to(gl.float32) * gl.where(cached_factor < 0, -1.0, 1.0)
        cached_factor = gl.abs(cached_factor)
    q_tile.store(b_q.to(dtype))
    fence_async_shared()
    tl.debug_barrier()

    o_m = i_half * ROWS + gl.arange(0, ROWS, L_ROW)
    o_t, o_h, _ = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
    # Looked up where it is asked for, which most tiles do not: it takes no register.
    positions = position_smem.index(i_half)
    positions.store(context + o_t)
    tl.debug_barrier()
    slope = gl.zeros([ROWS], gl.float32, L_ROW)
    if ALIBI:
        slope = gl.load(p_alibi + o_h).to(gl.float32) * LOG2_E
    if RESCALED:
        cached_factor = cached_factor * gl.convert_layout(q_power, L_ROW)
    if not SIGNED:
        # Scores that are left out are -inf, of which a factor of 0 would make NaN.
        cached_factor = gl.where(cached_factor < TINY, TINY, cached_factor)
        factor = cached_factor
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
            all_low, all_high, positions, slope, factor_of(0, cached, cached_factor, factor, APART), softcap, left,
            right, L_S, BLOCK_N, SIGNED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, APART, RESCALED, dtype,
        )  # fmt: skip
        b_p = gl.convert_layout(weights, L_P)
        for i in range(1, count):
            stage = i % STAGES
            mbarrier.wait(k_arrived.index(stage), i // STAGES & 1)
            scores = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            product = multiply(
                b_p, v_tiles, v_strips, v_arrived, zeroed, acc, own_v, i - 1, i_half, tiles, keys, BLOCK_D, BLOCK_N,
                BOX, STAGES, SCALED, APART, HALVES,
            )  # fmt: skip
            b_scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_free.index(stage))
            weights, m, total, decay = weigh_tile(
                b_scores, m, total, position_of(i, tiles, BLOCK_N, APART), low, end_of(i, tiles, keys, APART),
                all_low, all_high, positions, slope, factor_of(i, cached, cached_factor, factor, APART), softcap,
                left, right, L_S, BLOCK_N, SIGNED, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, APART, RESCALED, dtype,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(v_free.index((i - 1) % STAGES))
            b_p = gl.convert_layout(weights, L_P)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, L_O))[:, None]
        product = multiply(
            b_p, v_tiles, v_strips, v_arrived, zeroed, acc, own_v, count - 1, i_half, tiles, keys, BLOCK_D, BLOCK_N,
            BOX, STAGES, SCALED, APART, HALVES,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[product])
        if APART:
            if SCALED and cached == count:
                # Otherwise new ones came after them.
                acc = acc * own_v

    i_kv = get(notes, HEAD_KV)
    i_hb = get(notes, HEAD_TILE)
    i_tile = get(notes, TILE)
    begin = get(notes, BEGIN)
    q_len = get(notes, Q_LEN)
    possible = get(notes, POSSIBLE) != 0
    if SCALED and not APART:
        acc = acc * get(factors, V_FACTOR)
        if RESCALED:
            total = total * HEADROOM_INVERSE
            acc = acc * HEADROOM_INVERSE
    o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
    log_sum = natural_logarithm(m, total, 1.0 if SOFTCAP else scale)
    if SPLITS == 1:
        if p_sinks is not None:
            m = m * LN_2
            b_sink = gl.load(p_sinks + o_h).to(gl.float32)
            b_sink = gl.where(possible, b_sink, float("-inf"))
            new_m = gl.maximum(m, b_sink)
            decay = gl.exp(m - finite(new_m))
            total = total * decay + gl.exp(b_sink - finite(new_m))
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, L_O))[:, None]
            log_sum = logarithm(new_m, total)
        if p_lse is not None:
            row = (begin + o_t).to(gl.int64)
            gl.store(p_lse + o_h.to(gl.int64) * s_lse[0] + row * s_lse[1], log_sum, mask=m_row)
        sum_inverse = 1.0 / (gl.where(total == 0, 1.0, total) * get(factors, OUT_SCALE))
        acc = acc * gl.convert_layout(sum_inverse, gl.SliceLayout(1, L_O))[:, None]
        if LIMIT:
            acc = gl.where(acc > LIMIT, LIMIT, gl.where(acc < -LIMIT, -LIMIT, acc))
    else:
        row = begin + o_t
        i_split = get(notes, SPLIT).to(gl.int64)
        rows = get(notes, ALL_ROWS)
        place_of_lse = (i_split * (GROUP * HEADS_KV) + o_h) * rows + row
        gl.store(p_part_lse + place_of_lse, log_sum, mask=m_row)
        acc = acc * gl.convert_layout(1.0 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, L_O))[:, None]

    if SPLITS == 1 and p_out.dtype.element_ty == p_q.dtype.element_ty:
        # By way of q's place, so that each row is stored in whole lines.
        out_tile = out_smem.index(i_half)
        tl.debug_barrier()
        out_tile.store(acc.to(out_smem.dtype))
        tl.debug_barrier()
        o_m = i_half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
        o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
        p_tile = pointers(p_out, begin + o_t, o_h, o_d, s_out)
        gl.store(p_tile, out_tile.load(L_IO), mask=m_row[:, None] & (o_d < D)[None, :])
    else:
        o_m = i_half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_O))
        o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L_O))
        o_t, o_h, m_row = rows_of(o_m, i_tile, i_kv, i_hb, q_len, GROUP, HEADS, TOKENS)
        if SPLITS == 1:
            p_tile = pointers(p_out, begin + o_t, o_h, o_d, s_out)
            gl.store(p_tile, acc.to(p_out.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])
        else:
            row = get(notes, SPLIT).to(gl.int64) * get(notes, ALL_ROWS) + begin + o_t
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
    i_kv, i_w, i_hb, i_split = part_of(pid, places, HEADS_KV, HEAD_TILES)
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

        q_dtype: gl.constexpr = p_q.dtype.element_ty
        # New keys and values, where these come too, are not all within float16's range.
        dtype: gl.constexpr = gl.float16 if SCALED and not APART else q_dtype
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
        position_smem = gl.allocate_shared_memory(gl.int32, [HALVES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        out_smem = q_smem._reinterpret(q_dtype, [HALVES, ROWS, BLOCK_D], tile_layout)
        k_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_arrived.index(i), count=1)
            mbarrier.init(v_arrived.index(i), count=1)
            mbarrier.init(k_free.index(i), count=HALVES)
            mbarrier.init(v_free.index(i), count=HALVES)
        # One warpgroup has no use for such barriers, and Triton would give the place of what nobody uses to what it
        # hands to the partitions: see kernel_reference.testing.ptx.
        zeroed = v_free
        if HALVES > 1:
            zeroed = gl.allocate_shared_memory(gl.int64, [EDGES, 1], mbarrier.MBarrierLayout())
            for i in gl.static_range(EDGES):
                mbarrier.init(zeroed.index(i), count=HALVES)
        k_stored = k_boxes
        v_stored = v_boxes
        k_stored_arrived = k_arrived
        v_stored_arrived = v_arrived
        k_stored_free = k_free
        v_stored_free = v_free
        WIDTH: gl.constexpr = d_k_cache.block_type.shape[3]
        if SCALED:
            # 8-bit tiles arrive in places of their own, from which two pairs of warps make 16-bit ones.
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
        notes = gl.allocate_shared_memory(gl.int32, [NOTES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        factors = gl.allocate_shared_memory(gl.float32, [FACTORS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        put(notes, TILE, i_tile)
        put(notes, BEGIN, begin)
        put(notes, Q_LEN, q_len)
        put(notes, POSSIBLE, possible)
        put(notes, HEAD_KV, i_kv)
        put(notes, HEAD_TILE, i_hb)
        put(notes, SPLIT, i_split)
        put(notes, ALL_ROWS, rows)
        if SPLITS == 1:
            put(factors, OUT_SCALE, scaled_by(out_factor, p_out_scale, 0))
        if SCALED:
            put(factors, K_FACTOR, scaled_by(k_factor, p_k_scale, i_kv.to(gl.int64) * s_k_scale))
            put(factors, V_FACTOR, scaled_by(v_factor, p_v_scale, i_kv.to(gl.int64) * s_v_scale))
        fence_async_shared()
        memory = (k_tiles, v_tiles, v_strips, q_smem, out_smem, position_smem, notes, factors)
        barriers = (k_arrived, v_arrived, k_free, v_free, zeroed)
        # Rows are fewer than 2^31, as tokens always are.
        place = (i_tile, begin.to(gl.int32), q_len, context, length)
        keys = (low, cached_high, high)
        # The split's tiles: where the first begins, how many there are, the first of new keys, and the step to these.
        start = (cached_first + from_tile) * BLOCK_N
        tiles = (start, to_tile - from_tile, cached_tiles - from_tile, new_start - cached_first * BLOCK_N)
        new_row = begin.to(gl.int32) - context
        i_half = i_w * 0
        numbers = (scale, softcap, left, right)
        # Registers a thread: a multiprocessor has 65536, and a warp that only starts copies needs few.
        if SCALED:
            # Partitions of two warps may give registers back, never ask for more than the 80 that workers wait with:
            # asking is for four warps together, and they would do it two by two.
            CONVERTING: gl.constexpr = 72 if APART else 24
            ATTENDING: gl.constexpr = 184 if APART else 232
            stored_layout: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 8, rank=2)
            shape: gl.constexpr = [STAGES * (BLOCK_D // WIDTH), BLOCK_N, WIDTH]
            k_stored_tiles = k_stored._reinterpret(d_k_cache.dtype, shape, stored_layout)
            v_stored_tiles = v_stored._reinterpret(d_k_cache.dtype, shape, stored_layout)
            if HALVES == 1:
                gl.warp_specialize([
                    (consume, (
                        p_q, p_alibi, p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half, place,
                        keys, tiles, numbers, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                        BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                    )),
                    (convert, (
                        k_stored_tiles, k_stored_arrived, k_stored_free, k_tiles, k_arrived, k_free, tiles, BLOCK_D,
                        WIDTH, BLOCK_N, STAGES, APART, 2,
                    )),
                    (convert, (
                        v_stored_tiles, v_stored_arrived, v_stored_free, v_tiles, v_arrived, v_free, tiles, BLOCK_D,
                        WIDTH, BLOCK_N, STAGES, APART, 2,
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
                ], [2, 2, 1, 1], [CONVERTING, CONVERTING, 24, 24])  # fmt: skip
            else:
                gl.warp_specialize([
                    (consume, (
                        p_q, p_alibi, p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half, place,
                        keys, tiles, numbers, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                        BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                    )),
                    (consume, (
                        p_q, p_alibi, p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half + 1, place,
                        keys, tiles, numbers, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                        BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                    )),
                    (convert, (
                        k_stored_tiles, k_stored_arrived, k_stored_free, k_tiles, k_arrived, k_free, tiles, BLOCK_D,
                        WIDTH, BLOCK_N, STAGES, APART, 2,
                    )),
                    (convert, (
                        v_stored_tiles, v_stored_arrived, v_stored_free, v_tiles, v_arrived, v_free, tiles, BLOCK_D,
                        WIDTH, BLOCK_N, STAGES, APART, 2,
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
                ], [4, 2, 2, 1, 1], [ATTENDING, CONVERTING, CONVERTING, 24, 24])  # fmt: skip
        elif HALVES == 1:
            gl.warp_specialize([
                (consume, (
                    p_q, p_alibi, p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half, place,
                    keys, tiles, numbers, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
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
                    p_q, p_alibi, p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half, place,
                    keys, tiles, numbers, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
                    BLOCK_N, STAGES, SPLITS, APART, SCALED, LIMIT, SOFTCAP, HAS_LEFT, HAS_RIGHT,
                )),
                (consume, (
                    p_q, p_alibi, p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half + 1, place,
                    keys, tiles, numbers, s_q, s_out, s_lse, GROUP, HEADS_KV, D, BLOCK_D, BOX, HEADS, TOKENS,
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
            ], [4, 1, 1], [240, 24, 24])  # fmt: skip
