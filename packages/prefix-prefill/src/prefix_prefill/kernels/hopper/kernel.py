"""The sm_90 kernel: its programs' setup, shared memory and warps; the package's docstring shows the way."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from prefix_prefill.kernels.batch import Batch
from prefix_prefill.kernels.groups import CONSTANT_FIELDS, Numbers, Scores
from prefix_prefill.kernels.hopper.config import (
    ROWS,
    STRIP,
    Config,
    Pointers,
    Sizes,
    Strides,
    Tokens,
    begin_with,
    has_light_consumers,
    is_gathered,
)
from prefix_prefill.kernels.hopper.consumers import consume
from prefix_prefill.kernels.hopper.gather import pool_of
from prefix_prefill.kernels.hopper.items import schedule, table_of
from prefix_prefill.kernels.hopper.memory import (
    Memory,
    Ring,
    as_dtype,
    as_strips,
    as_tiles,
    barriers,
    boxes_of,
    meeting_barrier,
    packed_ring,
    query_tiles,
    scales_of_tokens,
)
from prefix_prefill.kernels.hopper.producers import convert_keys, convert_values, load_keys, load_values

__all__ = ["Config", "Numbers", "Scores", "Strides", "attend"]


@gluon.jit
def ring(dtype: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr, readers: gl.constexpr, C):
    """A ring of keys or of values, so many in a stage, which so many readers release."""
    boxes = boxes_of(dtype, TILES, STAGES * KEYS, C)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return Ring(boxes, as_tiles(boxes, TILES, STAGES, KEYS), full, empty)


@gluon.jit(
    do_not_specialize=[
        "rows", "num_sequences", "num_blocks", "capacity", "s_table", "s_lse_head", "s_lse_token", "num_splits", "left",
        "right",
    ]
)  # fmt: skip
def attend(
    d_k_cache, d_v_cache, d_k, d_v, d_k_cache_tail, d_v_cache_tail, d_k_tail, d_v_tail,
    p_rows, p_batch, p_per_head, p_scales, p_parts,
    rows, num_sequences, num_blocks, capacity, s_table, s_lse_head, s_lse_token, num_splits, left, right,
    numbers, config: gl.constexpr,
):  # fmt: skip
    """``portable.attend`` with the caches as TMA descriptors of [blocks, kv heads, tokens, D], and, with NEW_KV, new
    keys and values as ones of [1, kv heads, rows, D]; in boxes of BOX rows and 128 bytes, or, where heads are narrower,
    the whole row. What heads have beyond a multiple of that comes by descriptors of narrower boxes, ``_tail``, or None.

    ``p_rows`` are q, out and lse; ``p_batch`` block table, cu_seqlens_q, seqlens_k and draft_mask, and the caches where
    they are gathered; ``p_per_head`` slopes and sinks; ``p_scales`` k_scale, v_scale and out_scale; ``numbers`` Scores
    and Numbers. An 8-bit cache is scaled by numbers, or by tensors with one scale for all, for each kv head, or for
    each token and head.
    """
    C: gl.constexpr = config if CONSTANT_FIELDS else config._replace()
    p_q, p_out, p_lse = p_rows
    p_table, p_cu, p_seqlens, p_draft = p_batch[:4]
    batch = Batch(p_cu, p_seqlens, rows, num_sequences, capacity, left, right)
    sizes = Sizes(rows, num_blocks, s_lse_head, s_lse_token, s_table, left, right)
    pointers = Pointers(p_q, p_per_head[0], p_per_head[1], p_scales, p_out, p_lse, p_parts, p_draft)
    scores, numbers = numbers
    d_k_cached = (d_k_cache, d_k_cache_tail)
    d_v_cached = (d_v_cache, d_v_cache_tail)
    d_k_new = (d_k, d_k_tail)
    d_v_new = (d_v, d_v_tail)

    q_dtype: gl.constexpr = p_q.dtype.element_ty
    # 8-bit keys fit into float16's range; new keys and values, where these come too, do not all.
    dtype: gl.constexpr = gl.float16 if C.IS_FP8 and not C.NEW_KV else q_dtype
    k_dtype: gl.constexpr = d_k_cache.dtype if C.K_FP8 else dtype
    if C.K_UNITS:
        k = ring(k_dtype, (64,), C.K_UNITS, C.BLOCK_N, C.CONSUMERS, C)
    else:
        k = ring(k_dtype, C.K_TILES, C.STAGES, C.BLOCK_N, C.CONSUMERS, C)
    v = ring(dtype, C.V_TILES, C.V_STAGES, C.V_KEYS, C.CONSUMERS, C)
    q_tiles = query_tiles(k_dtype, C.K_TILES, C)
    # Outputs take the memory of q where they are of its form, and no other consumer's.
    out_tiles = None
    if C.GROUPS == C.CONSUMERS and begin_with(C.K_TILES, C.V_TILES) and not C.K_FP8:
        out_tiles = as_dtype(q_tiles, q_dtype)
    OF_ROWS: gl.constexpr = (3 if C.DRAFT else 1) * C.GROUPS
    positions = gl.allocate_shared_memory(gl.int32, [OF_ROWS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    CONVERTED: gl.constexpr = C.IS_FP8 and not C.WIDENED
    table = table_of(C.CONSUMERS + (3 if C.K_FP8 else (4 if CONVERTED else 2)))
    # One consumer has no use for such a barrier, and Triton would give the memory of what nobody uses to what it
    # hands to the partitions: see kernel_reference.testing.ptx.
    meeting = v.empty
    if C.CONSUMERS > 1:
        meeting = meeting_barrier(C)
    if C.K_FP8:
        v_fp8 = ring(d_v_cache.dtype, C.V_TILES, C.STAGES, C.BLOCK_N, 1, C)
    elif CONVERTED:
        # 8-bit tiles arrive in rings of their own, from which converters fill the 16-bit ones.
        k_fp8 = ring(d_k_cache.dtype, C.K_TILES, C.STAGES, C.BLOCK_N, 1, C)
        v_fp8 = ring(d_v_cache.dtype, C.V_TILES, C.STAGES, C.BLOCK_N, 1, C)
    scales = None
    if C.K_TOKENS or C.V_TOKENS:
        scales = scales_of_tokens(C)
    tokens = Tokens(p_scales[0], p_scales[1], numbers.strides, p_table, sizes, scales)
    # The rings as producers fill them with cached keys and values.
    k_cached, v_cached = k, v
    packed = None
    if C.PACKED:
        k_cached = packed_ring(k, C.D, False, C)
        v_cached = packed_ring(v, C.DV, True, C)
        packed = (k_cached, v_cached)
    if is_gathered(C):
        d_k_cached = pool_of(p_batch[4], numbers.strides.k_cache, k, C.K_TILES)
        d_v_cached = pool_of(p_batch[5], numbers.strides.v_cache, v, C.V_TILES)
    fence_async_shared()

    memory = Memory(q_tiles, out_tiles, as_strips(v, C.V_TILES, STRIP), positions, meeting, scales, packed)
    second = rows * 0 + (C.GROUPS - 1)
    # The roles must stand literally in each call. Registers a thread: an SM has 65536, and a warp that only issues
    # loads needs few.
    if CONVERTED:
        # Partitions of two warps may give registers back, never ask for more than the 80 that workers wait with:
        # asking is for four warps together, and they would do it two by two.
        BY_TOKEN: gl.constexpr = C.K_TOKENS or C.V_TOKENS
        # With 24, the scheduler's warp spills what it looks up.
        MORE: gl.constexpr = has_light_consumers(C)
        CONVERTING: gl.constexpr = 72 if C.NEW_KV else (56 if BY_TOKEN else (40 if MORE else 24))
        ATTENDING: gl.constexpr = 184 if C.NEW_KV else (216 if BY_TOKEN or MORE else 232)
        FEW: gl.constexpr = 40 if MORE else 24
        if C.K_FP8 and C.CONSUMERS == 1:
            gl.warp_specialize([
                (consume, (pointers, memory, k, v, 0, True, table, scores, numbers, sizes, C)),
                (convert_values, (v_fp8, v, table, batch, C)),
                (load_keys, (d_k_cached, d_k_new, p_table, k, k, table, sizes, batch, C)),
                (load_values, (d_v_cached, d_v_new, p_table, v_fp8, v, table, sizes, batch, C)),
                (schedule, (table, num_splits, batch, p_parts[2], C)),
            ], [4, 1, 1, 1], [80, 80, 80, 80])  # fmt: skip
        elif C.K_FP8:
            gl.warp_specialize([
                (consume, (pointers, memory, k, v, 0, True, table, scores, numbers, sizes, C)),
                (consume, (pointers, memory, k, v, second, False, table, scores, numbers, sizes, C)),
                (convert_values, (v_fp8, v, table, batch, C)),
                (load_keys, (d_k_cached, d_k_new, p_table, k, k, table, sizes, batch, C)),
                (load_values, (d_v_cached, d_v_new, p_table, v_fp8, v, table, sizes, batch, C)),
                (schedule, (table, num_splits, batch, p_parts[2], C)),
            ], [4, 4, 1, 1, 1], [ATTENDING, CONVERTING, FEW, FEW, FEW])  # fmt: skip
        elif C.CONSUMERS == 1:
            gl.warp_specialize([
                (consume, (pointers, memory, k, v, 0, True, table, scores, numbers, sizes, C)),
                (convert_keys, (k_fp8, k, table, batch, tokens, C)),
                (convert_values, (v_fp8, v, table, batch, C)),
                (load_keys, (d_k_cached, d_k_new, p_table, k_fp8, k, table, sizes, batch, C)),
                (load_values, (d_v_cached, d_v_new, p_table, v_fp8, v, table, sizes, batch, C)),
                (schedule, (table, num_splits, batch, p_parts[2], C)),
            ], [2, 2, 1, 1, 1], [80, 80, 80, 80, 80] if MORE else [CONVERTING, CONVERTING, 24, 24, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (consume, (pointers, memory, k, v, 0, True, table, scores, numbers, sizes, C)),
                (consume, (pointers, memory, k, v, second, False, table, scores, numbers, sizes, C)),
                (convert_keys, (k_fp8, k, table, batch, tokens, C)),
                (convert_values, (v_fp8, v, table, batch, C)),
                (load_keys, (d_k_cached, d_k_new, p_table, k_fp8, k, table, sizes, batch, C)),
                (load_values, (d_v_cached, d_v_new, p_table, v_fp8, v, table, sizes, batch, C)),
                (schedule, (table, num_splits, batch, p_parts[2], C)),
            ], [4, 2, 2, 1, 1, 1], [ATTENDING, CONVERTING, CONVERTING, FEW, FEW, FEW])  # fmt: skip
    elif C.CONSUMERS == 1:
        # Two programs an SM with large heads have no more than 256 for a consumer and a warp that loads.
        FEWER: gl.constexpr = 40 if C.LOADING == 40 else 80
        gl.warp_specialize([
            (consume, (pointers, memory, k, v, 0, True, table, scores, numbers, sizes, C)),
            (load_keys, (d_k_cached, d_k_new, p_table, k_cached, k, table, sizes, batch, C)),
            (load_values, (d_v_cached, d_v_new, p_table, v_cached, v, table, sizes, batch, C)),
            (schedule, (table, num_splits, batch, p_parts[2], C)),
        ], [1, 1, 1], [FEWER, FEWER, FEWER])  # fmt: skip
    else:
        # What these leave, the first consumer has. With fewer than 56 the scheduler's warp spills what it looks up, but
        # for tiles that are whole.
        LOADING: gl.constexpr = C.LOADING if C.GROUPS == C.CONSUMERS else 40
        SECOND: gl.constexpr = 252 - LOADING // 8 * 4
        gl.warp_specialize([
            (consume, (pointers, memory, k, v, 0, True, table, scores, numbers, sizes, C)),
            (consume, (pointers, memory, k, v, second, False, table, scores, numbers, sizes, C)),
            (load_keys, (d_k_cached, d_k_new, p_table, k_cached, k, table, sizes, batch, C)),
            (load_values, (d_v_cached, d_v_new, p_table, v_cached, v, table, sizes, batch, C)),
            (schedule, (table, num_splits, batch, p_parts[2], C)),
        ], [4, 1, 1, 1], [SECOND, LOADING, LOADING, LOADING])  # fmt: skip
