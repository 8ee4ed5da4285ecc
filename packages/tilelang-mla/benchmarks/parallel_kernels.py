"""The kernel of a peer's scheme, in parallel_peers.py, and copies to a peer's memory."""

import triton
import triton.language as tl


@triton.jit
def scale_by_lse(p_out, p_lse, p_scaled, rank, rows, heads, DIM: tl.constexpr, WORLD: tl.constexpr):
    """scaled [H, N, D] = out [N, H, D] exp(lse[rank] - log sum exp lse), lse [WORLD, N, H] of natural logarithms."""
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    o_rank, o_dim = tl.arange(0, WORLD), tl.arange(0, DIM)
    place = i_row * heads + i_head
    b_lse = tl.load(p_lse + o_rank * rows * heads + place)
    # FlashMLA writes +inf where a rank has no key.
    b_lse = tl.where(b_lse == float("inf"), float("-inf"), b_lse)
    highest = tl.max(b_lse, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(b_lse - highest)
    share = tl.sum(tl.where(o_rank == rank, weights, 0.0), 0) / tl.sum(weights, 0)
    b_out = tl.load(p_out + place * DIM + o_dim).to(tl.float32)
    b_scaled = tl.where(share > 0, b_out * share, 0.0)
    tl.store(p_scaled + (i_head * rows + i_row) * DIM + o_dim, b_scaled.to(p_scaled.dtype.element_ty))


@triton.jit
def copy_rows(p_x, there, rows, DIM: tl.constexpr, ROWS: tl.constexpr):
    """[rows, DIM] at the address ``there`` = x; by as many programs as one likes, ROWS a tile."""
    o_dim = tl.arange(0, DIM)
    p_there = tl.multiple_of(tl.cast(there, p_x.dtype), 16)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = tile * ROWS + tl.arange(0, ROWS)
        place, mask = o_row[:, None] * DIM + o_dim[None, :], (o_row < rows)[:, None]
        tl.store(p_there + place, tl.load(p_x + place, mask=mask), mask=mask)


@triton.jit
def copy_rows_by_tma(x, there, rows, ROWS: tl.constexpr):
    """The same of tensor descriptors."""
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        there.store([tile * ROWS, 0], x.load([tile * ROWS, 0]))
