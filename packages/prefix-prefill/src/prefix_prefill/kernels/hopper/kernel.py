"""The sm_90 kernel: its programs' setup, shared memory and warps; the package's docstring shows the way."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from prefix_prefill.kernels.batch import Batch
from prefix_prefill.kernels.groups import Numbers, Scores
from prefix_prefill.kernels.hopper.config import ROWS, Config, Pointers, Sizes, Strides
from prefix_prefill.kernels.hopper.consumers import consume, consume_first
from prefix_prefill.kernels.hopper.items import table_of
from prefix_prefill.kernels.hopper.memory import (
    Memory,
    Ring,
    as_fp8_tiles,
    as_strips,
    as_tiles,
    barriers,
    edge_barrier,
    fp8_boxes,
    tile_boxes,
)
from prefix_prefill.kernels.hopper.producers import convert, load

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


@gluon.jit(
    do_not_specialize=[
        "rows", "num_sequences", "num_blocks", "capacity", "s_table", "s_lse_head", "s_lse_token", "num_splits", "left",
        "right",
    ]
)  # fmt: skip
def attend(
    d_k_cache, d_v_cache, d_k, d_v,
    p_q, p_table, p_lengths, p_per_head, p_scales, p_out, p_lse, p_parts,
    rows, num_sequences, num_blocks, capacity, s_table, s_lse_head, s_lse_token, num_splits, left, right,
    scores, numbers, config: gl.constexpr,
):  # fmt: skip
    """``portable.attend`` with the caches as TMA descriptors of [blocks, kv heads, tokens, D], and, with NEW_KV, new
    keys and values as ones of [1, kv heads, rows, D]; in boxes of BOX rows and COLUMNS or WIDTH columns.

    ``p_lengths`` are cu_seqlens_q and seqlens_k; ``p_per_head`` slopes and sinks; ``p_scales`` k_scale, v_scale and
    out_scale. An 8-bit cache is scaled by numbers, by tensors with one scale for all, or with one for each kv head.
    """
    C: gl.constexpr = config._replace()
    batch = Batch(p_lengths[0], p_lengths[1], rows, num_sequences, capacity, left, right)
    sizes = Sizes(rows, num_blocks, s_lse_head, s_lse_token, s_table, left, right)
    pointers = Pointers(p_q, p_per_head[0], p_per_head[1], p_scales, p_out, p_lse, p_parts)

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
    table = table_of(C.CONSUMERS + (4 if C.IS_FP8 else 2))
    # One consumer has no use for such a barrier, and Triton would give the memory of what nobody uses to what it
    # hands to the partitions: see kernel_reference.testing.ptx.
    zeroed = v.empty
    if C.CONSUMERS > 1:
        zeroed = edge_barrier(C)
    if C.IS_FP8:
        # 8-bit tiles arrive in rings of their own, from which converters fill the 16-bit ones.
        k_fp8_boxes = fp8_boxes(d_k_cache, C)
        v_fp8_boxes = fp8_boxes(d_v_cache, C)
        k_fp8, v_fp8 = rings(k_fp8_boxes, v_fp8_boxes, as_fp8_tiles(k_fp8_boxes, C), as_fp8_tiles(v_fp8_boxes, C), 1, C)
    fence_async_shared()

    memory = Memory(q_smem, out_smem, as_strips(v_boxes, C), positions, zeroed)
    second = rows * 0 + 1
    # The roles must stand literally in each call. Registers a thread: an SM has 65536, and a warp that only issues
    # loads needs few.
    if C.IS_FP8:
        # Partitions of two warps may give registers back, never ask for more than the 80 that workers wait with:
        # asking is for four warps together, and they would do it two by two.
        CONVERTING: gl.constexpr = 72 if C.NEW_KV else 24
        ATTENDING: gl.constexpr = 184 if C.NEW_KV else 232
        if C.CONSUMERS == 1:
            gl.warp_specialize([
                (consume_first, (pointers, memory, k, v, table, num_splits, batch, scores, numbers, sizes, C)),
                (convert, (k_fp8, k, table, batch, C)),
                (convert, (v_fp8, v, table, batch, C)),
                (load, (d_k_cache, d_k, p_table, k_fp8, k, table, sizes, batch, C)),
                (load, (d_v_cache, d_v, p_table, v_fp8, v, table, sizes, batch, C)),
            ], [2, 2, 1, 1], [CONVERTING, CONVERTING, 24, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (consume_first, (pointers, memory, k, v, table, num_splits, batch, scores, numbers, sizes, C)),
                (consume, (pointers, memory, k, v, second, table, scores, numbers, sizes, C)),
                (convert, (k_fp8, k, table, batch, C)),
                (convert, (v_fp8, v, table, batch, C)),
                (load, (d_k_cache, d_k, p_table, k_fp8, k, table, sizes, batch, C)),
                (load, (d_v_cache, d_v, p_table, v_fp8, v, table, sizes, batch, C)),
            ], [4, 2, 2, 1, 1], [ATTENDING, CONVERTING, CONVERTING, 24, 24])  # fmt: skip
    elif C.CONSUMERS == 1:
        gl.warp_specialize([
            (consume_first, (pointers, memory, k, v, table, num_splits, batch, scores, numbers, sizes, C)),
            (load, (d_k_cache, d_k, p_table, k, k, table, sizes, batch, C)),
            (load, (d_v_cache, d_v, p_table, v, v, table, sizes, batch, C)),
        ], [1, 1], [24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_first, (pointers, memory, k, v, table, num_splits, batch, scores, numbers, sizes, C)),
            (consume, (pointers, memory, k, v, second, table, scores, numbers, sizes, C)),
            (load, (d_k_cache, d_k, p_table, k, k, table, sizes, batch, C)),
            (load, (d_v_cache, d_v, p_table, v, v, table, sizes, batch, C)),
        ], [4, 1, 1], [240, 32, 32])  # fmt: skip
