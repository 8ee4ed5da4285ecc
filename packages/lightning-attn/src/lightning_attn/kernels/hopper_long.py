"""Long segments among a packed batch's short sequences, on sm_90: several programs share each, with the same bits.

Rows of one token want many small programs, and a prompt among them, which only the device can tell, has few of these.
Ahead of the grid's programs, one a segment, head and tile, come as many as LONG segments may have besides. Those of a
segment are of a number: how many times LONG rows lie before it. No two segments of as many rows begin within the same
LONG rows; who has nobody's number ends. The grid's program makes the outputs of a segment's last chunks, the others
those before, in order, and each follows the state up to its own (see ``schedule.chunks_before``).

A sequence of one segment may begin from a slot of the pool and ends in it: the grid's program, which stores the state,
waits for the others, which come before it in the grid and so have begun. They are counted for each slot, head and tile,
from zero and to zero again.
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

from lightning_attn.kernels.decay import base_two_rate, decay_over, entering, rest_of_rate
from lightning_attn.kernels.hopper_apart import TOGETHER, numbers, wait_for_ahead
from lightning_attn.kernels.hopper_ring import state_layout
from lightning_attn.kernels.hopper_rows import load_state, zero_state
from lightning_attn.kernels.schedule import bounds, carried_slot, has_initial, sequence_of, weight_before


@gluon.constexpr_function
def lead_stages(sizes):
    """Chunks of keys and values in the memory that two stages of a chunk and what is beside them take."""
    return 4 if sizes.BLOCK_D == 128 else 6


@gluon.jit
def own_items(batch, sizes: gl.constexpr):
    """How many there are of a packed batch's segments, one a head and tile."""
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    segments = batch.count.sequences + 1
    if sizes.SEGMENT:
        segments += batch.count.rows // sizes.SEGMENT
    return sizes.H * TILES * segments


@gluon.jit
def others_of(batch, more, sizes: gl.constexpr):
    """How many programs a long segment's head and tile has besides, of so many in all."""
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    return more // (sizes.H * TILES * gl.maximum(batch.count.rows // sizes.LONG, 1))


@gluon.jit
def locate_share(batch, i_item, items, sizes: gl.constexpr):
    """Tile, head and sequence of the i-th item, its segment or, of the grid's own, its index; and which of a long
    segment's others it is, or -1, and of which number.

    Nothing is loaded behind the sequence's number, so that its bounds, slot and mark are loaded together: of rows of
    one token each wait shows.
    """
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    PROGRAMS: gl.constexpr = sizes.H * TILES
    more = items - own_items(batch, sizes)
    i = i_item
    i_share = i * 0 - 1
    number = i * 0
    i_n = i * 0
    i_segment = i * 0
    if i < more:
        others = others_of(batch, more, sizes)
        i_share = (i // PROGRAMS) % others
        number = i // PROGRAMS // others
        i_n, i_segment = long_segment(batch, number, sizes)
    else:
        # Prompts come last, as in every ragged batch's grid.
        i = items - 1 - i
        i_segment = i // PROGRAMS
        i_n = i_segment
        if sizes.SEGMENT:
            i_n = sequence_of(batch, i_segment, sizes.SEGMENT)
    return i % TILES, (i // TILES) % sizes.H, i_n, i_segment, i_share, number


@gluon.jit
def rows_of_sequence(batch, i_n, i_segment, i_share, sizes: gl.constexpr):
    """The segment, of what ``locate_share`` gives, and the sequence's rows; none where there is no such segment."""
    first, last = bounds(batch, i_n)
    if sizes.SEGMENT:
        i_own = i_segment - (first // sizes.SEGMENT + i_n).to(gl.int32)
    else:
        i_own = i_segment * 0
    i_segment = gl.where(i_share < 0, i_own, i_segment)
    return gl.maximum(i_segment, 0), first, gl.where(i_segment < 0, first, last)


@gluon.jit
def long_segment(batch, number, sizes: gl.constexpr):
    """Sequence and segment that has a long segment of this number, if any has; where bounds fall, a segment of -1.

    Of a segment that they give there may be no program in the grid: nobody would count the others off.
    """
    # Which it has, as it begins within LONG rows up to this one.
    row = (number + 1) * sizes.LONG - 1
    begun = gl.to_tensor(0).to(gl.int32)
    first = gl.to_tensor(0).to(gl.int32)
    falls = gl.to_tensor(0).to(gl.int32)
    for i in range(0, batch.count.sequences, TOGETHER):
        o_n = i + numbers(sizes)
        mask = o_n < batch.count.sequences
        begin = gl.load(batch.p_cu + o_n, mask=mask, other=2147483647)
        after = gl.load(batch.p_cu + o_n + 1, mask=mask, other=2147483647)
        falls += gl.sum((after < begin).to(gl.int32), axis=0)
        begin = begin.to(gl.int32)
        begun += gl.sum((begin <= row).to(gl.int32), axis=0)
        # Not loaded again: each load would wait for the one before.
        first = gl.maximum(first, gl.max(gl.where(begin <= row, begin, 0), axis=0))
    i_segment = begun * 0
    if sizes.SEGMENT:
        i_segment = (row - first) // sizes.SEGMENT
    return gl.maximum(begun - 1, 0), gl.where(falls > 0, -1, i_segment)


@gluon.jit
def shares_of_segment(batch, i_n, i_segment, begin, end, share, items, sizes: gl.constexpr):
    """Which of how many programs that share this segment an item is; the grid's own is the last, or the only one.

    share: of ``locate_share``. One of the others whose number is nobody's is of none.
    """
    i_share, number = share
    is_own = i_share < 0
    is_long = (end - begin >= sizes.LONG) & (i_n < batch.count.sequences)
    shares = i_share * 0 + gl.where(is_own, 1, 0)
    i_share = gl.maximum(i_share, 0)
    if is_long:
        if is_own:
            # As the others find it: where bounds fall, none is long.
            number = (begin // sizes.LONG).to(gl.int32)
            i_other, i_its = long_segment(batch, number, sizes)
            is_long = (i_other == i_n) & (i_its == i_segment)
        if is_long & (begin // sizes.LONG == number):
            others = others_of(batch, items - own_items(batch, sizes), sizes)
            shares = others + 1
            i_share = gl.where(is_own, others, i_share)
    return i_share, shares


@gluon.jit
def own_chunks(i_share, shares, chunks):
    """Chunks of a segment before those of one of its shares; ``schedule.chunks_before``, of any number."""
    return chunks * weight_before(i_share) // weight_before(shares)


@gluon.jit
def load_lead(tensors, place, stages, i, chunks, sizes: gl.constexpr):
    """Issue the loads of chunk i of k and v, if there is one."""
    _, d_k, d_v, _ = tensors
    k_stages, v_stages, full_k, full_v = stages
    i_box, i_h_qk, i_h_v, column, start = place
    stage = i % lead_stages(sizes)
    row = start + i * sizes.CHUNK
    pred = i < chunks
    mbarrier.expect(full_k.index(stage), d_k.block_type.nbytes, pred=pred)
    mbarrier.expect(full_v.index(stage), d_v.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(d_k, [i_box, i_h_qk, row, 0], full_k.index(stage), k_stages.index(stage), pred=pred)
    tma.async_copy_global_to_shared(
        d_v, [i_box, i_h_v, row, column], full_v.index(stage), v_stages.index(stage), pred=pred
    )


@gluon.jit
def lead_values(stages, i, chunks, b_entering, sizes: gl.constexpr):
    """The weighted values of chunk i, an operand; of one that is not there, whatever the ring has."""
    L: gl.constexpr = lead_stages(sizes)
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout(sizes), 2)
    _, v_stages, _, full_v = stages
    mbarrier.wait(full_v.index(i % L), (i // L) & 1, pred=i < chunks)
    v_tile = v_stages.index(i % L).reshape([sizes.CHUNK, sizes.BLOCK_E])
    return (v_tile.permute((1, 0)).load(operand).to(gl.float32) * b_entering[None, :]).to(v_tile.dtype)


@gluon.jit
def lead_up(tensors, place, chunks, S, rate, decay, scale, sizes: gl.constexpr):
    """The state behind so many whole chunks, with the bits that ``hopper_step.step`` gives it.

    place: of TMA coordinates, the box, the heads of k and of v, the column and the first row. The memory of its ring
    is another one's afterwards.
    """
    L: gl.constexpr = lead_stages(sizes)
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout(sizes), 2)
    _, d_k, d_v, _ = tensors
    k_stages = gl.allocate_shared_memory(d_k.dtype, [L] + d_k.block_type.shape, d_k.layout)
    v_stages = gl.allocate_shared_memory(d_v.dtype, [L] + d_v.block_type.shape, d_v.layout)
    full_k = gl.allocate_shared_memory(gl.int64, [L, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [L, 1], mbarrier.MBarrierLayout())
    stages = (k_stages, v_stages, full_k, full_v)
    for i in gl.static_range(L):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
    fence_async_shared()
    tl.debug_barrier()
    for i in gl.static_range(L - 1):
        load_lead(tensors, place, stages, i, chunks, sizes)
    b_entering = entering(rate, gl.arange(0, sizes.CHUNK, gl.SliceLayout(0, operand)), sizes.CHUNK, scale, False)
    b_v = lead_values(stages, 0, chunks, b_entering, sizes)
    for i in range(chunks):
        # Past the barrier at a chunk's end no warp is still in it.
        load_lead(tensors, place, stages, i + L - 1, chunks, sizes)
        mbarrier.wait(full_k.index(i % L), (i // L) & 1)
        k_tile = k_stages.index(i % L).reshape([sizes.CHUNK, sizes.BLOCK_D])
        issued = warpgroup_mma(b_v, k_tile, S * decay, is_async=True)
        b_v = lead_values(stages, i + 1, chunks, b_entering, sizes)
        S = warpgroup_mma_wait(0, deps=[issued])
        tl.debug_barrier()
    for i in gl.static_range(L):
        mbarrier.invalidate(full_k.index(i))
        mbarrier.invalidate(full_v.index(i))
    fence_async_shared()
    tl.debug_barrier()
    return S


@gluon.jit
def state_before_share(tensors, pools, batch, of, place, lead, decays, sizes: gl.constexpr):
    """The state behind so many chunks of a segment, or zeros where there are none.

    of: the sequence, segment, its first row, its length, its slot and the head. place: see ``lead_up``.
    """
    initial, _, carried = pools
    p_slopes, scale = decays
    i_n, i_segment, first, length, slot, i_h = of
    L_S: gl.constexpr = state_layout(sizes)
    S = zero_state(sizes)
    if lead > 0:
        o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = place[3] + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(1, L_S))
        if sizes.DEPENDENT_LAUNCH:
            wait_for_ahead(batch, sizes)
        begins_anew = True
        if sizes.SEGMENT:
            begins_anew = length <= sizes.SEGMENT
            if not begins_anew:
                i_state = carried_slot(batch, i_n, first, sizes.SEGMENT) + i_segment
                S = load_state(carried, i_state.to(gl.int64), i_h, o_d, o_e, sizes)
        if initial.p is not None:
            if has_initial(batch, i_n) and begins_anew:
                S = load_state(initial, slot, i_h, o_d, o_e, sizes)
        rate = base_two_rate(p_slopes, i_h)
        decay = decay_over(rate, rest_of_rate(p_slopes, i_h, rate), gl.to_tensor(sizes.CHUNK))
        S = (lead_up(tensors, place, lead, S[0], rate, decay, scale, sizes),)
    return S


@gluon.jit
def end_share(p_count):
    """Count this program among those that have read the state before a segment."""
    tl.debug_barrier()
    gl.atomic_add(p_count, 1)


@gluon.jit
def await_shares(p_count, others):
    """Wait until so many have been counted, and count them off again."""
    counted = gl.atomic_add(p_count, 0)
    while counted < others:
        counted = gl.atomic_add(p_count, 0)
    # Of a slot that is several sequences' each takes as many off as it waits for.
    gl.atomic_add(p_count, -others)
    tl.debug_barrier()
