"""Device code: the projection split and its inverse.

Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a block of values. A head group is one QK head and the R
value heads that belong to it: the unit in which the interleaved layout is written.

A launch gives the constants and strides in NamedTuples, and pointers one by one; kernels group these.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sizes(NamedTuple):
    """Constants of the projections: heads and head sizes, and the blocks that hold those of a group, or of all b."""

    NQK: int
    R: int
    HQ: int
    HV: int
    INTERLEAVED: bool
    BLOCK_Q: int
    BLOCK_V: int
    BLOCK_H: int


class Strides(NamedTuple):
    """Row strides of projections and parts and, if there is a convolution, the stride between slots of its state."""

    qkvz: Any
    ba: Any
    slot: Any
    qkv: Any
    z: Any
    b: Any
    a: Any


class Rows(NamedTuple):
    """A tensor of packed rows: its address and row stride."""

    p: Any
    stride: Any


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Programmatic dependent launch: this kernel may start before the one ahead ends, and waits here before any access.

    It does not trigger the next kernel's early start in turn: some are launched dependent and never wait.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def columns_of_group(i_g, sizes: tl.constexpr):
    """First columns of group i_g's q, k, v and z in a row of mixed_qkvz."""
    HQ: tl.constexpr = sizes.HQ
    V: tl.constexpr = sizes.R * sizes.HV
    if sizes.INTERLEAVED:
        q = i_g * (2 * HQ + 2 * V)
        k = q + HQ
        v = q + 2 * HQ
        z = v + V
    else:
        q = i_g * HQ
        k = sizes.NQK * HQ + q
        v = 2 * sizes.NQK * HQ + i_g * V
        z = v + sizes.NQK * V
    return q, k, v, z


@triton.jit
def columns_of_b_and_a(o_h, sizes: tl.constexpr):
    """Columns in a row of mixed_ba that hold b and a of the value heads o_h."""
    R: tl.constexpr = sizes.R
    if sizes.INTERLEAVED:
        b = o_h // R * (2 * R) + o_h % R
        a = b + R
    else:
        b = o_h
        a = sizes.NQK * R + o_h
    return b, a


@triton.jit
def move_group(qkvz, qkv, z, row, end, i_g, sizes: tl.constexpr, MERGE: tl.constexpr, ROWS: tl.constexpr):
    """Copy ROWS rows from `row` on, short of `end`, of one head group: mixed_qkvz to (mixed_qkv, z), or back."""
    NQK: tl.constexpr = sizes.NQK
    HQ: tl.constexpr = sizes.HQ
    V: tl.constexpr = sizes.R * sizes.HV
    o_row = row + tl.arange(0, ROWS).to(tl.int64)
    m_row = o_row < end
    c_q, c_k, c_v, c_z = columns_of_group(i_g, sizes)
    o_q = tl.arange(0, sizes.BLOCK_Q)[None, :]
    o_v = tl.arange(0, sizes.BLOCK_V)[None, :]
    m_q = m_row[:, None] & (o_q < HQ)
    m_v = m_row[:, None] & (o_v < V)
    p_fused = qkvz.p + o_row[:, None] * qkvz.stride
    p_mixed = qkv.p + o_row[:, None] * qkv.stride
    p_fused_q, p_fused_k = p_fused + c_q + o_q, p_fused + c_k + o_q
    p_fused_v, p_fused_z = p_fused + c_v + o_v, p_fused + c_z + o_v
    p_part_q = p_mixed + i_g * HQ + o_q
    p_part_k = p_mixed + (NQK + i_g) * HQ + o_q
    p_part_v = p_mixed + 2 * NQK * HQ + i_g * V + o_v
    p_part_z = z.p + o_row[:, None] * z.stride + i_g * V + o_v
    # All loads before all stores: the compiler may not move a load across a store that might alias it.
    if MERGE:
        b_q, b_k = tl.load(p_part_q, mask=m_q), tl.load(p_part_k, mask=m_q)
        b_v, b_z = tl.load(p_part_v, mask=m_v), tl.load(p_part_z, mask=m_v)
        tl.store(p_fused_q, b_q, mask=m_q)
        tl.store(p_fused_k, b_k, mask=m_q)
        tl.store(p_fused_v, b_v, mask=m_v)
        tl.store(p_fused_z, b_z, mask=m_v)
    else:
        b_q, b_k = tl.load(p_fused_q, mask=m_q), tl.load(p_fused_k, mask=m_q)
        b_v, b_z = tl.load(p_fused_v, mask=m_v), tl.load(p_fused_z, mask=m_v)
        tl.store(p_part_q, b_q, mask=m_q)
        tl.store(p_part_k, b_k, mask=m_q)
        tl.store(p_part_v, b_v, mask=m_v)
        tl.store(p_part_z, b_z, mask=m_v)


@triton.jit
def move_b_and_a(ba, b, a, o_row, m_row, m_live, sizes: tl.constexpr, MERGE: tl.constexpr):
    """Copy the rows o_row of all heads' b and a: mixed_ba to (b, a), or back. Rows that are not live become 0."""
    o_h = tl.arange(0, sizes.BLOCK_H)[None, :]
    c_b, c_a = columns_of_b_and_a(o_h, sizes)
    m = m_row[:, None] & (o_h < sizes.NQK * sizes.R)
    m_kept = m_live[:, None]
    p_fused = ba.p + o_row[:, None] * ba.stride
    p_fused_b, p_fused_a = p_fused + c_b, p_fused + c_a
    p_part_b = b.p + o_row[:, None] * b.stride + o_h
    p_part_a = a.p + o_row[:, None] * a.stride + o_h
    if MERGE:
        b_b, b_a = tl.load(p_part_b, mask=m), tl.load(p_part_a, mask=m)
        tl.store(p_fused_b, tl.where(m_kept, b_b, 0), mask=m)
        tl.store(p_fused_a, tl.where(m_kept, b_a, 0), mask=m)
    else:
        b_b, b_a = tl.load(p_fused_b, mask=m), tl.load(p_fused_a, mask=m)
        tl.store(p_part_b, tl.where(m_kept, b_b, 0), mask=m)
        tl.store(p_part_a, tl.where(m_kept, b_a, 0), mask=m)


@triton.jit(do_not_specialize=["rows"])
def split_by_group(
    p_qkvz, p_ba, p_qkv, p_z, p_b, p_a, rows, strides, sizes: tl.constexpr, MERGE: tl.constexpr, ROWS: tl.constexpr,
    ROWS_BA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program copies ROWS rows of one head group, or ROWS_BA rows of b and a. Neighbouring programs share rows."""
    wait_for_inputs(DEPENDENT)
    i_p = tl.program_id(0)
    programs_ba = tl.cdiv(rows, ROWS_BA).to(tl.int32)
    if i_p < programs_ba:
        o_row_ba = i_p.to(tl.int64) * ROWS_BA + tl.arange(0, ROWS_BA)
        m_row_ba = o_row_ba < rows
        ba, b, a = Rows(p_ba, strides.ba), Rows(p_b, strides.b), Rows(p_a, strides.a)
        move_b_and_a(ba, b, a, o_row_ba, m_row_ba, m_row_ba, sizes, MERGE)
    else:
        i_p -= programs_ba
        row = (i_p // sizes.NQK).to(tl.int64) * ROWS
        qkvz, qkv, z = Rows(p_qkvz, strides.qkvz), Rows(p_qkv, strides.qkv), Rows(p_z, strides.z)
        move_group(qkvz, qkv, z, row, rows, i_p % sizes.NQK, sizes, MERGE, ROWS)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def split_by_run(
    p_qkvz, p_ba, p_qkv, p_z, p_b, p_a, rows, rows_per_program, strides, sizes: tl.constexpr, MERGE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A program walks a contiguous run of rows, ROWS at a time, all groups of each: one program a core."""
    qkvz, qkv, z = Rows(p_qkvz, strides.qkvz), Rows(p_qkv, strides.qkv), Rows(p_z, strides.z)
    ba, b, a = Rows(p_ba, strides.ba), Rows(p_b, strides.b), Rows(p_a, strides.a)
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, rows)
    for row in range(first, end, ROWS):
        o_row = row + tl.arange(0, ROWS).to(tl.int64)
        m_row = o_row < end
        for i_g in range(sizes.NQK):
            move_group(qkvz, qkv, z, row, end, i_g, sizes, MERGE, ROWS)
        move_b_and_a(ba, b, a, o_row, m_row, m_row, sizes, MERGE)


@triton.jit
def load_weights(p_weight, o_c, m_c, S_CHANNEL: tl.constexpr, S_TAP: tl.constexpr, WIDTH: tl.constexpr):
    """The weights of the channels o_c, oldest tap first: [BLOCK, 4], with 0 before the first of WIDTH taps.

    All taps in one tile, because a channel's taps lie together: one 8-byte load rather than four of 2 bytes.
    """
    o_i = tl.arange(0, 4)[None, :]
    p_w = p_weight + o_c.to(tl.int64)[:, None] * S_CHANNEL + (WIDTH - 4 + o_i) * S_TAP
    return tl.load(p_w, mask=m_c[:, None] & (o_i >= 4 - WIDTH), other=0.0)
