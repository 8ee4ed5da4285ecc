"""The ring of stages through which chunks of q, k and v come to the kernel for sm_90."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


class Ring(NamedTuple):
    """A ring buffer of chunks in shared memory: q, k and v of a stage arrive on full barriers of their own.

    On one barrier Triton would have all warps meet between each two of the loads.
    """

    q: Any
    k: Any
    v: Any
    full_q: Any
    full_k: Any
    full_v: Any


class Work(NamedTuple):
    """A program's work item: what TMA coordinates are made of, and the chunks that it takes.

    Chunk i begins at row start + i * stride. own: the last so many go through the ring before them all, without q, for
    the state that the segment passes on (see hopper_chain.py). lead: the first so many are other programs', and come
    without q, for the state alone (see hopper_lead.py).
    """

    i_box: Any
    i_h_qk: Any
    i_h_v: Any
    i_h: Any
    column: Any
    start: Any
    chunks: Any
    own: Any = 0
    lead: Any = 0


@gluon.constexpr_function
def pieces_of(sizes):
    """Pieces of BLOCK_D rows that a state is held in."""
    return (sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D


@gluon.constexpr_function
def width_of(sizes, p):
    """Rows of piece p of a state: of the last, where there are several, no more than those that are there take."""
    rest = sizes.D - p * sizes.BLOCK_D
    is_less = p > 0 and rest <= sizes.BLOCK_D // 2 and sizes.PRECISION is None
    return max(16, 1 << (rest - 1).bit_length()) if is_less else sizes.BLOCK_D


@gluon.constexpr_function
def is_copied(sizes):
    """Whether lanes copy the last piece of q and k, whose rows are so short that TMA would bound a program."""
    return sizes.D > sizes.BLOCK_D and 0 < sizes.D % sizes.BLOCK_D < sizes.BLOCK_D // 2


@gluon.constexpr_function
def piece_layout(sizes, p):
    """Registers of piece p of a state's tile [BLOCK_E, its rows], an accumulator.

    Each warp has 16 columns; where there are more warps than that takes, two share them.
    """
    rest = sizes.D - p * sizes.BLOCK_D
    is_less = p > 0 and rest <= sizes.BLOCK_D // 2 and sizes.PRECISION is None
    width = max(16, 1 << (rest - 1).bit_length()) if is_less else sizes.BLOCK_D
    along = min(sizes.WARPS, sizes.BLOCK_E // 16)
    return gl.NVMMADistributedLayout([3, 0], [along, sizes.WARPS // along], [16, width * along // sizes.WARPS, 16])


@gluon.constexpr_function
def state_layout(sizes):
    """Registers of the first piece."""
    along = min(sizes.WARPS, sizes.BLOCK_E // 16)
    columns = sizes.BLOCK_D * along // sizes.WARPS
    return gl.NVMMADistributedLayout([3, 0], [along, sizes.WARPS // along], [16, columns, 16])


@gluon.jit
def tile_of(tiles, stage, sizes: gl.constexpr):
    """A stage's q or k, or a piece of it."""
    return tiles.index(stage).reshape([sizes.CHUNK, sizes.BLOCK_D])


@gluon.jit
def factor_of(tiles, stage, p: gl.constexpr, sizes: gl.constexpr):
    """What products take of piece p of a stage's q or k: of a box of more columns the first ones."""
    WIDTH: gl.constexpr = width_of(sizes, p)
    columns: gl.constexpr = tiles[p].shape[-1]
    tile = tiles[p].index(stage).reshape([sizes.CHUNK, columns])
    if columns > WIDTH:
        tile = tile.slice(0, WIDTH, dim=1)
    return tile


@gluon.jit
def for_piece(b_v, p: gl.constexpr, sizes: gl.constexpr):
    """Values, an operand, for the product with piece p of the keys."""
    return gl.convert_layout(b_v, gl.DotOperandLayout(0, piece_layout(sizes, p), 2))


@gluon.jit
def expect_chunk(tensors, ring, work, i, sizes: gl.constexpr):
    """Announce the bytes of chunk i of q, k and v, if there is one."""
    stage = (i + work.own) % sizes.STAGES
    pred = i < work.chunks
    d_q, d_k, d_v, _ = tensors
    mbarrier.expect(ring.full_q.index(stage), d_q.block_type.nbytes, pred=pred)
    mbarrier.expect(ring.full_k.index(stage), d_k.block_type.nbytes, pred=pred)
    mbarrier.expect(ring.full_v.index(stage), d_v.block_type.nbytes, pred=pred)


@gluon.jit
def load_chunk(tensors, ring, work, i, row, sizes: gl.constexpr):
    """Issue the TMA loads of chunk i of q, k and v, from ``row`` on, if there is one: after expect_chunk."""
    stage = (i + work.own) % sizes.STAGES
    pred = i < work.chunks
    d_q, d_k, d_v, _ = tensors
    q_place = [work.i_box, work.i_h_qk, row, 0]
    tma.async_copy_global_to_shared(d_q, q_place, ring.full_q.index(stage), ring.q.index(stage), pred=pred)
    k_place = [work.i_box, work.i_h_qk, row, 0]
    tma.async_copy_global_to_shared(d_k, k_place, ring.full_k.index(stage), ring.k.index(stage), pred=pred)
    v_place = [work.i_box, work.i_h_v, row, work.column]
    tma.async_copy_global_to_shared(d_v, v_place, ring.full_v.index(stage), ring.v.index(stage), pred=pred)


@gluon.jit
def load_own(tensors, ring, work, i, stride: gl.constexpr, sizes: gl.constexpr):
    """Issue the TMA loads of the i-th chunk of k and v for the segment's own state; behind the last load_chunk's."""
    stage = i % sizes.STAGES
    pred = i < work.own
    row = work.start + (work.chunks - work.own + i) * stride
    _, d_k, d_v, _ = tensors
    # No q is loaded, but its barrier must go round with the others.
    mbarrier.expect(ring.full_q.index(stage), 0, pred=pred)
    mbarrier.expect(ring.full_k.index(stage), d_k.block_type.nbytes, pred=pred)
    mbarrier.expect(ring.full_v.index(stage), d_v.block_type.nbytes, pred=pred)
    k_place = [work.i_box, work.i_h_qk, row, 0]
    tma.async_copy_global_to_shared(d_k, k_place, ring.full_k.index(stage), ring.k.index(stage), pred=pred)
    v_place = [work.i_box, work.i_h_v, row, work.column]
    tma.async_copy_global_to_shared(d_v, v_place, ring.full_v.index(stage), ring.v.index(stage), pred=pred)
    i_chunk = gl.where(pred, work.chunks, i - work.own)
    expect_chunk(tensors, ring, work, i_chunk, sizes)
    load_chunk(tensors, ring, work, i_chunk, work.start + (i - work.own) * stride, sizes)
