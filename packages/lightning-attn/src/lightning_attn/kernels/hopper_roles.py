"""``hopper.prefill`` by three roles of one program an SM, warp-specialised.

              q, k, v of a chunk
    load   ------------------------>  ring of STAGES
    (1 warp)                            |        |
                                        v        v
    score      scores = k q^T, weighted |        |   seen = S^T q^T
    (4 warps)  ------- one tile ------->|------->|   S^T' = (v entering)^T k + decayed S^T
                                                 |   o^T = seen + v^T scores    ---> out
                                        follow (4 warps)

A state of up to 256 rows stays in the registers of one warpgroup, in pieces of 64 rows: as an operand it never passes
through shared memory, whose traffic would bound the kernel. Scores are ahead of the states, which alone depend on one
another. A chunk's outputs are stored from where its values were.

Of 128 columns two warpgroups follow a state, of 64 each, and share a chunk's scores, q and k.

Several programs may share a segment: each follows the state from where the segment begins, with the same bits, and
makes outputs of its own chunks.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lightning_attn.kernels.decay import base_two_rate, into_float16, seeing, unit_of
from lightning_attn.kernels.hopper_apart import wait_for_call
from lightning_attn.kernels.hopper_follow import follow
from lightning_attn.kernels.hopper_groups import Decays, HeadRows, Pools, Span, Stages, Tiles
from lightning_attn.kernels.hopper_lead import is_shared
from lightning_attn.kernels.hopper_ring import Work, factor_of, is_copied, pieces_of, width_of
from lightning_attn.kernels.hopper_rows import zero_after
from lightning_attn.kernels.hopper_step import scores_registers
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    Snapshots,
    States,
    chunks_before,
    last_first,
    locate,
    program,
    rows_of_head,
    segment_rows,
    shares_of,
    slot_of,
)

WARPS_OF_SCORES = gl.constexpr(4)


@gluon.constexpr_function
def columns_loaded(sizes):
    """Columns of q and of k that TMA loads."""
    rest = sizes.D % sizes.BLOCK_D
    if sizes.D < sizes.BLOCK_D or 2 * rest > sizes.BLOCK_D:
        return sizes.D - rest + sizes.BLOCK_D
    return sizes.D if 2 * rest == sizes.BLOCK_D else sizes.D - rest


@gluon.jit
def of_piece(tensors, p: gl.constexpr, sizes: gl.constexpr):
    """The descriptors of piece p of q and k."""
    if width_of(sizes, p) < sizes.BLOCK_D:
        return tensors[4], tensors[5]
    else:
        return tensors[0], tensors[1]


@gluon.jit
def load(tensors, stages, work, stride: gl.constexpr, sizes: gl.constexpr):
    """Fill the ring with all chunks."""
    if is_shared(sizes):
        for i in range(work.lead):
            load_chunk(tensors, stages, work, i, stride, sizes, WITH_Q=False)
    for i in range(work.lead, work.chunks):
        load_chunk(tensors, stages, work, i, stride, sizes, WITH_Q=True)


@gluon.jit
def load_chunk(tensors, stages, work, i, stride: gl.constexpr, sizes: gl.constexpr, WITH_Q: gl.constexpr):
    """Chunk i, once its stage is free."""
    PIECES: gl.constexpr = pieces_of(sizes) - is_copied(sizes)
    STAGES: gl.constexpr = sizes.STAGES
    d_v = tensors[2]
    stage = i % STAGES
    used = ((i // STAGES) & 1) ^ 1
    row = work.start + i * stride
    full = stages.full.index(stage)
    mbarrier.wait(stages.empty.index(stage), used)
    COLUMNS: gl.constexpr = columns_loaded(sizes)
    mbarrier.expect(full, (2 if WITH_Q else 1) * sizes.CHUNK * COLUMNS * 2)
    for p in gl.static_range(PIECES):
        place = [work.i_box, work.i_h_qk, row, p * sizes.BLOCK_D]
        _, d_k = of_piece(tensors, p, sizes)
        tma.async_copy_global_to_shared(d_k, place, full, stages.k[p].index(stage))
    if WITH_Q:
        for p in gl.static_range(PIECES):
            place = [work.i_box, work.i_h_qk, row, p * sizes.BLOCK_D]
            d_q, _ = of_piece(tensors, p, sizes)
            tma.async_copy_global_to_shared(d_q, place, full, stages.q[p].index(stage))
    full_v = stages.full_v.index(stage)
    mbarrier.wait(stages.empty_v.index(stage), used)
    mbarrier.expect(full_v, d_v.block_type.nbytes)
    v_place = [work.i_box, work.i_h_v, row, work.column]
    tma.async_copy_global_to_shared(d_v, v_place, full_v, stages.v.index(stage))


@gluon.jit
def in_eights(strides, i_n, i_h, RATIO: gl.constexpr):
    """Where a head's rows begin, and their stride: multiples of 8, as TMA wants, which Triton is told so."""
    first = i_n.to(gl.int64) * strides.sequence + (i_h // RATIO).to(gl.int64) * strides.head
    row = strides.row
    if strides.element is not None:
        first = first // 8
        row = row // 8
    return first * 8, row * 8


@gluon.jit
def load_last(pointers, strides, i_n, end, stages, work, stride: gl.constexpr, sizes: gl.constexpr):
    """Copy the last piece of q and k of all chunks, where it has less columns than others, 16 bytes a lane.

    TMA takes as long for a row of 16 bytes as for one of 128. end: of the sequence's rows.
    """
    CHUNK: gl.constexpr = sizes.CHUNK
    STAGES: gl.constexpr = sizes.STAGES
    LAST: gl.constexpr = pieces_of(sizes) - 1
    WIDTH: gl.constexpr = width_of(sizes, LAST)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    q_first, q_stride = in_eights(strides[0], i_n, work.i_h, sizes.RATIO_QK)
    k_first, k_stride = in_eights(strides[1], i_n, work.i_h, sizes.RATIO_QK)
    o_row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    o_d = LAST * sizes.BLOCK_D + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    q_row = o_row.to(gl.int64) if sizes.WIDE else o_row
    q_tile = q_row[:, None] * q_stride + o_d[None, :]
    k_tile = q_row[:, None] * k_stride + o_d[None, :]
    for i in range(work.chunks):
        stage = i % STAGES
        full = stages.full.index(stage)
        row = work.start + i * stride
        m = (o_row < end - row)[:, None] & (o_d < sizes.D)[None, :]
        mbarrier.wait(stages.empty.index(stage), ((i // STAGES) & 1) ^ 1)
        p_row = pointers[1] + k_first + row.to(gl.int64) * k_stride
        async_copy.async_copy_global_to_shared(stages.k[LAST].index(stage), p_row + k_tile, m)
        p_row = pointers[0] + q_first + row.to(gl.int64) * q_stride
        async_copy.async_copy_global_to_shared(stages.q[LAST].index(stage), p_row + q_tile, m & (i >= work.lead))
        # Counts its own arrivals, one a lane, which follow the copies; the stage waits for one more.
        async_copy.mbarrier_arrive(full)
        tl.debug_barrier()
        mbarrier.arrive(full)


@gluon.jit
def score(stages, tiles, work, decays, short, rest, sizes: gl.constexpr):
    """Make the weighted scores of its own chunks, [keys, queries], in float16 [queries, keys], an operand.

    Rows of the short chunk that are another sequence's are zeroed before.
    """
    CHUNK: gl.constexpr = sizes.CHUNK
    STAGES: gl.constexpr = sizes.STAGES
    PIECES: gl.constexpr = pieces_of(sizes)
    L_SCORES: gl.constexpr = scores_registers(CHUNK, WARPS_OF_SCORES)
    dtype: gl.constexpr = tiles.scores.dtype
    FP16: gl.constexpr = dtype == gl.float16
    rate = base_two_rate(decays.p_slopes, work.i_h)
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(0, L_SCORES))
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, L_SCORES))
    distance = o_i[None, :] - o_j[:, None]
    # In float16 rows are queries, and columns keys.
    if sizes.REVERSED != FP16:
        distance = -distance
    b_within = gl.where(distance >= 0, gl.exp2(-rate * gl.maximum(distance, 0).to(gl.float32)) * decays.scale, 0.0)
    b_zero = gl.zeros([CHUNK, CHUNK], gl.float32, L_SCORES)
    if FP16:
        unit = unit_of(decays.scale) if sizes.REVERSED else 1.0
        b_seeing = seeing(rate, o_j, CHUNK, decays.scale, sizes.REVERSED) * unit
        b_seeing_short = seeing(rate, o_j, rest, decays.scale, sizes.REVERSED) * unit
    if is_shared(sizes):
        # Barriers of the ring may have gone round since.
        mbarrier.wait(tiles.led.index(0), 0, pred=work.chunks > 0)
    for i in range(work.lead, work.chunks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(stages.full.index(stage), phase)
        if is_copied(sizes):
            # What lanes copied, WGMMA reads by another proxy.
            fence_async_shared()
        if i == short:
            mbarrier.wait(stages.full_v.index(stage), phase)
            for p in gl.static_range(PIECES):
                zero_after(factor_of(stages.k, stage, p, sizes), rest, CHUNK, width_of(sizes, p), WARPS_OF_SCORES)
            v_tile = stages.v.index(stage).reshape([CHUNK, sizes.BLOCK_E])
            zero_after(v_tile, rest, CHUNK, sizes.BLOCK_E, WARPS_OF_SCORES)
            fence_async_shared()
            tl.debug_barrier()
        b_scores = b_zero
        for p in gl.static_range(PIECES):
            k_tile = factor_of(stages.k, stage, p, sizes)
            q_tile = factor_of(stages.q, stage, p, sizes)
            if FP16:
                b_scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), b_scores, use_acc=p > 0, is_async=True)
            else:
                b_scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), b_scores, use_acc=p > 0, is_async=True)
        b_scores = warpgroup_mma_wait(0, deps=[b_scores]) * b_within
        if FP16:
            b_up, b_down = into_float16(gl.max(gl.abs(b_scores), axis=1))
            b_scores = b_scores * b_up[:, None]
        # Those of the chunk before have been multiplied once its stage is free.
        mbarrier.wait(stages.empty.index((i + STAGES - 1) % STAGES), ((i - 1) // STAGES) & 1, pred=i > 0)
        if FP16:
            tiles.up.store(gl.where(i == short, b_seeing_short, b_seeing) * b_up)
            tiles.down.store(b_down)
            tiles.scores.permute((1, 0)).store(b_scores.to(dtype))
        else:
            tiles.scores.store(b_scores.to(dtype))
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(tiles.ready.index(0))


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots", "num_snapshots"])
def prefill(
    d_q, d_k, d_v, d_o, d_q_last, d_k_last, pointers, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, p_carried,
    p_positions, p_snapshot_slots, rows, num_sequences, num_slots, num_snapshots, scale, strides, sizes: gl.constexpr,
):  # fmt: skip
    """``hopper.prefill``, in pieces of 64 columns of q and k; no segments pass their states on.

    d_q_last, d_k_last: of boxes of half as many columns, where the last piece has as many, else None. pointers: to
    q, k, v and o.
    """
    p_q, p_k, p_v, p_o = pointers
    CHUNK: gl.constexpr = sizes.CHUNK
    PIECES: gl.constexpr = pieces_of(sizes)
    SEGMENT: gl.constexpr = sizes.SEGMENT
    STAGES: gl.constexpr = sizes.STAGES
    TILES: gl.constexpr = (sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    snapshots = Snapshots(p_positions, p_snapshot_slots, num_snapshots)
    pools = Pools(
        States(p_initial, strides.initial), States(p_final, strides.final), States(p_carried, strides.carried)
    )
    wait_for_call(batch, sizes)
    SHARED: gl.constexpr = is_shared(sizes)
    i_share = 0
    shares = 1
    if SHARED:
        shares = shares_of(batch, sizes.H * TILES, SEGMENT)
    i_e, i_h, i_w = program(sizes.H, TILES, SEGMENT > 0 and p_cu is None)
    if p_cu is not None:
        i_w = last_first(i_w, gl.num_programs(0) // (sizes.H * TILES), shares)
    if SHARED:
        i_share = i_w % shares
        i_w = i_w // shares
    i_n, i_segment, first, last = locate(batch, i_w, SEGMENT)
    # TMA coordinates have 32 bits.
    first = first.to(gl.int32)
    last = last.to(gl.int32)
    begin, end = segment_rows(first, last, i_segment, SEGMENT)
    length = last - first
    slot = slot_of(batch, i_n)
    # Before the first `if`, behind which Triton 3.6 loses strides of 1.
    o = rows_of_head(p_o, strides.o, i_n, i_h.to(gl.int64), 1)
    q = o
    k = o
    v = o
    i_first = i_n if p_cu is None else i_n * 0
    if p_q is not None:
        q = rows_of_head(p_q, strides.q, i_first, i_h.to(gl.int64), sizes.RATIO_QK)
        k = rows_of_head(p_k, strides.k, i_first, i_h.to(gl.int64), sizes.RATIO_QK)
    if p_v is not None:
        v = rows_of_head(p_v, strides.v, i_first, i_h.to(gl.int64), sizes.RATIO_V)
    is_token = (length == 1) & (slot >= 0) & (p_v is not None)
    rest = (end - begin) % CHUNK
    chunks = gl.where(is_token | (slot < 0), 0, (end - begin + CHUNK - 1) // CHUNK)
    lead = 0
    # Chunk i begins at start + i * stride. The short one is the sequence's last, in either direction.
    stride: gl.constexpr = -CHUNK if sizes.REVERSED else CHUNK
    start = begin
    short = gl.where(rest > 0, chunks - 1, -1)
    if SHARED:
        of_segment = (end - begin + CHUNK - 1) // CHUNK
        if p_cu is not None:
            if p_initial is not None:
                # Its last program stores a state in the slot that the others would begin from. Of a longer sequence
                # all segments begin from the workspace.
                shares = gl.where(length <= SEGMENT, 1, shares)
        lead = chunks_before(i_share, shares, of_segment)
        upto = chunks_before(i_share + 1, shares, of_segment)
        short = gl.where(upto == of_segment, short, -1)
        end = gl.minimum(end, begin + upto * CHUNK)
        begin += lead * CHUNK
        is_token = is_token & (upto > lead)
        chunks = gl.where((chunks > 0) & (upto > lead), upto, 0)
        lead = gl.where(chunks > 0, lead, 0)
    if sizes.REVERSED:
        start += (chunks - 1) * CHUNK
        short = gl.where(rest > 0, 0, -1)
    # The packed rows of a ragged batch are one box.
    i_box = i_n.to(gl.int32) if p_cu is None else 0
    work = Work(
        i_box, i_h // sizes.RATIO_QK, i_h // sizes.RATIO_V, i_h, i_e * sizes.BLOCK_E, start, chunks, lead=lead
    )  # fmt: skip
    span = Span(i_n, i_segment, first, length, begin, end, slot, is_token, short, rest)
    tensors = (d_q, d_k, d_v, d_o, d_q_last, d_k_last)
    dtype: gl.constexpr = d_q.dtype
    q_stages = ()
    k_stages = ()
    for i in gl.static_range(PIECES - is_copied(sizes)):
        d_piece, _ = of_piece(tensors, i, sizes)
        q_stages = q_stages + (gl.allocate_shared_memory(dtype, [STAGES] + d_piece.block_type.shape, d_piece.layout),)
        k_stages = k_stages + (gl.allocate_shared_memory(dtype, [STAGES] + d_piece.block_type.shape, d_piece.layout),)
    if is_copied(sizes):
        WIDTH: gl.constexpr = width_of(sizes, PIECES - 1)
        narrow: gl.constexpr = gl.NVMMASharedLayout(2 * WIDTH, 16, rank=2)
        q_stages = q_stages + (gl.allocate_shared_memory(dtype, [STAGES, CHUNK, WIDTH], narrow),)
        k_stages = k_stages + (gl.allocate_shared_memory(dtype, [STAGES, CHUNK, WIDTH], narrow),)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES] + d_v.block_type.shape, d_v.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if is_copied(sizes) else 1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(empty_v.index(i), count=1)
    mbarrier.init(ready.index(0), count=1)
    led = None
    if SHARED:
        led = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(led.index(0), count=1)
    scores = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2))
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    seeing = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
    entering = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
    up = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
    down = gl.allocate_shared_memory(gl.float32, [CHUNK], row_layout)
    fence_async_shared()
    stages = Stages(q_stages, k_stages, v_stages, full, full_v, empty, empty_v)
    tiles = Tiles(scores, ready, up, down, seeing, entering, led)
    decays = Decays(p_slopes, scale)
    of_head = HeadRows(q, k, v, o)
    # Registers of a thread: an SM has 65536. What these leave, the first has.
    OF_SCORES: gl.constexpr = 208 if sizes.WARPS == 4 else 104
    if is_copied(sizes):
        gl.warp_specialize([
            (follow, (tensors, stages, tiles, of_head, work, span, batch, pools, snapshots, decays, sizes,
                      p_v is not None)),
            (score, (stages, tiles, work, decays, short, rest, sizes)),
            (load, (tensors, stages, work, stride, sizes)),
            (load_last, ((p_q, p_k), (strides.q, strides.k), i_first, last, stages, work, stride, sizes)),
        ], [WARPS_OF_SCORES, 1, 1], [OF_SCORES, 40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (follow, (tensors, stages, tiles, of_head, work, span, batch, pools, snapshots, decays, sizes,
                      p_v is not None)),
            (score, (stages, tiles, work, decays, short, rest, sizes)),
            (load, (tensors, stages, work, stride, sizes)),
        ], [WARPS_OF_SCORES, 1], [OF_SCORES, 40])  # fmt: skip
