"""The sm_90 kernel: its programs' setup, shared memory and warps; the package's docstring shows the way."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from prefix_prefill.kernels.groups import Numbers, Scores
from prefix_prefill.kernels.hopper.config import (
    ROWS,
    Config,
    Keys,
    Loop,
    Pointers,
    Source,
    Strides,
    Tile,
    Window,
)
from prefix_prefill.kernels.hopper.consumers import consume
from prefix_prefill.kernels.hopper.memory import (
    ALL_ROWS,
    BEGIN,
    HEAD_KV,
    HEAD_TILE,
    K_SCALE,
    OUT_SCALE,
    Q_LEN,
    SCALARS,
    SCALES,
    SPLIT,
    TILE,
    V_SCALE,
    VALID,
    Memory,
    Ring,
    as_fp8_tiles,
    as_strips,
    as_tiles,
    barriers,
    edge_barriers,
    fp8_boxes,
    stash,
    tile_boxes,
)
from prefix_prefill.kernels.hopper.producers import convert, load
from prefix_prefill.kernels.schedule import find_tile, key_range, lengths, program_tile, split_range

__all__ = ["Config", "Numbers", "Scores", "Strides", "attend"]


@gluon.jit
def rings(k_boxes, v_boxes, k_tiles, v_tiles, readers: gl.constexpr, C):
    """The rings of keys and of values; so many readers release a stage."""
    k_full = barriers(C)
    v_full = barriers(C)
    k_empty = barriers(C)
    v_empty = barriers(C)
    for i in gl.static_range(C.STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=readers)
        mbarrier.init(v_empty.index(i), count=readers)
    return Ring(k_boxes, k_tiles, k_full, k_empty), Ring(v_boxes, v_tiles, v_full, v_empty)


@gluon.jit
def keys_of(context, length, i_tile, q_len, valid, left, right, i_split, C):
    """The keys of a tile of queries, and one split's share."""
    low, high = key_range(context, length, i_tile, q_len, left, right, C.TOKENS, C.HAS_LEFT, C.HAS_RIGHT)
    high = gl.where(valid, high, low)
    cached_high = high
    if C.NEW_KV:
        cached_high = gl.minimum(high, context)
    cached_first = low // C.BLOCK_N
    cached_tiles = gl.maximum((cached_high + C.BLOCK_N - 1) // C.BLOCK_N - cached_first, 0)
    new_start = cached_tiles * 0
    new_tiles = new_start
    if C.NEW_KV:
        new_first = gl.maximum(low - context, 0) // C.BLOCK_N
        new_tiles = gl.maximum((high - context + C.BLOCK_N - 1) // C.BLOCK_N - new_first, 0)
        new_start = context + (new_first - cached_tiles) * C.BLOCK_N
    from_tile, to_tile = split_range(cached_tiles + new_tiles, i_split, C.SPLITS)
    return Keys(low, cached_high, high, cached_first, cached_tiles, new_start, from_tile, to_tile)


@gluon.jit
def loop_of(keys, C):
    """The main loop over a split's share."""
    start = (keys.cached_first + keys.from_tile) * C.BLOCK_N
    count = keys.to_tile - keys.from_tile
    first_new = keys.cached_tiles - keys.from_tile
    to_new = keys.new_start - keys.cached_first * C.BLOCK_N
    return Loop(keys.low, keys.cached_high, keys.high, start, count, first_new, to_new)


@gluon.jit
def scaled(number, p_scale, offset):
    """A number times the scale that is there, if there are scales."""
    if p_scale is not None:
        number = number * gl.load(p_scale + offset)
    return number


@gluon.jit(
    do_not_specialize=["rows", "num_sequences", "num_blocks", "capacity", "s_table", "num_slots", "left", "right"]
)
def attend(
    d_k_cache, d_v_cache, d_k, d_v,
    p_q, p_table, p_cu, p_seqlens, p_alibi, p_sinks, p_scales, p_out, p_lse,
    rows, num_sequences, num_blocks, capacity, s_table, num_slots, scores, left, right, numbers, config: gl.constexpr,
):  # fmt: skip
    """``portable.attend`` with the caches as TMA descriptors of [blocks, kv heads, tokens, D], and, with NEW_KV, new
    keys and values as ones of [1, kv heads, rows, D]; in boxes of BOX rows and COLUMNS or WIDTH columns.

    ``p_scales`` are k_scale, v_scale and out_scale. An 8-bit cache is scaled by numbers, by tensors with one scale for
    all, or with one for each kv head.
    """
    C: gl.constexpr = config._replace()
    HEAD_TILES: gl.constexpr = (C.GROUP + C.HEADS - 1) // C.HEADS
    pid = gl.program_id(0)
    i_kv, i_slot, i_hb, i_split = program_tile(pid, num_slots, C.HEADS_KV, HEAD_TILES)
    i_n, i_tile, begin, q_len = find_tile(p_cu, i_slot, num_sequences, rows, C.TOKENS)
    context, length, valid = lengths(p_seqlens, i_n, num_sequences, q_len, capacity, C.NEW_KV)
    skipped = False
    if C.SKIP_DECODE:
        skipped = valid & (q_len == 1)
    if (q_len > 0) & (not skipped):
        keys = keys_of(context, length, i_tile, q_len, valid, left, right, i_split, C)
        p_row = p_table + gl.minimum(gl.maximum(i_n, 0), num_sequences - 1).to(gl.int64) * s_table

        q_dtype: gl.constexpr = p_q.dtype.element_ty
        # 8-bit keys fit into float16's range; new keys and values, where these come too, do not all.
        dtype: gl.constexpr = gl.float16 if C.IS_FP8 and not C.NEW_KV else q_dtype
        tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        k_boxes = tile_boxes(dtype, C)
        v_boxes = tile_boxes(dtype, C)
        q_smem = gl.allocate_shared_memory(dtype, [C.CONSUMERS, ROWS, C.BLOCK_D], tile_layout)
        out_smem = q_smem._reinterpret(q_dtype, [C.CONSUMERS, ROWS, C.BLOCK_D], tile_layout)
        positions = gl.allocate_shared_memory(gl.int32, [C.CONSUMERS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        k, v = rings(k_boxes, v_boxes, as_tiles(k_boxes, C), as_tiles(v_boxes, C), C.CONSUMERS, C)
        # One consumer has no use for such barriers, and Triton would give the memory of what nobody uses to what it
        # hands to the partitions: see kernel_reference.testing.ptx.
        zeroed = v.empty
        if C.CONSUMERS > 1:
            zeroed = edge_barriers(C)
        if C.IS_FP8:
            # 8-bit tiles arrive in rings of their own, from which converters fill the 16-bit ones.
            k_fp8_boxes = fp8_boxes(d_k_cache, C)
            v_fp8_boxes = fp8_boxes(d_v_cache, C)
            k_fp8, v_fp8 = rings(
                k_fp8_boxes, v_fp8_boxes, as_fp8_tiles(k_fp8_boxes, C), as_fp8_tiles(v_fp8_boxes, C), 1, C
            )
        scalars = gl.allocate_shared_memory(gl.int32, [SCALARS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        scales = gl.allocate_shared_memory(gl.float32, [SCALES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        stash(scalars, TILE, i_tile)
        stash(scalars, BEGIN, begin)
        stash(scalars, Q_LEN, q_len)
        stash(scalars, VALID, valid)
        stash(scalars, HEAD_KV, i_kv)
        stash(scalars, HEAD_TILE, i_hb)
        stash(scalars, SPLIT, i_split)
        stash(scalars, ALL_ROWS, rows)
        if C.SPLITS == 1:
            stash(scales, OUT_SCALE, scaled(numbers.out_scale, p_scales[2], 0))
        if C.IS_FP8:
            stash(scales, K_SCALE, scaled(numbers.k_scale, p_scales[0], i_kv.to(gl.int64) * numbers.strides.k_scale))
            stash(scales, V_SCALE, scaled(numbers.v_scale, p_scales[1], i_kv.to(gl.int64) * numbers.strides.v_scale))
        fence_async_shared()

        memory = Memory(q_smem, out_smem, as_strips(v_boxes, C), positions, scalars, scales, zeroed)
        pointers = Pointers(p_q, p_alibi, p_sinks, p_out, p_lse)
        # Rows are fewer than 2^31, as tokens always are.
        tile = Tile(i_tile, begin.to(gl.int32), q_len, context, length)
        loop = loop_of(keys, C)
        window = Window(left, right)
        source = Source(p_row, num_blocks, i_kv, rows, tile.begin - context)
        first = i_slot * 0
        # The roles must stand literally in each call. Registers a thread: an SM has 65536, and a warp that only issues
        # loads needs few.
        if C.IS_FP8:
            # Partitions of two warps may give registers back, never ask for more than the 80 that workers wait with:
            # asking is for four warps together, and they would do it two by two.
            CONVERTING: gl.constexpr = 72 if C.NEW_KV else 24
            ATTENDING: gl.constexpr = 184 if C.NEW_KV else 232
            if C.CONSUMERS == 1:
                gl.warp_specialize([
                    (consume, (pointers, memory, k, v, first, tile, loop, window, scores, numbers, C)),
                    (convert, (k_fp8, k, loop, C)),
                    (convert, (v_fp8, v, loop, C)),
                    (load, (d_k_cache, d_k, k_fp8, k, source, loop, C)),
                    (load, (d_v_cache, d_v, v_fp8, v, source, loop, C)),
                ], [2, 2, 1, 1], [CONVERTING, CONVERTING, 24, 24])  # fmt: skip
            else:
                gl.warp_specialize([
                    (consume, (pointers, memory, k, v, first, tile, loop, window, scores, numbers, C)),
                    (consume, (pointers, memory, k, v, first + 1, tile, loop, window, scores, numbers, C)),
                    (convert, (k_fp8, k, loop, C)),
                    (convert, (v_fp8, v, loop, C)),
                    (load, (d_k_cache, d_k, k_fp8, k, source, loop, C)),
                    (load, (d_v_cache, d_v, v_fp8, v, source, loop, C)),
                ], [4, 2, 2, 1, 1], [ATTENDING, CONVERTING, CONVERTING, 24, 24])  # fmt: skip
        elif C.CONSUMERS == 1:
            gl.warp_specialize([
                (consume, (pointers, memory, k, v, first, tile, loop, window, scores, numbers, C)),
                (load, (d_k_cache, d_k, k, k, source, loop, C)),
                (load, (d_v_cache, d_v, v, v, source, loop, C)),
            ], [1, 1], [24, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (consume, (pointers, memory, k, v, first, tile, loop, window, scores, numbers, C)),
                (consume, (pointers, memory, k, v, first + 1, tile, loop, window, scores, numbers, C)),
                (load, (d_k_cache, d_k, k, k, source, loop, C)),
                (load, (d_v_cache, d_v, v, v, source, loop, C)),
            ], [4, 1, 1], [240, 24, 24])  # fmt: skip
