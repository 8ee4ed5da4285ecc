"""Consumer warpgroups of the sm_90 kernel: 64 rows each, all over the same tiles of keys and values.

While the values of a tile are multiplied, the scores of the next one are made and its softmax is taken
(FlashAttention-3, arXiv 2407.08608, section 3.2):

    scores = q k_i^T      in flight together with      acc += weights_(i-1) v_(i-1)
    softmax of scores     while the second WGMMA runs
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from prefix_prefill.kernels.hopper.config import COLUMNS, ROWS, STRIP
from prefix_prefill.kernels.hopper.items import done, fill, items_of, loop_of, tile_of
from prefix_prefill.kernels.hopper.memory import release, wait_full
from prefix_prefill.kernels.hopper.producers import cached_tiles, end_of_tile, key_of_tile
from prefix_prefill.kernels.hopper.softmax import (
    HEADROOM_INVERSE,
    TINY,
    Scoring,
    Variant,
    natural_log_sum_exp,
    powers_of_two,
    update_tile,
)
from prefix_prefill.kernels.softmax import LN_2, LOG2_E, finite, log_sum_exp


@gluon.jit
def afresh(numbers):
    """The same, as if not known before: what is made of them is made again for each item, and takes no registers
    in between.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rows_of(o_m, tile, C):
    """Token and head of a tile's rows, and whether there are such."""
    o_t = tile.i_tile * C.TOKENS + o_m // C.HEADS
    o_g = tile.i_hb * C.HEADS + o_m % C.HEADS
    m_row = (o_m < C.TOKENS * C.HEADS) & (o_t < tile.q_len) & (o_g < C.GROUP)
    return o_t, tile.i_kv * C.GROUP + gl.minimum(o_g, C.GROUP - 1), m_row


@gluon.jit
def scaled(number, p_scale, offset):
    """A number times the scale that is there, if there are scales."""
    if p_scale is not None:
        number = number * gl.load(p_scale + offset)
    return number


@gluon.jit
def pointers_to(p, row, o_h, o_d, s):
    """Rows of heads [ROWS, BLOCK_D], by strides of (token, head, element)."""
    return p + (row.to(gl.int64) * s[0] + o_h.to(gl.int64) * s[1])[:, None] + o_d.to(gl.int64)[None, :] * s[2]


@gluon.jit
def zero_masked_values(strips, first_strip, i_consumer, from_row, to_row, zeroed, edges, C):
    """Zero the values of a tile before ``from_row`` and from ``to_row`` on: a weight of 0 times NaN would be NaN.

    Boxes that lie wholly outside came as zeros. Two consumers share the strips, and wait for each other's; ``edges``
    such tiles were before.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = afresh(gl.arange(0, STRIP, gl.SliceLayout(1, layout)))
    BOX: gl.constexpr = STRIP if C.BOX < STRIP else C.BOX
    begin = from_row // BOX * (BOX // STRIP)
    end = (to_row + BOX - 1) // BOX * (BOX // STRIP)
    for strip in range(begin + i_consumer, end, C.CONSUMERS):
        row = strip * STRIP + o_row
        if (strip * STRIP < from_row) | (strip * STRIP + STRIP > to_row):
            for i_c in gl.static_range(C.BLOCK_D // COLUMNS):
                p_strip = strips.index(first_strip + i_c * (C.BLOCK_N // STRIP) + strip)
                b_strip = p_strip.load(layout)
                keep = (row >= from_row) & (row < to_row)
                p_strip.store(gl.where(keep[:, None], b_strip, 0.0).to(b_strip.dtype))
    fence_async_shared()
    if C.CONSUMERS == 1:
        tl.debug_barrier()
    else:
        mbarrier.arrive(zeroed.index(0))
        mbarrier.wait(zeroed.index(0), edges & 1)


@gluon.jit
def issue_pv(b_p, acc, v, memory, v_scale, i, at, i_consumer, loop, C):
    """Issue acc += weights v of tile i, in the ring at ``before + i``; before the first new values, scale what the
    cached ones gave. Returns also how many edges of the keys there have been.
    """
    before, edges = at
    if C.IS_FP8 and C.NEW_KV:
        if i == loop.first_new:
            acc = acc * v_scale
    wait_full(v, before + i, C)
    stage = (before + i) % C.STAGES
    key = key_of_tile(i, loop, C)
    from_row = loop.low - key
    to_row = end_of_tile(i, loop, C) - key
    if (from_row > 0) | (to_row < C.BLOCK_N):
        first_strip = stage * (C.BLOCK_D // COLUMNS) * (C.BLOCK_N // STRIP)
        from_row = gl.maximum(from_row, 0)
        to_row = gl.minimum(to_row, C.BLOCK_N)
        zero_masked_values(memory.v_strips, first_strip, i_consumer, from_row, to_row, memory.zeroed, edges, C)
        edges += 1
    return warpgroup_mma(b_p, v.tiles.index(stage), acc, is_async=True), edges


@gluon.jit
def issue_qk(q_tile, k, i, b_zero, C):
    """Issue scores = q k^T of the tile at i in the ring."""
    wait_full(k, i, C)
    k_tile = k.tiles.index(i % C.STAGES).permute((1, 0))
    return warpgroup_mma(q_tile, k_tile, b_zero, use_acc=False, is_async=True)


@gluon.jit
def softmax_of(b_s, running_max, row_sum, i, cached, loop, scoring, V, C):
    """The online softmax of tile i: weights, running max, row sum, and what the accumulator is rescaled by."""
    key = key_of_tile(i, loop, C)
    bounds = (loop.low, end_of_tile(i, loop, C))
    scale = scoring.cached_scale
    if C.IS_FP8 and C.NEW_KV:
        # Only cached keys have a scale of their own.
        scale = gl.where(i < cached, scoring.cached_scale, scoring.scale)
    return update_tile(b_s, running_max, row_sum, scale, key, bounds, scoring, V, C)


@gluon.jit
def load_q(pointers, q_tile, i_consumer, tile, cached_scale, strides, V, C):
    """A consumer's queries into shared memory, and, where they are rescaled, the powers of two that undo it; and the
    scale of their scores, its sign now in q where only its size may count.
    """
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_m = i_consumer * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
    o_d = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, L_IO))
    o_t, o_h, m_row = rows_of(o_m, tile, C)
    p_tile = pointers_to(pointers.q, tile.begin + o_t, o_h, o_d, strides.q)
    b_q = gl.load(p_tile, mask=m_row[:, None] & (o_d < C.D)[None, :], other=0.0)
    q_power = 1.0
    if V.RESCALED:
        q_power, q_inverse = powers_of_two(gl.max(gl.abs(b_q.to(gl.float32)), 1))
        b_q = b_q.to(gl.float32) * q_inverse[:, None]
    if C.IS_FP8 and not C.NEW_KV:
        # In ``update`` a scale of 0 or more keeps the order of scores.
        b_q = b_q.to(gl.float32) * gl.where(cached_scale < 0, -1.0, 1.0)
        cached_scale = gl.where(cached_scale < 0, -cached_scale, cached_scale)
    # The memory of q is that of the outputs before it, too.
    tl.debug_barrier()
    q_tile.store(b_q.to(V.dtype))
    fence_async_shared()
    tl.debug_barrier()
    return q_power, cached_scale


@gluon.jit
def consume_first(pointers, memory, k, v, table, num_splits, batch, scores, numbers, sizes, C):
    """The first consumer, which also looks up what all roles work on."""
    consume_items(pointers, memory, k, v, 0, table, (num_splits, batch), scores, numbers, sizes, C)


@gluon.jit
def consume(pointers, memory, k, v, i_consumer, table, scores, numbers, sizes, C):
    """Another consumer."""
    consume_items(pointers, memory, k, v, i_consumer, table, None, scores, numbers, sizes, C)


@gluon.jit
def consume_items(pointers, memory, k, v, i_consumer, table, given, scores, numbers, sizes, C):
    """64 rows of each tile: outputs, or partial results. ``given``: what items are looked up by, where that is here."""
    before = sizes.rows * 0
    edges = before
    i_round = before
    i_consumer = before + i_consumer
    more = i_round == 0
    while more:
        if given is not None:
            fill(table, i_round, given[0], given[1], pointers.parts[2], C)
        count, more = items_of(table, i_round, 4)
        for i_item in range(count):
            at = (before, edges)
            before, edges = attend_tile(
                pointers, memory, k, v, i_consumer, table, i_item, at, scores, numbers, sizes, C
            )
        done(table)
        i_round += 1


@gluon.jit
def attend_tile(pointers, memory, k, v, i_consumer, table, i_item, at, scores, numbers, sizes, C):
    """One item; ``at``: how many tiles of keys, and how many edges, were before it, and after it are."""
    before, edges = at
    i_consumer = afresh(i_consumer)
    dtype: gl.constexpr = memory.q.dtype
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    # 8-bit floats become float16, which takes one instruction for two; bfloat16 takes four.
    V: gl.constexpr = Variant(
        SIGNED=C.IS_FP8 and C.NEW_KV, RESCALED=dtype != pointers.q.dtype.element_ty, dtype=dtype, L_S=L_S, L_O=L_O
    )
    tile = tile_of(table, i_item, C, 4)
    loop = loop_of(tile, sizes, C)

    scale = scores.softmax_scale
    if not C.SOFTCAP:
        scale = scores.softmax_scale * LOG2_E
    cached_scale = scale
    v_scale = 1.0
    if C.IS_FP8:
        i_kv = tile.i_kv.to(gl.int64)
        cached_scale = scale * scaled(numbers.k_scale, pointers.scales[0], i_kv * numbers.strides.k_scale)
        if C.NEW_KV:
            v_scale = scaled(numbers.v_scale, pointers.scales[1], i_kv * numbers.strides.v_scale)

    q_tile = memory.q.index(i_consumer)
    q_power, cached_scale = load_q(pointers, q_tile, i_consumer, tile, cached_scale, numbers.strides, V, C)

    o_m = i_consumer * ROWS + gl.arange(0, ROWS, L_ROW)
    o_t, o_h, _ = rows_of(o_m, tile, C)
    # In shared memory, as most tiles do not ask for them: so they take no registers.
    positions = memory.positions.index(i_consumer)
    positions.store(tile.context + o_t)
    tl.debug_barrier()
    slope = gl.zeros([ROWS], gl.float32, L_ROW)
    if C.ALIBI:
        slope = gl.load(pointers.alibi + o_h).to(gl.float32) * LOG2_E
    if V.RESCALED:
        cached_scale = cached_scale * gl.convert_layout(q_power, L_ROW)
    if not V.SIGNED:
        # Masked scores are -inf, of which a scale of 0 would make NaN.
        cached_scale = gl.where(cached_scale < TINY, TINY, cached_scale)
        scale = cached_scale
    all_low = loop.low
    all_high = loop.high
    if C.HAS_LEFT:
        last_row = tile.context + tile.i_tile * C.TOKENS + (i_consumer * ROWS + ROWS - 1) // C.HEADS
        all_low = gl.maximum(last_row, sizes.left) - sizes.left
    if C.HAS_RIGHT:
        first_row = tile.context + tile.i_tile * C.TOKENS + i_consumer * ROWS // C.HEADS
        all_high = gl.minimum(loop.high, first_row + 1 + gl.minimum(sizes.right, tile.length))
    scoring = Scoring(cached_scale, scale, scores.softcap, sizes, slope, positions, all_low, all_high)

    running_max = gl.full([ROWS], float("-inf"), gl.float32, L_ROW)
    row_sum = gl.zeros([ROWS], gl.float32, L_ROW)
    acc = gl.zeros([ROWS, C.BLOCK_D], gl.float32, L_O)
    b_zero = gl.zeros([ROWS, C.BLOCK_N], gl.float32, L_S)
    count = loop.count
    cached = cached_tiles(loop, C)
    if count > 0:
        # Prologue: the scores of the first tile.
        qk = issue_qk(q_tile, k, before, b_zero, C)
        b_s = warpgroup_mma_wait(0, deps=[qk])
        release(k, before, C)
        weights, running_max, row_sum, rescale = softmax_of(b_s, running_max, row_sum, 0, cached, loop, scoring, V, C)
        b_p = gl.convert_layout(weights, L_P)
        for i in range(1, count):
            # Both WGMMAs are in flight; the softmax of tile i overlaps with the second.
            qk = issue_qk(q_tile, k, before + i, b_zero, C)
            pv, edges = issue_pv(b_p, acc, v, memory, v_scale, i - 1, (before, edges), i_consumer, loop, C)
            b_s = warpgroup_mma_wait(1, deps=[qk])
            release(k, before + i, C)
            weights, running_max, row_sum, rescale = softmax_of(
                b_s, running_max, row_sum, i, cached, loop, scoring, V, C
            )
            acc = warpgroup_mma_wait(0, deps=[pv])
            release(v, before + i - 1, C)
            b_p = gl.convert_layout(weights, L_P)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, L_O))[:, None]
        pv, edges = issue_pv(b_p, acc, v, memory, v_scale, count - 1, (before, edges), i_consumer, loop, C)
        acc = warpgroup_mma_wait(0, deps=[pv])
        release(v, before + count - 1, C)
        if C.NEW_KV:
            if C.IS_FP8 and cached == count:
                # Otherwise ``issue_pv`` did, before the first new tile.
                acc = acc * v_scale
    finish(pointers, memory, i_consumer, acc, (running_max, row_sum), table, i_item, scores, numbers, sizes, V, C)
    return before + count, edges


@gluon.jit
def finish(pointers, memory, i_consumer, acc, sums, table, i_item, scores, numbers, sizes, V, C):
    """Epilogue: the sink, lse and the output over its scale; or, of a tile in parts, partial results without them."""
    running_max, row_sum = sums
    i_consumer = afresh(i_consumer)
    # Looked up again: through the main loop it would take registers.
    tile = tile_of(table, i_item, C, 4)
    if C.IS_FP8 and not C.NEW_KV:
        acc = acc * scaled(numbers.v_scale, pointers.scales[1], tile.i_kv.to(gl.int64) * numbers.strides.v_scale)
        if V.RESCALED:
            row_sum = row_sum * HEADROOM_INVERSE
            acc = acc * HEADROOM_INVERSE
    lse = natural_log_sum_exp(running_max, row_sum, 1.0 if C.SOFTCAP else scores.softmax_scale)
    whole = tile.part < 0
    if C.IN_PARTS:
        if not whole:
            store_part(pointers, i_consumer, acc, row_sum, lse, tile, sizes.rows, V, C)
    if whole:
        o_m = i_consumer * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, V.L_S))
        o_t, o_h, m_row = rows_of(o_m, tile, C)
        if pointers.sinks is not None:
            running_max = running_max * LN_2
            b_sink = gl.load(pointers.sinks + o_h).to(gl.float32)
            b_sink = gl.where(tile.valid, b_sink, float("-inf"))
            new_max = gl.maximum(running_max, b_sink)
            rescale = gl.exp(running_max - finite(new_max))
            row_sum = row_sum * rescale + gl.exp(b_sink - finite(new_max))
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, V.L_O))[:, None]
            lse = log_sum_exp(new_max, row_sum)
        if pointers.lse is not None:
            row = (tile.begin + o_t).to(gl.int64)
            gl.store(pointers.lse + o_h.to(gl.int64) * sizes.lse_head + row * sizes.lse_token, lse, mask=m_row)
        out_scale = scaled(numbers.out_scale, pointers.scales[2], 0)
        sum_inverse = 1.0 / (gl.where(row_sum == 0, 1.0, row_sum) * out_scale)
        acc = acc * gl.convert_layout(sum_inverse, gl.SliceLayout(1, V.L_O))[:, None]
        if C.LIMIT:
            acc = gl.where(acc > C.LIMIT, C.LIMIT, gl.where(acc < -C.LIMIT, -C.LIMIT, acc))
        store_out(pointers, memory, i_consumer, acc, tile, numbers.strides, V, C)


@gluon.jit
def store_part(pointers, i_consumer, acc, row_sum, lse, tile, rows, V, C):
    """A consumer's partial outputs, normalised, and their lse: where, ``merge.write_entry`` has said."""
    p_part, p_part_lse, _ = pointers.parts
    acc = acc * gl.convert_layout(1.0 / gl.where(row_sum == 0, 1.0, row_sum), gl.SliceLayout(1, V.L_O))[:, None]
    o_m = i_consumer * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, V.L_S))
    _, _, m_row = rows_of(o_m, tile, C)
    gl.store(p_part_lse + place_of_part(o_m, tile, rows, C), lse, mask=m_row)
    o_m = i_consumer * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, V.L_O))
    o_d = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, V.L_O))
    _, _, m_row = rows_of(o_m, tile, C)
    p_tile = p_part + place_of_part(o_m, tile, rows, C)[:, None] * C.D + o_d[None, :]
    gl.store(p_tile, acc, mask=m_row[:, None] & (o_d < C.D)[None, :])


@gluon.jit
def place_of_part(o_m, tile, rows, C):
    """Where the partial results of rows go, as ``merge.merge_pieces`` looks for them."""
    o_t, o_h, _ = rows_of(o_m, tile, C)
    row = tile.part.to(gl.int64) * rows + tile.begin + o_t
    of_piece = row * (C.GROUP * C.HEADS_KV) + o_h
    return gl.where(tile.by_share, tile.part.to(gl.int64) * (C.CONSUMERS * ROWS) + o_m, of_piece)


@gluon.jit
def store_out(pointers, memory, i_consumer, acc, tile, strides, V, C):
    """A consumer's outputs."""
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    out_dtype: gl.constexpr = pointers.out.dtype.element_ty
    if out_dtype == pointers.q.dtype.element_ty:
        # Through the memory of q, so that each row is stored in whole lines.
        out_tile = memory.out.index(i_consumer)
        tl.debug_barrier()
        out_tile.store(acc.to(out_dtype))
        tl.debug_barrier()
        o_m = i_consumer * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
        o_d = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, L_IO))
        o_t, o_h, m_row = rows_of(o_m, tile, C)
        p_tile = pointers_to(pointers.out, tile.begin + o_t, o_h, o_d, strides.out)
        gl.store(p_tile, out_tile.load(L_IO), mask=m_row[:, None] & (o_d < C.D)[None, :])
    else:
        o_m = i_consumer * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, V.L_O))
        o_d = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, V.L_O))
        o_t, o_h, m_row = rows_of(o_m, tile, C)
        p_tile = pointers_to(pointers.out, tile.begin + o_t, o_h, o_d, strides.out)
        gl.store(p_tile, acc.to(out_dtype), mask=m_row[:, None] & (o_d < C.D)[None, :])
