"""A kernel for test_gluon.py: c = a b, tile by tile along the inner dimension, with one place for each operand."""

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

ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0]))


def descriptor_layout(block):
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)


@gluon.jit
def bring(d_a, d_b, a_smem, b_smem, arrived, free, steps, BLOCK_K: gl.constexpr, FAULT: gl.constexpr):
    for i in range(steps):
        mbarrier.wait(free, (i & 1) ^ 1)
        nbytes: gl.constexpr = d_a.block_type.nbytes + d_b.block_type.nbytes
        mbarrier.expect(arrived, nbytes // 2 if FAULT == "half the bytes" else nbytes)
        tma.async_copy_global_to_shared(d_a, [0, i * BLOCK_K], arrived, a_smem)
        tma.async_copy_global_to_shared(d_b, [i * BLOCK_K, 0], arrived, b_smem)


@gluon.jit
def consume(p_c, a_smem, b_smem, arrived, free, steps, s_c, M: gl.constexpr, N: gl.constexpr, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc = gl.zeros([M, N], gl.float32, layout)
    for i in range(steps):
        mbarrier.wait(arrived, i & 1)
        product = warpgroup_mma(a_smem, b_smem, acc, is_async=True)
        if FAULT == "freed too early":
            mbarrier.arrive(free)
            if i + 1 < steps:
                mbarrier.wait(arrived, (i + 1) & 1)
        if FAULT == "read too early":
            acc = warpgroup_mma_wait(1, deps=[product])
        acc = warpgroup_mma_wait(0, deps=[product])
        if FAULT not in ("freed too early", "freed twice", "never freed"):
            mbarrier.arrive(free)
        if FAULT == "freed twice":
            mbarrier.arrive(free, count=2)
    o_m = gl.arange(0, M, gl.SliceLayout(1, layout))
    o_n = gl.arange(0, N, gl.SliceLayout(0, layout))
    if FAULT == "stored too far":
        o_n += N
    gl.store(p_c + o_m[:, None] * s_c[0] + o_n[None, :] * s_c[1], acc)


@gluon.jit
def matmul(d_a, d_b, p_c, steps, s_c, M: gl.constexpr, N: gl.constexpr, BLOCK_K: gl.constexpr, FAULT: gl.constexpr):
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [M, BLOCK_K], d_a.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K, N], d_b.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (p_c, a_smem, b_smem, barriers.index(0), barriers.index(1), steps, s_c, M, N, FAULT)),
        (bring, (d_a, d_b, a_smem, b_smem, barriers.index(0), barriers.index(1), steps, BLOCK_K, FAULT)),
    ], [1], [24])  # fmt: skip


@gluon.jit
def quotients(p_x, p_out, by):
    """C's quotient and remainder of integers."""
    x = gl.load(p_x)
    gl.store(p_out, x // by)
    gl.store(p_out + 1, x % by)


@gluon.jit
def copy_in_group(tensors):
    """Of tensors in a group with names, one of which is not there."""
    if tensors.absent is None:
        gl.store(tensors.out, gl.load(tensors.pair[0]))


@gluon.jit
def in_turns(p_out, total):
    """Of a number of places each program fills its own, as far as it is told that there are any."""
    gl.assume(total > 0)
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        gl.store(p_out + i, gl.program_id(0))


@gluon.jit
def in_pieces(p_x, p_y, ROWS: gl.constexpr):
    """Rows that are written 16 at a time and 64 columns together, read as one tile."""
    pieces_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    pieces = gl.allocate_shared_memory(gl.bfloat16, [2 * ROWS // 16, 16, 64], pieces_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = gl.arange(0, 16, gl.SliceLayout(1, layout))
    o_column = gl.arange(0, 64, gl.SliceLayout(0, layout))
    for i in gl.static_range(ROWS // 16):
        for j in gl.static_range(2):
            p_piece = p_x + (i * 16 + o_row)[:, None] * 128 + (j * 64 + o_column)[None, :]
            pieces.index(j * (ROWS // 16) + i).store(gl.load(p_piece))
    whole = pieces._reinterpret(gl.bfloat16, [1, ROWS, 128], pieces_layout)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_column = gl.arange(0, 128, gl.SliceLayout(0, layout))
    gl.store(p_y + o_row[:, None] * 128 + o_column[None, :], whole.index(0).load(layout))


@gluon.jit
def gather(p_x, smem, arrived, FAULT: gl.constexpr):
    """Rows 3, 1 and 0 of four, the last one masked."""
    o_row = gl.arange(0, 4, gl.SliceLayout(1, ROWS))
    row = gl.where(o_row == 0, 3, gl.where(o_row == 1, 1, 0))
    o_column = gl.arange(0, 8, gl.SliceLayout(0, ROWS))
    mask = (o_row < 3)[:, None] & (o_column < 8)[None, :]
    async_copy.async_copy_global_to_shared(smem, p_x + (row * 8)[:, None] + o_column[None, :], mask)
    if FAULT != "not awaited":
        async_copy.mbarrier_arrive(arrived)
    mbarrier.arrive(arrived, count=1)


@gluon.jit
def store_gathered(p_out, smem, arrived):
    mbarrier.wait(arrived, 0)
    o_element = (
        gl.arange(0, 4, gl.SliceLayout(1, ROWS))[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, ROWS))[None, :]
    )
    gl.store(p_out + o_element, smem.load(ROWS))


@gluon.jit
def gathered(p_x, p_out, FAULT: gl.constexpr):
    smem = gl.allocate_shared_memory(gl.bfloat16, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    arrived = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived.index(0), count=1)
    gl.warp_specialize([
        (store_gathered, (p_out, smem, arrived.index(0))), (gather, (p_x, smem, arrived.index(0), FAULT))
    ], [1], [24])  # fmt: skip
