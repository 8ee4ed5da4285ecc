"""Long segments among a packed batch's short sequences, on sm_90: several programs share each, with the same bits.

Rows of one token want many small programs, and a prompt among them, which only the device can tell, has few of these.
Ahead of the grid's programs, one a segment, head and tile, come some more, which are divided among the long segments:
those of LONG rows, of twice or of four times as many, of the first that leave each one program more at least. A program
counts them, and ends if it is nobody's. The grid's program makes the outputs of a segment's last chunks, the others
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
from lightning_attn.kernels.hopper_apart import TOGETHER, nth_of, numbers, wait_for_ahead
from lightning_attn.kernels.hopper_ring import Ring, state_layout
from lightning_attn.kernels.hopper_rows import load_state, zero_state
from lightning_attn.kernels.schedule import bounds, carried_slot, has_initial, sequence_of, weight_before

# Programs besides of a segment: ``weight_before`` has as many weights, and the grid's own.
MOST_OTHERS = gl.constexpr(3)


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
def long_from(batch, first, least, sizes: gl.constexpr):
    """How many segments of ``least`` rows each of the sequences from ``first`` on has; too many where bounds fall.

    Of a segment that such bounds give there may be no program in the grid: nobody would count the others off.
    """
    o_n = first + numbers(sizes)
    m = o_n < batch.count.sequences
    begin = gl.load(batch.p_cu + o_n, mask=m, other=0).to(gl.int64)
    after = gl.load(batch.p_cu + o_n + 1, mask=m, other=0).to(gl.int64)
    falls = after < begin
    # Clamped as ``bounds`` does.
    begin = gl.minimum(gl.maximum(begin, 0), batch.count.rows)
    end = gl.minimum(gl.maximum(after, begin), batch.count.rows)
    length = (end - begin).to(gl.int32)
    if sizes.SEGMENT:
        whole = gl.where(least <= sizes.SEGMENT, length // sizes.SEGMENT, 0)
        segments = whole + gl.where(length % sizes.SEGMENT >= least, 1, 0)
    else:
        segments = gl.where(length >= least, 1, 0)
    return gl.where(falls, 4096, segments)


@gluon.jit
def others_of(batch, more, sizes: gl.constexpr):
    """Rows of a long segment, how many there are, and how many programs each one's head and tile has besides.

    more: all programs besides.
    """
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    zero = gl.to_tensor(0).to(gl.int32)
    one = zero
    two = zero
    four = zero
    for first in range(0, batch.count.sequences, TOGETHER):
        one += gl.sum(long_from(batch, first, sizes.LONG, sizes), axis=0)
        two += gl.sum(long_from(batch, first, 2 * sizes.LONG, sizes), axis=0)
        four += gl.sum(long_from(batch, first, 4 * sizes.LONG, sizes), axis=0)
    each = more // (sizes.H * TILES) + 1
    least = zero + gl.where(2 * one <= each, 1, gl.where(2 * two <= each, 2, 4)) * sizes.LONG
    segments = gl.where(2 * one <= each, one, gl.where(2 * two <= each, two, four))
    return least, segments, gl.minimum(gl.maximum(each // gl.maximum(segments, 1) - 1, 0), MOST_OTHERS)


@gluon.jit
def locate_share(batch, i_item, items, sizes: gl.constexpr):
    """Tile, head and sequence of the i-th item, its segment or, of the grid's own, its index; and which of a long
    segment's others it is, or -1.

    Nothing is loaded behind the sequence's number, so that its bounds, slot and mark are loaded together: of rows of
    one token each wait shows.
    """
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    PROGRAMS: gl.constexpr = sizes.H * TILES
    more = items - own_items(batch, sizes)
    i = i_item
    i_share = i * 0 - 1
    i_n = i * 0
    i_segment = i * 0
    if i < more:
        least, segments, others = others_of(batch, more, sizes)
        i_share = i * 0
        # Nobody's: the rows of no sequence.
        i_n += batch.count.sequences
        i_segment += 1
        if i < segments * others * PROGRAMS:
            i_share = (i // PROGRAMS) % others
            i_n, i_segment = long_segment(batch, i // PROGRAMS // others, least, sizes)
    else:
        # Prompts come last, as in every ragged batch's grid.
        i = items - 1 - i
        i_segment = i // PROGRAMS
        i_n = i_segment
        if sizes.SEGMENT:
            i_n = sequence_of(batch, i_segment, sizes.SEGMENT)
    return i % TILES, (i // TILES) % sizes.H, i_n, i_segment, i_share


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
def long_segment(batch, number, least, sizes: gl.constexpr):
    """Sequence and segment that has a long segment of this number; there is one."""
    first = gl.to_tensor(0).to(gl.int32)
    passed = gl.to_tensor(0).to(gl.int32)
    segments = long_from(batch, 0, least, sizes)
    count = gl.sum(segments, axis=0)
    while passed + count <= number:
        passed += count
        first += TOGETHER
        segments = long_from(batch, first, least, sizes)
        count = gl.sum(segments, axis=0)
    i_n, passed = nth_of(segments, number, passed, sizes)
    return first + i_n, number - passed


@gluon.jit
def shares_of_segment(batch, i_n, begin, end, i_share, items, sizes: gl.constexpr):
    """Which of how many programs that share this segment an item is; the grid's own is the last, or the only one.

    i_share: of ``locate_share``. Nobody's is of none.
    """
    is_own = i_share < 0
    shares = i_share * 0 + gl.where(is_own, 1, 0)
    i_share = gl.maximum(i_share, 0)
    more = items - own_items(batch, sizes)
    if (end - begin >= sizes.LONG) & (i_n < batch.count.sequences) & (more > 0):
        least, _, others = others_of(batch, more, sizes)
        if end - begin >= least:
            shares = others + 1
            i_share = gl.where(is_own, others, i_share)
    return i_share, shares


@gluon.jit
def own_chunks(i_share, shares, chunks):
    """Chunks of a segment before those of one of its shares; ``schedule.chunks_before``, of any number."""
    return chunks * weight_before(i_share) // weight_before(shares)


@gluon.jit
def load_lead(tensors, ring, work, i, sizes: gl.constexpr):
    """Issue the loads of chunk i of k and v, if there is one."""
    d_k = tensors.k
    d_v = tensors.v
    stage = i % lead_stages(sizes)
    row = work.start + i * sizes.CHUNK
    pred = i < work.chunks
    mbarrier.expect(ring.full_k.index(stage), d_k.block_type.nbytes, pred=pred)
    mbarrier.expect(ring.full_v.index(stage), d_v.block_type.nbytes, pred=pred)
    of_k, of_v = [work.i_box, work.i_h_qk, row, 0], [work.i_box, work.i_h_v, row, work.column]
    tma.async_copy_global_to_shared(d_k, of_k, ring.full_k.index(stage), ring.k.index(stage), pred=pred)
    tma.async_copy_global_to_shared(d_v, of_v, ring.full_v.index(stage), ring.v.index(stage), pred=pred)


@gluon.jit
def lead_values(ring, i, chunks, b_entering, sizes: gl.constexpr):
    """The weighted values of chunk i, an operand; of one that is not there, whatever the ring has."""
    L: gl.constexpr = lead_stages(sizes)
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout(sizes), 2)
    mbarrier.wait(ring.full_v.index(i % L), (i // L) & 1, pred=i < chunks)
    v_tile = ring.v.index(i % L).reshape([sizes.CHUNK, sizes.BLOCK_E])
    return (v_tile.permute((1, 0)).load(operand).to(gl.float32) * b_entering[None, :]).to(v_tile.dtype)


@gluon.jit
def lead_up(tensors, work, S, rate, decay, scale, sizes: gl.constexpr):
    """The state behind the work's chunks, all whole, with the bits that ``hopper_step.step`` gives it.

    The memory of its ring is another one's afterwards.
    """
    L: gl.constexpr = lead_stages(sizes)
    operand: gl.constexpr = gl.DotOperandLayout(0, state_layout(sizes), 2)
    d_k = tensors.k
    d_v = tensors.v
    k_stages = gl.allocate_shared_memory(d_k.dtype, [L] + d_k.block_type.shape, d_k.layout)
    v_stages = gl.allocate_shared_memory(d_v.dtype, [L] + d_v.block_type.shape, d_v.layout)
    full_k = gl.allocate_shared_memory(gl.int64, [L, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [L, 1], mbarrier.MBarrierLayout())
    ring = Ring(None, k_stages, v_stages, None, full_k, full_v)
    for i in gl.static_range(L):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
    fence_async_shared()
    tl.debug_barrier()
    for i in gl.static_range(L - 1):
        load_lead(tensors, ring, work, i, sizes)
    b_entering = entering(rate, gl.arange(0, sizes.CHUNK, gl.SliceLayout(0, operand)), sizes.CHUNK, scale, False)
    b_v = lead_values(ring, 0, work.chunks, b_entering, sizes)
    for i in range(work.chunks):
        # Past the barrier at a chunk's end no warp is still in it.
        load_lead(tensors, ring, work, i + L - 1, sizes)
        mbarrier.wait(full_k.index(i % L), (i // L) & 1)
        k_tile = k_stages.index(i % L).reshape([sizes.CHUNK, sizes.BLOCK_D])
        issued = warpgroup_mma(b_v, k_tile, S * decay, is_async=True)
        b_v = lead_values(ring, i + 1, work.chunks, b_entering, sizes)
        S = warpgroup_mma_wait(0, deps=[issued])
        tl.debug_barrier()
    for i in gl.static_range(L):
        mbarrier.invalidate(full_k.index(i))
        mbarrier.invalidate(full_v.index(i))
    fence_async_shared()
    tl.debug_barrier()
    return S


@gluon.jit
def state_before_share(tensors, pools, batch, span, work, decays, sizes: gl.constexpr):
    """The state behind the chunks of a segment that are other programs' work, or zeros where there are none."""
    L_S: gl.constexpr = state_layout(sizes)
    S = zero_state(sizes)
    if work.chunks > 0:
        o_d = gl.arange(0, sizes.BLOCK_D, gl.SliceLayout(0, L_S))
        o_e = work.column + gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(1, L_S))
        if sizes.DEPENDENT_LAUNCH:
            wait_for_ahead(batch, sizes)
        begins_anew = True
        if sizes.SEGMENT:
            begins_anew = span.length <= sizes.SEGMENT
            if not begins_anew:
                i_state = carried_slot(batch, span.i_n, span.first, sizes.SEGMENT) + span.i_segment
                S = load_state(pools.carried, i_state.to(gl.int64), work.i_h, o_d, o_e, sizes)
        if pools.initial.p is not None:
            if has_initial(batch, span.i_n) and begins_anew:
                S = load_state(pools.initial, span.slot, work.i_h, o_d, o_e, sizes)
        rate = base_two_rate(decays.p_slopes, work.i_h)
        decay = decay_over(rate, rest_of_rate(decays.p_slopes, work.i_h, rate), gl.to_tensor(sizes.CHUNK))
        S = (lead_up(tensors, work, S[0], rate, decay, decays.scale, sizes),)
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
