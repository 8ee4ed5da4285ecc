"""An 8-bit cache's keys and values of each sequence, widened once to pages of 16 bits, before attention reads them.

In the kernel for sm_90 each tile of 128 rows widens all keys that it sees anew. Where a sequence has many such tiles it
is quicker to widen them once, although memory is read and written for it.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class WidenConfig(NamedTuple):
    """Compile-time values: BLOCK_D and BLOCK_DV are the next powers of two, WIDENED_PAGE is in tokens, as PAGE is."""

    D: int
    BLOCK_D: int
    DV: int
    BLOCK_DV: int
    PAGE: int
    WIDENED_PAGE: int
    HEADS_KV: int


class Strides(NamedTuple):
    """Of both caches by (page, token, head, element)."""

    k: tuple[int, ...]
    v: tuple[int, ...]


@triton.jit
def widen_rows(p_from, p_to, block, token, there, i_head, i_page, s, SIZE: tl.constexpr, BLOCK: tl.constexpr, C):
    """A page's rows of one head; zeros where none is."""
    o_d = tl.arange(0, BLOCK)
    p_rows = p_from + block * s[0] + token.to(tl.int64) * s[1] + i_head.to(tl.int64) * s[2]
    m_column = (o_d < SIZE)[None, :]
    b_rows = tl.load(p_rows[:, None] + o_d.to(tl.int64)[None, :] * s[3], mask=there[:, None] & m_column, other=0.0)
    o_row = tl.arange(0, C.WIDENED_PAGE)
    p_page = p_to + (i_page * C.HEADS_KV + i_head) * (C.WIDENED_PAGE * SIZE)
    tl.store(p_page + o_row[:, None] * SIZE + o_d[None, :], b_rows.to(tl.float16), mask=m_column)


@triton.jit(do_not_specialize=["num_blocks", "capacity", "s_table", "pages"])
def widen(
    p_k, p_v, p_table, p_seqlens, p_k_out, p_v_out, p_table_out,
    num_blocks, capacity, s_table, pages, strides, C: tl.constexpr,
):  # fmt: skip
    """A page of one head: [sequences * pages, heads, WIDENED_PAGE, D], and the table that names these pages."""
    i_head = tl.program_id(0) % C.HEADS_KV
    i_block = tl.program_id(0) // C.HEADS_KV
    i_page = i_block % pages
    i_n = i_block // pages
    i_out = i_block.to(tl.int64)
    length = tl.load(p_seqlens + i_n)
    if i_head == 0:
        tl.store(p_table_out + i_out, i_out.to(tl.int32))
    if (i_page * C.WIDENED_PAGE < length) & (length <= capacity):
        o_key = i_page * C.WIDENED_PAGE + tl.arange(0, C.WIDENED_PAGE)
        p_row = p_table + i_n.to(tl.int64) * s_table
        block = tl.load(p_row + o_key // C.PAGE, mask=o_key < length, other=-1).to(tl.int64)
        there = (block >= 0) & (block < num_blocks)
        token = o_key % C.PAGE
        widen_rows(p_k, p_k_out, block, token, there, i_head, i_out, strides.k, C.D, C.BLOCK_D, C)
        widen_rows(p_v, p_v_out, block, token, there, i_head, i_out, strides.v, C.DV, C.BLOCK_DV, C)
