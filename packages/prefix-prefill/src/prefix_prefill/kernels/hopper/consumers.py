"""Consumer warpgroups of the sm_90 kernel: 64 rows each, all over the same tiles of keys and values.

Where a head has more than 256 values, two consumers have the same 64 rows: both make their scores, each multiplies one
tile of the values' columns. An accumulator of more would not fit in registers.

While the values of a tile are multiplied, the scores of the next one are made and its softmax is taken
(FlashAttention-3, arXiv 2407.08608, section 3.2):

    scores = q k_i^T      in flight together with      acc += weights_(i-1) v_(i-1)
    softmax of scores     while the second WGMMA runs
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from prefix_prefill.kernels.hopper.capped import reference_of, update_by_constant
from prefix_prefill.kernels.hopper.config import (
    ROWS,
    Bounds,
    asks_first,
    begin_of,
    follows_seldom,
    own_tiles,
    units_in,
)
from prefix_prefill.kernels.hopper.drafts import store_masks
from prefix_prefill.kernels.hopper.epilogue import finish
from prefix_prefill.kernels.hopper.items import done, has_item, inside_of, is_inside, loop_of, tile_of
from prefix_prefill.kernels.hopper.memory import release, step_of_packed_keys, wait_full
from prefix_prefill.kernels.hopper.producers import cached_tiles, end_of_tile, key_of_tile
from prefix_prefill.kernels.hopper.rescaling import rescale_grown
from prefix_prefill.kernels.hopper.rows import (
    afresh,
    own_columns,
    pointers_to,
    row_layout,
    rows_of,
    scale_all,
    scale_rows,
    scaled,
)
from prefix_prefill.kernels.hopper.softmax import (
    HEADROOM,
    TINY,
    Scoring,
    TileScales,
    Variant,
    acc_layout,
    lanes_layout,
    larger_unit,
    row_sum_of,
    update_first,
    update_tile,
)
from prefix_prefill.kernels.hopper.values import await_values, meet, parts_of, release_values, stages_in
from prefix_prefill.kernels.softmax import E4M3_ROOM, LOG2_E, powers_of_two, rounded_to_e4m3


@gluon.jit
def empty_acc(T: gl.constexpr, V, C):
    """A zeroed accumulator for the consumer's tile number T."""
    TILE: gl.constexpr = C.V_TILES[V.OWN[T]]
    return gl.zeros([ROWS, TILE], gl.float32, acc_layout(TILE))


@gluon.jit
def wait_for_pv(pv, V):
    """The accumulators of products that were issued last."""
    if len(V.OWN) == 1:
        accs = (warpgroup_mma_wait(0, deps=[pv[0]]),)
    else:
        accs = warpgroup_mma_wait(0, deps=[pv[0], pv[1]])
    return accs


class Running(NamedTuple):
    """What goes on from tile to tile: running max and row sum; accumulators, and the unit of the values' scales that
    they are in; how often consumers have met.
    """

    running_max: object
    row_sum: object
    accs: object
    unit: object
    meetings: object


@gluon.jit
def issue_pv(weights, accs, v, memory, v_scale, i, at, i_group, seen, PACKED: gl.constexpr, V, C):
    """Issue acc += weights v of tile i, in the ring at ``before + i``; before the first new values, scale what the
    cached ones gave. Returns also how often consumers have met. ``seen``: the loop, and what of it is inside.
    """
    before, meetings = at
    loop, _ = seen
    if C.IS_FP8 and C.NEW_KV and not C.V_TOKENS:
        if i == loop.first_new:
            accs = scale_all(accs, v_scale, V)
    issued = accs
    weights_of_parts = parts_of(weights, C)
    for part in gl.static_range(stages_in(C)):
        meetings = await_values(v, memory, i, part, (before, meetings), i_group, seen, PACKED, V, C)
        stage = ((before + i) * stages_in(C) + part) % v.full.shape[0]
        sums = ()
        for t in gl.static_range(len(V.OWN)):
            b_p = gl.convert_layout(weights_of_parts[part], gl.DotOperandLayout(0, acc_layout(C.V_TILES[V.OWN[t]]), 2))
            v_tile = v.tiles[V.OWN[t]].index(stage)
            sums = sums + (warpgroup_mma(b_p, v_tile, issued[t], is_async=True),)
        issued = sums
    return issued, meetings


@gluon.jit
def queries(memory, i_group, C):
    """The tiles of a group's queries as WGMMA takes them: from shared memory, or from registers."""
    q = ()
    for t in gl.static_range(len(C.K_TILES)):
        q_tile = memory.q[t].index(i_group)
        if t < C.Q_IN_REGISTERS:
            BITS: gl.constexpr = q_tile.dtype.primitive_bitwidth
            q = q + (q_tile.load(gl.DotOperandLayout(0, acc_layout(C.BLOCK_N, BITS), 32 // BITS)),)
        else:
            q = q + (q_tile,)
    return q


@gluon.jit
def unit_of_queries(q, T: gl.constexpr, C):
    """The columns of queries that a unit of keys has."""
    FIRST: gl.constexpr = C.K_TILES[0] // 64
    if T < FIRST:
        unit = q[0].slice(T * 64, 64, dim=1)
    else:
        unit = q[1].slice((T - FIRST) * 64, 64, dim=1)
    return unit


@gluon.jit
def release_keys(k, i, C):
    """The keys of the tile at i have been read."""
    for t in gl.static_range(units_in(C)):
        release(k, i * units_in(C) + t)


@gluon.jit
def issue_qk(q, k, i, b_zero, PACKED: gl.constexpr, C):
    """Issue scores = q k^T of the tile at i in the ring, its columns tile after tile."""
    qk = b_zero
    if C.K_UNITS:
        for t in gl.static_range(units_in(C)):
            place = i * units_in(C) + t
            wait_full(k, place, C)
            k_unit = k.tiles[0].index(place % C.K_UNITS).permute((1, 0))
            qk = warpgroup_mma(unit_of_queries(q, t, C), k_unit, qk, use_acc=t > 0, is_async=True)
    elif PACKED:
        wait_full(k, i, C)
        stage = i % k.full.shape[0]
        # Step by step, each from where it begins: where nothing is swizzled, WGMMA's descriptors have no base offset,
        # which Triton gives to all but a tile's first step.
        for step in gl.static_range(C.D // 16):
            k_step = step_of_packed_keys(k, stage, step, C).permute((1, 0))
            q_step = q[0].slice(step * 16, 16, dim=1)
            qk = warpgroup_mma(q_step, k_step, qk, use_acc=step > 0, is_async=True)
    else:
        wait_full(k, i, C)
        stage = i % k.full.shape[0]
        for t in gl.static_range(len(C.K_TILES)):
            k_tile = k.tiles[t].index(stage).permute((1, 0))
            qk = warpgroup_mma(q[t], k_tile, qk, use_acc=t > 0, is_async=True)
    return qk


@gluon.jit
def softmax_of(b_s, running_max, row_sum, i, loop, inside, scoring, scales, FIRST: gl.constexpr, V, C):
    """The online softmax of tile i: weights, running max, row sum, and what the accumulator is rescaled by."""
    key = key_of_tile(i, loop, C)
    whole = is_inside(i, inside, loop, C)
    bounds = Bounds(loop.low, end_of_tile(i, loop, C), whole, i >= inside.low, i < inside.high)
    scale = scoring.cached_scale
    if C.IS_FP8 and C.NEW_KV:
        # Only cached keys have a scale of their own.
        scale = gl.where(scales.cached, scoring.cached_scale, scoring.scale)
    if C.CAPPING:
        weights, new_sum = update_by_constant(b_s, row_sum, scale, key, bounds, scoring, V, C)
        result = (weights, running_max, new_sum, running_max)
    elif FIRST:
        result = update_first(b_s, running_max, row_sum, scale, key, bounds, scoring, scales, V, C)
    else:
        result = update_tile(b_s, running_max, row_sum, scale, key, bounds, scoring, scales, V, C)
    return result


@gluon.jit
def load_q_tile(pointers, i_group, tile, s_q, T: gl.constexpr, V, C):
    """The columns of queries that are a consumer's tile number T."""
    TILE: gl.constexpr = C.K_TILES[V.OWN_Q[T]]
    BEGIN: gl.constexpr = begin_of(C.K_TILES, V.OWN_Q[T], C.D)
    layout: gl.constexpr = row_layout(TILE)
    o_m = i_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d = BEGIN + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    o_t, o_h, m_row = rows_of(o_m, tile, C)
    # Of columns that two tiles hold, zeros in one of them.
    m_column = own_columns(o_d, C.K_TILES, V.OWN_Q[T], C.D)
    p_tile = pointers_to(pointers.q, tile.begin + o_t, o_h, o_d, s_q)
    return gl.load(p_tile, mask=m_row[:, None] & m_column[None, :], other=0.0)


@gluon.jit
def load_q(pointers, i_group, table, i_item, s_q, V, C):
    """A group's queries of item i, zeros if there is none. Two consumers of a group load a tile each."""
    tile = tile_of(table, i_item, C, 4)
    b_qs = ()
    for t in gl.static_range(len(V.OWN_Q)):
        b_qs = b_qs + (load_q_tile(pointers, afresh(i_group), tile, s_q, t, V, C),)
    return b_qs


@gluon.jit
def store_q(b_qs, memory, i_group, cached_scale, meetings, V, C):
    """A group's queries into shared memory, and, where they are rescaled, the powers of two that undo it; and the scale
    of their scores, its sign now in q where only its size may count.
    """
    q_power = 1.0
    q_inverse = 1.0
    if V.RESCALED:
        most = gl.max(gl.abs(b_qs[0].to(gl.float32)), 1)
        for t in gl.static_range(1, len(C.K_TILES)):
            tail = gl.max(gl.abs(b_qs[t].to(gl.float32)), 1)
            most = gl.maximum(most, gl.convert_layout(tail, gl.SliceLayout(1, row_layout(C.K_TILES[0]))))
        q_power, q_inverse = powers_of_two(most, E4M3_ROOM if C.QUANTIZED_Q else HEADROOM)
    # The memory of q is that of the outputs before it, too.
    tl.debug_barrier()
    if C.GROUPS < C.CONSUMERS:
        meetings = meet(memory, meetings)
    for t in gl.static_range(len(V.OWN_Q)):
        b_q = b_qs[t]
        if V.RESCALED:
            inverse = gl.convert_layout(q_inverse, gl.SliceLayout(1, row_layout(C.K_TILES[t])))
            b_q = b_q.to(gl.float32) * inverse[:, None]
        if C.IS_FP8 and not C.NEW_KV:
            # In ``update`` a scale of 0 or more keeps the order of scores.
            b_q = b_q.to(gl.float32) * gl.where(cached_scale < 0, -1.0, 1.0)
        if C.QUANTIZED_Q and not C.K_FP8:
            b_q = rounded_to_e4m3(b_q)
        memory.q[V.OWN_Q[t]].index(i_group).store(b_q.to(memory.q[0].dtype))
    if C.IS_FP8 and not C.NEW_KV:
        cached_scale = gl.where(cached_scale < 0, -cached_scale, cached_scale)
    fence_async_shared()
    tl.debug_barrier()
    if C.GROUPS < C.CONSUMERS:
        meetings = meet(memory, meetings)
    return q_power, cached_scale, meetings


@gluon.jit
def consume(pointers, memory, k, v, i_group, FIRST: gl.constexpr, table, scores, numbers, sizes, C):
    """64 rows of each tile: outputs, or partial results."""
    before = sizes.rows * 0
    meetings = before
    i_item = before
    i_group = before + i_group
    dtype: gl.constexpr = v.tiles[0].dtype
    # 8-bit floats become float16, which takes one instruction for two; bfloat16 takes four.
    V: gl.constexpr = Variant(
        SIGNED=C.IS_FP8 and C.NEW_KV, RESCALED=C.QUANTIZED_Q or dtype != pointers.q.dtype.element_ty, dtype=dtype,
        L_S=acc_layout(C.BLOCK_N, memory.q[0].dtype.primitive_bitwidth), OWN=own_tiles(C.V_TILES, FIRST, C),
        OWN_Q=own_tiles(C.K_TILES, FIRST, C),
    )  # fmt: skip
    there = has_item(table, i_item, 4)
    while there:
        at = (before, meetings)
        before, meetings, there = attend_tile(
            pointers, memory, k, v, i_group, table, i_item, at, (scores, numbers), sizes, V, C
        )
        i_item += 1


@gluon.jit
def attend_tile(pointers, memory, k, v, i_group, table, i_item, at, numbers, sizes, V, C):
    """One item; ``at``: how many tiles of keys, and meetings of consumers, were before it, and after it are. Also
    returns whether there is a next one.
    """
    before, meetings = at
    scores, numbers = numbers
    if asks_first(C):
        b_qs = load_q(pointers, i_group, table, i_item, numbers.strides.q, V, C)
    i_group = afresh(i_group)
    L_S: gl.constexpr = V.L_S
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    tile = tile_of(table, i_item, C, 4)
    loop = loop_of(tile, sizes, C)

    scale = scores.softmax_scale * LOG2_E
    if C.SOFTCAP:
        scale = scale * (2.0 / scores.softcap)
    cached_scale = scale
    v_scale = 1.0
    if C.IS_FP8:
        i_kv = tile.i_kv.to(gl.int64)
        if not C.K_TOKENS:
            cached_scale = scale * scaled(numbers.k_scale, pointers.scales[0], i_kv * numbers.strides.k_scale)
        if C.NEW_KV and not C.V_TOKENS:
            v_scale = scaled(numbers.v_scale, pointers.scales[1], i_kv * numbers.strides.v_scale)

    if not asks_first(C):
        b_qs = load_q(pointers, i_group, table, i_item, numbers.strides.q, V, C)
    q_power, cached_scale, meetings = store_q(b_qs, memory, i_group, cached_scale, meetings, V, C)

    o_m = i_group * ROWS + gl.arange(0, ROWS, L_ROW)
    o_t, o_h, m_row = rows_of(o_m, tile, C)
    # In shared memory, as most tiles do not ask for them: so they take no registers.
    positions = memory.positions.index(i_group)
    positions.store(tile.context + o_t)
    draft = (0, 0)
    if C.DRAFT:
        draft = (memory.positions.index(C.GROUPS + i_group), memory.positions.index(2 * C.GROUPS + i_group))
        store_masks(pointers.draft, tile.begin + o_t, o_t, m_row, i_group, memory.positions, sizes, C)
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
        last_row = tile.context + tile.i_tile * C.TOKENS + (i_group * ROWS + ROWS - 1) // C.HEADS
        all_low = gl.maximum(last_row, sizes.left) - sizes.left
    if C.HAS_RIGHT:
        first_row = tile.context + tile.i_tile * C.TOKENS + i_group * ROWS // C.HEADS
        all_high = gl.minimum(loop.high, first_row + 1 + gl.minimum(sizes.right, tile.length))
    if C.DRAFT:
        all_high = gl.minimum(all_high, tile.context)
    inside = inside_of(loop, all_low, all_high, C)
    scoring = Scoring(cached_scale, scale, scores.softcap, sizes, slope, positions, draft, (table, i_item))

    if C.CAPPING:
        running_max = gl.zeros([ROWS], gl.float32, L_ROW) + reference_of(scores.softcap)
    else:
        running_max = gl.full([ROWS], float("-inf"), gl.float32, L_ROW)
    row_sum = gl.zeros([ROWS, 4], gl.float32, lanes_layout())
    accs = ()
    for t in gl.static_range(len(V.OWN)):
        accs = accs + (empty_acc(t, V, C),)
    count = loop.count
    cached = cached_tiles(loop, C)
    # Of the values' scales, where tokens have their own.
    unit = scores.softmax_scale * 0.0
    q = queries(memory, i_group, C)
    run = Running(running_max, row_sum, accs, unit, meetings)
    at = (before, i_group)
    scored = (loop, inside, scoring, v_scale)
    if C.PACKED:
        k_packed, v_packed = memory.packed
        run = attend_keys(run, (0, cached), at, q, k_packed, v_packed, memory, scored, True, V, C)
        if C.NEW_KV:
            # Queries of their own: what ptxas keeps of descriptors for both loops it makes in the first, which may be
            # left out.
            q = queries(memory, afresh(i_group), C)
            run = attend_keys(run, (cached, count), at, q, k, v, memory, scored, False, V, C)
    else:
        run = attend_keys(run, (0, count), at, q, k, v, memory, scored, False, V, C)
    accs = run.accs
    row_sum = row_sum_of(run.row_sum, V)
    there = has_item(table, i_item + 1, 4)
    finish(pointers, memory, i_group, accs, (run.running_max, row_sum), table, i_item, scores, numbers, sizes, V, C)
    done(table, i_item)
    return before + count, run.meetings, there


@gluon.jit
def attend_keys(run, span, at, q, k, v, memory, scored, PACKED: gl.constexpr, V, C):
    """The main loop over the tiles from ``span[0]`` to before ``span[1]``, of packed values or of others."""
    first, end = span
    before, i_group = at
    loop, inside, scoring, v_scale = scored
    seen = (loop, inside)
    running_max, row_sum, accs, unit, meetings = run
    b_zero = gl.zeros([ROWS, C.BLOCK_N], gl.float32, V.L_S)
    cached = cached_tiles(loop, C)
    if end > first:
        # Prologue: the scores of the first tile.
        qk = issue_qk(q, k, before + first, b_zero, PACKED, C)
        b_s = warpgroup_mma_wait(0, deps=[qk])
        release_keys(k, before + first, C)
        unit, factor, ratio = larger_unit(memory.scales, before + first, cached > 0, unit, C)
        scales = TileScales(memory.scales, before + first, cached > 0, factor)
        weights, running_max, row_sum, rescale = softmax_of(
            b_s, running_max, row_sum, first, loop, inside, scoring, scales, True, V, C
        )
        if C.PACKED and not PACKED:
            # Packed tiles were before.
            if not C.CAPPING:
                accs = scale_rows(accs, rescale, V, C)
        for i in range(first + 1, end):
            # Both products are in flight; the softmax of tile i overlaps with the second.
            qk = issue_qk(q, k, before + i, b_zero, PACKED, C)
            pv, meetings = issue_pv(
                weights, accs, v, memory, v_scale, i - 1, (before, meetings), i_group, seen, PACKED, V, C
            )
            b_s = warpgroup_mma_wait(len(V.OWN) * stages_in(C), deps=[qk])
            release_keys(k, before + i, C)
            unit, factor, ratio = larger_unit(memory.scales, before + i, i < cached, unit, C)
            scales = TileScales(memory.scales, before + i, i < cached, factor)
            weights, running_max, row_sum, rescale = softmax_of(
                b_s, running_max, row_sum, i, loop, inside, scoring, scales, False, V, C
            )
            if C.V_TOKENS:
                rescale = rescale * ratio
            accs = wait_for_pv(pv, V)
            release_values(v, before + i - 1, C)
            if follows_seldom(C):
                accs = rescale_grown(accs, rescale, V)
            elif not C.CAPPING:
                accs = scale_rows(accs, rescale, V, C)
        pv, meetings = issue_pv(
            weights, accs, v, memory, v_scale, end - 1, (before, meetings), i_group, seen, PACKED, V, C
        )
        accs = wait_for_pv(pv, V)
        release_values(v, before + end - 1, C)
        if C.V_TOKENS:
            accs = scale_all(accs, unit, V)
        elif C.NEW_KV:
            if C.IS_FP8 and cached == end:
                # Otherwise ``issue_pv`` did, before the first new tile.
                accs = scale_all(accs, v_scale, V)
    return Running(running_max, row_sum, accs, unit, meetings)
